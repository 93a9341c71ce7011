"""Schedules that are selected by measurement, on CPU processes and on GPUs. These functions run on the ranks.

Measured times are cached, so no other test uses these shapes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support import made_up
from support.on_ranks import BF16, device, told
from support.operators import suite
from support.operators.experts import Experts
from support.operators.gemms import AllGatherMatmulCall, Gathered
from support.operators.scaled import ScaledGathered

import weft
from weft import env, plan, symm
from weft.builders import AllGatherMatmul
from weft.hw import load_machine
from weft.operator import measure, select, this_machine
from weft.operator.calls import prepared_calls
from weft.ops.all_gather_matmul import OPERATOR
from weft.plan import store
from weft.plan.machine import versions
from weft.schedule import Schedule
from weft.sim import model_of

K, N = 24, 20


@contextmanager
def instead(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of a module while the context is open."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def on_h200s(world: int) -> Iterator[None]:
    """Let the planner treat CPU processes as H200s."""
    if device().type == "cuda":
        yield
        return
    model = model_of(load_machine("h200"), world)
    with instead(this_machine, calibrated_model=lambda device, size: model, device_name=lambda device: "NVIDIA H200"):
        yield


def this_file() -> str | None:
    """Return the machine file by which the cache identifies this machine: "h200" on CPU (see `on_h200s`), None on GPUs."""
    return "h200" if device().type == "cpu" else None


def multiply(group: dist.ProcessGroup, m: int, **options: Any) -> str:
    """Call all_gather_matmul with x [m, K] on each rank and w [K, N], and check the result. Return the schedule."""
    call = AllGatherMatmulCall(Gathered((m, K), N), group, 1)
    call.check(group, call(group, **options))
    p, pinned = described(group, m), options.get("schedule", weft.plan.pinned())
    (prepared,) = [one for one in prepared_calls(OPERATOR, group) if one.p == p and one.pinned == pinned]
    return prepared.taken[0]


def again(group: dist.ProcessGroup) -> None:
    """Drop the compiled operators, so that the next call selects a schedule anew."""
    symm.communicator(group, device()).close()


def described(group: dist.ProcessGroup, m: int) -> AllGatherMatmul:
    return AllGatherMatmul.even(m * group.size(), N, K, group.size(), "fp32")


def kept(p: AllGatherMatmul, mode: str) -> list[str]:
    """Return the names of the candidates whose times are cached on disk."""
    found = [store.read(path) or {} for path in env.cache_dir().glob("autotune-*.json")]
    (times,) = [one["times_us"] for one in found if str(p.rows) in one["key"]["problem"] and one["key"]["mode"] == mode]
    return sorted(times)


BREAKS: dict[str, Callable[[Path], object]] = {
    "deep": lambda path: path.write_text("[" * 100_000),
    "huge number": lambda path: path.write_text(re.sub(r"\d+\.\d+", "9" * 400, path.read_text())),
    "negative times": lambda path: path.write_text(re.sub(r"(\d+\.\d+)", r"-\1", path.read_text())),
    "another's": lambda path: path.write_text(json.dumps({"key": None, "times_us": {"serial": 1.0}, "machine": []})),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "nobody": lambda path: os.environ.update(WEFT_CACHE_DIR="~nosuchuser/x"),
}


def broken_caches(
    group: dist.ProcessGroup, directory: str, breaks: list[str]
) -> dict[str, tuple[list[str], list[str], str]]:
    """Give each rank its own cache, with a calibration and measured times, and break rank 1's cache in several ways.

    Return for each way: the schedules of a call with "autotune" and of a call without, the warnings about the cache,
    and the source of the rank's model.
    """
    kept_dir, tempfile.tempdir, found = os.environ["WEFT_CACHE_DIR"], directory, {}
    h200, world, in_memory = load_machine("h200"), group.size(), plan.autotune.__globals__["_known"]
    m = 11
    again(group)
    in_memory.clear()  # other tests' times of this shape on an H200 would not be measured again, nor saved
    model = lambda device, size: plan.calibrated(h200, size).model  # noqa: E731
    gemms = ((1024, 1024, 1024, "fp32", 90.5),)
    with instead(this_machine, calibrated_model=model, device_name=lambda device: "NVIDIA H200"):
        whole = os.environ["WEFT_CACHE_DIR"] = f"{directory}/{group.rank()}"
        plan.Calibration("NVIDIA H200", world, "today", versions(), gemms, 3.5, 1.5).save()
        multiply(group, m, schedule="autotune")
        for what in breaks:
            again(group)
            in_memory.clear()
            os.environ["WEFT_CACHE_DIR"] = shutil.copytree(whole, f"{directory}/{what}-{group.rank()}")
            for path in list(env.cache_dir().iterdir()) if group.rank() == 1 else []:
                BREAKS[what](path)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                taken = [multiply(group, m, schedule="autotune"), multiply(group, m)]
            said = [str(one.message) for one in warned if one.category is UserWarning]
            found[what] = taken, said, plan.calibrated(h200, world).note
    again(group)
    os.environ["WEFT_CACHE_DIR"], tempfile.tempdir = kept_dir, None
    in_memory.clear()
    return found


def warnings_of(group: dist.ProcessGroup) -> list[str]:
    """Return the warnings of two shapes for which schedules are measured, and no schedule is clearly faster than
    serial.
    """
    with _warnings(group) as texts, instead(select, _CLEARLY_US={"cpu": 1e9}):
        assert multiply(group, 13) == multiply(group, 14) == "serial"
    return texts


def warnings_after_a_slow_moment(group: dist.ProcessGroup) -> list[str]:
    """Return the warnings if all schedules seem fast in the first measurement, and not in the second."""

    def measured(p: object, schedules: dict[str, object], *rest: object, anew: bool = False) -> dict[str, float]:
        return {name: 1e4 if anew else 1e6 if name == "serial" else 5e3 for name in schedules}

    with _warnings(group) as texts, instead(measure, measured=measured):
        assert multiply(group, 13) == "serial"
    return texts


@contextmanager
def _warnings(group: dist.ProcessGroup) -> Iterator[list[str]]:
    """Context manager: append the texts of all `NoOverlapWarning`s to the list that it returns."""
    module = select.warn_once.__globals__
    before, module["_warned"] = module["_warned"], False
    quiet, os.environ["WEFT_QUIET"] = os.environ["WEFT_QUIET"], "0"
    again(group)
    texts: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield texts
        texts += [str(one.message) for one in found if one.category is weft.plan.NoOverlapWarning]
    finally:
        module["_warned"], os.environ["WEFT_QUIET"] = before, quiet
        again(group)


def on_demand_everywhere(group: dist.ProcessGroup) -> list[str]:
    """Select "autotune" for several operators, by argument and by `use`. Return the timed candidates of
    all_gather_matmul.
    """
    others = {
        "all_to_all_matmul": Experts(traffic="two each", k=48, n=3, schedule="autotune"),
        "all_gather_scaled_matmul": ScaledGathered((7, 48), schedule="autotune"),
    }
    multiply(group, 15, schedule="autotune")
    for operator, case in others.items():
        suite.results(group, operator, case, 1)
    with weft.plan.use("autotune"):
        multiply(group, 15)
        for operator, case in others.items():
            suite.results(group, operator, replace(case, schedule=None), 1)
    return kept(described(group, 15), "single" if device().type == "cpu" else "queued")


def on_demand_with_a_model(group: dist.ProcessGroup, use: bool) -> dict[str, Any]:
    """Autotune on a machine with a model.

    Return the timed candidates, the number of timings in the first call and in two later calls, the schedules of the
    later calls, and the choice that `plan.explanation` shows.
    """
    m, timed = 16 + use, []
    original = measure._queued_us

    def counting(call: Callable[[], object], *arguments: Any) -> float:
        timed.append(call)
        return original(call, *arguments)

    with on_h200s(group.size()), instead(measure, _queued_us=counting):
        if use:
            with weft.plan.use("autotune"):
                multiply(group, m)
        else:
            multiply(group, m, schedule="autotune")
        first = len(timed)
        again(group)
        taken = [
            multiply(group, m, schedule="autotune"),
            multiply(group, m),
        ]  # the first call asks for autotuning, the second does not
        p = described(group, m)
        found = plan.explanation(
            p.name, M=p.m, N=N, K=K, ranks=group.size(), hw=this_file(), dtype="fp32", mode="queued"
        ).choice
        model = this_machine.machine_model(device(), group.size())
        assert model is not None
        choices = [plan.choose(p, model, mode=mode) for mode in ("queued", "graph")]  # type: ignore[arg-type]
        promising = {one.name for choice in choices for one in plan.promising(choice)}
    again(group)
    return {
        "timed": kept(p, "queued"), "promising": sorted(promising), "first": first, "later": len(timed) - first,
        "taken": taken, "explained": found.candidate.name, "measured": found.measured_us is not None,
    }  # fmt: skip


def remembered_times_decide(group: dist.ProcessGroup) -> tuple[str, str, str]:
    """Return the schedules of a call before and after another candidate is recorded as faster, and the schedule that
    `plan.explanation` shows afterwards.
    """
    m = 18
    p = described(group, m)
    with on_h200s(group.size()):
        before = multiply(group, m)
        again(group)
        other = next(
            c for c in plan.promising(plan.choose(p, model_of(load_machine("h200"), group.size()))) if c.name != before
        )
        times = {"serial": 900.0, before: 900.0, other.name: 500.0}
        of = {c.name: c for c in select.candidates(p)}
        plan.autotune(
            p, [of[name] for name in times], lambda c: times[c.name], lambda mine: mine, machine="NVIDIA H200"
        )
        after = multiply(group, m)
    again(group)
    said = plan.explanation(p.name, M=p.m, N=N, K=K, ranks=group.size(), hw=this_file(), dtype="fp32", mode="queued")
    assert after == other.name
    return before, after, said.choice.candidate.name


def on_demand_and_captured(group: dist.ProcessGroup) -> str:
    with weft.plan.use("autotune"):
        return suite.captured(group, "all_gather_matmul", Gathered((640, 1024), 512, BF16), 10)


def made_up_is_measured(group: dist.ProcessGroup) -> tuple[list[str], int]:
    """Return the timed candidates, and the number of schedules that were verified in three calls."""
    verified: list[Schedule] = []
    select.verify_once.cache_clear()
    with made_up.registered(), instead(select, verify=verified.append):
        for schedule in (None, None, "ring[by=dma]"):
            multiply(group, 19, schedule=schedule)
            again(group)
        names = kept(described(group, 19), "single")
    return names, len(verified)


def hasty_is_refused(group: dist.ProcessGroup) -> dict[str, str]:
    """Pin a builder with a race, and autotune it among others. Return the errors. The group must stay usable."""
    with made_up.registered(made_up.hasty):
        found = {
            "pinned": told(lambda: multiply(group, 21, schedule="hasty")),
            "measured": told(lambda: multiply(group, 21)),
            "on demand": told(lambda: multiply(group, 21, schedule="autotune")),
        }
    multiply(group, 21)
    return found


def slow_moment(group: dist.ProcessGroup, lasts: bool) -> str:
    """Let serial appear slow in the first measurement, or in all if it `lasts`. Return the chosen schedule."""
    native, of_serial = measure.time_us, []
    again(group)

    def time_us(call: Callable[[], object], *rest: Any) -> float:
        native(call, *rest)
        if call.__qualname__.startswith("measured."):  # the run of an executor
            return 1e4
        of_serial.append(call)
        return 1e6 if lasts or len(of_serial) <= 2 else 1e4

    with instead(measure, time_us=time_us):
        return multiply(group, 13 + lasts)
