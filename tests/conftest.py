"""What holds for all tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """What was imported and collected stays: looking through it for garbage again and again is a tenth of what unit tests take."""
    gc.freeze()
