"""The permutation kernel under Triton's interpreter (`tests/support/interpreted.py`): random segments from two sources,
row pitches, invalid sizes.
"""

from __future__ import annotations

import torch
from support.interpreted import drawn, play_all, wrong_in


def play(seed: int) -> None:
    """Compare with slices. Memory around the segments must not change, and segments that do not fit must be skipped."""
    import triton
    import triton.language as tl

    from weft.kernels.permute import permute_kernel

    g, number = drawn(seed)
    width, count, n_own = 8 * number(1, 40), number(1, 40), number(0, 20)
    counts = [number(0, 6) for _ in range(count)]
    sources = [
        torch.randint(0, 2**15, (260, width + 8 * number(0, 3)), dtype=torch.int16, generator=g) for _ in range(2)
    ]
    order = torch.randperm(count, generator=g).tolist()
    begins, at = [0] * count, 3
    for which in order:
        begins[which], at = at, at + counts[which]
    target = torch.full((at + 2, width + 8 * number(0, 3)), -1, dtype=torch.int16)
    wanted, segments = target.clone(), []
    for i, (rows, begin) in enumerate(zip(counts, begins, strict=True)):
        first, fits = number(0, 250), number(0, 8)
        if not fits:  # outside of the source
            first = number(0, 2) * 1000 - 500
        else:
            wanted[begin : begin + rows, :width] = sources[i >= n_own][first : first + rows, :width]
        segments.append([first, begin, rows])
    segments += [[0, 0, -5], [0, -1, 2], [0, 2**40, 3], [2**40, 0, 3]]  # like sizes of a failed group
    table = torch.tensor(segments)
    own, slots = sources
    rows, pitches = [t.shape[0] for t in (own, slots, target)], [t.stride(0) for t in (own, slots, target)]
    permute_kernel[(3,)](
        own.data_ptr(), slots.data_ptr(), target.data_ptr(), table.data_ptr(), len(segments), n_own, *rows, width, *pitches,
        SEGMENTS_P2=triton.next_power_of_2(len(segments)), ITEM=tl.int16, BLOCK=64, ALIGN=8,
    )  # fmt: skip
    assert torch.equal(target, wanted)


RUNS = {str(seed): lambda seed=seed: play(seed) for seed in range(6)}


def test_interpreted() -> None:
    assert wrong_in(__file__, RUNS) == {}


if __name__ == "__main__":
    play_all(RUNS)
