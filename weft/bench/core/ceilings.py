"""The peak rates of this machine, measured in the same run as the results that are compared with them.

    memory   bytes read plus bytes written per second, by a copy within local memory. On CPU a read is measured too, and the
             higher rate counts
    link     bytes per second from a rank to the next rank: by a copy engine on GPUs, by memcpy into shared memory on CPU. Not
             measured on several hosts, where the rate is different for each pair of ranks
    matmul   FLOP/s of one large GEMM of random numbers, with the second operand transposed, as in `nn.Linear`

All ranks measure at the same time, because ranks on CPU share the memory bus. They use as many threads as in the
benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from weft.bench.core.harness import Ranks
from weft.runtime.scaled_matmul import scaled_matmul
from weft.symm import SymmetricBuffer, communicator

_REPETITIONS = 7
_IN_A_ROW = 5  # copies per measurement on GPUs, so that the launch time is negligible
_GEMM = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Ceilings:
    """The peak rates of one rank. memory, link: bytes/s; `link` is infinite if there is only one rank, or if ranks are on
    several hosts. matmul: FLOP/s, or None if not measured.
    """

    memory: float
    link: float
    matmul: float | None = None

    def ms(self, memory: float, link: float = 0.0, flops: float = 0.0) -> float:
        """Return a lower bound of a time, in ms. It is the longest of three times at peak rates: for reading or writing
        `memory` bytes, for sending `link` bytes, and for `flops` operations.
        """
        return 1e3 * max(memory / self.memory, link / self.link, flops / (self.matmul or float("inf")))

    def __str__(self) -> str:
        link = "" if self.link == float("inf") else f", {self.link / 1e9:.1f} GB/s to a peer"
        matmul = "" if self.matmul is None else f", {self.matmul / 1e12:.4g} TFLOP/s"
        return f"{self.memory / 1e9:.1f} GB/s of memory per rank{link}{matmul}"

    def as_fields(self) -> dict[str, float | None]:
        return {
            "memory_gbps": self.memory / 1e9,
            "link_gbps": None if self.link == float("inf") else self.link / 1e9,
        } | ({} if self.matmul is None else {"matmul_tflops": self.matmul / 1e12})


def measure_ceilings(
    ranks: Ranks, buffer_bytes: int | None = None, matmul_dtype: torch.dtype | None = None
) -> list[Ceilings]:
    """Measure the peak rates of all ranks; return them on every rank. All ranks must make this call.

    buffer_bytes: the size of the copied buffer (default 2 GiB on GPUs, 128 MiB on CPU). Each rank temporarily allocates
    two such buffers, and one more in symmetric memory. matmul_dtype: the dtype of the GEMM; None to measure no GEMM.
    """
    size = buffer_bytes or (2 << 30 if ranks.device.type == "cuda" else 128 << 20)
    source = torch.ones(size // 4, device=ranks.device)
    target = torch.zeros_like(source)
    memory = 2 * size / _best_seconds(lambda: target.copy_(source), ranks)
    if ranks.device.type == "cpu":
        memory = max(memory, size / _best_seconds(lambda: source.sum(), ranks))
    link = float("inf")
    if ranks.world_size > 1 and communicator(ranks.group, ranks.device).all_mapped:
        with SymmetricBuffer(tuple(source.shape), source.dtype, group=ranks.group, device=ranks.device) as buffer:
            peer = buffer.peer((ranks.rank + 1) % ranks.world_size)
            link = size / _best_seconds(lambda: peer.copy_(source), ranks)
            del peer
    found = [memory, link]
    if matmul_dtype is not None:
        extent = _GEMM[ranks.device.type]
        a, b = (torch.randn(extent, extent, device=ranks.device).to(matmul_dtype) for _ in range(2))
        one, y = a.new_ones(1, 1, dtype=torch.float32), a.new_empty(extent, extent, dtype=torch.bfloat16)
        gemm = (
            partial(scaled_matmul, a, b.t(), one, one, fast=False, out=y)
            if a.itemsize == 1
            else partial(torch.mm, a, b.t())
        )
        found.append(2.0 * extent**3 / _best_seconds(gemm, ranks))
    return [Ceilings(*values) for values in ranks.gather(found)]


def _best_seconds(call: Callable[[], object], ranks: Ranks) -> float:
    """Repeat `call`. Return the seconds of the fastest repetition, because other processes disturbed it least."""
    best = float("inf")
    for _ in range(_REPETITIONS):
        ranks.synchronize()
        ranks.start_together()
        if ranks.device.type == "cuda":
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            for _ in range(_IN_A_ROW):
                call()
            after.record()
            torch.cuda.synchronize(ranks.device)
            best = min(best, before.elapsed_time(after) / 1e3 / _IN_A_ROW)
        else:
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
    return best
