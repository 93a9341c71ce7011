"""Random calls on the ranks of a series, each compared with float64.

A call is a generator. It first yields a description, and then yields between its parts: forward, backward, further
steps. In the meantime the rank makes other calls. All ranks draw the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
import torch.distributed as dist
from support import tensor_parallel_ranks as linear
from support.expert_module_ranks import TOP_K, dense, layer, routed, whole
from support.expert_rows_in_torch import fused
from support.on_ranks import BF16, F16, F32, F64, close, data, own_group, poisoned_memory, told
from support.operators.call import Call, Tensors
from support.operators.cases import ROWS
from support.operators.experts import Experts, Traffic
from support.operators.gemms import Following, Gathered, Gemm
from support.operators.scaled import ScaledGathered, ScaledGemm
from support.operators.suite import CALLS, right_gradients
from support.sizes_ranks import poison

import weft.nn
from weft import symm
from weft.builders import NotApplicableError, candidates
from weft.runtime.cpu.memory import memory_of

from .draw import options_of
from .jobs import compare
from .operators import CHECKPOINTS, ON_DEMAND, OPERATORS, TRAINING

Parts = Iterator[str]
LENGTHS = (0, 1, 2, 3, 7, 16, 31, 48, 64)
DTYPES = (F32, F32, BF16, F16, F64)
AT_ONCE = 6
"""The largest number of calls that have begun and not ended."""
TABLES = tuple(
    name for name in ("embedding_all_to_all", "module, local batch", "module, global batch", *TRAINING)
    if name not in (*CHECKPOINTS, *ON_DEMAND)
)  # fmt: skip


def play(group: dist.ProcessGroup, seed: int, index: int, kinds: list[str], steps: int) -> int:
    """Run series `index` of `seed` on this rank: `steps` parts of random calls, on two groups. Return the number of calls."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    same, late = random.Random(f"{seed}:{index}"), random.Random(f"{seed}:{index}:{group.rank()}")
    groups, running, begun = [group, own_group(group)], list[tuple[int, str, Parts]](), 0
    for step in range(steps):
        if len(running) < AT_ONCE and (not running or same.random() < 0.4):
            kind, of = same.choice(kinds), same.choice(groups)
            parts = CALLS_OF[kind](of, random.Random(f"{seed}:{index}:{begun}"), 1000 * index + begun)
            running.append((begun, f"{kind}: {next(parts)}", parts))
            begun += 1
        number, said, parts = running.pop(same.randrange(len(running)))
        if late.random() < 0.1:
            time.sleep(0.005 * late.random())
        try:
            if next(parts, None) is not None:
                running.append((number, said, parts))
        except Exception as error:
            raise AssertionError(f"step {step}, call {number}, {said}: {type(error).__name__}: {error}") from error
        if same.random() < 0.05:
            for of in groups:
                comm = symm.communicator(of, "cpu")
                if memory_of(comm).mapped is not None:
                    poison(comm)
    running.clear()
    symm.communicator(groups[1], "cpu").close()
    return begun


# --- operators ---


def operator(group: dist.ProcessGroup, draw: random.Random, seed: int) -> Parts:
    """Call an operator of random size, dtype and schedule. Run its backward up to twice, or change an input in place on one
    rank before. Results must stay as they are.
    """
    name = draw.choice(list(ROWS))
    case = _case(name, draw, group.size())
    call = CALLS[name](case, group, seed)
    schedule = _schedule(call, draw)
    wanted = [bool(call.spec.gradients_of) and draw.random() < 0.7 for _ in call.mine]
    yield f"{name}, {case}, schedule {schedule}, gradients of {wanted}"
    inputs = [t.clone().requires_grad_(want) for t, want in zip(call.mine, wanted, strict=True)]
    with call.poisoned():
        ys = call(group, *inputs, schedule=schedule)
    call.check(group, [y.detach() for y in ys], _allowed(call, ys))
    kept, held = call.kept(ys), [(y.detach(), y.detach().clone()) for y in ys]
    yield "forward"
    some = [i for i, y in enumerate(kept) if y.requires_grad]
    # Ranks notify each other in backward only if it communicates. The gradient of x, or of the tokens, always does.
    changed = draw.randrange(group.size()) if wanted[0] and draw.random() < 0.1 else None
    for _ in range(draw.choice((1, 1, 2)) if some else 0):
        weighed = draw.sample(some, draw.randint(1, len(some)))
        weights, exact = right_gradients(call, weighed)
        leaves = [t for t in inputs if t.requires_grad]
        if group.rank() == changed:
            for t in (*inputs, *ys):  # all_gather_matmul saves the gathered A that it returns
                torch.autograd.graph.increment_version(t)

        def backward(weights: dict[int, torch.Tensor] = weights, leaves: Tensors = leaves) -> Any:
            of = [kept[i] for i in weights], leaves, [weights[i].to(kept[i].dtype) for i in weights]
            return torch.autograd.grad(*of, retain_graph=True, allow_unused=True)

        if changed is not None:
            error = told(backward)
            assert error.startswith(f"RefusedError: rank {changed}: "), error
            break
        found = backward()
        for grad, right in zip(found, [g for g, want in zip(exact, wanted, strict=True) if want], strict=True):
            near(torch.zeros_like(right) if grad is None else grad, right, case.dtype, 2)
        held += [(grad, grad.clone()) for grad in found if grad is not None]
        yield "backward"
    for y, before in held:
        assert torch.equal(y.float().nan_to_num(), before.float().nan_to_num()), "overwritten"


def _case(name: str, draw: random.Random, world: int) -> Any:
    rows, k, n, dtype = (draw.choice(of) for of in (LENGTHS, (8, 16, 24), (1, 5, 8, 24), DTYPES))
    op, dim = draw.choice(("sum", "avg")), draw.choice((0, 0, 0, -1))
    uneven = draw.choice((None, tuple(draw.choices(LENGTHS, k=world))))
    chosen, more = draw.random() < 0.5, draw.choice(((), (8,), (16, 16)))
    if name in ("all_to_all_matmul", "matmul_all_to_all"):
        traffic = draw.choice(get_args(Traffic))
        return Experts(draw.randint(1, 3), dtype, traffic, chosen, draw.random() < 0.5, k, n)
    if name == "all_gather_scaled_matmul":
        by = draw.choice(("tensor", "row", "row of all"))
        return ScaledGathered((rows, 32), 16, rows=uneven, more=more[1:], by=by, biased=chosen)
    if name == "scaled_matmul_reduce_scatter":
        return ScaledGemm((rows * world, 32), 16, by=draw.choice(("tensor", "row")), op=op, biased=chosen)
    if name == "all_gather_matmul":
        shape, dim = ((2, rows, k), 1) if draw.random() < 0.2 else ((rows, k), 0)
        return Gathered(shape, n, dtype, dim, rows=uneven, more=more, return_A=chosen)
    if name == "matmul_reduce_scatter":
        return Gemm((rows * (1 if dim else world), k), n * world if dim else n, dtype, dim, op)
    if name == "matmul_all_gather":
        return Gemm((rows, k), n, dtype, dim)
    if op == "avg":
        return Gemm((rows, k), n, dtype, op=op)
    eps = 1.0 if draw.random() < 0.3 and dtype in (F32, F64) else None
    return Following((rows, k), n, dtype, bias=chosen, residual=draw.random() < 0.5, eps=eps)


def _schedule(call: Call, draw: random.Random) -> str | None:
    """Return "serial", None, or a random schedule that supports the call."""
    case: Any = call.case
    if draw.random() < 0.3 or (isinstance(case, Gemm) and (case.dim == -1 or len(case.shape) > 2)):
        return draw.choice(("serial", "serial", None))
    found = candidates(call.problem())
    for candidate in draw.sample(found, len(found)):
        with contextlib.suppress(NotApplicableError):
            candidate.build()
            return candidate.name
    return None


def _allowed(call: Call, found: Tensors) -> tuple[Tensors, Tensors]:
    """Return this rank's results in float64, and the same with half of the allowed errors, as `Call.check` takes them.

    The errors of a few numbers by torch's own ops are no bound, because they may be small by chance.
    """
    case, exact = call.case, call.exact()
    dtypes = [case.dtype] * call.copied + [getattr(case, "out", case.dtype)] * (len(exact) - call.copied)
    errors = [0.0] * call.copied + [1.0] * (len(exact) - call.copied)
    return exact, [_off(y, of, error) for y, of, error in zip(exact, dtypes, errors, strict=True)]


def _off(exact: torch.Tensor, dtype: torch.dtype, errors: float) -> torch.Tensor:
    """Return `exact` with errors of a few roundings of its largest number, or of 4 if that is larger, rounded to `dtype`.

    A sum may be small although its terms are not.
    """
    if not exact.numel():
        return exact.to(dtype)
    roundings = torch.finfo(dtype).eps * (4 if dtype.itemsize < 4 else 32)
    return (exact + errors * roundings * max(4.0, float(exact.abs().max()))).to(dtype)


def near(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, errors: float = 1.0) -> None:
    """Check that the error of `found` is that of some roundings to `dtype` (`_off`)."""
    assert found.shape == exact.shape
    close(found, exact, _off(exact, dtype, errors))


def _double(x: torch.Tensor) -> torch.Tensor:
    """Return a copy in float64 that wants a gradient."""
    return x.to(torch.float64, copy=True).requires_grad_()


def refused(group: dist.ProcessGroup, draw: random.Random, seed: int) -> Parts:
    """Pass an invalid argument on one rank. Every rank must be told, and the group stays usable."""
    name, rank = draw.choice(list(ROWS)), draw.randrange(group.size())
    call = CALLS[name](ROWS[name].small, group, seed)
    what = draw.choice(list(call.impossible()))
    yield f"{name}, {what} on rank {rank}"
    given = call.arguments(call.mine, group)
    given |= call.impossible()[what][0] if group.rank() == rank else {}
    error = told(lambda: call.public(**{"schedule": call.case.schedule} | given))
    assert error.startswith("RefusedError: "), error


# --- modules ---


def tables(group: dist.ProcessGroup, draw: random.Random, seed: int) -> Parts:
    """Train a few steps of an embedding module, with another number of samples on each rank in each step."""
    name = draw.choice(TABLES)
    options = options_of(name, draw, 60.0, "cpu", group.size()) | {"any_size": True}
    yield f"{name}, {options}"
    work: Any = OPERATORS[name](group, torch.device("cpu"), seed, draw.randrange(2), 0, options)
    work.make()
    last = work.last = draw.randint(2, 8)
    for n in range(last):
        work.begin(n)
        given, prefetch = work.inputs(n), options.get("prefetch")
        if prefetch in ("now", "ahead") and work.ahead is None:
            work.prefetch(n, given)
            yield "prefetch"
        results = work.forward(given)
        assert compare(results, work.expected(n), work.padded, work.tolerance) == "right", f"forward of step {n}"
        yield "forward"
        if not work.backward:
            continue
        if prefetch == "ahead" and n + 1 < last:
            work.prefetch(n + 1, work.inputs(n + 1))
            yield "prefetch"
        grads, wanted = work.grads(n)
        found = work.gradients(n, given, results, grads)
        assert compare(found, wanted, False, work.tolerance) == "right", f"backward of step {n}"
        work.succeeded()
        yield "backward"


def experts(group: dist.ProcessGroup, draw: random.Random, seed: int) -> Parts:
    """Train a few steps of ExpertParallelMLP, with another number of tokens on each rank in each call."""
    rank, world, dtype = group.rank(), group.size(), draw.choice((F32, F32, BF16, F64))
    gated, count = draw.random() < 0.7, world * draw.randint(1, 3)
    first = "gate_up_proj" if gated else "up_proj"
    frozen = draw.sample(("x", "by", first, "down_proj"), draw.choice((0, 0, 0, 1, 2, 3)))
    pinned = draw.choice(
        ((None, None), ("serial", "serial"), *[("dispatch[by=kernel,rest=each]", "combine[chunks=1,by=store]")] * 2)
    )
    room = 40 * TOP_K * world if draw.random() < 0.4 else None
    how = draw.choice(("plain", "fused" if gated else "plain"))
    how = "compiled" if draw.random() < 0.05 else how  # rarely, because it takes seconds
    around: Callable[[], Any] = fused if how == "fused" else contextlib.nullcontext
    yield f"{dtype}, {count} experts, {how}, max_rows {room}, frozen {frozen}, schedules {pinned}"
    with around():
        mlp: Any = layer(group, count, dtype, gated=gated, max_rows=room, capacity=40 * TOP_K, schedules=pinned)
    run = mlp
    if how == "compiled":
        torch._dynamo.reset()
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        run = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    exact = {name: _double(w) for name, w in whole(count, gated, dtype).items()}
    for name in exact:
        mlp.get_parameter(name).requires_grad_(name not in frozen)
    for step in range(draw.randint(1, 3)):
        batches = []
        for batch in range(draw.choice((1, 1, 2))):
            tokens = [draw.choice((0, 1, draw.randrange(40), draw.randrange(40))) for _ in range(world)]
            given = [routed(r, count, tokens[r], seed + 10 * step + batch) for r in range(world)]
            of_ranks = [(x.to(dtype), index, by.to(dtype)) for x, index, by in given]
            doubles = [(_double(x), index, _double(by)) for x, index, by in of_ranks]
            x, index, by = of_ranks[rank]
            x, by = x.requires_grad_("x" not in frozen), by.requires_grad_("by" not in frozen)
            with around(), poisoned_memory():
                y = run(x, index, by)
            ys = [dense(*one, exact) for one in doubles]
            near(y.detach(), ys[rank].detach(), dtype, 2)
            batches.append((x, by, y, ys, doubles, [data(r, t.shape, dtype, seed + step) for r, t in enumerate(ys)]))
            yield "forward"
        draw.shuffle(batches)
        for x, by, y, ys, doubles, grads in batches:
            with around(), poisoned_memory():
                y.backward(grads[rank])
            torch.autograd.backward(ys, [grad.double() for grad in grads])
            for name, t, right in (("x", x, doubles[rank][0]), ("by", by, doubles[rank][2])):
                assert (t.grad is None) == (name in frozen), name
                if t.grad is not None:
                    near(t.grad, right.grad, dtype, 4)
            yield "backward"
        for name, w in exact.items():
            grad, right = mlp.get_parameter(name).grad, w.grad.chunk(world)[rank]
            assert (grad is None) == (name in frozen), name
            if grad is not None:
                near(grad, right, dtype, 4)
            w.grad = None
        mlp.zero_grad()


def layers(group: dist.ProcessGroup, draw: random.Random, seed: int) -> Parts:
    """Train a few steps of a tensor-parallel layer, with sequences of another length in each call."""
    rank, world = group.rank(), group.size()
    kind, dtype = draw.choice(("column", "row", "mlp") if world != 3 else ("none",)), draw.choice((F32, BF16, F64))
    bias, sequence_dim = draw.random() < 0.5, draw.choice((None, 0, 1))
    yield f"{kind}, {dtype}, bias {bias}, sequence_dim {sequence_dim}"
    if kind == "none":  # the sizes of the layers do not divide by 3
        return
    usual = linear.stock(kind, bias).to(dtype)
    exact = copy.deepcopy(usual).double()
    ours = linear.parallel(kind, bias, group, sequence_dim, dtype=dtype)
    ours.load_state_dict(weft.nn.local_state_dict(ours, usual.state_dict()))

    def part(t: torch.Tensor, rows: bool) -> torch.Tensor:
        if rows and sequence_dim is None:
            return t
        return t.chunk(world, 1 if rows else 2)[rank]

    for step in range(draw.randint(1, 4)):
        length, columns = world * draw.choice((1, 2, 5, 12)), linear.WIDTH if kind == "row" else linear.HIDDEN
        given = _double(data(0, (2, length, columns), dtype, seed + step))
        x = part(given.detach(), kind != "row").to(dtype)
        x = (x.transpose(0, 1).contiguous() if sequence_dim == 0 else x.clone()).requires_grad_()
        y = ours(x)
        y = y.transpose(0, 1) if sequence_dim == 0 else y
        right = exact(given)
        near(y.detach(), part(right.detach(), kind != "column"), dtype, 2)
        yield "forward"
        weights = data(0, right.shape, dtype, seed + step + 1)
        ours.zero_grad()
        exact.zero_grad()
        y.backward(part(weights, kind != "column"))
        right.backward(weights.double())
        x_grad = x.grad.transpose(0, 1) if sequence_dim == 0 else x.grad
        near(x_grad, part(given.grad, kind != "row"), dtype, 4)
        of = weft.nn.local_state_dict(ours, {name: p.grad for name, p in exact.named_parameters()})
        for name, p in ours.named_parameters():
            near(p.grad, of[name], dtype, 8)
        yield "backward"


CALLS_OF: dict[str, Callable[[dist.ProcessGroup, random.Random, int], Parts]] = {
    "operator": operator, "refused": refused, "tables": tables, "experts": experts, "layers": layers,
}  # fmt: skip
