"""Shardings of tables. A collection may mix table-wise, column-wise, row-wise and data-parallel tables.

`EmbeddingSharding` and `weft.embedding_all_to_all` treat each part as a separate table.

    TableWise      one part with the whole table
    ColumnWise     each part has all rows and a range of columns. The part's rank reads all ids of the table's
                   features, and the output concatenates the parts' vectors. A rowwise optimizer has a state for each
                   part, as in TorchRec, because its mean of squares is over the part's columns
    RowWise        each part has all columns and a range of ceil(rows / ranks) rows, as in TorchRec. An id is sent to the rank of
                   its row. That rank pools its rows, and the sample's rank sums the partial vectors in the order of rows
    DataParallel   no parts: every rank has the table, and pools its own samples. Gradients are all-reduced

For each part of a row-wise table there is a separate input feature, which contains only the ids of the part's rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

from weft.arguments import checked_shape, checked_whole, iterated
from weft.embedding.placement import place_tables
from weft.embedding.tables import EmbeddingBagConfig, EmbeddingSharding, Slot, check_tables
from weft.words import counted


@dataclass(frozen=True)
class TableWise:
    """A sharding with the whole table on `rank`."""

    rank: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", checked_whole("rank", self.rank, "pass an integer"))


@dataclass(frozen=True)
class ColumnWise:
    """A sharding by columns, with one part on each of `ranks`. A rank may occur several times.

    columns: the number of columns of each part. Default: equal parts; the first parts get the remainder.
    """

    ranks: tuple[int, ...]
    columns: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", checked_shape("ranks", self.ranks))
        if self.columns is not None:
            object.__setattr__(self, "columns", checked_shape("columns", self.columns))


@dataclass(frozen=True)
class RowWise:
    """A sharding by rows, with ceil(rows / number of ranks) rows on each of `ranks`. Default: all ranks in order."""

    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None:
            object.__setattr__(self, "ranks", checked_shape("ranks", self.ranks))


@dataclass(frozen=True)
class DataParallel:
    """A sharding that copies the whole table to every rank.

    fused: True to update the table by the collection's `optimizer`. False to give it a `.grad` for a torch optimizer. This
        `.grad` is the mean over ranks, as in DistributedDataParallel, even if the collection has gradients="sum". All
        data-parallel tables of a collection need the same value.
    """

    fused: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.fused, bool):
            raise ValueError(f"DataParallel(fused={self.fused!r}): fused must be True or False")


TableSharding: TypeAlias = TableWise | ColumnWise | RowWise | DataParallel


@dataclass(frozen=True)
class TablePart:
    """A part of a sharded table: rows [row, row + rows) and columns [column, column + columns) of table number `table`, stored
    on `rank`.
    """

    table: int
    rank: int
    row: int
    rows: int
    column: int
    columns: int

    def name_in(self, table: EmbeddingBagConfig) -> str:
        """Return the name of the part. It is the table's name if the part is the whole table. Otherwise the part's
        ranges of rows and columns follow the name.
        """
        rows = f"{self.row}:{self.row + self.rows}" if self.rows < table.num_embeddings else ":"
        columns = f", {self.column}:{self.column + self.columns}" if self.columns < table.embedding_dim else ""
        return table.name if rows == ":" and not columns else f"{table.name}[{rows}{columns}]"


@dataclass(frozen=True)
class Partition:
    """The sharding of each table, equal on all ranks.

    hash: True to hash ids to rows of the whole table. Ids of row-wise tables are hashed before they are sent, because
        the row determines the owner.

    Raises `ValueError` for a rank out of range, for a row-wise table with two parts on one rank, and if there are no
    tables. Also raises `ValueError` if the columns of a table's parts do not sum to the table's columns.
    """

    tables: tuple[EmbeddingBagConfig, ...]
    shardings: tuple[TableSharding, ...]
    world_size: int
    rows_read: tuple[float, ...] | None = field(default=None, compare=False)
    hash: bool = False

    def __post_init__(self) -> None:
        check_tables(self.tables)
        if len(self.tables) != len(self.shardings):
            raise ValueError(
                f"{counted(len(self.shardings), 'sharding')} for {counted(len(self.tables), 'table')}: pass one for each table"
            )
        for table, sharding in zip(self.tables, self.shardings, strict=True):
            self._check(table, sharding)
        fused = {self.shardings[number]: self.tables[number].name for number in self.replicated_tables}
        if len(fused) > 1:
            said = " and ".join(f"table {name!r} is {sharding}" for sharding, name in fused.items())
            raise ValueError(f"{said}: pass the same value of fused for all data-parallel tables of a collection")

    def _check(self, table: EmbeddingBagConfig, sharding: TableSharding) -> None:
        at = f"table {table.name!r}: {sharding}"
        ranks = self._ranks(sharding)
        if not ranks:
            raise ValueError(f"{at} has no ranks: pass at least one")
        if bad := [rank for rank in ranks if not 0 <= rank < self.world_size]:
            raise ValueError(f"{at} names rank {bad[0]}: ranks are 0 to {self.world_size - 1}")
        if isinstance(sharding, RowWise) and (twice := [r for r, count in Counter(ranks).items() if count > 1]):
            raise ValueError(f"{at} names rank {twice[0]} twice: name each rank once")
        if isinstance(sharding, ColumnWise):
            widths = self._widths(table, sharding)
            if len(widths) != len(ranks) or min(widths) < 1 or sum(widths) != table.embedding_dim:
                raise ValueError(
                    f"{at} has parts of {list(widths)} columns on {counted(len(ranks), 'rank')}: give each rank a part "
                    f"of at least 1 column, {counted(table.embedding_dim, 'column')} in all"
                )

    def _ranks(self, sharding: TableSharding) -> tuple[int, ...]:
        match sharding:
            case TableWise(rank):
                return (rank,)
            case ColumnWise(ranks) | RowWise(tuple(ranks)):
                return ranks
        return tuple(range(self.world_size))

    def _widths(self, table: EmbeddingBagConfig, sharding: ColumnWise) -> tuple[int, ...]:
        if sharding.columns is not None:
            return sharding.columns
        each, more = divmod(table.embedding_dim, len(sharding.ranks))
        return tuple(each + (number < more) for number in range(len(sharding.ranks)))

    @cached_property
    def parts(self) -> tuple[TablePart, ...]:
        """The parts of all tables except data-parallel tables, in the order of tables, then of rows or columns."""
        found = []
        for number, (table, sharding) in enumerate(zip(self.tables, self.shardings, strict=True)):
            rows, dim, ranks = table.num_embeddings, table.embedding_dim, self._ranks(sharding)
            match sharding:
                case TableWise(rank):
                    found.append(TablePart(number, rank, 0, rows, 0, dim))
                case ColumnWise():
                    widths = self._widths(table, sharding)
                    for rank, width, end in zip(ranks, widths, accumulate(widths), strict=True):
                        found.append(TablePart(number, rank, 0, rows, end - width, width))
                case RowWise():
                    size = self.rows_of_part(number)
                    for rank, begin in zip(ranks, range(0, rows, size), strict=False):
                        found.append(TablePart(number, rank, begin, min(size, rows - begin), 0, dim))
        return tuple(found)

    def rows_of_part(self, table: int) -> int:
        """Return the number of rows of the first part of a row-wise table. The last part may have fewer."""
        return -(-self.tables[table].num_embeddings // len(self._ranks(self.shardings[table])))

    def parts_of(self, table: int) -> list[int]:
        """Return the indices in `parts` of a table's parts."""
        return [number for number, part in enumerate(self.parts) if part.table == table]

    def feature_of_part(self, part: TablePart, feature: str) -> str:
        """Return the name of the input feature that `part` reads for the table's `feature`. Ranks compare this name, so it also
        tells if the ids have been hashed.
        """
        table = self.tables[part.table]
        read = f"{feature} hashed to {table.num_embeddings} rows" if self.hashes_input else feature
        return f"{read} in {part.name_in(table)}" if isinstance(self.shardings[part.table], RowWise) else read

    @cached_property
    def hashes_input(self) -> bool:
        """True if ids are hashed before they are sent. Otherwise `weft.embedding_all_to_all` hashes them."""
        return self.hash and any(isinstance(sharding, RowWise) for sharding in self.shardings)

    @cached_property
    def sharding(self) -> EmbeddingSharding | None:
        """The sharding of the parts, in which each part counts as a table; None if all tables are data-parallel.

        Parts of row-wise tables have pooling "sum". For pooling "mean", the sample's rank divides the sum.
        """
        if not self.parts:
            return None
        configs, read = [], []
        for part in self.parts:
            table = self.tables[part.table]
            is_row_wise = isinstance(self.shardings[part.table], RowWise)
            features = tuple(self.feature_of_part(part, feature) for feature in table.feature_names)
            configs.append(
                replace(
                    table, num_embeddings=part.rows, embedding_dim=part.columns, name=part.name_in(table),
                    feature_names=features, pooling="sum" if is_row_wise else table.pooling,
                )
            )  # fmt: skip
            if self.rows_read is not None:
                read.append(self.rows_read[part.table] * part.rows / table.num_embeddings)
        ranks = tuple(part.rank for part in self.parts)
        return EmbeddingSharding(tuple(configs), ranks, self.world_size, tuple(read) or None)

    @cached_property
    def replicated(self) -> EmbeddingSharding | None:
        """The data-parallel tables, as a sharding in which one rank owns them all; None if there are none."""
        tables = tuple(self.tables[number] for number in self.replicated_tables)
        return EmbeddingSharding(tables, (0,) * len(tables), 1) if tables else None

    @cached_property
    def replicated_tables(self) -> tuple[int, ...]:
        """The indices of the data-parallel tables among all tables."""
        return tuple(n for n, sharding in enumerate(self.shardings) if isinstance(sharding, DataParallel))

    @property
    def fuses_replicated(self) -> bool:
        """False if data-parallel tables have `fused=False`, and so get gradients instead of updates in backward."""
        return DataParallel(fused=False) not in self.shardings

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The blocks of output columns, in column order. The field `rank` of these slots has no meaning, because several ranks
        may compute one block.
        """
        return EmbeddingSharding(self.tables, (0,) * len(self.tables), 1).slots

    def describe(self) -> str:
        """Return a text with the sharding of each table and the memory of each rank."""
        lines = [f"{table.name}: {sharding}" for table, sharding in zip(self.tables, self.shardings, strict=True)]
        if self.sharding is not None:
            lines.append(self.sharding.describe())
        return "\n".join(lines)


def is_cut(placement: Any) -> bool:
    """True if the argument `placement` of a collection contains a `TableSharding`; False if it contains only ranks."""
    values = placement.values() if isinstance(placement, Mapping) else placement
    return isinstance(values, Sequence | type({}.values())) and any(
        isinstance(value, TableSharding) for value in values
    )


def partition_tables(
    tables: Sequence[Any],
    world_size: int,
    *,
    placement: Mapping[str, int | TableSharding] | Sequence[int | TableSharding],
    rows_read: Sequence[float] | Mapping[str, float] | None = None,
    hash: bool = False,
) -> Partition:
    """Return the partition of `tables` over `world_size` ranks.

    placement: for each table, by name or in table order, a `TableWise`, `ColumnWise`, `RowWise` or `DataParallel`. A
        number r means `TableWise(r)`.
    tables, rows_read: as for `weft.place_tables`.
    hash: as in `Partition`.
    """
    fix = "pass a list with one sharding or rank per table, in order, or a dict by table name"
    is_by_name = isinstance(placement, Mapping)
    values: Any = placement if is_by_name else dict(enumerate(iterated("placement", placement, fix, with_value=True)))
    for name, value in values.items():
        if not isinstance(value, TableSharding):
            checked_whole(
                f"placement of table {name!r}", value, "pass a rank, TableWise, ColumnWise, RowWise or DataParallel"
            )
    ranks: Any = dict.fromkeys(values, 0) if is_by_name else [0] * len(values)
    alone = place_tables(tables, 1, rows_read=rows_read, placement=ranks)  # checks names and rows_read
    shardings = []
    for number, table in enumerate(alone.tables):
        value = values[table.name if is_by_name else number]
        shardings.append(value if isinstance(value, TableSharding) else TableWise(value))
    return Partition(alone.tables, tuple(shardings), world_size, alone.rows_read, hash)
