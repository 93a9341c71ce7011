"""Waits of a collective set-up.

Errors name the ranks that have not arrived and those that never will. Waits end early if a rank cannot arrive any more,
or has no descriptor or thread left. A process that was stopped finds messages that arrived meanwhile. Functions with a
`group` argument run on the ranks. Deadlines are LONG_S if a wait must not end by them.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import assert_deadline, failure_of, traces
from support.on_ranks import assert_error, error_of, own_group
from support.slow import slow

import weft
from weft import _core, symm
from weft.errors import PeerLostError
from weft.launch import Pool
from weft.symm import Communicator, bootstrap, control
from weft.symm.watchdog import Watchdog

BAD_RANK = 1
LONG_S = 50.0
PROMPT_S = 10.0  # far below LONG_S, and enough for a busy machine


def timed(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Return the error that `call` raises, ("", "") if none, and the duration."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


# -- missing ranks


def two_do_not_come(group, how):
    comm = symm.communicator(own_group(group), "cpu")
    comm.all_gather(None, what="all are here")
    error = ("", "")
    if group.rank() % 2 == 0:
        if how == "all_gather":
            error = error_of(lambda: comm.all_gather(1, what="a census", deadline_s=0.5))
        else:
            error = error_of(lambda: comm.allocate(64, what="a census", deadline_s=0.5))
    dist.barrier(group)
    return error


@pytest.mark.parametrize("how", ["all_gather", "allocate"])
def test_everybody_who_has_not_come_is_named(pool: Pool, how: str) -> None:
    errors = pool.run(two_do_not_come, how, ranks=4)[::2]
    assert_deadline(
        errors,
        r"rank [02] waited 0.5 s for the part of rank 1 \(pid \d+\) and rank 3 \(pid \d+\) in .*a census: wanted 4 ranks, found 2",
    )


def one_leaves(group):
    """Let rank 2 leave with a goodbye message. Rank 1 is only late, and is the first rank that rank 0 waits for."""
    comm = symm.communicator(own_group(group), "cpu")
    comm.all_gather(None, what="all are here")
    if group.rank() == 2:
        comm.close()
    try:
        if group.rank() == 0:
            comm.all_gather(1, what="a census", deadline_s=LONG_S)
    except PeerLostError as error:
        return str(error), error.rank
    finally:
        dist.barrier(group)


def test_who_has_left_ends_the_wait_though_another_is_late(pool: Pool) -> None:
    text, lost = pool.run(one_leaves, ranks=3, timeout_s=30)[0]
    assert re.search(r"rank 2 \(pid \d+\) has left the group \(close\(\) was called\)", text)
    assert "rank 0 was waiting for the part of rank 1 " in text
    assert lost == 2


def set_up_after_a_death(group):
    """Kill rank 1 after it has made groups, but before anything is set up on the second group."""
    others = dist.new_group([1, 2])  # rank 1 is rank 0 of this group
    comm = symm.communicator(group, "cpu")
    comm.all_gather(None, what="all are here")
    if group.rank() == BAD_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    error_of(lambda: comm.all_gather(1, deadline_s=LONG_S))
    return timed(lambda: symm.communicator(others, "cpu", deadline_s=LONG_S)) if group.rank() == 2 else None


def test_a_rank_that_another_group_saw_die_is_not_waited_for() -> None:
    with Pool(3) as pool:
        kind, text, seconds = pool.run(set_up_after_a_death, return_exceptions=True, timeout_s=40)[2]
    assert kind == "PeerLostError"
    assert re.search(r"rank 1 \(pid \d+\) died.*\(rank 1 of another group, rank 0 of this one\)", text)
    assert seconds < PROMPT_S


def killed_in_set_up(group, method):
    """Kill rank 1 after it has published its address, but before it is connected to any rank."""
    if group.rank() == BAD_RANK:

        def kill(*_: object) -> None:
            while not all(setup_store.check([str(rank)]) for rank in range(group.size())):
                time.sleep(0.01)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)

        run = bootstrap._Setup.run

        def remember(setup: bootstrap._Setup) -> None:
            nonlocal setup_store
            setup_store = setup.store
            run(setup)

        setup_store: Any = None
        bootstrap._Setup.run = remember
        setattr(bootstrap._Setup, method, kill)
    return timed(lambda: symm.communicator(group, "cpu", deadline_s=LONG_S))


@pytest.mark.parametrize("method", ["_read_entries", "_reach", "_accept"])
def test_a_rank_killed_in_the_middle_of_set_up_is_not_waited_for(method: str) -> None:
    with Pool(3) as pool:
        pid = pool.pids()[BAD_RANK]
        found = pool.run(killed_in_set_up, method, return_exceptions=True, timeout_s=40)
    for kind, text, seconds in (found[0], found[2]):
        assert kind == "PeerLostError"
        assert f"rank 1 (pid {pid}) died" in text
        assert seconds < PROMPT_S


def on_this_host(group):
    return symm.communicator(group, "cpu").mapped


def test_memory_of_all_ranks_of_one_host_is_mapped(pool: Pool) -> None:
    assert pool.run(on_this_host, ranks=3) == [(True,) * 3] * 3


# -- durations


def wait_by_default(group, what):
    os.environ["WEFT_SETUP_DEADLINE_S"] = "0.5"
    own = own_group(group)
    if what != "communicator":
        comm = symm.communicator(own, "cpu")
        comm.all_gather(None, what="all are here", deadline_s=LONG_S)
    try:
        if group.rank() == BAD_RANK:
            return None
        if what == "communicator":
            return error_of(lambda: symm.communicator(own, "cpu"))
        if what == "all_gather":
            return error_of(lambda: comm.all_gather(None))
        return error_of(lambda: comm.allocate(64))
    finally:
        del os.environ["WEFT_SETUP_DEADLINE_S"]
        dist.barrier(group)


@pytest.mark.parametrize("what", ["communicator", "all_gather", "allocate"])
def test_set_up_has_a_deadline_of_its_own(pool: Pool, what: str) -> None:
    assert_error(pool.run(wait_by_default, what, ranks=2)[0], "DeadlineError", "rank 0 waited 0.5 s for")


def embed(group: dist.ProcessGroup, deadline_s: float | None) -> None:
    tables = [weft.EmbeddingBagConfig(10, 4, f"t{i}", [f"f{i}"]) for i in range(group.size())]
    sharding = weft.place_tables(tables, group.size(), placement=range(group.size()))
    given = torch.arange(4), torch.arange(5)
    weft.embedding_all_to_all([torch.ones(10, 4)], given, sharding, group=group, transport="put", deadline_s=deadline_s)


def multiply(group: dist.ProcessGroup, deadline_s: float | None) -> None:
    options: Any = {"schedule": "shard[chunks=1,send=in_turn,by=dma]", "deadline_s": deadline_s}
    weft.all_gather_matmul(torch.ones(4, 8), [torch.ones(8, 3)], 0, group, **options)


def late_in(group, function, where, late_s, deadline_s, variables):
    """Let rank 1 be late in one of the set-ups of a first call."""
    function(own_group(group), LONG_S)  # loads modules
    own, native = own_group(group), Communicator.all_gather_files
    os.environ.update(variables)
    symm.communicator(own, "cpu")

    def come_late(comm: Communicator, *given: Any, what: str, **options: Any) -> Any:
        if where in what:
            time.sleep(late_s)
        return native(comm, *given, what=what, **options)

    if group.rank() == BAD_RANK:
        Communicator.all_gather_files = come_late
    try:
        return timed(lambda: function(own, deadline_s))
    finally:
        Communicator.all_gather_files = native
        for name in variables:
            del os.environ[name]
        dist.barrier(group)


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (multiply, "Exchange"),
        slow(multiply, "schedules to run"),
        slow(multiply, "buffers of schedule"),
        slow(embed, "Exchange"),
        slow(embed, "allocating 8 bytes"),  # the first flags
        (embed, "allocating 131072 bytes"),  # results
    ],
)
def test_a_callers_deadline_holds_in_all_of_the_set_up(pool: Pool, function: Any, where: str) -> None:
    found = pool.run(late_in, function, where, 6.0, 2.0, {}, ranks=2, timeout_s=60)
    kind, text, seconds = found[0]
    assert kind == "DeadlineError", found
    assert re.search(rf"rank 0 waited 2 s for the part of rank 1 \(pid \d+\) in .*{where}", text)
    assert seconds < PROMPT_S


@pytest.mark.parametrize("where", ["schedules to run", "buffers of schedule"])
def test_where_ranks_compile_and_measure_the_deadline_of_calls_holds(pool: Pool, where: str) -> None:
    variables = {"WEFT_SETUP_DEADLINE_S": "1", "WEFT_DEADLINE_S": "30"}
    for kind, text, _ in pool.run(late_in, multiply, where, 1.6, None, variables, ranks=2, timeout_s=60):
        assert not kind, text


# -- a process that was stopped


def stopped_past_its_deadline(group, rounds):
    """Stop rank 0 while it waits. Rank 1's data arrive meanwhile. The watchdog is the last thread of rank 0 that
    continues.
    """
    native = Watchdog._read

    def read_late(watchdog: Watchdog, rank: int) -> bool:
        time.sleep(0.05)
        return native(watchdog, rank)

    comm = symm.communicator(own_group(group), "cpu")
    pids = comm.all_gather(os.getpid())
    if group.rank() == 0:
        Watchdog._read = read_late
    try:
        for _ in range(rounds):
            comm.all_gather(None, what="all are here", deadline_s=LONG_S)
            if group.rank() == 1:
                time.sleep(0.1)
                os.kill(pids[0], signal.SIGSTOP)
                time.sleep(1.1)
                threading.Timer(0.1, os.kill, (pids[0], signal.SIGCONT)).start()
            with mock.patch.object(control, "_LAST_LOOK_S", PROMPT_S):  # a busy machine may be slow
                values = comm.all_gather(group.rank(), what="a census", deadline_s=1.0 if group.rank() == 0 else LONG_S)
            assert values == [0, 1]
    finally:
        Watchdog._read = native


def test_a_process_that_was_stopped_finds_what_came_meanwhile(pool: Pool) -> None:
    pool.run(stopped_past_its_deadline, 3, ranks=2)


def store_of_a_stopped_rank(group):
    """Stop rank 0, which serves the store. Rank 1 waits for the store, until its deadline or Ctrl-C."""
    (pid, port), *_ = symm.communicator(group, "cpu").all_gather(
        (os.getpid(), keep_a_store() if group.rank() == 0 else 0)
    )
    found = []
    if group.rank() == 1:
        client = dist.TCPStore("127.0.0.1", port, is_master=False)
        os.kill(pid, signal.SIGSTOP)
        try:
            found.append(timed(lambda: bootstrap.connect(client, 1, 2, deadline_s=0.5)))
            ctrl_c = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            found.append(failure_of(lambda: (ctrl_c.start(), bootstrap.connect(client, 1, 2, deadline_s=LONG_S))))
        finally:
            os.kill(pid, signal.SIGCONT)
    dist.barrier(group)
    kept.clear()
    return found


kept: list[dist.TCPStore] = []


def keep_a_store() -> int:
    kept.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return kept[0].port


def test_a_store_that_does_not_answer_is_no_reason_to_wait_longer(pool: Pool) -> None:
    _, ((kind, text, seconds), interrupted) = pool.run(store_of_a_stopped_rank, ranks=2, timeout_s=40)
    assert kind == "DeadlineError"
    assert "rank 1 waited for the store of this process group to answer" in text
    assert seconds < PROMPT_S
    assert interrupted == ("KeyboardInterrupt", "")


def set_while_stopped(group, wait):
    """Pause the process between its check of the counter and its reading of the clock. The counter is set meanwhile."""
    native = _core.signal_wait

    def stand_still(address: int, wanted: int, *arguments: Any) -> tuple[int, int]:
        found = native(address, wanted, *arguments)
        time.sleep(0.4)
        _core.signal_set(address, wanted)
        return found

    with symm.Signal(group=own_group(group)) as counter:
        _core.signal_wait = stand_still
        try:
            return counter.wait(1, deadline_s=0.2)
        finally:
            _core.signal_wait = native


def test_a_signal_that_came_while_the_process_stood_still_counts(pool: Pool) -> None:
    assert pool.run(set_while_stopped, None, ranks=1) == [1]


# -- no descriptor, no thread


@contextmanager
def room_for(descriptors: int) -> Iterator[None]:
    """Limit this process to this many additional descriptors."""
    is_open = {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    limit, free = 0, 0
    while free < descriptors or limit in is_open:
        free += limit not in is_open
        limit += 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def set_all_up(group: dist.ProcessGroup) -> None:
    with symm.communicator(group, "cpu", deadline_s=LONG_S) as comm:
        comm.allocate(4096, what="a little", deadline_s=LONG_S).tensor(0, (4096,), torch.uint8)


def call(group: dist.ProcessGroup) -> None:
    options: Any = {"schedule": "shard[chunks=1,send=in_turn,by=dma]", "deadline_s": LONG_S}
    weft.all_gather_matmul(torch.ones(4, 8), [torch.ones(8, 3)], 0, group, **options)


def without_descriptors(group, function, rooms, late):
    """Let rank 1 have few descriptors, and arrive first or last."""
    function(own_group(group))  # loads modules
    found: list[tuple[tuple[str, str, float], tuple[str, str, float]]] = []
    for room in rooms:
        own, before = own_group(group), traces()
        dist.barrier(group)
        if (group.rank() == BAD_RANK) == late:
            time.sleep(0.3)
        if group.rank() == BAD_RANK:
            with room_for(room):
                first = timed(lambda own=own: function(own))
        else:
            first = timed(lambda own=own: function(own))
        dist.barrier(group)
        found.append((first, timed(lambda own=own: function(own))))
        assert not traces(before)["memfd descriptors"]
    return found


@pytest.mark.parametrize(
    ("function", "late"), [slow(set_all_up, False), slow(set_all_up, True), (call, False), slow(call, True)]
)
def test_no_descriptor_left_is_told_by_its_cause(function: Any, late: bool) -> None:
    """Try each number of free descriptors from none to enough. With fewer than enough, set-up fails at different steps."""
    with Pool(3) as pool:
        found = pool.run(without_descriptors, function, range(8), late, timeout_s=100)
    by_room = list(zip(*found, strict=True))
    assert all(first[0] for first, _ in by_room[0])
    assert not any(first[0] for first, _ in by_room[-1])
    for room, of_ranks in enumerate(by_room):
        firsts, agains = zip(*of_ranks, strict=True)
        assert all(kind for kind, _, _ in firsts) or not any(kind for kind, _, _ in firsts), (
            f"room for {room}: {firsts}"
        )
        # With enough descriptors the group works. Otherwise it has failed on all ranks.
        assert {kind for kind, _, _ in agains} in ({""}, {"PoisonedGroupError"}), f"room for {room}: {agains}"
        for kind, text, seconds in (*firsts, *agains):
            assert not kind or "Too many open files" in text, f"room for {room}: {kind}: {text}"
            assert seconds < PROMPT_S, f"room for {room}: {seconds:.1f} s"


def set_up_again_at_once(group: dist.ProcessGroup) -> tuple[str, str]:
    """Close the communicator and set it up again, while rank 1 is slow to close its first listener."""
    own, close, waits_s = (
        own_group(group),
        bootstrap._Setup.close,
        [1.5],
    )  # other ranks need less, also on a busy machine

    def slowly(setup: bootstrap._Setup, *peers: bootstrap.Peer) -> None:
        time.sleep(waits_s.pop() if waits_s else 0.0)
        close(setup, *peers)

    with mock.patch.object(bootstrap._Setup, "close", slowly if group.rank() == BAD_RANK else close):
        symm.communicator(own, "cpu", deadline_s=LONG_S).close()
        return timed(lambda: symm.communicator(own, "cpu", deadline_s=LONG_S).all_gather(0, what="ranks"))[:2]


def test_a_group_is_set_up_again_while_a_rank_still_leaves_the_first_attempt(pool: Pool) -> None:
    assert pool.run(set_up_again_at_once, ranks=3, timeout_s=40) == [("", "")] * 3


def without_threads(group):
    own, start, send, before, goodbyes = own_group(group), threading.Thread.start, Watchdog.send, traces(), set()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def noted(watchdog: Watchdog, rank: int, packet: bytes, **options: Any) -> None:
        if packet.startswith(b"G"):
            goodbyes.add(rank)
        send(watchdog, rank, packet, **options)

    if group.rank() == BAD_RANK:
        threading.Thread.start, Watchdog.send = fail, noted  # type: ignore[method-assign]
    try:
        first = timed(lambda: set_all_up(own))
    finally:
        threading.Thread.start, Watchdog.send = start, send  # type: ignore[method-assign]
    second, left = timed(lambda: symm.communicator(own, "cpu", deadline_s=LONG_S)), traces(before)["memfd descriptors"]
    set_all_up(own_group(group))
    return first, second, left, goodbyes


def test_no_thread_for_the_watchdog_is_told_by_its_cause(pool: Pool) -> None:
    found = pool.run(without_threads, ranks=3, timeout_s=40)
    assert [first[0] for first, *_ in found] == ["PoisonedGroupError", "WeftError", "PoisonedGroupError"]
    # Without a goodbye, a peer takes the end of the connection for the death of the process.
    assert found[BAD_RANK][-1] == {0, 2}
    for first, second, left, _ in found:
        assert "can't start new thread" in first[1]
        assert_error(second, "PoisonedGroupError", "rank 1 cannot start its watchdog thread: RuntimeError")
        assert max(first[2], second[2]) < PROMPT_S
        assert not left
