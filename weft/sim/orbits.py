"""Embedding + all-to-all on a torus of any size, in a simulation of rank 0 that represents all ranks.

A torus of any number of dimensions looks the same from every rank. If all ranks have equal tables and samples, and send to
peers in the order of displacement (such as columns, rows), all ranks do the same at the same time:

    flows     when rank 0 sends to the rank at a displacement, every rank sends to the rank at this displacement from it. If the
              route has n links in one direction, n flows share each link of that direction. So these n links are replaced by
              one link with 1 / n of the bandwidth
    signals   when rank 0 sets a signal of the rank at a displacement, the rank at the opposite displacement sets this signal
              of rank 0
    steps     a schedule for three ranks, the fewest with two peers, is built. Its steps for the first peer include the launch.
              Its steps for the second peer are repeated for all other peers

The work grows linearly with the number of ranks: 16,384 ranks take seconds. The result equals the result of simulating
every rank.

The builders (`weft.builders.embedding_all_to_all`) order peers by rank number instead. On a torus this order is slower:
at the ends of rows, ranks send to different displacements at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from weft.builders import EmbeddingAllToAll, Problem, named
from weft.errors import ScheduleError
from weft.hw.topology import Link, Paths, Topology, Wiring, torus
from weft.hw.topology.shapes.torus import dims_of, kinds_of_links, lines, ways_around
from weft.schedule import ITEM_BYTES, Region, Tiles
from weft.sim.collectives import Cut
from weft.sim.costs import cost
from weft.sim.engine import replayed
from weft.sim.lowered import Await, LaneProgram, LoweredSchedule, Raise, Raising, Task, Work, pulses
from weft.sim.max_min import Load
from weft.sim.model import Model
from weft.sim.result import Simulated
from weft.sim.tile_costs import cost_of_tiles, rates
from weft.sim.uses import Cost, Operand, ResourcePlace
from weft.sim.vectorised import NumberedStep, Numbers, at_rank

NAMES = ("serial", "direct", "put")
MOST_RANKS = 256
"""The maximum number of ranks that are simulated one by one. A schedule with a step for each peer has ranks^2 steps in all. So
simulating all candidates for this number of ranks takes minutes. For more ranks it would also take gigabytes.
"""


class Folded(Topology):
    """A torus as seen from rank 0, whose links represent the links of all ranks."""

    def paths(self, source: int, target: int) -> Paths:
        """Return the routes between rank 0 and another rank. A route has one link for each direction that it uses, in
        place of all links of the direction.
        """
        found = self._paths.get((source, target))
        if found is None:
            ways = [
                [(f"{name} {way.step:+d}", way.links) for way in ways_around(target // stride - source // stride, size)]
                for name, stride, size in lines(self.dims)
            ]
            latency_us = sum(of[0][1] for of in ways) * self.links[0].latency_us
            rate = self.links[0].bytes_per_us
            routes = tuple(
                tuple(Link(kind, 0, 0, 0, rate / count, 0.0) for kind, count in route if count)
                for route in itertools.product(*ways)
            )
            found = self._paths[source, target] = Paths(routes, latency_us, rate)
        return found


def folded(ranks: int, bytes_per_us: float, latency_us: float, columns: int, *more: int) -> Topology:
    """Return the torus of `weft.hw.topology.torus` as a `Folded`, whose links represent the links of all ranks."""
    dims = dims_of(ranks, columns, *more)
    kinds = [kind for kind, *_ in kinds_of_links(dims)]
    found = Folded(ranks, tuple(Link(kind, 0, 0, 0, bytes_per_us, latency_us) for kind in kinds), dims, rings=True)
    rate = len(kinds) * bytes_per_us
    found.known["cuts"] = (
        Cut(1 / ranks, rate, rate, rate),
    )  # the cut of the real torus, whose ranks have a link of each kind
    found.__dict__["period"] = 1
    return found


def require_orbit(problem: Problem, model: Model) -> tuple[EmbeddingAllToAll, tuple[int, ...]]:
    """Return (problem, sizes of the torus). Raise `ValueError` unless one rank can represent all ranks."""
    if not isinstance(problem, EmbeddingAllToAll):
        raise ValueError(
            f"{problem.world_size} ranks of {problem.name} are too many: use at most {MOST_RANKS}. Only "
            "embedding_all_to_all can have more: in its simulation one rank represents all"
        )
    wiring = model.wiring
    if wiring.builder is not torus:
        raise ValueError(
            f"the simulation of {problem.world_size} ranks runs one rank that represents all, which needs a torus: use --topology "
            f"torus:COLUMNSxROWS, or at most {MOST_RANKS} ranks"
        )
    if problem.uneven:
        raise ValueError(
            f"one rank cannot represent all {problem.world_size} ranks ({problem.uneven}): use at most {MOST_RANKS} ranks, or the "
            "same number of samples and the same sizes of tables on every rank"
        )
    dims = dims_of(problem.world_size, *wiring.numbers[2:])
    if problem.world_size < 3:
        raise ValueError(f"one rank cannot represent all {problem.world_size} ranks: use at least 3 ranks")
    needed = 3 * problem.batch_sizes[0] * problem.columns * ITEM_BYTES[problem.dtype]  # pooled, received, out
    if needed > model.memory_bytes:
        raise ScheduleError(
            f"{problem.text}: pooled vectors need {needed / 1e9:,.1f} GB on a rank, but {model.name} has "
            f"{model.memory_bytes / 1e9:,.0f} GB: use fewer samples or tables"
        )
    return problem, dims


def orbit(problem: Problem, model: Model, name: str, *, runs: int = 2) -> Simulated:
    """Simulate the schedule `name` ("serial", "direct" or "put") of `problem` on a torus. Rank 0 represents all ranks.

    runs: the number of consecutive runs.
    """
    if name not in NAMES:
        raise ValueError(
            f"schedule {name!r} does not support a simulation in which one rank represents all: use one of "
            f"{', '.join(NAMES)}, or at most {MOST_RANKS} ranks"
        )
    return replayed(_Orbit(problem, model, name).program(), runs)


def orbit_us(found: Simulated, model: Model) -> float:
    """Return the time in us of a run in a series of queued runs: the simulated time in `found`, plus the time of the
    tiles' signals, as in `weft.sim.run_us`.
    """
    sets = sum(
        one.times
        for lane in found.program.lanes
        for task in lane.tasks
        if isinstance(task, Work)
        for one in task.raises
    )
    return found.per_run_us + sets * model.tile_signal_us


class _Block(NamedTuple):
    """Consecutive steps of a lane (`weft.sim.vectorised.NumberedStep`) that the schedule repeats for each peer.

    first: the steps for the first peer.
    other: the steps for each other peer. Empty if the steps `first` are not for a peer, so that they occur only once.
    """

    first: Sequence[NumberedStep]
    other: Sequence[NumberedStep] = ()


class _Orbit:
    def __init__(self, problem: Problem, model: Model, name: str) -> None:
        problem, self._dims = require_orbit(problem, model)
        self._world = problem.world_size
        self._model = replace(model, wiring=Wiring(folded, model.wiring.numbers))
        self._topology = self._model.wiring.of(self._world)
        self._schedule = named(_of_three(problem), name).build()
        self._buffers = {buffer.name: buffer for buffer in self._schedule.buffers}
        self._counters: dict[tuple[str, int], int] = {}
        self._loads: dict[Load, int] = {}
        self._places: dict[ResourcePlace, int] = {}

    def program(self) -> LoweredSchedule:
        (lane,) = self._schedule.lanes
        tasks, origins = list[Task](), []
        for block in _blocks(Numbers(self._schedule).items(lane)):
            for peer in range(1, self._world) if block.other else (0,):
                for item in block.first if peer < 2 else block.other:
                    tasks.append(self._task(item, peer))
                    origins.append(item.origin)
        program = LaneProgram(0, lane.name, 0, tasks, origins)
        schedule = replace(self._schedule, world_size=self._world)
        return LoweredSchedule(schedule, (0,), [program], list(self._loads), len(self._counters), self._places)

    def _task(self, item: NumberedStep, peer: int) -> Task:
        """Return the simulator's task for a step of rank 0, in which rank 0 communicates with rank `peer`.

        item: the step, with evaluated expressions.
        """
        if item.distance is not None:
            return Raise(self._counter(item.signal, self._behind(peer)), self._delay_us(item, peer), True)
        if item.awaited is not None:
            ahead = at_rank(item.place, 0) == min(
                peer, 2
            )  # the index is the number of a rank: of the peer ahead (1 or 2), or behind
            counter, sets = self._counter(item.signal, peer if ahead else self._behind(peer)), at_rank(item.awaited, 0)
            return Await(counter, sets, sets, item.previous)
        if item.tiled:
            return self._tiles(item, peer)
        (rows, cols, _, got_rows, got_cols, _), (source, target) = item.numbers, item.origin.step.regions
        more = self._world // 3 if self._world % 3 == 0 else self._world / 3
        sent = Operand(round(cast(int, rows) * more), cast(int, cols), self._dtype(source), 0, True)
        got = Operand(cast(int, got_rows), round(cast(int, got_cols) * more), self._dtype(target), 0, True)
        return self._work(cost(self._model, self._world, item.origin.step, (sent, got)), item.carried)

    def _tiles(self, item: NumberedStep, peer: int) -> Work:
        step, tiled = cast(Tiles, item.origin.step), item.tiled[0]
        scale = 1 if peer or item.carried else self._world / 3  # kernels of a serial schedule have tiles for all ranks
        parts = []
        for place, numbers, times in tiled.parts:
            regions = step.work[place].regions
            operands = tuple(
                Operand(rows, cols, self._dtype(region), peer if at else 0, cols == self._buffers[region.buffer].cols)
                for region, rows, cols, at in zip(regions, numbers[::3], numbers[1::3], numbers[2::3], strict=True)
            )
            parts.append((step.work[place], operands, round(times * scale)))
        found = cost_of_tiles(self._model, self._world, parts, tiled.read_bytes, rates(step.kernel, self._model))
        raises = tuple(
            Raising(self._counter(one.signal, self._behind(peer)), one.times, self._delay_us(item, peer), one.first, one.last,
                    at_once=True)
            for one in tiled.sets
        )  # fmt: skip
        return self._work(found, item.carried)._replace(raises=raises, pulses=pulses(raises))

    def _work(self, found: Cost, carried: bool) -> Work:
        amounts: dict[str, list[tuple[int, float]]] = {"share": [], "hold": [], "disturb": []}
        whole: dict[int, float] = {}
        for how, (kind, _), amount, of_transfer in found.uses:
            number = self._places.setdefault((kind, 0), len(self._places))
            amounts[how].append((number, amount))
            if of_transfer:
                whole[number] = max(whole.get(number, 0.0), of_transfer)
        share, hold, disturb = (tuple(sorted(of_kind)) for of_kind in amounts.values())
        load = Load(share, hold, disturb, tuple(sorted(whole.items())))
        number = self._loads.setdefault(load, len(self._loads))
        return Work(found.what, 0.0 if carried else found.latency_us, found.work_us, number, False, found.sent_bytes,
                    holds=0.0 if carried else found.holds, least_us=found.least_us)  # fmt: skip

    def _delay_us(self, item: NumberedStep, peer: int) -> float:
        us = self._model.signal_kernel_us if item.carried or item.tiled else self._model.signal_remote_us
        return us + self._topology.paths(0, peer).latency_us

    def _behind(self, peer: int) -> int:
        """Return the rank r from which rank 0 has the same displacement on the torus as rank `peer` has from rank 0. When rank
        0 sends to `peer`, rank r sends to rank 0.
        """
        return sum(-(peer // stride) % size * stride for _, stride, size in lines(self._dims))

    def _counter(self, signal: str, source: int) -> int:
        return self._counters.setdefault((signal, source), len(self._counters))

    def _dtype(self, region: Region) -> str:
        return self._buffers[region.buffer].dtype


def _of_three(problem: EmbeddingAllToAll) -> EmbeddingAllToAll:
    """Return the same problem for three ranks: one rank and two peers. The steps for any number of peers follow from
    these (see the top of this file).
    """
    dims = [dim for _, dim in problem.slots[0]]
    width = sum(dims)
    slots = tuple(tuple((rank * width + sum(dims[:i]), dim) for i, dim in enumerate(dims)) for rank in range(3))
    return replace(
        problem,
        world_size=3,
        batch_sizes=problem.batch_sizes[:3],
        slots=slots,
        rows_read=problem.rows_read[:3],
        ids=problem.ids[:3],
    )


def _blocks(items: Sequence[NumberedStep]) -> Iterator[_Block]:
    """Group the steps of a lane into blocks.

    items: the steps that rank 0 has in this lane in the schedule for three ranks (`_of_three`), in which rank 0 has two
        peers.

    Adjacent steps for the first and the second peer form one block if their kinds and signals are equal. Every other
    step forms a separate block.
    """
    at = 0
    while at < len(items):
        peers = next((end for end in range(at, len(items)) if not _of_peer(items[end])), len(items)) - at
        for count in range(1, peers // 2 + 1):
            first, other = items[at : at + count], items[at + count : at + 2 * count]
            if [_look(item) for item in first] == [_look(item) for item in other]:
                yield _Block(first, other)
                at += 2 * count
                break
        else:
            yield _Block(items[at : at + 1])
            at += 1


def _of_peer(item: NumberedStep) -> bool:
    if item.tiled:
        return bool(item.tiled[0].sets) or any(any(numbers[2::3]) for _, numbers, _ in item.tiled[0].parts)
    return item.distance is not None or item.awaited is not None


def _look(item: NumberedStep) -> tuple[str, str]:
    return item.origin.step.kind, item.signal
