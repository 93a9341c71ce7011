"""The kernel that computes dynamic sizes, under Triton's interpreter (`tests/support/interpreted.py`): random terms, with and
without tables that the kernel copies first.
"""

from __future__ import annotations

import torch
from support.interpreted import drawn, play_all, wrong_in


def play(seed: int) -> None:
    from weft.kernels.totals import totals_kernel

    g, number = drawn(seed)
    with_tables, n_one, n_other = seed % 2 == 0, number(1, 30), number(0, 30)
    counts = torch.randint(0, 1000, (n_one + n_other,), generator=g)
    held = torch.full((len(counts) + 1,), -1)
    if not with_tables:
        held[:-1] = counts
    n_numbers, n_terms = number(1, 12), number(0, 4)
    constants = torch.randint(-50, 50, (n_numbers,), generator=g)
    terms, wanted = torch.zeros(n_numbers, n_terms, 3, dtype=torch.int64), constants.clone()
    for i in range(n_numbers):
        for j in range(n_terms):
            first, step = number(0, len(counts)), number(1, 4)
            count = number(0, 1 + len(counts[first::step]))
            terms[i, j] = torch.tensor([first, count, step])
            wanted[i] += counts[first::step][:count].sum()
    numbers = torch.full((n_numbers + 1,), -1)
    one, other = counts[:n_one].clone(), counts[n_one:].clone()
    tables = (one.data_ptr(), n_one, other.data_ptr(), n_other) if with_tables else (0, 0, 0, 0)
    totals_kernel[(n_numbers,)](held, terms, constants, numbers, n_terms, *tables, BLOCK=4, TABLES=with_tables)
    assert numbers.tolist() == [*wanted.tolist(), -1]
    assert held.tolist() == [*counts.tolist(), -1]


RUNS = {str(seed): lambda seed=seed: play(seed) for seed in range(12)}


def test_interpreted() -> None:
    assert wrong_in(__file__, RUNS) == {}


if __name__ == "__main__":
    play_all(RUNS)
