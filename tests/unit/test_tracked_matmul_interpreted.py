"""The tracked matmul kernel under Triton's interpreter (`tests/support/interpreted.py`): tiles in any order, at other
places and in other tensors, against float64.

Memory around the tensors is not read or written. Each flag is set when all of its tiles are stored, and not before.
Counters are zero again at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from support.interpreted import play_all, wrong_in

NAN = float("nan")
ROWS, COLS = 16, 32
"""The size of a tile."""


@dataclass(frozen=True)
class Case:
    m: int = 40
    k: int = 48
    n: int = 72
    dtype: torch.dtype = torch.float16
    transposed: bool = False
    relative: bool = False  # stored in the caller's tensor, or at addresses of two others
    sets: int = 1
    launches: int = 2
    splits: int = 1  # the number of parts of k
    missing: int = 0  # the number of tiles of a counter that never arrive
    adds: int | None = None  # columns between the rows of the addend


CASES = {
    "one signal": Case(),
    "bf16, transposed weights": Case(dtype=torch.bfloat16, transposed=True),
    "fp32": Case(dtype=torch.float32, m=17, k=20, n=36),
    "awkward sizes": Case(m=33, k=37, n=45),
    "awkward sizes, transposed weights": Case(m=18, k=37, n=33, transposed=True),
    "in the caller's tensor": Case(relative=True),
    "in the caller's tensor, no signal": Case(relative=True, sets=0),
    "two signals a tile": Case(sets=2),
    "three programs a tile": Case(k=330, splits=3, launches=3),
    "two programs a tile, fp32, of unlike parts": Case(m=17, k=100, n=36, dtype=torch.float32, splits=2),
    "four programs a tile, awkward, in the caller's tensor": Case(m=33, k=451, n=45, relative=True, splits=4),
    "three programs a tile, a tile is missing": Case(k=330, splits=3, missing=1),
    "a tile is missing": Case(missing=1),
    "added to what lies elsewhere": Case(adds=8),
    "added, bf16, transposed weights, two signals": Case(dtype=torch.bfloat16, transposed=True, sets=2, adds=16),
    "added, fp32, into the caller's tensor, no signal": Case(
        m=17, k=20, n=36, dtype=torch.float32, relative=True, sets=0, adds=4
    ),
    "added, awkward": Case(m=33, k=37, n=45, transposed=True, adds=1),
    "added to what is not aligned": Case(adds=1),
    "added once by three programs a tile": Case(k=330, splits=3, launches=3, adds=8),
    "added once, awkward, four programs a tile": Case(m=33, k=451, n=45, relative=True, splits=4, adds=3),
}


def play(case: Case) -> None:
    from weft.runtime.cuda import tracked_matmul

    tracked_matmul.Tracked.least_part = 16
    g = torch.Generator().manual_seed(3)
    item = torch.empty(0, dtype=case.dtype).element_size()
    tiles = [(i, j) for i in range(0, case.m, ROWS) for j in range(0, case.n, COLS)]
    tiles = [tiles[i] for i in torch.randperm(len(tiles), generator=g).tolist()]
    pitch = case.n + 8
    # The first half of the row tiles is stored in one tensor, the others in another tensor, five rows further down.
    outs = [torch.full((case.m + 10, pitch), NAN, dtype=case.dtype) for _ in range(1 if case.relative else 2)]
    half = -(-case.m // ROWS) // 2 * ROWS
    added = torch.full((case.m + 6, case.n + (case.adds or 0)), NAN, dtype=case.dtype)
    added_pitch = added.stride(0) * item
    words = torch.zeros(3, dtype=torch.int64)
    table, come = [], [0, 0, 0]
    for row, column in tiles:
        which = 0 if case.relative or row < half else 1
        offset = ((row + 5) * pitch + column) * item
        place = offset if case.relative else outs[which].data_ptr() + offset
        counters = [int(row >= half), 2][: case.sets]
        for counter in counters:
            come[counter] += 1
        entry = [row, min(ROWS, case.m - row), column, min(COLS, case.n - column), place, pitch * item, *counters]
        if case.adds is not None:
            entry += [added.data_ptr() + (row + 3) * added_pitch + column * item, added_pitch]
        table.append(entry)
    targets = [[words.data_ptr() + 8 * i] for i in range(3)]
    numbered = [(n + case.missing * (i == 1), to) for i, (n, to) in enumerate(zip(come, targets, strict=True))]
    made = tracked_matmul.TrackedMatmulLauncher(
        torch.device("cpu"), np.array(table, np.int64), numbered[: 3 if case.sets == 2 else 2 * case.sets],
        rows=ROWS, cols=COLS, sets=case.sets, itemsize=item, relative=case.relative, splits=case.splits,
        adds=case.adds is not None,
    )  # fmt: skip
    for _ in range(case.launches if not case.missing else 1):
        a = torch.randn(case.m, case.k, generator=g).to(case.dtype)
        w = torch.randn(case.k, case.n, generator=g).to(case.dtype)
        w = w.t().contiguous().t() if case.transposed else w
        words.zero_()
        for out in outs:
            out.fill_(NAN)
        c = torch.randn(case.m, case.n, generator=g).to(case.dtype)
        added[3 : 3 + case.m, : case.n] = c
        made.prepare(a, w)
        made.launch(a, w, outs[0].data_ptr() if case.relative else 0)
        exact = a.double() @ w.double() + (0 if case.adds is None else c.double())
        for which, out in enumerate(outs):
            mine = slice(None) if case.relative else slice(0, half) if which == 0 else slice(half, None)
            expected = torch.full((case.m + 10, pitch), NAN, dtype=torch.float64)
            expected[5 : 5 + case.m][mine, : case.n] = exact[mine]
            assert torch.equal(out.isnan(), expected.isnan()), "written elsewhere, or not everywhere"
            error = float((out.double() - expected).nan_to_num().abs().max() / exact.abs().max())
            assert error < {4: 1e-5, 2: 1e-2}[item], f"off by {error}"
            if case.adds is not None and case.dtype == torch.float16:  # the interpreter truncates to bf16
                allowed = torch.finfo(case.dtype).eps / 2 * expected.abs() + 1e-5 * float(exact.abs().max())
                assert not ((out.double() - expected).abs() > allowed).any(), "rounded more than once"
        wanted = [int(come[0] > 0), int(come[1] > 0 and not case.missing), int(come[2] > 0)]
        assert words.tolist() == (wanted if case.sets else [0, 0, 0]), words
        assert made._variant(a, w, True).splits == case.splits
        if case.adds is not None:
            assert made._out_aligned == (added_pitch % 16 == 0 and pitch * item % 16 == 0)
        assert not made._arrived.any()
        left = made._tables[1][:, 0].tolist()
        assert left == [0, come[1]][: len(left)] if case.missing else not any(left), left


def test_interpreted() -> None:
    assert wrong_in(__file__, CASES) == {}


if __name__ == "__main__":
    play_all({name: lambda case=case: play(case) for name, case in CASES.items()})
