"""A kernel that stores gradients of pooled vectors directly into the memory of the ranks that own the tables, without
an all-to-all.

Each rank has two buffers in symmetric memory:

    inbox      [global batch, columns of the rank's tables], for gradients from all ranks
    signals    two words for each peer, whose values are call numbers (epochs). `free`: the last call whose gradients the peer has
               used, so that its inbox is free. `arrived`: the last call whose gradients have arrived here from the peer

1. A program waits until every peer's inbox is free for this call.
2. It stores pieces (columns of a block of samples) in the inboxes of their owners. Own pieces are distributed among pieces for
   other ranks, so that memory and links are busy together.
3. The last program to finish sets `arrived` at every peer, with release. Programs count their arrivals with acquire-release at
   system scope, so the release covers the stores of all programs. The last program then waits until every peer has set
   `arrived` here, and stores the number of this call in its state.
4. Later kernels in the stream read the inbox. Then `free_kernel` sets `free` at every peer.

Every wait ends at a deadline, or when the watchdog writes POISON. In both cases the kernel writes a record to pinned memory,
and 0 to the word OK of its state. The update that follows reads this 0, and leaves all tables unchanged.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.signals import store_release, wait_or_record, words

# Columns of the table of pieces (int64): owner, first column in `grad`, first column in the inbox, width, columns of
# the owner's inbox.
PIECE_FIELDS = 5
# Words of the local state (int64, device memory).
STATE_WORDS = 8
EPOCH, ARRIVED, FAILED = range(3)
OK = 4  # at a multiple of 16 bytes, because other kernels read it
# Values of R_STATUS of the record (`weft.kernels.signals`).
WAIT_FREE, WAIT_ARRIVED = 1, 2

_PIECE_FIELDS = tl.constexpr(PIECE_FIELDS)
_EPOCH = tl.constexpr(EPOCH)
_ARRIVED = tl.constexpr(ARRIVED)
_FAILED = tl.constexpr(FAILED)
_OK = tl.constexpr(OK)
_WAIT_FREE = tl.constexpr(WAIT_FREE)
_WAIT_ARRIVED = tl.constexpr(WAIT_ARRIVED)


@triton.jit
def _waited(record, state, word, wanted, epoch, deadline_ns, STATUS: tl.constexpr, PTX: tl.constexpr):
    """Call `wait_or_record`, return its result, and count failures in `state`."""
    failed = wait_or_record(record, word, wanted, epoch, deadline_ns, STATUS, PTX)
    if failed != 0:
        tl.atomic_add(state + _FAILED, 1, sem="relaxed")
    return failed


@triton.jit(do_not_specialize=["samples", "first_sample", "count_of_pieces", "stride", "deadline_ns"])
def push_kernel(
    grad, pieces, inboxes, signals, state, record, samples, first_sample, count_of_pieces, stride, deadline_ns: tl.int64,
    RANK: tl.constexpr, WORLD: tl.constexpr, WORLD_P2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ALIGN: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, WAIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Store the columns of `grad` `[samples, stride]` in the inboxes of the ranks that own their tables.

    pieces `[count_of_pieces, PIECE_FIELDS]`: ranges of at most BLOCK columns, and their owners. inboxes, signals
    `[WORLD]`: addresses of every rank's memory, as mapped on this device. inboxes have the type DTYPE. first_sample:
    the index of this rank's first sample in the global batch. WAIT: False if one process runs all ranks.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(state + _EPOCH) + 1
    ranks = tl.arange(0, WORLD_P2)
    peer = (ranks < WORLD) & (ranks != RANK)
    mine = tl.load(signals + RANK)
    # Lanes without a peer read this rank's epoch, which the last program changes only when all programs have passed.
    own = state.to(tl.int64) + 8 * _EPOCH
    blocks = (samples + ROWS - 1) // ROWS
    units = count_of_pieces * blocks
    if WAIT:
        free = tl.where(peer, mine + 8 * ranks, own)
        if _waited(record, state, free, epoch - 1, epoch, deadline_ns, _WAIT_FREE, PTX) != 0:
            units = units * 0

    lanes, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    for unit in range(program, units, programs):
        piece = pieces + (unit // blocks) * _PIECE_FIELDS
        sample = (unit % blocks) * ROWS + lanes
        owner, here, there = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
        width, of_owner = tl.load(piece + 3), tl.load(piece + 4)
        mask = (sample < samples)[:, None] & (columns < tl.multiple_of(width, ALIGN))[None, :]
        source = tl.multiple_of(sample.to(tl.int64) * stride + here, ALIGN)
        inbox = tl.multiple_of(tl.load(inboxes + owner).to(tl.pointer_type(DTYPE)), ALIGN * ITEM_BYTES)
        target = tl.multiple_of((first_sample + sample.to(tl.int64)) * of_owner + there, ALIGN)
        g = tl.load(grad + source[:, None] + columns[None, :], mask=mask)
        tl.store(inbox + target[:, None] + columns[None, :], g.to(DTYPE), mask=mask)

    tl.debug_barrier()
    arrived = tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel", scope="sys")
    if arrived == programs - 1:
        failed = tl.load(state + _FAILED, volatile=True)
        if failed == 0:
            theirs = tl.load(signals + tl.where(peer, ranks, RANK))
            # Lanes without a peer write to this rank's own word, which no kernel reads.
            at = tl.where(peer, theirs + 8 * (WORLD + RANK), mine + 8 * (WORLD + RANK))
            store_release(words(at), tl.full([WORLD_P2], 0, tl.int64) + epoch, PTX)
            if WAIT:
                from_peers = tl.where(peer, mine + 8 * (WORLD + ranks), mine + 8 * (WORLD + RANK))
                failed += _waited(record, state, from_peers, epoch, epoch, deadline_ns, _WAIT_ARRIVED, PTX)
        tl.store(state + _OK, (failed == 0).to(tl.int64))
        tl.store(state + _ARRIVED, tl.full([], 0, tl.int64))
        tl.store(state + _FAILED, tl.full([], 0, tl.int64))
        tl.store(state + _EPOCH, epoch)


@triton.jit
def free_kernel(signals, state, RANK: tl.constexpr, WORLD: tl.constexpr, WORLD_P2: tl.constexpr, PTX: tl.constexpr):
    """Notify every peer that this rank has used the gradients of the last call. Grid: one program."""
    ranks = tl.arange(0, WORLD_P2)
    peer = (ranks < WORLD) & (ranks != RANK)
    theirs = tl.load(signals + tl.where(peer, ranks, RANK))
    epoch = tl.full([WORLD_P2], 0, tl.int64) + tl.load(state + _EPOCH)
    store_release(words(theirs + 8 * RANK), epoch, PTX)
