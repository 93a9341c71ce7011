"""Environment variables: only this module reads `os.environ`. Each function documents its variable and default."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from weft.caller import warn_once

MOST_S = 1e6
"""The longest deadline that all waits can count, in seconds: about eleven days."""


def deadline_s() -> float:
    """`WEFT_DEADLINE_S`: limit (default 60) of each wait for another rank, in seconds."""
    return _seconds("WEFT_DEADLINE_S", "60", "a wait")


def setup_deadline_s() -> float:
    """`WEFT_SETUP_DEADLINE_S`: limit (default 20) of each wait while ranks set up memory or connections, in seconds. If
    `WEFT_DEADLINE_S` is set and shorter, it applies instead. Waits for a rank that computes or compiles have `WEFT_DEADLINE_S`."""
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
    """`WEFT_CHECK_CALLS`: 1 (default 0): compare tensors that must be equal on all ranks (bias, residual). On GPUs, also
    compare token counts (`splits`, `received`), and the operator and source line of each call. Comparing tensors and counts makes
    the host wait; the other checks cost some microseconds per call. If ranks call from different lines, the group fails."""
    return _is_on("WEFT_CHECK_CALLS")


def triton_interpreted() -> bool:
    """`TRITON_INTERPRET`: 1 (default 0): Triton runs kernels in Python on the CPU, one program after another. For tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def under_torchrun() -> bool:
    """`RANK`, with `WORLD_SIZE`: set by launchers such as torchrun. `weft bench` then starts no processes."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """`LOCAL_RANK`: set by torchrun (default 0): the index of the device that `weft bench` uses on this host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def launcher_host() -> str:
    """`MASTER_ADDR`: set by torchrun (default ""). If this host has several addresses, other hosts first try the address on
    the route to `MASTER_ADDR`."""
    return os.environ.get("MASTER_ADDR", "")


def socket_interfaces() -> tuple[str, ...]:
    """`WEFT_SOCKET_IFNAME`: comma-separated network interfaces (default the value of `GLOO_SOCKET_IFNAME`) by which other hosts
    reach this host for control connections. weft listens on the first interface's address, or by default on
    all addresses."""
    names = os.environ.get("WEFT_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    return tuple(name.strip() for name in names.split(",") if name.strip())


def world_size() -> int:
    """`WORLD_SIZE`: set by torchrun (default 1): the number of ranks of `weft bench`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def push_gradients() -> bool:
    """`WEFT_PUSH_GRADIENTS`: 1 (default 0): on GPUs of one host, send gradients of embeddings by a kernel that stores them
    in the memory of the tables' owners, instead of NCCL's all-to-all. Set it equally on all ranks. Results are bitwise the same."""
    return _is_on("WEFT_PUSH_GRADIENTS")


def quiet() -> bool:
    """`WEFT_QUIET`: 1 (default 0): do not warn when an operator runs without overlap."""
    return _is_on("WEFT_QUIET")


def _is_on(variable: str, default: str = "0") -> bool:
    return (os.environ.get(variable, "").strip().lower() or default) not in ("0", "false", "no", "off")


def self_calibration() -> bool:
    """`WEFT_SELF_CALIBRATION`: 0 (default 1): do not measure GPUs that have neither a machine file nor a calibration; plan
    with numbers derived from the driver. By default a group's first call measures them, once per machine, in up to 2 seconds."""
    return _is_on("WEFT_SELF_CALIBRATION", "1")


def cache_dir() -> Path:
    """`WEFT_CACHE_DIR`: the folder (default ~/.cache/weft) of calibrations and measured times."""
    folder = os.environ.get("WEFT_CACHE_DIR")
    try:
        return Path(folder).expanduser() if folder else Path.home() / ".cache" / "weft"
    except RuntimeError:  # a user without an account, as in some containers, or one who does not exist
        other = Path(tempfile.gettempdir()) / f"weft-{os.getuid()}"
        if folder:
            warn_once(
                f"WEFT_CACHE_DIR={folder!r} names a user without a home folder, so {other} is used: set it to a path"
            )
        return other


OWN = (
    "WEFT_DEADLINE_S", "WEFT_SETUP_DEADLINE_S", "WEFT_CHECK_CALLS", "WEFT_QUIET", "WEFT_SELF_CALIBRATION", "WEFT_CACHE_DIR",
    "WEFT_SOCKET_IFNAME", "WEFT_PUSH_GRADIENTS",
)  # fmt: skip
"""All variables that only weft reads."""

_PEERS = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING")
_OF_PEERS = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_")


def peer_variables() -> dict[str, str]:
    """`CUDA_*`, `NCCL_*`, `TORCH_NCCL_*`, `TORCH_SYMM_MEM_*`, `NVSHMEM_*`: recorded by `weft bench`, because
    they affect the baselines. A path is recorded as "(a path)"."""
    set_here = sorted(
        (name, value) for name, value in os.environ.items() if name in _PEERS or name.startswith(_OF_PEERS)
    )
    return {name: "(a path)" if "/" in value else value for name, value in set_here}
