"""Collectives of the CPU ranks of a host, whose data travel with the rendezvous before the collective.

Within a host, ranks exchange data through shared memory. This takes less time than gloo's messages, for all sizes. A separate
rendezvous would take as long as a small collective, so the first data travel with it: a small collective takes one rendezvous
and two copies. Native code moves the data (`csrc/shared_collective.hpp`, which also defines the order of sums).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft import _core
from weft.runtime.collectives import (
    all_gather_single,
    all_reduce_single,
    all_to_all_single,
    reduce_scatter_single,
)

# Numbers of `SumDtype` in csrc/sum.hpp.
_SUMS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


def shared_collective(
    exchange: _core.PayloadExchange, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> _core.SharedCollective | None:
    """Return a call of a collective as a collective within the host; None if it must run by torch. The choice is equal on all
    ranks.

    function: a collective of `weft.runtime.collectives`. arguments: its arguments. Results must be contiguous.
    """
    make = _MADE.get(function)
    return None if make is None else make(exchange, *arguments)


def _gather(exchange: _core.PayloadExchange, out: torch.Tensor, x: torch.Tensor) -> _core.SharedCollective:
    return _core.SharedCollective.all_gather(exchange, _address(x), _address(out), x.nbytes)


def _scatter(exchange: _core.PayloadExchange, out: torch.Tensor, x: torch.Tensor) -> _core.SharedCollective | None:
    if x.dtype not in _SUMS:
        return None
    return _core.SharedCollective.reduce_scatter(exchange, _address(x), _address(out), out.nbytes, _SUMS[x.dtype])


def _reduce(exchange: _core.PayloadExchange, x: torch.Tensor) -> _core.SharedCollective | None:
    if x.dtype not in _SUMS:
        return None
    return _core.SharedCollective.all_reduce(exchange, _address(x), x.nbytes, _SUMS[x.dtype])


def _exchange(
    exchange: _core.PayloadExchange, out: torch.Tensor, x: torch.Tensor, received: list[int] | None = None,
    sent: list[int] | None = None,
) -> _core.SharedCollective:  # fmt: skip
    of_ranks = [_in_bytes(exchange, x, sent), _in_bytes(exchange, out, received)]
    return _core.SharedCollective.all_to_all(exchange, _address(x), _address(out), *of_ranks)


def _in_bytes(exchange: _core.PayloadExchange, x: torch.Tensor, rows: list[int] | None) -> list[int]:
    """Return the number of bytes for each rank. rows: the number of rows of `x` for each rank; None for equal parts."""
    if not rows:
        return [x.nbytes // exchange.ranks] * exchange.ranks
    if sum(rows) != len(x):
        raise ValueError(f"rows={rows} must add up to {len(x)}, the number of rows of the tensor")
    row_bytes = x.itemsize
    for size in x.shape[1:]:
        row_bytes *= size
    return [count * row_bytes for count in rows]


def _address(x: torch.Tensor) -> int:
    assert x.is_contiguous(), x.stride()
    assert not x.is_neg()  # the memory of such a view holds the negated values
    return x.data_ptr()


_MADE: dict[Callable[..., Any], Callable[..., _core.SharedCollective | None]] = {
    all_gather_single: _gather, reduce_scatter_single: _scatter, all_reduce_single: _reduce, all_to_all_single: _exchange,
}  # fmt: skip
