"""Our kernels for the tiles of a step, as launches of a run: what they do, the step says (`weft.schedule.kernels`)."""

from __future__ import annotations

import torch

from weft.runtime.cuda.context import Context, Tensors
from weft.schedule import ITEM_BYTES
from weft.schedule.kernels import GroupedMatmul


class Gemms:
    """`GroupedMatmul` as one launch. `spare`: multiprocessors that are left to copies."""

    def __init__(self, context: Context, s: GroupedMatmul, expected_rows: float, spare: int) -> None:
        from weft.runtime.cuda import grouped_matmul  # here, and not above: it needs a newer Triton than the rest

        self._library, self._what, schedule = grouped_matmul, s, context.schedule
        weights, tokens = schedule.buffer(s.weights), schedule.buffer(s.tokens)
        self._world, item = context.domain.world_size, ITEM_BYTES[tokens.dtype]
        self._config = grouped_matmul.choose_config(item, expected_rows, weights.cols, tokens.cols)
        counts, mine = context.own[s.counts], context.rank * s.experts
        self._gemms = grouped_matmul.GroupedMatmul(
            context.own[s.inbox], counts[:, mine : mine + s.experts], counts[context.rank], rank=context.rank,
            slot_rows=s.slot_rows, config=self._config, first_source=s.first_source, n_sources=s.n_sources,
            first_expert=s.first_expert, n_experts=s.n_experts, spare=spare,
        )  # fmt: skip

    def prepare(self, tensors: Tensors) -> None:
        self._library.prepare(self._weights(tensors), world_size=self._world, config=self._config)

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        s = self._what
        self._gemms.launch(tensors[s.tokens], self._weights(tensors), tensors[s.y])

    def _weights(self, tensors: Tensors) -> torch.Tensor:
        w = tensors[self._what.weights]
        return w if w.dim() == 3 else w.unflatten(0, (self._what.experts, -1))
