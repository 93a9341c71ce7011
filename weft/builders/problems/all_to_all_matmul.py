"""MoE dispatch + GEMM: send tokens to the ranks of their experts, and multiply them there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from weft.builders.problem import Candidate
from weft.builders.problems.experts import ExpertsProblem
from weft.schedule.regions import ITEM_BYTES
from weft.words import counted


@dataclass(frozen=True, slots=True)
class AllToAllMatmul(ExpertsProblem):
    """MoE dispatch: send every token to the rank of its expert, and multiply it there by the expert's weights.

    exact: True if y has exactly as many rows as arrive. The CPU must then read their number. False if y may have more
        rows.
    return_x: True to return the arrived tokens too.

    Buffers. The last three are outputs (x only with return_x):

        tokens    [rows[rank], k]              sorted by expert
        splits    [1, ranks * experts] int64   the number of this rank's tokens for each expert of all ranks
        w         [experts * k, n]             one expert below the other
        y         [rows that arrive, n]        sorted by local expert, and then by source rank
        received  [ranks, experts] int64       the number of rows that arrive from each rank for each local expert
        x         [rows that arrive, k]        sorted by source rank, and then by local expert

    Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", II-A and IV-B2.

    Builders: `weft.builders.all_to_all_matmul`, `weft.builders.ficco_all_to_all_matmul`.
    """

    name: ClassVar[str] = "all_to_all_matmul"
    return_x: bool = False

    @property
    def chosen_like(self) -> AllToAllMatmul:
        """The problem without x, if y has exactly the rows that arrive. Experts return x only in calls with gradients.
        Activation checkpointing runs a call with and without gradients, and compares the results.
        """
        return replace(self, return_x=False) if self.return_x and self.exact else self

    @property
    def not_captured(self) -> str:
        if not self.exact:
            return ""
        return (
            f"a CUDA graph cannot capture {self.name} if it returns exactly the rows that arrive, because the "
            "CPU must read their number: plan it with --option bounded=true (in Python bounded=True), and call "
            "it with max_rows"
        )

    @property
    def text(self) -> str:
        return (
            f"{self.tokens} [{self.k}] from each of {counted(self.world_size, 'rank')} @ [{self.experts}, {self.k}, {self.n}] "
            f"expert weights on each rank, {self.dtype}, {'exact' if self.exact else 'bounded'} output rows"
            f"{', and the received tokens' if self.return_x else ''}"
        )

    def takes(self, candidate: Candidate) -> bool:
        """Return False for schedules that would be inaccurate or slow to plan.

        With 16-bit dtypes on more than 8 ranks, `ficco_2d` rounds too often. On more than 32 ranks, schedules that cut
        tokens into one piece per rank take too long to plan.
        """
        if candidate.pieces_grow and self.world_size > 32:
            return False
        return candidate.builder != "ficco_2d" or ITEM_BYTES[self.dtype] > 2 or self.world_size <= 8

    def worth_running(self, candidate: Candidate) -> bool:
        given = dict(candidate.parameters)
        if candidate.builder.startswith("ficco"):
            return False
        return given.get("chunks", 1) <= 4 and given.get("send", "in_turn") == "in_turn"
