"""Benchmark of rows that are multiplied at the ranks of their experts and go back: mixture-of-experts layers x variants.

Rows lie as `weft.all_to_all_matmul` returns them, for a router's choice as in its benchmark; [k, n] is an expert's last matrix.
Variants:

    serial    the baseline, as a careful user writes it: torch's grouped GEMM, a copy into the order of source ranks,
              all_to_all_single. Its sizes are on the host already, from the dispatch before it: it waits for nothing, and can be
              captured (a replay has the same sizes)
    weft      weft.matmul_all_to_all as it chooses, without `rows`: the host waits in each call for the number of tokens
    a name    weft.matmul_all_to_all with that schedule ("combine[chunks=1,by=dma]"; weft-serial: its "serial"); the beginning of a
              name means all that begin so, "all" every one
    ...-bounded  the same with `rows`: no wait on the host

Beside them run, for information, torch's GEMMs alone, grouped and one by one, and the library's all-to-all of as many rows alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call, Mode
from weft.bench.core.tables import Record
from weft.bench.ops.all_to_all_matmul import (
    BOUNDED,
    EXCHANGE,
    GEMM_EACH,
    DispatchVariants,
    ExpertsOperator,
    Load,
    MoeShape,
)
from weft.bench.ops.any_operator import GEMM, Arm, GemmVariants
from weft.bench.ops.gemms import BASELINE, WEFT, Problems
from weft.ops.matmul_all_to_all import OPERATOR as SPEC
from weft.ops.matmul_all_to_all import matmul_all_to_all
from weft.runtime.exchanged import Sizes, returned_by_library
from weft.schedule import MatmulAllToAll
from weft.words import counted


@dataclass(frozen=True)
class ReturningShape(MoeShape):
    """Of the way back: k columns of a row at its expert, n when it returns."""

    def problems(self, op: str, ranks: int, dtype: str) -> Problems:
        """Of calls without and with rows."""
        p = MatmulAllToAll.even(self.rows, self.n, self.k, self.experts // ranks, ranks, dtype)
        return (p, ""), (replace(p, exact=False), BOUNDED)

    def bytes(self, ranks: int, item_bytes: int) -> float:
        return (2 * self.rows + self.experts // ranks * self.n) * self.k * item_bytes + 8 * self.rows * self.n


class CombineVariants(DispatchVariants):
    """Normally distributed rows, weights scaled so that results are about 1; other rows and splits in each input set."""

    baselines = (BASELINE,)
    compared: ClassVar = {WEFT: (BASELINE,), WEFT + BOUNDED: (BASELINE,)}
    beside = (GEMM, GEMM_EACH, EXCHANGE)

    def draw(self) -> None:
        ranks, shape = self.ranks, self.config
        self.experts = shape.experts // ranks.world_size
        self.all_splits = [shape.splits(ranks.world_size, which) for which in range(self.input_sets)]
        self.splits = [splits[ranks.rank].to(ranks.device) for splits in self.all_splits]
        self.received = [self.counts(which).to(ranks.device) for which in range(self.input_sets)]
        self.arrived = [self.rows_at(which, ranks.rank) for which in range(self.input_sets)]
        self.w = torch.empty(self.experts, shape.k, shape.n, dtype=self.dtype, device=ranks.device)
        for i, of_expert in enumerate(self.w):
            of_expert.copy_(self.expert(ranks.rank, i))

    def expert(self, rank: int, number: int) -> torch.Tensor:
        shape = self.config
        drawn = self.normal(10_000 * (1 + rank) + number, shape.k, shape.n).mul_(shape.k**-0.5)
        return drawn.to(self.dtype)

    def rows_at(self, which: int, rank: int) -> torch.Tensor:
        """What is at the experts of `rank`, by expert and then by source."""
        first = rank * self.experts
        came = int(self.all_splits[which][:, first : first + self.experts].sum())
        return self.normal(1000 * which + rank, came, self.config.k).to(self.dtype)

    def reference(self, which: int) -> torch.Tensor:
        parts, mine = [], self.ranks.rank
        for rank in range(self.ranks.world_size):
            first = rank * self.experts
            of_experts = self.all_splits[which][:, first : first + self.experts].t()  # [experts, sources]
            segments = iter(self.rows_at(which, rank).split(of_experts.flatten().tolist()))
            for number in range(self.experts):
                of_sources = [next(segments) for _ in range(self.ranks.world_size)]
                parts.append(of_sources[mine].double() @ self.expert(rank, number).double())
        return torch.cat(parts)

    def rows_of(self, name: str, output: torch.Tensor, which: int) -> torch.Tensor:
        return output

    @property
    def load(self) -> Load:
        found = super().load
        return replace(found, busiest_bytes=found.busiest_bytes / self.config.k * self.config.n)

    def baseline(self, mode: Mode) -> str:
        return BASELINE

    def said(self, records: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[str]:
        shape, load = self.config, self.load
        return [
            f"{counted(shape.m, 'token')} a rank, {shape.top_k} of {counted(shape.experts, 'expert')} each; most rows over mean: "
            f"{load.rank_skew:.2f} of ranks, {load.expert_skew:.2f} of experts",
            f"all but {BASELINE} and what ends in {BOUNDED} wait for the device in each call, in queued mode too: for the number "
            "of tokens",
            *GemmVariants.said(self, records, ceilings),
        ]

    # --- variants, and what runs beside them ---

    def others(self, wanted: Sequence[str]) -> tuple[dict[str, Arm], dict[str, Call], list[str]]:
        ranks = self.ranks
        self.sizes = [self.counts(which).sum(0).tolist() for which in range(self.input_sets)]
        ends = [torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32) for sizes in self.sizes]
        self.ends = [of_set.to(ranks.device) for of_set in ends]
        self.known = [Sizes(*tables) for tables in zip(self.splits, self.received, strict=True)]
        rows = [sum(sizes.host.came) for sizes in self.known]  # and so the host knows
        self.made = [self.w.new_empty(count, self.config.n) for count in rows]
        self.returned = [self.w.new_empty(self.config.rows, self.config.n) for _ in rows]
        beside: dict[str, Call] = {GEMM: self.gemm, GEMM_EACH: self.gemm_each, EXCHANGE: self.exchange}
        if any(size * self.dtype.itemsize % 16 for size in (self.config.n, self.config.k)):
            del beside[GEMM]  # torch's grouped GEMM refuses rows that do not begin at multiples of 16 bytes
        return {BASELINE: self.serial}, beside, []

    def waits(self, name: str) -> bool:
        return name != BASELINE and not name.endswith(BOUNDED)

    def serial(self, which: int) -> torch.Tensor:
        group = self.ranks.group
        return returned_by_library(self.arrived[which], self.w, self.known[which], group, self.config.rows)

    def weft(self, variant: str, schedule: str | None) -> Arm:
        """Without `rows`, or with them."""
        rows = self.config.rows if variant.endswith(BOUNDED) else None

        def call(which: int) -> torch.Tensor:
            return matmul_all_to_all(
                self.arrived[which], self.w, self.received[which], self.splits[which], group=self.ranks.group, rows=rows,
                schedule=schedule,
            )  # fmt: skip

        return call

    def exchange(self, which: int) -> None:
        sizes = self.known[which].host
        dist.all_to_all_single(self.returned[which], self.made[which], sizes.sent, sizes.came, group=self.ranks.group)


class _MatmulAllToAll(ExpertsOperator):
    variants, shape = CombineVariants, ReturningShape
    head = ("tokens x N x K", "most / mean rows")
    optional = (*head[1:], "best schedule", "of them", "GEMMs alone")

    def described(self, record: Record) -> list[str]:
        return [record["config"], f"{record['rank_skew']:.2f}"]

    def twin(self, record: Record) -> str | None:
        found = super().twin(record)
        return BASELINE if found == f"serial{BOUNDED}" else found


OPERATOR = _MatmulAllToAll(SPEC)
