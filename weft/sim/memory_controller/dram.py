"""A simulation of one HBM2 channel, DRAM command by DRAM command. It gives the channel's bandwidth for the accesses of
a GEMM and of a ring.

The simulator of the memory controller (`run`) serves a channel's queue at one rate, derived from the paper's
reduce-scatters. This module checks this rate, and the time of a near-memory update, against DRAM timings. It models
banks with open rows, the longer delay between columns of a bank group, the bus turnaround from reads to writes, and a
FR-FCFS controller that writes in batches.

Timings, queues and address bits are taken from Accel-Sim's V100 at 1 GHz, after Chatterjee et al., "Architecting an
Energy-Efficient DRAM System for GPUs", 2017. Table 1 of "T3: Transparent Tracking & Triggering for Fine-grained Overlap
of Compute & Collectives" uses the same source, and adds CCDWL, the delay after a near-memory update.
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple, TypeAlias

CCD, CCDL, CCDWL, RRD, RCD, RAS, RP, RC, CL, WL, CDLR, WR, RTPL = 1, 2, 4, 4, 14, 33, 14, 47, 14, 2, 3, 12, 4
"""DRAM timings in clocks of 1 ns, with JEDEC's names (CCD is tCCD, and so on). CCDWL is not JEDEC's: the delay that
replaces CCDL, the delay between columns of a bank group, after a near-memory update.
"""
BANKS, GROUPS, ATOM, CHUNK, ROW = 16, 4, 32, 256, 2048
"""The numbers of banks and bank groups. Then sizes in bytes: a column access (ATOM), a channel's part of consecutive
addresses (CHUNK), an open row (ROW).
"""
QUEUE, HIGH, LOW = 64, 56, 32
READ_TO_WRITE, WRITE_TO_READ = CL + 1 + 2 - WL, WL + 1 + CDLR

Op: TypeAlias = Literal["read", "store", "update"]


class Access(NamedTuple):
    op: Op
    bank: int
    row: int


def access(op: Op, address: int) -> Access:
    """Return the access to an address within the channel.

    Consecutive chunks of 256 bytes alternate between two banks. A row of a bank holds eight chunks.
    """
    chunk = address // CHUNK
    bank = (chunk & 1) | ((chunk >> 4) & 7) << 1
    return Access(op, bank, address // (BANKS * ROW))


def cycles(accesses: list[Access]) -> int:
    """Return the number of clock cycles that a channel needs for these accesses, which enter its queues in order."""
    coming = iter(accesses)
    queues: dict[bool, list[Access]] = {False: [], True: []}  # {is a write: accesses}
    entering = next(coming, None)
    open_row, opened, closable = [-1] * BANKS, [-RC] * BANKS, [0] * BANKS
    group_free, last_open = [0] * GROUPS, -RRD
    free = {False: 0, True: 0}
    now, left, draining = 0, len(accesses), False
    while left:
        while entering is not None and len(queues[entering.op != "read"]) < QUEUE:
            queues[entering.op != "read"].append(entering)
            entering = next(coming, None)
        if len(queues[True]) >= HIGH or not queues[False]:
            draining = True
        if len(queues[True]) <= (LOW if queues[False] else 0):
            draining = False
        queue = queues[draining]
        for i, a in enumerate(queue):
            group = a.bank % GROUPS
            ready = open_row[a.bank] == a.row and now >= opened[a.bank] + RCD and now >= group_free[group]
            if ready and now >= free[draining]:
                del queue[i]
                left -= 1
                group_free[group] = now + (CCDWL if a.op == "update" else CCDL)
                free[draining] = now + CCD
                free[not draining] = now + (WRITE_TO_READ if draining else READ_TO_WRITE)
                done = now + (WL + 1 + WR if draining else RTPL)
                closable[a.bank] = max(closable[a.bank], done)
                break
        if now >= last_open + RRD:
            wanted = {(a.bank, a.row) for a in queue}
            for a in queue:
                bank = a.bank
                if open_row[bank] == a.row or (bank, open_row[bank]) in wanted:
                    continue
                if now >= max(opened[bank] + RAS, closable[bank]) + RP and now >= opened[bank] + RC:
                    open_row[bank], opened[bank], last_open = a.row, now, now
                    break
        now += 1
    return now


def _stream(op: Op, start: int, count: int) -> list[Access]:
    """Return `count` accesses to consecutive addresses of a channel."""
    return [access(op, start + i * ATOM) for i in range(count)]


def _pieces(op: Op, count: int, length: int, seed: int) -> list[Access]:
    """Return `count` accesses, in runs of `length` bytes at random addresses."""
    rng, found = random.Random(seed), list[Access]()
    while len(found) < count:
        start = rng.randrange(1 << 18) * length
        found += [access(op, start + offset) for offset in range(0, length, ATOM)]
    return found


def _mixed(*streams: list[Access]) -> list[Access]:
    """Interleave streams: take 256 bytes of accesses from each stream in turn."""
    found, run = [], CHUNK // ATOM
    for i in range(0, max(map(len, streams)), run):
        for stream in streams:
            found += stream[i : i + run]
    return found


def patterns(count: int = 3000) -> dict[str, list[Access]]:
    """Return the access patterns to compare: {description of a pattern: about `count` accesses of a channel, in order}."""
    away = 1 << 26
    return {
        "last step of a reduce-scatter: two reads, one store": _mixed(
            _stream("read", 0, count // 3), _stream("read", away + 5 * ROW * BANKS, count // 3),
            _stream("store", 2 * away + 9 * ROW * BANKS, count // 3),
        ),
        "a GEMM's operands, rows of 64 bytes": _pieces("read", count, 64, 1),
        "a copy's reads in a row": _stream("read", 0, count),
        "stores in a row": _stream("store", 0, count),
        "updates in a row": _stream("update", 0, count),
        "a tile's stores, chunks of 256 bytes": _pieces("store", count, CHUNK, 2),
        "a tile's updates, chunks of 256 bytes": _pieces("update", count, CHUNK, 2),
        "T3: operands, a tile's updates, a copy's reads, arriving updates": _mixed(
            _pieces("read", count // 2, 64, 3), _pieces("update", count // 6, CHUNK, 4),
            _stream("read", away, count // 6), _stream("update", 2 * away, count // 6),
        ),
    }  # fmt: skip


def update_ratio(count: int = 3000) -> float:
    """Return the time of near-memory updates divided by the time of stores, for tiles at random addresses."""
    return cycles(_pieces("update", count, CHUNK, 2)) / cycles(_pieces("store", count, CHUNK, 2))


def rate(accesses: list[Access], channels: int = 32) -> float:
    """Return the bandwidth in bytes/s of `channels` channels, each of which serves `accesses`."""
    return len(accesses) * ATOM * channels / (cycles(accesses) * 1e-9)
