"""Test tiles of the grouped GEMM on one GPU against float64: tiles of the last round in parts, and rows without alignment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here: it compiles the GPU kernels")

from weft.runtime.cuda import grouped_config
from weft.runtime.cuda.grouped_matmul import launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NAN = float("nan")
ROWS = ([264, 257], [300, 20], [1, 0], [9, 16], [330, 272], [600, 64])
"""For each of two experts, the number of rows from both ranks."""
CONFIGS = {
    "parts": replace(grouped_config.CONFIGS[1], parts=2, splits=8, rounds=2),
    "parts of small tiles": replace(grouped_config.CONFIGS[4], parts=2, splits=4, rounds=2),
    "transposed products": grouped_config.CONFIGS[-1],
    "parts of transposed products": replace(grouped_config.CONFIGS[-1], splits=4),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_tiles_with_rows_of_all_sources(name: str, back: bool, transposed: bool) -> None:
    check(CONFIGS[name], back, transposed)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("config", [grouped_config.LARGE, grouped_config.CONFIGS[-1]], ids=str)
def test_rows_without_alignment(config: grouped_config.Config, back: bool) -> None:
    check(config, back, transposed=True, shift=1)


def check(config: grouped_config.Config, back: bool, transposed: bool, shift: int = 0) -> None:
    """Each launch runs twice with poisoned results, and gives the same bits. shift: the first element of x in its memory."""
    n, k = 21 * 256 - 120, 2048 - 8
    w = torch.randn(2, k, n, device="cuda", dtype=torch.bfloat16)
    w = w.mT.contiguous().mT if transposed else w
    for rows in ROWS:
        halves = torch.tensor([[r // 2 for r in rows], [r - r // 2 for r in rows]], device="cuda")
        splits = torch.cat([halves[0], halves[0]])
        slot_rows = int(halves[1].sum()) + 3
        x = torch.randn(shift + (sum(rows) + 2) * k, device="cuda", dtype=torch.bfloat16)[shift:].view(-1, k)
        found = []
        for _ in range(2):
            slots = torch.full((slot_rows, n if back else k), NAN, device="cuda", dtype=torch.bfloat16)
            y = torch.full((int(splits.sum()) if back else sum(rows) + 2, n), NAN, device="cuda", dtype=torch.bfloat16)
            launch(
                x,
                slots,
                w,
                y,
                halves,
                splits,
                rank=0,
                slot_rows=slot_rows,
                config=config,
                back=back,
                merged=True,
            )
            if back:  # rows of rank 0 are in y, and those of rank 1 in the slots
                own, sent = (t.split(counts) for t, counts in zip(
                    (y[: int(halves[0].sum())], slots[: int(halves[1].sum())]), halves.tolist(), strict=True))  # fmt: skip
                found.append([torch.cat(pair) for pair in zip(own, sent, strict=True)])
                assert y[int(halves[0].sum()) :].isnan().all()
                assert slots[int(halves[1].sum()) :].isnan().all()
            else:
                found.append(list(y[: sum(rows)].split(rows)))
                assert y[sum(rows) :].isnan().all()
        for expert, part in enumerate(x[: sum(rows)].split(rows)):
            exact, sizes = part.double() @ w[expert].double(), part.double().abs() @ w[expert].double().abs()
            # half a unit in the last place of bf16, and the rounding of fp32 sums
            allowed = 2**-8 * exact.abs() + 2**-16 * sizes
            assert ((found[0][expert].double() - exact).abs() <= allowed).all(), (rows, expert)
            assert torch.equal(found[0][expert], found[1][expert])
