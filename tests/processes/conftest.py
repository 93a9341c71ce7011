"""One pool of eight workers for all tests of several processes. Under pytest-xdist, each of its workers has such a
pool.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from pool import hurry

from weft.launch import PRELOADED, Pool


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use a separate cache directory for measured times. Suppress the warning that small shapes do not overlap."""
    os.environ["WEFT_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["WEFT_QUIET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _imported_once() -> None:
    """Import what tests and torch.compile need in the fork server, which saves seconds in each rank."""
    of_compile = "torch._dynamo.backends.debugging", "torch._functorch.aot_autograd", "torch._inductor.pattern_matcher"
    names = "pytest", "hypothesis", "weft.nn", "torch._dynamo", *of_compile
    PRELOADED.extend(name for name in names if name not in PRELOADED)


@pytest.fixture(scope="session", autouse=True)
def _patient() -> Iterator[None]:
    """Let time limits of a minute or more end hangs only: a busy machine may be ten times slower. A test with a shorter limit
    tests the limit, or that ranks do not wait for a deadline.
    """
    run = Pool._run

    def patient(pool: Pool, function: Any, args: Any, ranks: int, timeout_s: float, return_exceptions: bool) -> Any:
        return run(
            pool, function, args, ranks, max(300.0, timeout_s) if timeout_s >= 60 else timeout_s, return_exceptions
        )

    with mock.patch.object(Pool, "_run", patient):
        yield


@pytest.fixture
def mortals() -> Iterator[Pool]:
    """Return a pool of three workers that a test may kill."""
    with Pool(3) as workers:
        yield workers


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Return the pool of workers, which stays up between tests. A test that kills ranks makes its own pool."""
    with Pool(8) as workers:
        workers.run(hurry)
        yield workers
