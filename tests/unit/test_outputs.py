"""OutputPool on ordinary memory: which buffer is lent, when it becomes free, and when a result is copied out."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from weft.errors import OutOfSharedMemoryError, WeftError
from weft.runtime.outputs import OutputPool

SHAPE = (4, 8)
NBYTES = 4 * 8 * 4


class Region:
    """The memory of one rank. As with a real region, views stay valid after it is closed."""

    def __init__(self, nbytes: int) -> None:
        self.memory: np.ndarray | None = np.zeros(nbytes, dtype=np.uint8)

    def address(self, rank: int) -> int:
        assert self.memory is not None
        return self.memory.ctypes.data

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
        assert self.memory is not None
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return torch.from_numpy(self.memory[offset_bytes : offset_bytes + nbytes]).view(dtype).view(shape)

    def owner(self, rank: int) -> np.ndarray | None:
        return self.memory

    def close(self) -> None:
        self.memory = None


class Communicator:
    rank, world_size, device = 0, 1, torch.device("cpu")

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.room = 1 << 30

    def allocate(self, nbytes: int) -> Region:
        if nbytes > self.room:
            raise OutOfSharedMemoryError(f"wanted {nbytes}")
        self.regions.append(Region(nbytes))
        return self.regions[-1]


def pool_of(count: int) -> tuple[OutputPool, Communicator]:
    comm: Any = Communicator()
    pool = OutputPool(comm, count)
    assert pool.reserve(NBYTES, lambda: None)
    return pool, comm


def result(pool: OutputPool, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the result of a call: acquire a buffer, fill it as a kernel would, and lend it."""
    slot = pool.acquire()
    pool._region.tensor(0, SHAPE, dtype, slot * pool.slot_bytes).fill_(value)
    return pool.lend(slot, SHAPE, dtype)


def all_free(pool: OutputPool) -> list[int]:
    """Return the buffers that the next calls may get."""
    free = [pool.acquire() for _ in range(pool.count - pool.lent)]
    with pytest.raises(WeftError, match="no result buffer is free"):
        pool.acquire()
    for slot in free:
        pool.give_back(slot)
    return sorted(free)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_result_is_the_buffer_itself(dtype: torch.dtype) -> None:
    pool, comm = pool_of(2)
    output = result(pool, 1.5, dtype)
    assert output.dtype == dtype
    assert output.shape == SHAPE
    assert torch.equal(output, torch.full(SHAPE, 1.5, dtype=dtype))
    offset = output.data_ptr() - comm.regions[0].address(0)
    assert offset in (0, pool.slot_bytes)
    assert pool.copied == 0


@pytest.mark.parametrize("count", [2, 3, 4])
def test_as_many_results_as_buffers_but_one_may_be_held(count: int) -> None:
    pool, _ = pool_of(count)
    held = [result(pool, value) for value in range(count - 1)]
    assert pool.copied == 0
    assert len({output.data_ptr() for output in held}) == count - 1
    held += [result(pool, value) for value in range(count - 1, count + 2)]
    assert pool.copied == 3
    assert len({output.data_ptr() for output in held}) == count + 2
    for value, output in enumerate(held):
        assert (output == value).all()
    held.clear()
    assert pool.lent == 0
    assert all_free(pool) == list(range(count))
    result(pool, 1.0)
    assert pool.copied == 3


def captured(pool: OutputPool) -> tuple[torch.Tensor, int]:
    """Return (the result of a call that a graph has captured, the buffer that replays write)."""
    slot = pool.acquire()
    return pool.lend(slot, SHAPE, torch.float32, captured=True), slot


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_replays_write_no_buffer_that_is_lent(count: int) -> None:
    pool, comm = pool_of(count)
    graphs = []
    for _ in range(count + 2):
        _, slot = captured(pool)  # the result is dropped
        graphs.append(slot)
    assert pool.lent == 0
    assert pool.copied == 3  # results in the last buffer are copied
    held = []
    for value in range(4):
        held.append(result(pool, value))
        for slot in graphs:
            comm.regions[0].tensor(0, SHAPE, torch.float32, slot * pool.slot_bytes).fill_(-1)
    for value, output in enumerate(held):
        assert (output == value).all()


def test_a_graphs_result_is_its_buffer_and_is_held_until_it_is_dropped() -> None:
    pool, comm = pool_of(2)
    output, slot = captured(pool)
    assert output.data_ptr() == comm.regions[0].address(0) + slot * pool.slot_bytes
    assert pool.lent == 1
    del output
    assert pool.lent == 0
    assert pool._free == [1 - slot]


def test_memory_that_replays_write_is_kept_when_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, comm = pool_of(2)
    captured(pool)
    assert pool.reserve(pool.slot_bytes + 1, lambda: None)
    assert pool._of_graphs == comm.regions[:1]
    assert len(all_free(pool)) == 2
    assert pool.reserve(pool.slot_bytes + 1, lambda: None)
    assert pool._of_graphs == comm.regions[:1]  # no call was captured in between
    given = []
    monkeypatch.setattr(type(comm.regions[0]), "give_back", lambda region: given.append(region), raising=False)
    pool.close()
    assert given == [comm.regions[2], comm.regions[0]]


def test_a_buffer_is_free_when_the_last_view_is_gone() -> None:
    pool, _ = pool_of(2)
    output = result(pool, 3.0)
    view, array = output[1:, 2:].t(), output.numpy()
    del output
    assert pool.lent == 1
    del view
    assert pool.lent == 1
    assert (array == 3.0).all()
    del array
    assert pool.lent == 0


def test_one_buffer_may_not_be_held() -> None:
    pool, _ = pool_of(1)
    output = result(pool, 1.0)
    with pytest.raises(WeftError, match=r"outputs=1.*delete the last result.*or pass outputs=2"):
        pool.acquire()
    del output
    assert (result(pool, 2.0) == 2.0).all()
    assert pool.copied == 0


def test_a_call_that_fails_gives_its_buffer_back() -> None:
    pool, _ = pool_of(1)
    pool.give_back(pool.acquire())
    assert all_free(pool) == [0]


def test_growth_leaves_held_results_alone() -> None:
    pool, comm = pool_of(2)
    small = result(pool, 1.0)
    assert not pool.reserve(pool.slot_bytes, lambda: None)
    quiesced: list[bool] = []
    assert pool.reserve(pool.slot_bytes + 1, lambda: quiesced.append(True))
    assert quiesced == [True]
    assert len(comm.regions) == 2
    assert pool.nbytes == 2 * pool.slot_bytes == len(comm.regions[1].memory)  # type: ignore[arg-type]
    larger = result(pool, 2.0)
    assert (small == 1.0).all()
    assert (larger == 2.0).all()
    del small, larger
    assert all_free(pool) == [0, 1], "a buffer of the old memory must not come back into the new"


def test_growth_that_fails_changes_nothing() -> None:
    pool, comm = pool_of(2)
    before = pool.slot_bytes
    comm.room = 0
    with pytest.raises(OutOfSharedMemoryError):
        pool.reserve(100 * before, lambda: None)
    assert pool.slot_bytes == before
    assert (result(pool, 2.0) == 2.0).all()


def test_a_result_outlives_the_region_that_is_closed() -> None:
    pool, comm = pool_of(2)
    output = result(pool, 4.0)
    memory = weakref.ref(comm.regions[0].memory)  # type: ignore[arg-type]
    comm.regions[0].close()
    del pool
    gc.collect()
    assert memory() is not None
    assert (output == 4.0).all()
    del output
    gc.collect()
    assert memory() is None


def test_results_without_rows() -> None:
    pool, _ = pool_of(2)
    outputs = [pool.lend(pool.acquire(), (0, 8), torch.float32) for _ in range(5)]
    assert all(output.shape == (0, 8) for output in outputs)
    outputs.clear()
    assert all_free(pool) == [0, 1]


@pytest.mark.parametrize("count", [0, 256])
def test_how_many_buffers_there_may_be(count: int) -> None:
    comm: Any = Communicator()
    with pytest.raises(ValueError, match=rf"outputs={count} must be between 1 and 255"):
        OutputPool(comm, count)
