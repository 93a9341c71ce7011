"""Descriptions of embedding tables without tensors: their sizes, their owner ranks, and their output columns.

In table-wise sharding, each table is whole on one rank. The output has one row per sample, and one block of columns (a
`Slot`) per feature of each table, in the order of the tables. `EmbeddingSharding` must be equal on all ranks, so ranks
compare its `fingerprint`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import torch

from weft.arguments import checked_shape, checked_within, iterated
from weft.words import counted, kind

DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
DTYPES = tuple(DTYPE_NAMES)
INDEX_BYTES = 8  # bytes of an id or an offset: data loaders produce int64
_FIRST_VALUES = ("weight_init_min", "weight_init_max", "init_fn")
_READ_OF_TORCHREC = {
    "num_embeddings", "embedding_dim", "name", "feature_names", "pooling", "data_type", *_FIRST_VALUES,
}  # fmt: skip
_DTYPE_OF_TORCHREC = {name.upper(): dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class EmbeddingBagConfig:
    """One embedding table, with TorchRec's field names.

    The table has `num_embeddings` rows of `embedding_dim` elements of `dtype`. Each name in `feature_names` is an input
    feature that is looked up in this table, and pooled by `pooling` ("sum" or "mean") into one vector per sample.

    `weft.nn.ShardedEmbeddingBagCollection` fills the table uniformly between `weight_init_min` and `weight_init_max`
    (default: -+sqrt(1 / num_embeddings)), or calls `init_fn`. This function fills the [num_embeddings, embedding_dim]
    tensor that it gets, or returns another tensor of this shape. Equality of configs ignores initial values.

    Raises `ValueError` for sizes below 1, an unknown pooling or dtype, no feature, a duplicate feature, a minimum above
    the maximum, or both bounds and `init_fn`.
    """

    num_embeddings: int
    embedding_dim: int
    name: str
    feature_names: tuple[str, ...]
    pooling: Literal["sum", "mean"] = "sum"
    dtype: torch.dtype = torch.float32
    weight_init_max: float | None = field(default=None, compare=False, repr=False)
    weight_init_min: float | None = field(default=None, compare=False, repr=False)
    init_fn: Callable[[torch.Tensor], Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        at = f"table {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name={self.name!r}: pass a non-empty string as the table's name")
        for what in ("num_embeddings", "embedding_dim"):
            size = checked_within(f"{at}: {what}", getattr(self, what), 1, 2**63 - 1, "at least 1")
            object.__setattr__(self, what, size)
        if isinstance(self.feature_names, str):
            raise ValueError(f"{at}: feature_names={self.feature_names!r} is a string: write [{self.feature_names!r}]")
        names = iterated(f"{at}: feature_names", self.feature_names, "pass a list with the names of the input features")
        object.__setattr__(self, "feature_names", tuple(names))
        if not self.feature_names:
            raise ValueError(f"{at} has no feature: name the input features that use this table in feature_names")
        for feature, count in Counter(self.feature_names).items():
            if not isinstance(feature, str) or not feature:
                raise ValueError(f"{at}: feature {feature!r} must be a non-empty string")
            if count > 1:
                raise ValueError(f"{at}: feature {feature!r} is named {count} times: name it once")
        if not isinstance(self.pooling, str) or self.pooling not in ("sum", "mean"):
            raise ValueError(f"{at}: pooling={self.pooling!r} must be 'sum' or 'mean'")
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPES:
            raise ValueError(f"{at}: dtype={self.dtype!r} must be one of {', '.join(map(str, DTYPES))}")
        self._check_first_values(at)

    def _check_first_values(self, at: str) -> None:
        given = {what: value for what in _FIRST_VALUES[:2] if (value := getattr(self, what)) is not None}
        for what, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{at}: {what}={value!r} must be a finite number")
        if self.init_fn is not None:
            if not callable(self.init_fn):
                raise ValueError(f"{at}: init_fn={self.init_fn!r} must be a function of a tensor")
            for what, value in given.items():
                raise ValueError(f"{at}: {what}={value} has no effect together with init_fn: pass only one of them")
        low, high = self.first_values
        if low > high:
            raise ValueError(f"{at}: weight_init_min={low} must not be above weight_init_max={high}")

    @property
    def first_values(self) -> tuple[float, float]:
        """The bounds between which the table is filled if there is no `init_fn`."""
        bound = math.sqrt(1 / self.num_embeddings)
        low, high = self.weight_init_min, self.weight_init_max
        return -bound if low is None else low, bound if high is None else high

    def fill(self, weight: torch.Tensor) -> None:
        """Fill `weight`, the whole table, with its initial values."""
        with torch.no_grad():
            if self.init_fn is None:
                weight.uniform_(*self.first_values)
            elif isinstance(made := self.init_fn(weight), torch.Tensor) and made is not weight:
                if made.shape != weight.shape:
                    raise ValueError(
                        f"table {self.name!r}: init_fn returned shape {tuple(made.shape)}: return {tuple(weight.shape)}, or None"
                    )
                weight.copy_(made)

    @classmethod
    def of(cls, config: Any) -> EmbeddingBagConfig:
        """Return weft's config unchanged, or convert TorchRec's `EmbeddingBagConfig`, or another class with its fields.

        As in TorchRec, a table without `feature_names` uses a feature with the table's name. Raises `ValueError` for an
        option that weft does not support, unless it has its default value.
        """
        if isinstance(config, cls):
            return config
        try:
            pooling, data_type = config.pooling, config.data_type
            rows, dim, name, features = config.num_embeddings, config.embedding_dim, config.name, config.feature_names
        except AttributeError as error:
            raise TypeError(
                f"{config!r} is not a table config ({error}): pass weft.EmbeddingBagConfig or TorchRec's"
            ) from None
        data_type_name = str(getattr(data_type, "name", data_type)).upper()
        if data_type_name not in _DTYPE_OF_TORCHREC:
            raise ValueError(f"table {name!r}: data_type={data_type!r} must be one of {', '.join(_DTYPE_OF_TORCHREC)}")
        for option, value, default in _other_options(config):
            raise ValueError(
                f"table {name!r}: {option}={value!r} is not supported: leave it at its default, {default!r}"
            )
        pooling_name: Any = str(getattr(pooling, "name", pooling)).lower()
        low, high, init_fn = (getattr(config, what, None) for what in _FIRST_VALUES)
        made = cls(
            rows, dim, name, tuple(features) or (name,), pooling_name, _DTYPE_OF_TORCHREC[data_type_name], high, low
        )
        if init_fn is None or _is_uniform(init_fn, made.first_values):
            return made
        return replace(made, init_fn=init_fn)

    @property
    def nbytes(self) -> int:
        return self.num_embeddings * self.embedding_dim * self.dtype.itemsize

    def bytes_per_sample(self, rows_read: float | None = None) -> float:
        """Return the bytes that are read and written to pool one sample: table rows, ids, and for each feature one
        offset and one output vector.

        rows_read: the mean number of rows that a sample reads from this table, summed over the table's features (default:
            one row per feature).
        """
        row_bytes = self.embedding_dim * self.dtype.itemsize + INDEX_BYTES
        features = len(self.feature_names)
        return ((features if rows_read is None else rows_read) + features) * row_bytes


def _other_options(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, default) for each option of a table's configuration, `config`, that the user has set and that
    `EmbeddingBagConfig.of` ignores.
    """
    defaults = dict.fromkeys(vars(config)) if hasattr(config, "__dict__") else {}
    if is_dataclass(config):
        for of in fields(config):
            made = None if of.default_factory is MISSING else of.default_factory()
            defaults[of.name] = made if of.default is MISSING else of.default
    for option, default in defaults.items():
        if option in _READ_OF_TORCHREC or option.startswith("_"):
            continue
        value = getattr(config, option)
        if not (value is None or value is False or value == default):
            yield option, value, default


def _is_uniform(init_fn: Any, bounds: tuple[float, float]) -> bool:
    """True if `init_fn` is TorchRec's default."""
    if not isinstance(init_fn, functools.partial) or init_fn.func is not torch.nn.init.uniform_ or init_fn.args:
        return False
    return init_fn.keywords == dict(zip("ab", bounds, strict=True))


@dataclass(frozen=True, slots=True)
class Slot:
    """One block of output columns: `feature`, pooled from table number `table` by `rank`, in `dim` columns from
    `column` on.

    `key` is the block's name in the output: the feature, or "feature@table" if several tables use the feature.
    """

    feature: str
    key: str
    table: int
    rank: int
    column: int
    dim: int


@dataclass(frozen=True)
class EmbeddingSharding:
    """The assignment of tables to ranks. It must be equal on every rank of a group.

    Rank `rank_of_table[i]` owns `tables[i]`. A rank may own no table. `rows_read` (mean rows per sample and table) is
    only used for predictions and `describe()`; equality and the fingerprint ignore it. Raises `ValueError` for no
    tables, duplicate names, different dtypes, a wrong number of ranks, or a rank out of range.
    """

    tables: tuple[EmbeddingBagConfig, ...]
    rank_of_table: tuple[int, ...]
    world_size: int
    rows_read: tuple[float, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", tuple(listed_tables(self.tables)))
        object.__setattr__(self, "rank_of_table", checked_shape("rank_of_table", self.rank_of_table))
        check_tables(self.tables)
        object.__setattr__(
            self, "world_size", checked_within("world_size", self.world_size, 1, 2**31 - 1, "at least 1")
        )
        if len(self.rank_of_table) != len(self.tables):
            raise ValueError(
                f"rank_of_table has {counted(len(self.rank_of_table), 'entry', 'entries')} for "
                f"{counted(len(self.tables), 'table')}: pass the rank of each table"
            )
        for table, rank in zip(self.tables, self.rank_of_table, strict=True):
            if not 0 <= rank < self.world_size:
                raise ValueError(f"table {table.name!r} is placed on rank {rank}: ranks are 0 to {self.world_size - 1}")
        if self.rows_read is not None:
            object.__setattr__(self, "rows_read", tuple(float(rows) for rows in self.rows_read))
            if len(self.rows_read) != len(self.tables):
                raise ValueError(
                    f"rows_read has {counted(len(self.rows_read), 'entry', 'entries')} for "
                    f"{counted(len(self.tables), 'table')}: pass one number for each table"
                )

    def __hash__(self) -> int:
        return self.fingerprint

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The blocks of output columns, in column order."""
        uses = Counter(feature for table in self.tables for feature in table.feature_names)
        slots, column = [], 0
        for index, (table, rank) in enumerate(zip(self.tables, self.rank_of_table, strict=True)):
            for feature in table.feature_names:
                key = feature if uses[feature] == 1 else f"{feature}@{table.name}"
                slots.append(Slot(feature, key, index, rank, column, table.embedding_dim))
                column += table.embedding_dim
        return tuple(slots)

    @cached_property
    def total_dim(self) -> int:
        """The number of output columns: the sum of `dim` over all slots."""
        return sum(slot.dim for slot in self.slots)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tables, and so of the output."""
        return self.tables[0].dtype

    @cached_property
    def _of_rank(self) -> tuple[tuple[tuple[int, ...], tuple[Slot, ...]], ...]:
        tables: list[list[int]] = [[] for _ in range(self.world_size)]
        slots: list[list[Slot]] = [[] for _ in range(self.world_size)]
        for index, rank in enumerate(self.rank_of_table):
            tables[rank].append(index)
        for slot in self.slots:
            slots[slot.rank].append(slot)
        return tuple((tuple(t), tuple(s)) for t, s in zip(tables, slots, strict=True))

    def local_tables(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the tables that `rank` owns, ascending."""
        return self._of_rank[self._checked(rank)][0]

    def local_slots(self, rank: int) -> tuple[Slot, ...]:
        """Return the blocks of output columns that `rank` computes, in column order."""
        return self._of_rank[self._checked(rank)][1]

    @cached_property
    def columns_of_ranks(self) -> tuple[int, ...]:
        """The number of output columns that each rank computes."""
        return tuple(sum(slot.dim for slot in self.local_slots(rank)) for rank in range(self.world_size))

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is not in this sharding: ranks are 0 to {self.world_size - 1}")
        return rank

    @cached_property
    def fingerprint(self) -> int:
        """A hash in [0, 2**62) of all fields except `rows_read`, the same in every process, for comparison between
        ranks.
        """
        canonical = json.dumps([self.world_size, self.rank_of_table, self._numbers])
        return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:8], "big") >> 2

    @cached_property
    def written(self) -> str:
        """The sharding as JSON, for `sharding_of`."""
        return json.dumps([self.world_size, self.rank_of_table, self._numbers, self.rows_read])

    @property
    def _numbers(self) -> list[tuple[Any, ...]]:
        return [
            (t.num_embeddings, t.embedding_dim, t.name, t.feature_names, t.pooling, str(t.dtype)) for t in self.tables
        ]

    def difference(self, other: EmbeddingSharding) -> str | None:
        """Return a text with the first difference between this sharding and `other`, such as "world_size=2 and 4"; None if both
        are equal.
        """
        if self.world_size != other.world_size:
            return f"world_size={self.world_size} and {other.world_size}"
        if len(self.tables) != len(other.tables):
            return f"{counted(len(self.tables), 'table')} and {counted(len(other.tables), 'table')}"
        placed = zip(self.tables, other.tables, self.rank_of_table, other.rank_of_table, strict=True)
        for index, (mine, theirs, my_rank, their_rank) in enumerate(placed):
            if mine != theirs:
                return f"table {index} is {mine} and {theirs}"
            if my_rank != their_rank:
                return f"table {mine.name!r} is placed on rank {my_rank} and on rank {their_rank}"
        return None

    def describe(self) -> str:
        """Return a text with the tables of each rank, their columns and memory, and the rank's share of the bytes moved
        per sample.
        """
        rows = self.rows_read or (None,) * len(self.tables)
        costs = [table.bytes_per_sample(r) for table, r in zip(self.tables, rows, strict=True)]
        assumed = "" if self.rows_read else ", one row per feature assumed"
        lines = [
            f"{counted(len(self.tables), 'table')} on {counted(self.world_size, 'rank')}, "
            f"{counted(len(self.slots), 'feature')} into {counted(self.total_dim, 'column')} of {self.dtype} (cost: bytes "
            f"per sample{assumed})",
            f"{'rank':>4} {'tables':>6} {'columns':>7} {'memory':>10} {'cost':>7}  owns",
        ]
        for rank in range(self.world_size):
            mine = self.local_tables(rank)
            columns = self.columns_of_ranks[rank]
            memory = sum(self.tables[i].nbytes for i in mine)
            share = sum(costs[i] for i in mine) / sum(costs)
            owned = self._runs_text(mine)
            lines.append(f"{rank:>4} {len(mine):>6} {columns:>7} {bytes_text(memory):>10} {share:>7.1%}  {owned}")
        return "\n".join(lines)

    def _runs_text(self, indices: Sequence[int]) -> str:
        """Return the names of tables as text. Three or more adjacent tables are written "first .. last". indices: the indices
        of the tables, ascending.
        """
        words = []
        for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
            names = [self.tables[index].name for _, index in run]
            words += names if len(names) < 3 else [f"{names[0]} .. {names[-1]}"]
        if len(words) > 12:
            words = [*words[:10], f"... ({len(words) - 10} more)"]
        return ", ".join(words) or "nothing"


# one object per text: comparing two shardings with 64 tables takes longer than a call
@functools.lru_cache(maxsize=1024)
def sharding_of(written: str) -> EmbeddingSharding:
    """Return the sharding that the JSON `written` describes. Its tables have no initial values."""
    world_size, rank_of_table, tables, rows_read = json.loads(written)
    dtypes = {str(dtype): dtype for dtype in DTYPES}
    configs = tuple(
        EmbeddingBagConfig(rows, dim, name, features, pooling, dtypes[dtype])
        for rows, dim, name, features, pooling, dtype in tables
    )
    return EmbeddingSharding(configs, tuple(rank_of_table), world_size, rows_read)


@functools.lru_cache(maxsize=64)
def column_runs(sharding: EmbeddingSharding) -> tuple[tuple[int, int, int], ...]:
    """Return the runs of adjacent output columns that the same rank pools, as (rank, first column, end column), in column
    order.
    """
    taken = [0] * sharding.world_size
    runs: list[tuple[int, int, int]] = []
    for slot in sharding.slots:
        start, end = taken[slot.rank], taken[slot.rank] + slot.dim
        taken[slot.rank] = end
        if runs and runs[-1][0] == slot.rank and runs[-1][2] == start:
            runs[-1] = (slot.rank, runs[-1][1], end)
        else:
            runs.append((slot.rank, start, end))
    return tuple(runs)


def listed_tables(tables: Any) -> list[Any]:
    """Return the argument `tables` as a list. Raise `ValueError` for a value that is not iterable, such as one table."""
    return list(iterated("tables", tables, "pass a list of table configs, such as weft.EmbeddingBagConfig"))


def check_tables(tables: Sequence[EmbeddingBagConfig]) -> None:
    """Raise `ValueError` unless there is at least one table, names are unique, and all tables have one dtype."""
    if not tables:
        raise ValueError("no tables: pass at least one EmbeddingBagConfig")
    for table in tables:
        if not isinstance(table, EmbeddingBagConfig):
            raise ValueError(f"tables has {table!r}, which is {kind(table)}: pass weft.EmbeddingBagConfig")
    for name, count in Counter(table.name for table in tables).items():
        if count > 1:
            raise ValueError(f"duplicate table name {name!r} ({count} tables): give each table its own name")
    for table in tables:
        if table.dtype != tables[0].dtype:
            raise ValueError(
                f"table {table.name!r} is {table.dtype} but table {tables[0].name!r} is {tables[0].dtype}: they share "
                f"one output, so give all tables of a collection one dtype, or make a collection per dtype"
            )


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes with its unit, such as "1.5 MiB"."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024:
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
