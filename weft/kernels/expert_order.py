"""Kernels that compute the order of experts' rows. torch's functions need about forty launches for the same.

A stable counting sort of the experts that tokens have chosen, so that equal calls give equal bits:

    rank_kernel      the number of earlier choices of the same expert in a choice's block, and each block's count of every expert
    offset_kernel    the rows before each block, for every expert; the number of rows of each expert
    place_kernel     the row of each choice, and the choice of each row

After the exchange, rows are sorted by source rank and then by expert, but GEMMs need them by expert and then by source rank:

    arrival_kernel   both permutations between these orders, and the end of each expert's rows
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["choices", "experts"])
def rank_kernel(
    chosen, ranks, counts, choices, experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Compute ranks and counts within blocks. Grid: one program per BLOCK choices.

    chosen `[choices]`: expert numbers. An invalid number ends the kernel with an error, as in torch's indexing.
    ranks `[choices]`: for each choice, how many earlier choices of its block have the same expert.
    counts `[blocks, experts]`: the number of choices of each expert in each block. They are counted for EXPERTS experts at a time.
    """
    at = tl.arange(0, BLOCK)
    choice = tl.program_id(0) * BLOCK + at
    inside = choice < choices
    expert = tl.load(chosen + choice, mask=inside, other=0).to(tl.int64)
    if PTX:
        is_wrong = ((expert < 0) | (expert >= experts)).to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred wrong; setp.ne.s32 wrong, $1, 0; @wrong trap; mov.u32 $0, $1; }", "=r,r", [is_wrong], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    expert = tl.where(inside, expert, -1).to(tl.int32)
    is_earlier = (expert[None, :] == expert[:, None]) & (at[None, :] < at[:, None])
    tl.store(ranks + choice, tl.sum(is_earlier.to(tl.int32), 1), mask=inside)
    for begin in range(0, experts, EXPERTS):
        number = begin + tl.arange(0, EXPERTS)
        count = tl.sum((expert[:, None] == number[None, :]).to(tl.int32), 0)
        tl.store(counts + tl.program_id(0).to(tl.int64) * experts + number, count, mask=number < experts)


@triton.jit(do_not_specialize=["blocks", "experts"])
def offset_kernel(counts, splits, blocks, experts, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr):
    """Replace `counts` by the number of choices of the same expert in earlier blocks. Write the number of choices of each expert
    to `splits` [experts]. Grid: one program per EXPERTS experts. A program reads BLOCKS blocks at a time.
    """
    number = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, blocks, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)
        inside = (block[:, None] < blocks) & (number[None, :] < experts)
        at = counts + block[:, None].to(tl.int64) * experts + number[None, :]
        count = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
    tl.store(splits + number, total.to(tl.int64), mask=number < experts)


@triton.jit(do_not_specialize=["choices", "experts"])
def place_kernel(
    chosen, ranks, counts, splits, place, order, choices, experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """Write the row of each choice to `place`, and the inverse to `order`, both int64 [choices]. The other arguments
    and the grid are as for `rank_kernel`, after `offset_kernel`.
    """
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = choice < choices
    expert = tl.load(chosen + choice, mask=inside, other=0).to(tl.int32)
    row = tl.load(ranks + choice, mask=inside, other=0)
    row += tl.load(counts + tl.program_id(0).to(tl.int64) * experts + expert, mask=inside, other=0)
    for begin in range(0, experts, EXPERTS):
        number = begin + tl.arange(0, EXPERTS)
        rows = tl.load(splits + number, mask=number < experts, other=0).to(tl.int32)
        row += tl.sum(tl.where(number[None, :] < expert[:, None], rows[None, :], 0), 1)
    tl.store(place + choice, row.to(tl.int64), mask=inside)
    tl.store(order + row, choice.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["world", "experts"])
def arrival_kernel(
    received, by_expert, by_arrival, ends, world, experts, COUNTS_P2: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write both permutations of the rows that arrive. Grid: one program per source rank and expert.

    received `[world, experts]`: the number of rows from each rank for each expert.
    COUNTS_P2: a power of two, at least as large as the table.
    by_expert: for each row in the order of experts, its index in the order of arrival. by_arrival: the inverse. Both int64.
    ends `[experts]`: the end of each expert's rows in the order of experts, int32.
    """
    source, expert = tl.program_id(0) // experts, tl.program_id(0) % experts
    at = tl.arange(0, COUNTS_P2)
    of_source, of_expert = at // experts, at % experts
    count = tl.load(received + at, mask=at < world * experts, other=0)
    is_before = of_expert < expert
    in_order = tl.sum(tl.where(is_before | ((of_expert == expert) & (of_source < source)), count, 0), 0)
    arrived = tl.sum(tl.where((of_source < source) | ((of_source == source) & is_before), count, 0), 0)
    rows = tl.sum(tl.where((of_source == source) & (of_expert == expert), count, 0), 0)
    if source == world - 1:
        tl.store(ends + expert, (in_order + rows).to(tl.int32))
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        inside = row < rows
        tl.store(by_expert + in_order + row, arrived + row, mask=inside)
        tl.store(by_arrival + arrived + row, in_order + row, mask=inside)
