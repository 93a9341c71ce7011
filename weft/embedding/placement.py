"""Placement of tables on ranks: balance the work of ranks, and keep the tables of a rank adjacent.

The slowest rank determines the time. A table's cost is `EmbeddingBagConfig.bytes_per_sample`, a rank's load the sum of
its tables' costs. The placement minimises the largest load in two steps. First, each table, the most expensive first,
is assigned to the least loaded rank. The result is within 4/3 of the optimum (Graham, "Bounds on Multiprocessing Timing
Anomalies"). Then tables of the most loaded rank are moved to other ranks, or swapped with their tables.

Adjacent tables have adjacent output columns, which are sent in longer slices with fewer signals. So each rank gets a
run of adjacent tables if that costs almost nothing (`CONTIGUOUS_SLACK`). Otherwise tables of equal cost are exchanged
between ranks, so that more tables of a rank are adjacent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from weft.arguments import checked_whole, checked_within, iterated
from weft.embedding.tables import EmbeddingBagConfig, EmbeddingSharding, check_tables, listed_tables
from weft.words import counted

# A contiguous split is used if its slowest rank has at most this factor times the lower bound of any split, or is no
# slower than the best split found. With hundreds of tables, contiguous splits are usually even enough. With a dozen
# uneven tables they rarely are.
CONTIGUOUS_SLACK = 1.02

T = TypeVar("T")


def place_tables(
    tables: Sequence[EmbeddingBagConfig],
    world_size: int,
    *,
    rows_read: Sequence[float] | Mapping[str, float] | None = None,
    placement: Mapping[str, int] | Sequence[int] | None = None,
) -> EmbeddingSharding:
    """Return a sharding that assigns each table to one of `world_size` ranks. Equal arguments give equal shardings on
    all ranks.

    tables: `weft.EmbeddingBagConfig` or TorchRec's, all with one dtype. Output columns are in the order of the tables.
    world_size: the number of ranks.
    rows_read: the mean number of rows that a sample reads from each table, summed over the table's features, in table order
        or by name (default: one per feature). For a table with one feature this is the pooling factor.
    placement: the rank of each table, in table order or by name. Default: ranks are balanced by work, and memory only
        breaks ties. So pass `placement` to separate tables that do not fit on one rank.

    Raises `ValueError` if there are no tables, if tables have equal names or different dtypes, or if `world_size` is
    below 1. Raises `ValueError` also if `rows_read` or `placement` lacks a table, names an unknown table, or has a
    negative number of rows or an invalid rank.
    """
    tables = tuple(EmbeddingBagConfig.of(table) for table in listed_tables(tables))
    check_tables(tables)
    world_size = checked_within("world_size", world_size, 1, 2**31 - 1, "at least 1")
    rows = None
    if rows_read is not None:
        given = zip(tables, _per_table("rows_read", rows_read, tables), strict=True)
        rows = tuple(_checked_rows(table, value) for table, value in given)
    if placement is not None:
        fix = f"pass a rank, an integer from 0 to {world_size - 1}"
        placed = [
            checked_whole(f"placement of table {table.name!r}", rank, fix)
            for table, rank in zip(tables, _per_table("placement", placement, tables), strict=True)
        ]
        return EmbeddingSharding(tables, tuple(placed), world_size, rows)

    costs = np.array([t.bytes_per_sample(None if rows is None else rows[i]) for i, t in enumerate(tables)])
    memory = np.array([float(t.nbytes) for t in tables])
    ranks = _longest_first(costs, memory, world_size)
    _improve(ranks, costs, world_size)
    slowest = np.bincount(ranks, costs, world_size).max()
    floor = max(costs.sum() / world_size, costs.max())
    contiguous = _contiguous(costs, world_size, limit=max(slowest, CONTIGUOUS_SLACK * floor) * (1 + 1e-9))
    ranks = _deal_equals_in_order(ranks, costs, memory) if contiguous is None else contiguous
    return EmbeddingSharding(tables, tuple(int(rank) for rank in ranks), world_size, rows)


def _checked_rows(table: EmbeddingBagConfig, given: Any) -> float:
    """Return the entry of `rows_read` for a table as a float. Raise `ValueError` unless it is a number of at least 0."""
    try:
        rows = math.nan if isinstance(given, str) else float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's tensors raise RuntimeError
        rows = math.nan
    if not (math.isfinite(rows) and rows >= 0):
        raise ValueError(f"table {table.name!r}: rows_read={given!r} must be a number of rows, 0 or more")
    return rows


def _per_table(what: str, given: Mapping[str, T] | Sequence[T], tables: Sequence[EmbeddingBagConfig]) -> tuple[T, ...]:
    """Return `given` as a tuple with an entry for each table, in table order. Raise `ValueError` if it does not match
    the tables.

    what: the argument's name, for error texts.
    """
    if not isinstance(given, Mapping):
        fix = "give a list with one entry per table, in order, or a dict by table name"
        values = tuple(iterated(what, given, fix, with_value=True))
        if len(values) != len(tables):
            raise ValueError(
                f"{what} has {counted(len(values), 'entry', 'entries')} for {counted(len(tables), 'table')}: give one per "
                "table, in order"
            )
        return values
    names = [table.name for table in tables]
    if unknown := [name for name in given if name not in set(names)]:
        raise ValueError(f"{what} names {unknown[0]!r}, which is not a table: the tables are {', '.join(names)}")
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"{what} lacks table {missing[0]!r}: give one entry for each of {', '.join(names)}")
    return tuple(given[name] for name in names)


def _longest_first(costs: np.ndarray, memory: np.ndarray, world_size: int) -> np.ndarray:
    """Assign each table, the most expensive first, to the rank with the lowest cost so far. Among ranks with equal
    costs, take the rank with the least memory in use.

    Return the rank of each table.
    """
    ranks = np.zeros(len(costs), dtype=np.int64)
    load, held = np.zeros(world_size), np.zeros(world_size)
    for table in np.lexsort((-memory, -costs)):
        rank = np.lexsort((held, load))[0]
        ranks[table] = rank
        load[rank] += costs[table]
        held[rank] += memory[table]
    return ranks


def _improve(ranks: np.ndarray, costs: np.ndarray, world_size: int) -> None:
    """Change `ranks` in place: move a table of the most loaded rank to another rank, or swap it, while that lowers the
    larger load of the two ranks.
    """
    for _ in range(10 * len(costs)):
        load = np.bincount(ranks, costs, world_size)
        worst = int(load.argmax())
        own, others = np.flatnonzero(ranks == worst), np.flatnonzero(ranks != worst)
        # Partners of an exchange: any table of another rank, or -1 for a plain move to any rank.
        partner = np.concatenate([others, np.full(world_size, -1)])
        where = np.concatenate([ranks[others], np.arange(world_size)])
        back = np.concatenate([costs[others], np.zeros(world_size)])
        shift = costs[own][:, None] - back[None, :]
        larger = np.maximum(load[worst] - shift, load[where][None, :] + shift)
        larger[:, where == worst] = np.inf
        i, j = np.unravel_index(larger.argmin(), larger.shape)
        if larger[i, j] >= load[worst] * (1 - 1e-12):
            return
        ranks[own[i]] = where[j]
        if partner[j] >= 0:
            ranks[partner[j]] = worst


def _contiguous(costs: np.ndarray, world_size: int, limit: float) -> np.ndarray | None:
    """Assign to each rank a run of adjacent tables, so that loads are as even as possible. Return the rank of each table; None
    if the load of a rank must exceed `limit`.

    The most even assignment has the smallest sum of squared loads.
    """
    count, parts = len(costs), min(world_size, len(costs))
    upto = np.concatenate([[0.0], np.cumsum(costs)])
    run = upto[None, :] - upto[:, None]  # run[i, j]: the cost of tables i .. j-1
    square = np.where((run > limit) | (run < 0), np.inf, run * run)
    # best[j]: the sum of squared loads of the first j tables on ranks 0 to w. cuts[w][j]: the first table of rank w's run if
    # the run ends before table j.
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    cuts = []
    for _ in range(parts):
        total = best[:, None] + square
        cuts.append(total.argmin(axis=0))
        best = total.min(axis=0)
    if not np.isfinite(best[count]):
        return None
    ranks, end = np.empty(count, dtype=np.int64), count
    for rank in reversed(range(parts)):
        begin = int(cuts[rank][end])
        ranks[begin:end] = rank
        end = begin
    return ranks


def _deal_equals_in_order(ranks: np.ndarray, costs: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Exchange tables of equal cost and memory between ranks, so that more tables of a rank are adjacent. Return the new rank
    of each table.

    Loads do not change.
    """
    dealt = ranks.copy()
    kinds: dict[tuple[float, float], list[int]] = {}
    for table, kind in enumerate(zip(costs.tolist(), memory.tolist(), strict=True)):
        kinds.setdefault(kind, []).append(table)
    for alike in kinds.values():
        dealt[alike] = np.sort(ranks[alike])
    return dealt
