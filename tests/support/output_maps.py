"""Output maps for tests: weft's maps and random maps, and the code that runs on the ranks, on CPU processes and on
GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.on_ranks import NAMES, close, data, device, late
from support.operators.gemms import Gemm, MatmulReduceScatterCall

import weft
from weft import symm
from weft.builders import MatmulAllGather, MatmulInto, MatmulReduceScatter, OutputMap, builder, schedule_of, unregister
from weft.builders.output_map import map as maps
from weft.runtime.executors import executor
from weft.schedule import Schedule
from weft.schedule.expr import RANK


class Mapped(NamedTuple):
    """The output maps of a collective, one per rank, and options for the schedule that is built from them."""

    collective: Any
    maps: list[OutputMap]
    options: dict[str, Any]

    def schedule(self, n: int, k: int, dtype: str) -> Schedule:
        p = MatmulInto(self.collective, len(self.maps), n, k, dtype)
        return schedule_of(self.maps, p, **self.options)


LARGEST_TILE = 128
"""The largest number of rows of a tracked GEMM's tile."""


def library(world: int, rows: int) -> dict[str, Mapped]:
    """Return weft's own output maps, {description: map}. They send by copy engines and by stores, with one and with two
    chunks for each rank. If chunks consist of whole tiles, there are also maps for tracked GEMMs.

    rows: the number of rows that a rank owns.
    """
    found: dict[str, tuple[Any, OutputMap, dict[str, Any]]] = {}
    whole = world * rows
    for per in (1, 2):
        track = world > 1 and (per == 1 or rows > LARGEST_TILE)
        for by in ("dma", "store"):
            for add in ("gemm", "reduce", *["tracked"] * track):
                options = {"gemm": "tracked"} if add == "tracked" else {"add": add}
                ring = maps.ring_reduce_scatter(whole, world, per_rank=per, first=by)
                found[f"ring, {per}, {by}, {add}"] = "reduce_scatter", ring, options
                direct = maps.direct_reduce_scatter(whole, world, per_rank=per, by=by)
                found[f"direct, {per}, {by}, {add}"] = "reduce_scatter", direct, options
            sliced = maps.direct_reduce_scatter(whole, world, per_rank=per, by=by, sliced=True)
            found[f"sliced, {per}, {by}"] = "reduce_scatter", sliced, {"engines": max(1, world - 1)}
            ring = maps.ring_all_gather(whole, world, per_rank=per, first=by)
            found[f"ring gather, {per}, {by}"] = "all_gather", ring, {}
            direct = maps.direct_all_gather(whole, world, per_rank=per, by=by)
            found[f"direct gather, {per}, {by}"] = "all_gather", direct, {"engines": 2}
            exchange = maps.all_to_all(whole, world, per_rank=per, by=by, sliced=by == "dma")
            found[f"all-to-all, {per}, {by}"] = "all_to_all", exchange, {"engines": per}
            if track:
                found[f"all-to-all, {per}, {by}, tracked"] = "all_to_all", exchange, {"gemm": "tracked"}
                if by == "dma":
                    found[f"ring gather, {per}, {by}, tracked"] = "all_gather", ring, {"gemm": "tracked"}
    found["ring, copied by kernels"] = "reduce_scatter", maps.ring_reduce_scatter(whole, world), {"by": "kernel"}
    return {name: Mapped(one, [the] * world, options) for name, (one, the, options) in found.items()}


def random_map(rng: random.Random, collective: Any, world: int, rows: int) -> Mapped:
    """Draw a random map. The routes of each chunk are a tree with its owner as the root. Each rank computes its chunks
    in a random order.
    """
    per, options = (
        rng.randint(1, 2),
        {"add": "reduce", "engines": rng.randint(1, 2), "by": rng.choice(("dma", "kernel"))},
    )
    if world > 1 and (per == 1 or rows > LARGEST_TILE) and rng.random() < 0.5:
        options["gemm"] = "tracked"
    places = range(world * per)
    order = [rng.sample(places, len(places)) for _ in range(world)]
    found = [OutputMap(world * rows, len(places), tuple(of_rank)) for of_rank in order]
    for place in places:
        above = _tree(rng, place // per, world)
        below = {rank: [child for child, parent in above.items() if parent == rank] for rank in range(world)}
        for rank in range(world):
            chunk = order[rank].index(place)
            if collective == "reduce_scatter":
                found[rank] = _towards_root(rng, found[rank], chunk, above.get(rank), len(below[rank]))
            else:
                stores = rank == place // per and "gemm" not in options  # a tracked GEMM cannot store a chunk twice
                found[rank] = _from_root(rng, found[rank], chunk, rank == place // per, stores, below[rank])
    return Mapped(collective, found, options)


def _tree(rng: random.Random, root: int, world: int) -> dict[int, int]:
    """Draw a random tree of all ranks. Return the parent of every rank except the root."""
    known, parents = [root], dict[int, int]()
    for rank in rng.sample(range(world), world):
        if rank != root:
            parents[rank] = rng.choice(known)
            known.append(rank)
    return parents


def _towards_root(rng: random.Random, made: OutputMap, chunk: int, parent: int | None, children: int) -> OutputMap:
    if parent is None:
        return made.local(chunk)
    if not children and rng.random() < 0.5:
        return made.remote_map(chunk, to=parent, op="update")
    return made.dma_map(chunk, to=parent, op="update", after=1 + children)


def _from_root(
    rng: random.Random, made: OutputMap, chunk: int, root: bool, stores: bool, children: list[int]
) -> OutputMap:
    made = made.local(chunk) if root else made
    for child in children:
        by_gemm = stores and rng.random() < 0.5
        made = made.remote_map(chunk, to=child) if by_gemm else made.dma_map(chunk, to=child, after=1)
    return made


class Case:
    """The operands of all ranks, this rank's expected result, and its result by cuBLAS (or the CPU's GEMM) and NCCL or
    gloo.
    """

    def __init__(
        self, group: dist.ProcessGroup, collective: str, rows: int, n: int, k: int, dtype: Any, seed: int
    ) -> None:
        rank, world = group.rank(), group.size()
        self.tensors: dict[str, torch.Tensor] = {}
        if collective == "reduce_scatter":
            of = MatmulReduceScatterCall(Gemm((world * rows, k), n, dtype), group, seed)
            xs, ws = zip(*of.inputs, strict=True)
            (self.exact,), (self.usual,) = of.expected(group)
        else:
            shape = (rows if collective == "all_gather" else world * rows, k)
            xs = [data(r, shape, dtype, seed) for r in range(world)]
            ws = [data(r, (k, n), dtype, 50 + seed) for r in range(world)]
            products = [(x.double() @ w.double(), x @ w) for x, w in zip(xs, ws, strict=True)]
            mine = slice(None) if collective == "all_gather" else slice(rank * rows, (rank + 1) * rows)
            self.exact, self.usual = (torch.cat([one[mine] for one in kind]) for kind in zip(*products, strict=True))
        self.tensors = {"x": xs[rank], "w": ws[rank], "y": torch.full_like(self.usual, torch.nan)}


def run_all(
    group: dist.ProcessGroup, schedules: dict[str, tuple[str, Schedule]], sizes: tuple[int, int, int], dtype: Any
) -> None:
    """Run each schedule with new data in poisoned memory, then with the first data again, which must give the same
    bits. Ranks are delayed now and then.

    schedules: {name: (collective, schedule)}. sizes: (rows that a rank owns, n, k).
    """
    rank, world = group.rank(), group.size()
    for name, (collective, schedule) in schedules.items():
        made = executor(schedule, symm.communicator(group, device()))
        _poison(made)
        dist.barrier(group)
        cases = [Case(group, collective, *sizes, dtype, seed) for seed in (0, 1, 2, 0)]
        for call, case in enumerate(cases):
            if (call, rank) in ((1, 0), (2, world - 1)):
                late(0.005)
            made.run(case.tensors)
        for case in cases:
            try:
                close(case.tensors["y"], case.exact, case.usual)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
        assert torch.equal(cases[0].tensors["y"], cases[3].tensors["y"]), name
        made.close()


def run_library(group: dist.ProcessGroup, sizes: tuple[int, int, int], dtype: Any, only: tuple[str, ...] = ()) -> None:
    found = library(group.size(), sizes[0])
    run_all(
        group,
        {name: (one.collective, one.schedule(*sizes[1:], NAMES[dtype])) for name, one in found.items() if not only or name in only},
        sizes, dtype,
    )  # fmt: skip


def run_random(group: dist.ProcessGroup, sizes: tuple[int, int, int], dtype: Any, seeds: range) -> None:
    found = {}
    for seed in seeds:
        collective = "all_gather" if seed % 2 else "reduce_scatter"
        one = random_map(random.Random(seed), collective, group.size(), sizes[0])
        found[f"seed {seed}"] = collective, one.schedule(*sizes[1:], NAMES[dtype])
    run_all(group, found, sizes, dtype)


def _poison(made: Any) -> None:
    if device().type == "cuda":
        for own in made.context.own.values():
            own.fill_(torch.nan)
        torch.cuda.synchronize()
        return
    for (_, rank), place in made._program.places.known.items():
        if rank == made.comm.rank:
            place.flat.view(torch.uint8).fill_(0xFF)


def to_the_right(p: MatmulReduceScatter) -> Schedule:
    """Return a schedule that a user might write: a ring to the right, with two chunks for each rank."""
    world, right = p.world_size, (RANK + 1) % p.world_size
    order = [(RANK + world - 1 - distance) % world * 2 + piece for distance in range(world) for piece in range(2)]
    made = OutputMap(p.m, 2 * world, tuple(order))
    for chunk in range(2 * world - 2):
        made = made.dma_map(chunk, to=right, op="update", after=1 if chunk < 2 else 2)
    return made.local(2 * world - 2).local(2 * world - 1).schedule(p, name="to_the_right")


def direct_map(p: MatmulReduceScatter, *, add: Any, by: Any) -> Schedule:
    return maps.direct_reduce_scatter(p.m, p.world_size, by=by).schedule(p, add=add)


def gather_map(p: MatmulAllGather, *, gemm: Any) -> Schedule:
    return maps.ring_all_gather(p.world_size * p.m, p.world_size).schedule(p, gemm=gemm)


def tracked_map(p: MatmulReduceScatter, *, by: Any) -> Schedule:
    return maps.direct_reduce_scatter(p.m, p.world_size, by=by).schedule(p, gemm="tracked")


@contextmanager
def registered() -> Iterator[None]:
    """Register the builders while the context is open. A user registers a builder permanently, by
    `@builder(MatmulReduceScatter)`.
    """
    builder(MatmulReduceScatter)(to_the_right)
    builder(MatmulReduceScatter, add=("gemm", "reduce"), by=("dma", "store"))(direct_map)
    builder(MatmulReduceScatter, by=("dma", "store"))(tracked_map)
    builder(MatmulAllGather, gemm=("chunks", "tracked"))(gather_map)
    try:
        yield
    finally:
        for made in (to_the_right, direct_map, tracked_map):
            unregister(MatmulReduceScatter, made.__name__)
        unregister(MatmulAllGather, gather_map.__name__)


def like_the_hand_written(group: dist.ProcessGroup, dtype: Any) -> list[str]:
    """Check that a schedule that is built from an output map gives the same bits as weft's hand-written schedule of the
    same kind. Return the names of the maps.
    """
    pairs = {
        f"direct_map[add={add},by={by}]": f"direct[chunks=1,by={by},add={add}]"
        for add in ("gemm", "reduce")
        for by in ("dma", "store")
    }
    pairs |= {f"tracked_map[by={by}]": f"tracked[chunks=1,to={by}]" for by in ("dma", "store")}
    if group.size() > 2:
        pairs["to_the_right"] = "ring[chunks=2,by=dma]"
    call = MatmulReduceScatterCall(Gemm((48 * group.size(), 64), 40, dtype), group, 3)
    with registered():
        for mapped, by_hand in pairs.items():
            found = [call(group, schedule=name) for name in (mapped, by_hand)]
            call.check(group, found[0])
            assert torch.equal(found[0][0], found[1][0]), mapped
        for gemm in ("chunks", "tracked"):
            one = Case(group, "all_gather", 48, 40, 64, dtype, 4)
            y = weft.matmul_all_gather(
                one.tensors["x"], one.tensors["w"], 0, group, schedule=f"gather_map[gemm={gemm}]"
            )
            close(y, one.exact, one.usual)
    return [*pairs]


def another_map_on_one_rank(group: dist.ProcessGroup) -> str:
    """Return the error of this rank if rank 0 has a different map. Ranks compare the schedules that are built from
    maps.
    """
    p = MatmulInto("reduce_scatter", group.size(), 4, 4, "fp32")
    first = "dma" if group.rank() == 0 else "store"
    schedule = maps.ring_reduce_scatter(8 * group.size(), group.size(), first=first).schedule(p)
    try:
        executor(schedule, symm.communicator(group, device()))
    except weft.errors.DisagreementError as error:
        return str(error)
    return ""
