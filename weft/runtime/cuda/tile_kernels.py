"""Launches of weft's tile kernels, which run `Tiles` steps. The step's `kernel` (`weft.schedule.kernels`) selects the launch.

To run another kernel on GPUs, register a function with `tiles_call.register`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
import torch

from weft import _core
from weft.errors import ScheduleError
from weft.runtime.cuda.context import Context, Tensors
from weft.runtime.cuda.kernel_call import Base
from weft.runtime.cuda.regions import Regions
from weft.runtime.cuda.scratch import Scratch
from weft.runtime.cuda.sizes import is_dynamic
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import ITEM_BYTES, PLAIN_MATMULS, Compute, Copy, Expr, Index, Set, Step, Tiles
from weft.schedule.kernels import (
    FEW_ROWS,
    GroupedMatmul,
    OnlyExpertMatmul,
    Permute,
    ReturningMatmul,
    SortedMatmul,
    TileKernel,
    TrackedMatmul,
)
from weft.schedule.steps import SPARED_UNITS, of_kind, substitute, variables_of

_PADDED = 1.25
"""If a tensor has at most this number of times the expected rows, cuBLAS multiplies all of them (`OnlyExpertCall`)."""


class TilesCall:
    """The base class of launches, each of which runs a `Tiles` step of a schedule as one kernel.

    writes_outputs: False if the kernel writes only the schedule's own memory. Such a launch is not repeated when
        `sizes.ReadAhead` has allocated a larger output.
    """

    writes_outputs = True

    def record(self, program: _core.StreamProgram, stream: int, tensors: Tensors) -> bool:
        """Record the launch into `program`, on the program's stream number `stream`, and load its kernels. Return False if Python
        must make the launch in each run; `prepare` then loads the kernels.

        tensors: the tensors of a run. Later runs may have other addresses, and other numbers of rows where the schedule leaves
            them open.
        """
        return False

    def prepare(self, tensors: Tensors) -> None:
        """Load the kernels that the launch needs. Call this method before any stream waits for a peer."""

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        """Enqueue the kernel of the step on the current stream. tensors: the run's tensors. bases: the run's base addresses
        (`Regions`).
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TilesLane:
    """The lane of a `Tiles` step, with the data that the launch of the step needs.

    scratch: memory that the lane's launches share.
    partials_at: the index of the address of this memory in `Regions.bases`, in every run.
    sizes: for each step of dynamic size (by its `id`), the device address of its sizes.
    words_set: a function of (rank, signal, index). It returns the addresses of the flag words in the memory of `rank` that
        a `Set` of `signal[index]` writes.
    """

    context: Context
    regions: Regions
    name: str
    scratch: Scratch
    partials_at: int
    sizes: Mapping[int, int]
    words_set: Callable[[int, str, int], list[int]]

    def is_last(self, step: Tiles) -> bool:
        """True if `step` is the last `Tiles` step of the lane."""
        return step is [s for at, s in self.context.order if at == self.name and s.tile_kernel][-1]


@singledispatch
def tiles_call(kernel: TileKernel, step: Tiles, lane: TilesLane) -> TilesCall:
    """Return the launch of `step`, whose kernel is `kernel`."""
    raise AssertionError(f"a check should have refused {step}")


@tiles_call.register(GroupedMatmul)
@tiles_call.register(SortedMatmul)
@tiles_call.register(ReturningMatmul)
def _grouped_matmul(kernel: GroupedMatmul | SortedMatmul | ReturningMatmul, step: Tiles, lane: TilesLane) -> TilesCall:
    context = lane.context
    expected = next(held.expected[context.rank] for held in context.schedule.contents if held.buffer == kernel.counts)
    # Copies by kernel on other lanes run concurrently with every GEMM, except the last GEMM that waits for the copied rows. All
    # other GEMMs leave multiprocessors free for them.
    sending = any(s.copies_by == "kernel" and is_dynamic(s) for at, s in context.order if at != lane.name)
    beside = sending and (not lane.is_last(step) or isinstance(kernel, ReturningMatmul))
    spare = SPARED_UNITS if beside else 0
    rows = sum(expected) / max(1, len(expected))
    return GroupedMatmulCall(context, lane.regions, kernel, rows, spare, lane.scratch, lane.partials_at)


@tiles_call.register
def _only_expert(kernel: OnlyExpertMatmul, step: Tiles, lane: TilesLane) -> TilesCall:
    return OnlyExpertCall(lane.context, kernel, lane.scratch)


@tiles_call.register
def _permute(kernel: Permute, step: Tiles, lane: TilesLane) -> TilesCall:
    if id(step) not in lane.sizes:
        raise ScheduleError(
            f"{step}: on GPUs, a Read step earlier in the same lane must read the sizes of a permutation"
        )
    return PermuteCall(lane.context, lane.regions, permuted(step), lane.sizes[id(step)])


@tiles_call.register
def _tracked_matmul(kernel: TrackedMatmul, step: Tiles, lane: TilesLane) -> TilesCall:
    return TrackedMatmulCall(lane.context, lane.regions, kernel, step, lane.words_set)


def permuted(step: Step) -> list[Copy]:
    """Return the copies that the tiles of `step` make, grouped by source buffer. The kernel of `step` is `Permute`."""
    assert isinstance(step, Tiles)
    tiles = [of_kind(substitute(step.body, {step.index: number}, partially_evaluated=True), Copy)
             for number in range(int(step.extent))]  # fmt: skip
    return sorted(itertools.chain(*tiles), key=lambda copy: copy.src.buffer)


class GroupedMatmulCall(TilesCall):
    """The launch of a step with the kernel `GroupedMatmul`, `SortedMatmul` or `ReturningMatmul` (`weft.schedule.kernels`): a
    GEMM over the rows of several experts.

    spare: the number of multiprocessors to leave to copies. scratch: memory that the lane's launches share.
    partials_at: the index of the address of this memory in `Regions.bases`, in every run.
    """

    def __init__(
        self,
        context: Context,
        regions: Regions,
        s: GroupedMatmul | SortedMatmul | ReturningMatmul,
        expected_rows: float,
        spare: int,
        scratch: Scratch,
        partials_at: int,
    ) -> None:
        from weft.runtime.cuda import grouped_matmul  # imported here: it needs a newer Triton than the rest
        from weft.runtime.cuda.tensor_maps import tma_and_multiprocessors

        self._library, self._what, self._own, schedule = grouped_matmul, s, context.own, context.schedule
        self._context, self._regions, self._partials = context, regions, Base(partials_at, 0)
        self._back, self._world = isinstance(s, ReturningMatmul), context.comm.world_size
        self._merged = isinstance(s, SortedMatmul)
        sources, slot_rows, mine = (0, self._world), 0, context.rank * s.experts
        if isinstance(s, SortedMatmul):
            self._x, slots = s.x, context.own[s.x]
            self._k, self._adds = (0, schedule.buffer(s.x).cols), False
            counts, splits = context.own[s.counts][:, mine : mine + s.experts], context.own[s.counts][context.rank]
        elif isinstance(s, ReturningMatmul):
            sources, slot_rows = (s.first_source, s.n_sources), s.slot_rows
            self._merged = s.n_sources == self._world > 1 and expected_rows <= FEW_ROWS
            self._x, slots = s.h, regions.whole(schedule.buffer(s.outbox).part(at=int(s.at)))
            counts, splits = context.own[s.counts].unflatten(0, (2, -1))
            splits = splits.flatten()
            self._k, self._adds = (0, schedule.buffer(s.h).cols), False
        else:
            sources, slot_rows = (s.first_source, s.n_sources), s.slot_rows
            self._x, slots = s.tokens, context.own[s.inbox]
            self._k, self._adds = (s.first_k, s.n_k), s.adds
            counts, splits = context.own[s.counts][:, mine : mine + s.experts], context.own[s.counts][context.rank]
        weights, x = schedule.buffer(s.weights), schedule.buffer(self._x)
        self._whole_k = self._k == (0, x.cols)
        item, together = ITEM_BYTES[x.dtype], self._world if self._merged else 1
        self._config = grouped_matmul.choose_config(
            item, expected_rows * together, weights.cols, self._k[1], sources[1] // together * s.n_experts,
            tma_and_multiprocessors(counts.device)[1] - spare, merged=self._merged,
        )  # fmt: skip
        self._gemms = grouped_matmul.GroupedMatmulLauncher(
            self._of_k(slots), counts, splits, rank=context.rank, slot_rows=slot_rows, config=self._config,
            first_source=sources[0], n_sources=sources[1], first_expert=s.first_expert, n_experts=s.n_experts, spare=spare,
            back=self._back, adds=self._adds, merged=self._merged, scratch=scratch,
        )  # fmt: skip

    def record(self, program: _core.StreamProgram, stream: int, tensors: Tensors) -> bool:
        if (own := self._own.get(self._x)) is not None:
            x = self._library.Operand.of(self._of_k(own), self._of_k(own).data_ptr(), len(own))
        else:
            x = self._operand(self._x, self._of_k(tensors[self._x]), tensors)
        w = self._operand(self._what.weights, self._weights(tensors), tensors)
        return self._gemms.record(program, stream, x, w, self._operand(self._what.y, None, tensors), self._partials)

    def _operand(self, name: str, part: torch.Tensor | None, tensors: Tensors) -> Any:
        """Return a tensor of the caller, or its slice `part`, for a recorded launch.

        part: None for the whole tensor `name`, which may not have been allocated yet.
        """
        buffer, whole = self._context.buffers[name], tensors[name]
        if callable(whole):
            whole = part = torch.empty(1, buffer.cols, dtype=TORCH_DTYPE[buffer.dtype], device="meta")
        part = whole if part is None else part
        offset = int(part.storage_offset() - whole.storage_offset()) * part.itemsize
        rows = self._regions.rows(name) if part.dim() == 2 else len(part)
        return self._library.Operand.of(part, Base(self._regions.base(name), offset), rows)

    def prepare(self, tensors: Tensors) -> None:
        w, how = self._weights(tensors), {"back": self._back, "adds": self._adds, "merged": self._merged}
        self._library.prepare(w, world_size=self._world, config=self._config, **how)

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        x = self._own.get(self._x)
        x = tensors[self._x] if x is None else x
        self._gemms.launch(self._of_k(x), self._weights(tensors), tensors[self._what.y])

    def _weights(self, tensors: Tensors) -> torch.Tensor:
        w = tensors[self._what.weights]
        return self._of_k(w if w.dim() == 3 else w.unflatten(0, (self._what.experts, -1)))

    def _of_k(self, t: torch.Tensor) -> torch.Tensor:
        """Return the slice of `t` along dimension K that the step multiplies. The slice has columns of `t` if `t` contains the
        rows to multiply. It has rows of `t` if `t` contains weights.
        """
        return t if self._whole_k else t.narrow(1, *self._k)


class OnlyExpertCall(TilesCall):
    """The launch of a step with the kernel `OnlyExpertMatmul`.

    cuBLAS may load a kernel for a new number of rows while streams wait for peers. This cannot hang if the waits before this
    launch are all for the previous run. Every rank has issued all steps of that run before it begins this run.

    scratch: memory that the lane's launches share.
    """

    writes_outputs = False

    def __init__(self, context: Context, s: OnlyExpertMatmul, scratch: Scratch) -> None:
        from weft.runtime.cuda import grouped_matmul  # imported here: see `GroupedMatmulCall`
        from weft.runtime.cuda.tensor_maps import tma_and_multiprocessors

        self._library, self._what, world, schedule = grouped_matmul, s, context.comm.world_size, context.schedule
        expected = next(held.expected[context.rank] for held in schedule.contents if held.buffer == s.counts)
        rows, h, weights = sum(expected[:world]), schedule.buffer(s.h), schedule.buffer(s.weights)
        self._most_rows, self._made, counts = (
            int(_PADDED * rows),
            context.own[s.made][: s.rows],
            context.own[s.counts][:world],
        )
        self._how: dict[str, Any] = {"config": grouped_matmul.choose_config(
            ITEM_BYTES[h.dtype], rows, weights.cols, h.cols, 1, tma_and_multiprocessors(counts.device)[1], merged=True
        ), "merged": True}  # fmt: skip
        no_slots = self._made.new_empty(0, h.cols)
        self._gemm = grouped_matmul.GroupedMatmulLauncher(
            no_slots, counts, counts[:, 0], rank=context.rank, slot_rows=0, scratch=scratch, **self._how
        )
        self._world = world

    def prepare(self, tensors: Tensors) -> None:
        h, w = self._operands(tensors)
        self._library.prepare(w, world_size=self._world, **self._how)
        torch.mm(h, w[0], out=self._made[: len(h)])

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        h, w = self._operands(tensors)
        if len(h) <= self._most_rows:
            torch.mm(h, w[0], out=self._made[: len(h)])
        else:
            self._gemm.launch(h, w, self._made)

    def _operands(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        w = tensors[self._what.weights]
        return tensors[self._what.h][: len(self._made)], w if w.dim() == 3 else w.unsqueeze(0)


class PermuteCall(TilesCall):
    """The launch of a step with the kernel `Permute`, which copies segments of rows.

    copies: the copies of all tiles, grouped by source buffer.
    sizes: the device address of three numbers for each copy: first source row, first target row, and number of rows.
    """

    writes_outputs = False

    def __init__(self, context: Context, regions: Regions, copies: Sequence[Copy], sizes: int) -> None:
        from weft.runtime.cuda.permute import PermuteLauncher  # imported here: see `GroupedMatmulCall`

        own, *others = dict.fromkeys(copy.src.buffer for copy in copies)
        targets = {copy.dst.buffer for copy in copies}
        if len(others) > 1 or len(targets) > 1:
            raise ScheduleError(
                f"permute reads {', '.join([own, *others])} and writes {', '.join(sorted(targets))}: on GPUs, it may read "
                "at most two buffers and write one"
            )
        self._regions = regions
        self._buffers = [context.buffers[name] for name in (own, *(others or [own]), *targets)]
        last = [next(c.src for c in reversed(copies) if c.src.buffer == buffer.name) for buffer in self._buffers[:2]]
        regions_of = [*last, copies[0].dst]
        self._places = [regions.origin(region) for region in regions_of]
        own_pitch, slots_pitch, pitch = (place[2] for place in self._places)
        n_own = sum(copy.src.buffer == own for copy in copies)
        self._copies = PermuteLauncher(
            context.device, sizes, len(copies), n_own, regions.row_bytes(copies[0].src), (own_pitch, slots_pitch, pitch)
        )

    def record(self, program: _core.StreamProgram, stream: int, tensors: Tensors) -> bool:
        own, slots, target = (Base(base, offset) for base, offset, _ in self._places)
        return self._copies.record(
            program, stream, own, slots, target, [self._regions.rows(b.name) for b in self._buffers]
        )

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        own, slots, target = (bases[base] + offset for base, offset, _ in self._places)
        rows = [b.rows if isinstance(b.rows, int) else tensors[b.name].shape[0] for b in self._buffers]
        self._copies.launch(own, slots, target, (rows[0], rows[1], rows[2]))


class TrackedMatmulCall(TilesCall):
    """A launch of `TrackedMatmul`, a GEMM that sets signals when tiles are finished.

    words_set: a function of (rank, signal, index). It returns the addresses of the flag words that a `Set` of `signal[index]`
        writes in the memory of `rank`.
    """

    def __init__(
        self,
        context: Context,
        regions: Regions,
        kernel: TrackedMatmul,
        step: Tiles,
        words_set: Callable[[int, str, int], list[int]],
    ) -> None:
        from weft.runtime.cuda import tracked_matmul  # imported here: see `GroupedMatmulCall`

        matmul, sets = step.body[0], step.inner_sets
        if (
            variables_of(step)
            or not isinstance(matmul, Compute)
            or matmul.op not in PLAIN_MATMULS
            or matmul.accumulate
            or step.body[1:] != sets
        ):
            raise ScheduleError(
                f"{step}: a tracked matmul needs one matmul or addmm per tile, without accumulate, followed by sets only, and a "
                "number of tiles that is known before the run"
            )
        a, w, *added = matmul.inputs
        tiles = {step.index: np.arange(int(step.extent))}

        def over(number: Index) -> np.ndarray:
            found = number.evaluated_over(tiles) if isinstance(number, Expr) else number
            return np.broadcast_to(np.asarray(found, np.int64), len(tiles[step.index]))

        if (
            any((over(one.at) != context.rank).any() for one in (a, w))
            or (over(a.col) != 0).any()
            or (over(w.row) != 0).any()
        ):
            raise ScheduleError(f"{step}: a tracked matmul must read whole rows and columns of this rank's operands")
        self._a_view, self._w_view = (
            regions.view(context.buffers[name].part(at=context.rank)) for name in (a.buffer, w.buffer)
        )
        rows, cols = over(matmul.out.rows), over(matmul.out.cols)
        if rows.max(initial=0) > kernel.rows or cols.max(initial=0) > kernel.cols:
            raise ScheduleError(
                f"{step}: tiles of up to {rows.max()} x {cols.max()} exceed the kernel's {kernel.rows} x {kernel.cols}: use "
                "smaller tiles"
            )
        self._base, place, pitch = regions.places(
            matmul.out.buffer, over(matmul.out.at), over(matmul.out.row), over(matmul.out.col)
        )
        counters, counter_of = self._counters(sets, over, words_set)
        columns = [over(a.row), rows, over(w.col), cols, place, np.full_like(place, pitch), *counter_of]
        for c in added:
            base, place, pitch = regions.places(c.buffer, over(c.at), over(c.row), over(c.col))
            if base is not None:
                raise ScheduleError(
                    f"{step}: a tracked addmm needs its addend in the schedule's own memory, but {c.buffer} is the caller's "
                    "tensor: copy it to a scratch buffer first"
                )
            columns += [place, np.full_like(place, pitch)]
        table = np.stack(columns, axis=1)
        self._matmul = tracked_matmul.TrackedMatmulLauncher(
            context.device, table, counters, rows=kernel.rows, cols=kernel.cols, sets=len(sets),
            itemsize=ITEM_BYTES[context.buffers[matmul.out.buffer].dtype], relative=self._base is not None, adds=bool(added),
        )  # fmt: skip

    @staticmethod
    def _counters(
        sets: Sequence[Set], over: Callable[[Index], np.ndarray], words_set: Callable[[int, str, int], list[int]]
    ) -> tuple[list[tuple[int, list[int]]], list[np.ndarray]]:
        """Assign counters to the signals that the tiles set: the kernel sets a signal when the signal's counter has counted all
        tiles. Return two lists. The first has, for each counter, its number of tiles, and the addresses of the words to set
        after these tiles. The second has, for each element of `sets`, an array with the counter of every tile.

        over: a function that evaluates an expression for all tiles.
        """
        named: dict[tuple[str, int, int], int] = {}
        of_tiles = []
        for one in sets:
            pairs = np.stack([over(one.at), over(one.index)], axis=1)
            which, back = np.unique(pairs, axis=0, return_inverse=True)
            numbers = [named.setdefault((one.signal, at, index), len(named)) for at, index in which.tolist()]
            of_tiles.append(np.array(numbers, np.int64)[back.reshape(-1)])
        come = np.bincount(np.concatenate(of_tiles) if of_tiles else np.zeros(0, np.int64), minlength=len(named))
        words = [words_set(at, signal, index) for signal, at, index in named]
        return list(zip(come.tolist(), words, strict=True)), of_tiles

    def prepare(self, tensors: Tensors) -> None:
        self._matmul.prepare(self._a_view(tensors), self._w_view(tensors))

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        y = 0 if self._base is None else bases[self._base]
        self._matmul.launch(self._a_view(tensors), self._w_view(tensors), y)
