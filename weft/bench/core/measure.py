"""Check and time the variants of a benchmark. A variant is one implementation of the operator.

A variant is timed only if its outputs agree with a float64 reference, in memory that was filled with NaN before the
call. After the timing, the output of the last timed call or graph replay is compared too. If this output is wrong, the
time is discarded.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from weft.bench.core.harness import Call, Mode, Ranks, Timing, time_variants

Step = Callable[[str, float], None]  # (name of the current part of the work, progress since the last call)
VariantCalls = Mapping[str, Callable[[int], torch.Tensor]]
STEPS = 1  # the number of progress steps in addition to one for each mode
_BLOCK_BYTES = 128 << 20  # outputs are compared in blocks of this many bytes in float64


class Workload(ABC):
    """The data of one configuration of a benchmark on one rank: `input_sets` sets of inputs, and the expected output for each."""

    name: str
    ranks: Ranks
    input_sets: int
    dtype: torch.dtype
    waiting: Collection[str] = ()
    """Variants that synchronise with the device in each call. They are neither enqueued ahead nor captured."""
    claims: Collection[tuple[str, str]] = ()
    """(variant, baseline) pairs whose difference is published. Both variants of a pair are timed again, up to a limit,
    until the difference is clearly above its noise.
    """

    @abstractmethod
    def reference(self, which: int) -> Any:
        """Return this rank's expected output for input set `which`, as a float64 matrix. All ranks must make this call."""

    def twins(self, mode: Mode) -> Mapping[str, str]:
        """Return {variant: another variant that runs the same schedule in this mode}. So the difference between the times of
        such a pair is noise.
        """
        return {}

    def called(self, name: str) -> None:  # noqa: B027  # most subclasses do nothing
        """Do nothing. Subclasses override this hook, which is called after the first call of variant `name`."""

    @abstractmethod
    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """Return the largest error that variant `name` may have. errors: the measured errors of all variants."""

    def differs(self, name: str, how: str) -> str:
        """Return the beginning of the error text for a wrong result of variant `name`. how: text after the name, such as " as a
        graph".
        """
        return f"{name}{how} differs from the float64 reference"

    def poison(self, name: str, output: torch.Tensor) -> None:
        """Fill `output`, an output of variant `name` that is no longer needed, with NaN."""
        output.fill_(math.nan)

    def rows_of(self, name: str, output: torch.Tensor, which: int) -> torch.Tensor:
        """Return the rows of `output` to compare with the reference. Override this method if other rows, such as
        padding, are undefined.
        """
        return output

    def error(self, name: str, output: torch.Tensor, which: int, reference: Any) -> float:
        """Return the largest error of `output` on any rank, divided by the reference's largest element. All ranks must
        make this call.

        Return infinity if an element is not finite, or if the shape or dtype is wrong.
        """
        output = self.rows_of(name, output, which)
        largest = self.ranks.most(_largest(reference))
        if output.shape != reference.shape or output.dtype != self.dtype:
            return self.ranks.most(float("inf"))
        return self.ranks.most(_largest(reference, output)) / max(largest, 1e-30)


def _largest(reference: torch.Tensor, output: torch.Tensor | None = None) -> float:
    """Return max(abs(reference)) or, if `output` is given, max(abs(output - reference)). Compute in blocks to save memory."""
    worst = 0.0
    rows = max(1, _BLOCK_BYTES // (8 * max(1, reference.shape[1])))
    for start in range(0, reference.shape[0], rows):
        block = reference[start : start + rows]
        if output is not None:
            block = output[start : start + rows].double() - block
        found = float(block.abs().max()) if block.numel() else 0.0
        worst = max(worst, float("inf") if found != found else found)
    return worst


Captured: TypeAlias = tuple[torch.cuda.CUDAGraph, Any]
"""A CUDA graph of a call, and the call's output. Keep the output until it is checked: graphs share a memory pool, so
another graph would reuse the memory of a freed output.
"""


@dataclass
class Results:
    """The results of a benchmark on one configuration, by variant or by (mode, variant). They are equal on all ranks.

    wrong: the error texts, by variant, of variants with a wrong result. Such a variant lacks times in some or all modes.
    not_captured: the reasons, by variant, why variants cannot be captured as graphs.
    graphs: the captured graphs, by variant: one for each input set.
    """

    errors: dict[str, float]
    first_call_ms: dict[str, float] = field(default_factory=dict)
    timings: dict[tuple[Mode, str], Timing] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    not_captured: dict[str, str] = field(default_factory=dict)
    graphs: dict[str, list[Captured]] = field(default_factory=dict)

    def ms(self, mode: Mode, name: str) -> float | None:
        """Return the variant's median time in ms; None if it was not timed."""
        timing = self.timings.get((mode, name))
        return None if timing is None else timing.p50_ms


class Recorder:
    """A recorder of calls as CUDA graphs. All its graphs share one memory pool, so replay only one graph at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._renew()

    def _renew(self) -> None:
        self.stream = torch.cuda.Stream(self.ranks.device)
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Call, which: int) -> Captured | str:
        """Capture `call` on input set `which`. Return (graph, output of the call), or the reason why it cannot be
        captured.

        If the capture fails on one rank, no rank returns a graph. All ranks must make this call.
        """
        here = torch.cuda.current_stream()
        graph, output, reason = torch.cuda.CUDAGraph(), None, ""
        try:
            self.stream.wait_stream(here)
            with torch.cuda.stream(self.stream):
                call(which)
            torch.cuda.synchronize(self.ranks.device)
            # thread_local, because a group's watchdog threads may query their own streams during the capture
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                output = call(which)
        except Exception as error:
            cause = error.__context__ or error  # the end of a failed capture raises a second error
            reason = f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"
            torch.cuda.set_stream(here)
            self._renew()
        failed = self.ranks.most(float(bool(reason)))
        return (reason or "capture failed on another rank") if failed else (graph, output)


def measure_variants(
    work: Workload, variants: VariantCalls, beside: Mapping[str, Call], *, modes: tuple[Mode, ...], seconds: float,
    repetitions: tuple[int, int], step: Step,
) -> Results:  # fmt: skip
    """Check and time `variants`, and return the results. All ranks must make this call.

    beside: calls that are timed, but not checked, by name.
    step: a function that shows progress, from `weft.bench.core.console.progress`.

    Variants that synchronise with the device are left out of mode "graph".
    """
    step(f"{work.name}: checking every variant", 0)
    first_call_ms = first_calls(variants, work.ranks, work.called)
    found = check(variants, work)
    found.first_call_ms = first_call_ms
    baseline = next(iter(variants))
    variants = {name: variant for name, variant in variants.items() if name not in found.wrong}
    step(f"{work.name}: checking every variant", STEPS)

    def time_all(mode: Mode, calls: Mapping[str, Call]) -> tuple[dict[str, Timing], dict[str, float]]:
        """Return ({name: timing}, {variant: error of its last output})."""
        seen: dict[str, float] = {}
        references: dict[int, Any] = {}  # cached, because the last calls of all variants use the same input set

        def inspect(name: str, which: int, output: Any) -> None:
            if name in variants:
                references[which] = references[which] if which in references else work.reference(which)
                seen[name] = work.error(name, output, which, references[which])

        timed = time_variants(
            calls, work.ranks, mode, input_sets=work.input_sets, seconds=seconds, repetitions=repetitions,
            waiting=work.waiting, claims=[pair for pair in work.claims if work.twins(mode).get(pair[0]) != pair[1]],
            advance=partial(step, f"{work.name}: timing, {mode}"), before_last=partial(_poison, found.graphs), inspect=inspect,
        )  # fmt: skip
        return timed, seen

    for mode in modes:  # graph is last: captured calls may change how later calls run
        calls: dict[str, Call] = {**variants, **beside}
        if mode == "graph":
            recorder = Recorder(work.ranks)
            variants = {name: variant for name, variant in variants.items() if name not in work.waiting}
            check(variants, work, recorder, found)
            for name, call in beside.items():
                if captured := _captured(name, call, 0, recorder, found):
                    found.graphs[name] = [(captured[0], None)] * work.input_sets
            calls = {name: partial(_replay, graphs) for name, graphs in found.graphs.items()}
        timed, seen = time_all(mode, calls)
        for name, error in seen.items():
            found.errors[name] = max(found.errors[name], error)
            so = "this was the last output of a row of calls, so its time is discarded"
            if _is_wrong(name, error, work, found, f", {mode},", so, must=name == baseline):
                del timed[name], variants[name]
        found.timings |= {(mode, name): timing for name, timing in timed.items()}
    found.graphs = {}
    return found


def _poison(captured: Mapping[str, list[Captured]]) -> None:
    """Fill the outputs of captured graphs with NaN. A replay writes into the same memory, which may hold a correct result of an
    earlier replay.
    """
    for graphs in captured.values():
        for _, output in graphs:
            if isinstance(output, torch.Tensor):
                output.fill_(math.nan)


def first_calls(
    variants: VariantCalls, ranks: Ranks, called: Callable[[str], None] = lambda name: None
) -> dict[str, float]:
    """Call each variant for the first time, which may compile and allocate. Return {variant: ms until its result is complete,
    on the slowest rank}.

    called: a function that receives each variant's name after its call. All ranks must make this call.
    """
    found = {}
    for name, variant in variants.items():
        ranks.start_together()
        start = time.perf_counter()
        variant(0)
        ranks.synchronize()
        found[name] = 1e3 * ranks.most(time.perf_counter() - start)
        called(name)
    return found


def check(
    variants: VariantCalls, work: Workload, recorder: Recorder | None = None, found: Results | None = None
) -> Results:
    """Compare all variants with the reference on all input sets. Add their errors to `found`, or by default to new
    results, and return these results. All ranks must make this call.

    An error is the largest difference divided by the reference's largest element. Memory is filled with NaN before each
    checked call, so that elements that the call does not write are found. With a recorder, a graph of each call is
    checked instead. Raise RuntimeError if the first variant, the baseline, is wrong.
    """
    found = found or Results(dict.fromkeys(variants, 0.0))
    for which in range(work.input_sets):
        reference = work.reference(which)
        for name, variant in variants.items():
            output = _output(name, variant, which, work, recorder, found)
            if output is not None:
                work.ranks.synchronize()
                found.errors[name] = max(found.errors[name], work.error(name, output, which, reference))
                del output
    how = " as a graph" if recorder else ""
    for number, name in enumerate(variants):
        if _is_wrong(name, found.errors[name], work, found, how, "it was not timed", must=number == 0):
            found.graphs.pop(name, None)
    return found


def _is_wrong(name: str, error: float, work: Workload, found: Results, how: str, so: str, must: bool) -> bool:
    """Return True if `error`, an error of the variant `name`, exceeds the variant's limit. Then also add an error text to
    `found.wrong`.

    how: text after the variant's name, such as " as a graph".
    so: the end of the error text, such as "it was not timed".
    must: True to raise RuntimeError with this text instead.
    """
    if error <= (limit := work.limit(name, found.errors)):
        return False
    found.wrong[name] = (
        f"{work.name}: {work.differs(name, how)} by {error:.3g} of the largest element; the limit is {limit:.3g}: {so}"
    )
    if must:
        raise RuntimeError(found.wrong[name])
    return True


def _output(
    name: str,
    variant: Callable[[int], torch.Tensor],
    which: int,
    work: Workload,
    recorder: Recorder | None,
    found: Results,
) -> torch.Tensor | None:
    """Return the variant's output for input set `which`, written into memory full of NaN; None if it cannot be captured."""
    graph, output = None, None
    if name in found.not_captured:
        return None
    if recorder is not None:
        captured = _captured(name, variant, which, recorder, found)
        if captured is None:
            return None
        graph, output = captured
        assert isinstance(output, torch.Tensor)
        output.fill_(math.nan)
    stale = variant((which + 1) % work.input_sets)  # also overwrites the memory that peers write to
    work.poison(name, stale)
    del stale
    if graph is None:
        return variant(which)
    work.ranks.synchronize()
    graph.replay()
    return output


def _captured(name: str, call: Call, which: int, recorder: Recorder, found: Results) -> Captured | None:
    captured = recorder.capture(call, which)
    if isinstance(captured, str):
        found.not_captured[name] = captured
        found.graphs.pop(name, None)
        return None
    found.graphs.setdefault(name, []).append(captured)
    return captured


def _replay(captured: list[Captured], which: int) -> Any:
    graph, output = captured[which]
    graph.replay()
    return output
