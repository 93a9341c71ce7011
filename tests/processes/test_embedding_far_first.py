"""Pooling and sending other hosts' samples first, on ranks that pretend to be on two hosts.

1. Outputs have the bits of a single pass, for uneven batches, ranks without tables or samples, and an output dtype. 2.
Bad indices are counted once over all passes, and the first is named. 3. All ranks use the implementation that is faster
on the slowest rank. 4. A rank that fails between two exchanges ends the group. A rank that fails before the rendezvous refuses
the call. 5. Gradients have the bits of one host, for each way to send them. Ranks with different batch sizes are refused.
"""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import error_of
from support.pretended_hosts import claimed, on_two_hosts, own_group, slow_on_rank_0

import weft
from weft import symm
from weft.launch import Pool
from weft.runtime import embedding_unfused, gradients_to_owners
from weft.runtime.cpu import embedding_far_first


def call(own, sizes, placement, seed, *, bad=(), output_dtype=None, ids=None, trains=False):
    """Make a call with new data, and return the output. bad: (feature, sample) of bags that get an index out of range.

    ids: the number of ids in the first bag of the last feature; None for a random number. trains: True to run backward too, and
        to return the gradients of this rank's tables.
    """
    world, batch = own.size(), sum(sizes)
    tables = [weft.EmbeddingBagConfig(50, 4 + 4 * (t % 3), f"t{t}", [f"f{t}"]) for t in range(len(placement))]
    sharding = weft.place_tables(tables, world, placement=placement)
    generator = torch.Generator().manual_seed(seed)
    every = [torch.randn(50, table.embedding_dim, generator=generator) for table in tables]
    lengths = torch.randint(0, 4, (len(tables), batch), generator=generator)
    for feature, sample in bad:
        lengths[feature, sample] = 3
    if ids is not None:
        lengths[-1, 0] = ids
    of_tables = [torch.randint(50, (int(of_table.sum()),), generator=generator) for of_table in lengths]
    for feature, sample in bad:
        of_tables[feature][int(lengths[feature, :sample].sum())] = 50 + sample
    mine = [t for t, rank in enumerate(placement) if rank == own.rank()]
    flat = torch.cat([lengths[t] for t in mine]) if mine else torch.zeros(0, dtype=torch.int64)
    values = torch.cat([of_tables[t] for t in mine]) if mine else torch.zeros(0, dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), flat.cumsum(0)])
    given = {} if output_dtype is None else {"output_dtype": output_dtype}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = [every[t].requires_grad_(trains) for t in mine]
        out = weft.embedding_all_to_all(
            weights, (values, offsets), sharding, group=own, batch_sizes=sizes, requires_grad=trains, **given
        )
    if trains:
        out.backward(torch.randn(out.shape, generator=generator))
        return [weight.grad for weight in weights]
    return out.clone(), [str(one.message) for one in caught if "out of range" in str(one.message)]


CASES = [
    ((4, 4, 4, 4), (0, 1, 2, 3, 0), {}),
    ((3, 0, 7, 1), (0, 2, 2, 0), {}),
    ((5, 6, 1, 2), (1, 3, 1, 3, 2), {"bad": ((0, 0), (0, 11), (2, 3), (1, 12))}),
]


def both_ways(group, sizes, placement, more, most_bytes):
    far_last = mock.patch.multiple(embedding_far_first.FarFirst, pinned_pieces=3, far_last=len(placement) == 4)
    later = mock.patch.object(embedding_unfused, "all_to_all_single", side_effect=embedding_unfused.all_to_all_single)
    with on_two_hosts(group) as own, far_last, later as exchanged:
        found = []
        for other, room in (
            (False, most_bytes),
            (True, 0),
        ):  # vectors that travel with the rendezvous are never sent far first
            way = mock.patch.object(embedding_unfused.TwoWays, "takes_other", return_value=other)
            with way, mock.patch.object(embedding_unfused, "MOST_VECTORS_BYTES", room):
                found.append(call(own, sizes, placement, 3, **more))
        (plain, warned), (far_first, warned_too) = found
        assert plain.abs().sum() > 0 or not plain.numel()
        return torch.equal(plain, far_first), warned == warned_too, len(warned_too), exchanged.call_count


@pytest.mark.parametrize("most_bytes", [1 << 20, 0])
@pytest.mark.parametrize(("sizes", "placement", "more"), CASES, ids=["even", "empty", "bad indices"])
def test_outputs_and_warnings_are_those_of_one_pass(pool: Pool, sizes, placement, more, most_bytes) -> None:
    found = pool.run(both_ways, sizes, placement, more, most_bytes, ranks=4, timeout_s=60)
    assert [one[:2] for one in found] == [(True, True)] * 4
    assert [one[3] for one in found] == [most_bytes == 0] * 4  # few vectors travel with the rendezvous
    assert [bool(one[2]) for one in found] == [bool(more) and rank in placement[:3] for rank in range(4)]


def chosen(group, slow):
    """Return how many of 14 calls sent far samples first, if one implementation is slow on rank 0. Then return how many of 6
    calls did, after a bag of rank 1 has got many more ids.
    """
    with on_two_hosts(group) as own:
        kind, found = embedding_far_first.FarFirst, []
        counted = mock.patch.object(kind, "run", autospec=True, side_effect=kind.run)
        with counted as other, slow_on_rank_0(own, slow == "far first"):
            for calls, ids in ((14, 3), (6, 300)):
                for _ in range(calls):
                    call(own, (2, 2), (0, 1), 0, ids=ids)
                found.append(other.call_count)
        return found


@pytest.mark.parametrize(("slow", "wanted"), [("far first", 6), ("one pass", 6 + 2)])
def test_ranks_take_the_way_that_is_faster_on_the_slowest_rank(pool: Pool, slow: str, wanted: int) -> None:
    # Calls with many more ids are timed anew, on all ranks: 3 in one pass, and 3 far first.
    assert pool.run(chosen, slow, ranks=2, timeout_s=60) == [[wanted, wanted + 3]] * 2


def fails(group):
    with on_two_hosts(group) as own:
        call(own, (2, 2), (0, 1), 1)
        comm = symm.communicator(own, "cpu")
        native, count = embedding_far_first.FarFirst._pool, [0]

        def pool(self, *given):
            count[0] += 1
            if own.rank() == 1 and count[0] == 2:
                raise MemoryError("no room for a piece")
            return native(self, *given)

        with (
            mock.patch.object(embedding_unfused.TwoWays, "takes_other", return_value=True),
            mock.patch.object(embedding_far_first.FarFirst, "_pool", pool),
        ):
            return error_of(lambda: call(own, (2, 2), (0, 1), 2)), comm.failed


def test_a_rank_that_fails_between_exchanges_ends_the_group(pool: Pool) -> None:
    (there, failed_there), (here, failed_here) = pool.run(fails, ranks=2, timeout_s=60)
    assert here[0] == "MemoryError"
    assert "no room for a piece" in there[1]
    assert (failed_there, failed_here) == (True, True)


def fails_before_the_rendezvous(group):
    with on_two_hosts(group) as own:
        given = own, (2, 2, 2, 2), (0, 1, 2, 3)
        call(*given, 0)
        no_room = MemoryError("no room to pool") if own.rank() == 1 else None
        native = embedding_unfused.pool_alone
        with mock.patch.object(embedding_unfused, "pool_alone", side_effect=no_room, wraps=native):
            found = error_of(lambda: call(*given, 1))
        call(*given, 2)  # the group lives on
        return found


def test_a_rank_that_fails_while_it_pools_for_a_rendezvous_refuses_the_call(pool: Pool) -> None:
    found = pool.run(fails_before_the_rendezvous, ranks=4, timeout_s=60)
    assert [kind for kind, _ in found] == ["RefusedError", "MemoryError", "RefusedError", "RefusedError"]
    assert "rank 1" in found[0][1]
    assert "no room to pool" in found[0][1]


# -- gradients


WAYS = {"with the rendezvous": (1 << 20, 1 << 20), "at once": (0, 1 << 20), "far first": (0, 0)}


def trained(group, sizes, placement, way):
    """Return True if the gradients of a call between hosts have the bits of a call on one host. Then return the number of calls
    of `begin_far_first`, and of calls whose gradients travelled with the rendezvous.
    """
    riding, whole = WAYS[way]
    kind = gradients_to_owners.AllToAllInto
    with on_two_hosts(group) as own:
        ways = mock.patch.multiple(gradients_to_owners, MOST_VECTORS_BYTES=riding, _MANY_BYTES=whole)
        begun = mock.patch.object(
            gradients_to_owners, "begin_far_first", side_effect=gradients_to_owners.begin_far_first
        )
        rode = mock.patch.object(gradients_to_owners, "AllToAllInto", side_effect=kind)
        with ways, begun as begin, rode as ride:
            found = [call(own, sizes, placement, seed, trains=True) for seed in range(3)]
    with claimed("alpha"):
        whole_group = own_group(group)
        wanted = [call(whole_group, sizes, placement, seed, trains=True) for seed in range(3)]
        dist.destroy_process_group(whole_group)
    same = all(
        torch.equal(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert sum(float(a.abs().sum()) for one in found for a in one) > 0 or group.rank() not in placement
    return same, begin.call_count, ride.call_count


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("sizes", "placement"), [one[:2] for one in CASES[:2]], ids=["even", "empty"])
def test_gradients_have_the_bits_of_one_host(pool: Pool, sizes, placement, way: str) -> None:
    rides = way == "with the rendezvous"
    assert pool.run(trained, sizes, placement, way, ranks=4, timeout_s=60) == [(True, 3 * (not rides), 3 * rides)] * 4


def sorts_too_much(group):
    with on_two_hosts(group) as own:
        call(own, (2, 2, 2, 2), (0, 1, 2, 3), 0, trains=True)
        error = MemoryError("no room to sort") if own.rank() == 1 else None
        with (
            mock.patch.multiple(gradients_to_owners, MOST_VECTORS_BYTES=0, _MANY_BYTES=0),
            mock.patch.object(
                gradients_to_owners.cpu, "sort_ahead", side_effect=error, wraps=gradients_to_owners.cpu.sort_ahead
            ),
        ):
            # The other ranks may complete this call, because all messages have been sent.
            return error_of(lambda: [call(own, (2, 2, 2, 2), (0, 1, 2, 3), seed, trains=True) for seed in (1, 2)])


def test_a_rank_that_fails_while_gradients_are_in_transit_ends_the_group(pool: Pool) -> None:
    found = pool.run(sorts_too_much, ranks=4, timeout_s=60)
    assert [kind for kind, _ in found] == [
        "PoisonedGroupError",
        "MemoryError",
        "PoisonedGroupError",
        "PoisonedGroupError",
    ]
    assert all("no room to sort" in text for _, text in found)


def another_backward(group):
    with on_two_hosts(group) as own:
        given = own, (2, 2, 2, 2), (0, 1, 2, 3)
        call(*given, 0, trains=True)
        with mock.patch.object(gradients_to_owners, "MOST_VECTORS_BYTES", 0 if own.rank() == 3 else 1 << 20):
            return error_of(lambda: call(*given, 1, trains=True))


def test_ranks_that_expect_other_messages_in_backward_are_told(pool: Pool) -> None:
    found = pool.run(another_backward, ranks=4, timeout_s=60)
    assert [kind for kind, _ in found] == ["DisagreementError"] * 4
