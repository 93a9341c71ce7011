"""Setup for all tests."""

from __future__ import annotations

import contextlib
import gc

with contextlib.suppress(ImportError):  # machines that run the GPU tests alone have none
    from hypothesis import HealthCheck, settings

    # How fast a machine is, and what else it does, decides no test.
    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")


def pytest_collection_finish() -> None:
    """Freeze imported and collected objects: searching them for garbage again and again is a tenth of the time of unit tests."""
    gc.freeze()
