"""A small all-gather through shared memory, by which CPU ranks of one host compare a call in microseconds.

The epoch is the number of the exchange. Every rank writes its payload into its own memory and sets its own counter to the
epoch. It reads each peer's payload when the peer's counter has reached the epoch. Native code does this
(`csrc/exchange.hpp`). Only a wait that takes longer than a moment returns to Python, which checks if peers have left.

The data of a collective may travel with the payloads (`csrc/shared_collective.hpp`). A collective of many bytes takes several
exchanges, each with up to `data_bytes` bytes of each rank.

Each rank has two buffers for payloads, and uses them alternately. Two are enough. A rank that publishes epoch e + 1 has
read all payloads of epoch e. The payload of epoch e + 2 overwrites the payload of epoch e. A rank writes the new
payload only after it has seen every counter at e + 1. By then, all ranks have read epoch e.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weft import _core
from weft.errors import WeftError
from weft.symm.communicator import LOOK_S, Communicator

DIFFERS = 2  # a result of `_core.SharedCollective.run`
_CLOSED = "this exchange is closed: make a new one"


class Exchange:
    """An all-gather of up to `nbytes` bytes per rank, which ranks may repeat. All ranks must construct this object, and make the
    same calls from one thread at a time.

    comm: a communicator on CPU. In a group on several hosts, payloads travel over its connections, in about one round trip.
    data_bytes: the size of a buffer for the data of collectives. Each rank allocates two such buffers, except in a
        group on several hosts.
    """

    def __init__(self, comm: Communicator, nbytes: int = 2048, data_bytes: int = 0):
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes} must not be negative")
        if comm.device.type != "cpu":
            raise ValueError(
                f"an Exchange needs a communicator on CPU, not on {comm.device}: pass communicator(group, 'cpu')"
            )
        self.comm = comm
        self.nbytes = nbytes
        self.native: _core.PayloadExchange | None = None
        """The exchange through shared memory; None in a group on several hosts, and after `close`."""
        self._closed = False
        comm._holders.add(self)  # closed with the communicator, since it keeps memory mapped
        if not comm.all_mapped:
            return
        total = _core.PayloadExchange.bytes_for(nbytes, data_bytes)
        self._region = comm.allocate(total, what=f"Exchange(nbytes={nbytes}, data_bytes={data_bytes})")
        ranks = range(comm.world_size)
        self._counters = [self._region.address(rank) for rank in ranks]
        self.native = _core.PayloadExchange([self._region.owner(rank) for rank in ranks], comm.rank, nbytes, data_bytes)

    def exchange(
        self, payload: bytes, *, deadline_s: float | None = None, name: str | Callable[[], str] = "exchange",
        collective: _core.SharedCollective | None = None,
    ) -> list[bytes]:  # fmt: skip
        """Run one exchange. Return every rank's payload, by rank.

        name: a name for error texts, or a function that returns it.
        collective: a collective whose first data travel with the payloads. If the payloads of all ranks announce this
            collective, call `finish` next.

        Raises the errors of `Communicator.wait`. Raises `ValueError` if the payload is longer than `nbytes`: nothing is
        then published, and this rank may call again with a shorter payload.
        """
        if len(payload) > self.nbytes:
            raise ValueError(f"the payload has {len(payload)} bytes: pass at most {self.nbytes}")
        comm = self.comm
        comm.check()
        if self._closed:
            raise ValueError(_CLOSED)
        native = self.native  # kept, because another thread may close this object
        if native is None:
            return comm.meet(payload, name=name if isinstance(name, str) else name(), deadline_s=deadline_s)
        deadline_s = comm.deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        try:
            if collective is not None:
                collective.load()
            is_complete = native.begin(payload, min(deadline_s, LOOK_S), comm.failed_address)
        except KeyboardInterrupt:
            self._interrupted(name)
            raise
        if not is_complete:
            self.wait(native, deadline_s, until, name)
        return [payload] * comm.world_size if native.is_equal() else native.payloads()

    def finish(
        self, collective: _core.SharedCollective, *, deadline_s: float | None, name: str | Callable[[], str]
    ) -> None:  # fmt: skip
        """Read the data of `collective`, whose first data have travelled with the last exchange, and complete it. All ranks must
        make this call. Raises the errors of `exchange`. After an error of this rank the group fails.
        """
        is_met, deadline_s = True, self.comm.deadline_s if deadline_s is None else deadline_s
        try:
            while progress := collective.run(min(deadline_s, LOOK_S), self.comm.failed_address, is_met):
                self.go_on(progress == DIFFERS, deadline_s, name)
                is_met = True
        except WeftError:
            raise
        except BaseException as error:  # peers wait for this rank
            self.comm.poison(f"{name if isinstance(name, str) else name()}: {error!r}")
            raise

    def go_on(self, is_complete: bool, deadline_s: float, name: str | Callable[[], str]) -> None:
        """Wait until all ranks have begun the current round of a collective. Call this method for the second and later
        rounds.

        is_complete: True if native code has seen all ranks begin an exchange, so that no wait is needed. If a rank's
            exchange is not a round of this collective, the group fails.

        Raises the errors of `exchange`.
        """
        native = self.native
        if native is None:  # another thread has closed this object, which has ended the wait in native code
            self.comm.check()
            raise ValueError(_CLOSED)
        if not is_complete:
            self.wait(native, deadline_s, time.monotonic() + deadline_s - min(LOOK_S, deadline_s), name)
        payloads = native.payloads()
        if payloads.count(payloads[self.comm.rank]) < len(payloads):
            text = f"ranks are out of step in {name if isinstance(name, str) else name()}"
            self.comm.poison(text)
            raise WeftError(f"{text}. This group has failed: make a new process group")

    def wait(
        self, native: _core.PayloadExchange, deadline_s: float, until: float, name: str | Callable[[], str]
    ) -> None:
        """Wait until all ranks have begun the same exchange as `native`. Raises the errors of `Communicator.wait`.
        native: the native object with which this rank has begun the exchange. Another thread may have set the attribute
        `native` to None since then. The other arguments are as for `Communicator.wait`.
        """
        text = name if isinstance(name, str) else name()
        try:
            for rank, counter in enumerate(self._counters):
                self.comm.wait(counter, native.epoch, name=text, peer=rank, deadline_s=deadline_s, until=until)
        except KeyboardInterrupt:
            self._interrupted(name)
            raise

    def _interrupted(self, name: str | Callable[[], str]) -> None:
        text = name if isinstance(name, str) else name()
        self.comm.poison(f"interrupted in {text}")  # the slots may no longer alternate

    def close(self) -> None:
        self._closed = True
        if self.comm.all_mapped:
            self.native = None
            self._region.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
