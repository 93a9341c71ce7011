"""Operators as descriptions: what is asked for. The ways known to do it are in `weft.schedule.builders`."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from weft.schedule.candidate import Candidate
from weft.schedule.steps import ITEM_BYTES
from weft.words import counted


@dataclass(frozen=True, slots=True)
class Problem:
    """What the planner asks of an operator's description, beside its builders. One of them is `serial`: the library's calls,
    one after the other, which is what the others are compared with and what says how large the whole operations are."""

    world_size: int
    name: ClassVar[str]
    """The operator's."""
    tried_on_gpus: ClassVar[bool] = True
    """Whether its schedules have run and been timed there; if not, none but serial is taken unasked."""
    rounds_sums: ClassVar[bool] = False
    """Whether the library, too, rounds what ranks have computed to the result's dtype before it adds it up."""

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            PROBLEMS[cls.name] = cls

    @classmethod
    def sized(cls, m: int, n: int, k: int, ranks: int, dtype: str) -> Problem:
        """With even sizes, as plans and benchmarks name them; options of an operator's own follow as keywords."""
        given: dict[str, Any] = {"world_size": ranks, "m": m, "n": n, "k": k, "dtype": dtype}
        if {field.name for field in fields(cls)} != given.keys():
            raise ValueError(f"{cls.name} cannot be planned by sizes M, N and K")
        return cls(**given)

    @property
    def text(self) -> str:
        """Sizes, for a line of text."""
        sizes = (f"{field.name}={getattr(self, field.name)}" for field in fields(self) if field.name != "world_size")
        return f"{', '.join(sizes)}, {counted(self.world_size, 'rank')}"

    @property
    def has_work(self) -> bool:
        """Whether anything is to be computed."""
        return True

    @property
    def family(self) -> tuple[Hashable, float]:
        """(what is alike in problems that differ in one size only, that size): choices are made for a few sizes of each family
        (`weft.plan.nearby`). Here every problem is a family of its own."""
        return self, 0.0

    def resized(self, size: float) -> Problem:
        """The one of this family that is nearest to a size."""
        return self

    @property
    def not_captured(self) -> str:
        """Why no CUDA graph can capture it, whatever the schedule; empty if one may."""
        return ""

    def takes(self, candidate: Candidate) -> bool:
        """Whether a call may take it that pins none."""
        return True

    def worth_running(self, candidate: Candidate) -> bool:
        """Whether to try it where no model says how fast it is: each one that is run costs a first call some milliseconds."""
        return True


PROBLEMS: dict[str, type[Problem]] = {}
"""By the operator's name."""


def _require_even(m: int, n: int, k: int, world_size: int) -> None:
    """Raises `ValueError` for sizes that cannot be, or an m of which ranks do not have equal parts."""
    if not all(isinstance(size, int) and size >= 0 for size in (m, n, k)) or world_size < 1:
        raise ValueError(f"m={m}, n={n}, k={k}, world_size={world_size}: sizes are whole numbers from 0, ranks from 1")
    if m % world_size:
        below = m - m % world_size
        raise ValueError(f"m={m} must be divisible by world_size={world_size}: use {below} or {below + world_size}")


SCALED_MULTIPLE = 16
"""Of k and n: what the libraries' fp8 GEMMs take."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """fp8 operands with fp32 scales: ys[i] = (x * its scales) @ (ws[i] * its scales) + bias[i].

    by "tensor": one scale for a whole matrix; a rank's own is for all of x. "row": one for each row of x, and for each column
    of a weight. out: the dtype of each y. biased: which have a bias. fast: which are accumulated fast (and less exactly).

    Buffers, beside those of the operator: x_scale [1, 1] or [rows[rank], 1], w_scale0, w_scale1, ... [1, 1] or [1, n[i]], and
    bias0, bias1, ... [1, n[i]], where there is one, of the dtype of its y, or, if that is fp8, in bf16; in.
    """

    by: Literal["tensor", "row"]
    out: tuple[str, ...]
    biased: tuple[bool, ...]
    fast: tuple[bool, ...]

    @staticmethod
    def bias_dtype(out: str) -> str:
        return "bf16" if out == "fp8" else out

    def check(self, n: tuple[int, ...], k: int, dtype: str) -> None:
        """Raises `ValueError` for what fp8 GEMMs cannot be."""
        if dtype != "fp8":
            raise ValueError(f"dtype={dtype!r}: operands with scales are fp8")
        if {len(self.out), len(self.biased), len(self.fast)} != {len(n)}:
            raise ValueError(f"{self} must have one entry for each of n={n} in out, biased and fast")
        for name, size in (("K", k), *((f"N of Bs[{i}]", columns) for i, columns in enumerate(n))):
            if size < 1 or size % SCALED_MULTIPLE:
                below = size - size % SCALED_MULTIPLE
                nearest = f"{below} or {below + SCALED_MULTIPLE}" if below else f"{SCALED_MULTIPLE}"
                raise ValueError(
                    f"{name}={size} must be a positive multiple of {SCALED_MULTIPLE}, as fp8 GEMMs want it: use {nearest}"
                )
        for dtype in self.out:
            if dtype not in ("bf16", "fp16", "fp32") and (dtype, self.by) != ("fp8", "tensor"):
                raise ValueError(
                    f"out={self.out}: results of fp8 GEMMs are bf16, fp16, fp32 or, with scales by tensor, fp8"
                )


@dataclass(frozen=True, slots=True)
class AllGatherMatmul(Problem):
    """ys[i] = concatenation of all ranks' x_shard along the rows @ ws[i].

    Buffers: x_shard [rows[rank], k], w0, w1, ... [k, n[i]] in; y0, y1, ... [sum(rows), n[i]] out, and with
    `return_gathered` also x [sum(rows), k]; with `scaled`, those that it names. Source: "Design Space Exploration of DMA
    based Finer-Grain Compute Communication Overlap", II-B.
    """

    name: ClassVar[str] = "all_gather_matmul"
    world_size: int
    rows: tuple[int, ...]
    n: tuple[int, ...]
    k: int
    dtype: str
    return_gathered: bool = False
    scaled: Scaled | None = None

    def __post_init__(self) -> None:
        if len(self.rows) != self.world_size:
            raise ValueError(f"rows={self.rows} must have one entry for each of {self.world_size} ranks")
        if min(self.rows) < 0 or self.k < 0 or min(self.n, default=0) < 0 or not self.n:
            raise ValueError(f"rows={self.rows}, n={self.n}, k={self.k}: sizes must not be negative, and n not empty")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is not known; use one of {', '.join(ITEM_BYTES)}")
        if self.scaled is not None:
            self.scaled.check(self.n, self.k, self.dtype)

    @staticmethod
    def even(m: int, n: int, k: int, world_size: int, dtype: str = "bf16") -> AllGatherMatmul:
        """[m, k] gathered from equal shards times one [k, n] on every rank."""
        _require_even(m, n, k, world_size)
        return AllGatherMatmul(world_size, (m // world_size,) * world_size, (n,), k, dtype)

    @classmethod
    def sized(cls, m: int, n: int, k: int, ranks: int, dtype: str) -> AllGatherMatmul:
        p = cls.even(m, n, k, ranks, dtype)
        return replace(p, scaled=Scaled("tensor", ("bf16",), (False,), (False,))) if dtype == "fp8" else p

    @property
    def m(self) -> int:
        return sum(self.rows)

    @property
    def family(self) -> tuple[Hashable, float]:
        """Of M. Uneven shards are planned as they are."""
        if len(set(self.rows)) > 1:
            return self, 0.0
        return replace(self, rows=(1,) * self.world_size), float(self.rows[0])

    def resized(self, size: float) -> AllGatherMatmul:
        return self if len(set(self.rows)) > 1 else replace(self, rows=(max(1, round(size)),) * self.world_size)

    @property
    def flops(self) -> float:
        return 2.0 * self.m * sum(self.n) * self.k

    @property
    def largest_shard_bytes(self) -> int:
        return max(self.rows) * self.k * ITEM_BYTES[self.dtype]

    @property
    def text(self) -> str:
        n = "+".join(map(str, self.n))
        scaled = "" if self.scaled is None else f" scaled by {self.scaled.by}"
        ranks = counted(self.world_size, "rank")
        return f"[{self.m}, {self.k}] gathered from {ranks} @ [{self.k}, {n}] on each, {self.dtype}{scaled}"

    @property
    def has_work(self) -> bool:
        return self.m > 0 and self.k > 0 and sum(self.n) > 0

    def worth_running(self, candidate: Candidate) -> bool:
        return candidate.name in (
            "serial", "gather[by=kernel]", "shard[chunks=1,send=in_turn,by=dma]", "shard[chunks=2,send=in_turn,by=dma]"
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatmulReduceScatter(Problem):
    """y = this rank's rows of the sum of all ranks' x @ w.

    Buffers: x [m, k] and w [k, n] in; y [m / ranks, n] out. Source: "T3: Transparent Tracking & Triggering for Fine-grained
    Overlap of Compute & Collectives", 4.
    """

    name: ClassVar[str] = "matmul_reduce_scatter"
    tried_on_gpus: ClassVar[bool] = False
    rounds_sums: ClassVar[bool] = True
    world_size: int
    m: int
    n: int
    k: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ("fp32", "fp16", "bf16"):
            raise ValueError(f"dtype={self.dtype!r}: what ranks compute is added up in fp32, fp16 or bf16")
        _require_even(self.m, self.n, self.k, self.world_size)

    @property
    def rows(self) -> int:
        """Of a rank's result."""
        return self.m // self.world_size

    @property
    def family(self) -> tuple[Hashable, float]:
        """Of M."""
        return replace(self, m=self.world_size), float(self.rows)

    def resized(self, size: float) -> MatmulReduceScatter:
        return replace(self, m=max(1, round(size)) * self.world_size)

    @property
    def text(self) -> str:
        ranks = counted(self.world_size, "rank")
        return f"[{self.m}, {self.k}] @ [{self.k}, {self.n}] on each of {ranks}, added up, {self.rows} rows to each, {self.dtype}"

    @property
    def has_work(self) -> bool:
        return self.m > 0 and self.n > 0 and self.k > 0

    def worth_running(self, candidate: Candidate) -> bool:
        return candidate.name in (
            "serial", "scatter", "direct[chunks=1,by=dma,add=reduce]", "direct[chunks=2,by=dma,add=gemm]"
        )  # fmt: skip


_MOST_SAMPLES = 1024  # of a rank, that choices are made for


@dataclass(frozen=True, slots=True)
class EmbeddingAllToAll(Problem):
    """out = for each of a rank's samples the sums of its bags of all tables, side by side; ranks own the tables.

    slots: for each rank, (first column of out, columns) of each of its tables' blocks, by rising column. rows_read: how many
    rows a bag of each slot sums up, on the average, in the same order; empty: one each.

    Buffers: bags [sum(batch_sizes), slots] in, an element for each bag: its ids, of which a rank has those of its own slots;
    tables [most rows read, columns] in, where the tables of all slots lie side by side, a rank's own on it: a region of them
    has as many rows as a bag of it reads, on the average, whichever these are. out [max(batch_sizes), columns] is symmetric,
    and its first batch_sizes[rank] rows are the result. Source: "Accelerating Multi-GPU Embedding Retrieval with PGAS-Style
    Communication for Deep Learning Recommendation Systems", III.
    """

    name: ClassVar[str] = "embedding_all_to_all"
    world_size: int
    batch_sizes: tuple[int, ...]
    slots: tuple[tuple[tuple[int, int], ...], ...]
    rows_read: tuple[tuple[float, ...], ...] = ()
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if len(self.batch_sizes) != self.world_size or len(self.slots) != self.world_size or self.world_size < 1:
            raise ValueError(
                f"batch_sizes={self.batch_sizes} and slots, of {len(self.slots)} ranks, must have one entry for each of "
                f"{self.world_size} ranks"
            )
        if min(self.batch_sizes) < 0:
            raise ValueError(f"batch_sizes={self.batch_sizes} must not be negative")
        if self.rows_read and [len(rows) for rows in self.rows_read] != [len(slots) for slots in self.slots]:
            raise ValueError("rows_read must have one number for each slot of each rank, or be empty")
        if min((rows for of_rank in self.rows_read for rows in of_rank), default=0) < 0:
            raise ValueError(f"rows_read={self.rows_read} must not be negative")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is not known; use one of {', '.join(ITEM_BYTES)}")
        end = 0
        for column, dim in sorted(slot for of_rank in self.slots for slot in of_rank):
            if column != end or dim < 1:
                raise ValueError(f"slots must cover all columns once: one of {dim} begins at {column}, and not {end}")
            end = column + dim
        if not end or any(list(of_rank) != sorted(of_rank) for of_rank in self.slots):
            raise ValueError(f"slots={self.slots}: there must be one, and a rank's must be in the order of columns")

    @property
    def columns(self) -> int:
        return sum(dim for of_rank in self.slots for _, dim in of_rank)

    @classmethod
    def sized(cls, m: int, n: int, k: int, ranks: int, dtype: str, *, tables: int | None = None) -> EmbeddingAllToAll:
        """m: samples of all ranks. n: columns of each table. k: rows that a bag of it reads. tables: of all ranks."""
        if tables is None or tables < 1:
            raise ValueError(
                f"tables={tables}: {cls.name} needs the number of tables of all ranks together, at least 1 (--tables)"
            )
        each = [tables // ranks + (rank < tables % ranks) for rank in range(ranks)]
        first = [sum(each[:rank]) for rank in range(ranks)]
        slots = tuple(tuple(((f + i) * n, n) for i in range(e)) for f, e in zip(first, each, strict=True))
        batch_sizes = tuple(m // ranks + (rank < m % ranks) for rank in range(ranks))
        return cls(ranks, batch_sizes, slots, tuple((float(k),) * e for e in each), dtype)

    @property
    def text(self) -> str:
        tables = sum(map(len, self.slots))
        bags = [rows for of_rank in self.rows_read for rows in of_rank] or [1.0]
        return (
            f"{counted(sum(self.batch_sizes), 'sample')}, {counted(tables, 'feature')} with {self.columns} columns and "
            f"{sum(bags) / len(bags):.3g} rows a bag, {self.dtype}, {counted(self.world_size, 'rank')}"
        )

    @property
    def has_work(self) -> bool:
        return sum(self.batch_sizes) > 0

    @property
    def family(self) -> tuple[Hashable, float]:
        return replace(self, batch_sizes=(1,) * self.world_size), self.size_of(self.batch_sizes)

    @staticmethod
    def size_of(batch_sizes: tuple[int, ...]) -> float:
        """Samples of a rank. An uneven batch is taken for an even one of its largest part; more than so many samples take in
        proportion to their number, whatever is chosen."""
        return float(min(max(batch_sizes), _MOST_SAMPLES))

    def resized(self, size: float) -> EmbeddingAllToAll:
        return replace(self, batch_sizes=(max(1, round(size)),) * self.world_size)

    def takes(self, candidate: Candidate) -> bool:
        """Order and slice size are the caller's to say."""
        return not candidate.parameters


@dataclass(frozen=True, slots=True)
class AllToAllMatmul(Problem):
    """Every token to the rank of its expert, and there times the expert's weights.

    experts: of each rank. rows: how many tokens each rank has. splits: for each rank, how many of them are for each expert of
    all ranks, which only the run knows: these are expected; empty: as many for each. most: tokens that a rank may send to
    one other. exact: y has the rows that arrive, which the host has to know; otherwise at least that many.

    Buffers: tokens [rows[rank], k], sorted by expert, splits [1, experts of all] int64, w [experts * k, n], one expert below
    the other, in; y [rows that arrive, n] by expert and then by the rank that they come from, and received [ranks, experts]
    int64, how many these are, out. Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication
    Overlap", II-B.
    """

    name: ClassVar[str] = "all_to_all_matmul"
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
        if len(self.rows) != self.world_size or self.experts < 1:
            raise ValueError(
                f"rows={self.rows}, experts={self.experts}: one number of rows for each of {self.world_size} ranks, and at "
                f"least one expert on each"
            )
        if min(self.rows) < 0 or self.k < 0 or self.n < 0 or self.most < 0:
            raise ValueError(f"rows={self.rows}, n={self.n}, k={self.k}, most={self.most}: sizes must not be negative")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is not known; use one of {', '.join(ITEM_BYTES)}")
        if self.dtype == "fp8":
            raise ValueError("dtype='fp8': experts are multiplied in bf16, fp16 or fp32; fp8 is for all_gather_matmul")
        everywhere = self.world_size * self.experts
        if not self.splits:
            object.__setattr__(self, "splits", self._even_splits())
        if [(len(of_rank), sum(of_rank)) for of_rank in self.splits] != [(everywhere, count) for count in self.rows]:
            raise ValueError(f"splits must be {everywhere} numbers on each rank that add up to its rows={self.rows}")
        sent = max((sum(row[r * self.experts : (r + 1) * self.experts]) for s, row in enumerate(self.splits)
                    for r in range(self.world_size) if r != s), default=0)  # fmt: skip
        if sent > self.most:
            raise ValueError(f"a rank sends {sent} tokens to one other, and most={self.most}")

    def __str__(self) -> str:
        """As repr, but splits, a number for each expert of all, only where they are not even."""
        shown = (f for f in fields(self) if f.name != "splits" or self.splits != self._even_splits())
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    def _even_splits(self) -> tuple[tuple[int, ...], ...]:
        everywhere = self.world_size * self.experts
        return tuple(
            tuple(count // everywhere + (expert < count % everywhere) for expert in range(everywhere))
            for count in self.rows
        )

    @staticmethod
    def even(rows: int, n: int, k: int, experts: int, world_size: int, dtype: str = "bf16") -> AllToAllMatmul:
        """`rows` tokens on each rank, as many for each of `experts` of a rank."""
        return AllToAllMatmul(world_size, experts, (rows,) * world_size, n, k, dtype, most=rows)

    @classmethod
    def sized(
        cls, m: int, n: int, k: int, ranks: int, dtype: str, *, experts: int | None = None, bounded: bool = False
    ) -> AllToAllMatmul:
        """m: tokens of each rank. experts: of all ranks. bounded: with `max_rows`."""
        if experts is None or experts < 1 or ranks < 1 or experts % ranks:
            above = max(1, -(-(experts or 1) // max(1, ranks))) * ranks
            raise ValueError(
                f"experts={experts} must be a positive multiple of ranks={ranks}: {cls.name} has so many, on all ranks "
                f"together; use {above}"
            )
        return replace(cls.even(m, n, k, experts // ranks, ranks, dtype), exact=not bounded)

    @property
    def not_captured(self) -> str:
        if not self.exact:
            return ""
        return (
            f"no graph can capture {self.name} that returns exactly the rows that arrive, since the host reads how many; plan it "
            "with --bounded (in Python bounded=True), and call it with max_rows"
        )

    @property
    def text(self) -> str:
        rows = str(self.rows[0]) if len(set(self.rows)) == 1 else f"({', '.join(map(str, self.rows))})"
        return (
            f"{rows} tokens [{self.k}] of each of {counted(self.world_size, 'rank')} @ [{self.experts}, {self.k}, {self.n}] of "
            f"their experts' ranks, {self.dtype}, {'as many rows as arrive' if self.exact else 'bounded'}"
        )

    @property
    def has_work(self) -> bool:
        return sum(self.rows) > 0 and self.k > 0 and self.n > 0

    def worth_running(self, candidate: Candidate) -> bool:
        given = dict(candidate.parameters)
        return given.get("chunks", 1) <= 4 and given.get("send", "in_turn") == "in_turn"


def described(op: str, *, m: int, n: int, k: int, ranks: int, dtype: str = "bf16", **options: Any) -> Problem:
    """The operator of that name with even sizes, as `weft.plan.explain` describes them. `ValueError` if it does not go. options:
    of its `Problem.sized`; one that is None or False is as not given."""
    if op not in PROBLEMS:
        raise ValueError(f"no operator {op!r} can be planned; there is {', '.join(PROBLEMS)}")
    given = {name: value for name, value in options.items() if value not in (None, False)}
    if unknown := given.keys() - inspect.signature(PROBLEMS[op].sized).parameters.keys():
        said = ", ".join(f"{name}={given[name]!r}" for name in sorted(unknown))
        having = ", ".join(
            name for name, one in PROBLEMS.items() if unknown <= inspect.signature(one.sized).parameters.keys()
        )
        raise ValueError(f"{said}: {op} has none of it{having and f', {having} has'}")
    return PROBLEMS[op].sized(m, n, k, ranks, dtype, **given)
