"""Kernels of the input distribution: they count ids, and pack the features of a rank into one message for each
destination.

A rank has the bags of all features (keys) for its own samples. A destination rank needs the bags of some features. A
*piece* is the bags of one feature for one destination. The message for a destination has 4-byte words, without gaps:

    ids of all its pieces | lengths of all its bags (int32) | per-sample weights of all its pieces, if there are any

    count_ids_kernel   lengths -> the number of ids of each key
    header_kernel      counts  -> this rank's header, and a header for each destination
    exchange_kernel    headers -> the headers that all ranks sent to this rank
    pack_kernel        values, lengths, weights -> the messages, one after the other, or in boxes
    unpack_kernel      the messages of all sources -> ids, offsets and weights by feature, with samples in rank order

A header tells a destination the number of ids of each piece. Before these counts there are `HEAD` words. The first is 1
if the source rank refuses its input, else 0. The second is the number of bits of an id, the third the batch size.
Headers are in device memory. Kernels compute all positions in messages from them, so the CPU need not know the
positions.

Boxes. If the CPU knows a bound on the ids that a rank receives, it need not know how many there are (`BOXED`). A rank then packs
its messages into boxes of a fixed size in its own symmetric memory: two sets, with a box for each destination. After the exchange
of headers, `unpack_kernel` of the destination reads its boxes in the memory of all sources. Exchange number `epoch` uses set
`epoch % 2`. A source overwrites a set two exchanges later. By then it has the destination's header of the exchange in between,
which the destination sent after it had read the set.

Exchange of headers. Each rank has a region of symmetric memory: a signal word for each rank, then two sets of boxes
with a box for each rank. In call number `epoch`, a rank stores its header for a destination in the destination's box
`[epoch % 2][rank]`, then, with release, `epoch` in the destination's signal word `[rank]`. Then it waits, with acquire,
until all ranks have set its own signal words, and copies the headers out of the boxes. Two sets suffice. A rank stores
the header of call `epoch + 2` only after it has the destination's header of call `epoch + 1`. The destination sends
this header when it has read the boxes of call `epoch`. The wait ends at a deadline, or when the watchdog writes POISON.
Then the kernel writes a record to pinned memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.signals import (
    _R_EPOCH,
    _R_FOUND,
    _R_PEER,
    _R_STATUS,
    _R_WANTED,
    store_release,
    wait_or_record,
    words,
)

HEAD = 3

REFUSED, OTHER_BITS, OTHER_BATCH, TOO_MANY = range(1, 5)
"""The reasons for which `unpack_kernel` drops a batch, in the word R_WANTED of the record."""
BAD_BATCH = 2
"""The word R_STATUS of the record after `unpack_kernel` has dropped a batch."""

_HEAD = tl.constexpr(HEAD)
_FAILED = tl.constexpr(2)  # in place of a header's first word, if headers have not arrived
_REFUSED, _OTHER_BITS = tl.constexpr(REFUSED), tl.constexpr(OTHER_BITS)
_OTHER_BATCH, _TOO_MANY = tl.constexpr(OTHER_BATCH), tl.constexpr(TOO_MANY)
_BAD_BATCH = tl.constexpr(BAD_BATCH)
_BATCH = tl.constexpr(2)


@triton.jit(do_not_specialize=["batch", "most"])
def count_ids_kernel(lengths, counts, batch, most, BLOCK: tl.constexpr):
    """Write the number of ids of each key to `counts`, or -1 if a length of the key is negative or above `most`.

    lengths `[keys * batch]`: the length of each bag of this rank, key by key. most: the number of ids in the input.
        Grid: one program per key.
    """
    key = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    wrong = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, batch, BLOCK):
        length = tl.load(lengths + key * batch + begin + at, mask=begin + at < batch, other=0).to(tl.int64)
        wrong |= ((length < 0) | (length > most)).to(tl.int32)
        total += length
    tl.store(counts + key, tl.where(tl.max(wrong, 0) > 0, -1, tl.sum(total, 0)))


@triton.jit(do_not_specialize=["keys", "words", "bits", "batch", "most"])
def header_kernel(
    counts, offsets, header_index, own, headers, keys, words, bits, batch, most,
    KEYS: tl.constexpr, GIVEN: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write this rank's own header (its numbers of ids, see the module) and a header for each destination. Grid: one
    program.

    own `[HEAD + keys + 1]`: this rank's own header: HEAD words, the number of ids of each key, and the index of the
        first id in `values`.
    headers `[words]`: the headers of all destinations. Word i is a copy of word `header_index[i]` of the own header.
    most: the number of ids in `values`, to which the counts must sum.
    GIVEN: True if the caller gave offsets, which must begin at 0 and end at `most`.
    PADDED: True if the counts may also sum to less, because `values` may end with unused ids.
    KEYS: a power of two, at least `keys`.
    """
    key = tl.arange(0, KEYS)
    count = tl.load(counts + key, mask=key < keys, other=0)
    total = tl.sum(tl.maximum(count, 0), 0)
    refused = tl.min(count, 0) < 0
    begin = total * 0
    if GIVEN:
        begin = tl.load(offsets).to(tl.int64)
        end = tl.load(offsets + keys * tl.cast(batch, tl.int64)).to(tl.int64)
        refused |= (begin != 0) | (end - begin != total)
    refused |= (total > most) if PADDED else (total != most)
    refused_word = refused.to(tl.int64)
    tl.store(own, refused_word)
    tl.store(own + 1, tl.cast(bits, tl.int64))
    tl.store(own + _BATCH, tl.cast(batch, tl.int64))
    tl.store(own + _HEAD + key, count, mask=key < keys)
    tl.store(own + _HEAD + keys, begin)
    for first in range(0, words, BLOCK):
        word = first + tl.arange(0, BLOCK)
        index = tl.load(header_index + word, mask=word < words, other=0)
        value = tl.load(counts + index - _HEAD, mask=(word < words) & (index >= _HEAD), other=0)
        value = tl.where(index == 0, refused_word, value)
        value = tl.where(index == 1, tl.cast(bits, tl.int64), value)
        value = tl.where(index == _BATCH, tl.cast(batch, tl.int64), value)
        tl.store(headers + word, value, mask=word < words)


@triton.jit(do_not_specialize=["most", "deadline_ns"])
def exchange_kernel(
    headers, starts, regions, state, record, arrived, most, deadline_ns: tl.int64,
    RANK: tl.constexpr, WORLD: tl.constexpr, WORLD_P2: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Send each rank its header, and receive the headers of all ranks (see the module). Grid: one program.

    headers `[words of all destinations]`: the headers to send, by destination. starts `[WORLD + 1]`: the index in `headers`
        of the first word for each destination, and the end.
    regions `[WORLD]`: the addresses of every rank's region, as mapped on this device. most: the size of a box in words.
    state `[1]`: the number of calls so far. arrived `[WORLD, words of a header to this rank]`: the result.
    WAIT: False if one process runs all ranks one after the other.
    """
    epoch = tl.load(state) + 1
    ranks, lanes = tl.arange(0, WORLD_P2), tl.arange(0, BLOCK)
    boxes = 8 * WORLD + (epoch % 2) * WORLD * most * 8
    for rank in range(WORLD):
        begin, end = tl.load(starts + rank), tl.load(starts + rank + 1)
        box = words(tl.load(regions + rank) + boxes + RANK * most * 8)
        for at in range(begin, end, BLOCK):
            word = tl.load(headers + at + lanes, mask=at + lanes < end)
            tl.store(box + (at - begin) + lanes, word, mask=at + lanes < end)
    tl.debug_barrier()
    is_rank = ranks < WORLD
    mine = tl.load(regions + RANK)
    theirs = tl.load(regions + tl.where(is_rank, ranks, RANK))  # lanes without a rank repeat this rank's own signal
    store_release(words(theirs + 8 * RANK), tl.full([WORLD_P2], 0, tl.int64) + epoch, PTX)
    failed = tl.full([], 0, tl.int32)
    if WAIT:
        signals = mine + 8 * tl.where(is_rank, ranks, RANK)
        failed = wait_or_record(record, signals, epoch, epoch, deadline_ns, 1, PTX)
    tl.debug_barrier()
    size = tl.load(starts + RANK + 1) - tl.load(starts + RANK)
    for rank in range(WORLD):
        box = words(mine + boxes + rank * most * 8)
        for at in range(0, size, BLOCK):
            word = tl.load(box + at + lanes, mask=at + lanes < size, volatile=True)
            word = tl.where((failed != 0) & (at + lanes == 0), _FAILED, word)
            tl.store(arrived + rank * size + at + lanes, word, mask=at + lanes < size)
    tl.store(state, epoch)


@triton.jit
def _copy(source, target, words, BLOCK: tl.constexpr):
    """Copy 4-byte words from `source` to `target`; words is their number. All programs with the same index in grid dimension 0
    share one copy.
    """
    for begin in range(tl.program_id(1) * BLOCK, words, tl.num_programs(1) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        word = tl.load(source + at, mask=at < words, other=0)
        tl.store(target + at, word.to(target.dtype.element_ty), mask=at < words)


@triton.jit(do_not_specialize=["pieces", "keys", "batch", "world", "box"])
def pack_kernel(
    values, lengths, weights, own, key_of_piece, rank_of_piece, messages, state, pieces, keys, batch, world, box,
    PIECES: tl.constexpr, KEYS: tl.constexpr, ID_WORDS: tl.constexpr, WEIGHTED: tl.constexpr, BOXED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the messages that send this rank's ids to all destination ranks. A piece is the bags of one feature for one
    destination. Pieces are sorted by destination. Grid: (pieces, programs that share a piece).

    values, weights: this rank's ids and per-sample weights. The first bag begins at index `own[HEAD + keys]` of both.
    PIECES, KEYS: powers of two, at least `pieces` and `keys`. ID_WORDS: the number of 4-byte words of an id.
    BOXED: True if `messages` are two sets of boxes (see the module), with a box of `box` words for each of `world` ranks. A message
        that does not fit is not written; its destination finds that in the header. state `[1]`: the number of exchanges so
        far.
    """
    piece, every = tl.program_id(0), tl.arange(0, PIECES)
    is_piece = every < pieces
    batch = tl.cast(batch, tl.int64)
    counts = tl.load(own + _HEAD + tl.load(key_of_piece + every, mask=is_piece, other=0), mask=is_piece, other=0)
    ranks = tl.load(rank_of_piece + every, mask=is_piece, other=-1)
    key, rank = tl.load(key_of_piece + piece), tl.load(rank_of_piece + piece)
    count = tl.load(own + _HEAD + key)

    words_of_id: tl.constexpr = ID_WORDS + (1 if WEIGHTED else 0)
    of_message = ranks == rank
    ids = tl.sum(tl.where(of_message, counts, 0), 0)
    bags = tl.sum(of_message.to(tl.int64), 0) * batch
    if BOXED:
        message = messages + (((tl.load(state) + 1) % 2) * world + rank) * box
        fits = (tl.min(counts, 0) >= 0) & (tl.load(own) == 0) & (ids * words_of_id + bags <= box)
        count = tl.where(fits, count, 0)
        batch_to_copy = tl.where(fits, batch, 0)
    else:
        is_before = is_piece & (ranks < rank)
        message = messages + tl.sum(tl.where(is_before, counts * words_of_id + batch, 0), 0)
        batch_to_copy = batch
    is_before = of_message & (every < piece)
    ids_before = tl.sum(tl.where(is_before, counts, 0), 0)
    bags_before = tl.sum(is_before.to(tl.int64), 0) * batch

    every_key = tl.arange(0, KEYS)
    first = tl.sum(tl.load(own + _HEAD + every_key, mask=every_key < tl.minimum(key, keys), other=0), 0)
    first += tl.load(own + _HEAD + keys)
    id_words = values.to(tl.pointer_type(tl.int32))
    _copy(id_words + first * ID_WORDS, message + ids_before * ID_WORDS, count * ID_WORDS, BLOCK)
    _copy(lengths + key * batch, message + ids * ID_WORDS + bags_before, batch_to_copy, BLOCK)
    if WEIGHTED:
        weight_words = weights.to(tl.pointer_type(tl.int32))
        _copy(weight_words + first, message + ids * ID_WORDS + bags + ids_before, count, BLOCK)


@triton.jit
def _zero(target, words, BLOCK: tl.constexpr):
    """Store zeros to `words` words from `target` on. Programs with the same index in grid dimension 0 share this work."""
    for begin in range(tl.program_id(1) * BLOCK, words, tl.num_programs(1) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.zeros([BLOCK], tl.int64), mask=at < words)


@triton.jit
def _write_offsets(lengths, offsets, first, bags, BAGS: tl.constexpr, SUM: tl.constexpr):
    """Write `first` plus the exclusive prefix sums of `lengths`, int32 [bags], to `offsets`. Programs with the same
    index in grid dimension 0 share this work.
    """
    # Each program scans consecutive blocks, after it has reduced all earlier lengths. The reduction is much faster than a scan,
    # and needs no results of other programs. A piece has fewer than 2^31 ids, so int32 suffices.
    of_program = tl.cdiv(tl.cdiv(bags, BAGS), tl.num_programs(1)) * BAGS
    begin = tl.program_id(1) * of_program
    end = tl.minimum(begin + of_program, bags)
    if begin < end:
        total = tl.zeros([SUM], tl.int32)
        for block in range(0, begin, SUM):
            bag = block + tl.arange(0, SUM)
            total += tl.load(lengths + bag, mask=bag < begin, other=0)
        first += tl.sum(total, axis=0)
        for block in range(begin, end, BAGS):
            bag = block + tl.arange(0, BAGS)
            ends = tl.cumsum(tl.load(lengths + bag, mask=bag < end, other=0), axis=0)
            tl.store(offsets + bag, first + ends, mask=bag < end)
            first += tl.max(ends, axis=0)


@triton.jit
def _reason(
    header, counts, batches, sources_of, is_piece, features, samples, most, record, call, ID_WORDS: tl.constexpr
):
    """Return the reason for which a batch must be dropped, or 0. The first program writes the reason to `record`.

    header, counts, batches, sources_of, is_piece: the values of `unpack_kernel`, for all pieces.
    samples: the number of samples that each source must have.
    most: the largest number of ids of all sources together.
    """
    refused = tl.load(header, mask=is_piece, other=0)
    bits = tl.load(header + 1, mask=is_piece, other=32 * ID_WORDS)
    total = tl.sum(tl.where(is_piece, counts, 0), 0)
    too_many = is_piece & ((total > most) | (counts < 0) | (counts > most))
    reasons = tl.where(too_many, _TOO_MANY, 0)
    reasons = tl.where(is_piece & (batches != samples), _OTHER_BATCH, reasons)
    reasons = tl.where(bits != 32 * ID_WORDS, _OTHER_BITS, reasons)
    reasons = tl.where(refused != 0, _REFUSED, reasons)
    # The first reason of any source, and the first source that has it.
    reason = tl.min(tl.where(reasons > 0, reasons, _TOO_MANY + 1), 0)
    reason = tl.where(reason > _TOO_MANY, 0, reason)
    has_arrived = tl.max(refused, 0) < 2
    if (reason > 0) & has_arrived & (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        source = tl.min(tl.where(reasons == reason, sources_of, 1 << 30), 0)
        found = tl.where(reason == _TOO_MANY, total, tl.max(tl.where(sources_of == source, batches, 0), 0))
        tl.store(record + _R_EPOCH, call)
        tl.store(record + _R_PEER, source.to(tl.int64))
        tl.store(record + _R_WANTED, reason.to(tl.int64))
        tl.store(record + _R_FOUND, found)
        tl.store(record + _R_STATUS, _BAD_BATCH)
    return reason


@triton.jit(do_not_specialize=["sources", "features", "box", "samples", "most"])
def unpack_kernel(
    messages, headers, values, weights, offsets, state, record, sources, features, box, samples, most,
    RANK: tl.constexpr, PIECES: tl.constexpr, ID_WORDS: tl.constexpr, WEIGHTED: tl.constexpr, BOXED: tl.constexpr,
    BLOCK: tl.constexpr, BAGS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Write ids, offsets and weights from the messages of all source ranks, ordered by feature, then by source. Grid: (sources
    * features, programs that share the data of one source and feature).

    headers `[sources, HEAD + features]`: the header that each source has sent.
    PIECES: a power of two, at least `sources * features`.
    BAGS, SUM: how many lengths a program loads at a time: BAGS for prefix sums, SUM for sums.
    BOXED: True if `messages` are the addresses of every rank's boxes, as mapped on this device, int64 [sources]. The kernel
        then reads the messages for this rank, RANK, in the memory of their sources. The CPU knows no sizes: `values` has
        room for `most` ids, and each source must have `samples` samples. A batch that breaks these bounds, or that a rank
        has refused, is replaced by empty bags, and `record` says why (`_reason`).
    state `[1]`: the number of exchanges so far.
    box: the size of a box in 4-byte words.
    """
    source, feature = tl.program_id(0) % sources, tl.program_id(0) // sources
    every = tl.arange(0, PIECES)
    is_piece = every < sources * features
    sources_of, features_of = every // features, every % features
    header = headers + sources_of.to(tl.int64) * (_HEAD + features)
    counts = tl.load(header + _HEAD + features_of, mask=is_piece, other=0)
    batches = tl.load(header + _BATCH, mask=is_piece, other=0)
    own_header = headers + source.to(tl.int64) * (_HEAD + features)
    count, batch = tl.load(own_header + _HEAD + feature), tl.load(own_header + _BATCH)

    words_of_id: tl.constexpr = ID_WORDS + (1 if WEIGHTED else 0)
    if BOXED:
        call = tl.load(state)
        reason = _reason(header, counts, batches, sources_of, is_piece, features, samples, most, record, call, ID_WORDS)
        counts, batches = tl.where(reason > 0, 0, counts), tl.where(is_piece, tl.cast(samples, tl.int64), 0)
        count, batch = tl.where(reason > 0, 0, count), tl.cast(samples, tl.int64)
        boxes = tl.load(messages + source).to(tl.pointer_type(tl.int32))
        message = boxes + ((call % 2) * sources + RANK) * box
    else:
        message = messages + tl.sum(tl.where(sources_of < source, counts * words_of_id + batches, 0), 0)
    of_message = is_piece & (sources_of == source)
    ids = tl.sum(tl.where(of_message, counts, 0), 0)
    ids_before = tl.sum(tl.where(of_message & (features_of < feature), counts, 0), 0)
    is_before = (features_of < feature) | ((features_of == feature) & (sources_of < source))
    to_id = tl.sum(tl.where(is_before, counts, 0), 0)
    to_bag = tl.sum(tl.where(is_before, batches, 0), 0)

    id_words = values.to(tl.pointer_type(tl.int32))
    _copy(message + ids_before * ID_WORDS, id_words + to_id * ID_WORDS, count * ID_WORDS, BLOCK)
    message += ids * ID_WORDS
    if WEIGHTED:
        weight_words = weights.to(tl.pointer_type(tl.int32))
        _copy(message + features * batch + ids_before, weight_words + to_id, count, BLOCK)
    if BOXED:
        if reason > 0:
            _zero(offsets + 1 + to_bag, batch, BLOCK)
        else:
            _write_offsets(message + feature * batch, offsets + 1 + to_bag, to_id, batch, BAGS, SUM)
    else:
        _write_offsets(message + feature * batch, offsets + 1 + to_bag, to_id, batch, BAGS, SUM)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(offsets, tl.zeros([], tl.int64))
