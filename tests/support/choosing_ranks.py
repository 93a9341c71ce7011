"""The schedule that a call of all_to_all_matmul takes. These functions run on the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.all_to_all_matmul_reference import expected, inputs, random_splits
from support.on_ranks import close

from weft import symm
from weft.builders import AllToAllMatmul
from weft.hw import load_machine
from weft.operator import select, this_machine
from weft.sim import model_of


def chooses_for_experts(group: dist.ProcessGroup, exact: bool, known: bool) -> tuple[str, str]:
    """Return the names of the schedules of an eager call and of a call in a CUDA graph; "" for the unfused call.

    exact: True if the CPU reads the number of rows of the result. known: True if the planner has a model of this machine.
    """
    rank, world, experts, most = group.rank(), group.size(), 4, 4096
    splits = random_splits(world, experts, [30 + rank for rank in range(world)], seed=3)
    given = AllToAllMatmul(world, experts, tuple(map(sum, splits)), 8, 16, "fp32", most, splits=splits)
    tokens, weights = inputs(given, seed=4)
    wanted, came = expected(rank, splits, tokens, weights)
    results: list[torch.Tensor] = []

    def make_y(rows: int) -> torch.Tensor:
        results.append(torch.full((rows if exact else rows + 5, given.n), torch.nan))
        return results[-1]

    tensors: dict[str, Any] = {
        "tokens": tokens[rank], "splits": torch.tensor([splits[rank]]), "received": torch.zeros_like(came), "y": make_y,
        "w": weights[rank * experts : (rank + 1) * experts].flatten(0, 1),
    }  # fmt: skip
    p = AllToAllMatmul(world, experts, (most,) * world, given.n, given.k, "fp32", most, exact)
    model = model_of(load_machine("h200"), world)
    original = this_machine.calibrated_model
    this_machine.calibrated_model = lambda device, world_size: model if known else None  # type: ignore[assignment]
    comm = symm.communicator(group, "cpu")
    try:
        chosen = select.choose(p, comm, tensors, None, deadline_s=60)
        for made in {id(one): one for one in (chosen.usual, chosen.captured) if one is not None}.values():
            made.run(tensors, deadline_s=60)
            close(results[-1][: len(wanted)], wanted, wanted.float())
            assert torch.equal(tensors["received"], came)
        assert chosen.captured is None or not chosen.captured.schedule.reads_on_host
        return tuple("" if one is None else one.schedule.name for one in (chosen.usual, chosen.captured))  # type: ignore
    finally:
        this_machine.calibrated_model = original
        comm.close()
