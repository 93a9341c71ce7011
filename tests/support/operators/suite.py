"""The tests that every operator gets, on CPU processes and on GPUs. These functions run on the ranks; `operator` is a
name.

The tests are: results against float64, for all schedules and for many sizes in a row; gradients; operands in another
layout on one rank; refused arguments. Also: a rank that makes another call or no call, timelines, torch.compile and
CUDA graphs.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from support.graphs import capture
from support.on_ranks import FP8, applicable, data, device, each_option, late, own_group, resized, same_everywhere, told
from support.operators import gemms
from support.operators.call import Call, Case, Tensors
from support.operators.experts import AllToAllMatmulCall, MatmulAllToAllCall
from support.operators.row import Row
from support.operators.scaled import AllGatherScaledMatmulCall, ScaledMatmulReduceScatterCall
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft.operator import layout

CALLS: dict[str, type[Call]] = {
    "all_gather_matmul": gemms.AllGatherMatmulCall,
    "matmul_reduce_scatter": gemms.MatmulReduceScatterCall,
    "matmul_all_reduce": gemms.MatmulAllReduceCall,
    "matmul_all_gather": gemms.MatmulAllGatherCall,
    "matmul_all_gather_gradients": gemms.MatmulAllGatherGradientsCall,
    "all_gather_scaled_matmul": AllGatherScaledMatmulCall,
    "scaled_matmul_reduce_scatter": ScaledMatmulReduceScatterCall,
    "all_to_all_matmul": AllToAllMatmulCall,
    "matmul_all_to_all": MatmulAllToAllCall,
}


def results(group: dist.ProcessGroup, operator: str, case: Case, calls: int) -> None:
    """Call `calls` times with new data, then with the first data again, with random delays of ranks. Compare the results
    after the last call.
    """
    made = [CALLS[operator](case, group, seed) for seed in range(calls)]
    found = []
    for call in [*made, made[0]]:
        if random.random() < 0.2:
            time.sleep(random.random() * 0.005)
        with call.poisoned():
            found.append(call(group))
    # The call may have selected serial, whose reduction by gloo rounds more often than the bound allows. With two ranks
    # it rounds once.
    by_library = case.schedule is None and made[0].reduces and device().type == "cpu" and dist.get_world_size(group) > 2
    for call, ys in zip(made, found, strict=False):
        expected = call.expected(group)
        call.check(group, ys, _with_twice_the_error(expected) if by_library else expected)
    assert case.schedule is None or _repeats(made[0], case.schedule, found)


def both_ways(group: dist.ProcessGroup, operator: str, row: Row, most: int) -> None:
    """Compare results of the row's first `most` cases, and gradients of its first case, with schedules that weft selects."""
    for name, case in [*row.results.items()][:most]:
        try:
            results(group, operator, replace(case, schedule=None), most)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    for case, wanted in row.gradients[:1]:
        gradients(group, operator, replace(case, schedule=None), wanted, False, None)


def _repeats(call: Call, schedule: str, found: Sequence[Tensors]) -> bool:
    """True if the last results have the same bits as the first results. Also True if torch.distributed reduces, because
    its order of sums may change.
    """
    pairs = zip(call.kept(found[0]), call.kept(found[-1]), strict=True)
    return (call.reduces and schedule.partition("[")[0] in ("serial", "autotune", "collective")) or all(
        _equal(a, b) for a, b in pairs
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.float(), b.float()) if a.dtype == FP8 else torch.equal(a, b)


def every_schedule(group: dist.ProcessGroup, operator: str, case: Case, late_s: float, whole: bool = True) -> list[str]:
    """Call each schedule three times with new data, then with the first data again, which must give the same bits.
    Return the schedules.

    The first rank is delayed before the second call, and the last rank before the third call. Results that all ranks
    get must have the same bits on all ranks.

    whole: False to try each value of each parameter of a builder at least once, instead of all combinations.
    """
    made = [CALLS[operator](case, group, seed) for seed in range(3)]
    wanted = [call.expected(group) for call in made]
    candidates = applicable(made[0].problem())
    names = [candidate.name for candidate in (candidates if whole else each_option(candidates))]
    for name in names:
        found = []
        for number in (0, 1, 2, 0):
            if (number, group.rank()) in ((1, 0), (2, group.size() - 1)):
                late(late_s)
            with made[number].poisoned():
                found.append(made[number](group, schedule=name))
        by_library = name.startswith("collective")
        try:
            for call, ys, expected in zip(made, found, wanted, strict=False):
                call.check(group, ys, _with_twice_the_error(expected) if by_library else expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        assert _repeats(made[0], name, found), f"{name}: other bits at the next call"
        alike = [y for ys in found for y in made[0].alike(ys)]
        if alike and not (made[0].reduces and name == "serial"):
            assert same_everywhere(group, *alike), f"{name}: other bits on other ranks"
    return names


def _with_twice_the_error(expected: tuple[Any, Any]) -> tuple[Any, Any]:
    """Double the error of torch's results in `expected` = (results in float64, torch's results), and return both. The
    tolerance of `Call.check` is then twice as large.

    gloo needs this tolerance: it rounds 16-bit sums after each addition, in an order that depends on the number of rows.
    """
    exact, usual = expected
    return exact, [(e + 2 * (u.double() - e)).to(u.dtype) for e, u in zip(exact, usual, strict=True)]


def gradients(
    group: dist.ProcessGroup, operator: str, case: Case, wanted: Sequence[bool], compiled: bool, schedule: str | None,
    seeds: Sequence[int] = (1,), weighed: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Compare gradients with float64. The loss is a random weighted sum of all ranks' results.

    wanted: for each input, True if it wants a gradient.
    schedule: the schedule that `use` selects for forward and backward.
    weighed: the indices of the results on which the loss depends; None for all.
    """
    for seed in seeds:
        _gradients(group, CALLS[operator](case, group, seed), wanted, compiled, schedule, weighed)


def _gradients(
    group: dist.ProcessGroup, call: Call, wanted: Sequence[bool], compiled: bool, schedule: str | None,
    weighed: Sequence[int] | None,
) -> None:  # fmt: skip
    weights, exact = right_gradients(call, weighed)

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        ys = call.kept(call(group.group_name, *inputs))
        return sum((ys[i] * weight).sum() for i, weight in weights.items())  # type: ignore[return-value]

    inputs = [t.clone().requires_grad_(want) for t, want in zip(call.mine, wanted, strict=True)]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
        with weft.plan.use(schedule), call.poisoned():
            run(*inputs).backward()
    for found, right, want in zip(inputs, exact, wanted, strict=True):
        assert (found.grad is not None) == want
        if want:
            assert found.grad is not None
            torch.testing.assert_close(found.grad.double(), right, rtol=2e-4, atol=call.atol)


def right_gradients(call: Call, weighed: Sequence[int] | None = None) -> tuple[dict[int, torch.Tensor], Tensors]:
    """Return the weights of this rank's results in the loss, and the gradients of its inputs in float64. The loss is a
    random weighted sum of all ranks' results.
    """
    inputs = [[t.to(torch.float64, copy=True).requires_grad_() for t in of_rank] for of_rank in call.inputs]
    mine, losses = dict[int, torch.Tensor](), list[torch.Tensor]()
    for rank, ys in enumerate(call.reference(inputs)):
        for i in range(len(ys)) if weighed is None else weighed:
            weight = data(rank, tuple(ys[i].shape), torch.float32, 70 + i)
            losses.append((ys[i] * weight.double()).sum())
            if rank == call.rank:
                mine[i] = weight
    torch.stack(losses).sum().backward()
    # An input gets no gradient if only unweighed results depend on it.
    return mine, [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs[call.rank]]


def many_sizes(group: dist.ProcessGroup, operator: str, case: Any) -> None:
    """Call many sizes one after the other. On GPUs the calls share memory, so compare the results after the last call."""
    kind, found = CALLS[operator], []
    for seed, rows in enumerate((65, 192, 8, 65, 321, 16, 192)):
        call = kind(kind.sized(case, rows, group.size()), group, seed)
        found.append((call, call(group)))
    for call, ys in found:
        call.check(group, ys)


def by_columns(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of the matrices, stored by columns."""
    return _as_bytes(t, lambda flat: flat.mT.contiguous().mT)


def by_rows(t: torch.Tensor) -> torch.Tensor:
    return _as_bytes(t, torch.Tensor.contiguous)


def in_pieces(t: torch.Tensor) -> torch.Tensor:
    """Return a copy whose rows and columns are not contiguous."""
    return _as_bytes(t, lambda flat: flat.repeat_interleave(2, -2).repeat_interleave(2, -1)[..., ::2, ::2])


def _as_bytes(t: torch.Tensor, change: Any) -> torch.Tensor:
    return change(t.view(torch.uint8)).view(FP8) if t.dtype == FP8 else change(t)


def layouts(group: dist.ProcessGroup, operator: str, case: Case) -> list[str]:
    """Call with operands in other layouts on the first rank. Compare the results after the last call. Return the warnings."""
    layout._warned.clear()
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(4):
            call = CALLS[operator](case, group, seed)
            inputs = list(call.mine)
            if group.rank() == 0:
                x, w = call.places
                inputs[x] = by_columns(inputs[x]) if seed % 2 else inputs[x]
                inputs[w] = by_rows(inputs[w]) if seed < 2 or inputs[w].dtype == FP8 else in_pieces(inputs[w])
            else:  # give rank 0 time to load other kernels
                late(0.01)
            found.append((call, call(group, *inputs)))
    for call, ys in found:
        call.check(group, ys)
    return [str(w.message) for w in caught]


def negated(group: dist.ProcessGroup, operator: str, case: Case, schedules: Sequence[str | None]) -> None:
    """Pass negated views of the operands, in memory that earlier calls have read, and run backward with negated views
    of the results' gradients. The memory of a negated view has the values with the opposite sign.
    """
    for schedule in schedules:
        plain, call = (CALLS[operator](replace(case, schedule=schedule), group, 1) for _ in range(2))
        call.inputs = [[-t for t in of_rank] for of_rank in call.inputs]
        weights, exact = right_gradients(call)
        operands = [t.clone().requires_grad_() for t in plain.mine]
        views = [torch._neg_view(t.detach()).requires_grad_() for t in operands]
        for inputs, of_inputs in ((operands, plain), (views, call), (views, call)):
            ys = of_inputs(group, *inputs)
            of_inputs.check(group, [y.detach() for y in ys])
            kept = of_inputs.kept(ys)
            torch.autograd.backward(
                [kept[i] for i in weights], [torch._neg_view(-weight) for weight in weights.values()]
            )
        for found, right in zip(views, exact, strict=True):
            assert found.grad is not None
            torch.testing.assert_close(found.grad.double(), 2 * right, rtol=2e-4, atol=2 * call.atol)


def default_device(group: dist.ProcessGroup, operator: str, case: Case) -> None:
    """Make the first calls of a group, and a backward, while torch's default device is not the device of the operands."""
    own = own_group(group)
    for schedule in (case.schedule, "serial"):
        call = CALLS[operator](replace(case, schedule=schedule), own, 1)
        for _ in range(2):
            inputs = [t.requires_grad_(bool(call.spec.gradients_of)) for t in call.mine]
            with torch.device("meta"):
                ys = call(own, *inputs)
                if ys[0].requires_grad:
                    ys[0].backward(ys[0].detach())
            call.check(own, [y.detach() for y in ys])


def compiled(group: dist.ProcessGroup, operator: str, case: Case) -> None:
    """Call the operator in one graph of torch.compile."""
    call = CALLS[operator](case, group, 3)
    torch._dynamo.reset()
    run = torch.compile(lambda *inputs: call(group.group_name, *inputs), fullgraph=True, backend="aot_eager")
    call.check(group, run(*call.mine))


def refused(group: dist.ProcessGroup, operator: str, case: Case, counts_flops: bool = False) -> None:
    """Pass invalid arguments, on all ranks and on the first rank only. Every rank must get the values and the fix. A
    valid call follows.

    counts_flops: True to make the invalid calls inside FlopCounterMode.
    """

    def error_of(given: dict[str, Any]) -> str:
        with FlopCounterMode(display=False) if counts_flops else contextlib.nullcontext():
            return told(lambda: call.public(**given))

    call, first = CALLS[operator](case, group, 1), group.rank() == 0
    good, wrong = call.arguments(call.mine, group), dict[str, str]()
    everybody = f"ranks {', '.join(map(str, range(group.size())))}: "
    for name, (changes, text) in call.impossible().items():
        for who in ("all", "one"):
            given = good | changes if first or who == "all" else good
            error = error_of(given)
            named = (
                error.startswith("RefusedError: rank 0: ")
                if who == "one"
                else everybody in error or "; rank 1: " in error
            )
            if not (named and error.startswith("RefusedError: ") and text in error):
                wrong[f"{name}, {who}"] = error
    assert not wrong, wrong
    call.check(group, call(group))


def freed(group: dist.ProcessGroup, operator: str, case: Case) -> None:
    """Pass operands whose memory was freed, and views of freed memory, in a call whose shapes are known. A valid call
    follows each of them.
    """
    call = CALLS[operator](case, group, 1)
    for _ in range(3):
        call.check(group, call(group))
    for name, place in zip(call.operands, call.places, strict=True):
        for before in (0, 64):
            inputs = list(call.mine)
            inputs[place] = resized(inputs[place], before=before)
            error = told(lambda inputs=inputs: call(group, *inputs))
            assert error.startswith("RefusedError: "), error
            assert f"{name} has no memory: its storage holds 0 of " in error
            call.check(group, call(group))


def one_rank_differs(group: dist.ProcessGroup, operator: str, case: Case) -> None:
    """Let the first rank make a different call. The error of every rank must name the difference. Each different call
    uses a new group, because the error makes the group unusable.
    """
    call, wrong = CALLS[operator](case, group, 1), dict[str, str]()
    for name, (of_first, of_others, texts) in call.different().items():
        own = own_group(group)
        given = call.arguments(call.mine, own) | (of_others if group.rank() else of_first)
        error = told(lambda given=given: call.public(**given))
        if not error.startswith("DisagreementError: ranks made different calls") or any(t not in error for t in texts):
            wrong[name] = error
    assert not wrong, wrong
    call.check(group, call(group))


def never_comes(group: dist.ProcessGroup, operator: str, case: Case, backward: bool) -> str:
    """Let only the first rank make a second call, or run backward. Return this rank's error."""
    call, own = CALLS[operator](case, group, 1), own_group(group)
    inputs = [t.requires_grad_(backward and t.dtype.itemsize > 1) for t in call.mine]
    ys = call.kept(call(own, *inputs, deadline_s=3 if backward else None))
    if group.rank() == 0:
        return told(ys[-1].sum().backward if backward else lambda: call(own, *inputs, deadline_s=1))
    return ""


def steps(group: dist.ProcessGroup, operator: str, case: Case) -> set[str]:
    """Return the names of this rank's steps in a timeline. They must be the same whether the call or `use` selects the
    schedule.
    """
    call, timelines = CALLS[operator](case, group, 1), (weft.Timeline(), weft.Timeline())
    call.check(group, call(group, timeline=timelines[0]))
    with weft.plan.use(case.schedule):
        call(group, schedule=None, timeline=timelines[1])
    pinned, in_block = ({span.name for span in found if span.rank == group.rank()} for found in timelines)
    assert pinned == in_block
    assert all(span.duration_us >= 0 for found in timelines for span in found)
    return pinned


def opcheck(group: dist.ProcessGroup, operator: str, case: Case) -> None:
    """Check the operator with torch.library.opcheck."""
    call = CALLS[operator](case, group, 1)
    call(group)
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if all(t.dtype != FP8 for t in call.mine):  # the schema test needs operations that torch does not support for fp8
        tests.append("test_schema")
    for arguments in call.operations(group):
        torch.library.opcheck(getattr(torch.ops.weft, operator).default, arguments, test_utils=tests)


def captured(group: dist.ProcessGroup, operator: str, case: Any, replays: int) -> str:
    """Capture two calls in a CUDA graph, and replay it with new data. Delay ranks, and call eagerly between replays. With
    a pinned schedule, replays have the bits of eager calls. Return the error of a first call inside a capture.
    """
    kind, stream, refusal = CALLS[operator], torch.cuda.Stream(), ""
    mean = replace(case, op="avg") if kind.reduces else case
    held, other = kind(case, group, 1), kind(mean, group, 1)

    def doubled(inputs: Tensors) -> Tensors:
        return inputs if inputs[0].dtype == FP8 else [inputs[0] * 2, *inputs[1:]]

    with torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                held(group)
        except ValueError as error:
            refusal = str(error)
        held(group)
        other(group)
    graph, (ys, zs) = capture(lambda: (held(group), other(group, *doubled(held.mine))), stream)
    for replay in range(replays):
        fresh, second = kind(case, group, 10 + replay), kind(mean, group, 10 + replay)
        second.inputs = [doubled(of_rank) for of_rank in second.inputs]
        for into, t in zip(held.mine, fresh.mine, strict=True):
            copy = into.view(torch.uint8).copy_ if t.dtype == FP8 else into.copy_
            copy(t.view(torch.uint8) if t.dtype == FP8 else t)
        for y in (*ys, *zs):
            y.fill_(torch.nan) if y.dtype != FP8 else y.view(torch.uint8).fill_(0x7F)
        if replay % 4 == group.rank():
            late(0.001)
        graph.replay()
        torch.cuda.synchronize()
        fresh.check(group, ys)
        second.check(group, zs)
        called = fresh(group)
        assert case.schedule in (None, "serial") or all(map(_equal, fresh.kept(ys), fresh.kept(called)))
    return refusal
