"""Collectives that ride with the rendezvous of ranks on several hosts: results, disagreement, refusals, and missing ranks.

1. Results for small and larger matrices, on inputs whose sums are exact in every order, with a rank that comes late.
2. Each byte crosses once per host, in one message of each rail, or two for an all-reduce.
3. Ranks that call with other sizes, another operator or bad input. The sizes that gloo would receive differ.
4. A rank that does not come, or dies.
5. `ranks_per_host`: which placements have rails. 6. Sockets of a rail are closed with the group, not left to the garbage collector.

The functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import time
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import assert_deadline
from support.on_ranks import BF16, F32, F64, assert_errors, error_of, own_group, told, waits_end_after
from support.pretended_hosts import claimed

import weft
from weft import symm
from weft.launch import Pool
from weft.runtime import collectives
from weft.runtime.rail import rail_on, ranks_per_host
from weft.runtime.unfused.turn import Turn

COLUMNS = 24
ROWS = (1, 3, 640)  # of a rank, for matrices of less and of more than 64 KiB


@contextlib.contextmanager
def on_hosts(group: dist.ProcessGroup, n_hosts: int = 2) -> Iterator[dist.ProcessGroup]:
    """A group of the same ranks, as many on each host."""
    with claimed(f"host {group.rank() * n_hosts // group.size()}"):
        own = own_group(group)
        symm.communicator(own, "cpu")
    yield own
    dist.destroy_process_group(own)


def whole_numbers(rank, shape, dtype, seed):
    """Sums of the products are exact in bf16."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(10 * seed + rank)).to(dtype)


def call_of(operator, rank, world, n, dtype, seed):
    """Return a call with `schedule="serial"` on a group, and its result."""
    ranks, w = range(world), torch.eye(8, COLUMNS, dtype=dtype)
    if operator == "all_gather_matmul":
        shards = [whole_numbers(r, (n, 8), dtype, seed) for r in ranks]
        return (
            lambda group: weft.all_gather_matmul(shards[rank], [w], 0, group, schedule="serial")[1][0],
            torch.cat(shards) @ w,
        )
    xs = [whole_numbers(r, (world * n - (operator == "matmul_all_reduce"), 8), dtype, seed) for r in ranks]
    total = (torch.stack(xs).sum(0) @ w).to(dtype)
    if operator == "matmul_all_reduce":
        return lambda group: weft.matmul_all_reduce(xs[rank], w, group, schedule="serial"), total
    return lambda group: weft.matmul_reduce_scatter(xs[rank], w, "sum", 0, group, schedule="serial"), total.split(n)[
        rank
    ]


OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def results(group, n_hosts):
    rank, world = group.rank(), group.size()
    with on_hosts(group, n_hosts) as own:
        for seed, (dtype, n) in enumerate((dtype, n) for dtype in (F32, BF16, F64) for n in ROWS):
            for operator in OPERATORS:
                call, wanted = call_of(operator, rank, world, n, dtype, seed)
                time.sleep(0.01 * (rank == seed % world))
                for _ in range(2):
                    assert torch.equal(call(own), wanted), (operator, dtype, n)


@pytest.mark.parametrize(("ranks", "n_hosts"), [(4, 2), (6, 3)])
def test_results_are_exact(pool: Pool, ranks: int, n_hosts: int) -> None:
    pool.run(results, n_hosts, ranks=ranks, timeout_s=100)


def crossing(group):
    """Return, for each operator, the bytes and the number of messages that this rank sends to its rail in a call."""
    found = {}
    with on_hosts(group) as own:
        for operator in OPERATORS:
            call, wanted = call_of(operator, group.rank(), group.size(), 640, F32, 1)
            call(own)
            link = rail_on(symm.communicator(own, "cpu")).link
            before = link.bytes_sent, link.messages
            with mock.patch.object(collectives, "exchange_now") as by_gloo:
                assert torch.equal(call(own), wanted)
            assert not by_gloo.called
            found[operator] = link.bytes_sent - before[0], link.messages - before[1]
    return found


def test_each_byte_crosses_once_per_host(pool: Pool) -> None:
    found = pool.run(crossing, ranks=4, timeout_s=40)
    shard = 640 * COLUMNS * 4
    once = {"all_gather_matmul": 2 * 640 * 8 * 4, "matmul_reduce_scatter": 2 * shard, "matmul_all_reduce": 4 * shard}
    for host in (found[:2], found[2:]):
        for operator, wanted in once.items():
            (first, one), (second, other) = (rank[operator] for rank in host)
            assert one == other == 1 + (operator == "matmul_all_reduce")  # which sends its data in two halves
            assert 0 <= first + second - wanted < 4096, operator  # and the payloads of the rendezvous


def differ(group, apart):
    """The last rank makes another call, which all ranks have made before."""
    rank, last = group.rank(), group.size() - 1
    with on_hosts(group) as own:
        if apart == "cargo":  # on the last rank no data ride with the rendezvous, which must not happen
            call, _ = call_of("matmul_all_reduce", rank, last + 1, 640, F32, 1)
            call(own)
            rides = Turn.rails_for if rank < last else lambda turn, nbytes: None
            with mock.patch.object(Turn, "rails_for", rides):
                return error_of(lambda: call(own))
        usual, _ = call_of("matmul_all_reduce", rank, last + 1, 640, F32, 1)
        operator, n = {"size": ("matmul_all_reduce", 8), "operator": ("matmul_reduce_scatter", 640)}[apart]
        other, _ = call_of(operator, rank, last + 1, n, F32, 1)
        usual(own), other(own)
        return error_of(lambda: (other if rank == last else usual)(own))


def test_ranks_whose_data_ride_and_do_not_disagree(pool: Pool) -> None:
    assert_errors(
        pool.run(differ, "cargo", ranks=4, timeout_s=40),
        "DisagreementError",
        "ranks made different calls at rendezvous ",
    )


@pytest.mark.parametrize("apart", ["size", "operator"])
def test_ranks_that_call_otherwise_are_named_and_live_on(pool: Pool, apart: str) -> None:
    assert_errors(
        pool.run(differ, apart, ranks=4, timeout_s=40),
        "DisagreementError",
        "ranks 0, 1, 2: all_reduce y -> y of matmul_all_reduce, [2559, 8] @ ",
        "rank 3: ",
    )


def refused(group, by):
    rank = group.rank()
    with on_hosts(group) as own:
        call, wanted = call_of("all_gather_matmul", rank, group.size(), 640, F32, 1)
        call(own)
        said = told(
            lambda: weft.all_gather_matmul(torch.ones(3, 8), [torch.ones(9, 4)], 0, own) if rank == by else call(own)
        )
        assert torch.equal(call(own), wanted)
    return said


@pytest.mark.parametrize("by", [0, 3])
def test_a_rank_that_refuses_is_named_and_the_group_goes_on(pool: Pool, by: int) -> None:
    for said in pool.run(refused, by, ranks=4, timeout_s=40):
        assert said.startswith(f"RefusedError: rank {by}: "), said


def missing(group, fault):
    rank, last = group.rank(), group.size() - 1
    with on_hosts(group) as own:
        call, _ = call_of("matmul_all_reduce", rank, last + 1, 3, F32, 1)
        call(own)
        pids = symm.communicator(own, "cpu").all_gather(os.getpid(), what="pids")
        if rank == last:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1.5)
            return pids[last], "", ""
        with waits_end_after(0.5 if fault == "late" else 30):
            return pids[last], *error_of(lambda: call(own))


def test_the_rank_that_does_not_come_is_named_on_every_host(pool: Pool) -> None:
    found = pool.run(missing, "late", ranks=4, timeout_s=40)
    assert_deadline(
        [one[1:] for one in found[:3]], r"rank [012] waited 0.5 s for .* from rank 3 \(pid \d+ on host host 1\)"
    )


def test_a_rank_that_dies_is_named_on_every_host() -> None:
    with Pool(4) as pool:
        found = pool.run(missing, "kill", return_exceptions=True, timeout_s=40)
    for pid, kind, text in found[:3]:
        assert kind == "PeerLostError"
        assert re.search(rf"rank 3 \(pid {pid} on host host 1\) died", text)


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
    assert ranks_per_host(hosts) == wanted


def leaves_sockets(group):
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with on_hosts(group) as own:
            weft.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), own)
        del own
        gc.collect()
    return [str(one.message) for one in caught if "unclosed" in str(one.message)]


def test_sockets_of_a_rail_are_closed_with_the_group(pool: Pool) -> None:
    assert pool.run(leaves_sockets, ranks=4, timeout_s=60) == [[]] * 4
