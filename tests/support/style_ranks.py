"""Tests of weft.parallel's styles on CPU processes and on GPUs. These functions run on the ranks.

The model is a Llama of plain nn.Linear. torchtitan's plan parallelizes it with torch's styles or with weft's.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torchs
import torch.nn.functional as F
from support.on_ranks import data, device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
        batch, length, _ = x.shape  # the length of the whole sequence
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
    """Divide the model by torchtitan's plan with sequence parallelism. Without `sequence`, use the plan of torch's
    tutorial, with the styles' default layouts.
    """
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
    """Count the calls that styles make of weft's functions."""
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


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def described(model: nn.Module) -> dict[str, str]:
    """Return the layouts of parameters and of their gradients."""
    found = {}
    for name, p in model.named_parameters():
        of = [p, p.grad]
        found[name] = " ".join(f"{t.placements} {tuple(t.to_local().shape)}" for t in of if isinstance(t, DTensor))
    return found


def train(
    group: dist.ProcessGroup, by: str, optimizer: str, bias: bool, recompute: bool, data_parallel: int, steps: int,
    sequence: bool = True,
) -> tuple[list[float], dict[str, str], dict[str, int]]:  # fmt: skip
    """Train. Return (losses, layouts, number of calls of weft in the last step)."""
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
        # One parameter at a time: torch's fused update refuses plain parameters beside DTensors.
        else torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    )
    losses = []
    for step in range(steps):
        random = torch.Generator().manual_seed(100 * step + row)
        first = torch.randint(WORDS, (2, 1), generator=random)
        # Text with a pattern that a model can learn.
        text = ((first + torch.arange(LENGTH + 1) ** 2) % WORDS).to(device())
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
    """Run a block compiled in one graph, and in eager mode. Return the largest difference of results and gradients, and
    the calls of weft in eager mode.
    """
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


def hugging_face(group: dist.ProcessGroup, by: str, steps: int) -> tuple[list[float], dict[str, int]]:
    """Train a tiny LlamaForCausalLM with random weights. Return (losses, number of calls of weft in the last step)."""
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


def recomputed_in_parts(group: dist.ProcessGroup) -> tuple[float, int, int]:
    """Run a block with activation checkpointing that saves only the results of matmul_reduce_scatter.

    Return (largest difference of gradients from a run without checkpointing, number of all_gather_matmul calls in
    forward, number of matmul_reduce_scatter calls in forward).
    """
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
