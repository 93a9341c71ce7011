"""What one step costs on a model, alone, and what it takes of the machine meanwhile.

A step is `latency_us`, in which it holds nothing, and then `work_us` of work if nothing else runs. While it works at full
speed it takes a share of each resource that it uses, 1 being all of it; at half speed, half of that. Resources are a rank's
"hbm", "compute" and "engine" (all copy engines), and links (`weft.hw.topology`): a flow takes a part of each link of its route.
Here they are named by distance from the rank whose step it is, so that ranks that do the same have the same costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import singledispatch
from typing import Literal, NamedTuple, TypeAlias, cast

from weft.hw.topology import Link, Topology
from weft.schedule import ITEM_BYTES, MATMULS, OPS, PLAIN_MATMULS, Agree, Collective, Compute, Copy, Read, Step
from weft.schedule.kernels import LibraryGroupedMatmul, TileKernel, TrackedMatmul
from weft.sim.model import Model

Place: TypeAlias = tuple[str, int]
"""(kind, distance of the rank that has it); of a link its kind, and how far on its `at` is."""


How: TypeAlias = Literal["share", "hold", "disturb"]


class Use(NamedTuple):
    """share: shared with whatever else asks. hold: taken from the others as long as the step works, however slowly.
    disturb: lost by those who share it, in proportion to the step's speed, without slowing the step."""

    how: How
    place: Place
    amount: float


What: TypeAlias = Literal["matmul", "compute", "peer", "engine"]
"""matmul, another kernel, communication with peers, or a copy engine's copy within the GPU."""


class Cost(NamedTuple):
    what: What
    latency_us: float
    work_us: float
    uses: tuple[Use, ...]
    sent_bytes: int = 0  # cross between ranks for this step: leave its rank, or are fetched
    joins: bool = False  # begins when all ranks have come to it
    fills: float = 0.0  # share of its rank's units that it keeps until it ends, from kernels that begin later

    @property
    def holds(self) -> float:
        """Return the share of its rank's units without which it cannot begin."""
        return sum(amount for how, place, amount in self.uses if how == "hold" and place == _COMPUTE)


class Operand(NamedTuple):
    rows: int
    cols: int
    dtype: str
    at: int  # distance of the rank whose memory it is in, from the rank whose step it is
    whole_rows: bool

    @property
    def bytes(self) -> int:
        return self.rows * self.cols * ITEM_BYTES[self.dtype]


class Links(NamedTuple):
    """The topology, others being named by their distance from `rank`."""

    topology: Topology
    rank: int

    def route(self, source: int, target: int) -> tuple[Link, ...]:
        ranks = self.topology.ranks
        return self.topology.route((self.rank + source) % ranks, (self.rank + target) % ranks)

    def latency_us(self, source: int, target: int) -> float:
        return sum(link.latency_us for link in self.route(source, target))

    def bytes_per_us(self, source: int, target: int) -> float:
        return min((link.bytes_per_us for link in self.route(source, target)), default=math.inf)

    def uses(self, source: int, target: int, count: float, us: float) -> Iterator[Use]:
        """Of so many bytes in `us`."""
        for link in self.route(source, target):
            at = (link.at - self.rank) % self.topology.ranks
            yield _share(link.kind, at, _part(count, us, link.bytes_per_us))


def cost(model: Model, world: int, step: Step, operands: tuple[Operand, ...], rank: int = 0) -> Cost:
    """Of a step of `rank`: the same for all ranks to which the topology looks the same.

    operands: of a copy or a collective source and destination, of an exchange then also what goes to the rank at each
    distance, from 0; of any other step what it accesses. A kind of step that is not named here is a kernel of ours that takes as
    long as memory needs for that."""
    links = Links(model.wiring.of(world), rank)
    if isinstance(step, Read):
        return _cost("compute", model.launch_us + (model.host_read_us if step.by == "host" else 0.0), 0.0, [])
    if isinstance(step, Agree):  # a few counts; what it spoils, no valid run does
        return _cost("compute", model.launch_us, 0.0, [])
    if isinstance(step, Copy):
        source, target = operands
        if source.at == target.at == 0:
            return _local_copy(model, source.bytes, step.by, step.accumulate)
        return _peer_copy(model, links, source, target, step.by, step.accumulate)
    if isinstance(step, Collective) and world == 1:
        return _local_copy(model, operands[0].bytes, "kernel")
    if isinstance(step, Collective):
        return _COLLECTIVES[step.op](model, links, *operands)
    if isinstance(step, Compute) and step.op in MATMULS:
        if step.op != "addmm":
            return _matmul(model, links, step.accumulate, *operands)
        *factors, added, out = operands
        return _copied_first(model, links, added, out, _matmul(model, links, True, *factors, out))
    if isinstance(step, Compute) and step.op == "embedding_bag":
        return _embedding_bag(model, links, *operands)
    return _through_memory(model, links, step, operands)


_HBM, _COMPUTE = ("hbm", 0), ("compute", 0)
_BLEND = 3.0
"""Of the times that matmul tiles need memory and units for, which norm they take: of 128 experts with 128 rows each, that need
1.9 and 2.0 ms, 2.24 ms were measured on an H200."""


_LATE_TILES = 0.5
"""Of what tiles of a tracked GEMM store in peers' memory, the part for which their unit waits: measured on H200s. Of what
they read there to add to it as much is taken, which nobody has measured."""


class Rates(NamedTuple):
    """What a kernel's tiles reach in computing and of memory, relative to a kernel of our own. whole: a matmul's tile is one unit's
    work as it is; otherwise it is one expert's rows, and cut as is best."""

    compute: float = 1.0
    memory: float = 1.0
    whole: bool = False


@singledispatch
def rates(kernel: TileKernel, model: Model) -> Rates:
    return Rates()


@rates.register
def _of_the_library(kernel: LibraryGroupedMatmul, model: Model) -> Rates:
    compute, memory = model.library_grouped
    return Rates(compute / model.grouped_efficiency, memory)


@rates.register
def _of_tracked(kernel: TrackedMatmul, model: Model) -> Rates:
    return Rates(whole=True)


def cost_of_tiles(
    model: Model,
    world: int,
    parts: Iterable[tuple[Copy | Compute, tuple[Operand, ...], int]],
    read_bytes: int = 0,
    of_kernel: Rates = Rates(),  # noqa: B008 - a value
    rank: int = 0,
) -> Cost:
    """Of one kernel that does all `parts`, each so many times. What they take of each resource is added up, and the resource
    of which they take most is busy all the time: so many tiles are under way that none waits for another one's latency. The
    kernel takes no less than its longest part alone.

    read_bytes: of what matmuls read in this rank's memory, nothing counted more than once: tiles that have an operand in common
    follow each other, and find it in the cache. of_kernel: see `rates`.
    """
    slower = {"compute": 1 / of_kernel.compute, "hbm": 1 / of_kernel.memory}
    taken: dict[Place, float] = {_HBM: read_bytes / model.hbm_bytes_per_us * slower["hbm"]}
    sent, longest, what, links = 0, 0.0, "compute", Links(model.wiring.of(world), rank)
    parts = [part for part in parts if 0 not in (part[1][-1].rows, part[1][-1].cols)]
    units = sum(times for step, _, times in parts if _is_matmul(step))
    for step, operands, times in parts:
        if _is_matmul(step):
            found = _tile(model, links, units, *operands) if of_kernel.whole else _segment(model, links, *operands)
            what = "matmul"
        else:
            found = cost(model, world, step, operands, rank)
        sent += times * found.sent_bytes
        longest = max(longest, found.work_us)
        for how, place, amount in found.uses:
            if how == "share":
                work_us = found.work_us * slower.get(place[0], 1.0)
                taken[place] = taken.get(place, 0.0) + times * amount * work_us
    # The last tiles may keep few units busy, and what is done by then takes as long as if they kept all.
    waves = -(-units // model.compute_units) if of_kernel.whole else 1
    us = max(waves * longest, *taken.values())
    if what == "matmul":  # tiles that wait for memory, and tiles that compute: neither hides all of the other
        us = max(us, (taken[_HBM] ** _BLEND + taken.get(_COMPUTE, 0.0) ** _BLEND) ** (1 / _BLEND))
    uses = [Use("share", place, amount / us) for place, amount in taken.items() if amount > 0]
    return _cost(cast(What, what), model.launch_us, us, uses, sent)


def _local_copy(model: Model, count: int, by: str, update: bool = False) -> Cost:
    us = (3 if update else 2) * count / model.hbm_bytes_per_us
    if by == "kernel":
        return _cost("compute", model.launch_us, us, [_share("hbm", 0, 1.0), _share("compute", 0, 1.0)])
    uses = [_share("hbm", 0, 1.0), _share("engine", 0, 1 / model.copy_engines)]
    return _cost("engine", model.copy_latency_us, us, uses)


def _peer_copy(model: Model, links: Links, source: Operand, target: Operand, by: str, update: bool) -> Cost:
    count, put = source.bytes, source.at == 0
    wire = min(links.bytes_per_us(source.at, target.at), model.hbm_bytes_per_us)
    if by == "kernel":
        us = max(count / wire, model.transfer_us("put" if put else "get", count))
        held = model.kernel_copy_units / model.compute_units
        latency, disturbance, uses = (
            model.launch_us,
            model.kernel_copy_disturbance,
            [Use("hold", _COMPUTE, held)],
        )
    else:
        us = max(count / wire, model.transfer_us("copy", count))
        if not (source.whole_rows and target.whole_rows) and source.rows > 1:
            us += source.rows * model.copy_row_us
        latency, disturbance, uses = (
            model.copy_latency_us,
            model.copy_disturbance,
            [_share("engine", 0, 1 / model.copy_engines)],
        )
    for at in (source.at, target.at, *[target.at] * update):  # what is added to is read as well
        uses.append(_share("hbm", at, _part(count, us, model.hbm_bytes_per_us)))
        if us > 0:
            uses.append(Use("disturb", ("compute", at), disturbance * count / us))
    uses += links.uses(source.at, target.at, count, us)
    return _cost("peer", latency + links.latency_us(source.at, target.at), us, uses, sent_bytes=count)


def _all_gather(model: Model, links: Links, source: Operand, target: Operand) -> Cost:
    """All ranks' sources into everybody's target; every rank receives what is not its own."""
    us, others = model.transfer_us("all_gather", target.bytes - source.bytes), links.topology.ranks - 1
    return _collective(model, links, us, 2 * target.bytes, [source.bytes] * others)


def _all_to_all(model: Model, links: Links, source: Operand, target: Operand, *parts: Operand) -> Cost:
    """Of the rows of every rank's source to each rank those that its target has; or those that `parts` say, by distance."""
    kept = parts[0].bytes if parts else target.rows * source.cols * ITEM_BYTES[source.dtype]
    sent, received, others = source.bytes - kept, target.bytes - kept, links.topology.ranks - 1
    us = model.transfer_us("all_to_all", max(sent, received))
    to_each = [part.bytes for part in parts[1:]] if parts else [sent / others] * others
    found = _collective(model, links, us, source.bytes + target.bytes, to_each)
    # The host tells an exchange its sizes, and has just read them: nothing is queued ahead.
    latency_us = found.latency_us + (model.host_read_us if parts else 0.0)
    return found._replace(latency_us=latency_us, sent_bytes=sent)


def _reduce_scatter(model: Model, links: Links, source: Operand, target: Operand) -> Cost:
    """As long as an all-gather of as many bytes the other way, and each part that comes is added."""
    return _summed(model, links, source, source.bytes - target.bytes, 1)


def _all_reduce(model: Model, links: Links, source: Operand, target: Operand) -> Cost:
    """A reduce-scatter, and an all-gather of what it makes."""
    world = links.topology.ranks
    return _summed(model, links, source, source.bytes * (world - 1) // world, 2)


def _summed(model: Model, links: Links, source: Operand, sent: int, rounds: int) -> Cost:
    us, others = model.transfer_us("all_gather", rounds * sent), links.topology.ranks - 1
    if rounds > 1:
        us = max(0.0, model.all_reduce * (us + model.collective_latency_us) - model.collective_latency_us)
    return _collective(model, links, us, rounds * (source.bytes + 2 * sent), [rounds * sent / others] * others)


def _collective(model: Model, links: Links, us: float, memory: int, to_each: Sequence[float]) -> Cost:
    """That takes `us` where links have room, reads and writes so much memory, and sends so much to the rank at each distance,
    from 1."""
    uses = [_share("hbm", 0, _part(memory, us, model.hbm_bytes_per_us))]
    uses += [Use("hold", _COMPUTE, model.collective_units / model.compute_units)]
    for distance, count in enumerate(to_each, 1):
        uses += links.uses(0, distance, count, us)
    latency_us = model.collective_latency_us + max(links.latency_us(0, d + 1) for d in range(len(to_each)))
    return _cost("peer", latency_us, us, uses, round(sum(to_each)), joins=True)


_COLLECTIVES: dict[str, Callable[..., Cost]] = {
    "all_gather": _all_gather, "all_to_all": _all_to_all, "exchange": _all_to_all, "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}  # fmt: skip


def _embedding_bag(model: Model, links: Links, bags: Operand, tables: Operand, out: Operand) -> Cost:
    """Rows of tables, the ids that name them, and where each bag begins; every row that is read counts, again or not."""
    rows = out.rows * tables.bytes
    ids = bags.bytes * (tables.rows + 1)
    traffic = rows + ids + (0 if out.at else out.bytes)
    us = max(traffic / model.hbm_bytes_per_us, out.rows * tables.rows * tables.cols / model.vector_flops_per_us)
    return _kernel(model, links, "compute", (bags, tables), out, us, us, traffic)


def _matmul(model: Model, links: Links, accumulate: bool, a: Operand, b: Operand, *more: Operand) -> Cost:
    """more: scales and a bias, which are small and left out, and the output, which may have larger items than a and b."""
    out = more[-1]
    found = model.matmul(out.rows, out.cols, a.cols, a.dtype)
    wider = out.bytes - out.rows * out.cols * ITEM_BYTES[a.dtype]
    traffic = found.hbm_bytes + wider + (out.bytes if accumulate else 0)
    alone_us = max(found.time_us, traffic / model.hbm_bytes_per_us)
    busy_us = found.units_busy * found.time_us
    if out.at:
        rate = _stored_per_us(model, links, out)
        late_us = min(out.bytes, model.stored_late_bytes) / rate + model.stored_end_us
        alone_us = max(alone_us + late_us, out.bytes / rate)
    matmul = _kernel(model, links, "matmul", (a, b), out, alone_us, busy_us, traffic)
    return matmul._replace(fills=model.matmul_keeps * found.units_busy)


def _copied_first(model: Model, links: Links, added: Operand, out: Operand, matmul: Cost) -> Cost:
    """The library's addmm: what it adds to is copied into the output, in its own time, and then it accumulates there."""
    far = added.at != 0 or out.at != 0
    copy = _peer_copy(model, links, added, out, "dma", False) if far else _local_copy(model, added.bytes, "kernel")
    us = copy.work_us + matmul.work_us
    uses = [
        Use(how, place, _part(amount * one.work_us, us, 1.0))
        for one in (copy, matmul)
        for how, place, amount in one.uses
    ]
    both = _cost("matmul", copy.latency_us + matmul.latency_us, us, uses, copy.sent_bytes + matmul.sent_bytes)
    return both._replace(fills=matmul.fills)


def _stored_per_us(model: Model, links: Links, out: Operand) -> float:
    """Of bytes in a peer's memory, by all units."""
    return min(model.put_bytes_per_us[-1][1], links.bytes_per_us(0, out.at))


def _is_matmul(step: Step) -> bool:
    return isinstance(step, Compute) and step.op in PLAIN_MATMULS


def _tile(model: Model, links: Links, tiles: int, a: Operand, *more: Operand) -> Cost:
    """One of so many, a unit's work, or where there are units for it that of several: without what it takes of its rank's memory to
    read the operands."""
    *factors, out = more
    us = model.tile_us(out.rows, out.cols, a.cols, a.dtype)
    busy_us = us / model.compute_units
    splits = min(model.compute_units // tiles, a.cols // TrackedMatmul.least_part)
    if splits > 1 and model.tile_part_us is not None:
        us = us / splits + splits * model.tile_part_us
    if out.at:
        us += _LATE_TILES * out.bytes * model.compute_units / _stored_per_us(model, links, out)
    for added in factors[1:]:
        if added.at:
            rate = min(model.get_bytes_per_us[-1][1], links.bytes_per_us(added.at, 0))
            us += _LATE_TILES * added.bytes * model.compute_units / rate
    return _kernel(model, links, "matmul", (a, *factors), out, us, busy_us, out.bytes)


def _segment(model: Model, links: Links, a: Operand, *more: Operand) -> Cost:
    """Without what it reads from its rank's memory."""
    *factors, out = more
    found = model.segment(out.rows, out.cols, a.cols, a.dtype)
    alone_us = max(found.time_us, found.hbm_bytes / model.hbm_bytes_per_us)
    inputs, busy_us = (a, *factors), found.units_busy * found.time_us
    return _kernel(model, links, "matmul", inputs, out, alone_us, busy_us, found.hbm_bytes)


def _through_memory(model: Model, links: Links, step: Step, operands: tuple[Operand, ...]) -> Cost:
    """A kernel that reads and writes its operands once, and does little with them."""
    accesses = step.accesses()
    traffic = sum((a.reads + a.writes) * o.bytes for a, o in zip(accesses, operands, strict=True))
    elements = sum(o.rows * o.cols for a, o in zip(accesses, operands, strict=True) if a.writes)
    flops = elements * (OPS[step.op].flops_per_element if isinstance(step, Compute) else len(operands) - 1)
    us = max(traffic / model.hbm_bytes_per_us, flops / model.vector_flops_per_us)
    *inputs, out = [o for _, o in sorted(zip(accesses, operands, strict=True), key=lambda pair: pair[0].writes)]
    busy_us, far = us, [o for o in inputs if o.at and o.bytes]
    if far:
        us = max(us, sum(o.bytes for o in far) / model.get_bytes_per_us[-1][1]) + model.loaded_start_us
    return _kernel(model, links, "compute", tuple(inputs), out, us, busy_us, traffic)


def _kernel(
    model: Model, links: Links, what: What, inputs: tuple[Operand, ...], out: Operand, us: float, busy_us: float, traffic: float
) -> Cost:  # fmt: skip
    """A kernel that takes `us` on local operands and keeps all compute units busy for `busy_us` of it; peers' memory it
    reads and writes over their links."""
    flows = [(o.at, 0, o.bytes) for o in inputs if o.at] + [(0, out.at, out.bytes)] * (out.at != 0)
    us = max(us, *(count / links.bytes_per_us(source, target) for source, target, count in flows), 0.0)
    uses = [_share("hbm", 0, _part(traffic, us, model.hbm_bytes_per_us)), _share("compute", 0, _part(busy_us, us, 1.0))]
    for source, target, count in flows:
        uses.append(_share("hbm", source or target, _part(count, us, model.hbm_bytes_per_us)))
        uses += links.uses(source, target, count, us)
    latency_us = max((links.latency_us(source, target) for source, target, _ in flows), default=0.0)
    crossing = sum(count for _, _, count in flows)
    return _cost(what, model.launch_us + latency_us, us, uses, sent_bytes=crossing)


def _share(kind: str, at: int, amount: float) -> Use:
    return Use("share", (kind, at), amount)


def _part(amount: float, us: float, per_us: float) -> float:
    """Which part of a resource that gives `per_us` it takes to get `amount` in `us`."""
    return amount / us / per_us if us > 0 else 0.0


def _cost(
    what: What, latency_us: float, work_us: float, uses: list[Use], sent_bytes: int = 0, joins: bool = False
) -> Cost:
    """Uses of one place in one way are added up, and what is not used is left out."""
    amounts: dict[tuple[How, Place], float] = {}
    for use in uses:
        amounts[use.how, use.place] = amounts.get((use.how, use.place), 0.0) + use.amount
    merged = tuple(Use(how, place, amount) for (how, place), amount in amounts.items() if amount > 0)
    return Cost(what, latency_us, work_us, merged, sent_bytes, joins)
