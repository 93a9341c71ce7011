"""Groups whose ranks have different GPUs, pretended on CPU processes by two machine files: the slower GPU's plan is used.

1. all_gather_matmul, with and without measurements. 2. Embeddings. 3. CPU ranks, one of which is slow: the slowest rank's times
decide. Functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.measuring_ranks import again, instead, multiply
from support.pretended_hosts import on_two_hosts
from support.reference import tables_of
from test_embedding_auto import Problem, taken

import weft
from weft.builders import AllGatherMatmul, named
from weft.hw import load_machine
from weft.launch import Pool
from weft.operator import measure, self_calibrate, this_machine
from weft.plan.predict import predict
from weft.sim import model_of

NUMBERS = {
    "compute.multiprocessors": (132, "1"), "compute.bf16_dense": (989, "TFLOP/s"), "memory.bandwidth": (4.8, "TB/s"),
    "link.bandwidth": (450, "GB/s"),
}  # fmt: skip
SLOW = {"collective.all_gather_latency": (400, "us")}
"""On the slow GPU, small collectives take long, so a schedule without collectives is faster than serial."""
SLOW_SIGNALS = {"collective.all_gather_latency": (40, "us"), "signal.kernel": (1000, "us")}
"""On this slow GPU, kernels that signal take even longer, so serial is the fastest for embeddings."""


def written(folder: Path, name: str, **more: tuple[float, str]) -> str:
    """Write a machine file, whose other numbers are derived from the H200's. Return its path."""
    lines = [f'name = "{name}"', 'topology = "switch"', 'derived_from = "h200"']
    for key, (value, unit) in {**NUMBERS, **more}.items():
        lines += [f"[{key}]", f"value = {value}", f'unit = "{unit}"', 'source = "assumed"', 'note = "made up"']
    path = folder / f"{name}.toml"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {
        "fast": written(tmp_path, "fast"), "slow": written(tmp_path, "slow", **SLOW),
        "slow signals": written(tmp_path, "slow signals", **SLOW_SIGNALS),
    }  # fmt: skip


@contextmanager
def pretended(group: dist.ProcessGroup, files: dict[str, str], gpus: list[str]) -> Iterator[None]:
    """Let rank r have the GPU `gpus[r]`, whose machine file is `files[gpus[r]]`. "" is a GPU without a machine file."""
    name, world = gpus[group.rank()], group.size()
    model = model_of(load_machine(files[name]), world) if name else None
    self_calibrate.MEASURES["cpu"] = None  # type: ignore[assignment]  # GPUs that differ measure nothing
    try:
        with instead(this_machine, calibrated_model=lambda device, size: model, device_name=lambda device: name):
            yield
    finally:
        del self_calibrate.MEASURES["cpu"]


def gathered(group: dist.ProcessGroup, files: dict[str, str], gpus: list[str]) -> list[str]:
    """Return the schedules of three calls: two that are planned, and one whose candidates are measured."""
    again(group)
    with pretended(group, files, gpus):
        return [multiply(group, 22), multiply(group, 80), multiply(group, 21, schedule="autotune")]


@pytest.mark.parametrize("gpus", [["fast", "slow"], ["slow", "fast"], ["fast", "fast", "slow"], ["fast", "fast"]])
def test_the_slowest_gpus_plan_is_used(pool: Pool, files: dict[str, str], gpus: list[str]) -> None:
    found = pool.run(gathered, files, gpus, ranks=len(gpus), timeout_s=60)
    world = len(gpus)
    assert len(set(map(tuple, found))) == 1
    assert found[0][:2] == ["gather[by=kernel]" if "slow" in gpus else "serial"] * 2
    p = AllGatherMatmul.even(22 * world, 20, 24, world, "fp32")
    fast, slow = (
        predict(named(p, "serial").build(), model_of(load_machine(files[name]), world), "queued")
        for name in ("fast", "slow")
    )
    assert slow > 10 * fast


def test_if_a_rank_has_no_model_schedules_are_measured(pool: Pool, files: dict[str, str]) -> None:
    """Without a measurement, both ranks would take the schedule that the known GPU's plan has."""
    found = pool.run(measured, files, ["slow", ""], ranks=2, timeout_s=60)
    assert found == [("serial", True)] * 2


def measured(group: dist.ProcessGroup, files: dict[str, str], gpus: list[str]) -> tuple[str, bool]:
    asked: list[str] = []

    def made_up(p, schedules, *rest):
        asked.extend(schedules)
        return {name: 1.0 if name == "serial" else 1000.0 for name in schedules}

    again(group)
    with pretended(group, files, gpus), instead(measure, measured=made_up):
        return multiply(group, 23), len(asked) > 1


def embedded(group: dist.ProcessGroup, files: dict[str, str], gpus: list[str], p: Problem) -> str:
    with pretended(group, files, gpus):
        return taken(dist.new_group(list(range(group.size()))), p)[0]


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [(["fast", "slow signals"], "serial"), (["slow signals", "fast"], "serial"), (["fast", "fast"], "direct")],
)
def test_the_slowest_gpus_transport_is_used(pool: Pool, files: dict[str, str], gpus: list[str], wanted: str) -> None:
    p = Problem(tables_of((8, 5, 17)), (0, 1, 0), (40, 9), seed=4, weighted=True)
    assert pool.run(embedded, files, gpus, p, ranks=2, timeout_s=60) == [wanted] * 2


def on_cpus(group: dist.ProcessGroup, slow_rank: int) -> str:
    """Return the schedule that CPU ranks on two hosts choose. For all ranks but one, the schedule in two levels is fast."""
    rank, world = group.rank(), group.size()
    calls = [0]

    def made_up(call, *_):
        call()
        calls[0] += 1
        fast_us, slow_us = (5000.0, 5000.0) if calls[0] % 4 == 1 else (1000.0, 4900.0)  # serial is timed first
        return slow_us if rank == slow_rank else fast_us

    timeline = weft.Timeline()
    with instead(measure, time_us=made_up), on_two_hosts(group) as own:
        x, w = torch.ones(3 * world, 26), torch.ones(26, 14 + slow_rank)  # times are cached, so sizes differ
        for _ in range(2):
            weft.matmul_all_reduce(x, w, own, timeline=timeline)
    return "two levels" if "rail" in timeline.lanes(rank) else "serial"


@pytest.mark.parametrize(("slow_rank", "wanted"), [(0, "serial"), (3, "serial"), (-1, "two levels")])
def test_the_times_of_the_slowest_cpu_decide(pool: Pool, slow_rank: int, wanted: str) -> None:
    assert pool.run(on_cpus, slow_rank, ranks=4, timeout_s=60) == [wanted] * 4
