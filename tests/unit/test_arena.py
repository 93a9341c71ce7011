"""Arenas (`weft.runtime.cuda.arena`), without a GPU and without the memory itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from weft.runtime.cuda import arena
from weft.runtime.cuda.arena import LEAST_SHARED_BYTES, SPARE_BYTES, Arena, arena_for

MB = 1 << 20


class Region:
    def __init__(self, comm: Comm, nbytes: int) -> None:
        self.comm, self.nbytes = comm, nbytes
        comm.taken.append(self)

    def close(self) -> None: ...

    def give_back(self) -> None:
        self.comm.taken.remove(self)


class Comm:
    """A communicator of two ranks. others: what the other rank says next in `all_gather`."""

    device, all_mapped = torch.device("cuda", 0), True

    def __init__(self) -> None:
        self.taken: list[Region] = []
        self.others: list[Any] = []
        self.exchanges = 0

    def allocate(self, nbytes: int, what: str) -> Region:
        return Region(self, nbytes)

    def all_gather(self, mine: Any, what: str) -> list[Any]:
        self.exchanges += 1
        return [mine, self.others.pop() if self.others else mine]

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.taken)


class Memory:
    """A schedule's memory, of which only the arena matters."""

    arena: Arena
    closed: bool

    def __init__(self, comm: Comm, nbytes: int, before: Memory | None = None, **options: Any) -> None:
        self.users: list[Any] = [self]
        old = before.arena if before is not None and not before.closed else None
        self.arena = arena_for("family", nbytes, comm, "test", before=old, **options)  # type: ignore[arg-type]
        self.arena.join(self)
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.arena.leave(self)


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Comm:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: -1, raising=False)
    return Comm()


def test_schedules_of_a_family_share_and_meet_before_every_run(comm: Comm) -> None:
    first = Memory(comm, 300 * MB)
    assert not first.arena.enter(False)
    second = Memory(comm, 200 * MB)
    assert second.arena is first.arena
    assert comm.nbytes == 300 * MB
    assert first.arena.enter(False)
    assert first.arena.bytes_of_each == 150 * MB
    first.close()
    assert comm.nbytes == 300 * MB
    second.close()
    assert comm.nbytes == 0


def test_small_buffers_and_schedules_that_may_not_share_have_their_own_arena(comm: Comm) -> None:
    small = [Memory(comm, LEAST_SHARED_BYTES - 1) for _ in range(2)]
    alone = [Memory(comm, LEAST_SHARED_BYTES, shares=False) for _ in range(2)]
    assert len({id(memory.arena) for memory in small + alone}) == 4
    assert not any(memory.arena.enter(False) for memory in small + alone)


def test_nobody_joins_an_arena_whose_graphs_have_no_barrier(comm: Comm) -> None:
    first = Memory(comm, 300 * MB)
    first.arena.enter(True)
    second = Memory(comm, 200 * MB)
    assert second.arena is not first.arena
    third = Memory(comm, LEAST_SHARED_BYTES)
    assert third.arena is second.arena, "the newer arena is shared"
    third.arena.enter(True)  # with a barrier
    assert Memory(comm, 150 * MB).arena is third.arena
    comm.others = [False]  # the other rank has captured a run
    assert Memory(comm, 150 * MB).arena is not third.arena


def test_ranks_exchange_nothing_about_an_arena_that_one_of_them_may_have_freed(comm: Comm) -> None:
    first = Memory(comm, 300 * MB)
    held = first.arena
    first.close()
    assert Memory(comm, 200 * MB).arena is not held
    assert comm.exchanges == 0


def test_an_outgrown_arena_that_another_rank_has_captured_stays(comm: Comm) -> None:
    first = Memory(comm, 300 * MB)
    comm.others = [[True]]
    second = Memory(comm, 400 * MB, first)
    assert comm.exchanges == 1
    assert second.arena is not first.arena
    assert comm.nbytes == (300 + 450) * MB
    first.close()
    assert comm.nbytes == 450 * MB


def test_memory_is_that_of_the_largest(comm: Comm) -> None:
    """Schedules of random sizes outgrow their arenas. Captured arenas stay."""
    draw, made, most, peak = random.Random(1), dict[int, Memory](), 0, 0.0
    for _ in range(300):
        kind, nbytes = draw.randrange(4), draw.randrange(LEAST_SHARED_BYTES, 1000 * MB)
        known = made.get(kind)
        if known is None or known.closed or known.arena.outgrown or nbytes > known.arena.nbytes:
            made[kind] = Memory(comm, nbytes, known)
        most = max(most, nbytes)
        peak = max(peak, (comm.nbytes - SPARE_BYTES) / most)
    assert peak <= 1.25
    assert len({id(memory.arena) for memory in made.values()}) == 1


def test_if_memory_is_short_an_arena_has_no_reserve(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Memory(comm, 200 * MB)
    made = Arena.__init__

    def short(self: Arena, comm: Any, nbytes: int, what: str) -> None:
        if nbytes > 300 * MB:
            raise arena.OutOfSharedMemoryError("no")
        made(self, comm, nbytes, what)

    monkeypatch.setattr(Arena, "__init__", short)
    assert Memory(comm, 300 * MB, first).arena.nbytes == 300 * MB
    with pytest.raises(arena.OutOfSharedMemoryError):
        Memory(comm, 301 * MB)
