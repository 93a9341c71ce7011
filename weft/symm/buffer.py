"""What a program holds of symmetric memory: tensors that every rank sees (`SymmetricBuffer`) and counters (`Signal`).

Both belong to an explicit process group, exist on each of its ranks, and are made and freed by hand: making one is
collective, closing one is not. See `csrc/signal.hpp` for how a signal orders the writes around it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft import _core
from weft.symm.domain import Domain, domain


class SymmetricBuffer:
    """A tensor of the same shape and dtype on every rank of `group`, each of them readable and writable by all.

    Zero at first. Plain loads and stores: it takes a `Signal` (or another synchronisation) to know when a peer's write
    is there. `local` is this rank's, `peer(rank)` any rank's (group ranks). After `close()` these raise, while tensors
    taken before stay valid; memory goes back to the system when the last rank lets go of it.

    Raises `DisagreementError` if ranks ask for different shapes or dtypes, `OutOfSharedMemoryError` if there is no
    room, on every rank alike; and what `weft.symm.domain.domain` raises.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
    ):
        self.shape = torch.Size(shape)
        self.dtype = dtype
        if any(n < 0 for n in self.shape):
            raise ValueError(f"shape={tuple(shape)} must not have negative sizes")
        self.domain: Domain = domain(group, device)
        self._region = self.domain.allocate(self.shape.numel() * dtype.itemsize, what=repr(self))

    @property
    def local(self) -> torch.Tensor:
        return self.peer(self.domain.rank)

    def peer(self, rank: int) -> torch.Tensor:
        return self._region.tensor(rank, self.shape, self.dtype)

    def close(self) -> None:
        self._region.close()

    def __enter__(self) -> SymmetricBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SymmetricBuffer({tuple(self.shape)}, {self.dtype})"


class Signal:
    """`count` 64-bit counters on every rank of `group` that any rank can raise and their owner can wait for.

    Order: `set` and `add` release, `wait` and `read` acquire. What a rank wrote to symmetric memory before it raised a
    signal is visible to the rank that has waited for the raised value. Counters start at 0 and should only grow (an
    epoch per use): nobody can know when it is safe to reset one that a peer may still be looking at.
    """

    def __init__(self, count: int = 1, *, group: dist.ProcessGroup, device: torch.device | str = "cpu"):
        if count < 1:
            raise ValueError(f"count={count} must be at least 1")
        self.count = count
        self.domain: Domain = domain(group, device)
        if self.domain.device.type != "cpu":
            raise ValueError(
                f"device={device}: signals between CPU processes live on 'cpu'; GPU code raises its own on streams"
            )
        self._region = self.domain.allocate(count * _core.COUNTER_BYTES, what=f"Signal(count={count})")

    def set(self, value: int, *, peer: int, index: int = 0) -> None:
        """Make counter `index` of rank `peer` equal to `value` and wake who waits for it."""
        self.domain.check()
        _core.signal_set(self._address(peer, index), value)

    def add(self, amount: int, *, peer: int, index: int = 0) -> None:
        """Add `amount` to counter `index` of rank `peer`, atomically, and wake who waits for it."""
        self.domain.check()
        _core.signal_add(self._address(peer, index), amount)

    def read(self, index: int = 0) -> int:
        """The value of this rank's counter `index` now."""
        return _core.signal_read(self._address(self.domain.rank, index))

    def wait(self, value: int, *, index: int = 0, peer: int | None = None, deadline_s: float | None = None) -> int:
        """Wait until this rank's counter `index` is at least `value`; returns what it is then.

        `peer`, if given, is the rank that will raise it: if that rank leaves, the wait ends at once. Raises
        `DeadlineError` with rank, signal, wanted, found after `deadline_s` seconds (default `WEFT_DEADLINE_S`), and
        `PeerLostError` or `PoisonedGroupError` when the group fails meanwhile. Each of these ends the group's life.
        """
        address = self._address(self.domain.rank, index)
        return self.domain.wait(address, value, name=f"signal {index}", peer=peer, deadline_s=deadline_s)

    def close(self) -> None:
        self._region.close()

    def __enter__(self) -> Signal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _address(self, rank: int, index: int) -> int:
        if not 0 <= index < self.count:
            raise ValueError(f"index={index} must be between 0 and {self.count - 1}")
        return self._region.address(rank) + index * _core.COUNTER_BYTES
