"""The implementation of each step kind on CPU processes.

`bind` turns a step, in which numbers have replaced all expressions, into a function without arguments. A step with dynamic
sizes is bound when it runs (`run_numbered`). Tiles run one after another, unless an implementation of their kernel is
registered with `run_tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, singledispatch

import torch

from weft import _core
from weft.runtime.cpu.places import Place, Places, size
from weft.runtime.cpu.sizes import numbered, parts_of
from weft.runtime.elementwise import ELEMENTWISE
from weft.runtime.scaled_matmul import scaled_matmul
from weft.schedule import (
    SCALED_MATMULS,
    Agree,
    Collective,
    Compute,
    Copy,
    Reduce,
    Region,
    Set,
    Step,
    Tiles,
    Wait,
    value,
)
from weft.schedule.expr import PrefixSums
from weft.schedule.kernels import TileKernel

_ADDED = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@singledispatch
def bind(step: Step, places: Places, rows: tuple[int, ...]) -> Callable[[], object]:
    """Return a function without arguments that runs `step`, whose expressions have been replaced by numbers.

    To add a step kind, decorate its implementation with `bind.register`.

    places: the addresses of buffers and counters. rows: for a collective, the number of rows that each rank contributes.
    """
    raise AssertionError(f"a check should have refused {step}")


@singledispatch
def run_tiles(kernel: TileKernel, step: Tiles, places: Places, known: Mapping[str, PrefixSums]) -> None:
    """Run the tiles of a step one after another.

    To implement a kernel differently, register a function with `run_tiles.register`. The executor then does not check the
    kernel's tiles. The function applies only to the registered class: a schedule with a kernel of a subclass is refused.

    kernel: the kernel of `step`, with numbers in place of dynamic sizes. places: the addresses of buffers and counters.
    known: the dynamic sizes that the step's lane has read, by the name of their buffer.
    """
    run_numbered(step, places, known)


def run_numbered(step: Step, places: Places, known: Mapping[str, PrefixSums], rows: tuple[int, ...] = ()) -> None:
    """Replace the expressions of a step by numbers, and run it. Tiles run one after another.

    known: the dynamic sizes that the step's lane has read, by the name of their buffer.
    """
    parts = places.parts.get(id(step)) or parts_of(step)
    for inner in numbered(step, parts, known, places.size_of):
        bind(inner, places, rows)()


def is_bound(step: Step) -> bool:
    """True if an implementation of this step kind is registered with `bind`."""
    return bind.dispatch(type(step)) is not bind.dispatch(object)


def has_own_kernel(step: Step) -> bool:
    kernel = step.tile_kernel
    return kernel is not None and run_tiles.dispatch(type(kernel)) is not run_tiles.dispatch(object)


def inherited_kernel(step: Step) -> str:
    """Return "" if the kernel of `step` has an implementation of its own, or none at all. If only a base class of the kernel
    has an implementation, return the base class's name (`kind`). The executor refuses such a kernel, because the base
    class's implementation may be wrong for it.
    """
    if step.tile_kernel is None or type(step.tile_kernel) in run_tiles.registry or not has_own_kernel(step):
        return ""
    bases = (base for base in type(step.tile_kernel).__mro__ if issubclass(base, TileKernel))
    return next(base.kind for base in bases if base in run_tiles.registry)


@bind.register
def _copy(step: Copy, places: Places, rows: tuple[int, ...]) -> Callable[[], object]:
    source, target = places.place(step.src), places.place(step.dst)
    n_rows, cols = size(step.src)
    begin, to = source.address(step.src), target.address(step.dst)
    if step.accumulate:
        dtype = _ADDED[source.flat.dtype]
        return partial(_core.add_2d, to, target.pitch, begin, source.pitch, cols, n_rows, dtype)
    return partial(_core.copy_2d, to, target.pitch, begin, source.pitch, cols * source.flat.itemsize, n_rows)


@bind.register
def _compute(step: Compute, places: Places, rows: tuple[int, ...]) -> Callable[[], object]:
    inputs = [places.view(region) for region in step.inputs]
    if step.accumulate and places.is_updated_elsewhere(step.out):
        make = partial(_arithmetic, step.op, inputs=inputs, accumulate=False)
        return partial(_add_at_once, places.place(step.out), step.out, make)
    return _arithmetic(step.op, places.view(step.out), inputs, step.accumulate)


@bind.register
def _reduce(step: Reduce, places: Places, rows: tuple[int, ...]) -> Callable[[], object]:
    parts = [places.view(region) for region in step.parts]
    out = places.view(step.out)
    if step.norm is not None:
        norm = places.view(step.norm.out), places.view(step.norm.weight), step.norm.eps
        return partial(_norm, out, *norm) if step.norms_only else partial(_sum_and_norm, out, parts, *norm)
    if not step.accumulate:
        return partial(_sum, out, parts)
    return partial(_add_at_once, places.place(step.out), step.out, lambda made: partial(_sum, made, parts))


@bind.register
def _collective(step: Collective, places: Places, rows: tuple[int, ...]) -> Callable[[], object]:
    src, dst = places.view(step.src), places.view(step.dst)
    if step.op == "exchange":
        return partial(places.run.exchange, [value(n) for n in step.sent], [value(n) for n in step.received], src, dst)
    if step.op == "all_reduce":
        return partial(places.run.all_reduce, src, dst)
    if step.op == "reduce_scatter":
        return partial(places.run.reduce_scatter, rows, src, dst)
    return partial(places.run.all_gather, rows, src, dst)


@bind.register
def _agree(step: Agree, places: Places, rows: tuple[int, ...]) -> Callable[[], object]:
    expected, out = places.view(step.expected), places.view(step.out)
    sent = places.view(step.sent).unflatten(0, (len(expected), -1))[:, value(step.row)]
    return partial(_spoil, expected, sent, out)


@bind.register
def _set(step: Set, places: Places, rows: tuple[int, ...]) -> Callable[[], object]:
    return partial(_core.signal_add, places.counter(step.signal, step.index, value(step.at)), 1)


@bind.register
def _wait(step: Wait, places: Places, rows: tuple[int, ...]) -> Callable[[], object]:
    if step.previous:  # satisfied: a run begins on a rank when the previous run has ended on all ranks
        return _nothing
    setters = places.setters(step)
    ranks = tuple(dict.fromkeys(setters))
    sources = places.senders(step)
    peer = places.rank if sources and set(sources) == set(ranks) else ranks[0] if len(ranks) == 1 else None
    return partial(
        places.run.wait,
        places.counter(step.signal, step.index, places.rank),
        places.number(step.signal, step.index),
        value(step.count) - len(setters),
        f"signal {step.signal}[{step.index}] of schedule {places.run.name}",
        peer,
        sources,
    )


def _nothing() -> None: ...


def _arithmetic(op: str, out: torch.Tensor, inputs: list[torch.Tensor], accumulate: bool) -> Callable[[], object]:
    if op in SCALED_MATMULS:
        return partial(scaled_matmul, *inputs, fast=op == "scaled_matmul_fast", out=out)
    if op == "matmul":
        return partial(torch.addmm, out, *inputs, out=out) if accumulate else partial(torch.mm, *inputs, out=out)
    if op == "addmm":
        a, b, c = inputs
        return partial(torch.addmm, c, a, b, out=out)
    if not accumulate:
        return partial(ELEMENTWISE[op].into, *inputs, out=out)
    return partial(_add_to, out, partial(ELEMENTWISE[op].into, *inputs, out=torch.empty_like(out)))


def _sum(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    total = parts[0] if out.dtype == torch.float64 else parts[0].float()
    for part in parts[1:]:
        total = total + part
    out.copy_(total)


def _norm(out: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    normed.copy_(torch.nn.functional.rms_norm(out, weight.shape[1:], weight[0], eps))


def _sum_and_norm(
    out: torch.Tensor, parts: list[torch.Tensor], normed: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:  # fmt: skip
    _sum(out, parts)
    _norm(out, normed, weight, eps)


def _spoil(expected: torch.Tensor, sent: torch.Tensor, out: torch.Tensor) -> None:
    parts = out.split(expected.sum(1).tolist())
    for part, differs in zip(parts, (expected != sent).any(1).tolist(), strict=True):
        if differs:
            part.fill_(torch.nan)


def _add_at_once(place: Place, region: Region, make: Callable[[torch.Tensor], Callable[[], object]]) -> None:
    """Compute a matrix, and add it to `region` with atomic additions: peers and other lanes may add to the same elements.

    place: the memory of the region's buffer.
    make: a function that gets a tensor, and returns a function that computes the matrix into this tensor.
    """
    rows, cols = size(region)
    made = torch.empty(rows, cols, dtype=place.flat.dtype, device="cpu")
    make(made)()
    dtype = _ADDED[made.dtype]
    _core.add_2d(place.address(region), place.pitch, made.data_ptr(), cols * made.itemsize, cols, rows, dtype)


def _add_to(out: torch.Tensor, call: Callable[[], torch.Tensor]) -> None:
    out.add_(call())
