"""The order of tokens on the rank of their experts: tokens arrive sorted by source rank, but GEMMs need them sorted by expert."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from weft import _core
from weft.runtime.launchers import launchers
from weft.runtime.unfused.sizes import Sizes


def in_expert_order(arrived: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Reorder the rows `arrived`: from the order of arrival (by source rank, then by expert) to the order of experts (by
    expert, then by source rank). Return the reordered rows.
    """
    if 1 in sizes.received.shape:
        return arrived
    if arrived.is_cuda:
        return selected(arrived, orders_of(sizes).by_expert)
    return reorder(arrived, _counts(sizes), torch.empty_like(arrived), to_ranks=False)


def in_order_of_arrival(rows: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Reorder `rows`: from the order of experts (by expert, then by source rank) to the order of arrival (by source rank,
    then by expert). Return the reordered rows.
    """
    if 1 in sizes.received.shape:
        return rows
    if rows.is_cuda:
        return selected(rows, orders_of(sizes).by_arrival)
    return reorder(rows, _counts(sizes), torch.empty_like(rows), to_ranks=True)


def selected(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `rows.index_select(0, order)` on a GPU. A kernel takes a third of the CPU time of torch's function."""
    kernels = launchers("expert_rows") if rows.is_contiguous() else None
    return rows.index_select(0, order) if kernels is None else kernels.gathered(rows, order, 1)


def _counts(sizes: Sizes) -> torch.Tensor:
    """Return the number of rows from each rank for each local expert, as it was when `sizes` copied the tables. By the time of
    backward, a collective or NumPy may have changed `sizes.received`, and native code would write outside of the rows.
    """
    return torch.from_numpy(sizes.tables[1])


class Orders(NamedTuple):
    """The permutations of the rows of an exchange on a GPU.

    by_expert: for each row in the order of experts, its index in the order of arrival: int64 [rows].
    by_arrival: its inverse: for each row in the order of arrival, its index in the order of experts.
    ends: the end of each expert's rows in the order of experts, int32 [experts].
    """

    by_expert: torch.Tensor
    by_arrival: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, received: torch.Tensor, came: int) -> Orders:
        """Compute the permutations on the GPU. The arguments are as for `expert_order`."""
        kernels = launchers("expert_order") if received.is_cuda and received.is_contiguous() else None
        if kernels is not None and (made := kernels.arrival_order(received, came)) is not None:
            return cls(*made)
        by_expert, rows = expert_order(received, came), torch.arange(came, device=received.device)
        by_arrival = torch.empty_like(rows).scatter_(0, by_expert, rows)
        return cls(by_expert, by_arrival, received.sum(0).cumsum(0, dtype=torch.int32))


def orders_of(sizes: Sizes) -> Orders:
    """Return the permutations of the rows that arrive. The first call on a stream computes them on the GPU; dispatch, combine
    and their backward, whose sizes are the same, then share them.
    """
    return sizes.once("orders", lambda: Orders.of(sizes.received, sum(sizes.host.came)))


def ends_of(sizes: Sizes) -> torch.Tensor:
    """Return the end of each expert's rows in the order of experts, int32 [experts] on the GPU. Shared as in `orders_of`."""
    return orders_of(sizes).ends


def reorder(rows: torch.Tensor, received: torch.Tensor, out: torch.Tensor, *, to_ranks: bool) -> torch.Tensor:
    """Copy rows in the memory of the CPU to the first rows of `out`, and return `out`. Both are contiguous. NumPy's and torch's
    indexing would take longer for small calls.

    to_ranks: True to sort rows of experts in the order of arrival, False for the opposite.
    """
    assert rows.is_contiguous()
    assert out.is_contiguous()
    ranks, experts = received.shape
    counts = received.contiguous()  # in a variable: a copy must outlive the native call
    _core.reorder_rows(
        rows=rows.data_ptr(), out=out.data_ptr(), counts=counts.data_ptr(), ranks=ranks, experts=experts,
        row_bytes=rows.shape[1] * rows.itemsize, to_ranks=to_ranks,
    )  # fmt: skip
    return out


def expert_order(received: torch.Tensor, came: int) -> torch.Tensor:
    """Return the permutation that sorts received rows by expert, and then by source rank: [came], int64. Entry i is the
    index, in the order of arrival, of row i of the sorted rows.

    received: the number of rows from each rank for each local expert, [ranks, experts]. came: their sum.
    """
    if not received.is_cuda:  # NumPy takes a third of torch's time
        of_cells = received.numpy()
        counts = of_cells.T.ravel()
        shifts = (of_cells.cumsum() - of_cells.ravel()).reshape(of_cells.shape).T.ravel() - (counts.cumsum() - counts)
        return torch.from_numpy(np.repeat(shifts, counts) + np.arange(came))
    world, experts = received.shape
    by_source, by_expert = received.flatten(), received.t().flatten()
    begins_in_arrival = (by_source.cumsum(0) - by_source).view(world, experts).t().flatten()
    begins_in_order = by_expert.cumsum(0) - by_expert
    shift = torch.repeat_interleave(begins_in_arrival - begins_in_order, by_expert, output_size=came)
    return shift.add_(torch.arange(came, device=received.device))
