"""The serial schedule as a user would write it: torch's collectives and GEMMs, one after the other, on one stream or
thread.

The schedule needs no symmetric memory and no set-up on the device, so a call costs as much as its torch calls. The
constructor of `Unfused` makes a function from each step. A step allocates the buffer that it writes. CPU ranks synchronise
before every collective (`weft.runtime.unfused.turn`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, singledispatch
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from weft import _core
from weft.errors import ScheduleError
from weft.runtime.collectives import (
    COALESCING,
    EXCHANGE,
    EXCHANGE_ASYNC,
    GATHER,
    REDUCE,
    SCATTER,
    all_gather_single,
    exchange_now,
    gather_now,
    reduce_now,
    scatter_now,
)
from weft.runtime.elementwise import ELEMENTWISE
from weft.runtime.layouts import READER
from weft.runtime.scaled_matmul import scaled_matmul
from weft.runtime.schedule_memory import TORCH_DTYPE, Tensors
from weft.runtime.unfused.collectives import all_gather, all_reduce, all_reduce_, reduce_scatter, reduce_scatter_
from weft.runtime.unfused.turn import STRAIGHT, Turn
from weft.runtime.unfused.unpack import side_by_side
from weft.schedule import SCALED_MATMULS, Collective, Compute, Copy, Reduce, Region, Schedule, Step, Tiles
from weft.schedule.spans import span_name
from weft.schedule.steps import of_kind

Call: TypeAlias = Callable[[Tensors, Turn, dist.ProcessGroup], None]
TORCH = None
if READER is not None:
    TORCH = _core.TorchCalls(
        reader=READER, mm=torch.mm, scaled_mm=torch._scaled_mm, scaled_elsewhere=scaled_matmul, byte=torch.uint8,
        gather=gather_now, gather_options=GATHER, scatter=scatter_now, scatter_options=SCATTER, reduce=reduce_now,
        reduce_options=REDUCE, exchange=exchange_now, exchange_options=EXCHANGE,
        async_options=EXCHANGE_ASYNC,
    )  # fmt: skip


class Unfused:
    """The steps of a serial schedule on `rank`, as torch calls. The number of rows of a call may differ from the
    schedule's, if it is the same on all ranks.

    The constructor raises `ScheduleError` for a step kind that is not registered with `bind`, and for a step that writes
    only a part of a buffer.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.buffers = {buffer.name: buffer for buffer in schedule.buffers_of_rank(rank)}
        (lane,) = schedule.of_rank(rank)
        self._calls = [bind(step, self) for step in lane.steps]
        made = {access.region.buffer for step in lane.steps for access in step.accesses() if access.writes}
        made |= {_columns(step, self)[1] for step in of_kind(lane.steps, Tiles)}
        self._empty = [b for b in self.buffers.values() if b.role == "output" and b.name not in made]
        self.collectives = [self.name_of(step) for step in of_kind(lane.steps, Collective)]
        """The names of the collectives, in order."""
        self._lacks_collective = schedule.world_size > 1 and not any(step.meets for step in lane.steps)
        self._plain = [_plain(step, self) for step in lane.steps]
        self.plain: _core.PlainSteps | None = None
        """All steps as one native call, for any number of rows; None if a step does not read and write whole matrices.
        """
        if TORCH is not None and None not in self._plain and not self._empty:
            self.plain = _core.PlainSteps(TORCH, self.order, self._plain, schedule.world_size)

    @property
    def only_scales(self) -> set[str]:
        """The names of the buffers that are used only as scales of scaled GEMMs. For such a buffer, a caller may also pass a
        tensor of another shape with one element.
        """
        scales, others = set[str](), set[str]()
        for kind, out, read, _ in filter(None, self._plain):
            is_scaled = kind in SCALED_MATMULS
            scales.update(read[2:4] if is_scaled else ())
            others.update((out, *read[:2], *read[4:]) if is_scaled else (out, *read))
        return scales - others

    @property
    def order(self) -> list[str]:
        """The names of the schedule's buffers, inputs first."""
        return sorted(self.buffers, key=lambda name: self.buffers[name].role != "input")

    def run(self, inputs: Tensors, turn: Turn, group: dist.ProcessGroup) -> Tensors:
        """Run all steps of the schedule. Return all buffers by name.

        turn: runs the collectives, with a rendezvous before each on CPU, and records the times of the steps.
        """
        if turn is STRAIGHT and self.plain is not None and group not in COALESCING:
            return self.plain.run(inputs, group)
        tensors = dict(inputs)
        if (
            self._lacks_collective
        ):  # nothing is sent, but a rank must not make its next call while its peers make this one
            turn.meet("an empty call")
        for call in self._calls:
            call(tensors, turn, group)
        for buffer in self._empty:
            like = next(iter(inputs.values()))
            tensors[buffer.name] = like.new_empty(int(buffer.rows), buffer.cols, dtype=TORCH_DTYPE[buffer.dtype])
        return tensors

    # --- binding of steps ---

    def name_of(self, step: Step) -> str:
        return span_name(step, self.rank)

    def made(self, region: Region) -> str:
        """Return the name of the buffer that a step writes, given the `region` that it writes. Raise `ScheduleError` unless
        `region` is the whole buffer.
        """
        if not self.is_whole(region):
            raise ScheduleError(
                f"schedule {self.schedule.name}: a step writes {region}, but a step that runs as a torch call must write a whole "
                f"buffer: give {region} a buffer of its own"
            )
        return region.buffer

    def is_temporary(self, step: Collective) -> bool:
        """True if no step other than `step` reads the source of `step`, so that `step` may overwrite the source."""
        name = step.src.buffer
        (lane,) = self.schedule.of_rank(self.rank)
        readers = [one for one in lane.steps if any(a.region.buffer == name and not a.writes for a in one.accesses())]
        return readers == [step] and self.is_whole(step.src) and self.buffers[name].role not in ("input", "output")

    def is_whole(self, region: Region) -> bool:
        buffer = self.buffers[region.buffer]
        return (region.row, region.rows, region.col, region.cols, region.at) == (
            0, buffer.rows, 0, buffer.cols, self.rank,
        )  # fmt: skip

    def view(self, region: Region) -> Callable[[Tensors], torch.Tensor]:
        name, buffer = region.buffer, self.buffers[region.buffer]
        (row, rows), (col, cols) = ((int(a), int(n)) for a, n in ((region.row, region.rows), (region.col, region.cols)))
        if (row, rows, col, cols) == (0, buffer.rows, 0, buffer.cols):
            return lambda t: t[name]
        return lambda t: t[name].narrow(0, row, rows).narrow(1, col, cols)

    def rows_of_ranks(self, step: Collective, of: Callable[[Collective], Region]) -> list[int]:
        """Return, for each rank, the number of rows of a region (source or destination) of the collective `step`.

        of: a function that returns the region of a collective, such as its source.
        """
        world = range(self.schedule.world_size)
        of_ranks = [of_kind(self.schedule.of_rank(r)[0].steps, Collective) for r in world]
        number = of_ranks[self.rank].index(step)
        return [int(of(steps[number]).rows) for steps in of_ranks]


def _plain(step: Step, here: Unfused) -> tuple[str, str, tuple[str, ...], Any] | None:
    """Describe a step for `_core.PlainSteps`, which runs steps in native code. Return (kind, output buffer, input buffers,
    dtype or function). Return None if native code does not support the step.
    """
    if isinstance(step, Tiles):
        src, dst = _columns(step, here)
        return "called", dst, (src,), partial(side_by_side, world_size=here.schedule.world_size)
    if here.schedule.world_size == 1 or not all(here.is_whole(access.region) for access in step.accesses()):
        return None
    if isinstance(step, Compute) and step.op in ("matmul", *SCALED_MATMULS) and not step.accumulate:
        names = tuple(region.buffer for region in step.inputs)
        return step.op, step.out.buffer, names, TORCH_DTYPE[here.buffers[step.out.buffer].dtype]
    if (
        not isinstance(step, Collective)
        or step.op not in _COLLECTIVES
        or here.buffers[step.src.buffer].dtype == "int64"
    ):
        return None
    rows = here.rows_of_ranks(step, lambda s: s.src if step.op == "all_gather" else s.dst)
    if len(set(rows)) > 1 or (step.op == "all_reduce" and step.src != step.dst):
        return None
    return step.op, step.dst.buffer, (step.src.buffer,), TORCH_DTYPE[here.buffers[step.dst.buffer].dtype]


@singledispatch
def bind(step: Step, here: Unfused) -> Call:
    """Return a function that runs a step by torch. To add a step kind, decorate its implementation with `bind.register`."""
    raise ScheduleError(
        f"schedule {here.schedule.name}: no torch call runs steps of kind {step.kind!r}, such as {step}: use a collective, "
        "compute, copy or reduce step"
    )


@bind.register
def _collective(step: Collective, here: Unfused) -> Call:
    if step.op not in _COLLECTIVES:
        raise ScheduleError(f"schedule {here.schedule.name}: no torch call runs {step}: use {', '.join(_COLLECTIVES)}")
    src, dst, name, role = (
        here.view(step.src),
        here.made(step.dst),
        here.name_of(step),
        here.buffers[step.dst.buffer].role,
    )
    if here.schedule.world_size == 1:  # there are no peers

        def alone(t: Tensors, turn: Turn, group: dist.ProcessGroup) -> None:
            t[dst] = src(t).clone() if role == "output" else src(t)

        return alone
    rows = here.rows_of_ranks(step, lambda s: s.src if step.op == "all_gather" else s.dst)
    world, rank, even = here.schedule.world_size, here.rank, len(set(rows)) == 1
    together, simple = _COLLECTIVES[step.op], step.op == "all_gather" and even
    parts = world if step.op == "reduce_scatter" else 1
    if step.op == "all_reduce" and step.src == step.dst:
        together = all_reduce_
    if step.op == "reduce_scatter" and here.is_temporary(step):
        together = reduce_scatter_

    def call(t: Tensors, turn: Turn, group: dist.ProcessGroup) -> None:
        x = src(t)
        if simple and turn is STRAIGHT and x.itemsize > 1:  # most calls on GPUs
            t[dst] = gathered = x.new_empty(world * x.shape[0], x.shape[1])
            all_gather_single(gathered, x, group=group)
        else:
            t[dst] = together(x, [x.shape[0] // parts] * world if even else rows, rank, group, turn, name)

    return call


@bind.register
def _compute(step: Compute, here: Unfused) -> Call:
    out, inputs, name = here.made(step.out), [here.view(region) for region in step.inputs], here.name_of(step)
    dtype = TORCH_DTYPE[here.buffers[out].dtype]

    def done(t: Tensors, turn: Turn, result: torch.Tensor) -> None:
        t[out] = turn.done(name, result)

    if step.op == "matmul":
        a, b = inputs
        if step.accumulate:
            return lambda t, turn, group: done(t, turn, torch.addmm(t[out], a(t), b(t)))
        return lambda t, turn, group: done(t, turn, torch.mm(a(t), b(t)))
    if step.op == "addmm":
        a, b, c = inputs
        return lambda t, turn, group: done(t, turn, torch.addmm(c(t), a(t), b(t)))
    if step.op in SCALED_MATMULS:
        fast = step.op == "scaled_matmul_fast"

        def scaled(t: Tensors, turn: Turn, group: dist.ProcessGroup) -> None:
            operands = [x(t) for x in inputs]
            y = torch.empty(operands[0].shape[0], operands[1].shape[1], dtype=dtype, device=operands[0].device)
            scaled_matmul(*operands, fast=fast, out=y)
            done(t, turn, y)

        return scaled
    if step.op not in ELEMENTWISE or step.accumulate:
        raise ScheduleError(
            f"schedule {here.schedule.name}: no torch call runs {step}: use matmul, addmm or {', '.join(ELEMENTWISE)}"
        )
    op = ELEMENTWISE[step.op].call
    return lambda t, turn, group: done(t, turn, op(*(x(t) for x in inputs)))


@bind.register
def _copy(step: Copy, here: Unfused) -> Call:
    src, dst = here.view(step.src), here.made(step.dst)

    def call(t: Tensors, turn: Turn, group: dist.ProcessGroup) -> None:
        t[dst] = src(t).clone()

    return call


@bind.register
def _tiles(step: Tiles, here: Unfused) -> Call:
    (src, dst), name, world = _columns(step, here), here.name_of(step), here.schedule.world_size

    def call(t: Tensors, turn: Turn, group: dist.ProcessGroup) -> None:
        t[dst] = turn.done(name, side_by_side(t[src], world))

    return call


def _columns(step: Tiles, here: Unfused) -> tuple[str, str]:
    """Return the names of two buffers (src, dst) of a tile kernel. The kernel reads the ranks' matrices, which are one below
    the other in `src`, and copies them side by side into `dst`. Raise `ScheduleError` for other kernels.
    """
    bodies, world = [step.tile(number) for number in range(int(step.extent))], here.schedule.world_size
    copies = [one for body in bodies for one in of_kind(body, Copy) if not one.accumulate]
    if len(copies) == len(bodies) == world:
        src, dst = here.buffers[copies[0].src.buffer], here.buffers[copies[0].dst.buffer]
        m, n = dst.rows, src.cols
        wanted = [
            (Region(src.name, rank * m, m, 0, n, here.rank), Region(dst.name, 0, m, rank * n, n, here.rank))
            for rank in range(world)
        ]
        if (src.rows, dst.cols) == (world * m, world * n) and [(one.src, one.dst) for one in copies] == wanted:
            return src.name, dst.name
    raise ScheduleError(
        f"schedule {here.schedule.name}: no torch call runs kernel {step.kernel.name} in {step}: a serial schedule may use a "
        "kernel only to copy gathered row blocks to column blocks, one for each rank. Use other steps, or override `unfused` "
        "of the operator"
    )


@bind.register
def _reduce(step: Reduce, here: Unfused) -> Call:
    out, parts = here.made(step.out), [here.view(part) for part in step.parts]

    def add(t: Tensors, turn: Turn, group: dist.ProcessGroup) -> None:
        first = parts[0](t)
        total = first if first.dtype == torch.float64 else first.float()
        for part in parts[1:]:
            total = total + part(t)
        t[out] = total.to(parts[0](t).dtype)

    if step.norm is None:
        return add
    normed, weight, eps = here.made(step.norm.out), here.view(step.norm.weight), step.norm.eps

    def call(t: Tensors, turn: Turn, group: dist.ProcessGroup) -> None:
        if not step.norms_only:
            add(t, turn, group)
        t[normed] = torch.nn.functional.rms_norm(t[out], weight(t).shape[1:], weight(t)[0], eps)

    return call


_COLLECTIVES: dict[str, Callable[..., torch.Tensor]] = {
    "all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce,
}  # fmt: skip
