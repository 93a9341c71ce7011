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


def test_an_exchange_needs_a_message_for_each_peer(ends: tuple[End, End]) -> None:
    with pytest.raises(ValueError, match="sent has 2 messages: pass one for each of the 1 peers"):
        ends[0].link.begin([(0, 0)] * 2, 0, ROOM)


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
    world, row_bytes, most = n_hosts * per_host, 12, 1 << 16
    counts = rng.integers(0, 5, (world, world, experts))  # [source, target, expert]
    cells = {
        (s, t, e): np.array([(s, t * experts + e, i) for i in range(counts[s, t, e])], np.int32).reshape(-1, 3)
        for s in range(world)
        for t in range(world)
        for e in range(experts)
    }
    of_sources, received, expected = np.ascontiguousarray(counts), np.zeros_like(counts), counts.swapaxes(0, 1).copy()
    outs = [np.zeros((counts[:, t].sum() + 1, 3), np.int32) for t in range(world)]

    def rows_on(rank: int, most_bytes: int, out: np.ndarray | None) -> _core.RailRows:
        host, index = divmod(rank, per_host)
        return _core.RailRows(
            counts=address(of_sources[rank]), received=address(received[rank]), out=0 if out is None else address(out),
            expected=0 if out is None else address(expected[rank]), world_size=world, experts=experts, per_host=per_host,
            host=host, index=index, row_bytes=row_bytes, most_bytes=most_bytes, by_expert=by_expert,
        )  # fmt: skip

    made, memories = [rows_on(rank, most, outs[rank]) for rank in range(world)], []
    for s, one in enumerate(made):
        memory = np.zeros(one.rows_at + most, np.uint8)
        assert one.rows == one.load(address(memory)) == counts[s].sum()
        assert one.of_experts == counts[s].sum(0).tolist()
        order = sorted(
            ((t, e) for t in range(world) for e in range(experts)), key=lambda te: te[:: -1 if by_expert else 1]
        )
        rows = np.concatenate([cells[s, t, e] for t, e in order]).reshape(-1).view(np.uint8)
        memory[one.rows_at : one.rows_at + len(rows)] = rows
        memories.append(memory)
    messages: dict[tuple[int, int], np.ndarray] = {}  # by (host that sends, rank that receives)
    for rank, one in enumerate(made):
        host, index = divmod(rank, per_host)
        near, head = [address(memory) for memory in memories[host * per_host :][:per_host]], one.head_bytes
        far = [np.zeros(head + per_host * most, np.uint8) for _ in range(n_hosts - 1)]
        places = [address(message) for message in far]
        few = rows_on(rank, 0, None)
        assert few.load(address(np.zeros(few.rows_at, np.uint8))) == 0
        assert few.pack(near, places) == [head] * len(far)
        assert not few.has_rows
        sizes = one.pack(near, places)
        assert one.has_rows
        for other, message, size in zip((h for h in range(n_hosts) if h != host), far, sizes, strict=True):
            messages[host, other * per_host + index] = message[:size]
        sources = range(host * per_host, (host + 1) * per_host)
        assert one.go_on() == counts[sources, rank].sum()
        assert np.array_equal(received[rank, sources], counts[sources, rank])
        out, wanted = (
            np.zeros((counts[sources, rank].sum() + 1, 3), np.int32),
            wanted_rows(cells, sources, rank, experts),
        )
        one.copy_near(address(out))
        assert np.array_equal(out[:-1], wanted)
        assert not out[-1].any()
    for rank, one in enumerate(made):
        host = rank // per_host
        one.unpack([address(messages[other, rank]) for other in range(n_hosts) if other != host])
        assert np.array_equal(received[rank], counts[:, rank])
        far_rows = sum(int(counts[s, rank].sum()) for s in range(world) if s // per_host != host)
        assert one.copy_far() == far_rows * row_bytes
        assert np.array_equal(outs[rank][:-1], wanted_rows(cells, range(world), rank, experts))
        assert not outs[rank][-1].any()
        received[rank, (host + 1) % n_hosts * per_host, 0] += 1
        with pytest.raises(ValueError, match=r"a message of host \d has unexpected rows"):
            one.copy_far()


def test_rows_of_this_host_are_left_if_their_numbers_were_not_expected() -> None:
    counts, expected = np.array([[1], [1]]), np.array([[2], [0]])
    memory, message, out = np.zeros(256, np.uint8), np.zeros(256, np.uint8), np.zeros(64, np.uint8)
    memory[64:68] = 7
    rows = _core.RailRows(
        counts=address(counts), received=0, expected=address(expected), out=address(out), world_size=2, experts=1, per_host=1,
        host=0, index=0, row_bytes=4, most_bytes=64, by_expert=False,
    )  # fmt: skip
    rows.load(address(memory))
    rows.pack([address(memory)], [address(message)])
    assert rows.go_on() == 1
    assert not out.any()
    expected[0] = 1
    rows.go_on()
    assert out[:4].tolist() == [7] * 4


def wanted_rows(cells: dict[tuple[int, int, int], np.ndarray], sources: range, rank: int, experts: int) -> np.ndarray:
    return np.concatenate([cells[s, rank, e] for s in sources for e in range(experts)])


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
