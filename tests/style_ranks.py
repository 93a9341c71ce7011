"""weft.parallel's styles in tests, on CPU processes and on GPUs: what runs on the ranks.

A Llama of plain nn.Linear, which is divided by torch's styles and by weft's with one plan, torchtitan's."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torchs
import torch.nn.functional as F
from matmul_ranks import data, device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import weft.parallel
from weft.parallel import linear

STYLES: dict[str, Any] = {"torch": torchs, "weft": weft.parallel}
HIDDEN, HEADS, KV_HEADS, WIDTH, WORDS, LENGTH = 32, 8, 4, 48, 40, 16


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        size = HIDDEN // HEADS
        self.wq, self.wo = nn.Linear(HIDDEN, HIDDEN, bias), nn.Linear(HIDDEN, HIDDEN, bias)
        self.wk, self.wv = (nn.Linear(HIDDEN, KV_HEADS * size, bias) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape  # of the whole sequence
        q, k, v = (w(x).view(batch, length, -1, HIDDEN // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, WIDTH, bias), nn.Linear(HIDDEN, WIDTH, bias)
        self.w2 = nn.Linear(WIDTH, HIDDEN, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, bias: bool, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention, self.feed_forward = Attention(bias), FeedForward(bias)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.body(x)


class Llama(nn.Module):
    def __init__(self, bias: bool = False, recompute: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleDict({str(i): Block(bias, recompute) for i in range(layers)})
        self.norm, self.output = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def divide(model: Llama, mesh: DeviceMesh, by: str, sequence: bool = True) -> None:
    """torchtitan's plan for a Llama with sequence parallelism; without it, torch's tutorial's, by the styles' own layouts."""
    s = STYLES[by]
    if not sequence:
        layers = {f"attention.w{name}": s.ColwiseParallel() for name in "qkv"}
        layers |= {"attention.wo": s.RowwiseParallel(), "feed_forward.w2": s.RowwiseParallel()}
        layers |= {"feed_forward.w1": s.ColwiseParallel(), "feed_forward.w3": s.ColwiseParallel()}
        for layer in model.layers.values():
            parallelize_module(layer, mesh, layers)
        parallelize_module(model, mesh, {"output": s.ColwiseParallel(output_layouts=Replicate())})
        return
    parallelize_module(model, mesh, {
        "tok_embeddings": s.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": s.SequenceParallel(),
        "output": s.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    })  # fmt: skip
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {
            "attention_norm": s.SequenceParallel(),
            "attention": s.PrepareModuleInput(**gathered),
            "attention.wq": s.ColwiseParallel(),
            "attention.wk": s.ColwiseParallel(),
            "attention.wv": s.ColwiseParallel(),
            "attention.wo": s.RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": s.SequenceParallel(),
            "feed_forward": s.PrepareModuleInput(**gathered),
            "feed_forward.w1": s.ColwiseParallel(),
            "feed_forward.w2": s.RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": s.ColwiseParallel(),
        })  # fmt: skip


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often styles call weft."""
    calls: Counter[str] = Counter()
    names = ("all_gather_matmul", "matmul_reduce_scatter", "columns", "gathered_columns", "row")
    native = {name: getattr(linear, name) for name in names}

    def counting(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return native[name](*args, **options)

        return call

    for name in native:
        setattr(linear, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in native.items():
            setattr(linear, name, function)


def described(model: nn.Module) -> dict[str, str]:
    """Layouts of parameters and of their gradients."""
    found = {}
    for name, p in model.named_parameters():
        of = [p, p.grad]
        found[name] = " ".join(f"{t.placements} {tuple(t.to_local().shape)}" for t in of if isinstance(t, DTensor))
    return found


def train(
    group: dist.ProcessGroup, by: str, optimizer: str, bias: bool, recompute: bool, data_parallel: int, steps: int,
    sequence: bool = True,
) -> tuple[list[float], dict[str, str], dict[str, int]]:  # fmt: skip
    """(losses, layouts, calls of weft in the last step)."""
    torch.manual_seed(1)
    model = Llama(bias, recompute).to(device())
    kind, world = device().type, group.size()
    if data_parallel > 1:
        mesh = init_device_mesh(kind, (data_parallel, world // data_parallel), mesh_dim_names=("dp", "tp"))
        tp, row = mesh["tp"], mesh["dp"].get_local_rank()
    else:
        tp, row = init_device_mesh(kind, (world,)), 0
    divide(model, tp, by, sequence)
    if data_parallel > 1:
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    made = (
        torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
        if optimizer == "SGD"
        else torch.optim.AdamW(model.parameters(), 1e-2)
    )
    losses = []
    for step in range(steps):
        random = torch.Generator().manual_seed(100 * step + row)
        first = torch.randint(WORDS, (2, 1), generator=random)
        text = ((first + torch.arange(LENGTH + 1) ** 2) % WORDS).to(device())  # which can be learned
        with counted() as calls, loss_parallel():
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
        made.step()
        layouts = described(model)
        made.zero_grad()
        losses.append(float(loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()))
    return losses, layouts, dict(calls)


def block_compiled(
    group: dist.ProcessGroup, by: str, bias: bool, sequence: bool = True
) -> tuple[float, dict[str, int]]:
    """How far a block in one graph is from itself in eager mode, results and gradients; and its calls of weft there."""
    torch.manual_seed(1)
    model = Llama(bias, layers=1).to(device())
    divide(model, init_device_mesh(device().type, (group.size(),)), by, sequence)
    block = model.layers["0"]
    torch._dynamo.reset()
    found = []
    for run in (torch.compile(block, fullgraph=True, backend="aot_eager"), block):
        model.zero_grad()
        shape = (2, LENGTH // group.size() if sequence else LENGTH, HIDDEN)
        x = data(group.rank() if sequence else 0, shape, torch.float32, 1).requires_grad_()
        with counted() as calls:
            y = run(x)
        (y * data(group.rank() if sequence else 0, tuple(y.shape), torch.float32, 2)).sum().backward()
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in block.parameters()]
        found.append([y.detach(), x.grad, *grads])
    apart = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    return apart, dict(calls)


class Several(nn.Module):
    """What is done to an input before and after linears of which some are divided by columns."""

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


# name -> (style, its arguments, is the input divided along: 1 the sequence, 2 columns, None not at all; calls of weft)
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


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def linears(group: dist.ProcessGroup, name: str, dtype: torch.dtype, features: int, own: bool) -> int:
    """One layer by torch's style and by weft's: equal results, layouts and gradients. Calls of weft."""
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
    """PrepareModuleInput by torch and by weft: equal results and gradients. How often weft gathers. torch 2.11's layers do not
    take what stays divided."""
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
            for _ in range(2):  # nothing is kept from one call to the next
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
    """Two linears of one input. calls: what of them."""

    def __init__(self, calls: Any) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 8), calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.calls((self.a, self.b), x)  # type: ignore[no-any-return]


def unlike(group: dist.ProcessGroup, name: str) -> None:
    """One input for two linears that are called unlike each other, by torch's styles and by weft's: equal results and gradients."""
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


def hugging_face(group: dist.ProcessGroup, by: str, steps: int) -> tuple[list[float], dict[str, int]]:
    """A tiny LlamaForCausalLM of random weights. (losses, calls of weft in the last step)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=LENGTH, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device())
    mesh, s = init_device_mesh(device().type, (group.size(),)), STYLES[by]
    divided, whole = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
    parallelize_module(model, mesh, {
        "model.embed_tokens": s.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": s.SequenceParallel(),
        "lm_head": s.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "model.layers.*.input_layernorm": s.SequenceParallel(),
        "model.layers.*.self_attn": s.PrepareModuleInput(input_kwarg_layouts=divided, desired_input_kwarg_layouts=whole),
        "model.layers.*.self_attn.[qkv]_proj": s.ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": s.RowwiseParallel(output_layouts=Shard(1)),
        "model.layers.*.post_attention_layernorm": s.SequenceParallel(),
        "model.layers.*.mlp": s.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "model.layers.*.mlp.gate_proj": s.ColwiseParallel(),
        "model.layers.*.mlp.up_proj": s.ColwiseParallel(),
        "model.layers.*.mlp.down_proj": s.RowwiseParallel(output_layouts=Shard(1)),
    })  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    positions, losses = torch.arange(LENGTH, device=device())[None], []
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        text = ((torch.randint(WORDS, (2, 1), generator=random) + torch.arange(LENGTH + 1) ** 2) % WORDS).to(device())
        with counted() as calls:
            logits = model(text[:, :-1], position_ids=positions).logits
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, dict(calls)


def functions(group: dist.ProcessGroup, k: int, frozen: bool) -> list[int]:
    """torchtitan's `dist_gemm` functions: results and gradients against one process in float64. Sizes of what is saved."""
    from weft.parallel.functions import AllGatherLinear, AllGatherLinearMulti, LinearReduceScatter

    rank, world, n = group.rank(), group.size(), 6
    at = (group, group.group_name)
    saved: list[int] = []

    def kept(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.numel())
        return t

    def run(ours: bool) -> list[torch.Tensor]:
        def leaf(seed: int, *shape: int) -> torch.Tensor:
            of_rank = [data(r, shape, torch.float32, seed) for r in range(world)]
            return of_rank[rank].requires_grad_(not frozen or seed == 1) if ours else torch.stack(of_rank).double()

        x, w, bias = leaf(1, 5, k), leaf(2, n, k), leaf(3, n)
        wa, wb = leaf(4, n, k), leaf(5, n, k)
        z, v, same = leaf(1, 5 * world, k), leaf(6, n, k), data(0, (n,), torch.float32, 7)
        if ours:
            same.requires_grad_(not frozen)
            with torch.autograd.graph.saved_tensors_hooks(kept, lambda t: t):
                ys = [AllGatherLinear.apply(x, w, bias, *at), *AllGatherLinearMulti.apply(x, wa, wb, *at)]
                ys.append(LinearReduceScatter.apply(z, v, same, *at))
            sum((y * data(rank, tuple(y.shape), torch.float32, 8 + i)).sum() for i, y in enumerate(ys)).backward()
            leaves = [x, w, bias, wa, wb, z, v, same]
            return [*ys, *(t.grad if t.grad is not None else torch.zeros(()) for t in leaves)]
        leaves = [x, w, bias, wa, wb, z, v, same.double()]
        x, w, bias, wa, wb, z, v, same = (t.requires_grad_(not frozen or i in (0, 5)) for i, t in enumerate(leaves))
        whole = x.flatten(0, 1)
        of_ranks = [[whole @ w[r].t() + bias[r], whole @ wa[r].t(), whole @ wb[r].t()] for r in range(world)]
        total = sum(z[r] @ v[r].t() for r in range(world)) + same
        loss = torch.zeros((), dtype=torch.float64, device=device())
        for r in range(world):
            of_ranks[r].append(total.chunk(world)[r])
            for i, y in enumerate(of_ranks[r]):
                loss = loss + (y * data(r, tuple(y.shape), torch.float32, 8 + i).double()).sum()
        loss.backward()
        mine = [t.grad[rank] if t.grad is not None else torch.zeros(()) for t in (x, w, bias, wa, wb, z, v)]
        return [*of_ranks[rank], *mine, same.grad if same.grad is not None else torch.zeros(())]

    for found, exact in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found.double(), exact.double(), rtol=1e-4, atol=1e-4)
    return saved


def functions_compiled(group: dist.ProcessGroup) -> float:
    """How far a program of torchtitan's functions in one graph is from itself in eager mode, gradients too."""
    from weft.parallel.functions import AllGatherLinear, LinearReduceScatter

    name, found = group.group_name, []

    def run(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = AllGatherLinear.apply(x, w, None, group, name)
        return LinearReduceScatter.apply(torch.relu(y), v, None, group, name)  # type: ignore[no-any-return]

    torch._dynamo.reset()
    for called in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
        leaves = [data(group.rank(), (n, k), torch.float32, n).requires_grad_() for n, k in ((4, 8), (6, 8), (8, 6))]
        y = called(*leaves)
        y.square().sum().backward()
        found.append([y.detach(), *(t.grad for t in leaves)])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))  # type: ignore[operator]


def recomputed_in_parts(group: dist.ProcessGroup) -> tuple[float, int, int]:
    """Activation checkpointing that saves some operators' results, weft's scatter among them: (how far gradients are from those
    without it, calls of the gather and of the scatter in forward)."""
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    calls = [0, 0]
    gather, scatter = torch.ops.weft.all_gather_matmul.default, torch.ops.weft.matmul_reduce_scatter.default

    def policy(ctx: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        calls[0] += op is gather and not ctx.is_recompute
        calls[1] += op is scatter and not ctx.is_recompute
        return CheckpointPolicy.MUST_SAVE if op is scatter else CheckpointPolicy.PREFER_RECOMPUTE

    found = []
    for parts in (False, True):
        torch.manual_seed(1)
        model = Llama(layers=1).to(device())
        divide(model, init_device_mesh(device().type, (group.size(),)), "weft")
        x = data(group.rank(), (2, LENGTH // group.size(), HIDDEN), torch.float32, 1).requires_grad_()
        block = model.layers["0"]
        if parts:
            y = checkpoint(
                block, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
            )
        else:
            y = block(x)
        (y * data(group.rank(), tuple(y.shape), torch.float32, 2)).sum().backward()
        found.append([x.grad, *(local(p.grad) for p in block.parameters() if p.grad is not None)])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)), *calls  # type: ignore[return-value]
