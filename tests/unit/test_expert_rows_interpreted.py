"""The kernels of an MoE layer under Triton's interpreter, against torch's functions. `tests/support/interpreted.py` says how.

Some sizes are no multiple of a block or of 16 bytes. Some experts and ranks have no rows, and one call has no tokens.
"""

from __future__ import annotations

from functools import partial

import torch
from support.expert_rows_cases import arrival, rows
from support.interpreted import play_all, wrong_in

# (tokens, top_k, experts, width, dtype)
CASES = [
    (7, 2, 4, 24, torch.float32), (300, 3, 5, 40, torch.bfloat16), (1, 1, 1, 1, torch.float32), (0, 2, 300, 16, torch.float32),
    (9, 8, 300, 1101, torch.bfloat16), (64, 4, 16, 2056, torch.float16),
]  # fmt: skip
RUNS = {str(case): partial(rows, *case) for case in CASES}
RUNS |= {f"arrival {case}": partial(arrival, *case) for case in ((2, 4, 700), (3, 1, 5), (1, 7, 9), (8, 33, 20))}


def test_interpreted() -> None:
    assert wrong_in(__file__, RUNS) == {}


if __name__ == "__main__":
    play_all(RUNS)
