"""Checks of arguments that all operators share.

These checks run at the start of every call, so they must be fast: valid arguments cost a few comparisons. Errors give the
argument's name, its value, and what to pass instead. Equivalent arguments are normalised (a negative dimension becomes
non-negative), so that ranks may write them differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weft import env
from weft.integers import integer, is_real, shown
from weft.words import counted, kind

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
MOST_ROWS = 1 << 40
"""The largest number of rows of a matrix. Sizes in bytes then fit in 64 bits for any number of columns."""
_FIX = {"DTensor": "pass .to_local()", "AsyncCollectiveTensor": "pass .wait()"}


def check_tensor(name: str, x: Any) -> None:
    """Raise `ValueError` unless `x` is a dense tensor whose storage contains its elements."""
    if not _is_plain(x):
        _look_at(name, x)


def check_tensors(name: str, xs: Sequence[Any]) -> None:
    """Run `check_tensor` on each tensor of a list."""
    for x in xs:
        if not _is_plain(x):
            _look_at(next(f"{name}[{i}]" for i, other in enumerate(xs) if other is x), x)


def _is_plain(x: Any) -> bool:
    if type(x) not in _PLAIN or x.is_nested:
        return False
    # torch does not allow reading the layout of gradients in a compiled autograd Function.
    return torch.compiler.is_compiling() or (x.layout is torch.strided and _has_memory(x))


def check_memory(name: str, x: torch.Tensor) -> None:
    """Raise `ValueError` if the storage of `x` is too small for the elements of `x`, for example because it was freed."""
    if type(x) in _PLAIN and not _has_memory(x):
        raise ValueError(
            f"{name} has no memory: its storage holds {x.untyped_storage().nbytes()} of {_needed_bytes(x)} bytes, "
            "because it was freed or resized (FSDP does this between uses). Pass the tensor while it has its "
            "values"
        )


def _has_memory(x: torch.Tensor) -> bool:
    try:
        held = x.untyped_storage().nbytes()
    except NotImplementedError:  # inside a transform of torch.func, which operators refuse
        return True
    if held >= x.nbytes and not x.storage_offset() and x.is_contiguous():  # a fast test that most tensors pass
        return True
    return not x.numel() or held >= _needed_bytes(x)


def _needed_bytes(x: torch.Tensor) -> int:
    """Return the bytes that `x` needs in its storage: up to the end of the last element."""
    last = x.storage_offset()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        last += (size - 1) * stride
    return int(last + 1) * x.itemsize


def not_dense(name: str, x: Any) -> str:
    """Return an error text with its fix if `x` is not a dense tensor; otherwise ""."""
    if not isinstance(x, torch.Tensor):
        from_numpy = f"torch.from_numpy({name})" if type(x).__module__ == "numpy" else "a torch.Tensor"
        return f"{name} is {kind(x)}: pass {from_numpy}"
    if isinstance(x, UninitializedTensorMixin):
        return f"{name} is {kind(x)}, which has no shape yet: run a forward of its module first"
    if x.is_nested:
        return f"{name} is a nested tensor: pass a dense tensor, such as {name}.to_padded_tensor(0)"
    if x.layout is not torch.strided:
        return f"{name} has layout {x.layout}: pass a dense tensor, such as {name}.to_dense()"
    return ""


def _look_at(name: str, x: Any) -> None:
    if wrong := not_dense(name, x):
        raise ValueError(wrong)
    for base in type(x).__mro__:
        if base.__name__ in _FIX:
            raise ValueError(f"{name} is {kind(x)}: {_FIX[base.__name__]}")
    check_memory(name, x)
    # Other tensor classes may keep their values elsewhere. The classes that torch uses while it traces a call are
    # allowed.
    inside = type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if inside and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode():
        raise ValueError(
            f"{name} is {kind(x)}, which does not hold its values itself: pass the torch.Tensor that holds them"
        )


def listed(name: str, given: Any) -> Sequence[Any]:
    """Return a list or tuple unchanged, and another iterable as a list. Raise `ValueError` for a single tensor, a
    string, bytes, a dict, a set, or a value that is not iterable.
    """
    if isinstance(given, list | tuple):
        return given
    if isinstance(given, torch.Tensor):
        raise ValueError(f"{name} is one tensor of shape {tuple(given.shape)}: pass a list of tensors, [{name[:-1]}]")
    return list(iterated(name, given, "pass a list"))


def iterated(name: str, given: Any, fix: str, *, with_value: bool = False) -> Iterable[Any]:
    """Return `given`. Raise `ValueError` for text, a dict, a set, or a value that is not iterable, such as an array without
    dimensions (which Python counts as an Iterable).

    with_value: True to print the value in the error text.
    """
    refused = isinstance(given, str | bytes | bytearray | Mapping | Set) or not isinstance(given, Iterable)
    if refused or not getattr(given, "ndim", 1):
        raise ValueError(f"{name}{f'={given!r}' if with_value else ''} is {kind(given)}: {fix}")
    return given  # type: ignore[no-any-return]


def check_flag(name: str, given: Any) -> None:
    if given is True or given is False:
        return
    raise ValueError(f"{name}={given!r} is {kind(given)}: pass True or False")


def check_type(name: str, given: Any, wanted: type, fix: str) -> None:
    """Raise `ValueError` unless `given` is an instance of `wanted`."""
    if not isinstance(given, wanted):
        raise ValueError(f"{name} is {kind(given)}: {fix}")


def check_choice(name: str, given: Any, legal: Sequence[str]) -> None:
    """Raise `ValueError` unless `given` is one of the strings `legal`."""
    if not isinstance(given, str) or given not in legal:
        raise ValueError(f"{name}={given!r} must be one of {', '.join(map(repr, legal))}")


def checked_device(given: Any) -> torch.device:
    """Return `given` as a device. Raise `ValueError` for a device that torch does not know. This machine may lack the device."""
    if not isinstance(given, str | int | torch.device) or isinstance(given, bool):
        raise ValueError(f"device={given!r} is {kind(given)}: pass a torch.device, such as 'cuda' or 'cpu'")
    try:
        return torch.device(given)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device={given!r} is not a device ({reason}): pass a torch.device, such as 'cuda' or 'cpu'"
        ) from None


def check_reduction(name: str, given: Any) -> None:
    """Raise `ValueError` unless `given` is "sum" or "avg"."""
    if not isinstance(given, str) or given not in ("sum", "avg"):
        raise ValueError(f'{name}={given!r}: use "sum" or "avg"')


def checked_dimension(
    A: torch.Tensor, dim: Any, *, names: tuple[str, str] = ("A_shard", "gather_dim"), last: bool = False
) -> int:
    """Return `dim` as a non-negative dimension of A. Raise `ValueError` for a dimension that A does not have.

    names: the argument names of A and of dim, for error texts.
    last: True to allow the last dimension too.
    """
    if type(dim) is int and 0 <= dim < A.dim() - 1:
        return dim
    what, name = names
    shape, dim = tuple(A.shape), checked_whole(name, dim, "pass the number of a dimension, an int")
    if len(shape) < 2:
        raise ValueError(f"{what} has shape {shape}: pass at least two dimensions, [rows, K]")
    known = -len(shape) <= dim < len(shape)
    if last and not known:
        raise ValueError(
            f"{name}={dim} is not a dimension of {what} {shape}: pass a number from {-len(shape)} to {len(shape) - 1}"
        )
    if not last and (not known or dim % len(shape) == len(shape) - 1):
        allowed = (
            "0 or -2" if len(shape) == 2 else f"a dimension from 0 to {len(shape) - 2}, or from {-len(shape)} to -2"
        )
        raise ValueError(
            f"{name}={dim} is not allowed for {what} {shape}: pass {allowed}. The last dimension is excluded, because the matmul "
            "sums over it"
        )
    return dim % len(shape)


def checked_rows(rows: Any, A_shard: torch.Tensor, gather_dim: int, group: dist.ProcessGroup) -> tuple[int, ...] | None:
    """Return the size of `gather_dim` on each rank; None if all sizes are equal.

    Raise `ValueError` unless `rows` is a list with a valid size for each rank. This rank's entry must be the size of
    `A_shard` in dimension `gather_dim`.
    """
    sizes = checked_sizes("rows", rows)
    extent, world_size, rank = A_shard.shape[gather_dim], group.size(), group.rank()
    if len(sizes) != world_size or sizes[rank] != extent or min(sizes) < 0 or max(sizes) > MOST_ROWS:
        raise ValueError(
            f"rows={sizes}: pass a number from 0 to 2**40 for each of {counted(world_size, 'rank')}. rows[{rank}] must "
            f"be {extent}, the size of A_shard {tuple(A_shard.shape)} in dimension {gather_dim}"
        )
    return None if all(size == extent for size in sizes) else sizes


def checked_sizes(name: str, given: Any) -> tuple[int, ...]:
    """Return the argument `name` as a tuple of integers. Raise `ValueError` unless `given` is an iterable of integers."""
    sizes = iterated(name, given, "pass a list with a number for each rank", with_value=True)
    return tuple(checked_whole(f"{name}[{i}]", size, "pass an integer for each rank") for i, size in enumerate(sizes))


def checked_count(name: str, count: Any) -> Any:
    """Return the number of rows `count` as an integer, or None. Raise `ValueError` unless it is None or from 0 to `MOST_ROWS`."""
    if count is None or (type(count) is int and 0 <= count <= MOST_ROWS):
        return count
    fix = "pass an integer from 0 to 2**40"
    number = count if type(count) is int else checked_whole(name, count, fix)
    if not 0 <= number <= MOST_ROWS:
        raise ValueError(f"{name}={shown(number)} must be a number of rows: {fix}")
    return number


def checked_within(name: str, given: Any, least: int, most: int, allowed: str) -> int:
    """Return `given` as an integer, as `checked_whole` does. Raise `ValueError` unless it is from `least` to `most`.

    allowed: the allowed values in words, for error texts, such as "at least 1, or None for no limit".
    """
    number = int(checked_whole(name, given, f"pass an integer, {allowed}"))
    if not least <= number <= most:
        raise ValueError(f"{name}={number} must be {allowed}")
    return number


def checked_shape(name: str, given: Any) -> tuple[int, ...]:
    sizes = iterated(name, given, "pass a list")
    return tuple(checked_whole(f"{name}[{i}]", size, "pass an integer") for i, size in enumerate(sizes))


def checked_deadline(deadline_s: Any) -> float | None:
    """Return the deadline in seconds; None for the default. Raise `ValueError` for an invalid deadline."""
    if deadline_s is None:
        return None
    fix = "pass the number of seconds that a wait may take"
    if not is_real(deadline_s):
        raise ValueError(f"deadline_s={deadline_s!r} is {kind(deadline_s)}: {fix}")
    if not 0 < deadline_s <= env.MOST_S:
        raise ValueError(f"deadline_s={shown(deadline_s)} must be positive and at most {env.MOST_S:.0f}: {fix}")
    return float(deadline_s)


def checked_whole(name: str, given: Any, fix: str) -> Any:
    """Return `given` as an integer, as `weft.integers.integer` does. torch's symbolic integers are allowed too."""
    return given if isinstance(given, torch.SymInt) else integer(name, given, fix)
