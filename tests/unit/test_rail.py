"""The native code of rails: messages over sockets, and the rows that they carry.

The messages of `test_messages_longer_than_the_kernel_buffers` deadlock if a rank only sends before it receives.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from weft import _core

ROOM = 1 << 22
DONE, TIME_OVER, FAILED, LOST = 0, 1, 2, 3
LONG_S = 20.0


class End:
    """One end of connections: its link, its message, and what it has received."""

    def __init__(self, *sockets: socket.socket) -> None:
        self.sockets, self.failed = sockets, ctypes.c_int64(0)
        for one in sockets:
            one.setblocking(False)
        self.link = _core.RailLink(list(sockets), ctypes.addressof(self.failed))
        self.received = np.zeros((len(sockets), ROOM), np.uint8)

    def begin(self, *messages: bytes, room: int = ROOM) -> None:
        self.sent = [np.frombuffer(message or b"\0", np.uint8) for message in messages]
        places = [(data.ctypes.data, len(message)) for data, message in zip(self.sent, messages, strict=True)]
        self.link.begin(places, self.received.ctypes.data, room)

    def message(self, peer: int, length: int) -> bytes:
        return self.received[peer, :length].tobytes()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    pair = socket.socketpair()
    with pair[0], pair[1]:
        yield End(pair[0]), End(pair[1])


def test_messages_of_several_exchanges_arrive_in_order(ends: tuple[End, End]) -> None:
    one, other = ends
    one.begin(b"first")
    assert one.link.go_on(0.0) == (TIME_OVER, -1)
    other.begin(b"")
    assert other.link.go_on(LONG_S) == (DONE, -1)
    other.begin(b"second of the other")  # before the first end has received the first message
    assert one.link.go_on(LONG_S) == (DONE, -1)
    one.begin(b"second")
    assert one.link.go_on(LONG_S) == other.link.go_on(LONG_S) == (DONE, -1)
    assert one.message(0, 19) == b"second of the other"
    assert other.message(0, 6) == b"second"
    assert one.link.number == 2
    assert one.link.bytes_sent == 2 * 16 + len(b"first") + len(b"second")


def test_messages_longer_than_the_kernel_buffers(ends: tuple[End, End]) -> None:
    data = [np.random.default_rng(seed).integers(0, 256, ROOM, np.uint8).tobytes() for seed in (1, 2)]
    outcomes = [0, 0]

    def exchange(number: int) -> None:
        ends[number].begin(data[number])
        outcomes[number] = ends[number].link.go_on(LONG_S)[0]

    threads = [threading.Thread(target=exchange, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [DONE, DONE]
    assert [end.message(0, ROOM) for end in ends] == data[::-1]


def test_several_peers() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    middle = End(*(pair[0] for pair in pairs))
    others = [End(pair[1]) for pair in pairs]
    middle.begin(*(f"to {i}".encode() for i in range(3)))
    for i in (2, 0, 1):
        others[i].begin(f"from {i}".encode())
        assert others[i].link.go_on(LONG_S) == (DONE, -1)
        assert others[i].message(0, 4) == f"to {i}".encode()
    assert middle.link.go_on(LONG_S) == (DONE, -1)
    assert [middle.message(i, 6) for i in range(3)] == [b"from 0", b"from 1", b"from 2"]
    for pair in pairs:
        pair[0].close()
        pair[1].close()


@pytest.mark.parametrize(
    ("header", "error"),
    [
        (struct.pack("=QQ", 1, 101), "it sent a message of 101 bytes, but at most 100 are allowed"),
        (struct.pack("=QQ", 1, 2**64 - 1), f"it sent a message of {2**64 - 1} bytes, but at most 100 are allowed"),
        (struct.pack("=QQ", 2, 5), "it sent message 2 where message 1 was expected"),
        (b"", "it closed the connection"),
        (b"abc", "it closed the connection"),
    ],
)
def test_invalid_messages_and_ended_connections(ends: tuple[End, End], header: bytes, error: str) -> None:
    one, other = ends
    other.sockets[0].setblocking(True)
    other.sockets[0].sendall(header + b"x" * 200 if len(header) == 16 else header)
    other.sockets[0].shutdown(socket.SHUT_WR)
    one.received[:] = 7
    one.begin(b"good", room=100)
    assert one.link.go_on(LONG_S) == (LOST, 0)
    assert one.link.error == error
    assert (one.received == 7).all()


def test_a_failed_group_ends_the_wait(ends: tuple[End, End]) -> None:
    one, _ = ends
    one.begin(b"good")
    timer = threading.Timer(0.05, lambda: setattr(one.failed, "value", 1))
    timer.start()
    assert one.link.go_on(LONG_S) == (FAILED, -1)
    timer.join()


# -- rows


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_an_all_to_all_in_two_levels(seed: int, by_expert: bool) -> None:
    """Compare with a table of all rows. A row is three numbers: its source rank, its expert, and its number."""
    rng = np.random.default_rng(seed)
    n_hosts, per_host, experts = 2 + seed % 2, 2 + seed // 2, 1 + seed
    world, row_bytes, rows_at, most = n_hosts * per_host, 12, 4096, 1 << 16
    counts = rng.integers(0, 5, (world, world, experts))  # [source, target, expert]
    cells = {
        (s, t, e): np.array([(s, t * experts + e, i) for i in range(counts[s, t, e])], np.int32).reshape(-1, 3)
        for s in range(world)
        for t in range(world)
        for e in range(experts)
    }
    memories = []
    for s in range(world):
        memory = np.zeros(rows_at + most, np.uint8)
        memory[: counts[s].nbytes] = counts[s].reshape(-1).view(np.uint8)
        order = sorted(
            ((t, e) for t in range(world) for e in range(experts)), key=lambda te: te[:: -1 if by_expert else 1]
        )
        rows = np.concatenate([cells[s, t, e] for t, e in order]).reshape(-1).view(np.uint8)
        memory[rows_at : rows_at + len(rows)] = rows
        memories.append(memory)
    head = -(-8 * per_host * experts // 64) * 64
    messages: dict[tuple[int, int], np.ndarray] = {}  # by (host that sends, rank that receives)
    for rank in range(world):
        host, index = divmod(rank, per_host)
        near = memories[host * per_host : (host + 1) * per_host]
        made = _core.RailRows(
            world_size=world, experts=experts, per_host=per_host, host=host, index=index, row_bytes=row_bytes,
            rows_at=rows_at, head_bytes=head, most_bytes=most, by_expert=by_expert,
        )  # fmt: skip
        far = [np.zeros(head + per_host * most, np.uint8) for _ in range(n_hosts - 1)]
        sizes = made.pack([address(memory) for memory in near], [address(message) for message in far])
        assert made.has_rows
        for other, message, size in zip((h for h in range(n_hosts) if h != host), far, sizes, strict=True):
            messages[host, other * per_host + index] = message[:size]
        table = np.zeros((per_host, experts), np.int64)
        sources = range(host * per_host, (host + 1) * per_host)
        total = made.near_counts(address(table))
        assert np.array_equal(table, counts[sources, rank])
        out = np.zeros((total + 1, 3), np.int32)
        made.copy_near(address(out))
        wanted = np.concatenate([cells[s, rank, e] for s in sources for e in range(experts)])
        assert np.array_equal(out[:-1], wanted)
        assert not out[-1].any()
        few = _core.RailRows(
            world_size=world, experts=experts, per_host=per_host, host=host, index=index, row_bytes=row_bytes,
            rows_at=rows_at, head_bytes=head, most_bytes=row_bytes, by_expert=by_expert,
        )  # fmt: skip
        assert few.pack([address(memory) for memory in near], [address(message) for message in far]) == [head] * len(
            far
        )
        assert not few.has_rows
    for (host, rank), message in messages.items():
        sources = range(host * per_host, (host + 1) * per_host)
        table = message[: 8 * per_host * experts].view(np.int64).reshape(per_host, experts)
        assert np.array_equal(table, counts[sources, rank])
        out = np.zeros((int(table.sum()), 3), np.int32)
        made.copy_far(address(message), address(np.ascontiguousarray(table)), address(out))
        assert np.array_equal(out, np.concatenate([cells[s, rank, e] for s in sources for e in range(experts)]))


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_reordered(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, experts = 1 + seed, 3
    counts = rng.integers(0, 4, (ranks, experts))
    rows = [(r, e, i) for r in range(ranks) for e in range(experts) for i in range(counts[r, e])]
    by_rank = np.array(rows, np.int16).reshape(-1, 3)
    by_expert = np.array(sorted(rows, key=lambda row: (row[1], row[0], row[2])), np.int16).reshape(-1, 3)
    about = {"counts": address(counts), "ranks": ranks, "experts": experts, "row_bytes": 6}
    for source, wanted, to_ranks in ((by_rank, by_expert, False), (by_expert, by_rank, True)):
        out = np.zeros_like(source)
        _core.reorder_rows(rows=address(source), out=address(out), to_ranks=to_ranks, **about)
        assert np.array_equal(out, wanted)


def test_weighted_sums_wrap() -> None:
    rng = np.random.default_rng(0)
    numbers, weights = rng.integers(0, 2**40, 37), rng.integers(1, 2**64, 37, np.uint64)
    wanted = sum(int(a) * int(b) for a, b in zip(numbers, weights, strict=True)) % 2**64
    assert _core.weighted_sum(address(numbers), address(weights), len(numbers)) == wanted
