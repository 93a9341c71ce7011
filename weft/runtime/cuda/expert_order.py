"""Launchers of the kernels that order experts' rows (`weft.kernels.expert_order`). All tensors are on the current device."""

from __future__ import annotations

import torch
import triton

from weft import env
from weft.kernels import expert_order as device_code
from weft.runtime.cuda.direct import Call, Kernel, alignments, launch, launch_all

_BLOCK, _EXPERTS = 256, 64  # choices of a program, and experts that it counts at the same time
_BLOCKS, _COLUMNS = 64, 16  # blocks of choices that a program adds up at the same time, and its experts
_WARPS = 8
_ROWS = 256  # rows of a source rank and expert that a program writes at the same time
_MOST_COUNTS = 16384  # counts that a program reads at the same time
_PTX = torch.version.hip is None and not env.triton_interpreted()


def chosen_order(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the choices of experts, stably. Return (order, place, splits), all int64.

    chosen: the number of the chosen expert for each choice, [choices].
    order: the choice of each row. place: the row of each choice. splits: the number of rows of each expert.
    """
    choices, device = chosen.numel(), chosen.device
    blocks = -(-choices // _BLOCK)
    order, place = (torch.empty(choices, dtype=torch.int64, device=device) for _ in range(2))
    splits = torch.empty(experts, dtype=torch.int64, device=device)
    scratch = torch.empty(choices + blocks * experts, dtype=torch.int32, device=device)
    counts = scratch[choices:]
    given = chosen, scratch, counts, splits, place, order
    addresses = [tensor.data_ptr() for tensor in given]

    def kernels() -> list[Kernel]:
        size = {"BLOCK": _BLOCK, "EXPERTS": _EXPERTS}
        offset = Kernel(device_code.offset_kernel, _WARPS, {"BLOCKS": _BLOCKS, "EXPERTS": _COLUMNS})
        rank = Kernel(device_code.rank_kernel, _WARPS, size | {"PTX": _PTX})
        return [rank, offset, Kernel(device_code.place_kernel, _WARPS, size)] if blocks else [offset]

    def calls(are_tensors: bool) -> list[Call]:
        of_choices, ranks, cells, totals, to, back = given if are_tensors else addresses
        offset: Call = (-(-experts // _COLUMNS), 1), (cells, totals, blocks, experts)
        if not blocks:
            return [offset]
        grid = blocks, 1
        of_place = of_choices, ranks, cells, totals, to, back, choices, experts
        return [(grid, (of_choices, ranks, cells, choices, experts)), offset, (grid, of_place)]

    key = "chosen_order", chosen.dtype, blocks == 0, alignments(addresses)
    launch_all(key if choices >> 31 == 0 else None, kernels, calls)
    return order, place, splits


def arrival_order(received: torch.Tensor, came: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return (by_expert, by_arrival, ends), as `arrival_kernel` describes them. Return None for a table that is too large for it.

    received: the number of rows from each rank for each local expert, int64. came: their sum.
    """
    (world, experts), device = received.shape, received.device
    if received.numel() > _MOST_COUNTS:
        return None
    by_expert, by_arrival = (torch.empty(came, dtype=torch.int64, device=device) for _ in range(2))
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    arguments = received, by_expert, by_arrival, ends, world, experts
    counts = triton.next_power_of_2(received.numel())
    launch(device_code.arrival_kernel, (world * experts, 1), arguments, COUNTS_P2=counts, BLOCK=_ROWS)
    return by_expert, by_arrival, ends
