"""Reduction of the results of several ranks in one pass: each part is read once, and the sum is rounded once and
written once.

    out = part 0 + part 1 + ..., in fp32 and in this order

With `NORM`, the program that has reduced a row also computes its RMSNorm from the rounded row, as the next operation of
a transformer does:

    normed = out / sqrt(mean of out's squares + EPS) * weight

A part is a matrix in memory of this device or of a peer, given by its address and its row pitch. The pitch is the
number of items from a row to the next. With pitch 0, the part's only row is added to all rows.

Up to four parts are kernel arguments. More parts are described by a table `[PARTS, 3]` of (base, offset, pitch). With
base 0, `offset` is the part's address. With base 1 to 4, the address is the argument part1 to part4 plus `offset`
bytes; so a table stays valid if these addresses change between launches.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 7.1 (direct
reduce-scatter, which reduces received parts immediately) and 7.6 (following operators).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_of(address, pitch, row, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Return a pointer to a row of the matrix at `address`. The pointer tells the compiler that it is aligned to ALIGN items of
    type DTYPE, so that loads of up to 16 bytes are allowed.

    row: the index of the row. pitch: the number of items from a row to the next.
    """
    place = address.to(tl.pointer_type(DTYPE)) + row * (pitch // ALIGN * ALIGN)
    return tl.multiple_of(place, ALIGN * DTYPE.primitive_bitwidth // 8)


@triton.jit
def _part(address, pitch, row, columns, inside, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    return tl.load(_row_of(address, pitch, row, DTYPE, ALIGN) + columns, mask=inside, other=0).to(tl.float32)


@triton.jit
def _total(
    table, part1, part2, part3, part4, pitch1, pitch2, pitch3, pitch4, row, columns, inside,
    PARTS: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Return the fp32 sum of all parts, for the elements `columns` of one row.

    row: the index of the row. table, part1..4, pitch1..4: the addresses and row pitches of the parts, as in `add_up_kernel`.
    inside: the mask of the columns that exist.
    """
    if PARTS <= 4:
        total = _part(part1, pitch1, row, columns, inside, DTYPE, ALIGN)
        if PARTS > 1:
            total += _part(part2, pitch2, row, columns, inside, DTYPE, ALIGN)
        if PARTS > 2:
            total += _part(part3, pitch3, row, columns, inside, DTYPE, ALIGN)
        if PARTS > 3:
            total += _part(part4, pitch4, row, columns, inside, DTYPE, ALIGN)
    else:
        total = tl.zeros([1], tl.float32)
        for i in tl.static_range(PARTS):
            which, address, pitch = tl.load(table + 3 * i), tl.load(table + 3 * i + 1), tl.load(table + 3 * i + 2)
            address += tl.where(which == 1, part1, 0) + tl.where(which == 2, part2, 0)
            address += tl.where(which == 3, part3, 0) + tl.where(which == 4, part4, 0)
            part = _part(address, pitch, row, columns, inside, DTYPE, ALIGN)
            if i == 0:
                total = part
            else:
                total += part
    return total


@triton.jit(
    do_not_specialize=[
        "out", "part1", "part2", "part3", "part4", "normed", "weight", "pitch1", "pitch2", "pitch3", "pitch4", "out_pitch",
        "normed_pitch", "cols",
    ],
    do_not_specialize_on_alignment=["table"],
)  # fmt: skip
def add_up_kernel(
    table, out: tl.int64, part1: tl.int64, part2: tl.int64, part3: tl.int64, part4: tl.int64,
    normed: tl.int64, weight: tl.int64,
    pitch1: tl.int64, pitch2: tl.int64, pitch3: tl.int64, pitch4: tl.int64, out_pitch: tl.int64,
    normed_pitch: tl.int64, cols: tl.int64,
    PARTS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Run the reduction that the module docstring describes. Grid: one program per BLOCK columns of a row, or with NORM
    one program per row.

    out, part1..4, normed, weight: addresses of the matrices. PARTS: the number of parts. cols: the number of columns. cols and
        pitches count items of type DTYPE. cols, pitches and addresses are multiples of ALIGN items. ADD: True to compute the
        sum. False if the only part is `out` itself, and only its norm is to be computed.
    """
    cols = cols // ALIGN * ALIGN  # no change of the value, but it tells the compiler the alignment
    within = tl.arange(0, BLOCK)
    if NORM:
        program = tl.program_id(0).to(tl.int64)
        to = _row_of(out, out_pitch, program, DTYPE, ALIGN)
        squares = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, cols, BLOCK):
            columns = begin + within
            inside = columns < cols
            rounded = _total(
                table, part1, part2, part3, part4, pitch1, pitch2, pitch3, pitch4, program, columns, inside, PARTS, DTYPE, ALIGN
            ).to(DTYPE)  # fmt: skip
            if ADD:
                tl.store(to + columns, rounded, mask=inside)
            squares += rounded.to(tl.float32) * rounded.to(tl.float32)  # 0 outside the row
        scale = tl.rsqrt(tl.sum(squares, 0) / cols.to(tl.float32) + EPS)
        tl.debug_barrier()  # all lanes have stored
        result, factors = (
            _row_of(normed, normed_pitch, program, DTYPE, ALIGN),
            _row_of(weight, 0, program, DTYPE, ALIGN),
        )
        for begin in range(0, cols, BLOCK):
            columns = begin + within
            inside = columns < cols
            x = tl.load(to + columns, mask=inside, other=0).to(tl.float32)
            factor = tl.load(factors + columns, mask=inside, other=0).to(tl.float32)
            tl.store(result + columns, (x * scale * factor).to(DTYPE), mask=inside)
    else:
        per_row = tl.cdiv(cols, BLOCK).to(tl.int32)  # a 64-bit division takes longer than the rest of a small sum
        row = (tl.program_id(0) // per_row).to(tl.int64)
        columns = (tl.program_id(0) % per_row).to(tl.int64) * BLOCK + within
        inside = columns < cols
        total = _total(
            table, part1, part2, part3, part4, pitch1, pitch2, pitch3, pitch4, row, columns, inside, PARTS, DTYPE, ALIGN
        )  # fmt: skip
        tl.store(_row_of(out, out_pitch, row, DTYPE, ALIGN) + columns, total.to(DTYPE), mask=inside)
