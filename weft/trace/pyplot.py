"""Import of matplotlib on demand. Only pictures need it; the extra `weft[cli]` installs it."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """Return `matplotlib.pyplot` with a backend for files. Raise `ModuleNotFoundError` with the package to install."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'weft[cli]'", name="matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
