"""A small all-gather through shared memory, by which CPU ranks of one host compare a call in microseconds.

The epoch is the number of the exchange. Every rank writes its payload into its own memory and sets its own counter to the
epoch. It reads each peer's payload when the peer's counter has reached the epoch.

Each rank has two buffers for payloads, and uses them alternately. Two are enough. A rank that publishes epoch e + 1 has read
all payloads of epoch e. The payload of epoch e + 2 overwrites that of epoch e. A rank writes it only after it has seen every
counter at e + 1. By then, all ranks have read epoch e.
"""

from __future__ import annotations

import torch

from weft import _core
from weft.symm.communicator import Communicator

_LENGTH_BYTES = 8


class Exchange:
    """An all-gather of up to `nbytes` bytes per rank, which ranks may repeat. All ranks must construct it, and make the
    same calls from one thread at a time.

    comm: a communicator on CPU. In a group on several hosts, payloads travel over its connections, in about one round trip.
    """

    def __init__(self, comm: Communicator, nbytes: int = 2048):
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes} must not be negative")
        if comm.device.type != "cpu":
            raise ValueError(
                f"an Exchange needs a communicator on CPU, not on {comm.device}: pass communicator(group, 'cpu')"
            )
        self.comm = comm
        self.nbytes = nbytes
        self._epoch = 0
        self._closed = False
        comm._holders.add(self)  # closed with the communicator, since its views keep memory mapped
        if not comm.all_mapped:
            return
        # Layout per rank: a counter on its own cache line, then two slots, each with a length and a payload.
        stride = -(-(_LENGTH_BYTES + nbytes) // 64) * 64
        self._offsets = (64, 64 + stride)
        self._region = comm.allocate(64 + 2 * stride, what=f"Exchange(nbytes={nbytes})")
        self._views = [
            self._region.tensor(rank, (self._region.nbytes,), torch.uint8).numpy().data
            for rank in range(comm.world_size)
        ]
        self._counters = [self._region.address(rank) for rank in range(comm.world_size)]

    def exchange(self, payload: bytes, *, deadline_s: float | None = None, name: str = "exchange") -> list[bytes]:
        """Run one exchange. Return every rank's payload, by rank.

        name: a name for error texts.

        Raises the errors of `Communicator.wait`. Raises `ValueError` if the payload is longer than `nbytes`: nothing is
        then published, and this rank may call again with a shorter payload.
        """
        if len(payload) > self.nbytes:
            raise ValueError(f"the payload has {len(payload)} bytes: pass at most {self.nbytes}")
        comm = self.comm
        comm.check()
        if self._closed:
            raise ValueError("this exchange is closed: make a new one")
        if not comm.all_mapped:
            return comm.meet(payload, name=name, deadline_s=deadline_s)
        epoch = self._epoch = self._epoch + 1
        at = self._offsets[epoch % 2]
        start = at + _LENGTH_BYTES
        own = self._views[comm.rank]
        own[at:start] = len(payload).to_bytes(_LENGTH_BYTES, "little")
        own[start : start + len(payload)] = payload
        _core.signal_set(self._counters[comm.rank], epoch)
        result = []
        try:
            for rank, (view, counter) in enumerate(zip(self._views, self._counters, strict=True)):
                if _core.signal_read(counter) < epoch:  # read first, because this is much cheaper than a wait
                    comm.wait(counter, epoch, name=name, peer=rank, deadline_s=deadline_s)
                end = start + int.from_bytes(view[at:start], "little")
                result.append(bytes(view[start:end]))
        except KeyboardInterrupt:
            comm.poison(f"interrupted in {name}")  # the slots may no longer alternate
            raise
        return result

    def close(self) -> None:
        self._closed = True
        if self.comm.all_mapped:
            self._views = []
            self._region.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
