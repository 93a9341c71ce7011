"""Test schedules of collectives on two GPUs that claim to be on different hosts, also to NCCL, which then uses sockets.

Results, gradients, CUDA graphs, the choice of a schedule, and failures. Times mean nothing, except in
`benchmarks/gpu_hosts.py`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gpu_ranks
import pytest
import torch
from support.on_ranks import BF16, told
from support.operators import suite
from support.operators.gemms import Following, Gathered, Gemm
from support.pretended_hosts import on_two_hosts

import weft
from weft import symm
from weft.launch import Pool, RankDiedError, share_gpus
from weft.operator import between_hosts
from weft.runtime.links import measure_links
from weft.schedule import RANK, Draft, Schedule

pytestmark = gpu_ranks.MARKS
CHUNKED = tuple(f"collective[chunks={chunks}]" for chunks in (1, 2, 4))
GATHERS = tuple(f"ficco_1d_collective[start=hetero,gemms=unfused,steps={steps}]" for steps in (1, 2, 4))
NAMES = {"all_gather_matmul": GATHERS, "matmul_reduce_scatter": CHUNKED, "matmul_all_reduce": CHUNKED}
CASES = {
    "all_gather_matmul": [
        Gathered((512, 256), 384, BF16, more=(128,)), Gathered((37, 43), 19), Gathered((4, 64, 128), 96, BF16, dim=1),
    ],
    "matmul_reduce_scatter": [
        Gemm((1024, 256), 384, BF16, op="avg"), Gemm((74, 43), 19), Gemm((4, 64, 128), 96, BF16, dim=1),
    ],
    "matmul_all_reduce": [
        Gemm((1024, 256), 384, BF16, op="avg"), Gemm((75, 43), 19), Gemm((4, 65, 128), 96, BF16),
        Following((600, 256), 384, BF16, bias=True, eps=1e-6), Following((75, 43), 19, bias=True, residual=True),
    ],
}  # fmt: skip


def separate(group):
    share_gpus(group.rank())


@pytest.fixture(scope="module")
def apart() -> Iterator[Pool]:
    """Return two ranks that NCCL connects by sockets."""
    with Pool(2, backend="nccl") as workers:
        workers.run(separate)
        yield workers


@pytest.fixture(scope="module", autouse=True)
def _sockets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_P2P_DISABLE", "1")
        patch.setenv("NCCL_SHM_DISABLE", "1")
        yield


def lanes_of(call: Any, group: Any, schedule: str | None = None) -> list[str]:
    timeline = weft.Timeline()
    call.check(group, call(group, schedule=schedule, timeline=timeline))
    return sorted(timeline.lanes(group.rank()))


def every_schedule(group, operator, case):
    with on_two_hosts(group) as own:
        for name in NAMES[operator]:
            suite.results(own, operator, replace(case, schedule=name), 3)
            assert lanes_of(suite.CALLS[operator](case, own, 9), own, name) == ["compute", "library"]
        comm = symm.communicator(own, gpu_ranks.device())
        return comm.hosts, comm.mapped


@pytest.mark.parametrize(
    ("operator", "number"), [(operator, number) for operator, cases in CASES.items() for number in range(len(cases))]
)
def test_results_of_every_schedule(apart: Pool, operator: str, number: int) -> None:
    found = apart.run(every_schedule, operator, CASES[operator][number], timeout_s=120)
    assert found == [(("alpha", "beta"), (True, False)), (("alpha", "beta"), (False, True))]


@pytest.mark.parametrize("operator", NAMES)
def test_two_ranks_on_each_host(operator: str) -> None:
    with Pool(4, backend="nccl") as four:
        four.run(separate)
        found = four.run(every_schedule, operator, CASES[operator][0], timeout_s=60)
    assert [hosts for hosts, _ in found] == [("alpha", "alpha", "beta", "beta")] * 4


def gradients(group, operator, case, wanted):
    with on_two_hosts(group) as own:
        suite.gradients(own, operator, replace(case, schedule=NAMES[operator][1]), wanted, False, None)


@pytest.mark.parametrize(
    ("operator", "case", "wanted"),
    [
        ("all_gather_matmul", Gathered((50, 12), 6, more=(3,)), (True, True, True)),
        ("matmul_reduce_scatter", Gemm((128, 64), 40), (True, True)),
        ("matmul_all_reduce", Gemm((128, 64), 40), (True, True)),
        ("matmul_all_reduce", Following((128, 64), 40, bias=True, residual=True), (True,) * 4),
    ],
    ids=["gather", "scatter", "reduce", "bias and residual"],
)
def test_gradients(apart: Pool, operator: str, case: Any, wanted: tuple[bool, ...]) -> None:
    apart.run(gradients, operator, case, wanted, timeout_s=60)


def captured(group, operator, case):
    with on_two_hosts(group) as own:
        return suite.captured(own, operator, replace(case, schedule=NAMES[operator][1]), 4)


@pytest.mark.parametrize(
    ("operator", "case"),
    [
        ("all_gather_matmul", Gathered((64, 1024), 512, BF16)),
        ("matmul_reduce_scatter", Gemm((192, 320), 384, BF16)),
        ("matmul_all_reduce", Gemm((192, 320), 384, BF16)),
    ],
    ids=list(NAMES),
)
def test_two_calls_in_a_graph(apart: Pool, operator: str, case: Any) -> None:
    for refusal in apart.run(captured, operator, case, timeout_s=60):
        assert "before capturing it" in refusal


def layouts(group, operator, case):
    with on_two_hosts(group) as own:
        suite.layouts(own, operator, replace(case, schedule=NAMES[operator][1]))
        for rows in (16, 64, 16):
            case = suite.CALLS[operator].sized(case, rows, 2)
            suite.results(own, operator, replace(case, schedule=NAMES[operator][1]), 2)


@pytest.mark.parametrize("operator", NAMES)
def test_layouts_on_one_rank_and_several_sizes(apart: Pool, operator: str) -> None:
    """A rank with another layout loads kernels, which its peer does not. It must not send meanwhile."""
    case = Gathered((64, 128), 96, BF16) if operator == "all_gather_matmul" else Gemm((32, 24), 8)
    apart.run(layouts, operator, case, timeout_s=60)


def chosen(group, operator, case, times):
    native = between_hosts.measure.measured
    asked = []

    def measured(p, schedules, *rest):
        asked.append(list(schedules))
        native(p, schedules, *rest)
        return {name: us for name in schedules for end, us in times.items() if name.endswith(end)}

    between_hosts.measure.measured = measured
    try:
        with on_two_hosts(group) as own:
            call = suite.CALLS[operator](case, own, 3)
            return asked, [lanes_of(call, own) for _ in range(2)]
    finally:
        between_hosts.measure.measured = native


@pytest.mark.parametrize("operator", NAMES)
@pytest.mark.parametrize(("fast_us", "wanted"), [(3000.0, ["compute", "library"]), (4800.0, ["compute"])])
def test_the_clearly_faster_schedule_is_chosen(apart: Pool, operator: str, fast_us: float, wanted: list[str]) -> None:
    """Schedules are run to time them; the times are replaced."""
    times = {"serial": 5000.0, "1]": 4900.0, "2]": fast_us, "4]": 4900.0}
    for asked, lanes in apart.run(chosen, operator, CASES[operator][0], times, timeout_s=60):
        assert asked == [["serial", *NAMES[operator]]]
        assert lanes == [wanted] * 2


def links(group):
    with on_two_hosts(group) as own:
        found = measure_links(symm.communicator(own, gpu_ranks.device()))
        return (
            found.library,
            found.hosts,
            [link.hosts for link in found.links],
            found == found.checked()[0],
            repr(found),
        )


def test_links_are_measured_with_nccl(apart: Pool) -> None:
    first, second = apart.run(links, timeout_s=60)
    assert first == second  # equal numbers on all ranks
    assert first[:4] == ("nccl", ("alpha", "beta"), [("alpha", "beta")], True)


def gathered() -> Schedule:
    d = Draft("gathered", 2)
    x, y = d.buffer("x", 4, 8, "fp32", "input"), d.buffer("y", 8, 8, "fp32", "output")
    d.lane("compute").all_gather(x.part(), y.part())
    return d.schedule()


def copied() -> Schedule:
    """Return a schedule that copies x to the other rank, whose memory is not mapped."""
    d, peer = Draft("copied", 2), (RANK + 1) % 2
    x, y = d.buffer("x", 4, 8, "fp32", "input"), d.buffer("y", 4, 8, "fp32", "output")
    box, free, there = d.buffer("box", 4, 8, "fp32", "symmetric"), d.signals("free", 1), d.signals("there", 1)
    d.lane("out", "copy").wait(free, previous=True).copy(x.part(), box.part(at=peer)).set(there, at=peer)
    d.lane("compute").wait(there).copy(box.part(), y.part()).set(free, at=peer)
    return d.schedule()


def own_schedules(group):
    given = {"x": torch.full((4, 8), float(group.rank()), device="cuda"), "y": torch.empty(8, 8, device="cuda")}
    with on_two_hosts(group) as own:
        refused = told(lambda: weft.run_schedule(copied(), {"x": given["x"], "y": torch.empty_like(given["x"])}, own))
        for _ in range(2):
            given["y"].fill_(torch.nan)
            weft.run_schedule(gathered(), given, own)
        return given["y"][:, 0].tolist(), refused


def test_schedules_of_a_users_own(apart: Pool) -> None:
    for y, refused in apart.run(own_schedules, timeout_s=60):
        assert y == [0.0] * 4 + [1.0] * 4
        assert refused.startswith("ScheduleError: schedule copied, lane out: ")
        assert refused.endswith(" is not mapped on rank 0: use collective steps")


# -- failures


def fails(group, how):
    """Let rank 1 make one call less, or die. Return the errors of rank 0's next two calls, and the time until its GPU was
    free.
    """
    x, w = torch.ones(64, 32, device="cuda"), torch.ones(32, 16, device="cuda")
    with on_two_hosts(group) as own:

        def call(deadline_s: float) -> None:
            weft.matmul_reduce_scatter(x, w, "sum", 0, own, schedule=CHUNKED[1], deadline_s=deadline_s)
            torch.cuda.synchronize()

        for _ in range(3):
            call(30.0)
        if group.rank() and how == "killed":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        if group.rank():
            time.sleep(4.0)
            return told(lambda: call(30.0)), "", 0.0
        lost = told(lambda: call(1.0 if how == "absent" else 25.0))  # the peer may be lost before the call ends
        took_s = time.monotonic() - begin
        errors = [one for one in (lost, *(told(lambda: call(1.0)) for _ in range(2))) if one != "nothing"]
        return errors[0], errors[1], took_s


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [("absent", "DeadlineError", "for collectives of schedule"), ("killed", "PeerLostError", "died")],
)
def test_collectives_that_wait_for_a_lost_rank_are_aborted(how: str, kind: str, said: str) -> None:
    with Pool(2, backend="nccl") as mortals:
        mortals.run(separate)
        answers = mortals.run(fails, how, return_exceptions=True, timeout_s=40)
    assert not isinstance(answers[0], BaseException), answers[0]
    first, again, took_s = answers[0]
    assert first.startswith(kind)
    assert said in first
    assert again.startswith("PoisonedGroupError")
    assert took_s < 20
    if how == "absent":
        assert answers[1][0].startswith("PoisonedGroupError")
    else:
        assert isinstance(answers[1], RankDiedError)
