"""Cases for sums by `weft.runtime.cuda.add_up`, under Triton's interpreter and on a GPU.

A sum must have the bits of an fp32 sum of the parts in order, rounded to the dtype. Under the interpreter, which rounds
to bf16 by truncation, the expected sum is truncated too. Parts are memory of the schedule, or tensors of the caller,
whose addresses change in each launch. Memory around the parts and the sum must stay unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A sum. parts: for each part, words that describe its memory; out: the same for the result.

    "own" is memory of the schedule, "given" a tensor of the caller. "row": one row is added to all rows. "out": the
    part is the result's own memory. "gap": there are gaps between rows. "odd": the memory begins at an odd address.
    """

    rows: int
    cols: int
    parts: tuple[str, ...]
    out: str = "given"
    dtype: torch.dtype = torch.bfloat16
    eps: float | None = None


CASES = {
    "two": Case(5, 1024, ("own", "own")),
    "eight": Case(7, 96, ("own",) * 8),
    "seventeen": Case(3, 40, ("own",) * 17),
    "bias and residual": Case(6, 264, ("own", "own", "own", "given row", "given")),
    "one row": Case(1, 264, ("own", "given row")),
    "fp32": Case(4, 300, ("own", "own", "own"), dtype=torch.float32),
    "fp16": Case(4, 304, ("given", "given", "given", "given"), dtype=torch.float16),
    "awkward": Case(5, 37, ("own", "given", "own row")),
    "at odd places": Case(4, 64, ("own odd", "given odd", "own"), "given odd"),
    "with gaps": Case(9, 48, ("own gap", "own", "given gap"), "own gap"),
    "in place": Case(9, 2100, ("out", "own", "own"), "own"),
    "large": Case(300, 4096, ("own", "own", "own")),
    "many columns": Case(2, 20001, ("own", "own row")),
    "normed": Case(5, 512, ("own", "own", "own"), eps=1e-6),
    "normed, awkward": Case(3, 37, ("own", "given row", "given"), "given odd", eps=0.1),
    "normed, fp32": Case(4, 2500, ("own", "own"), "own", torch.float32, 1e-5),
    "normed, fp16, many columns": Case(3, 9000, ("own", "own"), "own", torch.float16, 1e-5),
    "normed in place": Case(4, 640, ("out",), "given", eps=1e-6),
    "nothing": Case(0, 64, ("own", "own")),
}


class Memory:
    """A tensor of a case, surrounded by NaN."""

    def __init__(self, how: str, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> None:
        rows = 1 if "row" in how else rows
        self.pitch = cols + (24 if "gap" in how else 0)
        self.begin = 65 if "odd" in how else 64
        self.whole = torch.full((self.begin + rows * self.pitch + 64,), NAN, dtype=dtype, device=device)
        self.view = self.whole[self.begin :].as_strided((rows, cols), (self.pitch, 1))

    def around(self) -> torch.Tensor:
        copy = self.whole.clone()
        copy[self.begin :].as_strided(self.view.shape, self.view.stride()).fill_(NAN)
        return copy


def play(name: str, device: torch.device) -> None:
    from weft.runtime.cuda.add_up import Address, AddUp, SumNorm

    case, generator = CASES[name], torch.Generator().manual_seed(len(name))
    item = case.dtype.itemsize
    made: AddUp | None = None
    for launch in range(3):
        if made is None or launch == 0:
            out = Memory(case.out, case.rows, case.cols, case.dtype, device)
            parts = [
                out if how.startswith("out") else Memory(how, case.rows, case.cols, case.dtype, device)
                for how in case.parts
            ]
            normed, weight = (Memory(how, case.rows, case.cols, case.dtype, device) for how in ("given", "given row"))
        else:  # the caller's tensors have new addresses in each launch
            anew = {
                id(m): Memory(how, case.rows, case.cols, case.dtype, device)
                for m, how in [*zip(parts, case.parts, strict=True), (out, case.out)]
                if how.startswith("given")
            }
            parts, out = [anew.get(id(m), m) for m in parts], anew.get(id(out), out)
        memories = [out, *parts, normed, weight]
        how_of = [case.out, *(case.out if how.startswith("out") else how for how in case.parts), "given", "given row"]
        bases = [m.whole.data_ptr() for m in memories]
        fixed = [0 if how.startswith("given") else base for how, base in zip(how_of, bases, strict=True)]
        if made is None:
            places = [
                Address(i, m.begin * item, 0 if "row" in how and case.rows > 1 else m.pitch * item)
                for i, (m, how) in enumerate(zip(memories, how_of, strict=True))
            ]
            norm = None if case.eps is None else SumNorm(places[-2], places[-1], case.eps)
            made = AddUp(
                device, case.dtype, (case.rows, case.cols), places[0], places[1:-2], fixed=fixed, norm=norm
            )  # fmt: skip
        for m in {id(m): m for m in memories}.values():
            m.view.copy_(torch.randn(m.view.shape, generator=generator))
        total = parts[0].view.float()
        for part in parts[1:]:
            total = total + part.view
        wanted = total.to(case.dtype)
        cuts_off = device.type == "cpu" and case.dtype == torch.bfloat16
        if cuts_off:
            wanted = (total.view(torch.int32) & -65536).view(torch.float32).bfloat16()
        out.view.fill_(NAN) if out not in parts else None
        normed.view.fill_(NAN)
        before = [m.around() for m in memories]
        made.launch(bases, torch.cuda.current_stream().cuda_stream if device.type == "cuda" else None)
        assert torch.equal(out.view, wanted), (name, (out.view.float() - total).abs().max())
        for m, was in zip(memories, before, strict=True):
            assert torch.equal(m.around().isnan(), was.isnan())
            assert bool(m.around().isnan().all())
        if case.eps is not None:
            x, factors = wanted.double(), weight.view.double()
            exact = x / (x.square().mean(1, keepdim=True) + case.eps).sqrt() * factors
            usual = torch.nn.functional.rms_norm(wanted, (case.cols,), weight.view[0], case.eps)
            error, usual_error = ((y.double() - exact).abs().max() for y in (normed.view, usual))
            bound = exact.abs().max() / 128 if cuts_off else 2 * usual_error + 1e-6
            assert error <= bound, (name, float(error), float(usual_error))
        else:
            assert bool(normed.view.isnan().all())
