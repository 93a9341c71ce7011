"""Copy many segments of rows in one launch, for example to sort received tokens by expert.

A segment is (first row of the source, first row of the target, number of rows). The device has computed these numbers
(`weft.kernels.totals`). Programs share the blocks of rows of all segments evenly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.signals import words


@triton.jit(
    do_not_specialize=[
        "own", "slots", "target", "segments", "n_segments", "n_own", "own_rows", "slots_rows", "target_rows", "width", "own_pitch",
        "slots_pitch", "target_pitch",
    ],
)  # fmt: skip
def permute_kernel(
    own: tl.int64, slots: tl.int64, target: tl.int64, segments: tl.int64, n_segments: tl.int32, n_own: tl.int32,
    own_rows: tl.int64, slots_rows: tl.int64, target_rows: tl.int64, width: tl.int64, own_pitch: tl.int64, slots_pitch: tl.int64,
    target_pitch: tl.int64,
    SEGMENTS_P2: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Run the copy that the module docstring describes.

    own, slots, target: addresses of `[own_rows, width]`, `[slots_rows, width]` and `[target_rows, width]`. width and
        pitches count items of type ITEM. width, pitches and addresses are multiples of ALIGN items.
    segments: the address of int64 `[n_segments, 3]`. The source of the first `n_own` segments is own, the source of the
        others is slots. A segment that is not inside its source is skipped. Rows beyond the target are not copied.
    """
    number = tl.arange(0, SEGMENTS_P2)
    entry = words(segments) + 3 * number
    is_segment = number < n_segments
    first = tl.load(entry, mask=is_segment, other=0)
    to = tl.load(entry + 1, mask=is_segment, other=0)
    rows = tl.load(entry + 2, mask=is_segment, other=0)
    source_rows = tl.where(number < n_own, own_rows, slots_rows)
    fits = (first >= 0) & (rows >= 0) & (first <= source_rows) & (rows <= source_rows - first) & (to >= 0)
    rows = tl.where(fits, tl.maximum(tl.minimum(rows, target_rows - to), 0), 0)
    per_row = tl.maximum((width + BLOCK - 1) // BLOCK, 1)
    ends = tl.cumsum(rows * per_row, 0)
    blocks = tl.max(ends, 0)
    block = tl.program_id(0).to(tl.int64)
    while block < blocks:
        segment = tl.sum((ends <= block).to(tl.int32), 0)
        begin = tl.max(tl.where(ends <= block, ends, 0), 0)
        row = (block - begin) // per_row
        column = (block - begin - row * per_row) * BLOCK + tl.arange(0, BLOCK)
        if segment < n_own:
            source, pitch = own, own_pitch
        else:
            source, pitch = slots, slots_pitch
        read = source.to(tl.pointer_type(ITEM)) + (tl.load(words(segments) + 3 * segment) + row) * (
            pitch // ALIGN * ALIGN
        )
        write = target.to(tl.pointer_type(ITEM))
        write += (tl.load(words(segments) + 3 * segment + 1) + row) * (target_pitch // ALIGN * ALIGN)
        read = tl.multiple_of(read, ALIGN * ITEM.primitive_bitwidth // 8)
        write = tl.multiple_of(write, ALIGN * ITEM.primitive_bitwidth // 8)
        inside = column < width // ALIGN * ALIGN
        tl.store(write + column, tl.load(read + column, mask=inside), mask=inside)
        block += tl.num_programs(0)
