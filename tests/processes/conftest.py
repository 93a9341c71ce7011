"""One pool of eight workers for all tests of several processes. Under pytest-xdist, each of its workers has such a
pool.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

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
