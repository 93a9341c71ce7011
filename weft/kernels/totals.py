"""A kernel that computes dynamic sizes, such as numbers of rows, from counts that only the device knows. One launch
computes all sizes that one lane (stream) of a schedule needs.

    numbers[i] = constants[i] + sum over terms j of (held[first] + held[first + step] + ...)

`held` is the buffer with the counts. Term j of number i is (first, count, step): it sums `count` elements. The terms
are made once per schedule (`weft.schedule.expr.Total`). Copies by kernel read their row numbers and sizes from
`numbers`.

The launch can also fill `held` with two tables of the caller, one behind the other. Programs then read the tables, and not
`held`, because they do not wait for each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.signals import words


@triton.jit
def _counts(held, one, n_one, other, at, mask, TABLES: tl.constexpr):
    """Return the elements `at` of `held`, or of the two tables with which it is filled."""
    if TABLES:
        place = tl.where(at < n_one, one + 8 * at, other + 8 * (at - n_one))
        return tl.load(words(place), mask=mask, other=0)
    return tl.load(held + at, mask=mask, other=0)


@triton.jit(
    do_not_specialize=["n_terms", "one", "n_one", "other", "n_other"],
    do_not_specialize_on_alignment=["held", "terms", "constants", "numbers"],
)
def totals_kernel(
    held, terms, constants, numbers, n_terms: tl.int32, one: tl.int64, n_one: tl.int64, other: tl.int64, n_other: tl.int64,
    BLOCK: tl.constexpr, TABLES: tl.constexpr,
):  # fmt: skip
    """Compute N sizes, each a constant plus sums over elements of `held`. Grid: one program per number.

    held: the buffer with the counts, int64.
    terms: the terms of each number, int64 `[N, n_terms, 3]`, as (first, count, step).
    constants: the constant of each number, int64 `[N]`.
    numbers: the results, int64 `[N]`.
    TABLES: True to fill `held` with `n_one` elements at the address `one` and then `n_other` elements at the address `other`.
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
            found += tl.sum(_counts(held, one, n_one, other, first + k * step, k < count, TABLES), 0)
            begin += BLOCK
    tl.store(numbers + number, found)
    if TABLES:
        at = number * BLOCK + within
        while tl.min(at, 0) < n_one + n_other:
            inside = at < n_one + n_other
            tl.store(held + at, _counts(held, one, n_one, other, at, inside, TABLES), mask=inside)
            at += tl.num_programs(0) * BLOCK
