"""A rank dies, leaves, raises, never arrives or is late: the other ranks get an error that names it, at once or at the
deadline.

No rank hangs, nothing is left behind, and a new group of the survivors works. If a death must be noticed, waits have a
deadline of five seconds: a `PeerLostError` instead of a `DeadlineError` shows that it was noticed earlier. Each test
that kills a rank has a pool of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal as signals
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import barrier, traces
from support.on_ranks import assert_error, assert_errors, error_of, own_group

import weft
from weft import symm
from weft.errors import PeerLostError, PoisonedGroupError
from weft.launch import Pool, RankDiedError, run_ranks
from weft.operator import replay
from weft.symm import attempt, bootstrap

NOTICE_S = 5.0


def wait_for_the_dead(group, how):
    """Let rank 1 kill itself while the others wait for it. They then make a group without it, and use that group."""
    rank, size = group.rank(), group.size()
    comm = symm.communicator(group, "cpu")
    signal = symm.Signal(group=group)
    exchange = symm.Exchange(comm)
    buffer = symm.SymmetricBuffer((4,), torch.int64, group=group)
    barrier(signal, 1)
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signals.SIGKILL)
    if how == "signal":
        first = error_of(lambda: signal.wait(1000, peer=1, deadline_s=NOTICE_S))
    elif how == "anybody":
        first = error_of(lambda: signal.wait(1000, deadline_s=NOTICE_S))
    elif how == "exchange":
        first = error_of(lambda: exchange.exchange(b"", deadline_s=NOTICE_S, name="the agreement"))
    else:
        first = error_of(lambda: comm.all_gather(1, what="setting up", deadline_s=NOTICE_S))
    buffer.peer(1)[0] = 7  # the dead rank's memory is still mapped
    later = [
        error_of(lambda: signal.set(1, peer=0)),
        error_of(lambda: exchange.exchange(b"")),
        error_of(lambda: symm.communicator(group, "cpu")),
        error_of(lambda: symm.SymmetricBuffer((4,), torch.int64, group=group)),
    ]
    comm.close()
    later.append(error_of(lambda: symm.communicator(group, "cpu")))

    survivors = dist.new_group([r for r in range(size) if r != 1], use_local_synchronization=True)
    with symm.communicator(survivors, "cpu"), symm.SymmetricBuffer((size,), torch.int64, group=survivors) as fresh:
        again = symm.Signal(group=survivors)
        for peer in range(size - 1):
            fresh.peer(peer)[rank] = rank + 1
        barrier(again, 1)
        assert fresh.local.tolist() == [r + 1 if r != 1 else 0 for r in range(size)]
        barrier(again, 2)
    del buffer, fresh
    return first, later, traces()


@pytest.mark.parametrize("how", ["signal", "anybody", "exchange", "set-up"])
def test_a_killed_rank_is_named_by_all_and_survivors_go_on(how: str) -> None:
    with Pool(4) as pool:
        pids = pool.pids()
        results = pool.run(wait_for_the_dead, how, return_exceptions=True)
    assert isinstance(results.pop(1), RankDiedError)
    for first, later, left in results:
        assert_error(first, "PeerLostError", f"rank 1 (pid {pids[1]}) died", "was waiting for", "new process group")
        assert_errors(later, "PoisonedGroupError", "rank 1 ")
        assert not any(left.values()), left


def kill_all(group):
    with symm.SymmetricBuffer((1 << 20,), torch.float32, group=group) as buffer:
        buffer.local.fill_(1)
        os.kill(os.getpid(), signals.SIGKILL)


def test_killing_all_ranks_leaves_nothing() -> None:
    before = names()
    results = run_ranks(3, in_world, kill_all, return_exceptions=True)
    assert all(isinstance(result, RankDiedError | RuntimeError) for result in results)
    left, until = names() - before, time.monotonic() + 60
    while left and time.monotonic() < until:  # the names of other programs disappear after a while
        time.sleep(0.1)
        left &= names()
    assert not left


def names() -> set[str]:
    """Return the names of shared memory files, and of weft's sockets, on this machine."""
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@weft-" in line}
    return sockets | set(os.listdir("/dev/shm"))


def in_world(rank, world_size, function):
    return function(dist.group.WORLD)


def raise_instead_of_arriving(group, leave):
    exchange = symm.Exchange(symm.communicator(group, "cpu"))
    exchange.exchange(b"all here")
    if group.rank() == 2:
        if leave:
            exchange.comm.close()
        else:
            assert "2049 bytes" in error_of(lambda: exchange.exchange(bytes(2049)))[1]
        return None
    return error_of(lambda: exchange.exchange(b"", deadline_s=NOTICE_S if leave else 0.5, name="the agreement"))


def test_a_rank_that_raises_makes_the_others_meet_a_named_deadline() -> None:
    with Pool(3) as pool:
        results = pool.run(raise_instead_of_arriving, False)[:2]
    assert "DeadlineError" in {kind for kind, _ in results}  # the first rank poisons the group for the other
    assert_errors(
        results,
        ("DeadlineError", "PoisonedGroupError"),
        "waited 0.5 s for the agreement from rank 2",
        "wanted 2, found 1",
    )


def test_a_rank_that_leaves_while_waited_for_is_named() -> None:
    with Pool(3) as pool:
        errors = pool.run(raise_instead_of_arriving, True)[:2]
    assert_errors(errors, "PeerLostError", "rank 2 ", "has left the group")
    # The first rank to notice names its wait; the other may be notified before it begins to wait.
    assert any("the agreement" in text for _, text in errors)


def leave_early(group):
    """Let rank 1 leave normally. No rank waits for it any more, so no rank raises an error. Its memory stays readable."""
    rank = group.rank()
    buffer, signal = symm.SymmetricBuffer((4,), torch.int64, group=group), symm.Signal(3, group=group)
    buffer.local.fill_(rank)
    barrier(signal, 1)
    if rank == 1:
        signal.add(1, peer=0, index=1)
        signal.comm.close()
        return None
    time.sleep(0.2)  # its goodbye message has arrived
    signal.comm.check()
    assert buffer.peer(1).tolist() == [1] * 4
    signal.set(1, peer=2 - rank, index=2)
    signal.wait(1, index=2, peer=2 - rank)
    if rank == 0:
        signal.wait(1, index=1, peer=1)  # writes that it made before it left are valid
        late = error_of(lambda: signal.wait(2, index=1, peer=1))
        signal.comm.close()
        return late
    # Rank 0 has lost the connection, or has received the goodbye. In both cases no other rank can set this signal.
    return error_of(lambda: signal.wait(2, index=2))


def test_leaving_in_order_is_no_failure_until_somebody_waits() -> None:
    with Pool(3) as pool:
        first, _, last = pool.run(leave_early)
    assert_error(first, "PeerLostError", "rank 1 ")
    assert_error(last, "PeerLostError", "rank 1 ")


def poison_by_hand(group, poisoner):
    comm = symm.communicator(group, "cpu")
    seen: list[str] = []
    happened = threading.Event()

    def note():
        seen.append(threading.current_thread().name)
        happened.set()

    comm.on_failure(lambda: 1 / 0)  # an error in one callback must not prevent the others
    comm.on_failure(note)
    comm.on_failure(lambda: seen.append("taken back"))()
    dist.barrier(group)  # not over the communicator, because the poison may overtake data of other ranks there
    if group.rank() == poisoner:
        comm.poison("the table is on fire")
    assert happened.wait(NOTICE_S)
    comm.on_failure(lambda: seen.append("at once"))
    return seen, error_of(comm.check), error_of(comm.check)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_poison_reaches_everybody_and_runs_the_callbacks(size: int) -> None:
    with Pool(4) as pool:
        poisoner = 1 if size > 1 else 0
        results = pool.run(poison_by_hand, poisoner, ranks=size)
    for seen, *errors in results:
        assert [name.startswith("weft-watchdog") for name in seen] == [True, False]
        assert seen[1] == "at once"
        assert_errors(errors, "PoisonedGroupError", f"rank {poisoner}: the table is on fire")


def miss_the_set_up(group):
    """Let rank 2 arrive only after the others have given up. Then all try again on the same group."""
    first = None
    if group.rank() != 2:
        first = error_of(lambda: symm.communicator(group, "cpu", deadline_s=0.3))
    dist.barrier(group)
    left = traces()
    comm = symm.communicator(group, "cpu")
    assert comm.all_gather(group.rank()) == [0, 1, 2]
    return first, left


def test_a_rank_that_never_comes_to_the_set_up_is_named_and_may_come_later() -> None:
    with Pool(3) as pool:
        results = pool.run(miss_the_set_up)
    for first, left in results:
        assert not any(left.values()), left
        if first is not None:
            assert_error(first, "DeadlineError", "ranks [2]", "wanted 3 ranks, found 2")


def die_during_set_up(group, where):
    """Let rank 1 raise, or be killed, in the middle of the set-up, after it has connected to some of the others."""
    if group.rank() == 1:

        def trouble(*_):
            if where == "kill":
                os.kill(os.getpid(), signals.SIGKILL)
            raise PeerLostError("struck by lightning")

        bootstrap._Setup._accept = trouble
    error = error_of(lambda: symm.communicator(group, "cpu", deadline_s=NOTICE_S))
    return error, traces()


@pytest.mark.parametrize("where", ["kill", "raise"])
def test_failing_in_the_middle_of_the_set_up_leaves_nothing(where: str) -> None:
    with Pool(4) as pool:
        results = pool.run(die_during_set_up, where, return_exceptions=True)
    dead = results.pop(1)
    assert isinstance(dead, RankDiedError) if where == "kill" else dead[0][1] == "struck by lightning"
    for error, left in results:
        assert_error(
            error,
            "PeerLostError",
            match=r"rank 1 \(pid \d+\) died" if where == "kill" else "rank 1 gave up .* struck by lightning",
        )
        assert not any(left.values()), left


def test_a_rank_that_hangs_up_on_one_it_has_not_met_still_says_why() -> None:
    """Rank 0 is notified that rank 2 gave up. It then has a waiting connection from rank 1, but has not read rank 1's
    entry.
    """
    store = dist.HashStore()
    listener = bootstrap._socket()
    listener.bind("\0" + attempt.PREFIX + secrets.token_hex(16))
    listener.listen(8)
    name = listener.getsockname()[1:].decode()
    for rank in (0, 2):
        store.set(str(rank), json.dumps(asdict(bootstrap.Entry.of_this_process(rank, name, 0))))

    def give_up() -> None:
        select.select([listener], [], [], NOTICE_S)
        store.set("0", json.dumps({"gave_up": "rank 2 is out", "met": [], "cause": "", "refused": False}))
        listener.close()

    thread = threading.Thread(target=give_up)
    thread.start()
    with pytest.raises(PeerLostError, match="rank 0 gave up while this group was being set up: rank 2 is out"):
        bootstrap.connect(store, 1, 3, deadline_s=2 * NOTICE_S)
    thread.join()


def test_a_rank_learns_why_from_a_third_rank_if_the_rank_that_it_reaches_has_not_met_it(monkeypatch: Any) -> None:
    """Rank 2 has read all entries. Before it connects to rank 0, rank 1 gives up, and then rank 0, which has not read rank
    2's entry.
    """
    store = dist.HashStore()
    for rank in (0, 1):
        name = attempt.PREFIX + secrets.token_hex(16)  # nobody listens there
        store.set(str(rank), json.dumps(asdict(bootstrap.Entry.of_this_process(rank, name, 0))))
    reach = bootstrap._Setup._reach

    def reach_late(setup: Any, other: int) -> None:
        words = {"met": [], "cause": "", "refused": False}
        store.set("1", json.dumps({**words, "gave_up": "struck by lightning", "met": [setup.name]}))
        store.set("0", json.dumps({**words, "gave_up": "rank 1 is out"}))
        reach(setup, other)

    monkeypatch.setattr(bootstrap._Setup, "_reach", reach_late)
    with pytest.raises(PeerLostError, match="rank 1 gave up while this group was being set up: struck by lightning"):
        bootstrap.connect(store, 2, 3, deadline_s=NOTICE_S)


def test_the_store_that_died_with_its_rank_ends_the_set_up_at_once() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    with pytest.raises(
        PeerLostError, match="rank 1 lost the store of this process group while setting up symmetric memory"
    ):
        bootstrap.connect(client, 1, 2, deadline_s=NOTICE_S)


def interrupt(group):
    """Interrupt rank 0 with Ctrl-C in an exchange whose other rank is late."""
    exchange = symm.Exchange(symm.communicator(group, "cpu"))
    exchange.exchange(b"both here")
    if group.rank() == 1:
        time.sleep(0.6)
        return error_of(lambda: exchange.exchange(b""))
    signals.signal(signals.SIGINT, signals.default_int_handler)
    threading.Timer(0.2, os.kill, (os.getpid(), signals.SIGINT)).start()
    try:
        exchange.exchange(b"", deadline_s=NOTICE_S)
    except KeyboardInterrupt:
        return error_of(lambda: exchange.exchange(b""))


def test_ctrl_c_ends_a_wait_and_the_partner_learns_of_it() -> None:
    with Pool(2) as pool:
        assert_errors(pool.run(interrupt), "PoisonedGroupError", "rank 0: interrupted in exchange")


def stop_in_a_forked_child(group):
    """Kill rank 1, while a child that it forked stays alive with copies of its descriptors."""
    signal = symm.Signal(group=group)
    barrier(signal, 1)
    if group.rank() == 1:
        child = os.fork()
        if child == 0:
            time.sleep(4)
            os._exit(0)
        time.sleep(0.2)
        os.kill(os.getpid(), signals.SIGKILL)
    return error_of(lambda: signal.wait(1000, peer=1, deadline_s=3))


def test_a_death_is_noticed_though_a_forked_child_lives_on() -> None:
    with Pool(2) as pool:
        (kind, text), _ = pool.run(stop_in_a_forked_child, return_exceptions=True)
    assert kind == "PeerLostError", text


def hang(group):
    if group.rank() == 1:
        time.sleep(1000)


def test_a_pool_says_who_hangs_where_and_works_again() -> None:
    with Pool(2) as pool:
        assert pool.run(sum_of_ranks) == [1, 1]  # all ranks have started
        with pytest.raises(TimeoutError, match=r"ranks \[1\] were still running(.|\n)*in hang"):
            pool.run(hang, timeout_s=1.0)
        assert pool.run(sum_of_ranks) == [1, 1]


def sum_of_ranks(group):
    total = torch.tensor(group.rank())
    dist.all_reduce(total, group=group)
    return int(total)


def fail_one(group):
    if group.rank() == 1:
        raise KeyError("only here")
    time.sleep(0.3)
    raise ValueError("a consequence")


def test_a_pool_raises_the_cause_and_its_traceback_first() -> None:
    with Pool(2) as pool:
        with pytest.raises(KeyError, match="only here") as caught:
            pool.run(fail_one)
        assert "in fail_one" in str(caught.value.__cause__)


def interrupted_before_it_is_counted(group):
    own, interrupted = own_group(group), False
    x, w = torch.ones(4, 8), torch.ones(8, 8)

    def call():
        return weft.matmul_reduce_scatter(x, w, "sum", 0, own, schedule="direct[chunks=1,by=dma,add=gemm]")

    for _ in range(4):  # later calls take the fast path, in which native code calls Python for this schedule
        call()
    if group.rank() == 1:
        with mock.patch.object(replay.Replay, "in_python", mock.Mock(side_effect=KeyboardInterrupt)):
            try:
                call()
            except KeyboardInterrupt:
                interrupted = True
    return interrupted, error_of(call)


def test_ctrl_c_at_the_start_of_a_repeated_call_fails_the_group(pool: Pool) -> None:
    """Otherwise the rank would skip this call, and all later calls would pair with others."""
    found = pool.run(interrupted_before_it_is_counted, ranks=2, timeout_s=40)
    assert [interrupted for interrupted, _ in found] == [False, True]
    assert_errors(
        [error for _, error in found], "PoisonedGroupError", "rank 1: matmul_reduce_scatter: KeyboardInterrupt()"
    )


def fails_second_hand(group):
    if group.rank() == 0:
        raise PoisonedGroupError("rank 1 has failed")
    time.sleep(0.5)
    raise FileNotFoundError("no such table")


def test_a_pool_raises_the_error_that_failed_the_group(pool: Pool) -> None:
    """The other ranks' errors can arrive first."""
    with pytest.raises(FileNotFoundError, match="no such table"):
        pool.run(fails_second_hand, ranks=2, timeout_s=40)
