"""The base of benchmarks of whole layers, forward and backward: variants of a layer with the same weights, whose outputs
and gradients are compared.

Every benchmark of layers also times the variant `compute`, the layer without communication. The hidden fraction of the
communication is (serial - variant) / (serial - compute): 0 if nothing is hidden, 1 if all communication is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import nn

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call, Mode, Ranks
from weft.bench.core.measure import Results
from weft.bench.core.operator import Columns, OperatorBenchmark, Variants
from weft.bench.core.options import BenchOptions
from weft.bench.core.tables import Record
from weft.bench.ops.any_operator import Variant
from weft.bench.ops.gemms import BASELINE, WEFT

COMPUTE = "compute"
_BLOCK = 1 << 27  # elements
P = TypeVar("P")
Exchange = Callable[[torch.Tensor], torch.Tensor]


class Layer(NamedTuple):
    """A variant of a layer. module: a module with the parameters. call: a function that runs forward."""

    module: nn.Module
    call: Callable[..., torch.Tensor]


class Through(torch.autograd.Function):
    """An autograd function made of two exchanges between ranks: forward returns `there(x)`, backward returns `back(gradient)`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Exchange, back: Exchange) -> torch.Tensor:  # type: ignore[override]
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.back(grad), None, None


class LayerVariants(Variants):
    """The inputs and the variants of a layer on one rank. All ranks must construct this object.

    The output and all gradients of a variant are compared with the results of `serial`.

    layers: the variants.
    inputs: {name: input of forward}, whose gradients are compared too. rest: the arguments of forward after them.
    grad: the gradient of the output.
    """

    input_sets = 1
    layers: Mapping[str, Layer]
    inputs: Mapping[str, torch.Tensor]
    rest: tuple[Any, ...] = ()
    grad: torch.Tensor

    def __init__(self, name: str, about: str, ranks: Ranks, dtype: torch.dtype) -> None:
        self.name, self.about, self.ranks, self.dtype = name, f"{about}, forward and backward", ranks, dtype
        self.worst: dict[str, str] = {}

    def variants(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        return {name: partial(self.call, name) for name in self.layers}, {}, []

    def call(self, name: str, which: int = 0) -> torch.Tensor:
        """Run forward and backward of a variant, and return the output. Gradients of earlier calls are dropped first."""
        variant = self.layers[name]
        for tensor in (*self.inputs.values(), *variant.module.parameters()):
            tensor.grad = None
        y = variant.call(*self.inputs.values(), *self.rest)
        y.backward(self.grad)
        return y

    # --- compared results ---

    def results(self, name: str, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return {name: this rank's part} of the output `y` and all gradients, after a call of variant `name`."""
        tensors = {**self.inputs, **dict(self.layers[name].module.named_parameters())}
        return {"y": local(y.detach())} | {f"the gradient of {n}": local(t.grad) for n, t in tensors.items()}

    @cached_property
    def wanted(self) -> dict[str, torch.Tensor]:
        """The output and all gradients of the baseline, with which other variants are compared. All ranks must make this call."""
        return {key: value.clone() for key, value in self.results(BASELINE, self.call(BASELINE)).items()}

    def reference(self, which: int) -> dict[str, torch.Tensor]:
        return self.wanted

    def poison(self, name: str, output: torch.Tensor) -> None:
        for value in self.results(name, output).values():
            value.fill_(math.nan)

    def error(self, name: str, output: torch.Tensor, which: int, reference: Mapping[str, torch.Tensor]) -> float:
        """Return the largest error of the output or of a gradient, relative to the largest element of the same tensor
        of `serial`.

        Return 0 for `compute`, whose results are wrong without communication.
        """
        if name == COMPUTE:
            return 0.0
        found = self.results(name, output)
        mine = [_distance(found[key], wanted) for key, wanted in reference.items()]
        errors = dict(zip(reference, map(max, zip(*self.ranks.gather(mine), strict=True)), strict=True))
        self.worst[name] = max(errors, key=errors.__getitem__)
        return errors[self.worst[name]]

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """Return the error limit: a few roundings, because `serial` rounds too, and sums in another order."""
        return 4 * torch.finfo(self.dtype).eps + 1e-4

    def differs(self, name: str, how: str) -> str:
        return f"{self.worst[name]} of {name} differs from {BASELINE}'s"

    # --- records ---

    def roofline_ms(self, ceilings: Sequence[Ceilings]) -> None:
        return None

    def derived(self, mode: Mode, name: str, found: Results) -> Record:
        if name == COMPUTE:
            return {"hidden": None, "error": None}
        return {"hidden": hidden(*(found.ms(mode, of) for of in (BASELINE, COMPUTE, name)))}


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element of `wanted`.

    Return infinity if an element is not finite, or if shapes or dtypes differ."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return math.inf
    rows = max(1, _BLOCK * len(wanted) // max(1, wanted.numel()))  # blocks of rows, because fp32 copies need memory
    pairs = list(zip(found.split(rows), wanted.split(rows), strict=True))
    errors = [float((f.float() - w.float()).abs().max()) for f, w in pairs]
    if not all(map(math.isfinite, errors)):  # `max` would lose a NaN
        return math.inf
    return max(errors) / max(*(float(w.abs().max()) for _, w in pairs), 1e-30)


def hidden(serial: float | None, compute: float | None, mine: float | None) -> float | None:
    """Return the fraction of the communication that is hidden; None if a time is missing, or if communication takes no
    time.

    serial, compute, mine: the times of `serial`, of the computation alone, and of the variant.
    """
    if serial is None or compute is None or mine is None or serial <= compute:
        return None
    return (serial - mine) / (serial - compute)


def hidden_cell(r: Record) -> str:
    """Return the table cell with the hidden fraction of variant `weft`; an empty text for other variants.

    Above 1, weft's own computation is faster than the baseline's. The quotient then says nothing about communication.
    """
    if r.get("variant") != WEFT or r["hidden"] is None:
        return ""
    return f"{r['hidden']:.0%}" if r["hidden"] <= 1 else "> 100%"


class LayerBenchmark(OperatorBenchmark[P]):
    """A benchmark of layers. known: the names of the variants that users may ask for."""

    refuses = {**OperatorBenchmark.refuses, "scale": "cannot be scaled: give another preset"}  # noqa: RUF012
    columns: ClassVar[Columns] = {"hidden": hidden_cell}
    known: ClassVar[tuple[str, ...]]

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("queued",)

    def check_options(self, options: BenchOptions) -> None:
        if unknown := [name for name in options.variants if name not in self.known]:
            raise ValueError(f"no variant {unknown[0]!r}: give some of {', '.join(self.known)}")


def local(x: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's part of a tensor that may be a DTensor."""
    assert x is not None, "a gradient is missing"
    return x.to_local() if hasattr(x, "to_local") else x
