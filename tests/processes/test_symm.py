"""Symmetric memory between processes, cheapest first: all ranks see the writes of a rank, waits wait, groups are
independent, errors are clear, and nothing is left behind.

`test_failure.py` tests ranks that die. Functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from pool import barrier, traces
from support.on_ranks import assert_error, assert_errors, descriptors, error_of
from torch.distributed import distributed_c10d

from weft import symm
from weft.launch import Pool

SIZES = [1, 2, 3, 4, 8]
LONG_S = 50.0


def write_to_each_peer(group, seed, dtype):
    rank, size = group.rank(), group.size()

    def data(writer, reader):
        return torch.randn(5, 7, generator=torch.Generator().manual_seed(seed + 100 * writer + reader)).to(dtype)

    with symm.SymmetricBuffer((size, 5, 7), dtype, group=group) as buffer, symm.Signal(group=group) as signal:
        assert not buffer.local.any(), "fresh memory must be zero"
        barrier(signal, 1)
        for peer in range(size):
            buffer.peer(peer)[rank] = data(rank, peer)
        barrier(signal, 2)
        for owner in range(size):
            for writer in range(size):
                torch.testing.assert_close(buffer.peer(owner)[writer], data(writer, owner), rtol=0, atol=0)
        barrier(signal, 3)
        assert buffer.local.data_ptr() == buffer.peer(rank).data_ptr()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_sees_what_each_peer_wrote(pool: Pool, size: int, dtype: torch.dtype) -> None:
    pool.run(write_to_each_peer, random.randrange(2**31), dtype, ranks=size)


def straggle(group):
    """Delay rank 0 in each round. Without a real wait, the others would read data of the previous round."""
    with symm.SymmetricBuffer((1000,), torch.int64, group=group) as buffer, symm.Signal(3, group=group) as signal:
        for epoch in range(1, 4):
            if group.rank() == 0:
                time.sleep(0.1)
                for peer in range(group.size()):
                    buffer.peer(peer).fill_(epoch)
                    signal.set(epoch, peer=peer, index=2)
            assert signal.wait(epoch, index=2, peer=0) == epoch
            assert (buffer.local == epoch).all()
            signal.add(1, peer=0, index=1)
            if group.rank() == 0:
                signal.wait(epoch * group.size(), index=1)
        assert signal.read(2) == 3
        assert signal.read(0) == 0


@pytest.mark.parametrize("size", SIZES)
def test_a_wait_waits_for_a_straggler(pool: Pool, size: int) -> None:
    pool.run(straggle, ranks=size)


def add_from_all(group, times):
    with symm.Signal(group=group) as signal:
        for _ in range(times):
            signal.add(1, peer=0)
        if group.rank() == 0:
            signal.wait(times * group.size())
            assert signal.read() == times * group.size()
        barrier_signal = symm.Signal(group=group)
        barrier(barrier_signal, 1)


def test_adds_are_atomic(pool: Pool) -> None:
    pool.run(add_from_all, 2000, ranks=4)


def use_after_close(group):
    rank, size = group.rank(), group.size()
    buffer = symm.SymmetricBuffer((4,), torch.int32, group=group)
    signal, done = symm.Signal(group=group), symm.Signal(group=group)
    mine, next_one = buffer.local, buffer.peer((rank + 1) % size)
    with buffer:
        mine.fill_(rank)
        barrier(signal, 1)
        if rank == 0:
            buffer.close()  # when one rank closes, the others must keep the memory
        barrier(signal, 2)
        assert next_one.tolist() == [(rank + 1) % size] * 4
        barrier(signal, 3)
    signal.close()
    buffer.close()
    # Earlier tensors stay valid, and stay shared.
    mine.add_(10)
    barrier(done, 1)
    assert next_one.tolist() == [(rank + 1) % size + 10] * 4
    return [
        error_of(lambda: buffer.local),
        error_of(lambda: buffer.peer(0)),
        error_of(lambda: signal.set(1, peer=0)),
        error_of(lambda: signal.wait(1)),
        error_of(lambda: signal.read()),
    ]


def test_use_after_close_raises_and_old_views_stay_valid(pool: Pool) -> None:
    for errors in pool.run(use_after_close, ranks=3):
        assert all(kind == "ValueError" and "closed" in text for kind, text in errors), errors


def bad_arguments(group):
    with symm.SymmetricBuffer((4,), torch.float32, group=group) as buffer, symm.Signal(2, group=group) as signal:
        region = buffer.comm.allocate(64)
        errors = [
            error_of(lambda: buffer.peer(2)),
            error_of(lambda: signal.set(1, peer=0, index=2)),
            error_of(lambda: signal.wait(1, index=-1)),
            error_of(lambda: symm.Signal(0, group=group)),
            error_of(lambda: symm.SymmetricBuffer((-1,), torch.float32, group=group)),
            error_of(lambda: region.tensor(0, (17,), torch.float32)),
            error_of(lambda: region.tensor(0, (1,), torch.float32, 2)),
            error_of(lambda: symm.communicator(None, "cpu")),
            # An odd type must not reach the allocation, which would make the group fail.
            error_of(lambda: symm.Signal(1.0, group=group)),
            error_of(lambda: signal.set(-1, peer=0)),
            error_of(lambda: signal.add(0.5, peer=0)),
            error_of(lambda: signal.read(0.0)),
            error_of(lambda: signal.wait("1")),
            error_of(lambda: signal.set(1, peer=None)),
            error_of(lambda: symm.SymmetricBuffer(None, torch.float32, group=group)),
            error_of(lambda: symm.SymmetricBuffer((2.0,), torch.float32, group=group)),
            error_of(lambda: symm.SymmetricBuffer((2,), "float32", group=group)),
            error_of(lambda: symm.communicator(group, "gpu")),
            error_of(lambda: symm.communicator(torch.ones(2), "cpu")),
        ]
        signal.set(1, peer=group.rank())
        signal.wait(1)
        region.close()
    return errors


def test_bad_arguments_say_what_and_how_to_fix(pool: Pool) -> None:
    for errors in pool.run(bad_arguments, ranks=2):
        assert {kind for kind, _ in errors} == {"ValueError"}
        for (_, text), part in zip(
            errors,
            [
                "rank=2",
                "index=2",
                "index=-1",
                "count=0",
                "(-1,)",
                "byte 68",
                "offset_bytes=2",
                "pass dist.group",
                "count=1.0 is a float",
                "value=-1 must be from 0",
                "amount=0.5 is a float",
                "index=0.0 is a float",
                "value='1' is a str",
                "rank=None is a NoneType",
                "shape is a NoneType: pass a list",
                "shape[0]=2.0 is a float: pass an integer",
                "dtype='float32' is a str: pass a torch.dtype",
                "device='gpu' is not a device",
                "group=tensor([1., 1.]) is a Tensor: pass a torch.distributed.ProcessGroup",
            ],
            strict=True,
        ):
            assert part in text


def miss_a_deadline(group):
    own = dist.new_group([0, 1, 2])
    if group.rank() == 3:
        return None
    signal = symm.Signal(2, group=own)
    if group.rank() == 1:
        first = error_of(lambda: signal.wait(5, index=1, peer=2, deadline_s=0.2))
    else:
        first = error_of(lambda: signal.wait(1, peer=1))
    again = [error_of(lambda: signal.set(1, peer=0)), error_of(lambda: symm.communicator(own, "cpu"))]
    signal.comm.close()
    return [first, *again, error_of(lambda: symm.communicator(own, "cpu"))]


def test_a_missed_deadline_is_named_everywhere_and_spoils_the_group(pool: Pool) -> None:
    results = pool.run(miss_a_deadline, ranks=4)
    kind, text = results[1][0]
    assert kind == "DeadlineError"
    for part in ["rank 1 waited 0.2 s", "signal 1", "from rank 2", "wanted 5, found 0"]:
        assert part in text
    for rank in (0, 2):
        assert_error(results[rank][0], "PoisonedGroupError", text)
    for rank in (0, 1, 2):
        assert_errors(results[rank][1:], "PoisonedGroupError", text)


def two_groups(group):
    """Use groups {0, 2} and {1, 3} at once, and {0, 1, 2} across them. Their uses are interleaved differently on each
    rank.
    """
    rank = group.rank()
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 2), (1, 3), (0, 1, 2)]}
    mine = [ranks for ranks in groups if rank in ranks]
    refused = [error_of(lambda g=g: symm.communicator(g, "cpu")) for ranks, g in groups.items() if rank not in ranks]
    buffers = {ranks: symm.SymmetricBuffer((8,), torch.int64, group=groups[ranks]) for ranks in mine}
    # With one signal for both purposes, a rank that has finished could be counted as a rank that has published.
    published, done = ({ranks: symm.Signal(group=groups[ranks]) for ranks in mine} for _ in range(2))
    for round_ in range(1, 6):
        # All ranks publish before any rank waits. Groups overlap, so the order of waits must not matter.
        for ranks in mine:
            for peer in range(len(ranks)):
                buffers[ranks].peer(peer)[rank] = 1000 * round_ + rank
                published[ranks].add(1, peer=peer)
        for ranks in reversed(mine) if rank % 2 else mine:
            published[ranks].wait(round_ * len(ranks))
            for other in range(8):
                assert buffers[ranks].local[other] == (1000 * round_ + other if other in ranks else 0)
        for ranks in mine:
            for peer in range(len(ranks)):
                done[ranks].add(1, peer=peer)
        for ranks in mine:
            done[ranks].wait(round_ * len(ranks))
    for ranks in mine:
        buffers[ranks].comm.close()
        dist.destroy_process_group(groups[ranks])
    return refused


def test_groups_at_once_and_overlapping_keep_apart(pool: Pool) -> None:
    refused = pool.run(two_groups, ranks=4)
    assert [len(errors) for errors in refused] == [1, 1, 1, 2]
    for rank, errors in enumerate(refused):
        assert_errors(errors, "ValueError", f"rank {rank} is not in this group")


def same_ranks_twice(group):
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
    if group.rank() > 1:
        return
    first, second = symm.communicator(one, "cpu"), symm.communicator(two, "cpu")
    assert first is not second
    assert symm.communicator(one, "cpu") is first
    assert first.all_gather(group.rank()) == [0, 1]
    first.close()
    with symm.Exchange(second) as exchange:
        assert exchange.exchange(bytes([group.rank()])) == [b"\0", b"\1"]
    fresh = symm.communicator(one, "cpu")  # a closed communicator is replaced
    assert fresh is not first
    assert fresh.all_gather(str(group.rank())) == ["0", "1"]
    fresh.close()
    second.close()


def test_two_communicators_of_the_same_ranks(pool: Pool) -> None:
    pool.run(same_ranks_twice, ranks=3)


def disagree(group):
    rank = group.rank()
    errors = [
        error_of(lambda: symm.SymmetricBuffer((4, 1 + rank), torch.float32, group=group)),
        error_of(lambda: symm.communicator(group, "cpu").allocate(64 + rank, what="the same")),
    ]
    with symm.SymmetricBuffer((4,), torch.float32, group=group) as buffer:  # nothing has changed
        buffer.local.fill_(1)
    return errors


def test_ranks_that_disagree_raise_everywhere_and_go_on(pool: Pool) -> None:
    for shapes, sizes in pool.run(disagree, ranks=3):
        assert shapes[0] == sizes[0] == "DisagreementError"
        assert "rank 1: " in shapes[1]
        assert "(4, 1)" in shapes[1]
        assert "(4, 3)" in shapes[1]
        assert "65 bytes" in sizes[1]


def run_out(group):
    comm = symm.communicator(group, "cpu")
    errors = [error_of(lambda: comm.allocate(1 << 50))]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    errors.append(error_of(lambda: symm.SymmetricBuffer((1 << 20,), torch.float32, group=group)))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if group.rank() == 1:  # enough for its own descriptor, but not for those of peers
        spare = os.dup(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, limits[1]))
        os.close(spare)
    errors.append(error_of(lambda: comm.allocate(64)))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    # Nothing stays reserved, and the group stays usable.
    with symm.SymmetricBuffer((1 << 20,), torch.float32, group=group) as buffer:
        buffer.local.fill_(1)
    return errors


def test_too_little_memory_is_an_error_on_every_rank(pool: Pool) -> None:
    for absurd, limited, files in pool.run(run_out, ranks=3):
        assert absurd[0] == limited[0] == files[0] == "OutOfSharedMemoryError"
        assert "needed 3221225472.0 MiB" in absurd[1]
        assert "free" in absurd[1]
        assert "rank 1: reserving failed" in limited[1]
        assert "ulimit -f" in limited[1]
        assert "rank 1: " in files[1]
        assert "Too many open files" in files[1]


def leave_no_trace(group):
    own = dist.new_group([0, 1, 2])
    before, opened = traces(), descriptors()
    comm = symm.communicator(own, "cpu")
    buffer, exchange = symm.SymmetricBuffer((1 << 16,), torch.float32, group=own), symm.Exchange(comm)
    exchange.exchange(b"all mapped")
    during = traces(before)
    exchange.exchange(b"all looked")
    comm.close()
    after_close = traces(before)
    assert error_of(lambda: buffer.local)[0] == "ValueError"
    return during, after_close, descriptors() - opened


def test_nothing_has_a_name_and_nothing_is_left(pool: Pool) -> None:
    for during, after, left_open in pool.run(leave_no_trace, ranks=3):
        assert len(during["memfd mappings"]) == 6
        for what in ["memfd descriptors", "named sockets", "shared memory files"]:
            assert during[what] == [], what
        assert not any(after.values()), after
        assert not left_open


def knock(group):
    """Let rank 1 connect to rank 0's listener like a stranger, before it takes part in the set-up. Some connections
    send nothing and stay open. Return the seconds of the set-up.
    """
    silent = []
    if group.rank() == 1:
        store = dist.PrefixStore("weft/cpu", distributed_c10d._get_process_group_store(group))
        while not store.check(["0"]):
            time.sleep(0.01)
        entry = json.loads(store.get("0"))
        impostor = {**entry, "rank": 1, "to": "a guess"}
        for packet in [
            b"hello",
            b"[1]",
            json.dumps(impostor).encode(),
            json.dumps({"to": entry["token"]}).encode(),
            b"[" * 60_000,
            b"\xff" * 60_000,
            b"",
            *[None] * 80,  # more connections than rank 0 keeps
        ]:
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect("\0" + entry["name"])
            if packet:
                stranger.send(packet)
            if packet is None:
                silent.append(stranger)
            else:
                stranger.close()
    start = time.monotonic()
    assert symm.communicator(group, "cpu", deadline_s=LONG_S).all_gather(group.rank()) == [0, 1]
    return time.monotonic() - start


def test_strangers_are_turned_away(pool: Pool) -> None:
    pool.run(add_from_all, 1, ranks=1)  # so that the next test has a new group, without a communicator
    assert pool.run(knock, ranks=2)[1] < LONG_S / 5


def gather_much(group):
    """Gather objects of different sizes, which are larger than a message and than a socket's buffer."""
    rank, size = group.rank(), group.size()
    sent = [random.Random(writer).randbytes(300_000 * writer + 65_000) for writer in range(size)]
    for _ in range(3):
        assert symm.communicator(group, "cpu").all_gather(sent[rank]) == sent


def test_a_set_up_message_may_be_long(pool: Pool) -> None:
    pool.run(gather_much, ranks=4)


def exchange_rounds(group, seed, rounds):
    rank, size = group.rank(), group.size()

    def payload(round_, writer):
        generator = random.Random(seed + 1000 * round_ + writer)
        return generator.randbytes(generator.choice([0, 1, 7, 300, 512]))

    late = random.Random(seed - rank)
    with symm.Exchange(symm.communicator(group, "cpu"), 512) as exchange:
        for round_ in range(rounds):
            if late.random() < 0.05:
                time.sleep(0.005)
            if round_ == 10:
                assert "513 bytes" in error_of(lambda: exchange.exchange(bytes(513)))[1]
            assert exchange.exchange(payload(round_, rank)) == [payload(round_, writer) for writer in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_exchange_hands_every_payload_to_everybody(pool: Pool, size: int) -> None:
    pool.run(exchange_rounds, random.randrange(2**31), 300, ranks=size)


def gather_from_threads(group):
    """Check that a wait in one thread lets other threads of the process run."""
    with symm.Signal(group=group) as signal:
        if group.rank() == 0:
            thread = threading.Thread(target=signal.wait, args=(1,))
            thread.start()
            assert symm.communicator(group, "cpu").all_gather(0) == [0, 1]
            thread.join()
        else:
            assert symm.communicator(group, "cpu").all_gather(1) == [0, 1]
            signal.set(1, peer=0)


def test_a_wait_leaves_the_interpreter_to_other_threads(pool: Pool) -> None:
    pool.run(gather_from_threads, ranks=2)
