"""The base class of the MoE problems."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Self

from weft.builders.problem import Problem
from weft.integers import convert
from weft.schedule.regions import SUMMED
from weft.schedule.steps import ITEM_BYTES

_MOST_EXPERTS = 1 << 16  # for more experts it takes minutes to build the schedules


@dataclass(frozen=True, slots=True)
class ExpertsProblem(Problem):
    """The base class of problems with experts (MoE).

    experts: the number of experts on each rank.
    rows: the number of tokens of each rank.
    n, k: the numbers of columns and rows of an expert's weights.
    splits: for each rank, the expected number of its tokens for each expert of all ranks. The actual numbers are known
        only at run time. An empty tuple means equal numbers for all experts.
    most: the largest number of tokens that a rank may send to the experts of one peer.
    exact: True if the CPU reads the number of rows of the result. False if the caller passes the number, so that the
        CPU does not wait.
    """

    world_size: int
    experts: int
    rows: tuple[int, ...]
    n: int
    k: int
    dtype: str
    most: int
    exact: bool = True
    splits: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        convert(self, "world_size", "rows", "experts", "n", "k", "most", "splits")
        if len(self.rows) != self.world_size or self.experts < 1:
            raise ValueError(
                f"rows={self.rows}, experts={self.experts}: give one number of rows for each of {self.world_size} ranks, and "
                f"at least one expert on each"
            )
        if min(self.rows) < 0 or self.k < 0 or self.n < 0 or self.most < 0:
            raise ValueError(f"rows={self.rows}, n={self.n}, k={self.k}, most={self.most}: sizes must not be negative")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is not known; use one of {', '.join(ITEM_BYTES)}")
        if self.dtype == "fp8":
            raise ValueError(
                f"dtype='fp8': experts are multiplied in {', '.join(SUMMED)}; fp8 is for all_gather_matmul"
            )
        everywhere = self.world_size * self.experts
        if not self.splits:
            object.__setattr__(self, "splits", self._even_splits())
        if [(len(of_rank), sum(of_rank)) for of_rank in self.splits] != [(everywhere, count) for count in self.rows]:
            raise ValueError(
                f"splits={self.splits}: give each rank {everywhere} numbers (one for each expert of all ranks) whose sum is the "
                f"rank's entry in rows={self.rows}"
            )
        sent = max((sum(row[r * self.experts : (r + 1) * self.experts]) for s, row in enumerate(self.splits)
                    for r in range(self.world_size) if r != s), default=0)  # fmt: skip
        if sent > self.most:
            raise ValueError(
                f"most={self.most}, but splits send {sent} tokens from one rank to another: pass most={sent} or more"
            )

    def __str__(self) -> str:
        """Return the repr without fields that have their usual values: `return_x=False`, and `splits` if routing is
        even.
        """
        usual = {"splits": self._even_splits(), "return_x": False}
        shown = (f for f in fields(self) if f.name not in usual or usual[f.name] != getattr(self, f.name))
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    def _even_splits(self) -> tuple[tuple[int, ...], ...]:
        everywhere = self.world_size * self.experts
        return tuple(
            tuple(count // everywhere + (expert < count % everywhere) for expert in range(everywhere))
            for count in self.rows
        )

    @classmethod
    def even(cls, rows: int, n: int, k: int, experts: int, world_size: int, dtype: str = "bf16") -> Self:
        """Return the problem with `rows` tokens and `experts` experts on each rank, and even routing."""
        return cls(world_size, experts, (rows,) * world_size, n, k, dtype, most=rows)

    @classmethod
    def sized(
        cls, m: int, n: int, k: int, ranks: int, dtype: str, *,
        experts: Annotated[int | None, "Required: the number of experts of all ranks together. All ranks have "
                                       "the same number."] = None,
        bounded: Annotated[bool, "The CPU does not wait for the number of rows: all_to_all_matmul with max_rows, "
                           "matmul_all_to_all with rows. Required for CUDA graphs (--mode graph)."] = False,
    ) -> Self:  # fmt: skip
        """M: the number of tokens of a rank. A token counts once for each expert that it is sent to. Routing is even.
        [K, N]: an expert's weights.

        weft plan all_to_all_matmul --shape 8192,14336,4096 --option experts=8

        weft plan all_to_all_matmul --shape 32768,4096,7168 --ranks 8 --option experts=256 --option bounded=true --mode graph

        weft plan matmul_all_to_all --shape 32768,7168,2048 --ranks 8 --option experts=256 --option bounded=true --mode graph
        """
        if experts is None:
            raise ValueError(
                f"experts=None: {cls.name} needs the number of experts of all ranks together, a multiple of {ranks} "
                "(--option experts=NUMBER)"
            )
        if experts > _MOST_EXPERTS:
            raise ValueError(f"experts={experts} is too large: plan for at most {_MOST_EXPERTS} experts")
        if experts < 1 or ranks < 1 or experts % ranks:
            above = max(1, -(-experts // max(1, ranks))) * ranks
            raise ValueError(f"experts={experts} must be a positive multiple of ranks={ranks}: use {above}")
        return replace(cls.even(m, n, k, experts // ranks, ranks, dtype), exact=not bounded)

    @property
    def uneven(self) -> str:
        if len({count for of_rank in self.splits for count in of_rank}) <= 1:
            return ""
        everywhere = self.world_size * self.experts
        above = -(-max(self.rows) // everywhere) * everywhere
        return f"M={max(self.rows)} is not divisible by {everywhere} experts (M={above} is)"

    @property
    def evened(self) -> tuple[Self, float] | None:
        if self.splits != self._even_splits() or not self.has_work:
            return None
        everywhere = self.world_size * self.experts
        rows = -(-max(self.rows) // everywhere) * everywhere
        even = replace(self, rows=(rows,) * self.world_size, splits=(), most=self.most + rows - max(self.rows))
        return even, sum(even.rows) / sum(self.rows)

    @property
    def has_work(self) -> bool:
        return sum(self.rows) > 0 and self.k > 0 and self.n > 0

    @property
    def tokens(self) -> str:
        """The number of tokens of each rank as text."""
        rows = str(self.rows[0]) if len(set(self.rows)) == 1 else f"({', '.join(map(str, self.rows))})"
        return f"{rows} tokens"
