"""The cost of a kernel that computes all tiles of a step: GEMMs of tiles, segments of experts, copies and pooling.

The kernel costs less than the sum of its tiles (`weft.sim.costs`), because consecutive tiles find a shared operand in
the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch
from typing import NamedTuple, TypeAlias, cast

from weft.builders.row_reuse import share_found
from weft.schedule import ITEM_BYTES, Compute, Copy
from weft.schedule.kernels import (
    FEW_ROWS,
    GroupedMatmul,
    LibraryGroupedMatmul,
    OnlyExpertMatmul,
    PooledBags,
    PooledSlices,
    ReturningMatmul,
    TileKernel,
)
from weft.sim.costs import blended, cost, kernel_cost, pooling_cost, stored_per_us, with_late_stores
from weft.sim.model import Model
from weft.sim.uses import COMPUTE, HBM, Cost, Links, Operand, ResourcePlace, Use, What, merged_cost

_LATE_TILES = 0.5
"""The fraction of a tracked GEMM's stores to peers for which compute units wait, measured on H200s. The same fraction is assumed,
without a measurement, for addends that tiles read from peers."""


_FIRST_TILE_US = 3.0
"""The time from the start of a tracked GEMM to its first products, in which it reads tables and tensor maps. On an H100, four
GEMMs of 57 to 655 us took 5 to 7 us longer than their tiles. The launch is 2 us of this difference."""


_VERY_FEW_ROWS, _FEW_GROUPED = 6, 0.95
"""Up to this mean number of rows of a segment, the memory rate of `GroupedMatmul` for several sources has this factor.
`SortedMatmul` then has smaller tiles, and more weights in flight. On an H100, a dispatch of 14 tokens x 12032 x 26624 with 8
experts took 1020 us with the first kernel, and 890 us with the second.
"""


Part: TypeAlias = "tuple[Copy | Compute, tuple[Operand, ...], int]"
"""(a step of a tile, its operands, the number of tiles)."""


class Rates(NamedTuple):
    """The properties of a kernel on which the costs of its tiles depend.

    compute, memory: the kernel's compute rate and memory rate, divided by the rates that weft's kernels reach.
    whole: True if each tile of the step is computed by a single compute unit. False if the kernel may cut the tile into smaller
        tiles.
    sources: if each rank has few rows for an expert, the number of ranks whose rows may share a tile; 1 if rows of
        different ranks never share a tile.
    found: the share of row reads of a pooling kernel that the cache supplies.
    least_part: the shortest part of k, in elements, that a compute unit computes if several units share a tile; 0 if
        units never share tiles.
    few: the memory rate if segments have few rows (`_VERY_FEW_ROWS`), divided by the rate for more rows.
    may_split: True if the kernel may run as one cuBLAS GEMM per tile, with the costs of cuBLAS GEMMs
        (`LibraryGroupedMatmul.is_one_per_expert`).
    """

    compute: float = 1.0
    memory: float = 1.0
    whole: bool = False
    sources: int = 1
    found: float = 0.0
    least_part: int = 0
    few: float = 1.0
    may_split: bool = False


@singledispatch
def rates(kernel: TileKernel, model: Model) -> Rates:
    return Rates(whole=kernel.unit_per_tile, least_part=kernel.least_part)


@rates.register
def _of_the_library(kernel: LibraryGroupedMatmul, model: Model) -> Rates:
    compute, memory = model.library_grouped
    return Rates(compute / model.grouped_efficiency, memory, may_split=True)


@rates.register
def _of_grouped(kernel: GroupedMatmul, model: Model) -> Rates:
    return Rates(few=_FEW_GROUPED if kernel.n_sources > 1 else 1.0)


@rates.register
def _of_only_expert(kernel: OnlyExpertMatmul, model: Model) -> Rates:
    return Rates(may_split=True)


@rates.register
def _of_returning(kernel: ReturningMatmul, model: Model) -> Rates:
    return Rates(sources=kernel.n_sources)


@rates.register(PooledSlices)
@rates.register(PooledBags)
def _of_pooling(kernel: PooledSlices | PooledBags, model: Model) -> Rates:
    return Rates(found=share_found(kernel.found, model.l2_bytes / model.l2_copies))


def cost_of_tiles(
    model: Model,
    world: int,
    parts: Iterable[Part],
    read_bytes: int = 0,
    of_kernel: Rates = Rates(),  # noqa: B008 - a value
    rank: int = 0,
) -> Cost:
    """Return the cost of one kernel for all tiles of a step.

    The kernel takes as long as its busiest resource needs, and at least as long as its longest tile alone.

    parts: the work of the tiles: (a step of a tile, its operands, number of tiles with this step and these operands).
    read_bytes: the bytes that matmuls read from this rank's memory. A byte counts once, even if several tiles read it.
    of_kernel: the kernel's properties, from `rates(kernel, model)`.
    """
    parts = [part for part in parts if 0 not in (part[1][-1].rows, part[1][-1].cols)]
    if of_kernel.may_split and _is_one_per_tile(parts):
        return _one_after_the_other(
            model, [(cost(model, world, step, operands, rank), n) for step, operands, n in parts]
        )
    memory = of_kernel.memory * (of_kernel.few if _has_few_rows(parts) else 1.0)
    slower = {"compute": 1 / of_kernel.compute, "hbm": 1 / memory}
    taken: dict[ResourcePlace, float] = {HBM: read_bytes / model.hbm_bytes_per_us * slower["hbm"]}
    sent, longest, what, links = 0, 0.0, "compute", Links(model.wiring.of(world), rank)
    loaded = 0
    parts = _in_shared_tiles(parts, of_kernel.sources) if of_kernel.sources > 1 else parts
    units = sum(times for step, _, times in parts if step.multiplies)
    for step, operands, times in parts:
        if step.multiplies:
            k, least = operands[0].cols, of_kernel.least_part
            splits = min(model.compute_units // units, k // least) if least else 1
            found = _tile(model, links, splits, *operands) if of_kernel.whole else _segment(model, links, *operands)
            what = "matmul"
        elif isinstance(step, Compute) and step.op == "embedding_bag":
            found = pooling_cost(model, links, *operands, found=of_kernel.found)
            loaded += times * operands[1].bytes
        else:
            found = cost(model, world, step, operands, rank)
        sent += times * found.sent_bytes
        longest = max(longest, found.work_us)
        for use in found.uses:
            if use.how == "share":
                work_us = found.work_us * slower.get(use.place[0], 1.0)
                taken[use.place] = taken.get(use.place, 0.0) + times * use.amount * work_us
    # The last wave may occupy few units, but takes as long as a full wave.
    waves = -(-units // model.compute_units) if of_kernel.whole else 1
    us = max(waves * longest, *taken.values())
    if what == "matmul" and of_kernel == Rates(sources=of_kernel.sources, few=of_kernel.few):
        gemms = [(operands, times) for step, operands, times in parts if step.multiplies]
        a, *_, out = gemms[0][0]
        segments = [(operands[-1].rows, times) for operands, times in gemms]
        us = max(us, blended(taken[HBM], model.rounds_us(segments, out.cols, a.cols, a.dtype)))
    pools = any(isinstance(step, Compute) and step.op == "embedding_bag" for step, *_ in parts)
    if of_kernel.found and model.grouped_loads_bytes_per_us:  # no faster than all units can load from the cache
        us = max(us, loaded / model.grouped_loads_bytes_per_us)
    if what == "matmul" or pools:
        us = max(us, blended(taken[HBM], taken.get(COMPUTE, 0.0)))
    far = [(o[-1], times) for step, o, times in parts if step.multiplies and o[-1].at and not of_kernel.whole]
    if far:
        rate = min(stored_per_us(model, links, out) for out, _ in far)
        us = with_late_stores(model, us, sum(times * out.bytes for out, times in far), rate)
    uses = [Use("share", place, amount / us) for place, amount in taken.items() if amount > 0]
    first_us = _FIRST_TILE_US if of_kernel.whole else model.matmul_start_us if what == "matmul" else 0.0
    start_us = model.launch_us + first_us + (model.first_bag_us if pools else 0.0)
    return merged_cost(cast(What, what), start_us, us, uses, sent)


def _one_after_the_other(model: Model, gemms: list[tuple[Cost, int]]) -> Cost:
    """Return the cost of cuBLAS GEMMs in sequence. gemms: the costs of the GEMMs, as pairs (cost, number of GEMMs with this
    cost).
    """
    us = sum(count * (one.work_us + model.launch_us) for one, count in gemms) - model.launch_us
    uses = [
        use._replace(amount=use.amount * count * one.work_us / us, whole=use.whole * count * one.work_us / us)
        for one, count in gemms
        for use in one.uses
    ]
    sent = sum(count * one.sent_bytes for one, count in gemms)
    return merged_cost("matmul", model.launch_us, us, uses, sent)


def _has_few_rows(parts: list[Part]) -> bool:
    rows = [(operands[-1].rows, times) for step, operands, times in parts if step.multiplies]
    return sum(n * times for n, times in rows) <= _VERY_FEW_ROWS * sum(times for _, times in rows)


def _is_one_per_tile(parts: list[Part]) -> bool:
    """Return True if the GEMMs in `parts` run as one cuBLAS GEMM per tile."""
    gemms = [(operands, times) for step, operands, times in parts if step.multiplies]
    if not gemms:
        return False
    (a, *_, out), _ = gemms[0]
    tiles, rows = sum(times for _, times in gemms), sum(times * operands[-1].rows for operands, times in gemms)
    return LibraryGroupedMatmul.is_one_per_expert(tiles, rows, a.cols, out.cols, ITEM_BYTES[a.dtype])


def _in_shared_tiles(parts: list[Part], sources: int) -> list[Part]:
    """Merge an expert's segments from all `sources` ranks into one segment, if the segments have few rows. Return the new
    list of parts; other parts are unchanged.
    """
    gemms = [part for part in parts if part[0].multiplies]
    segments, rows = sum(times for *_, times in gemms), sum(times * operands[-1].rows for _, operands, times in gemms)
    if not gemms or rows > FEW_ROWS * segments:
        return parts
    experts = max(1, segments // sources)
    step, (a, *factors, out), _ = gemms[0]
    each = -(-rows // experts)
    merged = (a._replace(rows=each), *factors, out._replace(rows=each))
    return [*(part for part in parts if not part[0].multiplies), (step, merged, experts)]


def _tile(model: Model, links: Links, splits: int, a: Operand, *more: Operand) -> Cost:
    """Return the cost of a tile, without reads of operands from the rank's own memory.

    splits: the number of compute units that compute the tile, a part of K each.
    """
    *factors, out = more
    us = model.tile_us(out.rows, out.cols, a.cols, a.dtype)
    busy_us = us / model.compute_units
    if splits > 1 and model.tile_part_us is not None:
        us = us / splits + splits * model.tile_part_us
    if out.at:
        us += _LATE_TILES * out.bytes * model.compute_units / stored_per_us(model, links, out)
    for added in factors[1:]:
        if added.at:
            rate = min(model.get_bytes_per_us[-1][1], links.bytes_per_us(added.at, 0))
            us += _LATE_TILES * added.bytes * model.compute_units / rate
    return kernel_cost(model, links, "matmul", (a, *factors), out, us, busy_us, out.bytes)


def _segment(model: Model, links: Links, *operands: Operand) -> Cost:
    """Return the cost of the GEMM of one expert's segment of rows, without reads from the rank's own memory.

    The model caches the costs of segments with local operands, because uneven routing has many segments of few sizes.
    """
    key = (_segment, operands)
    found: Cost | None = model.costs.get(key)
    if found is None:
        found = _new_segment(model, links, *operands)
        if not any(operand.at for operand in operands):
            model.costs[key] = found
    return found


def _new_segment(model: Model, links: Links, a: Operand, *more: Operand) -> Cost:
    *factors, out = more
    found = model.segment(out.rows, out.cols, a.cols, a.dtype)
    alone_us = max(found.time_us, found.hbm_bytes / model.hbm_bytes_per_us)
    inputs, busy_us = (a, *factors), found.units_busy * found.time_us
    return kernel_cost(model, links, "matmul", inputs, out, alone_us, busy_us, found.hbm_bytes)
