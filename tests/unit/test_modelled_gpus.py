"""Every schedule of GEMMs and experts, compiled as for GPUs and executed on modelled GPUs (`modelled_gpus`,
`played_gpus`).

Results must be close to float64, for random orders of streams, in several runs with new data on the same memory. All
work of a run is ordered after the caller's writes before the run, and before the caller's reads after the run. Flags
reach the run that waits for them.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from support import all_to_all_matmul_reference as dispatch
from support import matmul_all_to_all_reference as combine

pytest.importorskip("triton", reason="Triton is not installed here: it compiles the kernels that programs launch")

from modelled_gpus import SymmetricMemory, compiled, model, poison
from played_gpus import Played
from schedule_interpreter import interpret
from support.on_ranks import applicable, each_option
from support.slow import slow

from weft.builders import (
    AllGatherMatmul,
    AllGatherMatmulGradients,
    AllToAllMatmul,
    Candidate,
    MatmulAllGather,
    MatmulAllGatherGradients,
    MatmulAllReduce,
    MatmulAllToAll,
    MatmulReduceScatter,
    Problem,
    Scaled,
    ScaledMatmulReduceScatter,
    candidates,
    named,
)
from weft.builders import problem as schedule_problem
from weft.errors import ScheduleError
from weft.runtime.cuda.context import Tensors
from weft.runtime.cuda.runnable import require_runnable_on_gpus
from weft.runtime.schedule_memory import TORCH_DTYPE, layout_of
from weft.schedule import Compute, Draft, Schedule
from weft.schedule.kernels import TrackedMatmul
from weft.schedule.verify import verify

RUNS = 3
PROBLEMS: dict[str, Problem] = {
    "gathered from 2": AllGatherMatmul(2, (24, 24), (40,), 16, "fp32"),
    "gathered from 3, uneven, two weights": AllGatherMatmul(3, (8, 24, 16), (32, 8), 16, "fp32"),
    "gathered from 4 and wanted": AllGatherMatmul(4, (16,) * 4, (24,), 16, "bf16", True),
    "gathered from 2, one without rows": AllGatherMatmul(2, (0, 24), (32,), 16, "fp32"),
    "gathered from 2 in fp8": AllGatherMatmul(
        2, (32, 32), (32,), 32, "fp8", False, Scaled("row", ("bf16",), (True,), (False,))
    ),
    "gathered from 3, gradients": AllGatherMatmulGradients(3, 24, (16, 8), 12, "fp32"),
    "scattered to 2": MatmulReduceScatter(2, 512, 40, 16, "fp32"),
    "scattered to 4": MatmulReduceScatter(4, 96, 40, 16, "fp32"),
    "scattered to 3 in fp8": ScaledMatmulReduceScatter(3, 96, 32, 32, "bf16", "tensor", True, False),
    "reduced by 2": MatmulAllReduce(2, 300, 40, 16, "fp32", True, True),
    "reduced by 3": MatmulAllReduce(3, 50, 40, 16, "fp32"),
    "reduced by 2 and normed": MatmulAllReduce(2, 300, 40, 16, "fp32", residual=True, eps=1e-6),
    "reduced by 3 and normed": MatmulAllReduce(3, 50, 40, 16, "bf16", eps=0.5),
    "rows of products of 2": MatmulAllGather(2, 300, 40, 16, "fp32"),
    "columns of products of 3": MatmulAllGather(3, 50, 40, 16, "fp32", True),
    "rows of products of 3, gradients": MatmulAllGatherGradients(3, 50, 40, 16, "fp32"),
    "columns of products of 2, gradients": MatmulAllGatherGradients(2, 50, 40, 16, "bf16", True),
}


# `make test` runs similar problems.
LONG = (
    "reduced by 3",
    "reduced by 2 and normed",
    "scattered to 4",
    "gathered from 4 and wanted",
    "columns of products of 2, gradients",
)


def test_every_operator_is_played() -> None:
    ours = {name for name, one in schedule_problem.PROBLEMS.items() if one.__module__.startswith("weft.")}
    played = {p.name for p in (*PROBLEMS.values(), *EXPERTS.values())}
    assert ours - played == {"embedding_all_to_all"}  # their kernels do not follow a list of steps


class Given:
    """For each run, the tensors that every rank passes for the caller's buffers."""

    def __init__(self, schedule: Schedule, runs: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.runs: list[list[Tensors]] = []
        for _ in range(runs):
            ranks = range(schedule.world_size)
            self.runs.append([{} for _ in ranks])
            for rank in ranks:
                for b in schedule.buffers_of_rank(rank):
                    if b.role in ("input", "output"):
                        drawn = torch.randn(int(b.rows), b.cols, generator=g).to(TORCH_DTYPE[b.dtype])
                        if b.name in ("bias", "residual"):  # equal on all ranks
                            drawn = self.runs[-1][0].get(b.name, drawn)
                        self.runs[-1][rank][b.name] = drawn if b.role == "input" else poison(drawn)

    def exact(self, schedule: Schedule) -> list[list[Tensors]]:
        arrays = [[{name: t.double().numpy() for name, t in of_rank.items()} for of_rank in run] for run in self.runs]
        found = interpret(schedule, arrays, 0)
        return [[{name: torch.from_numpy(y) for name, y in of_rank.items()} for of_rank in run] for run in found]


def check(played: Played, exact: list[list[Tensors]]) -> None:
    for run, of_ranks in enumerate(exact, start=1):
        for rank, of_rank in enumerate(of_ranks):
            for name, wanted in of_rank.items():
                y = played.results[rank, run][name]
                allowed = 8 * torch.finfo(y.dtype).eps * float(wanted.abs().max()) if y.numel() else 0.0
                torch.testing.assert_close(
                    y.double(), wanted, rtol=0, atol=allowed, msg=lambda text, at=(run, rank, name): f"{at}: {text}"
                )


def overlapping(p: Problem) -> list[Candidate]:
    """Return the candidates except serial, which runs without an executor."""
    return [candidate for candidate in applicable(p) if candidate.name != "serial"]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *(slow(name, 1) if name in LONG else (name, 1) for name in PROBLEMS),
        *(slow(name, 2) for name in PROBLEMS if name not in LONG),
    ],
)
def test_results_are_right_in_any_order_of_streams(monkeypatch: pytest.MonkeyPatch, name: str, order: int) -> None:
    """Order 1 tries each option of a builder once. Order 2, in `make test-slow`, tries all schedules."""
    model(monkeypatch)
    p = PROBLEMS[name]
    serial = named(p, "serial").build()
    given = Given(serial, RUNS)
    exact, found = given.exact(serial), overlapping(p)
    assert found
    for number, candidate in enumerate(found if order > 1 else each_option(found)):
        schedule = candidate.build()
        for rank in range(schedule.world_size):
            require_runnable_on_gpus(schedule, rank)
        try:
            played = Played(schedule, RUNS, lambda rank, run: given.runs[run - 1][rank])
            played.play(number + order)
            check(played, exact)
        except AssertionError as error:
            raise AssertionError(f"{candidate.name}: {error}") from error


EXPERTS: dict[str, AllToAllMatmul | MatmulAllToAll] = {
    f"{what} {'all that come' if exact else 'at most so many'}": problem(world, experts, rows, 8, 16, "fp32", 40, exact)
    for what, problem, world, experts, rows in (
        ("dispatched by 2,", AllToAllMatmul, 2, 3, (24, 17)),
        ("dispatched by 3, and wanted,", partial(AllToAllMatmul, return_x=True), 3, 2, (13, 0, 29)),
        ("combined by 2,", MatmulAllToAll, 2, 3, (24, 17)),
        ("combined by 3,", MatmulAllToAll, 3, 2, (13, 0, 29)),
        ("combined by 2, one expert each,", MatmulAllToAll, 2, 1, (24, 17)),
    )
    for exact in (True, False)
}  # fmt: skip


# Dispatch and combine, with two and with three ranks, with exact and with bounded sizes.
FEW = (
    "dispatched by 2, all that come",
    "combined by 3, at most so many",
    "combined by 2, one expert each, at most so many",
)


@pytest.mark.parametrize(
    ("name", "order"),
    [*((name, 1) if name in FEW else slow(name, 1) for name in EXPERTS), *(slow(name, 2) for name in FEW)],
)
def test_rows_of_experts_go_where_they_belong(monkeypatch: pytest.MonkeyPatch, name: str, order: int) -> None:
    """Splits differ from run to run, and from the even splits for which the schedule was built."""
    model(monkeypatch)
    p = EXPERTS[name]
    world, ranks = p.world_size, range(p.world_size)
    of_runs = [dispatch.random_splits(world, p.experts, p.rows, run) for run in range(RUNS)]
    of_runs[1] = tuple(
        (count, *[0] * (world * p.experts - 1)) for count in p.rows
    )  # more rows than the first buffers have space for
    back = isinstance(p, MatmulAllToAll)
    if back:
        drawn = [combine.inputs(splits, p.k, p.n, p.dtype, run) for run, splits in enumerate(of_runs)]
    else:
        drawn = [dispatch.inputs(p, run) for run in range(RUNS)]

    def given(rank: int, run: int) -> dict[str, Any]:
        splits, (rows, weights) = of_runs[run - 1], drawn[run - 1]
        w = weights.split(p.experts)[rank].flatten(0, 1)
        mine = torch.tensor(splits[rank])
        if back:
            y = poison(torch.empty(p.rows[rank], p.n))
            received = combine.received_of(rank, splits)
            return {"h": rows[rank], "received": received, "splits": mine.view(world, -1), "w": w, "y": y}

        def room(cols: int) -> Any:
            return (
                (lambda count: poison(torch.empty(count, cols))) if p.exact else poison(torch.empty(sum(p.rows), cols))
            )

        tensors = {"tokens": rows[rank], "splits": mine.view(1, -1), "w": w, "y": room(p.n)}
        tensors["received"] = poison(torch.empty(world, p.experts, dtype=torch.int64))
        return tensors | ({"x": room(p.k)} if p.return_x else {})

    def check(played: Played, what: str) -> None:
        for run, (splits, (rows, weights)) in enumerate(zip(of_runs, drawn, strict=True), start=1):
            for rank in ranks:
                found, at = played.results[rank, run], f"{what}, run {run}"
                if back:
                    combine.assert_rows(found["y"], rank, splits, rows, weights, at)
                    continue
                _, received = dispatch.expected(rank, splits, rows, weights)
                came = int(received.sum())
                dispatch.assert_rows(found["y"][:came], rank, splits, rows, weights, at)
                assert torch.equal(found["received"], received), at
                assert p.exact or found["y"][came:].isnan().all(), at
                if p.return_x:
                    parts = [part.split(list(of_rank)) for part, of_rank in zip(rows, splits, strict=True)]
                    mine = slice(rank * p.experts, (rank + 1) * p.experts)
                    assert torch.equal(found["x"][:came], torch.cat([one for part in parts for one in part[mine]])), at

    found = overlapping(p)
    assert len(found) >= (4 if p.experts > 1 else 3)
    for number, candidate in enumerate(found):
        played = Played(candidate.build(), RUNS, given)
        played.play(number + order)
        check(played, candidate.name)


@pytest.mark.parametrize("exact", [True, False])
def test_rows_of_a_rank_whose_table_differs_are_spoilt(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    """In the second of three runs, rank 1 attributes a row of rank 0 to another expert. All totals stay equal."""
    model(monkeypatch)
    p = MatmulAllToAll(2, 2, (12, 12), 8, 16, "fp32", 40, exact)
    splits = ((3, 3, 3, 3),) * 2
    h, weights = combine.inputs(splits, p.k, p.n, p.dtype, 0)

    def given(rank: int, run: int) -> dict[str, Any]:
        received = combine.received_of(rank, splits)
        if (rank, run) == (1, 2):
            received[0] += torch.tensor([1, -1])
        w = weights.split(p.experts)[rank].flatten(0, 1)
        y, mine = poison(torch.empty(12, p.n)), torch.tensor(splits[rank]).view(2, 2)
        return {"h": h[rank], "received": received, "splits": mine, "w": w, "y": y}

    found = overlapping(p)
    assert len(found) >= 4
    for candidate in found:
        played = Played(candidate.build(), 3, given)
        played.play(0)
        spoilt = {key: result["y"].isnan() for key, result in played.results.items()}
        assert spoilt[0, 2][6:].all(), candidate.name
        assert not spoilt.pop((0, 2))[:6].any(), candidate.name
        assert not any(one.any() for one in spoilt.values()), candidate.name


def test_what_is_copied_as_it_lies_must_lie_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of NCCL read memory as it is stored, so tensors with gaps or stored by columns are refused before anything
    is enqueued.
    """
    model(monkeypatch)
    for what in ("current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, what, lambda *_: contextlib.nullcontext())
    schedule = next(c for c in candidates(AllGatherMatmul.even(64, 32, 32, 2)) if c.builder == "shard").build()
    region = SymmetricMemory(2, layout_of(schedule).buffer_bytes)
    context, items = compiled(schedule, 1, region)
    tensors = {b.name: torch.ones(int(b.rows), b.cols, dtype=TORCH_DTYPE[b.dtype]) for b in context.given}
    by_columns = {name: t.t().contiguous().t() for name, t in tensors.items()}
    items.warm_up(tensors | {"w0": by_columns["w0"]})
    with pytest.raises(
        ValueError, match=r"buffer x_shard is \(32, 32\) with strides \(1, 32\): pass x_shard.contiguous"
    ):
        items.warm_up(tensors | {"x_shard": by_columns["x_shard"]})


def test_tiles_add_to_memory_of_the_schedules_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The addend's address must be known before a run, so a tensor of the caller is refused by name."""
    model(monkeypatch)
    for role in ("scratch", "input"):
        d = Draft("added", 1)
        x, w = d.buffer("x", 16, 16, "fp32", "input"), d.buffer("w", 16, 16, "fp32", "input")
        c, y = d.buffer("c", 16, 16, "fp32", role), d.buffer("y", 16, 16, "fp32", "output")
        lane = d.lane("compute")
        if role == "scratch":
            lane.copy(x.part(), c.part())
        lane.tiles(TrackedMatmul(16, 16), "t", 1, Compute("addmm", y.part(), (x.part(), w.part(), c.part())))
        schedule, region = d.schedule(), SymmetricMemory(1, 64)
        verify(schedule)
        if role == "scratch":
            compiled(schedule, 0, region)
            continue
        with pytest.raises(
            ScheduleError, match="a tracked addmm needs its addend in the schedule's own memory, but c is the caller's"
        ):
            compiled(schedule, 0, region)
