"""A kernel that computes dynamic sizes, such as numbers of rows, from counts that only the device knows. One launch
computes all sizes that one lane (stream) of a schedule needs.

    numbers[i] = constants[i] + sum over terms j of (held[first] + held[first + step] + ...)

`held` is the buffer with the counts. Term j of number i is (first, count, step): it sums `count` elements. The terms
are made once per schedule (`weft.schedule.expr.Total`). Copies by kernel read their row numbers and sizes from
`numbers`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_terms"], do_not_specialize_on_alignment=["held", "terms", "constants", "numbers"])
def totals_kernel(held, terms, constants, numbers, n_terms: tl.int32, BLOCK: tl.constexpr):
    """Compute N sizes, each a constant plus sums over elements of `held`. Grid: one program per number.

    held: the buffer with the counts, int64. terms: the terms of each number, int64 `[N, n_terms, 3]`, as (first, count,
        step). constants: the constant of each number, int64 `[N]`. numbers: the results, int64 `[N]`.
    """
    number = tl.program_id(0).to(tl.int64)
    found = tl.load(constants + number)
    within = tl.arange(0, BLOCK)
    for j in range(n_terms):
        term = terms + (number * n_terms + j) * 3
        first, count, step = tl.load(term), tl.load(term + 1), tl.load(term + 2)
        begin = tl.full([], 0, tl.int64)
        while begin < count:
            k = begin + within
            found += tl.sum(tl.load(held + first + k * step, mask=k < count, other=0), 0)
            begin += BLOCK
    tl.store(numbers + number, found)
