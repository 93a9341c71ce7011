"""One run of a schedule on CPU processes, as the lanes of a rank share it: which one it is, how they wait, what went wrong.

Nobody waits at the start of a run. A rank publishes which schedule it runs, and whether it refuses its tensors, and looks at
what a peer published before it waits for a signal that only this peer can raise, at the latest at the end of the run. A rank
that refuses plays its part in signals and collectives, without copies and computing: nobody waits in vain, counters stay in
step, and then the run raises on all ranks. That is a few stores and loads of shared memory a run.

Collectives of the library that are called past executors (`weft.ops.in_turn`) are calls in this order too; before such a one
everybody does wait for everybody.

Two slots in turn hold what a rank publishes. That is enough: who publishes call n + 2 has met everybody in call n + 1, and so
everybody is done with call n; and who is read in call n cannot be further than n + 1.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist

from weft import _core
from weft.errors import DisagreementError, PoisonedGroupError, RefusedError, WeftError
from weft.runtime.collectives import all_gather_single, finish, sendable
from weft.symm import Domain

Tensors: TypeAlias = dict[str, torch.Tensor]
_OWN_LANE_S = 5.0
_LIBRARY = 1 << 60  # numbers from here on are of collectives past executors


class Named:
    """A collective that is called past executors, as ranks tell it from other ones: by its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = _LIBRARY + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())


class Calls:
    """The runs of all schedules of a domain, and collectives past executors, in the order in which this rank calls them. Making
    it is collective."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.lock = threading.Lock()  # held during a run, and until a collective has been begun
        self.names: list[str] = []  # of schedules, in the order in which the ranks made them
        self._past_executors: weakref.WeakValueDictionary[int, Named] = weakref.WeakValueDictionary()
        region = domain.allocate(3 * _core.COUNTER_BYTES, what="calls of schedules")
        # A counter with the number of the call, then the two slots: number of the schedule, or its complement to refuse.
        self._memory = [region.tensor(rank, (region.nbytes,), torch.uint8) for rank in range(domain.world_size)]
        self._call = 0
        self._schedule = 0
        self._refuses: dict[int, bool] = {}  # by rank, of those that are known to be in this call
        domain._holders.add(self)

    def close(self) -> None:
        """The domain ends. A run that is under way may go on using the memory."""
        _calls.pop(self.domain, None)

    def begin(self, schedule: int, *, refuses: bool) -> None:
        rank = self.domain.rank
        self._call, self._schedule, self._refuses = self._call + 1, schedule, {rank: refuses}
        own = self._memory[rank].data_ptr()
        _core.signal_set(self._slot(own), ~schedule if refuses else schedule)
        _core.signal_set(own, self._call)

    def meet(self, peer: int, what: str, deadline_s: float) -> bool:
        """Wait until `peer` makes this call too, for the sake of `what`; whether it refuses."""
        known = self._refuses.get(peer)
        if known is not None:
            return known
        self._wait_for(peer, what, deadline_s)
        published = _core.signal_read(self._slot(self._memory[peer].data_ptr()))
        theirs = max(published, ~published)
        if theirs != self._schedule:
            raise DisagreementError(
                f"ranks make different calls: rank {self.domain.rank} calls {self._name(self._schedule)} and rank {peer} "
                f"calls {self._name(theirs)}: call the same operators in the same order on every rank"
            )
        self._refuses[peer] = published < 0
        return published < 0

    def begin_past(self, collective: Named, function: Callable[[], dist.Work], deadline_s: float) -> dist.Work:
        """`function()`, which begins a collective past executors, as a call of its own: every rank comes, and calls the same one.
        Where several threads call, the library gets collectives in the order in which the ranks met for them.

        Everybody is there before anybody compares, so that `DisagreementError` is raised by all of them, nothing has been
        sent, and the group lives on (unless one of them runs a schedule, which has sent something, and ends it). Others end it.
        """
        what, ranks = collective.name, range(self.domain.world_size)
        with self.lock:
            self.domain.check()
            try:
                self.begin(collective.number, refuses=False)
                for peer in ranks:
                    self._wait_for(peer, what, deadline_s)
            except BaseException as error:
                if not isinstance(error, WeftError):  # Ctrl-C: peers believe that this rank takes part
                    self.domain.poison(f"{what}: {error!r}")
                raise
            for peer in ranks:
                self.meet(peer, what, deadline_s)
            try:
                return function()
            except BaseException as error:  # the others have begun it
                self.domain.poison(f"{what}: {error!r}")
                raise

    def named(self, name: str) -> Named:
        """The same object for the same name, as long as somebody holds it."""
        made = Named(name)
        return self._past_executors.setdefault(made.number, made)

    def _wait_for(self, peer: int, what: str, deadline_s: float) -> None:
        counter = self._memory[peer].data_ptr()
        if _core.signal_read(counter) < self._call:
            name = f"{what} (call {self._call} of schedules and collectives)"
            self.domain.wait(counter, self._call, name=name, peer=peer, deadline_s=deadline_s)

    def _slot(self, counter: int) -> int:
        return counter + _core.COUNTER_BYTES * (1 + self._call % 2)

    def _name(self, schedule: int) -> str:
        if schedule >= _LIBRARY:
            named = self._past_executors.get(schedule)
            return "a collective that is not known here" if named is None else named.name
        return f"{self.names[schedule]!r} (number {schedule} that was made)"


_calls: dict[Domain, Calls] = {}


def calls_of(domain: Domain) -> Calls:
    """Collective at the first call for a domain."""
    if domain not in _calls:
        _calls[domain] = Calls(domain)
    return _calls[domain]


class Run:
    """What the lanes of this rank share: the number of the run, its deadline, their errors. Used again for every run."""

    def __init__(self, name: str, domain: Domain) -> None:
        self.name, self.domain, self.calls = name, domain, calls_of(domain)
        self._number = len(self.calls.names)
        self.calls.names.append(name)
        self.errors: list[BaseException] = []
        self._epoch = 0
        self._deadline_s = 0.0
        self.tensors: Tensors = {}

    def begin(self, tensors: Tensors, deadline_s: float, *, refuses: bool) -> None:
        self.tensors, self._deadline_s, self.errors = tensors, deadline_s, []
        self._epoch += 1
        self.calls.begin(self._number, refuses=refuses)

    def fail(self, error: BaseException, where: str) -> None:
        self.errors.append(error)
        self.domain.poison(f"schedule {self.name}, {where}: {error!r}")  # without effect if the group has failed before

    def end(self, refusal: str) -> None:
        """Raise what went wrong here, or what the ranks say that refused."""
        try:
            if not self.errors:
                self._raise_refusals(refusal)
        except RefusedError:
            raise
        except BaseException as error:
            self.fail(error, "end of the run")
        finally:
            errors, self.errors, self.tensors = self.errors, [], {}
        if errors:
            # Lanes that heard of a failure may have been quicker to say so than the one that met it.
            causes = [error for error in errors if not isinstance(error, PoisonedGroupError)]
            raise (causes or errors)[0]

    def _raise_refusals(self, refusal: str) -> None:
        ranks = range(self.domain.world_size)
        if [rank for rank in ranks if self.calls.meet(rank, f"schedule {self.name}", self._deadline_s)]:  # all are met
            mine = refusal and f"rank {self.domain.rank}: {refusal}"
            texts = self.domain.all_gather(mine, what=f"refusals of {self.name}", deadline_s=self._deadline_s)
            raise RefusedError("; ".join(text for text in texts if text))

    def wait(
        self, address: int, sets_per_run: int, offset: int, name: str, needs: tuple[int, ...], peer: int | None
    ) -> None:
        """Until this rank's counter is at epoch * sets_per_run + offset.

        needs: the ranks without whose call it will not come. peer: the rank that raises it, if it is one.
        """
        wanted = self._epoch * sets_per_run + offset
        if _core.signal_read(address) >= wanted:
            return
        for rank in needs:
            self.calls.meet(rank, name, self._deadline_s)
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
        # Before the library begins what it cannot give up: not with a rank that does not come, or does something else.
        for peer in ranks:
            self.calls.meet(peer, f"all_gather of {self.name}", self._deadline_s)
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
        if self.meet_all(f"exchange of {self.name}"):
            return  # somebody refuses, and takes no part
        whole = dst if dst.is_contiguous() else torch.empty(dst.shape, dtype=dst.dtype)
        source = src.contiguous()
        work = dist.all_to_all_single(whole, source, received, sent, group=self.domain.group, async_op=True)
        finish(work, self.domain, f"exchange of {self.name}", self._deadline_s, source, whole, self.tensors)
        if whole is not dst:
            dst.copy_(whole)

    def meet_all(self, what: str) -> bool:
        """Wait until every rank makes this call too; whether one refuses it."""
        refuses = [self.calls.meet(peer, what, self._deadline_s) for peer in range(self.domain.world_size)]
        return any(refuses)  # of all: that one refuses does not mean that the others have come
