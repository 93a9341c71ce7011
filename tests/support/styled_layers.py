"""Layers, alone or several with a common input, under weft.parallel's styles and under torch's, on CPU processes and on
GPUs. These functions run on the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.on_ranks import data, device, error_of
from support.style_ranks import HIDDEN, LENGTH, STYLES, counted, local
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import weft.parallel


class Several(nn.Module):
    """Two linear layers, added. With `changes`, each layer gets its input multiplied by 2."""

    def __init__(self, dtype: torch.dtype, columns: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(HIDDEN, columns, dtype=dtype) for _ in range(2))
        self.changes = False

    def forward(self, x: torch.Tensor, *, y: torch.Tensor | None = None) -> torch.Tensor:
        y = x if y is None else y
        return self.a(x * 2 if self.changes else x) + self.b(y * 2 if self.changes else y)


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


# {name: (style, its arguments, dimension along which the input is divided, number of calls of weft)}. Dimensions: 0
# batch, 1 sequence, 2 columns, None for a whole input.
LINEARS: dict[str, tuple[str, dict[str, Any], int | None, int]] = {
    "columns": ("Colwise", {}, None, 1),
    "columns, for DTensors": ("Colwise", {"use_local_output": False}, None, 1),
    "columns, whole": ("Colwise", {"output_layouts": Replicate()}, None, 1),
    "columns, whole, without a bias": ("Colwise", {"output_layouts": Replicate(), "bias": False}, None, 1),
    "columns to a sequence": ("Colwise", {"output_layouts": Shard(1), "bias": False}, None, 1),
    "columns of a sequence": ("Colwise", {"input_layouts": Shard(1)}, 1, 1),
    "columns of a sequence from behind": ("Colwise", {"input_layouts": Shard(-2)}, 1, 1),
    "columns of a sequence, whole": ("Colwise", {"input_layouts": Shard(1), "output_layouts": Replicate()}, 1, 1),
    "columns of a sequence, for DTensors": ("Colwise", {"input_layouts": Shard(1), "use_local_output": False}, 1, 1),
    "columns of batches": ("Colwise", {"input_layouts": Shard(0)}, 0, 1),
    "columns of columns": ("Colwise", {"input_layouts": Shard(2)}, 2, 0),
    "rows": ("Rowwise", {}, 2, 1),
    "rows, without a bias": ("Rowwise", {"bias": False}, 2, 1),
    "rows, for DTensors": ("Rowwise", {"use_local_output": False}, 2, 1),
    "rows of what is whole to what is whole": ("Rowwise", {"input_layouts": Replicate()}, None, 1),
    "rows to a sequence": ("Rowwise", {"output_layouts": Shard(1)}, 2, 1),
    "rows to a sequence, for DTensors": ("Rowwise", {"output_layouts": Shard(1), "use_local_output": False}, 2, 1),
    "rows of what is whole": ("Rowwise", {"input_layouts": Replicate(), "output_layouts": Shard(1)}, None, 1),
    "rows to batches": ("Rowwise", {"output_layouts": Shard(0)}, 2, 1),
    "rows to columns": ("Rowwise", {"output_layouts": Shard(2)}, 2, 0),
}


def linears(group: dist.ProcessGroup, name: str, dtype: torch.dtype, features: int, own: bool) -> int:
    """Check that a layer has equal results, layouts and gradients under torch's style and under weft's. Return the
    number of calls of weft.
    """
    style, arguments, dim, _ = LINEARS[name]
    arguments = dict(arguments)
    bias = arguments.pop("bias", True)
    mesh = init_device_mesh(device().type, (group.size(),))
    found: list[list[Any]] = []
    for by in ("torch", "weft"):
        torch.manual_seed(2)
        sizes = (HIDDEN, features) if style == "Colwise" else (features, HIDDEN)
        layer = (Own if own else nn.Linear)(*sizes, bias, dtype=dtype).to(device())
        layer = parallelize_module(layer, mesh, getattr(STYLES[by], f"{style}Parallel")(**arguments))
        whole = data(0, (group.size() * 2, 2 * LENGTH, sizes[0]), dtype, 1)
        x = (whole if dim is None else whole.tensor_split(group.size(), dim)[group.rank()]).clone().requires_grad_()
        with counted() as calls:
            y = layer(x)
        (local(y) * data(group.rank(), tuple(local(y).shape), dtype, 3)).sum().backward()
        grads = [p.grad for p in layer.parameters()]
        kinds = [(type(t), getattr(t, "placements", None)) for t in (*layer.parameters(), *grads)]
        found.append(
            [
                str(kinds),
                isinstance(y, DTensor),
                str(getattr(y, "placements", "")),
                local(y),
                x.grad,
                *map(local, grads),
            ]
        )  # type: ignore[arg-type]
    assert found[0][:3] == found[1][:3], (found[0][:3], found[1][:3])
    for torchs_, ours in zip(found[0][3:], found[1][3:], strict=True):
        near = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
        torch.testing.assert_close(ours, torchs_, rtol=near, atol=near * float(torchs_.abs().max()))
    return sum(calls.values())


def of_other_dtypes(group: dist.ProcessGroup, name: str, dtype: torch.dtype) -> list[str]:
    """Run forward and backward of a layer with an input of `dtype` on rank 0 alone, then with inputs of the layer's dtype.
    Return the error of the first time.
    """
    style, arguments, dim, _ = LINEARS[name]
    mesh = init_device_mesh(device().type, (group.size(),))
    layer = parallelize_module(
        nn.Linear(HIDDEN, HIDDEN).to(device()), mesh, getattr(weft.parallel, f"{style}Parallel")(**arguments)
    )
    x = data(0, (group.size() * 2, 2 * LENGTH, HIDDEN), torch.float32, 1)
    x = x if dim is None else x.tensor_split(group.size(), dim)[group.rank()]
    own, mine = x.clone().requires_grad_(), x.to(dtype) if group.rank() == 0 else x.clone().requires_grad_()
    error = error_of(lambda: local(layer(mine)).sum().backward())
    local(layer(own)).sum().backward()
    assert own.grad is not None
    return list(error)


INPUTS: dict[str, tuple[dict[str, Any], dict[str, bool], int]] = {
    "one for two": ({}, {}, 1),
    "as a DTensor": ({}, {"distributed": True}, 1),
    "two": (
        {"input_kwarg_layouts": {"y": Shard(1)}, "desired_input_kwarg_layouts": {"y": Replicate()}},
        {"named": True},
        2,
    ),
    "changed before": ({}, {"changes": True}, 2),
    "local": ({"use_local_output": True}, {}, 0),
    "stays divided": ({"desired_input_layouts": (Shard(1),)}, {}, 2),
    "with the output's": ({"output_layouts": Shard(-1), "desired_output_layouts": Replicate()}, {}, 1),
}


def inputs(group: dist.ProcessGroup, name: str) -> int:
    """Check that PrepareModuleInput gives equal results and gradients under torch and under weft. Return the number of
    gathers by weft.

    In case "stays divided", layers with torch 2.11's styles raise an error, so the results are not compared.
    """
    arguments, how, _ = INPUTS[name]
    arguments = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)} | arguments
    mesh = init_device_mesh(device().type, (group.size(),))
    found = []
    for by in ("torch", "weft"):
        s = STYLES[by]
        torch.manual_seed(2)
        model = Several(torch.float32, 4 * group.size()).to(device())
        model.changes = how.get("changes", False)
        output = "output_layouts" in arguments
        prepare = s.PrepareModuleInputOutput(**arguments) if output else s.PrepareModuleInput(**arguments)
        parallelize_module(model, mesh, {"": prepare, "a": s.ColwiseParallel(), "b": s.ColwiseParallel()})
        x, z = (data(group.rank(), (2, LENGTH, HIDDEN), torch.float32, seed).requires_grad_() for seed in (1, 2))
        given = DTensor.from_local(x, mesh, [Shard(1)]) if how.get("distributed") else x
        with counted() as calls:
            for _ in range(2):  # the second call must not use state of the first
                try:
                    y = model(given, y=z) if how.get("named") else model(given)
                except RuntimeError as error:
                    if (by, name) != ("torch", "stays divided") or "Attempted to flatten" not in str(error):
                        raise
                    break
                (y * data(group.rank(), tuple(y.shape), torch.float32, 3)).sum().backward()
            else:
                found.append([y, x.grad, z.grad, *(local(p.grad) for p in model.parameters())])  # type: ignore[arg-type]
    for torchs_, ours in zip(found[0], found[-1], strict=True):
        assert (torchs_ is None) == (ours is None)
        if ours is not None:
            torch.testing.assert_close(ours, torchs_, rtol=1e-4, atol=1e-4)
    assert calls["all_gather_matmul"] % 2 == 0
    return calls["all_gather_matmul"] // 2


Linears = tuple[nn.Module, nn.Module]


def _without_gradients(ab: Linears, x: torch.Tensor, mode: Any) -> torch.Tensor:
    with mode():
        ab[0](x)
    return ab[1](x)  # type: ignore[no-any-return]


def _narrow_first(ab: Linears, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        first = ab[0](x)
    return first.float() + ab[1](x)  # type: ignore[no-any-return]


def _changed_between(ab: Linears, x: torch.Tensor) -> torch.Tensor:
    first = ab[0](x)
    with torch.no_grad():
        x.mul_(2)
    return first.detach() + ab[1](x)  # type: ignore[no-any-return]


def _recomputed(ab: Linears, x: torch.Tensor, reentrant: bool, both: bool) -> torch.Tensor:
    first = checkpoint(ab[0], x, use_reentrant=reentrant)
    return first + (checkpoint(ab[1], x, use_reentrant=reentrant) if both else ab[1](x))  # type: ignore[no-any-return]


UNLIKE: dict[str, Any] = {
    "the first without gradients": lambda ab, x: _without_gradients(ab, x, torch.no_grad),
    "the first for inference": lambda ab, x: _without_gradients(ab, x, torch.inference_mode),
    "the first in bf16": _narrow_first,
    "changed in place between": _changed_between,
    "one recomputed": lambda ab, x: _recomputed(ab, x, False, False),
    "both recomputed": lambda ab, x: _recomputed(ab, x, False, True),
    "one recomputed, reentrant": lambda ab, x: _recomputed(ab, x, True, False),
    "both recomputed, reentrant": lambda ab, x: _recomputed(ab, x, True, True),
}


class InParts(nn.Module):
    """Two linears with a common input. calls: a function that calls them."""

    def __init__(self, calls: Any) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 8), calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.calls((self.a, self.b), x)  # type: ignore[no-any-return]


def unlike(group: dist.ProcessGroup, name: str) -> None:
    """Call two linears with a common input in different ways. Check that torch's styles and weft's give equal results
    and gradients.
    """
    mesh, found = init_device_mesh(device().type, (group.size(),)), []
    for by in ("torch", "weft"):
        s = STYLES[by]
        torch.manual_seed(2)
        model = InParts(UNLIKE[name]).to(device())
        prepare = s.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        parallelize_module(model, mesh, {"": prepare, "a": s.ColwiseParallel(), "b": s.ColwiseParallel()})
        x = data(group.rank(), (2, LENGTH, HIDDEN), torch.float32, 1).requires_grad_()
        y = model(x * 1)
        (y * data(group.rank(), tuple(y.shape), torch.float32, 3)).sum().backward()
        grads = [torch.zeros(()) if p.grad is None else local(p.grad) for p in model.b.parameters()]
        assert x.grad is not None
        found.append([local(y), x.grad, *grads])
    near = 0.05 if name == "the first in bf16" else 1e-4
    for torchs_, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs_, rtol=near, atol=near * float(torchs_.abs().max()))
