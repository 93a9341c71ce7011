"""Base classes of problems that multiply [m, k] @ [k, n] on every rank and communicate the products."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from weft.builders.problem import Problem, require_sizes
from weft.integers import convert
from weft.schedule.regions import SUMMED


@dataclass(frozen=True, slots=True)
class RowsProblem(Problem):
    """A problem with m rows, which are divided among the ranks."""

    m: int

    @property
    def parts(self) -> int:
        """The number of parts into which m is divided."""
        return self.world_size

    @property
    def rows(self) -> int:
        """The number of rows of a part."""
        return self.m // self.parts

    @property
    def family(self) -> tuple[Hashable, float]:
        """Two values: a key that is equal for problems that differ only in M, and M divided by the number of parts (`parts`),
        rounded up.
        """
        return replace(self, m=self.parts), float(-(-self.m // self.parts))

    def resized(self, size: float) -> Self:
        return replace(self, m=max(1, round(size)) * self.parts)


def chunks_between_hosts(rails: int) -> tuple[str, ...]:
    """Return the names of the schedules to time for ranks on several hosts (`Problem.between_hosts`). With rails these
    are schedules in two levels, otherwise a collective for each chunk.
    """
    name = f"two_levels[hosts={rails}," if rails else "collective["
    return tuple(f"{name}chunks={chunks}]" for chunks in (1, 2, 4))


@dataclass(frozen=True, slots=True)
class GemmProblem(RowsProblem):
    """A GEMM on every rank, whose products are communicated."""

    supports: ClassVar[str] = "reduced"
    """The operation that the dtype must support, for the error text."""
    n: int
    k: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in SUMMED:
            raise ValueError(f"dtype={self.dtype!r} cannot be {self.supports}: use one of {', '.join(SUMMED)}")
        convert(self, "m", "n", "k", "world_size")
        require_sizes(self.m, self.n, self.k, self.world_size)

    @property
    def has_work(self) -> bool:
        return self.m > 0 and self.n > 0 and self.k > 0
