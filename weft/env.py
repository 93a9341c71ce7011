"""The one reader of `os.environ`: every variable that changes what weft does, with its default and its meaning."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def deadline_s() -> float:
    """`WEFT_DEADLINE_S`: how long any wait for another rank may take, in seconds (default 60)."""
    text = os.environ.get("WEFT_DEADLINE_S", "60")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"WEFT_DEADLINE_S={text!r} must be a positive number: it is how many seconds a wait may take")
    return value


def setup_deadline_s() -> float:
    """`WEFT_SETUP_DEADLINE_S`: how long a wait of set-up may take where nobody compiles (default 20, or WEFT_DEADLINE_S if that is
    shorter)."""
    return min(20.0, deadline_s())


def check_calls() -> bool:
    """`WEFT_CHECK_CALLS=1`: on GPUs, compare which calls ranks make, and from which lines (`weft.symm.calls`)."""
    return os.environ.get("WEFT_CHECK_CALLS", "0") not in ("", "0")


def triton_interpreted() -> bool:
    """`TRITON_INTERPRET=1`: Triton runs kernels in Python on the CPU, one program after another."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def under_torchrun() -> bool:
    """Whether a launcher such as torchrun started this process (it sets RANK and WORLD_SIZE)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """`LOCAL_RANK` as torchrun sets it: which device of this host is ours (default 0)."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """`WORLD_SIZE` as torchrun sets it: how many ranks there are (default 1)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def quiet() -> bool:
    """`WEFT_QUIET=1`: do not warn when an operator runs without overlap."""
    return os.environ.get("WEFT_QUIET", "0") not in ("", "0")


def cache_dir() -> Path:
    """`WEFT_CACHE_DIR`: where calibrations and measured times are kept (default ~/.cache/weft)."""
    if folder := os.environ.get("WEFT_CACHE_DIR"):
        return Path(folder).expanduser()
    try:
        return Path.home() / ".cache" / "weft"
    except RuntimeError:  # a user without an account, as in some containers
        return Path(tempfile.gettempdir()) / f"weft-{os.getuid()}"
