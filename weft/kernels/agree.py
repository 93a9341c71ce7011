"""The kernel of `weft.schedule.steps.Agree`. Each rank sends, with its rows, how many rows it sends to each rank. The
kernel compares these counts with the counts that this rank expects.

There is one program for each source rank. If the source's counts differ from the expected counts, the program fills the
source's rows with NaN (bytes 0xFF). It also writes 1 + the source's rank to pinned memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def differing(rank, ranks, expected, sent, counts, row, BLOCK: tl.constexpr):
    """Return the number of counts of `rank` that differ from the expected counts. The arguments are as for `agree_kernel`."""
    within = tl.arange(0, BLOCK)
    wrong = tl.full([], 0, tl.int32)
    at = 0
    while at < counts:
        inside = at + within < counts
        here = tl.load(expected + rank * counts + at + within, mask=inside, other=0)
        there = tl.load(sent + (rank * ranks + row) * counts + at + within, mask=inside, other=0)
        wrong += tl.sum((here != there).to(tl.int32), 0)
        at += BLOCK
    return wrong


@triton.jit
def _sum(table, count, BLOCK: tl.constexpr):
    within = tl.arange(0, BLOCK)
    found = tl.full([], 0, tl.int64)
    at = 0
    while at < count:
        found += tl.sum(tl.load(table + at + within, mask=at + within < count, other=0), 0)
        at += BLOCK
    return found


@triton.jit
def erase(rank, expected, differs, out, out_rows, width, counts, ITEM: tl.constexpr, BLOCK: tl.constexpr):
    """Fill the rows received from `rank` with NaN, and store 1 + `rank` in `differs`. The arguments are as for `agree_kernel`."""
    within = tl.arange(0, BLOCK)
    before, mine = _sum(expected, rank * counts, BLOCK), _sum(expected + rank * counts, counts, BLOCK)
    begin = tl.minimum(tl.maximum(before, 0), out_rows) * width
    end = tl.minimum(tl.maximum(before + mine, 0), out_rows) * width
    place = out.to(tl.pointer_type(ITEM))
    while begin < end:
        tl.store(place + begin + within, tl.full([BLOCK], -1, ITEM), mask=begin + within < end)
        begin += BLOCK
    tl.store(differs, (rank + 1).to(tl.int32))


@triton.jit(
    do_not_specialize=["out", "out_rows", "width", "counts", "row"],
    do_not_specialize_on_alignment=["expected", "sent", "differs"],
)
def agree_kernel(
    expected, sent, differs, out: tl.int64, out_rows: tl.int64, width: tl.int64, counts: tl.int32, row: tl.int32,
    ITEM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run the comparison that the module docstring describes. W is the number of ranks.

    counts: the number of counts for each pair of ranks, such as one for each local expert.
    expected: int64 `[W, counts]`, the numbers of rows that this rank expects from each rank.
    sent: int64 `[W * W, counts]`. Line i * W + j has the numbers of rows that rank i sent to rank j.
    row: this rank's number, so the kernel compares lines i * W + row.
    differs: int32 `[1]` in pinned memory, set to 1 + a rank whose counts differ.
    out: the address of the received rows, `out_rows x width` contiguous items of type ITEM.
    """
    rank, ranks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    if differing(rank, ranks, expected, sent, counts, row, BLOCK) > 0:
        erase(rank, expected, differs, out, out_rows, width, counts, ITEM, BLOCK)
