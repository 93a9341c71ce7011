"""The choice of a sharding for each table, by the predicted time and the memory of each rank.

The slowest rank determines the time, so the planner minimises the slowest rank's time. A rank's time for a step is the
sum of two lower bounds, for its memory and for its links:

    time = bytes read and written / memory bandwidth + bytes sent or received / link bandwidth

B is the number of samples per rank, W the number of ranks. Per sample, r rows of a table are read. The table has F
features, D columns of e bytes, and s bytes of optimizer states per row. Ids have 8 bytes. The bytes for each kind of
sharding are

    kind        bytes read and written in memory                      bytes on the links, in forward and backward
    whole       W B r (D e + 2 (D e + s)) + 2 W B F D e               2 (W - 1) B (F D e + 8 r)
    columns     as for whole, with the columns of the part            as for whole, with the columns of the part
    rows        share W B r (D e + 2 (D e + s)) + 2 W B F D e         2 (W - 1) B (F D e + 8 r share)
    replicated  B r (3 D e + 2 s) + 2 B F D e + 5 rows (D + 1) 4      2 (W - 1) / W rows (D + 1) 4

share is the fraction of the table's ids that are in the part. With `rows`, the rank of a sample also reads a vector of
each part, and sums these vectors. A replicated table has a dense gradient: for each of its `rows` rows, D float32
numbers and a float32 flag.

The model ignores duplicate ids, caches, and overlap of memory and links. Tables are placed one after the other, the
most expensive first, each where the slowest rank's time stays shortest. Then each table is placed again with all others
fixed, until nothing improves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from weft.arguments import iterated
from weft.embedding.optimizers import EmbeddingOptimizer
from weft.embedding.partition import ColumnWise, DataParallel, Partition, RowWise, TableSharding, TableWise
from weft.embedding.placement import place_tables
from weft.embedding.tables import INDEX_BYTES, EmbeddingBagConfig, bytes_text
from weft.words import counted

Kind: TypeAlias = Literal["table_wise", "column_wise", "row_wise", "data_parallel"]
_LEAST_COLUMNS = 16  # least columns of a part: narrower rows waste memory bandwidth
_PASSES = 4


@dataclass(frozen=True)
class Load:
    """The load that a table puts on a rank: memory in bytes, and time per training step in seconds."""

    nbytes: float
    seconds: float


@dataclass(frozen=True)
class TablePlan:
    """A sharding of all tables. Print it for a report.

    placement: the value for the argument `placement` of `weft.nn.ShardedEmbeddingBagCollection`.
    loads: each table's load on each rank.
    refused: for each table, the kinds of sharding that did not fit together with the other tables, with the reason.
    """

    partition: Partition
    loads: tuple[tuple[Load, ...], ...]
    memory_bytes: float | None
    refused: tuple[tuple[str, ...], ...]

    @property
    def placement(self) -> dict[str, TableSharding]:
        return {t.name: s for t, s in zip(self.partition.tables, self.partition.shardings, strict=True)}

    @property
    def seconds(self) -> tuple[float, ...]:
        """The predicted time of a step on each rank, in seconds."""
        return tuple(sum(load.seconds for load in of_rank) for of_rank in zip(*self.loads, strict=True))

    @property
    def nbytes(self) -> tuple[float, ...]:
        """For each rank, the bytes of its tables, optimizer states and reduced gradients."""
        return tuple(sum(load.nbytes for load in of_rank) for of_rank in zip(*self.loads, strict=True))

    def __str__(self) -> str:
        lines = [f"{'table':<24} {'rows':>12} {'columns':>7} {'bytes':>10}  sharding"]
        for table, sharding, loads, refused in zip(
            self.partition.tables, self.partition.shardings, self.loads, self.refused, strict=True
        ):
            total = bytes_text(sum(load.nbytes for load in loads))
            lines.append(
                f"{table.name:<24} {table.num_embeddings:>12} {table.embedding_dim:>7} {total:>10}  {sharding}"
            )
            lines += [f"{'':<26} does not fit: {reason}" for reason in refused]
        lines.append(f"{'rank':<24} {'bytes':>12} {'time':>7}")
        for rank, (nbytes, seconds) in enumerate(zip(self.nbytes, self.seconds, strict=True)):
            left = "" if self.memory_bytes is None else f"  of {bytes_text(self.memory_bytes)}"
            lines.append(f"{rank:<24} {bytes_text(nbytes):>12} {seconds * 1e6:>4.0f} us{left}")
        return "\n".join(lines)


def plan_tables(
    tables: Sequence[Any],
    world_size: int,
    *,
    samples: int,
    rows_read: Sequence[float] | Mapping[str, float] | None = None,
    optimizer: EmbeddingOptimizer | None = None,
    memory_bytes: float | None = None,
    memory_gbps: float = 3000.0,
    link_gbps: float = 400.0,
    kinds: Sequence[Kind] = get_args(Kind),
    row_shares: Mapping[str, Sequence[float]] | None = None,
) -> TablePlan:
    """Return a sharding for each table. Equal arguments give equal plans on all ranks.

    tables: `weft.EmbeddingBagConfig` or TorchRec's, all with one dtype.
    world_size: the number of ranks.
    samples: the number of samples of a rank in a step.
    rows_read: the mean number of rows that a sample reads from each table, by name or in table order (default: one per
        feature).
    optimizer: the optimizer in backward, whose states need memory and time.
    memory_bytes: the memory of a rank for tables, optimizer states and reduced data-parallel gradients, without the
        memory for activations, batches and buffers. None: no limit.
    memory_gbps, link_gbps: the bandwidth in GB/s of a rank's memory, and of all its links together in one direction.
        The defaults are rough numbers of an H100 with NVLink.
    kinds: the kinds of sharding to choose from.
    row_shares: for tables with skewed ids, the share of ids in each of `world_size` equal ranges of rows. Default:
        even.

    Raises `ValueError` if a table does not fit with any kind of sharding. The error gives the bytes, the ranks, and the
    kinds that would fit.
    """
    alone = place_tables(tables, 1, rows_read=rows_read)
    kinds = tuple(iterated("kinds", kinds, f"pass a list of {', '.join(map(repr, get_args(Kind)))}"))
    if unknown := [kind for kind in kinds if kind not in get_args(Kind)]:
        raise ValueError(f"kinds has {unknown[0]!r}: choose from {', '.join(map(repr, get_args(Kind)))}")
    for name, number in (
        ("samples", samples),
        ("memory_gbps", memory_gbps),
        ("link_gbps", link_gbps),
        ("world_size", world_size),
    ):
        if not (isinstance(number, int | float) and math.isfinite(number) and number > 0):
            raise ValueError(f"{name}={number!r} must be above 0 and finite")
    shares = dict(row_shares or {})
    names = {table.name for table in alone.tables}
    for name, given in shares.items():
        if (
            name not in names
            or len(given) != world_size
            or min(given) < 0
            or not math.isclose(sum(given), 1, rel_tol=1e-3)
        ):
            raise ValueError(
                f"row_shares[{name!r}]={list(given)}: name a table, and give {counted(world_size, 'share')} that add up to 1"
            )
    rows = alone.rows_read or tuple(float(len(table.feature_names)) for table in alone.tables)
    costs = _Costs(world_size, samples, optimizer, memory_gbps * 1e9, link_gbps * 1e9)
    choices = [
        list(_choices(table, costs, read, tuple(kinds), shares.get(table.name)))
        for table, read in zip(alone.tables, rows, strict=True)
    ]
    chosen, refused = _chosen(alone.tables, choices, world_size, memory_bytes, kinds, costs)
    partition = Partition(alone.tables, tuple(one.sharding for one in chosen), world_size, alone.rows_read)
    return TablePlan(partition, tuple(one.loads for one in chosen), memory_bytes, refused)


@dataclass(frozen=True)
class _Choice:
    kind: Kind
    sharding: TableSharding
    loads: tuple[Load, ...]


@dataclass(frozen=True)
class _Costs:
    """The constants of the model that predicts the time and memory of tables. Bandwidths are in bytes per second."""

    world: int
    samples: int
    optimizer: EmbeddingOptimizer | None
    memory: float
    link: float

    def states(self, columns: int) -> float:
        """Return the bytes of optimizer states for one row of `columns` columns."""
        shapes = () if self.optimizer is None else self.optimizer.states.values()
        return sum(4.0 * (columns if shape == "element" else 1) for shape in shapes)

    def part(self, table: EmbeddingBagConfig, rows: int, columns: int, read: float, share: float) -> Load:
        """Return the load (memory and time) of a table's part on the rank that stores it.

        read: the mean number of rows that a sample reads from the whole table.
        share: the part's share of the table's ids.
        """
        vector, features, all_samples = (
            columns * table.dtype.itemsize,
            len(table.feature_names),
            self.world * self.samples,
        )
        states = self.states(columns)
        memory = all_samples * read * share * (3 * vector + 2 * states) + 2 * all_samples * features * vector
        wire = (self.world - 1) * self.samples * (features * vector + INDEX_BYTES * read * share)
        return Load(rows * (vector + states), memory / self.memory + 2 * wire / self.link)

    def sum_of_parts(self, table: EmbeddingBagConfig, parts: int) -> float:
        """Return the seconds that the rank of a sample needs for a row-wise table: to sum the vectors of its parts, and to copy
        their gradient.
        """
        vectors = self.samples * len(table.feature_names) * table.embedding_dim * table.dtype.itemsize
        return 2 * (parts + 1) * vectors / self.memory

    def replicated(self, table: EmbeddingBagConfig, read: float) -> Load:
        vector, features = table.embedding_dim * table.dtype.itemsize, len(table.feature_names)
        states, dense = self.states(table.embedding_dim), table.num_embeddings * (table.embedding_dim + 1) * 4.0
        memory = self.samples * (read * (3 * vector + 2 * states) + 2 * features * vector) + 5 * dense
        wire = 2 * (self.world - 1) / self.world * dense
        return Load(table.num_embeddings * (vector + states) + 3 * dense, memory / self.memory + wire / self.link)


def _choices(
    table: EmbeddingBagConfig, costs: _Costs, read: float, kinds: Sequence[Kind], shares: Sequence[float] | None
) -> Iterator[_Choice]:
    """Yield the possible shardings of a table, each with the loads of all ranks.

    A whole table may be on any rank. The first part of a column-wise table may be on any rank; its other parts are on
    the ranks after it.
    """
    world, nothing = costs.world, Load(0.0, 0.0)
    rows, dim = table.num_embeddings, table.embedding_dim
    if "table_wise" in kinds:
        load = costs.part(table, rows, dim, read, 1.0)
        for rank in range(world):
            yield _Choice("table_wise", TableWise(rank), tuple(load if r == rank else nothing for r in range(world)))
    if "column_wise" in kinds:
        for parts in range(2, world + 1):
            if dim // parts < _LEAST_COLUMNS or dim % (4 * parts):
                continue
            load = costs.part(table, rows, dim // parts, read, 1.0)
            for first in range(world):
                ranks = tuple((first + n) % world for n in range(parts))
                loads = tuple(load if rank in ranks else nothing for rank in range(world))
                yield _Choice("column_wise", ColumnWise(ranks), loads)
    if "row_wise" in kinds and world > 1 and rows >= world:
        size = -(-rows // world)
        of_ranks = []
        for rank in range(world):
            held = max(0, min(size, rows - rank * size))
            part = costs.part(table, held, dim, read, held / rows if shares is None else shares[rank])
            of_ranks.append(Load(part.nbytes, part.seconds + costs.sum_of_parts(table, world)))
        yield _Choice("row_wise", RowWise(), tuple(of_ranks))
    if "data_parallel" in kinds:
        yield _Choice("data_parallel", DataParallel(), (costs.replicated(table, read),) * world)


def _chosen(
    tables: Sequence[EmbeddingBagConfig], choices: Sequence[Sequence[_Choice]], world: int, memory: float | None,
    kinds: Sequence[Kind], costs: _Costs,
) -> tuple[list[_Choice], tuple[tuple[str, ...], ...]]:  # fmt: skip
    """Choose a sharding for each table. Return two values: the chosen shardings, and for each table the kinds of sharding that
    did not fit, with the reason.
    """
    seconds, nbytes = [0.0] * world, [0.0] * world
    found: list[_Choice | None] = [None] * len(tables)
    # Place tables in the order of difficulty: many bytes first, then long times.
    least = [
        min(sum(load.seconds for load in one.loads) for one in of_table) if of_table else 0.0 for of_table in choices
    ]
    order = sorted(range(len(tables)), key=lambda n: (-tables[n].nbytes if memory else 0, -least[n], n))
    if memory is None:
        order = sorted(range(len(tables)), key=lambda n: (-least[n], n))

    def add(choice: _Choice, sign: int) -> None:
        for rank, load in enumerate(choice.loads):
            seconds[rank] += sign * load.seconds
            nbytes[rank] += sign * load.nbytes

    def fits(choice: _Choice) -> bool:
        return memory is None or all(
            held + load.nbytes <= memory for held, load in zip(nbytes, choice.loads, strict=True)
        )

    def cost(choice: _Choice) -> tuple[float, float, float]:
        after = [spent + load.seconds for spent, load in zip(seconds, choice.loads, strict=True)]
        held = max(have + load.nbytes for have, load in zip(nbytes, choice.loads, strict=True))
        return max(after), sum(after), held

    for number in order:
        possible = [one for one in choices[number] if fits(one)]
        if not possible:
            _refuse(tables[number], choices[number], nbytes, memory, kinds, costs)
        found[number] = best = min(possible, key=cost)
        add(best, 1)
    for _ in range(_PASSES):
        before = list(found)
        for number in order:
            current = found[number]
            assert current is not None
            add(current, -1)
            best = min((one for one in choices[number] if fits(one)), key=cost)
            found[number] = best if cost(best) < cost(current) else current
            add(found[number] or best, 1)
        if before == found:
            break
    refused = []
    for number, choice in enumerate(found):
        assert choice is not None
        add(choice, -1)
        reasons: dict[str, str] = {}
        for one in choices[number]:
            if not fits(one):
                reasons.setdefault(one.kind, _need(one, nbytes, memory))
        fitting = {one.kind for one in choices[number] if fits(one)}
        refused.append(tuple(f"{kind}: {text}" for kind, text in reasons.items() if kind not in fitting))
        add(choice, 1)
    return [one for one in found if one is not None], tuple(refused)


def _need(choice: _Choice, nbytes: Sequence[float], memory: float | None) -> str:
    """Return a text that names the rank which lacks the most memory for `choice`, a sharding of a table.

    nbytes: the bytes of other tables on each rank.
    """
    over = [held + load.nbytes - (memory or 0) for held, load in zip(nbytes, choice.loads, strict=True)]
    rank = over.index(max(over))
    return (
        f"rank {rank} needs {bytes_text(choice.loads[rank].nbytes)} beside {bytes_text(nbytes[rank])} of other tables, and has "
        f"{bytes_text(memory or 0)}"
    )


def _refuse(
    table: EmbeddingBagConfig, choices: Sequence[_Choice], nbytes: Sequence[float], memory: float | None, kinds: Sequence[Kind],
    costs: _Costs,
) -> None:  # fmt: skip
    """Raise `ValueError` for a table that does not fit, with its bytes, the reasons, and the kinds that would fit."""
    reasons: dict[str, str] = {}
    for one in choices:
        reasons.setdefault(one.kind, _need(one, nbytes, memory))
    others = [kind for kind in get_args(Kind) if kind not in kinds]
    possible = list(_choices(table, costs, float(len(table.feature_names)), others, None))
    fitting = {
        one.kind
        for one in possible
        if all(held + load.nbytes <= (memory or 0) for held, load in zip(nbytes, one.loads, strict=True))
    }
    each = table.num_embeddings * (table.embedding_dim * table.dtype.itemsize + costs.states(table.embedding_dim))
    room = sum(max(0.0, (memory or 0) - held) for held in nbytes)
    if fitting:
        fix = f"{' or '.join(sorted(fitting))} would fit: add it to kinds"
    elif each > room:
        fix = f"all ranks together have {bytes_text(room)} left: use more ranks, 16-bit tables, or smaller states"
    else:
        fix = "use more memory or ranks, or pass placement"
    tried = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items()) or "no kind applies"
    raise ValueError(
        f"table {table.name!r} of {bytes_text(each)} with its optimizer states fits on no rank. {tried}. {fix}"
    )
