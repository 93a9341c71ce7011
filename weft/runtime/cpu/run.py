"""One run of a schedule on CPU processes, as the lanes of a rank share it: which one it is, how they wait, what went wrong.

Ranks meet before a run (`weft.runtime.meeting`): all run the same schedule, and if a rank refuses its tensors no rank begins.
"""

from __future__ import annotations

from typing import NoReturn, TypeAlias

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
from weft.symm import Domain

Tensors: TypeAlias = dict[str, torch.Tensor]
_OWN_LANE_S = 5.0


class Run:
    """What the lanes of this rank share: what is waited for in the run, its deadline, their errors. Used again for every run."""

    def __init__(self, name: str, what: str, domain: Domain) -> None:
        """what: the schedule is for, in messages."""
        self.name, self.domain, self.meeting = name, domain, meeting_of(domain)
        self.meeting.schedules += 1  # which ranks make in one order: two of a name are told apart
        self._topic = Topic(
            f"schedule {name!r} of {what or f'number {self.meeting.schedules}'}", str(self.meeting.schedules)
        )
        self.errors: list[BaseException] = []
        self._sets: list[int] = []  # by counter of this rank, how many it has had when this run ends
        self._deadline_s = 0.0
        self.tensors: Tensors = {}

    def begin(self, tensors: Tensors, sets: list[int], of_run: list[tuple[int, int]], deadline_s: float) -> None:
        """Return when every rank begins this run. sets: by counter of this rank, how many it has had in all runs before; it is
        brought up to date. of_run: numbers of counters, and how many sets each has in this run."""
        try:
            self.meeting.meet(self._topic, deadline_s=deadline_s)
            self.tensors, self._deadline_s, self.errors, self._sets = tensors, deadline_s, [], sets
            for number, times in of_run:
                sets[number] += times
        except WeftError:  # which all ranks raise, or which has ended the group
            raise
        except BaseException as error:  # Ctrl-C: peers believe that this rank takes part
            self.domain.poison(f"schedule {self.name}: {error!r}")
            raise

    def refuse(self, text: str, deadline_s: float) -> NoReturn:
        raise RefusedError(self.meeting.refuse(text, deadline_s=deadline_s))

    def fail(self, error: BaseException, where: str) -> None:
        self.errors.append(error)
        self.domain.poison(f"schedule {self.name}, {where}: {error!r}")  # without effect if the group has failed before

    def end(self) -> None:
        """Raise what went wrong here."""
        errors, self.errors, self.tensors = self.errors, [], {}
        if errors:
            # Lanes that heard of a failure may have been quicker to say so than the one that met it.
            causes = [error for error in errors if not isinstance(error, PoisonedGroupError)]
            raise (causes or errors)[0]

    def wait(self, address: int, number: int, offset: int, name: str, peer: int | None) -> None:
        """Return when a counter of this rank, of this number, is `-offset` below what it is when this run ends. peer: the rank that
        raises it, if it is one."""
        wanted = self._sets[number] + offset
        if _core.signal_read(address) >= wanted:
            return
        # Who waits for another lane of its own rank leaves it to that lane to say what is missing.
        deadline_s = self._deadline_s + (_OWN_LANE_S if peer == self.domain.rank else 0.0)
        self.domain.wait(address, wanted, name=name, peer=peer, deadline_s=deadline_s)

    def all_gather(self, rows: tuple[int, ...], src: torch.Tensor, dst: torch.Tensor) -> None:
        """dst [sum(rows), cols] = src [rows[rank], cols] of all ranks, by the library. One thread at a time.

        If a rank fails inside, the others raise as from any wait.
        """
        if not dst.numel():
            return
        ranks, group = range(self.domain.world_size), self.domain.group
        src, dst = sendable(src), sendable(dst)
        whole = dst if dst.is_contiguous() else torch.empty(dst.shape, dtype=dst.dtype)
        if len(set(rows)) == 1:
            works = [all_gather_single(whole, src.contiguous(), group=group, async_op=True)]
        else:  # which the library's all-gather does not know on CPU
            parts = whole.split(rows)
            parts[self.domain.rank].copy_(src)
            sources = [rank for rank in ranks if rows[rank]]
            works = [dist.broadcast(parts[rank], group_src=rank, group=group, async_op=True) for rank in sources]
        for work in works:
            finish(work, self.domain, f"all_gather of {self.name}", self._deadline_s, works, src, whole, self.tensors)
        if whole is not dst:
            dst.copy_(whole)

    def exchange(self, sent: list[int], received: list[int], src: torch.Tensor, dst: torch.Tensor) -> None:
        """Rows of src, so many to each rank, into dst, so many from each, by the library. One thread at a time."""
        whole = dst if dst.is_contiguous() else torch.empty(dst.shape, dtype=dst.dtype)
        source = src.contiguous()
        work = all_to_all_single(whole, source, received, sent, group=self.domain.group, async_op=True)
        finish(work, self.domain, f"exchange of {self.name}", self._deadline_s, source, whole, self.tensors)
        if whole is not dst:
            dst.copy_(whole)

    def all_reduce(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """dst = the sum of all ranks' src, by the library. One thread at a time."""
        whole = dst if dst.is_contiguous() else torch.empty(dst.shape, dtype=dst.dtype)
        whole.copy_(src)
        work = all_reduce_single(whole, group=self.domain.group, async_op=True)
        finish(work, self.domain, f"all_reduce of {self.name}", self._deadline_s, whole, self.tensors)
        if whole is not dst:
            dst.copy_(whole)

    def reduce_scatter(self, rows: tuple[int, ...], src: torch.Tensor, dst: torch.Tensor) -> None:
        """dst [rows[rank], cols] = this rank's rows of the sum of all ranks' src [sum(rows), cols], by the library. One thread
        at a time."""
        source = src.contiguous()
        if len(set(rows)) == 1:
            whole = dst if dst.is_contiguous() else torch.empty(dst.shape, dtype=dst.dtype)
            work = reduce_scatter_single(whole, source, group=self.domain.group, async_op=True)
        else:  # which the library's reduce-scatter does not know
            source = source.clone() if source is src else source
            work = all_reduce_single(source, group=self.domain.group, async_op=True)
            whole = source.split(rows)[self.domain.rank]
        finish(work, self.domain, f"reduce_scatter of {self.name}", self._deadline_s, source, whole, self.tensors)
        if whole is not dst:
            dst.copy_(whole)
