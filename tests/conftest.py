"""Setup for all tests."""

from __future__ import annotations

import contextlib
import gc
import zlib

import pytest

with contextlib.suppress(ImportError):  # machines that run the GPU tests alone have none
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers

    # How fast a machine is, what else it does, and luck decide no test: each run draws the same examples. To look for faults
    # with other examples, pass --hypothesis-profile=random.
    settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
    settings.load_profile("repeatable")
    # Hypothesis would also draw constants from the modules that earlier tests have imported.
    providers._get_local_constants = providers.Constants


def pytest_collection_finish() -> None:
    """Search for garbage rarely, and never among imported and collected objects: it is a sixth of the time of unit tests."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", default="", metavar="I/N", help="run the I-th of N parts of the tests, whatever their order"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of one part. A test's part follows from its name, so that all workers agree."""
    if not config.getoption("--part"):
        return
    number, parts = map(int, config.getoption("--part").split("/"))
    kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == number - 1]
    config.hook.pytest_deselected(items=list(set(items).difference(kept)))
    items[:] = kept
