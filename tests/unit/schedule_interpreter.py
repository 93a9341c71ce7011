"""An interpreter that runs all ranks of a schedule in this process, step by step, in a random order that the signals
allow.

Many tiles are in progress at once, and end in a random order. embedding_bag sums the rows (5 b + 3 j) % rows of the
table for an element b of bags, for j = 0 .. b % 4 - 1. `dims` gives the columns of each slot.

The interpreter shares only `Schedule.of_rank` with executors and `verify`. Numbers are float64. New memory holds NaN:
symmetric and scratch buffers at the beginning of all runs, outputs at the beginning of each run. So a step that reads
too early gives a wrong result.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from weft.schedule import Collective, Compute, Copy, Lane, Reduce, Region, Schedule, Set, Step, Tiles, Wait

Tensors = dict[str, np.ndarray]
OPERATIONS = {
    "matmul": np.matmul,
    "addmm": lambda a, b, c: c + a @ b,
    "scaled_matmul": lambda a, b, scale_a, scale_b, bias=0: (a * scale_a) @ (b * scale_b) + bias,
    "scaled_matmul_fast": lambda a, b, scale_a, scale_b, bias=0: (a * scale_a) @ (b * scale_b) + bias,
    "add": np.add,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


class DeadlockError(AssertionError):
    pass


def interpret(
    schedule: Schedule,
    inputs: list[list[Tensors]],
    seed: int,
    *,
    dims: tuple[int, ...] = (),
    keep: tuple[str, ...] = (),
) -> list[list[Tensors]]:
    """Run the schedule once for each entry of `inputs`, which has {buffer: tensor} for each rank.

    Return the outputs in the same form, with the contents of the buffers `keep` at the end of each run. dims: the
    columns of each slot, for embedding_bag.
    """
    return _Machine(schedule, inputs, random.Random(seed), dims, keep).run()


def edited(schedule: Schedule, change: Callable[[Step], Step | None]) -> Schedule:
    """Replace every step by `change(step)`, or drop it if the result is None."""
    lanes = tuple(
        replace(lane, steps=tuple(new for step in lane.steps if (new := change(step)) is not None))
        for lane in schedule.lanes
    )
    return replace(schedule, lanes=lanes)


class _Machine:
    def __init__(self, schedule: Schedule, inputs: list[list[Tensors]], rng: random.Random, dims: tuple[int, ...],
        keep: tuple[str, ...],
    ) -> None:  # fmt: skip
        world = range(schedule.world_size)
        self.rng, self.inputs, self.dims, self.keep = rng, inputs, dims, keep
        self.begun: dict[tuple[int, int], list[list[Step]]] = {}
        self.lanes: list[tuple[Lane, ...]] = [schedule.of_rank(rank) for rank in world]
        self.buffers = [schedule.buffers_of_rank(rank) for rank in world]
        self.memory: list[Tensors] = [{} for _ in world]
        self.outputs: list[list[Tensors]] = [[{} for _ in world] for _ in inputs]
        self.counters: Counter[tuple[int, str, int]] = Counter()
        steps = [s for lanes in self.lanes for lane in lanes for s in lane.steps]
        steps += [
            inner for s in steps if isinstance(s, Tiles) for number in range(s.extent) for inner in s.tile(number)
        ]
        self.per_run = Counter((s.at, s.signal, s.index) for s in steps if isinstance(s, Set))
        self.gathers: dict[tuple, dict[int, np.ndarray]] = {}
        self.at = [[0] * len(lanes) for lanes in self.lanes]
        self.runs = [0] * len(world)
        for rank in world:
            self._start(rank)

    def run(self) -> list[list[Tensors]]:
        places = [(rank, i) for rank, lanes in enumerate(self.lanes) for i in range(len(lanes))]
        moved = True
        while moved:
            moved = False
            self.rng.shuffle(places)
            for rank, i in places:
                burst = self.rng.choice((1, 2, 5, 10_000))  # sometimes let a lane run until it is blocked
                while burst and self._step(rank, i):
                    burst -= 1
                    moved = True
            for rank in range(len(self.lanes)):
                done = all(at == len(lane.steps) for at, lane in zip(self.at[rank], self.lanes[rank], strict=True))
                run = self.runs[rank]
                if done and not any(name in self.outputs[run - 1][rank] for name in self.keep):
                    self.outputs[run - 1][rank] |= {name: self.memory[rank][name].copy() for name in self.keep}
                if done and run < len(self.inputs):
                    self._start(rank)
                    moved = True
        if min(self.runs) < len(self.inputs) or any(
            at < len(lane.steps)
            for rank, lanes in enumerate(self.lanes)
            for at, lane in zip(self.at[rank], lanes, strict=True)
        ):
            raise DeadlockError(f"lanes stand at {self.at} in runs {self.runs}")
        return self.outputs

    def _start(self, rank: int) -> None:
        run = self.runs[rank]
        for buffer in self.buffers[rank]:
            fresh = np.full((buffer.rows, buffer.cols), np.nan)
            if buffer.role == "input":
                self.memory[rank][buffer.name] = self.inputs[run][rank][buffer.name]
                assert self.memory[rank][buffer.name].shape == fresh.shape
            elif buffer.role == "output":
                self.memory[rank][buffer.name] = self.outputs[run][rank][buffer.name] = fresh
            elif run == 0:
                self.memory[rank][buffer.name] = fresh
        self.at[rank] = [0] * len(self.lanes[rank])
        self.runs[rank] += 1

    def _step(self, rank: int, i: int) -> bool:
        at = self.at[rank][i]
        steps = self.lanes[rank][i].steps
        if at == len(steps):
            return False
        if isinstance(tiles := steps[at], Tiles):
            begun = self.begun.setdefault((rank, i), [list(tiles.tile(number)) for number in range(tiles.extent)])
            chosen = self.rng.choice(begun)
            self._do(rank, i, chosen.pop(0))
            if not chosen:
                begun.remove(chosen)
            if begun:
                return True
            del self.begun[rank, i]
        elif not self._do(rank, i, steps[at]):
            return False
        self.at[rank][i] += 1
        return True

    def _do(self, rank: int, i: int, step: Step) -> bool:
        if isinstance(step, Wait):
            counter = rank, step.signal, step.index
            runs_before = self.runs[rank] - (2 if step.previous else 1)
            return runs_before < 0 or self.counters[counter] >= runs_before * self.per_run[counter] + step.count
        if isinstance(step, Set):
            self.counters[step.at, step.signal, step.index] += 1
        elif isinstance(step, Copy):
            self._view(step.dst)[:] = self._view(step.src)
        elif isinstance(step, Compute):
            if step.op == "embedding_bag":
                result = self._pooled(step)
            else:
                result = OPERATIONS[step.op](*(self._view(region) for region in step.inputs))
            self._view(step.out)[:] = self._view(step.out) + result if step.accumulate else result
        elif isinstance(step, Reduce):
            total = self._view(step.out)
            total[:] = sum(self._view(part) for part in step.parts)
            if step.norm is not None:
                scale = 1 / np.sqrt((total**2).sum(1, keepdims=True) / max(1, total.shape[1]) + step.norm.eps)
                self._view(step.norm.out)[:] = total * scale * self._view(step.norm.weight)
        elif isinstance(step, Collective):
            before = sum(isinstance(s, Collective) for s in self.lanes[rank][i].steps[: self.at[rank][i]])
            gather = self.gathers.setdefault((self.runs[rank], i, before), {})
            gather.setdefault(rank, self._view(step.src).copy())
            if len(gather) < len(self.lanes):
                return False
            parts = [gather[r] for r in range(len(self.lanes))]
            if step.op == "all_to_all":
                begin = sum(self._received(r, i) for r in range(rank))
                parts = [part[begin : begin + step.dst.rows] for part in parts]
            if step.op == "reduce_scatter":  # split into equal parts
                self._view(step.dst)[:] = sum(parts)[rank * step.dst.rows : (rank + 1) * step.dst.rows]
            elif step.op == "all_reduce":
                self._view(step.dst)[:] = sum(parts)
            else:
                self._view(step.dst)[:] = np.concatenate(parts, axis=int(step.op == "all_to_all"))
        return True

    def _received(self, rank: int, i: int) -> int:
        """Return the numbers of rows that a rank receives in the only collective of lane i."""
        return next(step.dst.rows for step in self.lanes[rank][i].steps if isinstance(step, Collective))

    def _pooled(self, step: Compute) -> np.ndarray:
        bags, tables = step.inputs
        slots = slice(bags.col, bags.col + bags.cols)
        bag = np.repeat(self._view(bags), self.dims[slots], axis=1).astype(int)  # of each column
        table = self.memory[tables.at][tables.buffer]
        columns = np.arange(tables.col, tables.col + tables.cols)
        assert bag.shape == (step.out.rows, step.out.cols)
        rows = (table[(5 * bag + 3 * j) % len(table), columns] * (j < bag % 4) for j in range(3))
        return np.asarray(sum(rows))

    def _view(self, region: Region) -> np.ndarray:
        rows = slice(region.row, region.row + region.rows)
        cols = slice(region.col, region.col + region.cols)
        view = self.memory[region.at][region.buffer][rows, cols]
        assert view.shape == (region.rows, region.cols), region
        return view
