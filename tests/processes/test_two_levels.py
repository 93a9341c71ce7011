"""Collectives in two levels, for ranks that pretend to be on several hosts: results, bytes between hosts, and a missing
rank.

1. `ranks_per_host`: which placements have rails. 2. Every collective, for shapes that the number of ranks per host
divides and for others, on inputs whose sums are exact in every order. 3. Each operator in chunks: each byte is sent to
each host once. 4. A rank that does not take part. Functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import assert_deadline
from support.on_ranks import BF16, F32, F64, error_of, own_group
from support.pretended_hosts import claimed

import weft
from weft import symm
from weft.launch import Pool
from weft.runtime import collectives as of_torch
from weft.runtime import two_levels
from weft.runtime.cpu import run


@pytest.mark.parametrize(
    ("hosts", "wanted"),
    [
        ("aabb", 2),
        ("aaabbb", 3),
        ("aabbcc", 2),
        *((name, 0) for name in ["aaaa", "ab", "aab", "abab", "abba", "aabbaa"]),
    ],
)
def test_rails_need_as_many_consecutive_ranks_on_each_host(hosts: str, wanted: int) -> None:
    assert two_levels.ranks_per_host(hosts) == wanted


def whole_numbers(rank, shape, dtype, seed):
    """Return small whole numbers. Sums of eight such numbers are exact in bf16."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(10 * seed + rank)).to(dtype)


def collectives(group, n_hosts):
    rank, world = group.rank(), group.size()
    with claimed(f"host {rank * n_hosts // world}"):
        own = own_group(group)
        comm = symm.communicator(own, "cpu")
    levels, call = two_levels.TwoLevels(comm, world // n_hosts, 30.0), two_levels.Call("a test", 30.0)
    seed = 0
    for dtype in (F32, BF16, F64):
        for n, cols in ((1, 1), (3, 5), (8, 64)):
            seed += 1
            levels.near.reserve(world * n * cols * dtype.itemsize)
            ranks = range(world)
            shards = [whole_numbers(r, (n, cols), dtype, seed) for r in ranks]
            whole = torch.full((world * n, cols), torch.nan, dtype=dtype)
            levels.all_gather(shards[rank], whole, call)
            assert torch.equal(whole, torch.cat(shards))
            sources = [whole_numbers(r, (world * n, cols), dtype, 100 + seed) for r in ranks]
            total = torch.stack(sources).sum(0)
            mine = levels.reduce_scatter(sources[rank].clone(), call)
            assert mine.dtype == dtype
            assert torch.equal(mine, total.split(n)[rank])
            # A number of rows that is not divisible by the number of ranks.
            reduced = sources[rank].clone()[:-1].contiguous()
            levels.all_reduce(reduced, call)
            assert torch.equal(reduced, total[:-1])
    dist.destroy_process_group(own)


@pytest.mark.parametrize(("ranks", "n_hosts"), [(4, 2), (6, 3)])
def test_collectives_are_exact(pool: Pool, ranks: int, n_hosts: int) -> None:
    pool.run(collectives, n_hosts, ranks=ranks, timeout_s=60)


def crossing(group, chunks):
    """Return the bytes that this rank sends to other hosts in one call of each operator."""
    rank, world = group.rank(), group.size()
    with claimed(f"host {rank * 2 // world}"):
        own = own_group(group)
        symm.communicator(own, "cpu")
    sent, n_hosts = [0], 2
    fraction = (n_hosts - 1) / n_hosts

    def counted(name, size, module=two_levels):
        native = getattr(module, name)

        def call(at, *given):
            sent[0] += size(*given)
            return native(at, *given)

        return mock.patch.object(module, name, call)

    def flat(*given, **options):
        raise AssertionError("a collective of all ranks")

    gather = f"ficco_1d_collective[start=hetero,gemms=unfused,steps={chunks}]"
    x_shard, x, found = whole_numbers(rank, (8, 16), F32, 1), whole_numbers(rank, (32, 16), F32, 2), {}
    xs = [whole_numbers(r, (32, 16), F32, 2) for r in range(world)]
    gathered = torch.cat([whole_numbers(r, (8, 16), F32, 1) for r in range(world)])
    w = whole_numbers(9, (16, 12), F32, 3)
    calls = {
        "all_gather_matmul": (
            lambda: weft.all_gather_matmul(x_shard, [w], 0, own, return_A=False, schedule=gather)[1][0],
            gathered @ w,
        ),
        "matmul_reduce_scatter": (
            lambda: weft.matmul_reduce_scatter(x, w, "sum", 0, own, schedule=f"collective[chunks={chunks}]"),
            (sum(xs) @ w).split(8)[rank],
        ),
        "matmul_all_reduce": (
            lambda: weft.matmul_all_reduce(x, w, own, schedule=f"collective[chunks={chunks}]"), sum(xs) @ w
        ),
    }  # fmt: skip
    with (
        counted("gather_now", lambda out, x: x.nbytes * (n_hosts - 1)),
        counted("exchange_now", lambda out, x, *sizes: x.nbytes, of_torch),
        counted("reduce_now", lambda xs: 2 * xs[0].nbytes * fraction),
        mock.patch.multiple(
            run, all_gather_single=flat, all_reduce_single=flat, reduce_scatter_single=flat
        ),
    ):  # fmt: skip
        for op, (call, wanted) in calls.items():
            sent[0] = 0
            assert torch.equal(call(), wanted), op
            found[op] = sent[0]
    dist.destroy_process_group(own)
    return found


@pytest.mark.parametrize("chunks", [1, 2])
def test_each_byte_crosses_once_per_host(pool: Pool, chunks: int) -> None:
    """On two hosts of two ranks, a host sends its shards once. It also sends its sums for the other host's rows, and
    each sum of the all-reduce once.
    """
    found = pool.run(crossing, chunks, ranks=4, timeout_s=60)
    for host in (found[:2], found[2:]):
        sent = {op: sum(one[op] for one in host) for op in found[0]}
        assert sent == {
            "all_gather_matmul": 2 * 8 * 16 * 4, "matmul_reduce_scatter": 2 * 8 * 12 * 4, "matmul_all_reduce": 32 * 12 * 4,
        }  # fmt: skip


def missing(group):
    rank, world = group.rank(), group.size()
    with claimed(f"host {rank * 2 // world}"):
        own = own_group(group)
        comm = symm.communicator(own, "cpu")
    levels, call = two_levels.TwoLevels(comm, 2, 30.0), two_levels.Call("all_gather of a test", 0.5)
    levels.near.reserve(1024)
    if rank == world - 1:
        return error_of(lambda: comm.wait(comm.failed_address, 1 << 40, name="the end", peer=None, deadline_s=20.0))
    x = torch.ones(4, 4)
    return error_of(lambda: levels.all_gather(x, torch.empty(4 * world, 4), call))


def test_a_rank_that_takes_no_part_is_a_missed_deadline(pool: Pool) -> None:
    found = pool.run(missing, ranks=4, timeout_s=40)
    assert_deadline(found[:3], r"rank \d waited 0.5 s for all_gather of a test")
