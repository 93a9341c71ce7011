"""The one reader of `os.environ`: every variable that changes what weft does, with its default and its meaning."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from weft.caller import warn_once

MOST_S = 1e6
"""The longest deadline, some eleven days: what all waits can count."""


def deadline_s() -> float:
    """`WEFT_DEADLINE_S`: seconds (default 60) that any wait for another rank may take."""
    return _seconds("WEFT_DEADLINE_S", "60", "a wait")


def setup_deadline_s() -> float:
    """`WEFT_SETUP_DEADLINE_S`: seconds (default 20) that a wait may take while ranks set something up together and none computes
    or compiles. `WEFT_DEADLINE_S`, where it is set, is an upper bound."""
    wanted = _seconds("WEFT_SETUP_DEADLINE_S", "20", "a wait while ranks set something up")
    return min(wanted, deadline_s()) if "WEFT_DEADLINE_S" in os.environ else wanted


def _seconds(variable: str, default: str, what: str) -> float:
    text = os.environ.get(variable, default)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST_S:
        raise ValueError(
            f"{variable}={text!r} must be a positive number, at most {MOST_S:.0f}: it limits how many seconds "
            f"{what} may take"
        )
    return value


def check_calls() -> bool:
    """`WEFT_CHECK_CALLS`: 1 (default 0): compare the values of tensors that must be equal on all ranks (bias, residual). On GPUs,
    also compare tables of counts, and the operator and line of every call. Values and tables make the host wait; the rest
    costs some microseconds a call. A difference in lines ends the group."""
    return _is_on("WEFT_CHECK_CALLS")


def triton_interpreted() -> bool:
    """`TRITON_INTERPRET`: 1 (default 0): Triton runs kernels in Python on the CPU, one program after another: for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def under_torchrun() -> bool:
    """`RANK`, with `WORLD_SIZE`: a launcher such as torchrun, which sets both, started this process; `weft bench` starts none."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """`LOCAL_RANK`: as torchrun sets it (default 0): which device of this host `weft bench` uses."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def launcher_host() -> str:
    """`MASTER_ADDR`: as torchrun sets it (default ""): of this host's addresses, the one on the way there is tried first between
    hosts."""
    return os.environ.get("MASTER_ADDR", "")


def socket_interfaces() -> tuple[str, ...]:
    """`WEFT_SOCKET_IFNAME`: network interfaces (default those of `GLOO_SOCKET_IFNAME`), with commas between their names, by which
    other hosts reach this one for control connections. The first address is listened on; without names, all addresses are."""
    names = os.environ.get("WEFT_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    return tuple(name.strip() for name in names.split(",") if name.strip())


def world_size() -> int:
    """`WORLD_SIZE`: as torchrun sets it (default 1): how many ranks `weft bench` has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def push_gradients() -> bool:
    """`WEFT_PUSH_GRADIENTS`: 1 (default 0): on GPUs of one host, a kernel stores embeddings' gradients into the memory of the
    tables' owners, in place of NCCL's all-to-all. Set it alike on all ranks. Bits are the same."""
    return _is_on("WEFT_PUSH_GRADIENTS")


def quiet() -> bool:
    """`WEFT_QUIET`: 1 (default 0): do not warn when an operator runs without overlap."""
    return _is_on("WEFT_QUIET")


def _is_on(variable: str, default: str = "0") -> bool:
    return (os.environ.get(variable, "").strip().lower() or default) not in ("0", "false", "no", "off")


def self_calibration() -> bool:
    """`WEFT_SELF_CALIBRATION`: 0 (default 1): plan by derived numbers on GPUs that have neither a machine file nor a
    calibration. By default a group's first call measures them, which takes up to 2 seconds, once for a machine."""
    return _is_on("WEFT_SELF_CALIBRATION", "1")


def cache_dir() -> Path:
    """`WEFT_CACHE_DIR`: the folder (default ~/.cache/weft) of calibrations and measured times."""
    folder = os.environ.get("WEFT_CACHE_DIR")
    try:
        return Path(folder).expanduser() if folder else Path.home() / ".cache" / "weft"
    except RuntimeError:  # a user without an account, as in some containers, or one who does not exist
        other = Path(tempfile.gettempdir()) / f"weft-{os.getuid()}"
        if folder:
            warn_once(f"WEFT_CACHE_DIR={folder!r} names a user without a home folder: {other} is used, give a path")
        return other


OWN = (
    "WEFT_DEADLINE_S", "WEFT_SETUP_DEADLINE_S", "WEFT_CHECK_CALLS", "WEFT_QUIET", "WEFT_SELF_CALIBRATION", "WEFT_CACHE_DIR",
    "WEFT_SOCKET_IFNAME", "WEFT_PUSH_GRADIENTS",
)  # fmt: skip
"""All variables of weft's own."""

_PEERS = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING")
_OF_PEERS = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_")


def peer_variables() -> dict[str, str]:
    """`CUDA_*`, `NCCL_*`, `TORCH_NCCL_*`, `TORCH_SYMM_MEM_*`, `NVSHMEM_*`: written into the records of `weft bench`,
    because they change the baselines that weft is measured against. A path is written as "(a path)"."""
    set_here = sorted(
        (name, value) for name, value in os.environ.items() if name in _PEERS or name.startswith(_OF_PEERS)
    )
    return {name: "(a path)" if "/" in value else value for name, value in set_here}
