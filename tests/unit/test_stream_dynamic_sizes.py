"""Dynamic sizes on streams: who reads them, and where copies find their sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton")

from modelled_gpus import Recorded, Stream, SymmetricMemory, context_of, model
from support.made_up import require_runnable_on_gpus

from weft.builders import AllToAllMatmul, MatmulAllToAll, MatmulReduceScatter, NotApplicableError, candidates
from weft.errors import ScheduleError
from weft.operator.dtypes import name_of_dtype
from weft.runtime.cuda import compile as stream_compiler
from weft.runtime.cuda import copy_kernels, sizes, tile_kernels
from weft.runtime.cuda.regions import Regions
from weft.runtime.schedule_memory import layout_of
from weft.schedule import Compute, Draft, Expr, Schedule, Tiles
from weft.schedule.kernels import TileKernel
from weft.schedule.steps import COPY_UNITS, DYNAMIC_COPY_UNITS

EVERYTHING = ("dispatch", "dispatch_by_expert", "dispatch_sorted")
BACK = ("combine", "combine_by_expert")


def schedules(world: int, experts: int, *, exact: bool = True) -> list[tuple[str, Schedule]]:
    found = []
    returning = partial(AllToAllMatmul, return_x=True)
    for problem, builders in ((AllToAllMatmul, EVERYTHING), (returning, EVERYTHING), (MatmulAllToAll, BACK)):
        p = problem(world, experts, (12,) * world, 16, 8, "bf16", most=20, exact=exact)
        for candidate in candidates(p, builders):
            with contextlib.suppress(NotApplicableError):
                found.append((candidate.name, candidate.build()))
    return found


@dataclass(frozen=True, slots=True)
class Launched(TileKernel):
    kind: ClassVar[str] = "launched"


class Launch(tile_kernels.TilesCall):
    def __init__(self, kernel: Launched, step: Tiles, lane: tile_kernels.TilesLane) -> None:
        self._y = lane.regions.view(lane.context.buffers["y"].part())
        self._extent = float(int(step.extent))

    def prepare(self, tensors: dict[str, Any]) -> None:
        self._y(tensors).fill_(torch.nan)

    def __call__(self, tensors: dict[str, Any], bases: list[int]) -> None:
        self._y(tensors).fill_(self._extent)


tile_kernels.tiles_call.register(Launched, Launch)


def test_a_tile_kernel_that_is_registered_is_run_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_compiler, "_core", SimpleNamespace(StreamProgram=Recorded))
    d = Draft("made up", 1)
    y = d.buffer("y", 3, 2, "fp32", "output")
    d.lane("compute").tiles(
        Launched(), "t", 3, Compute("relu", y.part(rows=(Expr("t"), 1)), (y.part(rows=(Expr("t"), 1)),))
    )
    schedule = d.schedule()
    require_runnable_on_gpus(schedule, 0)
    items = stream_compiler.compile_streams(context_of(schedule, 0, SymmetricMemory(1, 0)), False)
    ((_, call, lane),), (prepare,) = items.items, items.prepares
    out = torch.zeros(3, 2)
    prepare({"y": out})
    assert out.isnan().all(), "kernels are loaded before the first run"
    call({"y": out}, [])
    assert (lane, out.tolist()) == (0, [[3.0, 3.0]] * 3)


def test_fp64_is_refused_on_gpus() -> None:
    p = MatmulReduceScatter(2, 8, 4, 4, "fp64")
    for candidate in candidates(p, ("serial", "direct")):
        with pytest.raises(ScheduleError, match="x is fp64, but GPUs reduce in fp32: use CPU processes"):
            require_runnable_on_gpus(candidate.build(), 0)
    with pytest.raises(
        ValueError, match=r"A is torch\.float64 on meta: fp64 is only for CPU processes, to check gradients"
    ):
        name_of_dtype("A", torch.empty(2, 2, dtype=torch.float64, device="meta"))


def test_only_copies_by_kernel_leave_the_host_out() -> None:
    for name, schedule in schedules(2, 4):
        assert schedule.reads_on_host == (name.startswith("dispatch") or "by=dma" in name), name
    bounded = schedules(2, 4, exact=False)
    assert {name.partition("[")[0] for name, _ in bounded} == {*EVERYTHING, *BACK}
    assert not any(schedule.reads_on_host for _, schedule in bounded)
    assert not any("by=dma" in name for name, _ in bounded)


class Numbers:
    """A replacement for `Totals`. Each instance pretends that its numbers have addresses of their own."""

    made: list[Numbers]

    def __init__(self, held: object, indices: list[object], tables: object) -> None:
        self.first = 100_000 * (1 + len(self.made))
        self.end = self.first + 8 * len(indices)
        self.made.append(self)

    def record(self, program: object, stream: int) -> bool:
        self.stream = stream
        return True

    def address(self, number: int) -> int:
        return self.first + 8 * number


@pytest.mark.parametrize("exact", [True, False])
def test_each_lane_finds_the_sizes_of_its_own_copies(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    """Copies on several lanes together have no more programs than copies on one lane."""
    copies: list[dict[str, Any]] = []

    def move(device: object, **what: Any) -> SimpleNamespace:
        copies.append(what)
        return SimpleNamespace(record=lambda *_: True)

    monkeypatch.setattr(Numbers, "made", [], raising=False)
    monkeypatch.setattr(stream_compiler, "_core", SimpleNamespace(StreamProgram=Recorded))
    exchanged: list[int] = []

    def exchange(device: object, **what: Any) -> SimpleNamespace:
        ranges = [*what["sends"], *what["own"], *what["places"]]
        exchanged.extend(range(what["sizes"], what["sizes"] + 24 * len(ranges), 24))
        return SimpleNamespace(record=lambda *_: True)

    for name, instead in (("CopyLaunch", move), ("Totals", Numbers), ("RoundTripLaunch", exchange)):
        monkeypatch.setattr(copy_kernels, name, instead)
    permuted: list[int] = []

    def permute(context: object, regions: object, copies: Sequence[object], sizes: int) -> SimpleNamespace:
        permuted.extend(range(sizes, sizes + 24 * len(copies), 24))
        return SimpleNamespace(prepare=0, writes_outputs=False)

    monkeypatch.setattr(tile_kernels, "PermuteCall", permute)
    made = SimpleNamespace(begin=0, settle=0, gemms=[], prepare=0, writes_outputs=True, record=lambda *_: True)
    for module, name in (
        (stream_compiler, "Agreeing"),
        (stream_compiler, "ReadAhead"),
        (tile_kernels, "GroupedMatmulCall"),
    ):
        monkeypatch.setattr(module, name, lambda *_: made)
    for name, schedule in schedules(4, 4, exact=exact):
        if "by=kernel" not in name and "dispatch_sorted" not in name:
            continue
        copies.clear()
        permuted.clear()
        exchanged.clear()
        Numbers.made.clear()
        region = SymmetricMemory(schedule.world_size, layout_of(schedule).buffer_bytes)
        stream_compiler.compile_streams(context_of(schedule, 1, region), False)
        late = [copy for copy in copies if "sizes" in copy]
        lanes = [lane for lane in schedule.lanes if lane.resource == "copy"]
        combines = name == "combine_by_expert[chunks=1,by=kernel]"
        alone = combines or (name.startswith("dispatch_") and "chunks=1," in name and "send=together" in name)
        assert len(lanes) == (3 if "send=at_once" in name else 0 if alone else 1), name
        # Copies from the inbox to the result run after the GEMMs, on all units. A combine has them, and a dispatch that
        # returns tokens. If a rank of a combine has one lane, one launch has these copies and the copies to peers.
        returns = not name.startswith("dispatch")
        placed = 0 if combines else 1 if returns else 2 if "x" in {b.name for b in schedule.buffers} else 0
        assert bool(exchanged) == alone, name
        streams = [0] * bool(exchanged) + [0] * bool(placed or permuted) + [1 + i for i in range(len(lanes))]
        assert sorted(numbers.stream for numbers in Numbers.made) == streams, name
        parts = [part.sizes for copy in late for part in copy["parts"]]
        assert sorted([*(copy["sizes"] for copy in late), *parts, *permuted, *exchanged]) == [
            at for n in Numbers.made for at in range(n.first, n.end, 24)
        ]
        programs = sorted(copy["programs"] for copy in late)
        sent = len(late) - placed
        assert alone or len(lanes) * programs[sent - 1] <= DYNAMIC_COPY_UNITS, name
        assert programs[sent:] == [COPY_UNITS] * placed, name


def test_outputs_are_allocated_for_the_number_of_input_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMMs are issued again only if more rows arrive than the number of tokens lets expect."""
    model(monkeypatch)
    schedule = next(found for name, found in schedules(2, 4) if name.startswith("dispatch["))
    context = context_of(schedule, 0, SymmetricMemory(2, layout_of(schedule).buffer_bytes))
    context.run.caller = Stream(0)  # type: ignore[assignment]
    rows_at = Regions(context).rows_at
    ahead = sizes.ReadAhead(context, "counts", rows_at)
    again: list[int] = []
    ahead.gemms.append(lambda tensors, bases: again.append(bases[rows_at["y"]]))
    ahead._come = SimpleNamespace(record=lambda: None, synchronize=lambda: None)  # type: ignore[assignment]
    made: list[int] = []  # the rows of each output that was allocated

    def make(rows: int) -> torch.Tensor:
        made.append(rows)
        return torch.empty(rows, 16)

    bases, rooms = [0] * 64, list[int]()
    for n_tokens, arriving in ((12, 16), (24, 40), (24, 68), (3, 12), (6, 20), (0, 25), (6, 1), (6, 15), (6, 18)):
        held = torch.tensor(
            [0, 0, 0, 0, n_tokens, 0, 0, 0, arriving, 0, 0, 0, 0, 0, 0, 0]
        )  # all rows come from the other rank
        ahead._copy = SimpleNamespace(copy_=lambda *_, **__: None, flatten=lambda held=held: held)  # type: ignore[assignment]
        tensors: dict[str, Any] = {"tokens": torch.empty(n_tokens, 8), "y": make}
        made.clear()
        again.clear()
        context.run.made.clear()
        ahead.begin(tensors, bases)
        (room,) = made
        ahead.settle(tensors, bases)
        assert len(context.run.made["y"]) == arriving
        assert again == ([arriving] if arriving > room else []), (n_tokens, arriving, room)
        assert bases[rows_at["y"]] == len(tensors["y"])
        rooms.append(room)
    assert rooms == [34, 68, 68, 9, 58, 38, 38, 17, 17]
