"""Cutting symmetric GPU memory from slabs, and returning it, without a GPU and without the memory itself."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from weft.errors import DisagreementError
from weft.symm import cuda


class _Rank:
    """A communicator of one rank with ordinary memory. It receives the scripted messages `others`."""

    def __init__(self, others: list[Any] | None = None) -> None:
        self.rank, self.world_size, self.device, self.others = 0, 1, torch.device("cpu"), others

    def all_gather(self, mine: Any, *, what: str) -> list[Any]:
        return [mine, *(self.others or [])] if isinstance(mine, tuple) else [mine]


def test_intervals() -> None:
    choose = random.Random(1)
    for _ in range(300):
        made = [(a, a + choose.randint(1, 9)) for a in choose.sample(range(60), 5)]
        taken = (a := choose.randint(0, 60), a + choose.randint(1, 20))
        held = {n for a, b in made for n in range(a, b)}
        joined, rest = cuda.merged(made), cuda.without(cuda.merged(made), taken)
        assert {n for a, b in joined for n in range(a, b)} == held
        assert all(b < c for (_, b), (c, _) in itertools.pairwise(joined))
        assert {n for a, b in rest for n in range(a, b)} == held - set(range(*taken))


def test_the_smallest_place_that_is_free_everywhere() -> None:
    mine, theirs = [[(0, 4096), (8192, 9216)], [(0, 512)]], [[(1024, 2048), (8704, 9216)], [(0, 512)]]
    assert cuda.smallest_place([mine, theirs], 512) == (0, 8704)
    assert cuda.smallest_place([mine, theirs], 600) == (0, 1024)
    assert cuda.smallest_place([mine, theirs], 2000) is None
    assert cuda.smallest_place([[], []], 1) is None


def test_given_back_memory_is_had_again_cleared_and_nothing_overlaps() -> None:
    comm: Any = _Rank()
    choose, held = random.Random(2), {}
    most = 0
    for number in range(100):
        if held and choose.random() < 0.5:
            region, value = held.pop(choose.choice(list(held)))
            assert (region.tensor(0, (region.nbytes,), torch.uint8) == value).all(), "somebody else wrote there"
            region.give_back()
        region = cuda.allocate(comm, choose.randint(1, 1 << 20), "test")
        found = region.tensor(0, (region.nbytes,), torch.uint8)
        assert not found.any(), "fresh memory is zero"
        found.fill_(value := number % 255 + 1)
        held[number] = region, value
        most = max(most, sum(r.nbytes for r, _ in held.values()))
    assert cuda.slab_bytes(comm) < 3 * most + (16 << 20)


def test_what_one_rank_still_holds_is_not_had_again() -> None:
    comm: Any = _Rank()
    region = cuda.allocate(comm, 1000, "test")
    slab_bytes, first = cuda.slab_bytes(comm), region.address(0)
    region.give_back()
    comm.others = [(1000, [[(1024, slab_bytes)]])]  # the other rank has not returned it
    again = cuda.allocate(comm, 1000, "test")
    assert again.address(0) == first + 1024
    with pytest.raises(ValueError, match="closed"):
        region.tensor(0, (1,), torch.uint8)


def test_views_stay_within_their_region() -> None:
    region = cuda.allocate(_Rank(), 100, "test")  # type: ignore[arg-type]
    assert region.tensor(0, (5, 4), torch.float32, 20).shape == (5, 4)
    for shape, offset in (((5, 4), 24), ((5, 4), -4), ((26,), 0), ((1,), 100)):
        with pytest.raises(ValueError, match=f"bytes at offset {offset} do not fit into a region of 100 bytes"):
            region.tensor(0, shape, torch.float32, offset)


def test_what_is_given_back_is_whole_again() -> None:
    """After several adjacent small regions are returned, a region as large as the slab fits."""
    comm: Any = _Rank()
    regions = [cuda.allocate(comm, 100, "test") for _ in range(20)]
    slab_bytes, first = cuda.slab_bytes(comm), regions[0].address(0)
    for region in regions:
        region.give_back()
    assert cuda.allocate(comm, slab_bytes, "test").address(0) == first
    assert cuda.slab_bytes(comm) == slab_bytes


def test_sizes_must_agree() -> None:
    comm: Any = _Rank([(5, [])])
    with pytest.raises(DisagreementError, match=r"\[4, 5\] bytes"):
        cuda.allocate(comm, 4, "test")
