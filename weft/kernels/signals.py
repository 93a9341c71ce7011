"""Signals between GPUs, as device code: 64-bit words in symmetric memory whose values only increase, stored with
release and loaded with acquire.

Order. A reader that gets the new value from `load_acquire` sees the stores that the writer's program made before a
barrier and `store_release`. The reader may be on this GPU or another (system scope). On NVIDIA GPUs both functions are
the PTX instructions of these names. On other GPUs, and under Triton's interpreter, they are atomics that are stronger
than needed. `PTX` selects the implementation.

Waiting. `wait_at_least` polls until all words of a vector have at least the wanted value or a deadline passes. Without
PTX there is no clock, and only the watchdog ends a wait. If a group has failed, the watchdog overwrites the words with
POISON, which is larger than any awaited value, so that waiting kernels return.

Schedules on streams use words as binary flags instead (`weft.runtime.cuda.flags`): `await_flags`, `write_flag`.
"""

from __future__ import annotations

import triton
import triton.language as tl

POISON = 1 << 62
FLAG = 1
POISONED = 1 << 40
"""FLAG: the value of a word that is a set flag. POISONED: the bit with which the watchdog ends all waits."""
RECORD_WORDS = 8
R_STATUS, R_EPOCH, R_PEER, R_WANTED, R_FOUND = range(5)
"""Words (int64) of the record in pinned memory in which a kernel reports that a wait has failed. R_STATUS: the kind of wait; 0 if
no wait has failed. R_EPOCH: the number of the call. R_PEER: the rank for which the kernel waited. R_WANTED: the value of the signal
for which it waited. R_FOUND: the value of the signal that it found.
"""
_FLAG = tl.constexpr(FLAG)
_POISON = tl.constexpr(POISON)
_R_STATUS = tl.constexpr(R_STATUS)
_R_EPOCH = tl.constexpr(R_EPOCH)
_R_PEER = tl.constexpr(R_PEER)
_R_WANTED = tl.constexpr(R_WANTED)
_R_FOUND = tl.constexpr(R_FOUND)
_STORE_RELEASE, _STORE_RELAXED = (
    tl.constexpr(
        "{.reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        f"@p st.{order}.sys.global.b32 [$1], $2; mov.u32 $0, 0;}}"
    )
    for order in ("release", "relaxed")
)


@triton.jit
def words(address):
    """Return pointers to the 64-bit words at these addresses."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def now_ns(PTX: tl.constexpr):
    """Return the device's clock in nanoseconds; 0 if `PTX` is False, as on GPUs of other vendors than NVIDIA."""
    if PTX:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    return tl.full([], 0, tl.int64)


@triton.jit
def multiprocessor(PTX: tl.constexpr):
    """Return the number of the multiprocessor that runs this program; 0 if `PTX` is False, as on GPUs of other vendors than
    NVIDIA.
    """
    if PTX:
        return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return tl.full([], 0, tl.int32)


@triton.jit
def load_acquire(pointer, PTX: tl.constexpr):
    """Load a word or a vector of words. Stores before the `store_release` that wrote the loaded value are visible
    afterwards.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [pointer.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
        )
    return tl.atomic_add(pointer, 0, sem="acquire", scope="sys")


@triton.jit
def store_release(pointer, value, PTX: tl.constexpr):
    """Store `value` to a word or a vector of words. Stores that this program made before its last barrier become
    visible first.
    """
    if PTX:
        tl.inline_asm_elementwise(
            "st.release.sys.global.b64 [$1], $2; mov.u64 $0, $2;",
            "=l,l,l",
            [pointer.to(tl.int64), value],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(pointer, value, sem="release", scope="sys")


@triton.jit
def wait_at_least(pointer, wanted, deadline_ns, PTX: tl.constexpr):
    """Poll a vector of words until all are at least `wanted`, or until the deadline. Return the values read last.

    deadline_ns: a time of the clock `now_ns`.
    """
    found = load_acquire(pointer, PTX)
    if tl.min(found, 0) < wanted:
        start = now_ns(PTX)
        while (tl.min(found, 0) < wanted) & (now_ns(PTX) - start < deadline_ns):
            found = load_acquire(pointer, PTX)
    return found


@triton.jit
def report(record, status, epoch, peer, wanted, found):
    """Write to the pinned memory `record` why call number `epoch` has failed: the kind of failure (`status`), the peer,
    and the expected and found values. Programs that fail at the same time write the same values.
    """
    tl.store(record + _R_EPOCH, epoch)
    tl.store(record + _R_PEER, peer)
    tl.store(record + _R_WANTED, wanted)
    tl.store(record + _R_FOUND, found)
    tl.store(record + _R_STATUS, status)


@triton.jit
def wait_or_record(record, word, wanted, epoch, deadline_ns, STATUS: tl.constexpr, PTX: tl.constexpr):
    """Wait until a signal word of each rank is at least `wanted`, and return 0. If the wait ends without that, write `record`,
    and return 1. word: a vector with the addresses of the words.
    """
    found = wait_at_least(words(word), wanted, deadline_ns, PTX)
    lowest = tl.min(found, 0)
    failed = ((lowest < wanted) | (tl.max(found, 0) >= _POISON)).to(tl.int32)
    if failed != 0:
        report(record, STATUS, epoch, tl.argmin(found, 0).to(tl.int64), wanted, lowest)
    return failed


@triton.jit
def wait_for_flags(
    flags, count, own, own_end, wanted, any_word, failures, record, deadline_ns, STATUS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Wait until this program's part of `count` adjacent flags is at least `wanted`. Flags from `own` to `own_end` are left out,
    because no rank sets them. If the wait ends without that, write `record`, and count it in `failures`.

    any_word: the address of any word that may be read in place of a flag. failures: a counter in device memory; if it is not 0,
    do not wait.
    """
    thirty_two = tl.arange(0, 32)
    first = tl.program_id(0).to(tl.int64) * 32
    any_failed = tl.load(failures, volatile=True)
    while (first < count) & (any_failed == 0):
        i = first + thirty_two
        outside = (i >= count) | ((i >= own) & (i < own_end))
        pointer = tl.where(outside, any_word.to(tl.int64), (flags + i).to(tl.int64))
        found = tl.where(outside, wanted, tl.full([32], 0, tl.int64))
        start = now_ns(PTX)
        while (tl.min(found, 0) < wanted) & (now_ns(PTX) - start < deadline_ns):
            found = tl.where(outside, wanted, load_acquire(words(pointer), PTX))
        lowest = tl.min(found, 0)
        if (lowest < wanted) | (tl.max(found, 0) >= _POISON):
            report(record, STATUS, wanted, first + tl.argmin(found, 0), wanted, lowest)
            tl.atomic_add(failures, 1, sem="relaxed")
            any_failed += 1
        first += tl.num_programs(0) * 32


@triton.jit
def await_flags(table, count, PTX: tl.constexpr):
    """Poll until every flag is set or poisoned. Return True if none is poisoned. table: the addresses of `count` flags."""
    alive = count >= 0
    for i in range(count):
        word = words(tl.load(table + i))
        found = load_acquire(word, PTX)
        while found == 0:
            found = load_acquire(word, PTX)
        alive = alive & (found == _FLAG)
    return alive


@triton.jit
def write_flag(address, value, RELEASE: tl.constexpr, PTX: tl.constexpr):
    """Store 32 bits at an address, exactly once: a second store could set a flag that a wait has already cleared.

    With RELEASE, stores that this program made before its last barrier become visible first.
    """
    if PTX:
        tl.inline_asm_elementwise(
            _STORE_RELEASE if RELEASE else _STORE_RELAXED,
            "=r,l,r",
            [address.to(tl.int64), value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)), value, sem="release", scope="sys")
