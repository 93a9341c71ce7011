"""Import of matplotlib, which only pictures need: it comes with the extra `weft[cli]`."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """Return `matplotlib.pyplot`, drawing into files; raise `ModuleNotFoundError` with the package to install if it is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'weft[cli]'", name="matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
