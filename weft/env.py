"""Environment variables. Only this module reads `os.environ`. Each function documents its variable and the default."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from weft.caller import warn_once

MOST_S = 1e6
"""The longest deadline that all waits support, in seconds: about eleven days."""
SETUP_S = 20.0
"""The default of WEFT_SETUP_DEADLINE_S, in seconds."""


def deadline_s() -> float:
    """`WEFT_DEADLINE_S`: the longest wait for another rank, in seconds (default 60). Set it before the first call of a group,
    which reads it. On CPU, a later change affects only other groups. On GPUs, it also affects shapes that this group calls later.
    """
    return _seconds("WEFT_DEADLINE_S", "60", "a wait")


def setup_deadline_s() -> float:
    """`WEFT_SETUP_DEADLINE_S`: the longest wait while ranks set up memory or connections, in seconds (default 20).
    While ranks compile, `WEFT_DEADLINE_S` applies instead. If `WEFT_DEADLINE_S` is set and shorter, it limits set-up
    too. A group reads both variables at its first call.
    """
    wanted = _seconds("WEFT_SETUP_DEADLINE_S", f"{SETUP_S:g}", "a wait while ranks set something up")
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
    """`WEFT_CHECK_CALLS`: 1 makes ranks compare tensors that must be equal on all ranks (bias, residual), in every call
    (default 0). Set the same value on all ranks of a group, before its first call, which reads it.

    On GPUs ranks also compare `received` and `splits` of `matmul_all_to_all`, and the operator and the source line of each
    call. To compare tensors, the CPU waits for the GPU. Comparing operators and lines takes some microseconds per call. If
    ranks make a call from different source lines, the group fails.
    """
    return _is_on("WEFT_CHECK_CALLS")


def triton_interpreted() -> bool:
    """`TRITON_INTERPRET`: 1 makes Triton run kernels in Python on the CPU, one program after another, for tests
    (default 0).
    """
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def under_torchrun() -> bool:
    """`RANK`, with `WORLD_SIZE`: set by launchers such as torchrun. If both are set, `weft bench` starts no processes."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """`RANK`: the number of this rank among those of `WORLD_SIZE`. Launchers such as torchrun set it."""
    found, world = _whole("RANK", "0", 0, "the number of this rank"), world_size()
    if found >= world:
        raise ValueError(
            f"RANK={found} must be less than WORLD_SIZE={world}: start the ranks with torchrun, which sets both, or unset "
            "RANK and WORLD_SIZE"
        )
    return found


def local_rank() -> int:
    """`LOCAL_RANK`: the index of the device that `weft bench` uses on this machine (default 0). torchrun sets it."""
    return _whole("LOCAL_RANK", "0", 0, "the index of this rank's device")


def launcher_host() -> str:
    """`MASTER_ADDR`: the launcher's host (default ""). torchrun sets it. If a host has several addresses, weft prefers the
    address from which packets to the launcher leave.
    """
    return os.environ.get("MASTER_ADDR", "")


def socket_interfaces() -> tuple[str, ...]:
    """`WEFT_SOCKET_IFNAME`: comma-separated network interfaces for control connections from other hosts (default:
    `GLOO_SOCKET_IFNAME`). weft listens on one address of these interfaces: the address from which packets to `MASTER_ADDR`
    leave if it is among them, otherwise the first. If neither variable is set, weft listens on all addresses.
    """
    names = os.environ.get("WEFT_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    return tuple(name.strip() for name in names.split(",") if name.strip())


def world_size() -> int:
    """`WORLD_SIZE`: the number of ranks of `weft bench` (default 1). torchrun sets it."""
    return _whole("WORLD_SIZE", "1", 1, "the number of ranks")


def _whole(variable: str, default: str, least: int, what: str) -> int:
    text = os.environ.get(variable, default)
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ValueError(
            f"{variable}={text!r} must be an integer of at least {least}, {what}: start the ranks with torchrun, which "
            "sets it, or unset RANK and WORLD_SIZE"
        )
    return value


def quiet() -> bool:
    """`WEFT_QUIET`: 1 disables the warning that an operator runs without overlap (default 0)."""
    return _is_on("WEFT_QUIET")


def _is_on(variable: str, default: str = "0") -> bool:
    text = os.environ.get(variable, "").strip().lower() or default
    if text not in _SWITCHES:
        raise ValueError(f"{variable}={text!r} must be one of {', '.join(_SWITCHES)}")
    return _SWITCHES[text]


_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
"""The accepted texts of a variable that is on or off, with their meanings."""


def self_calibration() -> bool:
    """`WEFT_SELF_CALIBRATION`: 0 disables two measurements at the first call of a group (default 1). The first measures
    GPUs that have neither a machine file nor a calibration, in up to 2 seconds, once per machine. Without it, weft plans
    with numbers derived from the driver's properties. The second measures links between hosts if ranks are on several hosts,
    in about half a second, once per set of hosts.
    """
    return _is_on("WEFT_SELF_CALIBRATION", "1")


def cache_dir() -> Path:
    """`WEFT_CACHE_DIR`: the folder for calibrations and measured times (default ~/.cache/weft)."""
    folder = os.environ.get("WEFT_CACHE_DIR")
    try:
        return Path(folder).expanduser() if folder else Path.home() / ".cache" / "weft"
    except RuntimeError:  # the user has no account, as in some containers, or does not exist
        other = Path(tempfile.gettempdir()) / f"weft-{os.getuid()}"
        if folder:
            warn_once(
                f"WEFT_CACHE_DIR={folder!r} names a user without a home folder, so {other} is used: set it to a path"
            )
        return other


_CHECKED: tuple[Callable[[], object], ...] = (deadline_s, setup_deadline_s, check_calls, quiet, self_calibration)


def faults() -> list[str]:
    """Return an error text for each of weft's own variables that has an invalid value."""
    found: dict[str, None] = {}
    for read in _CHECKED:
        try:
            read()
        except ValueError as error:
            found[str(error)] = None  # two functions read WEFT_DEADLINE_S
    return list(found)


OWN = (
    "WEFT_DEADLINE_S", "WEFT_SETUP_DEADLINE_S", "WEFT_CHECK_CALLS", "WEFT_QUIET", "WEFT_SELF_CALIBRATION", "WEFT_CACHE_DIR",
    "WEFT_SOCKET_IFNAME",
)  # fmt: skip
"""The names of all environment variables that weft defines itself."""

_PEERS = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING")
_OF_PEERS = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_")


def peer_variables() -> dict[str, str]:
    """`CUDA_*`, `NCCL_*`, `TORCH_NCCL_*`, `TORCH_SYMM_MEM_*`, `NVSHMEM_*`: variables that `weft bench` records, because
    they affect the baselines. A path is recorded as "(a path)".
    """
    set_here = sorted(
        (name, value) for name, value in os.environ.items() if name in _PEERS or name.startswith(_OF_PEERS)
    )
    return {name: "(a path)" if "/" in value else value for name, value in set_here}
