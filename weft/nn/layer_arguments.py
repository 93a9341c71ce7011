"""Checks of the arguments of layers' constructors. The errors name the argument, unlike torch's."""

from __future__ import annotations

from typing import Any

import torch

from weft.arguments import checked_device, checked_whole
from weft.words import kind

_MOST_DIMENSIONS = 64  # torch's operations accept no more
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64


def checked_size(name: str, given: Any, world: int | None = None) -> int:
    """Return the size `given` of a layer. Raise `ValueError` unless the size is a positive integer.

    world: the number of ranks, if they must get equal parts of the size.
    """
    size: int = checked_whole(name, given, "pass an integer")
    if world is None and size < 1:
        raise ValueError(f"{name}={size} must be positive: pass the size of the whole layer")
    if world is not None and (size < 1 or size % world):
        raise ValueError(
            f"{name}={size} must be positive and divisible by world_size={world}: pass "
            f"{max(1, -(-size // world)) * world}, or use another number of ranks"
        )
    return size


def check_dtype(dtype: Any) -> None:
    """Raise `ValueError` unless weft's operators support parameters of this dtype. None stands for torch's default dtype."""
    fix = "pass torch.float32, torch.float16 or torch.bfloat16, or torch.float64 on CPU to check gradients"
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is {kind(dtype)}: {fix}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is not supported: {fix}")


def check_device(device: Any) -> None:
    """Raise `ValueError` unless torch can allocate parameters on this device. None stands for torch's default device."""
    if device is None or checked_device(device).type == "meta":
        return
    try:
        torch.empty(0, device=device)
    except Exception as error:  # backends that torch knows but lacks raise errors of several types
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device={device!r} cannot be used here ({reason}): pass 'cuda', 'cpu' or 'meta'") from error


def check_activation(given: Any) -> None:
    """Raise `ValueError` unless `given` can be called with a tensor. A class, such as nn.SiLU, would return a module."""
    if isinstance(given, type) or not callable(given):
        raise ValueError(
            f"activation={given!r} is {kind(given)}: pass a function of one tensor, such as torch.nn.functional.silu, or a "
            "module, such as torch.nn.SiLU()"
        )


def checked_sequence_dim(given: Any) -> int | None:
    """Return `given`, the argument `sequence_dim` of a layer. Raise `ValueError` unless it is None, or a dimension
    other than the last, which has the features.
    """
    if given is None:
        return None
    fix = "pass the number of a dimension, an int, or None if every rank has the whole x"
    dim = int(checked_whole("sequence_dim", given, fix))
    if not -_MOST_DIMENSIONS <= dim < _MOST_DIMENSIONS - 1 or dim == -1:
        raise ValueError(
            f"sequence_dim={dim} is not allowed: pass a dimension from 0 to {_MOST_DIMENSIONS - 2}, or from "
            f"{-_MOST_DIMENSIONS} to -2, or None if every rank has the whole x. The last dimension has the features"
        )
    return dim
