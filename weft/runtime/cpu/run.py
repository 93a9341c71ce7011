"""The state that the lanes of a rank share in a run on CPU processes: waits, collectives and errors.

Ranks synchronise before a run (`weft.runtime.meeting`), and run the same schedule. If a rank refuses its tensors, no
rank starts.
"""

from __future__ import annotations

import math
import threading
import time
from typing import NoReturn

import torch
import torch.distributed as dist

from weft import _core
from weft.errors import PoisonedGroupError, RefusedError, WeftError
from weft.runtime.collectives import (
    all_gather_single,
    all_reduce_single,
    all_to_all_single,
    finish,
    reduce_scatter_single,
    sendable,
)
from weft.runtime.meeting import Topic, meeting_of
from weft.runtime.schedule_memory import Tensors
from weft.symm import Communicator

_OWN_LANE_S = 5.0


class Run:
    """The counters, the deadline and the errors of this rank's lanes during a run. An executor uses one object for all of
    its runs.
    """

    def __init__(self, name: str, what: str, comm: Communicator) -> None:
        """name: the schedule's name. what: the user's call that the schedule runs, for error texts."""
        self.name, self.comm, self.meeting = name, comm, meeting_of(comm)
        # All ranks make executors in the same order, so the number distinguishes schedules with equal names.
        self.meeting.schedules += 1
        self._topic = Topic(
            f"schedule {name!r} of {what or f'number {self.meeting.schedules}'}", str(self.meeting.schedules)
        )
        self.errors: list[BaseException] = []
        self._sets: list[int] = []  # for each counter of this rank, the value at the end of this run
        self.deadline_s = 0.0
        self._patience: dict[int, tuple[tuple[int, ...], float]] = {}  # by thread: (senders, when its wait is too long)
        self.is_sending = False
        """True if gloo may still send rows of this run, which has failed."""
        self._lanes_late = math.inf  # when the wait for messages is too long after all other lanes have ended
        self.tensors: Tensors = {}

    def begin(self, tensors: Tensors, sets: list[int], of_run: list[tuple[int, int]], deadline_s: float) -> None:
        """Begin a run: wait in the rendezvous until every rank begins it.

        sets: for each counter of this rank, its value at the end of the previous run. This method updates the values to
            the end of this run.
        of_run: for each counter that this run increases, (index of the counter, number by which the run increases it).
        """
        try:
            self.meeting.meet(self._topic, deadline_s=deadline_s)
            self.tensors, self.deadline_s, self.errors, self._sets = tensors, deadline_s, [], sets
            self._lanes_late = math.inf
            for number, times in of_run:
                sets[number] += times
        except WeftError:  # every rank raises this error, or the group has already failed
            raise
        except BaseException as error:  # Ctrl-C: peers expect this rank to take part
            self.comm.poison(f"schedule {self.name}: {error!r}")
            raise

    def refuse(self, text: str, deadline_s: float) -> NoReturn:
        raise RefusedError(self.meeting.refuse(text, deadline_s=deadline_s))

    def fail(self, error: BaseException, where: str) -> None:
        self.errors.append(error)
        self.comm.poison(f"schedule {self.name}, {where}: {error!r}")  # no effect if the group has already failed

    def end(self) -> None:
        """End a run. Call it when all lanes have ended. Raise the error of the first lane that failed, if any."""
        errors, self.errors, self.tensors = self.errors, [], {}
        if errors:
            # A lane that saw the poisoned group may have reported before the lane that caused the failure.
            causes = [error for error in errors if not isinstance(error, PoisonedGroupError)]
            raise (causes or errors)[0]

    def lanes_ended(self) -> None:
        """Start the deadline of all messages that have not arrived. Call it when only lanes that receive messages still
        run.
        """
        self._lanes_late = time.monotonic() + self.deadline_s

    def is_late(self, source: int) -> bool:
        """True if the deadline for a message from rank `source` has passed."""
        now = time.monotonic()
        waits = list(self._patience.values())
        return now >= self._lanes_late or any(now >= until for sources, until in waits if source in sources)

    def wait(
        self, address: int, number: int, offset: int, name: str, peer: int | None, sources: tuple[int, ...] = ()
    ) -> None:
        """Wait until peers or lanes have set a counter of this rank as often as they do in this run. With offset=-1, do not
        wait for the last set; with -2, not for the last two, and so on.

        address, number: the counter's address, and its index among the counters of this rank.
        name: the signal, for error texts.
        peer: the rank that sets the counter; None if several ranks set it. If messages set the counter when they arrive,
            pass this rank, because it receives them.
        sources: the ranks that send these messages; empty if no messages set the counter.
        """
        wanted = self._sets[number] + offset
        if _core.signal_read(address) >= wanted:
            return
        # A wait for another lane of this rank has a later deadline. So if the other lane waits for a peer, its error, which
        # names the peer, is reported first.
        deadline_s = self.deadline_s + (_OWN_LANE_S if peer == self.comm.rank or sources else 0.0)
        if not sources:
            self.comm.wait(address, wanted, name=name, peer=peer, deadline_s=deadline_s)
            return
        thread = threading.get_ident()
        self._patience[thread] = sources, time.monotonic() + self.deadline_s
        try:
            self.comm.wait(address, wanted, name=name, peer=peer, deadline_s=deadline_s)
        finally:
            del self._patience[thread]

    def all_gather(self, rows: tuple[int, ...], src: torch.Tensor, dst: torch.Tensor) -> None:
        """Gather src [rows[rank], cols] of all ranks into dst [sum(rows), cols], with gloo. Only one thread at a time may
        call it.
        """
        if not dst.numel():
            return
        ranks, group = range(self.comm.world_size), self.comm.group
        src, dst = sendable(src), sendable(dst)
        whole = dst if dst.is_contiguous() else dst.new_empty(dst.shape)
        if len(set(rows)) == 1:
            works = [all_gather_single(whole, src.contiguous(), group=group, async_op=True)]
        else:  # gloo's all-gather does not support unequal rows
            parts = whole.split(rows)
            parts[self.comm.rank].copy_(src)
            sources = [rank for rank in ranks if rows[rank]]
            works = [dist.broadcast(parts[rank], group_src=rank, group=group, async_op=True) for rank in sources]
        for work in works:
            finish(
                work, self.comm, f"all_gather of schedule {self.name}", self.deadline_s, works, src, whole, self.tensors
            )
        if whole is not dst:
            dst.copy_(whole)

    def exchange(self, sent: list[int], received: list[int], src: torch.Tensor, dst: torch.Tensor) -> None:
        """Send sent[r] rows of src to each rank r, and receive received[r] rows from rank r into dst, with gloo. Only one
        thread at a time may call it.
        """
        whole = dst if dst.is_contiguous() else dst.new_empty(dst.shape)
        source = src.contiguous()
        work = all_to_all_single(whole, source, received, sent, group=self.comm.group, async_op=True)
        finish(work, self.comm, f"exchange of schedule {self.name}", self.deadline_s, source, whole, self.tensors)
        if whole is not dst:
            dst.copy_(whole)

    def all_reduce(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Write the sum of all ranks' src to dst, with gloo. Only one thread at a time may call it."""
        whole = dst if dst.is_contiguous() else dst.new_empty(dst.shape)
        whole.copy_(src)
        work = all_reduce_single(whole, group=self.comm.group, async_op=True)
        finish(work, self.comm, f"all_reduce of schedule {self.name}", self.deadline_s, whole, self.tensors)
        if whole is not dst:
            dst.copy_(whole)

    def reduce_scatter(self, rows: tuple[int, ...], src: torch.Tensor, dst: torch.Tensor) -> None:
        """Write this rank's rows of the sum of all ranks' src [sum(rows), cols] to dst [rows[rank], cols], with gloo. Only
        one thread at a time may call it.
        """
        source = src.contiguous()
        if len(set(rows)) == 1:
            whole = dst if dst.is_contiguous() else dst.new_empty(dst.shape)
            work = reduce_scatter_single(whole, source, group=self.comm.group, async_op=True)
        else:  # gloo's reduce-scatter does not support unequal rows
            source = source.clone() if source is src else source
            work = all_reduce_single(source, group=self.comm.group, async_op=True)
            whole = source.split(rows)[self.comm.rank]
        finish(work, self.comm, f"reduce_scatter of schedule {self.name}", self.deadline_s, source, whole, self.tensors)
        if whole is not dst:
            dst.copy_(whole)
