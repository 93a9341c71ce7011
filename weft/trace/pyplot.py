"""matplotlib, which only pictures need: it comes with the extra `weft[cli]`."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files. Without matplotlib a `ModuleNotFoundError` says what to install."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'weft[cli]'", name="matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
