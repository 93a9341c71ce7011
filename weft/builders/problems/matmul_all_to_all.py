"""GEMM + MoE combine: multiply rows by their experts' weights, and send them back to the ranks of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.builders.problem import Candidate
from weft.builders.problems.experts import ExpertsProblem
from weft.words import counted


@dataclass(frozen=True, slots=True)
class MatmulAllToAll(ExpertsProblem):
    """MoE combine: multiply the received rows by their experts' weights, and return every row to the rank that sent it.

    exact: True if the CPU reads the number of rows of the result. False if the caller passes the number, so that the
        CPU does not wait.

    Buffers. The last is the output:

        h         [rows that arrived, k]       sorted by local expert, and then by source rank
        received  [ranks, experts] int64       the number of rows that arrived from each rank for each local expert
        splits    [1, ranks * experts] int64   the number of this rank's tokens for each expert of all ranks
        w         [experts * k, n]             one expert below the other
        y         [rows[rank], n]              sorted by global expert, like this rank's tokens

    Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 7.1 and 7.2.

    Builders: `weft.builders.matmul_all_to_all`.
    """

    name: ClassVar[str] = "matmul_all_to_all"

    @property
    def not_captured(self) -> str:
        if not self.exact:
            return ""
        return (
            f"a CUDA graph cannot capture {self.name} without rows, because the CPU must read the number of "
            "rows: plan it with --option bounded=true (in Python bounded=True), and call it with rows"
        )

    @property
    def text(self) -> str:
        return (
            f"{self.tokens} [{self.k}] of each of {counted(self.world_size, 'rank')} @ [{self.experts}, {self.k}, {self.n}] expert "
            f"weights on each rank, results sent back, {self.dtype}, number of rows {'read by the CPU' if self.exact else 'passed'}"
        )

    def worth_running(self, candidate: Candidate) -> bool:
        return candidate.name == "serial" or dict(candidate.parameters)["chunks"] == 1 + (
            candidate.builder != "combine"
        )
