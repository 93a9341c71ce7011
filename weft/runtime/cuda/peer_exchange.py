"""The base of exchanges between GPUs by kernels that store into peers' memory and wait for signals.

The kernels have deadlines, and report missed ones (`weft.runtime.cuda.kernel_failures`). If the group fails for another
reason, the watchdog ends the waits by overwriting the signals.
"""

from __future__ import annotations

import torch

from weft.errors import DeadlineError, WeftError
from weft.kernels.signals import POISON, RECORD_WORDS
from weft.runtime.capture import is_captured
from weft.runtime.cuda.kernel_failures import KernelFailures
from weft.runtime.cuda.streams import current_stream
from weft.symm import Communicator, Region
from weft.symm.lasting import lasting


class PeerExchange:
    """The base class of exchanges on a communicator. All ranks must construct this object, and make the same calls.

    signals: the number of signal words of a rank.
    record: pinned memory to which kernels write why they have failed, int64 [RECORD_WORDS].
    """

    def __init__(self, comm: Communicator, signals: int) -> None:
        self.comm = comm
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int64, pin_memory=True)
        self._last: torch.cuda.Stream | None = None  # the stream of the last call, which recorded `_done` at its end
        self._done = torch.cuda.Event()
        # Allocate what the watchdog needs now: it must not load a module while a kernel waits.
        self._poison = torch.full((signals,), POISON, dtype=torch.int64, pin_memory=True)
        self._poison_stream = torch.cuda.Stream(comm.device, priority=-1)
        self._take_back = comm.on_failure(self._release_waiters)
        comm._holders.add(self)
        self._failures = KernelFailures(comm, self.record, self.failure)

    def signals(self) -> torch.Tensor:
        """Return this rank's signal words, int64."""
        raise NotImplementedError

    def missed(self, status: int, epoch: int, peer: int) -> str:
        """Return the text of the error for a call that missed its deadline, without the values of the signal.

        status, epoch, peer: the words of the record.
        """
        raise NotImplementedError

    def failure(self, status: int, epoch: int, peer: int, wanted: int, found: int) -> WeftError:
        """Return the error of a call. The arguments are the words of the record."""
        return DeadlineError(
            f"rank {self.comm.rank}: {self.missed(status, epoch, peer)} (wanted {wanted}, found {found})"
        )

    def follow_last(self) -> None:
        """Make the current stream wait for the last call, which may have been enqueued on another stream."""
        here = current_stream(self.comm.device)
        if self._last is not None and self._last != here and not is_captured(self.comm.device):
            here.wait_event(self._done)

    def note_last(self) -> None:
        """Note that the current call ends with the work that is now enqueued on the current stream."""
        if not is_captured(self.comm.device):
            self._last = current_stream(self.comm.device)
            self._done.record(self._last)

    def check(self) -> None:
        """Raise the error of an earlier call or of the group, if any. Do not wait for the device."""
        self._failures.check()

    def close(self) -> None:
        """Stop the checks of this exchange by the watching thread. The communicator frees the memory."""
        self._failures.close()
        self._take_back()

    def addresses(self, region: Region) -> torch.Tensor:
        """Return the addresses of every rank's memory, as mapped on this device: int64 [world size] on the device."""
        device, addresses = self.comm.device, [region.address(rank) for rank in range(self.comm.world_size)]
        return lasting(device, lambda: torch.tensor(addresses, dtype=torch.int64, device=device))

    def _release_waiters(self) -> None:
        """End every wait of this rank's kernels, because the group has failed. The watchdog thread calls this method."""
        with torch.cuda.device(self.comm.device), torch.cuda.stream(self._poison_stream):
            self.signals().copy_(self._poison, non_blocking=True)
