"""A timer for GEMMs on the GPU, for `weft.plan.gemms.measure`. It uses the tensors of a call as operands, to save
memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from weft.builders import AllGatherMatmul, Problem, ScaledMatmulReduceScatter
from weft.plan.predict import library_gemms
from weft.runtime.scaled_matmul import scaled_matmul
from weft.sim.model import MatmulShape

_SLEEP_US = 100.0  # added to the device's sleep as a margin
_HOST_US, _MOST_HOST_US = 10.0, 200.0  # CPU time per GEMM: torch.mm 10, scaled GEMMs 20 or more
_DRAWN = 1 << 24  # fp32 random numbers drawn in one call, to limit memory
_CYCLES_PER_US = 2000  # no current GPU has a higher clock rate


class GemmTimer:
    """A timer for cuBLAS GEMMs that are parts of the GEMMs of the problem `p`.

    The left operand has random numbers, because zeros would draw less power, and the GPU would run at a higher clock. The left
    operand is stored in the call's result `x` (the gathered input) if the call returns it. Otherwise it is stored in new memory
    of the same size, which is freed with this object. The right operand is a part of a weight. Products are stored in the
    call's result, which the call overwrites later, or in new memory if the result has too few rows.
    """

    def __init__(self, p: Problem, tensors: Mapping[str, torch.Tensor]) -> None:
        """Allocate operands and results.

        tensors: the tensors of a call of `p`, by buffer name: the weight `w` and the result `y` (or `w0`, `w1`, ... and
            `y0`, `y1`, ...), `x` if the call returns it, and the scales of fp8 calls.
        """
        self.tensors = tensors
        self.weights = {name: tensors[name] for name in tensors if name.replace("w", "y") in tensors and name[0] == "w"}
        weight = next(iter(self.weights.values() or tensors.values()))
        self.device, shapes, gathers = weight.device, library_gemms(p), isinstance(p, AllGatherMatmul)
        self.scaled = p.scaled if isinstance(p, AllGatherMatmul | ScaledMatmulReduceScatter) else None
        rows, largest = max(m for m, *_ in shapes), max(m * k for m, _, k, _ in shapes)
        if not self.weights:
            largest = max(largest, *(n * k for _, n, k, _ in shapes))
        results = {name: tensors[name.replace("w", "y")] for name in self.weights}
        self.results = {name: y if len(y) >= rows else y.new_empty(rows, y.shape[1]) for name, y in results.items()}
        returned = gathers and "x" in tensors
        x = tensors["x"].view(-1) if returned else torch.empty(largest, dtype=weight.dtype, device=self.device)
        # A separate generator leaves the user's random numbers unchanged.
        generator = torch.Generator(self.device).manual_seed(0)
        if self.scaled is None:
            x.normal_(generator=generator)
        else:  # torch has no random fp8 numbers
            for part in x.split(_DRAWN):
                part.copy_(torch.randn(part.numel(), device=self.device, generator=generator))
        self.x = x

    @torch.no_grad()
    def __call__(self, shape: MatmulShape, warm: int, calls: int) -> float:
        """Return the mean time of a GEMM in microseconds, over `calls` GEMMs after `warm` (at least one) warm-up GEMMs.
        CPU time is not included.
        """
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        gemm = self.gemm(shape)
        gemm()  # selects and loads a kernel
        start = time.perf_counter()
        gemm()
        host_us = min(max(_HOST_US, 2e6 * (time.perf_counter() - start)), _MOST_HOST_US)
        torch.cuda._sleep(int(_CYCLES_PER_US * (_SLEEP_US + host_us * (warm + calls))))
        for _ in range(warm - 1):
            gemm()
        begin.record()
        for _ in range(calls):
            gemm()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls

    def gemm(self, shape: MatmulShape) -> Callable[[], Any]:
        m, n, k, _ = shape
        a = self.x[: m * k].view(m, k)
        if not self.weights:
            return partial(torch.mm, a, self.x[: k * n].view(k, n), out=a.new_empty(m, n))
        wide = {name: w for name, w in self.weights.items() if w.shape[1] >= n}
        which = min(wide, key=lambda name: wide[name].shape[1])
        return self._gemm(which, a, wide[which][:k, :n], self.results[which][:m, :n])

    def _gemm(self, weight: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
        """Return a function that multiplies `a` by `b` into `out`.

        weight: the name of the weight of which `b` is a part.
        """
        if self.scaled is None:
            return partial(torch.mm, a, b, out=out)
        i = weight[1:]  # index among several weights
        x_scale, w_scale, bias = (self.tensors.get(name) for name in ("x_scale", f"w_scale{i}", f"bias{i}"))
        assert x_scale is not None
        assert w_scale is not None
        if self.scaled.by == "row":
            x_scale, w_scale = x_scale.new_ones(a.shape[0], 1), w_scale[:, : b.shape[1]]
        bias = None if bias is None else bias[:, : b.shape[1]]
        return partial(scaled_matmul, a, b, x_scale, w_scale, bias, fast=self.scaled.fast[int(i or 0)], out=out)
