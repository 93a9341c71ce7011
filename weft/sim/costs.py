"""What one step costs on a model, alone, and what it takes of the machine meanwhile.

A step is `latency_us`, in which it holds nothing, and then `work_us` of work if nothing else runs. While it works at full
speed it takes a share of each resource that it uses, 1 being all of it; at half speed, half of that. Resources are those
of a rank: "hbm", "compute", "engine" (all copy engines), "out" and "in" (its port), and the "link" of each pair; here they
are named by distance from the rank whose step it is, so that ranks that do the same have the same costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import singledispatch
from typing import Literal, NamedTuple, TypeAlias, cast

from weft.schedule import ITEM_BYTES, MATMULS, OPS, Collective, Compute, Copy, Read, Step
from weft.schedule.kernels import LibraryGroupedMatmul, TileKernel
from weft.sim.model import Model

Place: TypeAlias = tuple[str, int, int]
"""(kind, distance of the rank that has it, for a link distance of the rank at its other end)."""


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


class Operand(NamedTuple):
    rows: int
    cols: int
    dtype: str
    at: int  # distance of the rank whose memory it is in, from the rank whose step it is
    whole_rows: bool

    @property
    def bytes(self) -> int:
        return self.rows * self.cols * ITEM_BYTES[self.dtype]


def cost(model: Model, world: int, step: Step, operands: tuple[Operand, ...]) -> Cost:
    """operands: of a copy or a collective source and destination, of an exchange then also what goes to the rank at each
    distance, from 0; of any other step what it accesses. A kind of step that is not named here is a kernel of ours that takes as
    long as memory needs for that."""
    if isinstance(step, Read):
        return _cost("compute", model.launch_us + (model.host_read_us if step.by == "host" else 0.0), 0.0, [])
    if isinstance(step, Copy):
        source, target = operands
        if source.at == target.at == 0:
            return _local_copy(model, source.bytes, step.by, step.accumulate)
        return _peer_copy(model, source, target, step.by, step.accumulate)
    if isinstance(step, Collective):
        return _COLLECTIVES[step.op](model, world, *operands)
    if isinstance(step, Compute) and step.op in MATMULS:
        return _matmul(model, step.accumulate, *operands)
    if isinstance(step, Compute) and step.op == "embedding_bag":
        return _embedding_bag(model, *operands)
    return _through_memory(model, step, operands)


_HBM, _COMPUTE = ("hbm", 0, 0), ("compute", 0, 0)
_BLEND = 3.0
"""Of the times that matmul tiles need memory and units for, which norm they take: of 128 experts with 128 rows each, that need
1.9 and 2.0 ms, 2.24 ms were measured on an H200."""


@singledispatch
def rates(kernel: TileKernel, model: Model) -> tuple[float, float]:
    """What tiles of `kernel` reach in computing and of memory, relative to a kernel of our own."""
    return 1.0, 1.0


@rates.register
def _of_the_library(kernel: LibraryGroupedMatmul, model: Model) -> tuple[float, float]:
    compute, memory = model.library_grouped
    return compute / model.grouped_efficiency, memory


def cost_of_tiles(
    model: Model,
    world: int,
    parts: Iterable[tuple[Copy | Compute, tuple[Operand, ...], int]],
    read_bytes: int = 0,
    of_kernel: tuple[float, float] = (1.0, 1.0),
) -> Cost:
    """Of one kernel that does all `parts`, each so many times. What they take of each resource is added up, and the resource
    of which they take most is busy all the time: so many tiles are under way that none waits for another one's latency. The
    kernel takes no less than its longest part alone.

    read_bytes: of what matmuls read in this rank's memory, nothing counted more than once: tiles that have an operand in common
    follow each other, and find it in the cache. of_kernel: see `rates`.
    """
    slower = {"compute": 1 / of_kernel[0], "hbm": 1 / of_kernel[1]}
    taken: dict[Place, float] = {_HBM: read_bytes / model.hbm_bytes_per_us * slower["hbm"]}
    sent, longest, what = 0, 0.0, "compute"
    for step, operands, times in parts:
        if 0 in (operands[-1].rows, operands[-1].cols):
            continue
        if isinstance(step, Compute) and step.op == "matmul":
            what, found = "matmul", _segment(model, *operands)
        else:
            found = cost(model, world, step, operands)
        sent += times * found.sent_bytes
        longest = max(longest, found.work_us)
        for how, place, amount in found.uses:
            if how == "share":
                work_us = found.work_us * slower.get(place[0], 1.0)
                taken[place] = taken.get(place, 0.0) + times * amount * work_us
    us = max(longest, *taken.values())
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


def _peer_copy(model: Model, source: Operand, target: Operand, by: str, update: bool) -> Cost:
    count, put = source.bytes, source.at == 0
    wire = min(model.pair_bytes_per_us, model.port_bytes_per_us, model.hbm_bytes_per_us)
    if by == "kernel":
        us = max(count / wire, model.transfer_us("put" if put else "get", count))
        held = model.kernel_copy_units / model.compute_units
        latency, disturbance, uses = (
            model.launch_us,
            model.kernel_copy_disturbance,
            [Use("hold", ("compute", 0, 0), held)],
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
            uses.append(Use("disturb", ("compute", at, 0), disturbance * count / us))
    uses += _wire(model, source.at, target.at, count, us)
    return _cost("peer", latency, us, uses, sent_bytes=count)


def _all_gather(model: Model, world: int, source: Operand, target: Operand) -> Cost:
    """All ranks' sources into everybody's target; every rank receives what is not its own."""
    if world == 1:
        return _local_copy(model, source.bytes, "kernel")
    received = target.bytes - source.bytes
    us = model.transfer_us("all_gather", received)
    uses = [_share("hbm", 0, _part(2 * target.bytes, us, model.hbm_bytes_per_us))]
    uses += [Use("hold", ("compute", 0, 0), model.collective_units / model.compute_units)]
    for distance in range(1, world):
        uses += _wire(model, 0, distance, source.bytes, us)
    return _cost("peer", model.collective_latency_us, us, uses, source.bytes * (world - 1), joins=True)


def _all_to_all(model: Model, world: int, source: Operand, target: Operand, *parts: Operand) -> Cost:
    """Of the rows of every rank's source to each rank those that its target has; or those that `parts` say, by distance."""
    if world == 1:
        return _local_copy(model, source.bytes, "kernel")
    kept = parts[0].bytes if parts else target.rows * source.cols * ITEM_BYTES[source.dtype]
    sent, received = source.bytes - kept, target.bytes - kept
    us = model.transfer_us("all_to_all", max(sent, received))
    uses = [_share("hbm", 0, _part(source.bytes + target.bytes, us, model.hbm_bytes_per_us))]
    uses += [Use("hold", ("compute", 0, 0), model.collective_units / model.compute_units)]
    for distance in range(1, world):
        uses += _wire(model, 0, distance, parts[distance].bytes if parts else sent / (world - 1), us)
    # The host tells an exchange its sizes, and has just read them: nothing is queued ahead.
    latency_us = model.collective_latency_us + (model.host_read_us if parts else 0.0)
    return _cost("peer", latency_us, us, uses, sent, joins=True)


def _reduce_scatter(model: Model, world: int, source: Operand, target: Operand) -> Cost:
    """As long as an all-gather of as many bytes the other way, and each part that comes is added."""
    if world == 1:
        return _local_copy(model, source.bytes, "kernel")
    return _summed(model, world, source, source.bytes - target.bytes, 1)


def _all_reduce(model: Model, world: int, source: Operand, target: Operand) -> Cost:
    """A reduce-scatter, and an all-gather of what it makes."""
    if world == 1:
        return _local_copy(model, source.bytes, "kernel")
    return _summed(model, world, source, source.bytes * (world - 1) // world, 2)


def _summed(model: Model, world: int, source: Operand, sent: int, rounds: int) -> Cost:
    us = rounds * model.transfer_us("all_gather", sent)
    uses = [_share("hbm", 0, _part(rounds * (source.bytes + 2 * sent), us, model.hbm_bytes_per_us))]
    uses += [Use("hold", ("compute", 0, 0), model.collective_units / model.compute_units)]
    for distance in range(1, world):
        uses += _wire(model, 0, distance, rounds * sent / (world - 1), us)
    return _cost("peer", model.collective_latency_us, us, uses, rounds * sent, joins=True)


_COLLECTIVES: dict[str, Callable[..., Cost]] = {
    "all_gather": _all_gather, "all_to_all": _all_to_all, "exchange": _all_to_all, "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}  # fmt: skip


def _embedding_bag(model: Model, bags: Operand, tables: Operand, out: Operand) -> Cost:
    """Rows of tables, the ids that name them, and where each bag begins; every row that is read counts, again or not."""
    rows = out.rows * tables.bytes
    ids = bags.bytes * (tables.rows + 1)
    traffic = rows + ids + (0 if out.at else out.bytes)
    us = max(traffic / model.hbm_bytes_per_us, out.rows * tables.rows * tables.cols / model.vector_flops_per_us)
    return _kernel(model, "compute", (bags, tables), out, us, us, traffic)


def _matmul(model: Model, accumulate: bool, a: Operand, b: Operand, *more: Operand) -> Cost:
    """more: scales and a bias, which are small and left out, and the output, which may have larger items than a and b."""
    out = more[-1]
    found = model.matmul(out.rows, out.cols, a.cols, a.dtype)
    wider = out.bytes - out.rows * out.cols * ITEM_BYTES[a.dtype]
    traffic = found.hbm_bytes + wider + (out.bytes if accumulate else 0)
    alone_us = max(found.time_us, traffic / model.hbm_bytes_per_us)
    busy_us = found.units_busy * found.time_us
    return _kernel(model, "matmul", (a, b), out, alone_us, busy_us, traffic)


def _segment(model: Model, a: Operand, b: Operand, out: Operand) -> Cost:
    """Without what it reads from its rank's memory."""
    found = model.segment(out.rows, out.cols, a.cols, a.dtype)
    alone_us = max(found.time_us, found.hbm_bytes / model.hbm_bytes_per_us)
    return _kernel(model, "matmul", (a, b), out, alone_us, found.units_busy * found.time_us, found.hbm_bytes)


def _through_memory(model: Model, step: Step, operands: tuple[Operand, ...]) -> Cost:
    """A kernel that reads and writes its operands once, and does little with them."""
    accesses = step.accesses()
    traffic = sum((a.reads + a.writes) * o.bytes for a, o in zip(accesses, operands, strict=True))
    elements = sum(o.rows * o.cols for a, o in zip(accesses, operands, strict=True) if a.writes)
    flops = elements * (OPS[step.op].flops_per_element if isinstance(step, Compute) else len(operands) - 1)
    us = max(traffic / model.hbm_bytes_per_us, flops / model.vector_flops_per_us)
    *inputs, out = [o for _, o in sorted(zip(accesses, operands, strict=True), key=lambda pair: pair[0].writes)]
    return _kernel(model, "compute", tuple(inputs), out, us, us, traffic)


def _kernel(
    model: Model, what: What, inputs: tuple[Operand, ...], out: Operand, us: float, busy_us: float, traffic: float
) -> Cost:
    """A kernel that takes `us` on local operands and keeps all compute units busy for `busy_us` of it; peers' memory it
    reads and writes over their links."""
    wire = min(model.pair_bytes_per_us, model.port_bytes_per_us)
    us = max(us, *(operand.bytes / wire for operand in (*inputs, out) if operand.at), 0.0)
    uses = [_share("hbm", 0, _part(traffic, us, model.hbm_bytes_per_us)), _share("compute", 0, _part(busy_us, us, 1.0))]
    for operand, source, target in [*((o, o.at, 0) for o in inputs), (out, 0, out.at)]:
        if operand.at:
            uses.append(_share("hbm", operand.at, _part(operand.bytes, us, model.hbm_bytes_per_us)))
            uses += _wire(model, source, target, operand.bytes, us)
    crossing = sum(operand.bytes for operand in (*inputs, out) if operand.at)
    return _cost(what, model.launch_us, us, uses, sent_bytes=crossing)


def _wire(model: Model, source: int, target: int, count: float, us: float) -> Iterator[Use]:
    if math.isfinite(model.port_bytes_per_us):
        yield _share("out", source, _part(count, us, model.port_bytes_per_us))
        yield _share("in", target, _part(count, us, model.port_bytes_per_us))
    if model.pair_bytes_per_us < model.port_bytes_per_us:
        yield Use("share", ("link", source, target), _part(count, us, model.pair_bytes_per_us))


def _share(kind: str, at: int, amount: float) -> Use:
    return Use("share", (kind, at, 0), amount)


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
