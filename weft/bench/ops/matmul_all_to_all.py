"""Benchmark of GEMM + MoE combine: experts multiply their rows and send the products back to the tokens' ranks.

Layers and variants are the same as in all_to_all_matmul; here [k, n] is an expert's last weight. There are two baselines:

    serial    torch's GEMMs, a copy that sorts rows by source rank, and all_to_all_single. The CPU knows the sizes from the
              preceding dispatch, so it never waits. A CUDA graph can capture it, but only for one routing
    padded    the baseline of mode `graph`: the preceding dispatch was `padded`. torch.bmm on all rows and the padding; a copy
              that sorts them by source rank; all_to_all_single with equal splits; and a gather of this rank's rows, whose places
              the dispatch has computed. The same graph runs any routing

Variants without `rows` follow a dispatch without `max_rows`, so they know the sizes too (`remember`). Variants
NAME-bounded pass the number of this rank's tokens as `rows`. They follow a dispatch with `max_rows`, so the CPU does not
know the sizes, and the same graph runs any routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, Self

import torch
import torch.distributed as dist

from weft.bench.core.harness import Call
from weft.bench.ops.all_to_all_matmul import ExpertsOperator, ExpertVariants
from weft.bench.ops.any_operator import Variant
from weft.bench.ops.moe_shape import BOUNDED
from weft.ops.matmul_all_to_all import OPERATOR as SPEC
from weft.ops.matmul_all_to_all import matmul_all_to_all
from weft.runtime.unfused import experts
from weft.runtime.unfused.sizes import Sizes, remember, remember_total


class CombineVariants(ExpertVariants):
    """Variants of the combine. A row has k columns before the GEMM, and n columns after it."""

    sent_columns: ClassVar = "n"

    unread: Sequence[torch.Tensor]
    """Copies of `received`, for variants in which the CPU must not know the sizes: it has never read these copies."""

    def draw_rows(self) -> None:
        self.arrived = [self.rows_at(which, self.ranks.rank) for which in range(self.input_sets)]
        self._dispatched()

    def cut_rows(self, whole: Self) -> None:
        self.arrived = [rows[: int(self.counts(which).sum())] for which, rows in enumerate(whole.arrived)]
        self._dispatched()

    def _dispatched(self) -> None:
        """Put the operator into the state after a dispatch: the CPU knows the number of tokens, and for calls without
        `max_rows` all sizes.
        """
        for splits, received in zip(self.splits, self.received, strict=True):
            remember_total(splits, self.config.rows)
            sizes = Sizes(splits, received)
            sizes.fetch()
            remember(sizes)
        self.unread = [received.clone() for received in self.received]

    def rows_at(self, which: int, rank: int) -> torch.Tensor:
        """Return the rows at the experts of `rank`, [rows, k], sorted by expert and then by source rank."""
        return self.rows_drawn(which, rank, int(self.counts(which, rank).sum()))

    def reference(self, which: int) -> torch.Tensor:
        parts, mine = [], self.ranks.rank
        for rank in range(self.ranks.world_size):
            segments = iter(self.rows_at(which, rank).split(self.counts(which, rank).t().flatten().tolist()))
            for number in range(self.experts):
                of_sources = [next(segments) for _ in range(self.ranks.world_size)]
                parts.append(of_sources[mine].double() @ self.expert(rank, number).double())
        return torch.cat(parts)

    def others(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        found = super().others(wanted)
        made = [(self.config.rows, len(rows)) for rows in self.arrived]
        self.moved = [
            (self.w.new_empty(came, self.config.n), self.w.new_empty(sent, self.config.n)) for came, sent in made
        ]
        return found

    def waits(self, name: str) -> bool:
        """True for schedules with copy engines, in which the CPU waits for the size of each copy."""
        return "by=dma" in name

    def exchange(self, which: int) -> None:
        sizes = self.known[which].host
        dist.all_to_all_single(*self.moved[which], sizes.sent, sizes.came, group=self.ranks.group)

    def serial(self, which: int) -> torch.Tensor:
        group = self.ranks.group
        return experts.matmul_all_to_all(self.arrived[which], self.w, self.known[which], group, self.config.rows)

    @cached_property
    def after_padded(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each input set, the two tensors with which a padded dispatch ends. The first has the rows of this rank's experts,
        [local experts, world size * capacity, k]. The second has, for each of this rank's tokens, its place among the rows that
        come back, int64 [rows].
        """
        found = []
        for rows, received, splits in zip(self.arrived, self.received, self.splits, strict=True):
            some = rows if len(rows) else rows.new_zeros(1, self.config.k)
            padded = some.index_select(0, self.padded_rows(received.t().flatten(), len(some)).flatten())
            is_used = self.slots < splits.unsqueeze(1)
            found.append((padded.view(self.experts, -1, self.config.k), is_used.flatten().nonzero().flatten()))
        return found

    def padded(self, which: int) -> torch.Tensor:
        """Run variant `padded`. Return y [rows, n]."""
        rows, places = self.after_padded[which]
        products = torch.bmm(rows, self.w).view(self.experts, self.ranks.world_size, -1, self.config.n)
        sent = products.transpose(0, 1).contiguous()
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self.ranks.group)
        return arrived.view(-1, self.config.n).index_select(0, places)

    def weft(self, variant: str, schedule: str | None) -> Variant:
        """Return the function that calls weft's operator, with `rows` if the variant is bounded."""
        rows, received = (self.config.rows, self.unread) if variant.endswith(BOUNDED) else (None, self.received)
        return lambda which: matmul_all_to_all(
            self.arrived[which], self.w, received[which], self.splits[which], group=self.ranks.group, rows=rows,
            schedule=schedule, capacity=self.most,
        )  # fmt: skip


OPERATOR = ExpertsOperator(SPEC, CombineVariants)
