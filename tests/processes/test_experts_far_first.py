"""Experts that send rows for other hosts first, on ranks that pretend to be on several hosts.

1. `WithinHost.exchange` of tensors that are larger than its memory. 2. Results of both operators and their gradients,
for several placements of ranks, uneven and empty splits, `max_rows` and returned tokens. Inputs are whole numbers, so
GEMMs are exact in every order. 3. Few tokens travel with the rendezvous. 4. All ranks avoid an implementation that is
slower on one rank. 5. Each call is chosen by its own number of tokens. 6. A rank that fails between two exchanges ends the
group. 7. Combines that are begun before the rendezvous: repeated calls, calls that a rank refuses or whose tables differ, too
large messages, and ranks that make another call.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import assert_error, error_of, own_group, told
from support.pretended_hosts import claimed, on_two_hosts, slow_on_rank_0
from support.slow import slow

import weft
from weft import symm
from weft.launch import Pool
from weft.runtime import two_ways
from weft.runtime.meeting import meeting_of
from weft.runtime.unfused import begun as early
from weft.runtime.unfused import experts, experts_far_first
from weft.runtime.unfused import experts as serial  # functions below have arguments called `experts`
from weft.runtime.within_host import WithinHost

K, N = 6, 5


def numbers(*shape, seed):
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def through_memory(group, nbytes):
    with claimed("a host"):  # all ranks are on this host
        own = own_group(group)
        comm = symm.communicator(own, "cpu")
    near, rank, world = WithinHost(comm), comm.rank, comm.world_size
    near.reserve(nbytes)
    for call in range(2):
        sizes = torch.randint(0, 60, (world, world), generator=torch.Generator().manual_seed(call))
        sizes[0] = 0  # this rank sends nothing
        every = [
            [numbers(int(n), 3, seed=100 * source + to) for to, n in enumerate(row)] for source, row in enumerate(sizes)
        ]
        received = [torch.full_like(of_rank[rank], torch.nan) for of_rank in every]
        near.exchange(every[rank], received, deadline_s=20.0, what="a test")
        for source in range(world):
            assert torch.equal(received[source], every[source][rank])
    dist.destroy_process_group(own)


@pytest.mark.parametrize("nbytes", [100, 1 << 16])
def test_tensors_pass_through_less_memory_than_they_have(pool: Pool, nbytes: int) -> None:
    pool.run(through_memory, nbytes, ranks=3, timeout_s=60)


def both_operators(group, hosts, experts, high):
    """Compare both implementations of both operators, forward and backward, with a reference that each rank computes
    from all ranks' data.
    """
    world, rank = group.size(), group.rank()
    with claimed(hosts[rank]):
        own = own_group(group)
        symm.communicator(own, "cpu")
    splits = torch.randint(0, high, (world, world * experts), generator=torch.Generator().manual_seed(high))
    splits[0, :experts] = 0
    splits[world - 1] = 0  # a rank without tokens
    tokens = [numbers(int(row.sum()), K, seed=10 + r) for r, row in enumerate(splits)]
    w, back = numbers(world * experts, K, N, seed=1), numbers(world * experts, N, K, seed=2)
    mine = slice(rank * experts, (rank + 1) * experts)
    of_expert = [
        torch.cat([tokens[r].split(splits[r].tolist())[e] for r in range(world)]) for e in range(world * experts)
    ]
    wanted = torch.cat([of_expert[e] @ w[e] for e in range(*mine.indices(world * experts))])
    returned = torch.cat([x @ w[e] @ back[e] for e, x in enumerate(tokens[rank].split(splits[rank].tolist()))])
    for far_first, few_bytes in ((True, -1), (False, -1), (False, 1 << 20)):
        with (
            mock.patch.object(two_ways.TwoWays, "takes_other", return_value=far_first),
            mock.patch.object(serial, "_FEW_BYTES", few_bytes),
        ):
            x, here = tokens[rank].clone().requires_grad_(), (w[mine].clone(), back[mine].clone().requires_grad_())
            y, received = weft.all_to_all_matmul(x, here[0], splits[rank], group=own, return_received=True)
            assert torch.equal(y, wanted)
            out = weft.matmul_all_to_all(y, here[1], received, splits[rank], group=own)
            assert torch.equal(out, returned)
            out.sum().backward()
            grad = torch.cat([
                torch.ones(len(part), K) @ back[e].T @ w[e].T for e, part in enumerate(x.split(splits[rank].tolist()))
            ])  # fmt: skip
            assert torch.equal(x.grad, grad)
            of_mine = [part.T @ torch.ones(len(part), K) for part in y.split(received.sum(0).tolist())]
            assert torch.equal(here[1].grad, torch.stack(of_mine))
            rows = int(splits[:, mine].sum()) + 3
            padded, _ = weft.all_to_all_matmul(
                tokens[rank], here[0], splits[rank], group=own, max_rows=rows, return_received=True
            )
            assert padded.shape == (rows, N)
            assert torch.equal(padded[:-3], wanted)
    found = experts_far_first._known[symm.communicator(own, "cpu")]
    dist.destroy_process_group(own)
    return len(found._ways)


@pytest.mark.parametrize(
    ("hosts", "experts", "high"), [slow("aabb", 3, 9), ("aab", 2, 40), ("abab", 1, 9), ("aabbcc", 2, 9), slow("ab", 2, 9)]
)  # fmt: skip
def test_results_and_gradients_are_right_both_ways(pool: Pool, hosts: str, experts: int, high: int) -> None:
    found = pool.run(both_operators, hosts, experts, high, ranks=len(hosts), timeout_s=90)
    assert min(found) >= 2  # both operators have compared the implementations


def carried(group):
    """Return which of several dispatches needed an exchange after the rendezvous. Only rank 3 has more tokens in later calls."""
    needed, rank, world = [], group.rank(), group.size()
    plain = mock.patch.object(experts, "all_to_all_matmul", side_effect=experts.all_to_all_matmul)
    never = mock.patch.object(two_ways.TwoWays, "takes_other", return_value=False)
    with on_two_hosts(group) as own, plain as exchanged, never:
        for call, rows in enumerate((2, 9000, 9000, 250_000, 250_000, 2)):
            counts = [4] * (world - 1) + [rows]
            splits = [torch.tensor([count] + [1] * (world - 1)) for count in counts]  # rank 0 receives the most
            tokens = [numbers(int(of.sum()), K, seed=10 * call + r) for r, of in enumerate(splits)]
            w, before = numbers(world, K, N, seed=1), exchanged.call_count
            y = weft.all_to_all_matmul(tokens[rank], w[rank : rank + 1], splits[rank], group=own, capacity=250_003)
            arrived = torch.cat([x.split(of.tolist())[rank] for x, of in zip(tokens, splits, strict=True)])
            assert torch.equal(y, arrived @ w[rank])
            needed.append(exchanged.call_count > before)
    return needed


def test_few_tokens_travel_with_the_rendezvous(pool: Pool) -> None:
    found = pool.run(carried, ranks=4, timeout_s=60)
    assert found == [[False, True, False, True, True, False]] * 4  # memory for more than 4 MiB is not reserved


def chosen(group, slow):
    """Return how many of 14 calls sent far rows first, if one implementation is slow on rank 0."""
    with on_two_hosts(group) as own:
        kind = experts_far_first.FarFirst
        counted = mock.patch.object(kind, "dispatch", autospec=True, side_effect=kind.dispatch)
        with counted as other, slow_on_rank_0(own, slow == "far first"):
            for call in range(14):
                count = 4 + (own.rank() + call) % 2  # sizes differ between ranks and calls, but are in one size bucket
                splits = torch.tensor([count, 0])
                weft.all_to_all_matmul(numbers(count, K, seed=call), numbers(1, K, N, seed=1), splits, group=own)
        return other.call_count


@pytest.mark.parametrize(("slow", "wanted"), [("far first", 6), ("one by one", 6 + 2)])
def test_all_ranks_decline_the_way_that_is_slower_on_one_rank(pool: Pool, slow: str, wanted: int) -> None:
    assert pool.run(chosen, slow, ranks=2, timeout_s=60) == [wanted] * 2


def tried(group, sizes):
    """Make calls whose busiest rank has these numbers of rows. Return, for each operator, which calls sent far rows first. Calls
    of up to 100 rows are few.
    """
    rank, world, kind = group.rank(), group.size(), experts_far_first.FarFirst
    w, back = numbers(world, K, N, seed=1), numbers(world, N, K, seed=2)
    found = {"dispatch": [], "combine": []}
    few = mock.patch.object(serial, "_FEW_BYTES", 100 * 4 * K)
    with on_two_hosts(group) as own, slow_on_rank_0(own, False), contextlib.ExitStack() as stack:
        counted = {
            name: stack.enter_context(
                mock.patch.object(kind, name, autospec=True, side_effect=getattr(kind, name))
            ) for name in found
        }  # fmt: skip
        stack.enter_context(few)
        for call, rows in enumerate(sizes):
            before = {name: one.call_count for name, one in counted.items()}
            splits = torch.ones(world, world, dtype=torch.int64)  # [source, expert]
            splits[call % world, (call + 1) % world] += rows - world  # one rank sends many, to one rank
            tokens = [numbers(int(of.sum()), K, seed=10 * call + r) for r, of in enumerate(splits)]
            parts = [x.split(of.tolist()) for x, of in zip(tokens, splits, strict=True)]
            y, received = weft.all_to_all_matmul(
                tokens[rank], w[rank : rank + 1], splits[rank], group=own, return_received=True
            )
            assert torch.equal(y, torch.cat([of[rank] for of in parts]) @ w[rank])
            out = weft.matmul_all_to_all(y, back[rank : rank + 1], received, splits[rank], group=own)
            assert torch.equal(out, torch.cat([x @ w[e] @ back[e] for e, x in enumerate(parts[rank])]))
            for name, one in counted.items():
                found[name].append(one.call_count > before[name])
    return found


BLOCKS = ([False] * 3 + [True] * 3) * 2


def test_a_call_with_few_tokens_decides_nothing_for_calls_with_many(pool: Pool) -> None:
    few, many = 5, 200
    for of_rank in pool.run(tried, [few] + [many] * 14 + [few] * 2 + [many] * 2, ranks=4, timeout_s=90):
        assert of_rank["dispatch"] == [False, *BLOCKS, True, True, False, False, True, True]
        # Ranks begin a combine before they know its number of rows, so they go by earlier calls.
        assert of_rank["combine"][2:16].count(True) >= 6 + 2


def fails(group):
    with on_two_hosts(group) as own:
        comm, given = (
            symm.communicator(own, "cpu"),
            (numbers(4, K, seed=1), numbers(1, K, N, seed=1), torch.tensor([2, 2])),
        )
        with mock.patch.object(two_ways.TwoWays, "takes_other", return_value=True):
            weft.all_to_all_matmul(*given, group=own)
            no_room = MemoryError("no room for a GEMM") if own.rank() == 1 else None
            native = experts_far_first.begin_piece
            with mock.patch.object(experts_far_first, "begin_piece", side_effect=no_room, wraps=native):
                return error_of(lambda: weft.all_to_all_matmul(*given, group=own)), comm.failed


def test_a_rank_that_fails_between_exchanges_ends_the_group(pool: Pool) -> None:
    (there, failed_there), (here, failed_here) = pool.run(fails, ranks=2, timeout_s=60)
    assert here[0] == "MemoryError"
    assert "no room for a GEMM" in there[1]
    assert (failed_there, failed_here) == (True, True)


def begun(group, most_bytes, few_bytes):
    """Return the errors of refused calls, the errors of the other calls, and the number of exchanges before a rendezvous
    after each kind of call.
    """
    rank, world, count = group.rank(), group.size(), []
    w = numbers(world, K, N, seed=1)
    kind = early.Early
    with (
        on_two_hosts(group) as own,
        mock.patch.object(early, "_MOST_BYTES", most_bytes),
        mock.patch.object(serial, "_FEW_BYTES", few_bytes),
        mock.patch.object(two_ways.TwoWays, "takes_other", return_value=True),
        mock.patch.object(kind, "begin", autospec=True, side_effect=kind.begin) as exchanges,
        mock.patch.object(serial, "_send_back", side_effect=serial._send_back) as sent_back,
    ):
        if (rails := meeting_of(symm.communicator(own, "cpu")).rails) is not None:
            rails.rows_bytes = 64  # too few for the first call

        def combined(seed, h_rows=0, expects=0):
            """Compare a call with its reference. h_rows, expects: numbers of rows that are wrong on rank 3."""
            splits = torch.randint(0, 9, (world, world), generator=torch.Generator().manual_seed(seed))
            tokens = [numbers(int(row.sum()), K, seed=10 * seed + r) for r, row in enumerate(splits)]
            parts = [x.split(row.tolist()) for x, row in zip(tokens, splits, strict=True)]
            h, mine, came = torch.cat([of[rank] for of in parts]), splits[rank].clone(), splits[:, rank].clone()
            if rank == 3:
                h, mine[0] = h[: len(h) - h_rows], mine[0] + expects
            y = weft.matmul_all_to_all(h, w[rank : rank + 1], came.view(-1, 1), mine, group=own, capacity=100)
            assert torch.equal(y, torch.cat([x @ w[e] for e, x in enumerate(parts[rank])]))
            count[-1] = exchanges.call_count - before

        errors, others = [], set()
        for wrong in ({}, {"h_rows": 1}, {"expects": 1}):
            count.append(0)
            before = exchanges.call_count
            if wrong:
                errors.append(error_of(lambda wrong=wrong: combined(5, **wrong)))
            for seed in range(1, 5):
                before = exchanges.call_count
                others.add(told(lambda seed=seed: combined(seed)))
        if rank < 2:
            other = error_of(lambda: combined(1))
        else:
            other = error_of(lambda: weft.matmul_all_reduce(torch.ones(4, K), torch.ones(K, 4), own))
        return errors, others, count, other, sent_back.call_count


@pytest.mark.parametrize(
    ("most_bytes", "few_bytes", "exchanges", "after"),
    [(4 << 20, -1, 1, 0), ((4 << 20) - 2, -1, 1, 0), (8 * K, -1, 0, 0), (4 << 20, 1 << 20, 0, 2)],
)
def test_combines_are_begun_before_ranks_meet(
    pool: Pool, most_bytes: int, few_bytes: int, exchanges: int, after: int
) -> None:
    for errors, others, count, other, sent_back in pool.run(begun, most_bytes, few_bytes, ranks=4, timeout_s=90):
        assert sent_back == after  # the first call, and the first that has more rows than memory is reserved for
        assert others == {"nothing"}
        refused, differs = errors
        assert_error(refused, "RefusedError", "rank 3")
        assert_error(differs, "RefusedError", "rank 0 sends")
        assert count == [exchanges] * 3
        assert other[0] == "DisagreementError"
