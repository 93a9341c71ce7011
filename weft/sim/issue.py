"""The times at which the CPU issues the steps of a single run (mode "single": nothing is queued ahead).

The CPU issues steps one by one, in the order of `weft.schedule.verify.issue_order`, which simulates all ranks in
rounds. If all ranks are alike, this module simulates the rounds with the lanes of rank 0 only. Whenever rank 0 sends a
signal to a peer, rank 0 also receives this signal, from another peer. The received signal counts from the next round on.
All ranks reach a collective in the same round.
"""

from __future__ import annotations

from weft.schedule.verify.issue_order import issue_order
from weft.sim.lowered import Await, LaneProgram, LoweredSchedule, Raise, Work
from weft.sim.model import Model


def issue_times(program: LoweredSchedule, model: Model) -> dict[tuple[int, int], list[float]]:
    """Return {(rank, lane): issue time of each task}, in microseconds from the beginning of the run."""
    times: dict[tuple[int, int], list[float]] = {}
    turns = _Turns(program).order() if program.symmetric and len(program.ranks) == 1 and _is_whole(program) else []
    if len(turns) == sum(
        len(lane.tasks) for lane in program.lanes
    ):  # otherwise a lane waits forever, or the lanes of rank 0 are not enough
        for i, lane in enumerate(turns):
            times.setdefault((0, lane), []).append((i + 1) * model.host_step_us)
        return times
    order = issue_order(program.schedule)
    numbers = {lane.name: number for number, lane in enumerate(program.schedule.lanes)}
    for rank in program.ranks:
        for i, (name, _) in enumerate(order[rank]):
            times.setdefault((rank, numbers[name]), []).append((i + 1) * model.host_step_us)
    return times


def _is_whole(program: LoweredSchedule) -> bool:
    """True if this module can compute the issue order from `program`. The lanes of rank 0 must determine the order, and every
    step that the CPU issues must have a task in `program`.

    Steps whose size is 0 at run time have no task, but the CPU issues them.
    """
    if any(isinstance(task, Work) and task.raises for lane in program.lanes for task in lane.tasks):
        return False
    lanes = [(program.schedule.lanes[lane.number].steps, lane.tasks) for lane in program.lanes]
    return not program.schedule.contents or not any(
        len(tasks) < len(steps) or any(step.inner and not step.tile_kernel for step in steps) for steps, tasks in lanes
    )


class _Turns:
    """A simulation of the rounds of `weft.schedule.verify.issue_order` with the lanes of only one rank."""

    def __init__(self, program: LoweredSchedule) -> None:
        copying = [lane.resource == "copy" for lane in program.schedule.lanes]
        self._lanes = sorted(program.lanes, key=lambda lane: not copying[lane.number])
        self._next = dict.fromkeys((lane.number for lane in program.lanes), 0)
        self._counters = [0] * program.counters
        self._sent: list[int] = []  # counters set in this round; waits see these sets in the next round
        self._come: set[tuple[int, int]] = set()  # (lane, task) of the collectives that all ranks have reached
        self._coming: set[tuple[int, int]] = set()

    def order(self) -> list[int]:
        """Return the number of the lane of each step, in the order in which the CPU issues the steps."""
        order: list[int] = []
        before = -1
        while len(order) > before or self._coming:
            before = len(order)
            for counter in self._sent:
                self._counters[counter] += 1
            self._come |= self._coming
            self._sent, self._coming = [], set()
            while issued := [lane.number for lane in self._lanes for _ in range(self._turn(lane))]:
                order += issued
        return order

    def _turn(self, lane: LaneProgram) -> int:
        """Issue the lane's next steps, and return their number.

        Stop before a wait whose signal is not set yet. Otherwise issue one step that occupies the lane (a copy, a GEMM, or a
        `Read` by the CPU) and the sets that directly follow it.
        """
        first, worked = self._next[lane.number], False
        for number in range(first, len(lane.tasks)):
            task = lane.tasks[number]
            if worked and not isinstance(task, Raise):
                break
            if isinstance(task, Await) and not task.previous and self._counters[task.counter] < task.sets:
                break
            if isinstance(task, Work):
                if task.joins and (lane.number, number) not in self._come:
                    self._coming.add((lane.number, number))
                    break
                worked = lane.origins[number].step.occupies
            elif isinstance(task, Raise):
                if task.remote:
                    self._sent.append(task.counter)
                else:
                    self._counters[task.counter] += 1
            self._next[lane.number] = number + 1
        return self._next[lane.number] - first
