"""From arms to numbers, the same for every operator: first calls, checks on poisoned memory, graphs, timings.

An arm is one way to compute the output of a workload. Nothing is timed that was not compared with the float64 reference;
a captured call is compared as well.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from weft.bench.harness import Call, Mode, Ranks, Timing, time_arms

Step = Callable[[str, float], None]  # what is going on, and the share of it that has been done
Arms = Mapping[str, Callable[[int], torch.Tensor]]
STEPS = 1  # of progress, beside one for each mode

_BLOCK_BYTES = 128 << 20  # of float64 while an output is compared


class Workload(ABC):
    """One configuration's data on one rank: `input_sets` inputs, and what must come out."""

    name: str
    ranks: Ranks
    input_sets: int
    dtype: torch.dtype

    @abstractmethod
    def reference(self, which: int) -> torch.Tensor:
        """float64, two-dimensional: this rank's output for that input set. Collective."""

    @abstractmethod
    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """What arm `name` may err, given everybody's errors."""

    def error(self, output: torch.Tensor, reference: torch.Tensor) -> float:
        """The largest error of any element on any rank, relative to the largest element; infinite where an element is
        not finite, or the shape or the dtype is wrong. Collective."""
        largest = self.ranks.most(_largest(reference))
        if output.shape != reference.shape or output.dtype != self.dtype:
            return self.ranks.most(float("inf"))
        return self.ranks.most(_largest(reference, output)) / max(largest, 1e-30)


def _largest(reference: torch.Tensor, output: torch.Tensor | None = None) -> float:
    """The largest magnitude in `reference`, or of `output - reference`, taken in blocks of rows to save memory."""
    worst = 0.0
    rows = max(1, _BLOCK_BYTES // (8 * max(1, reference.shape[1])))
    for start in range(0, reference.shape[0], rows):
        block = reference[start : start + rows]
        if output is not None:
            block = output[start : start + rows].double() - block
        found = float(block.abs().max()) if block.numel() else 0.0
        worst = max(worst, float("inf") if found != found else found)
    return worst


@dataclass(frozen=True)
class Results:
    """What was found, by arm or by (mode, arm); the same on every rank."""

    errors: dict[str, float]
    first_call_ms: dict[str, float]
    timings: dict[tuple[Mode, str], Timing]
    left_out: dict[tuple[Mode | None, str], str]  # why an arm was not timed, or not in this mode

    def speedup(self, mode: Mode, name: str, over: str) -> float:
        return self.timings[mode, over].p50_ms / self.timings[mode, name].p50_ms

    def timed(self, mode: Mode, name: str) -> bool:
        return (mode, name) in self.timings


@dataclass
class Checked:
    """What `check` found: errors of all arms, what is wrong, and the graphs, one for each input set, that stay valid."""

    errors: dict[str, float]
    wrong: dict[str, str] = field(default_factory=dict)
    graphs: dict[str, list[torch.cuda.CUDAGraph]] = field(default_factory=dict)
    not_captured: dict[str, str] = field(default_factory=dict)


class Recorder:
    """Captures calls in CUDA graphs. They are replayed one after the other, so all share one pool of memory."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._renew()

    def _renew(self) -> None:
        self.stream = torch.cuda.Stream(self.ranks.device)
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Call, which: int) -> tuple[torch.cuda.CUDAGraph, object] | str:
        """(graph, what the call returned), or why that cannot be; the same decision on every rank. Collective."""
        here = torch.cuda.current_stream()
        graph, output, reason = torch.cuda.CUDAGraph(), None, ""
        try:
            self.stream.wait_stream(here)
            with torch.cuda.stream(self.stream):
                call(which)
            torch.cuda.synchronize(self.ranks.device)
            # thread_local: the threads that watch over a group may look at their own streams meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                output = call(which)
        except Exception as error:
            cause = error.__context__ or error  # ending a capture that has failed fails again
            reason = f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"
            torch.cuda.set_stream(here)
            self._renew()
        failed = self.ranks.most(float(bool(reason)))
        return (reason or "another rank could not") if failed else (graph, output)


def measure_arms(
    work: Workload,
    arms: Arms,
    beside: Mapping[str, Call],
    *,
    modes: tuple[Mode, ...],
    seconds: float,
    repetitions: tuple[int, int],
    step: Step,
) -> Results:
    """Check `arms`, then time them and the calls `beside` them, whose results nobody looks at. Collective."""
    step(f"{work.name}: checking every variant against float64", 0)
    first_ms = first_calls(arms, work.ranks)
    recorder = Recorder(work.ranks) if "graph" in modes else None
    checked = check(arms, work, recorder)
    left_out: dict[tuple[Mode | None, str], str] = {(None, name): why for name, why in checked.wrong.items()}
    left_out |= {("graph", name): why for name, why in checked.not_captured.items()}
    calls: dict[str, Call] = {name: arm for name, arm in arms.items() if name not in checked.wrong} | dict(beside)
    graphs = dict(checked.graphs)
    if recorder is not None:
        for name, call in beside.items():
            captured = recorder.capture(call, 0)
            if isinstance(captured, str):
                left_out["graph", name] = captured
            else:
                graphs[name] = [captured[0]] * work.input_sets
    step(f"{work.name}: checking every variant against float64", 1)
    timings: dict[tuple[Mode, str], Timing] = {}
    for mode in modes:
        if mode == "graph":
            calls = {name: partial(_replay, graphs[name]) for name in calls if name in graphs}
        timed = time_arms(
            calls,
            work.ranks,
            mode,
            input_sets=work.input_sets,
            seconds=seconds,
            repetitions=repetitions,
            advance=partial(step, f"{work.name}: timing, {mode}"),
        )
        timings |= {(mode, name): timing for name, timing in timed.items()}
    return Results(checked.errors, first_ms, timings, left_out)


def first_calls(arms: Arms, ranks: Ranks) -> dict[str, float]:
    """Milliseconds of each arm's first call with a synchronisation, the slowest rank's. Collective."""
    found = {}
    for name, arm in arms.items():
        ranks.start_together()
        start = time.perf_counter()
        arm(0)
        ranks.synchronize()
        found[name] = 1e3 * ranks.most(time.perf_counter() - start)
    return found


def check(arms: Arms, work: Workload, recorder: Recorder | None = None) -> Checked:
    """The error of each arm, relative to the largest element, over all input sets. Collective.

    Before each checked call the arm computes another input set and its result is filled with NaN and dropped, so that
    memory which is not written anew shows. With a recorder each call is also captured, its output filled with NaN, and
    what a replay then leaves there is checked. The first arm is the baseline; if that is wrong, a RuntimeError.
    """
    found = Checked(dict.fromkeys(arms, 0.0))
    for which in range(work.input_sets):
        reference = work.reference(which)
        for name, arm in arms.items():
            stale = arm((which + 1) % work.input_sets)
            stale.fill_(math.nan)
            del stale
            output = arm(which)
            work.ranks.synchronize()
            found.errors[name] = max(found.errors[name], work.error(output, reference))
            del output
            if recorder is not None and name not in found.not_captured:
                _check_captured(name, arm, which, work, reference, recorder, found)
    for number, (name, error) in enumerate(found.errors.items()):
        limit = work.limit(name, found.errors)
        if not error <= limit:
            found.wrong[name] = (
                f"{work.name}: {name} differs from the float64 reference by {error:.3g} of the largest element; "
                f"at most {limit:.3g} is allowed: it was not timed"
            )
            if number == 0:
                raise RuntimeError(found.wrong[name])
    return found


def _check_captured(
    name: str,
    arm: Callable[[int], torch.Tensor],
    which: int,
    work: Workload,
    reference: torch.Tensor,
    recorder: Recorder,
    found: Checked,
) -> None:
    captured = recorder.capture(arm, which)
    if isinstance(captured, str):
        found.not_captured[name] = captured
        found.graphs.pop(name, None)
        return
    graph, output = captured
    assert isinstance(output, torch.Tensor)
    output.fill_(math.nan)
    arm((which + 1) % work.input_sets)  # what peers receive into holds other data again
    work.ranks.synchronize()
    graph.replay()
    work.ranks.synchronize()
    found.errors[name] = max(found.errors[name], work.error(output, reference))
    found.graphs.setdefault(name, []).append(graph)


def _replay(graphs: list[torch.cuda.CUDAGraph], which: int) -> None:
    graphs[which].replay()
