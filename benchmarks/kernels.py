"""The times of single kernels on one GPU, compared with torch: sums of several ranks' products, and tracked GEMMs with few tiles.
A tracked GEMM signals finished tiles while it runs. With few tiles, several Triton programs compute each tile.

    python benchmarks/kernels.py [--json FILE]

Every result is first compared with float64. Then a CUDA graph of twenty launches is replayed. Times are medians of fifteen replays,
in microseconds per launch. It appends one JSON object to FILE.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.bench.core.console import print_table
from weft.bench.core.records import append, environment
from weft.runtime.cuda.add_up import Address, AddUp, SumNorm
from weft.runtime.cuda.tracked_matmul import TrackedMatmulLauncher

DEVICE = torch.device("cuda", 0)
SUMS = [(rows, 8192, parts) for rows in (16, 128, 2048, 8192) for parts in (2, 3, 4, 8)]
"""(rows, columns, parts), in bf16."""
GEMMS = [
    (16, 8192, 4096), (64, 8192, 4096), (128, 4096, 8192), (256, 4096, 8192), (512, 4096, 4096), (256, 2048, 16384),
    (1024, 2048, 8192), (512, 8192, 4096), (2048, 8192, 4096),
]  # fmt: skip
"""(M, N, K); results are scattered to two ranks."""
RANKS = 2


def microseconds(call: Callable[[], object], times: int = 20) -> float:
    call()
    torch.cuda.synchronize()
    graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    found = []
    for _ in range(15):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / times * 1e3)
    return statistics.median(found)


def require_close(found: torch.Tensor, exact: torch.Tensor, usual: torch.Tensor) -> None:
    """Raise AssertionError unless the largest error is at most twice torch's (`usual`), both against `exact` in float64."""
    error, of_library = (float((y.double() - exact).abs().max()) for y in (found, usual))
    if not error <= 2 * of_library + 1e-6:
        raise AssertionError(f"the largest error is {error:.3g}, more than twice torch's {of_library:.3g}")


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def library_sum(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    out.copy_(total)


def library_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[1],), weight[0], 1e-6)


def of_sum(rows: int, cols: int, count: int) -> dict[str, Any]:
    parts = [torch.randn(rows, cols, device=DEVICE).bfloat16() for _ in range(count)]
    weight, out, normed = torch.randn(1, cols, device=DEVICE).bfloat16(), parts[0].clone(), parts[0].clone()
    bases = [t.data_ptr() for t in (out, *parts, normed, weight)]
    at = [Address(i, 0, 2 * cols) for i in range(count + 2)]
    norm = SumNorm(at[-1], Address(count + 2, 0, 0), 1e-6)
    one, other = (
        AddUp(DEVICE, torch.bfloat16, (rows, cols), at[0], at[1:-1], fixed=bases, norm=following)
        for following in (None, norm)
    )
    library_sum(parts, out)
    total = torch.stack([part.double() for part in parts]).sum(0)
    for made in (one, other):
        usual = out.clone()
        out.fill_(torch.nan)
        made.launch(bases, stream())
        require_close(out, total, usual)
    x = out.double()
    exact = x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    require_close(normed, exact, library_norm(out, weight))
    return {
        "rows": rows, "cols": cols, "parts": count, "us": microseconds(lambda: one.launch(bases, stream())),
        "library_us": microseconds(lambda: library_sum(parts, out)),
        "normed_us": microseconds(lambda: other.launch(bases, stream())),
        "library_norm_us": microseconds(lambda: library_norm(out, weight)), "bytes": (count + 1) * rows * cols * 2,
    }  # fmt: skip


def of_gemm(m: int, n: int, k: int) -> dict[str, Any]:
    x, w = torch.randn(m, k, device=DEVICE).bfloat16(), (torch.randn(n, k, device=DEVICE) * k**-0.5).bfloat16().t()
    y, word = torch.empty(m, n, device=DEVICE, dtype=x.dtype), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    exact, usual, of_rank = x.double() @ w.double(), x @ w, m // RANKS
    height = min(128, max(16, 1 << (of_rank - 1).bit_length()))
    tiles = [
        (rank * of_rank + row, min(height, of_rank - row), col, min(256, n - col))
        for rank in range(RANKS) for row in range(0, of_rank, height) for col in range(0, n, 256)
    ]  # fmt: skip
    entries = np.array([(*tile, (tile[0] * n + tile[2]) * 2, n * 2, 0) for tile in tiles], np.int64)
    times = []
    for splits in (1, None):
        made = TrackedMatmulLauncher(
            DEVICE, entries, [(len(tiles), [word.data_ptr()])], rows=height, cols=256, sets=1, itemsize=2, relative=True,
            splits=splits,
        )  # fmt: skip
        made.prepare(x, w)
        first = None
        for _ in range(5):
            y.fill_(torch.nan)
            made.launch(x, w, y.data_ptr())
            require_close(y, exact, usual)
            if first is not None and not torch.equal(first, y):
                raise AssertionError("two launches of the same GEMM differ bitwise")
            first = y.clone()
        times.append(microseconds(lambda made=made: made.launch(x, w, y.data_ptr())))  # type: ignore[misc]
    return {
        "m": m, "n": n, "k": k, "tiles": len(tiles), "programs_a_tile": made._variant(x, w, True).splits,
        "one_a_tile_us": times[0], "us": times[1], "library_us": microseconds(lambda: torch.mm(x, w, out=y)),
        "bytes": 2 * (m * k + n * k + m * n),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the times to this file")
    given = parser.parse_args()
    found = {"sums": [of_sum(*one) for one in SUMS], "gemms": [of_gemm(*one) for one in GEMMS]}
    for title, rows in found.items():
        cells = [[f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
        print_table(title, list(rows[0]), cells)
    if given.json:
        append(given.json, [{"op": "kernels", **found, **environment("cuda")}])


if __name__ == "__main__":
    main()
