"""What the streams of a run do with sizes that only the run knows (`weft.schedule.steps.Read`).

Read by the device: one small kernel adds up every number that the lane's copies need, and these find them in its memory.
Read by the host: it waits until the buffer's contents have come, with the deadline that the watching thread keeps; then
copy engines are told sizes as numbers, and outputs are made that have as many rows as came.

Tiles are taken by kernels that know their form: GEMMs of segments by `weft.runtime.grouped_matmul`. `segments_of` makes sure
that a step is of that form, by comparing its numbers with the kernel's for made-up contents.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft import _core
from weft.errors import ScheduleError
from weft.kernels import totals as device_code
from weft.runtime.move import _loaded as loaded
from weft.schedule import ITEM_BYTES, Compute, Copy, Expr, Index, Read, Schedule, Tiles
from weft.schedule.expr import Total
from weft.schedule.steps import put_in, variables_of

if TYPE_CHECKING:
    from weft.runtime.schedule_cuda import CudaSchedule

Tensors = dict[str, torch.Tensor]
_BLOCK = 128


def is_late(step: Any) -> bool:
    """Whether a step of a rank has sizes or places that only the run knows."""
    return isinstance(step, Copy | Compute | Tiles) and bool(variables_of(step))


def reads_on_host(schedule: Schedule) -> bool:
    return any(isinstance(s, Read) and s.by == "host" for lane in schedule.lanes for s in lane.steps)


class Totals:
    """Numbers that the device adds up from what `held` holds."""

    def __init__(self, held: torch.Tensor, indices: Sequence[Index]) -> None:
        parts = [index.totals() if isinstance(index, Expr) else (index, ()) for index in indices]
        most = max((len(terms) for _, terms in parts), default=0)
        rows = [[_term(t) for t in terms] + [(0, 0, 1)] * (most - len(terms)) for _, terms in parts]
        device = held.device
        self._held, self._n_terms = held, most
        self._terms = torch.tensor(rows, dtype=torch.int64, device=device)
        self._constants = torch.tensor([constant for constant, _ in parts], dtype=torch.int64, device=device)
        self.numbers = torch.zeros(len(parts), dtype=torch.int64, device=device)
        self._compiled = _compiled_totals(device)

    def launch(self) -> None:
        grid = (len(self.numbers), 1, 1)
        self._compiled[grid](self._held, self._terms, self._constants, self.numbers, self._n_terms, _BLOCK)

    def address(self, number: int) -> int:
        return self.numbers.data_ptr() + 8 * number


def _term(total: Total) -> tuple[int, int, int]:
    return total.first, max(0, -(-(total.end - total.first) // total.step)), total.step


@lru_cache(maxsize=16)
def _compiled_totals(device: torch.device) -> Any:
    return loaded(device, device_code.totals_kernel, [torch.int64] * 4 + [1], 1, {"BLOCK": _BLOCK})


class HostRead:
    """The host learns what a buffer holds, once in a run, and makes the outputs whose rows follow from it."""

    def __init__(self, owner: CudaSchedule, buffer: str) -> None:
        self.owner, self.buffer, self._held = owner, buffer, owner.own[buffer]
        self._copy = torch.zeros(self._held.shape, dtype=torch.int64, pin_memory=True)
        self._come = torch.cuda.Event()

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        owner = self.owner
        if self.buffer in owner.known:
            return
        self._copy.copy_(self._held, non_blocking=True)
        self._come.record()
        self._come.synchronize()  # a wait that never ends is ended by the watching thread
        owner.check()
        owner.known[self.buffer] = tuple(self._copy.flatten().tolist())
        for i, buffer in enumerate(owner.given):
            make = tensors[buffer.name]
            if callable(make) and variables_of(buffer.rows) <= owner.known.keys():
                tensors[buffer.name] = made = make(put_in(buffer.rows, owner.known))
                bases[i] = made.data_ptr()


class LateCopy:
    """A copy by a copy engine, of a size that the host has read."""

    def __init__(self, owner: CudaSchedule, step: Copy, source: tuple[int, int], target: tuple[int, int]) -> None:
        """source, target: number of the base address, and bytes from row to row."""
        self.owner, self.step, self.source, self.target = owner, step, source, target

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        step: Copy = put_in(self.step, self.owner.known)
        (src, pitch), (dst, to_pitch) = self.source, self.target
        src_region, dst_region = step.src, step.dst
        first, rows, begin = int(src_region.row), int(src_region.rows), int(dst_region.row)
        self.owner.require_inside(src_region, tensors)
        self.owner.require_inside(dst_region, tensors)
        if not rows:
            return
        program = _core.StreamProgram(2, 1, 0)
        offset = self.owner.layout.buffers.get(dst_region.buffer, 0)
        program.copy(0, 1, offset + begin * to_pitch, to_pitch * rows, 0, first * pitch, pitch * rows, pitch * rows, 1)
        stream = torch._C._cuda_getCurrentRawStream(self.owner.device.index)
        program.run(0, 1, [bases[src], bases[dst]], [stream], 0)


class Segments(NamedTuple):
    """What `weft.runtime.grouped_matmul` must be told of a step. first_source, n_sources: ranks from this one on."""

    counts: str
    tokens: str
    inbox: str | None
    weights: str
    y: str
    experts: int
    slot_rows: int
    first_source: int
    n_sources: int


def segments_of(step: Tiles, schedule: Schedule, rank: int) -> Segments:
    """`ScheduleError` if the step is none that the kernel does. See `weft.kernels.grouped_matmul` for its formulas."""
    trouble = ScheduleError(
        f"schedule {schedule.name}: streams cannot run tiles of {step.kernel} as they are: {step}; they know GEMMs of "
        f"segments, as `weft.schedule.dispatch` writes them"
    )
    world = schedule.world_size
    if len(step.body) != 1 or not isinstance(step.body[0], Compute) or step.body[0].op != "matmul":
        raise trouble
    out, (x, w) = step.body[0].out, step.body[0].inputs
    names = variables_of(step)
    extent = int(step.extent)
    k = schedule.buffer(x.buffer).cols
    all_rows = schedule.buffer(w.buffer).rows
    if len(names) != 1 or not isinstance(all_rows, int) or not isinstance(w.rows, int) or w.rows != k or not extent:
        raise trouble
    counts, experts = names.pop(), all_rows // k
    if extent % experts or schedule.buffer(counts).cols != world * experts:
        raise trouble
    symmetric = schedule.buffer(x.buffer).role == "symmetric"
    slots = schedule.buffer(x.buffer).rows if symmetric else 0
    slot_rows = int(slots) // max(1, world - 1)
    choose = random.Random(extent)
    sample = [[choose.randint(0, 9) for _ in range(world * experts)] for _ in range(world)]
    values = {counts: tuple(n for row in sample for n in row)}
    # Which sources they are is not written anywhere: those whose numbers fit, in whatever order, for tiles have none.
    numbered: Tiles = put_in(step, values)
    tiles = [numbered.tile(t)[0] for t in range(extent)]
    said = sorted((int(c.out.row), int(c.out.rows), int(c.inputs[0].row), int(c.inputs[1].row) // k) for c in tiles)
    for first in range(world):
        found = [_segment(sample, rank, first + t // experts, t % experts, experts, slot_rows) for t in range(extent)]
        if sorted(found) == said:
            others = next((b.name for b in schedule.buffers if b.role == "symmetric" and b.name != counts), None)
            tokens = next(b.name for b in schedule.buffers if b.role == "input" and isinstance(b.rows, Expr))
            inbox = x.buffer if symmetric else others
            return Segments(counts, tokens, inbox, w.buffer, out.buffer, experts, slot_rows, first, extent // experts)
    raise trouble


def _segment(
    counts: list[list[int]], rank: int, turn: int, expert: int, experts: int, slot_rows: int
) -> tuple[int, int, int, int]:
    """(row of y, rows, row of x, expert) of the source `turn` ranks on."""
    world, mine = len(counts), rank * experts
    source = (rank + turn) % world
    y = sum(counts[s][mine + e] for s in range(world) for e in range(expert))
    y += sum(counts[s][mine + expert] for s in range(source))
    block = sum(counts[rank][:mine]) if source == rank else (source - rank - 1) % world * slot_rows
    return y, counts[source][mine + expert], block + sum(counts[source][mine : mine + expert]), expert


class GroupedMatmul:
    """The GEMMs of a step's segments as one launch. `spare`: multiprocessors that are left to copies."""

    def __init__(self, owner: CudaSchedule, segments: Segments, expected_rows: float, spare: int) -> None:
        self.owner, self.segments, self._spare = owner, segments, spare
        schedule = owner.schedule
        y = schedule.buffer(segments.y)
        k = schedule.buffer(segments.tokens).cols
        from weft.runtime import grouped_matmul  # here, and not above: it needs a newer Triton than the rest

        self._library = grouped_matmul
        item = ITEM_BYTES[schedule.buffer(segments.tokens).dtype]
        self._config = grouped_matmul.choose_config(item, expected_rows, y.cols, k)

    def prepare(self, tensors: Tensors) -> None:
        self._library.prepare(self._weights(tensors), world_size=self.owner.domain.world_size, config=self._config)

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        s, owner = self.segments, self.owner
        counts, mine = owner.own[s.counts], owner.rank * s.experts
        tokens = tensors[s.tokens]
        inbox = owner.own[s.inbox] if s.inbox else tokens
        self._library.launch(
            tokens, inbox, self._weights(tensors), tensors[s.y], counts[:, mine : mine + s.experts], counts[owner.rank],
            rank=owner.rank, slot_rows=s.slot_rows, config=self._config, first_source=s.first_source, n_sources=s.n_sources,
            spare=self._spare,
        )  # fmt: skip

    def _weights(self, tensors: Tensors) -> torch.Tensor:
        w = tensors[self.segments.weights]
        return w if w.dim() == 3 else w.unflatten(0, (self.segments.experts, -1))
