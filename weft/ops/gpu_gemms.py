"""Times of the GEMMs of one call, on the GPU and with the tensors of that call: what `weft.plan.gemms.measure` asks for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.schedule import AllGatherMatmul
from weft.sim.model import MatmulShape

_SLEEP_US = 100.0
_HOST_US = 10.0  # of a call of torch.mm
_CYCLES_PER_US = 2000  # at least the clock of any present GPU


class GemmTimer:
    """Of GEMMs that are parts of `p`'s: right operands are the first rows and columns of the weights, as they lie, results the
    first of the results, which the call overwrites. The left operand is random, since what has been gathered is not there yet,
    and GEMMs on zeros run at a higher clock: in the gathered x, if the call returns it, else in memory of its size, as the
    serial schedule takes, or symmetric memory the others. It goes back to torch's allocator with this object.
    """

    def __init__(self, p: AllGatherMatmul, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: of a call of `p`, w0, w1, ..., y0, y1, ... and, if it is returned, x."""
        weight = tensors["w0"]
        self.p, self.tensors, self.device = p, tensors, weight.device
        x = (
            tensors["x"].view(-1)
            if p.return_gathered
            else torch.empty(p.m * p.k, dtype=weight.dtype, device=self.device)
        )
        # A generator of its own: the user's random numbers stay what they are.
        self.x = x.normal_(generator=torch.Generator(self.device).manual_seed(0))

    @torch.no_grad()
    def __call__(self, shape: MatmulShape, warm: int, calls: int) -> float:
        """Microseconds of one of `calls` GEMMs behind `warm` others, one at least. The host is ahead of them."""
        m, n, k, _ = shape
        which = min((i for i, columns in enumerate(self.p.n) if columns >= n), key=lambda i: self.p.n[i])
        a, b = self.x[: m * k].view(m, k), self.tensors[f"w{which}"][:k, :n]
        out = self.tensors[f"y{which}"][:m, :n]
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.mm(a, b, out=out)  # finds and loads a kernel
        torch.cuda._sleep(int(_CYCLES_PER_US * (_SLEEP_US + _HOST_US * (warm + calls))))
        for _ in range(warm - 1):
            torch.mm(a, b, out=out)
        begin.record()
        for _ in range(calls):
            torch.mm(a, b, out=out)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls
