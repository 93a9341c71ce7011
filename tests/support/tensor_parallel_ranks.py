"""Tests of weft.nn's tensor-parallel layers on CPU processes and on GPUs. These functions run on the ranks.

Every rank makes the same stock model and the same data from seeds, so it knows the results of all ranks.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.on_ranks import close, data, device, own_group, told, waits_end_after
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import weft
from weft.nn import parallel_linear


class MLP(nn.Module):
    """Llama's MLP in plain torch."""

    def __init__(self, hidden: int, width: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, width, bias), nn.Linear(hidden, width, bias)
        self.down_proj = nn.Linear(width, hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Llama's attention in plain torch, computed head by head, with complex rotations. x is [B, S, H]."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias)
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv_heads * head_dim, bias) for _ in range(2))
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with rotary position embedding, [B, S, D]."""
        half = self.head_dim // 2
        rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[1], device=x.device, dtype=torch.float64).outer(rates)
        z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((z.real, z.imag), -1).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        d, found = self.head_dim, []
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for head in range(self.heads):
            of = head * self.kv_heads // self.heads
            one, key, value = q[..., head * d : head * d + d], k[..., of * d : of * d + d], v[..., of * d : of * d + d]
            scores = self.rotated(one) @ self.rotated(key).transpose(1, 2) / d**0.5
            found.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ value)
        return self.o_proj(torch.cat(found, -1))


class Divided(nn.Module):
    """A linear layer computed with torch's GEMMs as tensor-parallel ranks would: one product per rank, each rounded,
    then summed or concatenated.
    """

    def __init__(self, linear: nn.Linear, row: bool, world: int) -> None:
        super().__init__()
        self.weight, self.bias, self.row, self.world = linear.weight, linear.bias, row, world

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weight.chunk(self.world, int(self.row))
        if self.row:
            products = [a @ w.t() for a, w in zip(x.chunk(self.world, -1), weights, strict=True)]
            y = torch.stack(products).sum(0)
        else:
            y = torch.cat([x @ w.t() for w in weights], -1)
        return y if self.bias is None else torch.cat([part + self.bias for part in y.chunk(self.world, 1)], 1)


def divided(model: nn.Module, kind: str, world: int) -> nn.Module:
    if isinstance(model, nn.Linear):
        return Divided(model, kind == "row", world)
    for name, child in list(model.named_children()):
        assert isinstance(child, nn.Linear)
        setattr(model, name, Divided(child, name in ("down_proj", "o_proj"), world))
    return model


HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 24, 40, 8, 4, 6


def stock(kind: str, bias: bool, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    made: nn.Module
    if kind == "column":
        made = nn.Linear(HIDDEN, WIDTH, bias)
    elif kind == "row":
        made = nn.Linear(WIDTH, HIDDEN, bias)
    elif kind == "mlp":
        made = MLP(HIDDEN, WIDTH, bias)
    else:
        made = Attention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, bias)
    return made.to(device())


def parallel(kind: str, bias: bool, group: dist.ProcessGroup, sequence_dim: int | None, **options: Any) -> nn.Module:
    options |= {"group": group, "sequence_dim": sequence_dim, "device": options.get("device", device())}
    if kind == "column":
        return weft.nn.ColumnParallelLinear(HIDDEN, WIDTH, bias, **options)
    if kind == "row":
        return weft.nn.RowParallelLinear(WIDTH, HIDDEN, bias, **options)
    if kind == "mlp":
        return weft.nn.ParallelMLP(HIDDEN, WIDTH, bias=bias, **options)
    return weft.nn.ParallelAttention(HIDDEN, HEADS, KV_HEADS, head_dim=HEAD_DIM, bias=bias, **options)


def shard(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(group.size(), dim)[group.rank()]


def agrees(
    group: dist.ProcessGroup,
    kind: str,
    bias: bool,
    sequence_dim: int | None,
    dtype: torch.dtype,
    compiled: bool,
    calls: int,
) -> None:
    """Compare results and all gradients of several calls with the stock layer in float64.

    Errors may be twice those of torch's own products and sums in the same dtype. sequence_dim: None if activations are
    not divided along the sequence.
    """

    def part(t: torch.Tensor, rows: bool) -> torch.Tensor:
        """Return this rank's part of a tensor. It is divided along the sequence if `rows`, else by columns."""
        return t if rows and sequence_dim is None else shard(t, 1 if rows else 2, group)

    usual = stock(kind, bias).to(dtype)
    exact = copy.deepcopy(usual).double()
    usual = divided(usual, kind, group.size())
    ours = parallel(kind, bias, group, sequence_dim, dtype=dtype)
    ours.load_state_dict(weft.nn.local_state_dict(ours, usual.state_dict()))
    length, columns = 4 * group.size(), WIDTH if kind == "row" else HIDDEN
    rotary = weft.nn.rotary_embedding(length, HEAD_DIM, device=device())
    arguments = (rotary,) if kind == "attention" else ()
    run: Callable[..., torch.Tensor] = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    found = []
    for call in range(calls):
        whole = data(0, (2, length, columns), dtype, 10 + call)
        rows_in, rows_out = kind != "row", kind != "column"  # True if divided along the sequence, False if by columns
        x = part(whole, rows_in).clone()
        x = (x.transpose(0, 1).contiguous() if sequence_dim == 0 else x).requires_grad_()
        y = run(x, *arguments)
        y = y.transpose(0, 1) if sequence_dim == 0 else y
        weighing = data(0, (2, length, WIDTH if kind == "column" else HIDDEN), dtype, 20 + call)
        ours.zero_grad()
        (y * part(weighing, rows_out)).sum().backward()
        assert x.grad is not None
        x_grad = x.grad.transpose(0, 1) if sequence_dim == 0 else x.grad
        grads = {name: p.grad for name, p in ours.named_parameters()}
        found.append((whole, weighing, rows_in, rows_out, y, x_grad, grads))
    for whole, weighing, rows_in, rows_out, y, x_grad, grads in found:
        of: list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = []
        for model in (exact, usual):
            like = next(model.parameters())
            given = whole.to(like.dtype).clone().requires_grad_()
            result = model(given)
            model.zero_grad()
            (result * weighing.to(like.dtype)).sum().backward()
            assert given.grad is not None
            local = weft.nn.local_state_dict(ours, {name: p.grad for name, p in model.named_parameters()})  # type: ignore[misc]
            of.append((part(result, rows_out), part(given.grad, rows_in), local))
        (exact_y, exact_x, exact_grads), (usual_y, usual_x, usual_grads) = of
        assert y.dtype == dtype
        assert y.shape == exact_y.shape
        close(y, exact_y, usual_y)
        close(x_grad, exact_x, usual_x)
        assert grads.keys() == exact_grads.keys()
        for name, grad in grads.items():
            assert grad is not None, name
            if name == "k_proj.bias":
                # Softmax ignores an offset that all keys share, so the terms of this gradient, each as large as in
                # q_proj.bias, nearly cancel. So measure the error relative to both gradients together.
                both = [torch.cat((of["q_proj.bias"], of[name])) for of in (grads, exact_grads, usual_grads)]
                close(*both)
            else:
                close(grad, exact_grads[name], usual_grads[name])


class Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup, recompute: bool, reentrant: bool = False) -> None:
        super().__init__()
        options = {"group": group, "device": device()}
        self.norms = nn.ModuleList(weft.nn.RMSNorm(HIDDEN, **options) for _ in range(2))
        self.attention = parallel("attention", True, group, 1)
        self.mlp, self.recompute = parallel("mlp", True, group, 1), recompute
        self.reentrant = reentrant

    def body(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), rotary)
        return x + self.mlp(self.norms[1](x))

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self.body, x, rotary, use_reentrant=self.reentrant)  # type: ignore[no-any-return]
        return self.body(x, rotary)


def block_gradients(
    group: dist.ProcessGroup, compiled: bool, recompute: bool, reentrant: bool = False
) -> dict[str, list[Any]]:
    """Run a block forward and backward. Return the whole result, and the gradients of the parameters that are equal on
    all ranks.
    """
    torch.manual_seed(3)
    block = Block(group, recompute, reentrant)
    run = torch.compile(block, fullgraph=not recompute, backend="aot_eager") if compiled else block
    length = 16
    x = data(0, (2, length, HIDDEN), torch.float32, 5)
    y = run(shard(x, 1, group).clone().requires_grad_(), weft.nn.rotary_embedding(length, HEAD_DIM, device=device()))
    (y * shard(data(1, (2, length, HIDDEN), torch.float32, 5), 1, group)).sum().backward()
    parts = [torch.empty_like(y) for _ in range(group.size())]
    dist.all_gather(parts, y.detach().contiguous(), group=group)
    found = {"y": torch.cat(parts, 1).tolist()}
    for name, p in block.named_parameters():
        assert p.grad is not None, name
        if "norms" in name or name.endswith(("down_proj.bias", "o_proj.bias")):
            found[name] = p.grad.tolist()
    return found


def following(group: dist.ProcessGroup, sequence_dim: int | None, compiled: bool, own_norms: bool) -> list[bool]:
    """Compare attention and MLP, each with its residual and the next norm, with stock layers in float64: results and all
    gradients. Return for each row-parallel GEMM: True if it fused the norm.

    own_norms: True to use a subclass of RMSNorm, which an all-reduce cannot fuse.
    """
    torch.manual_seed(4)
    norm_of = type("OwnNorm", (nn.RMSNorm,), {}) if own_norms else nn.RMSNorm
    stocks = nn.ModuleList(
        [stock("attention", True), stock("mlp", True), *(nn.RMSNorm(HIDDEN, 1e-5) for _ in range(3))]
    )
    stocks.to(device())
    for norm in stocks[2:]:
        nn.init.normal_(norm.weight)
    norms = [
        norm_of(HIDDEN, 1e-5, device=device())
        if sequence_dim is None
        else weft.nn.RMSNorm(HIDDEN, 1e-5, group=group, device=device())
        for _ in range(3)
    ]
    ours = nn.ModuleList([*(parallel(kind, True, group, sequence_dim) for kind in ("attention", "mlp")), *norms])
    ours.load_state_dict(weft.nn.local_state_dict(ours, stocks.state_dict()))
    exact, length = copy.deepcopy(stocks).double(), 4 * group.size()

    def part(t: torch.Tensor) -> torch.Tensor:
        return t if sequence_dim is None else shard(t, sequence_dim, group)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attention, mlp, first, second, third = ours
        rotary = weft.nn.rotary_embedding(length, HEAD_DIM, device=device())
        normed, x = attention(first(x), rotary, residual=x, norm=second)
        return mlp(normed, residual=x, norm=third)  # type: ignore[no-any-return]

    def plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attention, mlp, first, second, third = exact
        x = x + attention(first(x))
        x = x + mlp(second(x))
        return third(x), x

    had, native = [], parallel_linear.row
    parallel_linear.row = lambda *a: had.append(len(a) > 5 and a[5] is not None) or native(*a)  # type: ignore[func-returns-value]
    try:
        called = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
        for call in range(2):
            whole, weighing = (data(0, (2, length, HIDDEN), torch.float32, 10 * seed + call) for seed in (5, 6))
            other = data(0, (2, length, HIDDEN), torch.float32, 70 + call)
            results = []
            for of in (ours, exact):
                like = next(of.parameters())
                cut = part if of is ours else (lambda t: t)
                x, one, two = (cut(t.to(like.dtype)).clone() for t in (whole, weighing, other))
                x.requires_grad_()
                normed, y = called(x) if of is ours else plain(x)
                of.zero_grad()
                ((normed * one).sum() + (y * two).sum()).backward()
                assert x.grad is not None
                grads, of_x = {name: p.grad for name, p in of.named_parameters()}, x.grad
                if of is exact:
                    grads = weft.nn.local_state_dict(ours, grads)  # type: ignore[arg-type]
                    normed, y, of_x = part(normed), part(y), part(of_x)
                results.append([normed, y, of_x, *(grads[name] for name, _ in ours.named_parameters())])
            for found, right in zip(*results, strict=True):
                assert found is not None
                near = 1e-5 * max(1.0, float(right.detach().abs().max()))
                torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=near)
    finally:
        parallel_linear.row = native
    return had


def watched_norms(group: dist.ProcessGroup) -> dict[str, int]:
    """Observe a norm that follows a row-parallel layer, by each kind of hook and by a replaced forward. Return {way to
    observe: number of its calls in one forward and backward}.
    """
    row, x = parallel("row", True, group, None), shard(data(0, (2, 3, WIDTH), torch.float32, 1), 2, group)
    heard: dict[str, int] = {}

    def watched(way: str) -> nn.RMSNorm:
        norm = nn.RMSNorm(HIDDEN, 1e-5, device=device())
        heard[way] = 0

        def note(*_: Any) -> None:
            heard[way] += 1

        if way == "forward replaced":
            native = norm.forward
            norm.forward = lambda x: (note(), native(x))[1]  # type: ignore[method-assign]
        else:
            getattr(norm, f"register_{way}")(note)
        return norm

    for way in (
        "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "forward replaced"
    ):  # fmt: skip
        normed, y = row(x.clone().requires_grad_(), norm=watched(way))
        (normed.sum() + y.sum()).backward()
    return heard


def norm_alone(group: dist.ProcessGroup) -> str:
    """Return the error of rank 0, which runs the backward of a norm while the other ranks do not."""
    own = own_group(group)
    layer, norm = weft.nn.ColumnParallelLinear(8, 4 * group.size(), group=own), weft.nn.RMSNorm(8, group=own)
    y = layer(norm(torch.randn(2, 5, 8))).detach().sum() + norm(torch.randn(2, 5, 8)).sum()
    if group.rank() == 0:
        with waits_end_after(1):
            return told(y.backward)
    time.sleep(3)
    return ""


def autocast(group: dist.ProcessGroup) -> list[str]:
    """Return the dtypes of results and of weights' gradients under autocast."""
    found = []
    for kind in ("column", "row", "mlp", "attention"):
        layer = parallel(kind, True, group, 1)
        x = data(
            group.rank(),
            (2, 4, (WIDTH if kind == "row" else HIDDEN) // (group.size() if kind == "row" else 1)),
            torch.float32,
            1,
        )
        with torch.autocast(x.device.type, torch.bfloat16):
            y = layer(x)
        y.float().sum().backward()
        found.append(f"{kind} {y.dtype} {next(layer.parameters()).grad.dtype}")  # type: ignore[union-attr]
    if device().type == "cpu":  # on GPUs fp64 under autocast is refused
        wide = weft.nn.ColumnParallelLinear(8, 4 * group.size(), group=group, dtype=torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            assert wide(torch.ones(1, 2, 8, dtype=torch.float64)).dtype == torch.float64  # like `nn.Linear`
    return found


def handled(group: dist.ProcessGroup) -> dict[str, str]:
    """Check layers that are copied, pickled, made from stock layers, drawn from a seed, or made on meta. Return the
    errors for bad arguments.
    """
    found = {}
    world = group.size()
    layer = weft.nn.ColumnParallelLinear(8, 4 * world, group=group, device=device())
    x = data(group.rank(), (2, 5, 8), torch.float32, 1)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    for kind, made in (("column", weft.nn.ColumnParallelLinear), ("row", weft.nn.RowParallelLinear)):
        linear = stock(kind, True)
        assert isinstance(linear, nn.Linear)
        linear.weight.requires_grad_(False)
        linear.to(torch.bfloat16)
        part = made.from_linear(linear, group)
        torch.manual_seed(1)
        drawn = parallel(kind, True, group, 1)
        for name, p in part.named_parameters():
            dim = 0 if kind == "column" else 1
            whole = linear.get_parameter(name).detach()
            expected = whole if (kind, name) == ("row", "bias") else shard(whole, dim, group)
            assert torch.equal(p, expected)
            assert p.data_ptr() != expected.data_ptr()
            assert torch.equal(drawn.get_parameter(name).bfloat16(), expected) or device().type == "cuda"
        assert (part.weight.requires_grad, part.bias.requires_grad) == (False, True)
    empty = parallel("mlp", False, group, 1, device="meta").to_empty(device=device())
    for child in empty.children():
        child.reset_parameters()  # type: ignore[operator]
    assert all(p.isfinite().all() for p in empty.parameters())
    found["extra"] = repr(layer)
    mlp = weft.nn.ParallelMLP(8, 4 * world, group=group, device=device())
    attention, flat = (
        weft.nn.ParallelAttention(8, 2 * world, group=group, head_dim=2, sequence_dim=dim, device=device())
        for dim in (1, 0)
    )
    with torch.inference_mode():
        made_in_inference = torch.ones(2, 4, device=device())
    with torch.no_grad():
        for made in (weft.nn.ColumnParallelLinear, weft.nn.RowParallelLinear):
            whole_here = made(
                4 * (1 if made.divided == 0 else world), 4 * world, group=group, sequence_dim=None, device=device()
            )
            assert torch.equal(whole_here(made_in_inference), whole_here(made_in_inference.clone()))
    for kind in ("column", "row", "mlp"):  # a state dict with biases only
        biases = {name: p for name, p in stock(kind, True, 2).named_parameters() if name.endswith("bias")}
        trained = parallel(kind, True, group, 1)
        assert not trained.load_state_dict(weft.nn.local_state_dict(trained, biases), strict=False).unexpected_keys
        everything = weft.nn.local_state_dict(trained, stock(kind, True, 2).state_dict())
        assert all(torch.equal(trained.get_parameter(name), everything[name]) for name in biases)
    calls: dict[str, Callable[[], Any]] = {
        "columns": lambda: weft.nn.ColumnParallelLinear(8, 4 * world + 1, group=group),
        "rows": lambda: weft.nn.RowParallelLinear(4 * world + 1, 8, group=group),
        "width": lambda: weft.nn.ParallelMLP(8, 4 * world + 1, group=group),
        "heads": lambda: weft.nn.ParallelAttention(8, world + 1, group=group),
        "kv heads": lambda: weft.nn.ParallelAttention(12 * world, 6 * world, 4 * world, group=group),
        "few kv heads": lambda: weft.nn.ParallelAttention(8 * world, 4 * world, 1, group=group),
        "head size": lambda: weft.nn.ParallelAttention(8 * world + 1, 4 * world, group=group),
        "sequence": lambda: weft.nn.ParallelAttention(8, world, group=group, sequence_dim=2),
        "no linear": lambda: weft.nn.ColumnParallelLinear.from_linear(nn.Identity(), group),  # type: ignore[arg-type]
        "odd": lambda: weft.nn.rotary_embedding(4, 5),
        "no group": lambda: weft.nn.ColumnParallelLinear(8, 8, group="nobody"),
        "mesh": lambda: weft.nn.ColumnParallelLinear(8, 8, group=init_device_mesh(device().type, (world,))),  # type: ignore[arg-type]
        "x": lambda: mlp(x[..., :5]),
        "two dimensions": lambda: mlp(x[0]),
        "dtype here": lambda: parallel("mlp", False, group, None)(
            torch.ones(3, HIDDEN, dtype=torch.float16 if group.rank() == 0 else torch.float32, device=device())
        ),
        "two dimensions here": lambda: attention(x[0] if group.rank() == 0 else x),
        "two dimensions of a sequence": lambda: flat(x[0]),
        "norm": lambda: weft.nn.RowParallelLinear(4 * world, 8, group=group, sequence_dim=None, device=device())(
            data(0, (2, 4), torch.float32, 1), norm=weft.nn.RMSNorm(8, group=group)
        ),
        "inference": lambda: weft.nn.RowParallelLinear(4 * world, 8, group=group, sequence_dim=None, device=device())(
            made_in_inference
        ),
        "whole": lambda: weft.nn.RowParallelLinear(4 * world, 8, group=group, sequence_dim=None)(x),
        "no tensor": lambda: weft.nn.RowParallelLinear(4 * world, 8, group=group)([x]),  # type: ignore[arg-type]
        "length": lambda: weft.nn.RowParallelLinear(4 * world, 8, group=group, device=device())(
            data(0, (2, 2 * world + 1, 4), torch.float32, 1)
        ),
    }  # fmt: skip
    return found | {name: told(call) for name, call in calls.items()}
