"""Runs all ranks of a schedule in this process, step by step in a random order that its signals allow.

It shares nothing with `weft.schedule.order` or an executor but `Schedule.of_rank`. Numbers are float64. What is allocated
holds NaN: symmetric and scratch buffers once for all runs, outputs at each run; what reads too early gives a wrong result.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from weft.schedule import Collective, Compute, Copy, Lane, Region, Schedule, Set, Step, Wait

Tensors = dict[str, np.ndarray]
OPERATIONS = {
    "matmul": np.matmul,
    "add": np.add,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


class DeadlockError(AssertionError):
    pass


def interpret(schedule: Schedule, inputs: list[list[Tensors]], seed: int) -> list[list[Tensors]]:
    """`inputs[run][rank]` by buffer's name -> the same of outputs."""
    return _Machine(schedule, inputs, random.Random(seed)).run()


def edited(schedule: Schedule, change: Callable[[Step], Step | None]) -> Schedule:
    """Every step replaced by what `change` makes of it; None drops it."""
    lanes = tuple(
        replace(lane, steps=tuple(new for step in lane.steps if (new := change(step)) is not None))
        for lane in schedule.lanes
    )
    return replace(schedule, lanes=lanes)


class _Machine:
    def __init__(self, schedule: Schedule, inputs: list[list[Tensors]], rng: random.Random) -> None:
        world = range(schedule.world_size)
        self.rng, self.inputs = rng, inputs
        self.lanes: list[tuple[Lane, ...]] = [schedule.of_rank(rank) for rank in world]
        self.buffers = [schedule.buffers_of_rank(rank) for rank in world]
        self.memory: list[Tensors] = [{} for _ in world]
        self.outputs: list[list[Tensors]] = [[{} for _ in world] for _ in inputs]
        self.counters: Counter[tuple[int, str, int]] = Counter()
        self.per_run = Counter(
            (s.at, s.signal, s.index)
            for lanes in self.lanes
            for lane in lanes
            for s in lane.steps
            if isinstance(s, Set)
        )
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
                burst = self.rng.choice((1, 2, 5, 10_000))  # now and then a lane runs as far ahead as it can
                while burst and self._step(rank, i):
                    burst -= 1
                    moved = True
            for rank in range(len(self.lanes)):
                done = all(at == len(lane.steps) for at, lane in zip(self.at[rank], self.lanes[rank], strict=True))
                if done and self.runs[rank] < len(self.inputs):
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
        if at == len(steps) or not self._do(rank, i, steps[at]):
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
            result = OPERATIONS[step.op](*(self._view(region) for region in step.inputs))
            self._view(step.out)[:] = self._view(step.out) + result if step.accumulate else result
        elif isinstance(step, Collective):
            gather = self.gathers.setdefault((self.runs[rank], i, self.at[rank][i]), {})
            gather[rank] = self._view(step.src)
            if len(gather) < len(self.lanes):
                return False
            self._view(step.dst)[:] = np.concatenate([gather[r] for r in range(len(self.lanes))])
        return True

    def _view(self, region: Region) -> np.ndarray:
        rows = slice(region.row, region.row + region.rows)
        cols = slice(region.col, region.col + region.cols)
        view = self.memory[region.at][region.buffer][rows, cols]
        assert view.shape == (region.rows, region.cols), region
        return view
