"""Import of matplotlib on demand, because only pictures need it. The extra `weft[cli]` installs it."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """Return `matplotlib.pyplot` with a backend that writes files. Raise `ModuleNotFoundError`, which names the package
    to install.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'weft[cli]'", name="matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
