"""A record of each rank's work over time. Every executor can fill a `Timeline`, and `weft.trace` draws it.

A span is one piece of work of one rank, such as pooling, a copy, or a wait. A lane is the resource on which spans run
one after the other, such as a CUDA stream, a copy engine or a CPU thread. Times are in microseconds, on a clock that
all ranks of a timeline share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of `lane` on `rank`, from `start_us` to `end_us`, in microseconds.

    bytes: the number of bytes that this work moved between ranks; 0 for work that moves none.
    program: the number of the Triton program (thread block) that did this work; -1 if it is not known.
    """

    rank: int
    lane: str
    name: str
    start_us: float
    end_us: float
    bytes: int = 0
    program: int = -1

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


@dataclass
class Timeline:
    """A list of spans in the order in which they were added. Pass an empty timeline as `timeline=` to a call, which
    adds the spans.
    """

    spans: list[Span] = field(default_factory=list)

    def add(
        self, rank: int, lane: str, name: str, start_us: float, end_us: float, bytes: int = 0, program: int = -1
    ) -> None:
        """Add a span. Raise `ValueError` if it ends before it starts."""
        if end_us < start_us:
            raise ValueError(
                f"span {name!r} of rank {rank} ends at {end_us} us, before it starts at {start_us} us: pass start_us, then end_us"
            )
        self.spans.append(Span(rank, lane, name, start_us, end_us, bytes, program))

    def extend(self, spans: Iterable[Span]) -> None:
        self.spans.extend(spans)

    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans})

    def lanes(self, rank: int) -> list[str]:
        """Return the lanes of `rank`, in the order of their first spans."""
        return list(dict.fromkeys(span.lane for span in self.spans if span.rank == rank))

    def shifted(self, origin_us: float | None = None) -> Timeline:
        """Return a copy with all times shifted, so that `origin_us` (default: the earliest start) becomes zero."""
        if not self.spans:
            return Timeline()
        origin = min(s.start_us for s in self.spans) if origin_us is None else origin_us
        return Timeline([replace(s, start_us=s.start_us - origin, end_us=s.end_us - origin) for s in self.spans])

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)
