"""Two protocols with which the ranks of a group agree on a call, or refuse it on all ranks.

In a rendezvous, CPU ranks synchronise and exchange descriptions of their calls (`weft.runtime.meeting`).

|               | `CpuAgreement`: CPU processes                     | `GpuAgreement`: GPUs                                   |
|---------------|---------------------------------------------------|--------------------------------------------------------|
| first call    | a rendezvous                                      | an exchange over control connections (sockets)         |
| later calls   | a rendezvous before each call                     | a hash of all calls, compared by a background thread   |
|               |                                                   | (`weft.symm.calls`)                                    |
| bad input     | The rank reports its error in the rendezvous, and | The rank notifies every peer. A peer that has not made |
| on a rank     | every rank refuses the call                       | the call refuses it too. If a peer has already made    |
|               |                                                   | the call, the group fails                              |
| other errors  | Before the rendezvous: as for bad input.          | The group fails                                        |
| of a rank     | After the rendezvous: the group fails             |                                                        |
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeAlias

import torch
import torch.distributed as dist

from weft import _core, symm
from weft.errors import DeadlineError, DisagreementError, RefusedError
from weft.runtime.meeting import Topic, meeting_of, shown
from weft.runtime.rails import Cargo
from weft.symm import Communicator
from weft.symm.calls import MadeCalls, calls_of
from weft.symm.layers import differ, difference
from weft.words import by_rank

Check: TypeAlias = Callable[[], tuple[str, str, tuple[int, int]]]
"""A function that checks this rank's call.

It returns (text, details, numbers). The text is a short description of the call for messages, and the details are its
full description. Both must be equal on all ranks. The two numbers may differ: every rank gets the numbers of all ranks.
The function raises `ValueError` to refuse the call.
"""

_SIGNED = struct.Struct("<qq")
_NUMBERS = struct.Struct("<QQ")


class Agreement:
    """The base class of the two protocols by which ranks agree on a call, or refuse it. The base class compares nothing
    between ranks. It is used for devices without communication, such as meta.
    """

    meets = False
    """True if the CPUs of all ranks synchronise before every call."""

    def at_first_call(
        self, operator: str, group: dist.ProcessGroup, device: torch.device, check: Check, deadline_s: float | None, hint: str
    ) -> list[tuple[int, int]]:  # fmt: skip
        """Run `check` on every rank, and compare the descriptions that the checks return (`Check`).

        Return the two numbers that each rank's `check` returned, by rank. They may differ.

        hint: advice to append to the error text if the ranks' calls differ.
        """
        return [check()[2]]

    def refuse(
        self, error: BaseException, text: str, group: dist.ProcessGroup, device: torch.device, deadline_s: float | None,
        has_published: bool,
    ) -> bool:  # fmt: skip
        """Make every rank refuse the call, because this rank raised `error`. Raise `RefusedError` in place of `error`.

        Return False if it is too late to refuse the call, or if ranks cannot handle this error by a refusal: the caller
        must then make the group fail. Return True if `error` is a memory error and the peers have been notified. The
        caller must then raise `error` itself, because users catch memory errors and retry.

        text: the reason, which the peers show.
        has_published: True if this rank has already told its peers that it takes part in the call.
        """
        return False

    def digest(self, group: dist.ProcessGroup) -> MadeCalls | None:
        """Return the hash of all calls of the group so far, which ranks compare in the background; None if this protocol has no
        such hash.
        """
        return None

    def exchange_numbers(
        self, comm: Communicator, topic: Topic, numbers: tuple[int, int], deadline_s: float | None,
        meanwhile: Iterator[None], cargo: Cargo | None = None, collective: _core.SharedCollective | None = None,
        accepts: Callable[[list[tuple[int, int]]], bool] = lambda found: True,
    ) -> list[tuple[int, int]]:  # fmt: skip
        """Send two numbers about this rank's call to all ranks. Return the two numbers of every rank. All ranks must make
        this call.

        topic: the description of the exchange, which must be equal on all ranks.
        meanwhile: an iterator whose steps do local work. A protocol may advance it while it waits for other ranks.
        cargo: a small collective whose data are sent with the messages of this exchange, between CPU ranks of several hosts
            (`weft.runtime.rails`); None if there is no such collective.
        collective: a collective between CPU ranks of one host, whose data are sent with this exchange; None if there is no such
            collective. It is complete on return, unless `accepts` returns False.
        accepts: a function that gets the two numbers of every rank, and returns True if ranks may read the data.
        """
        return comm.all_gather(numbers, what=topic.text, deadline_s=deadline_s)

    def count_refusal(self, comm: Communicator) -> None:
        """Count a call that every rank refuses after the ranks have synchronised for it. The next call sees from the count
        that messages of the refused call may be unread (`weft.runtime.unfused.begun`).
        """


class CpuAgreement(Agreement):
    """The protocol by which CPU processes agree on a call. Before each call, the ranks compare their calls in a rendezvous."""

    meets = True

    def at_first_call(
        self, operator: str, group: dist.ProcessGroup, device: torch.device, check: Check, deadline_s: float | None, hint: str
    ) -> list[tuple[int, int]]:  # fmt: skip
        text, details, numbers = check()  # if the check raises, `together` notifies the peers
        extra = _SIGNED.pack(*numbers)
        with symm.set_up_within(deadline_s):
            meeting = meeting_of(symm.communicator(group, device))
        topic = Topic(
            f"{operator} of a shape that is new here: {text}", details, hint=hint,
            difference=shown(meeting.comm, details),
        )  # fmt: skip
        extras = meeting.meet(topic, deadline_s=_first_call_s(meeting.comm, deadline_s), extra=extra)
        return [_SIGNED.unpack(extra) for extra in extras]

    def refuse(
        self, error: BaseException, text: str, group: dist.ProcessGroup, device: torch.device, deadline_s: float | None,
        has_published: bool,
    ) -> bool:  # fmt: skip
        if has_published or not isinstance(error, Exception):
            return False
        with symm.set_up_within(deadline_s):
            meeting = meeting_of(symm.communicator(group, device))
        refusals = meeting.refuse(text, deadline_s=deadline_s)
        if not isinstance(error, MemoryError | torch.OutOfMemoryError):  # callers catch memory errors and retry
            raise RefusedError(refusals) from error
        return True

    def exchange_numbers(
        self, comm: Communicator, topic: Topic, numbers: tuple[int, int], deadline_s: float | None,
        meanwhile: Iterator[None], cargo: Cargo | None = None, collective: _core.SharedCollective | None = None,
        accepts: Callable[[list[tuple[int, int]]], bool] = lambda found: True,
    ) -> list[tuple[int, int]]:  # fmt: skip
        def read(extras: list[bytes]) -> list[tuple[int, int]]:
            return [_NUMBERS.unpack(one) for one in extras]

        extra = _NUMBERS.pack(*numbers)
        extras = meeting_of(comm).meet(
            topic, deadline_s=deadline_s, extra=extra, cargo=cargo, meanwhile=meanwhile, collective=collective,
            ready=lambda extras: accepts(read(extras)),
        )  # fmt: skip
        return read(extras)

    def count_refusal(self, comm: Communicator) -> None:
        meeting_of(comm).refused += 1


class GpuAgreement(Agreement):
    """The protocol by which GPU ranks agree on a call. GPU ranks do not synchronise before each call, because synchronising
    takes longer than the CPU's part of the call.
    """

    def at_first_call(
        self, operator: str, group: dist.ProcessGroup, device: torch.device, check: Check, deadline_s: float | None, hint: str
    ) -> list[tuple[int, int]]:  # fmt: skip
        text, details, numbers, refusal = "", "", (0, 0), ""
        try:
            text, details, numbers = check()
        except Exception as error:
            refusal = str(error)
        comm = symm.communicator(group, device, deadline_s=deadline_s)
        noted = calls_of(group).layers.take()
        mine = refusal, calls_of(group).begun, text, _short(details), numbers, noted
        try:
            calls = comm.all_gather(mine, what=f"{operator} of a new shape", deadline_s=_first_call_s(comm, deadline_s))
        except DeadlineError as error:
            here = f"This rank refused the call: {refusal}" if refusal else f"This rank's call: {text}"
            raise DeadlineError(f"{error}. {here}") from error
        if refusals := by_rank((rank, refused) for rank, (refused, *_) in enumerate(calls) if refused):
            raise RefusedError(refusals)
        for rank, (_, count, theirs, their_details, *_) in enumerate(calls):
            if (count, theirs, their_details) != calls[0][1:4]:
                if (count, theirs) == calls[0][1:3] and "\n" in their_details:
                    _disagree(comm, f"ranks call {operator} differently: {shown(comm, details)()}")
                more = [f" ({one[3]})" if theirs == calls[0][2] else "" for one in (calls[0], calls[rank])]
                text = (
                    f"ranks call {operator} differently. Rank 0, in call {calls[0][1]} of weft on this group, forward and backward "
                    f"counted: {calls[0][2]}{more[0]}; rank {rank}, in call {count}: {theirs}{more[1]}"
                )
                _disagree(comm, text)
        if differ([noted.records for *_, noted in calls]):
            _disagree(comm, difference([noted.texts for *_, noted in calls]))
        return [numbers for *_, numbers, _ in calls]

    def refuse(
        self, error: BaseException, text: str, group: dist.ProcessGroup, device: torch.device, deadline_s: float | None,
        has_published: bool,
    ) -> bool:  # fmt: skip
        if not isinstance(error, ValueError | TypeError):
            return False
        comm = symm.communicator(group, device, deadline_s=deadline_s)
        comm.tell_refusal(text)
        raise RefusedError(f"rank {comm.rank}: {text}") from error

    def digest(self, group: dist.ProcessGroup) -> MadeCalls | None:
        return calls_of(group).made


_NOTHING_SHARED = Agreement()
_BY_DEVICE = {"cpu": CpuAgreement(), "cuda": GpuAgreement()}


def agreement_on(device: torch.device) -> Agreement:
    """Return the protocol by which ranks on this type of device agree on a call."""
    return _BY_DEVICE.get(device.type, _NOTHING_SHARED)


def _short(details: str) -> str:
    """Return the text that ranks exchange to compare `details`, a description of a call: a hash if `details` has several lines,
    otherwise `details`.
    """
    return f"\n{hashlib.sha256(details.encode()).hexdigest()}" if "\n" in details else details


def _disagree(comm: symm.Communicator, text: str) -> NoReturn:
    """Make the group fail, and raise `DisagreementError` with `text`. Every rank calls this function."""
    comm.end(text)
    raise DisagreementError(f"{text}. The ranks are out of step, so this group has failed: make a new process group")


def _first_call_s(comm: Communicator, deadline_s: float | None) -> float:
    """Return the deadline for the comparison of a first call: `deadline_s`, or `WEFT_SETUP_DEADLINE_S` if it is None."""
    return comm.setup_s if deadline_s is None else deadline_s
