"""Tests of weft.nn.ExpertParallelMLP on CPU processes and on GPUs. These functions run on the ranks.

Every rank draws the tokens and the routing of all ranks, and the parameters of the whole layer.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.expert_rows_in_torch import fused
from support.graphs import capture
from support.on_ranks import device, poisoned_memory, told
from torch.utils.flop_counter import FlopCounterMode

from weft.nn import ExpertParallelMLP, local_state_dict
from weft.runtime.unfused import experts

HIDDEN, WIDTH, TOP_K = 8, 6, 2


def layer(
    group: dist.ProcessGroup, experts: int, dtype: torch.dtype = torch.float32, **options: Any
) -> ExpertParallelMLP:
    torch.manual_seed(5)
    return ExpertParallelMLP(HIDDEN, WIDTH, experts, group=group, dtype=dtype, **options).to(device())


def whole(experts: int, gated: bool, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return the parameters of all experts, with the same values as in the modules that `layer` makes on the ranks."""
    torch.manual_seed(5)
    first, down = [], []
    for _ in range(experts):
        shapes = (2 * WIDTH if gated else WIDTH, HIDDEN), (HIDDEN, WIDTH)
        drawn = [torch.empty(shape, dtype=dtype).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5) for shape in shapes]
        first.append(drawn[0])
        down.append(drawn[1])
    return {"gate_up_proj" if gated else "up_proj": torch.stack(first), "down_proj": torch.stack(down)}


def routed(rank: int, experts: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a rank's tokens, the experts of each token, and their weights. Some experts get far more tokens than
    others.
    """
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    scores = torch.randn(tokens, experts, generator=generator) + 2.0 * torch.arange(experts).flip(0).sqrt()
    weights, index = scores.softmax(1).topk(TOP_K, dim=1)
    return x, index, weights


def dense(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, parameters: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Compute the layer's result expert by expert, without communication or sorting."""
    first, down = parameters.get("gate_up_proj", parameters.get("up_proj")), parameters["down_proj"]
    assert first is not None
    y = torch.zeros_like(x)
    for expert in range(len(down)):
        token, slot = (index == expert).nonzero(as_tuple=True)
        made = x[token] @ first[expert].t()
        if "gate_up_proj" in parameters:
            gate, up = made.chunk(2, 1)
            made = F.silu(gate) * up
        else:
            made = F.silu(made)
        y = y.index_add(0, token, made @ down[expert].t() * weights[token, slot].unsqueeze(1))
    return y


def agrees_fused(group: dist.ProcessGroup, experts: int, bounded: bool) -> None:
    """Run `agrees` with the fused layer, whose kernels torch's functions replace."""
    with fused():
        agrees(group, experts, True, bounded, False)


def freezes(group: dist.ProcessGroup, of_fused: bool, frozen: tuple[str, ...]) -> None:
    """Compare the gradients that a layer computes while some of its inputs need none with those that it computes for all. The layer
    may be the fused layer (`of_fused`).

    frozen: names of "x", "by" (the weights of tokens' experts), "gate_up_proj" and "down_proj".
    """
    with fused() if of_fused else contextlib.nullcontext():
        mlp = layer(group, 4, capacity=64)
        x, index, by = (t.to(device()) for t in routed(group.rank(), 4, 9, 1))
        found = []
        for names in ((), frozen):
            tensors = {"x": x.clone(), "by": by.clone(), **dict(mlp.named_parameters())}
            for name, tensor in tensors.items():
                tensor.grad = None
                tensor.requires_grad_(name not in names)
            mlp(tensors["x"], index, tensors["by"]).square().sum().backward()
            found.append({name: tensor.grad for name, tensor in tensors.items()})
        for name, grad in found[1].items():
            if name in frozen:
                assert grad is None
            else:
                torch.testing.assert_close(grad, found[0][name], rtol=1e-5, atol=1e-6)


def exchanges_of_tokens(group: dist.ProcessGroup, bounded: bool, frozen: bool) -> list[int]:
    """Train the fused layer for three steps. Return, for each step, how often backward sends tokens again.

    frozen: True if the first weights need no gradient.
    """
    names, send = list[str](), experts.send

    def sent(*given: Any) -> Any:
        names.append(given[-1])
        return send(*given)

    with fused(), mock.patch("weft.runtime.unfused.experts.send", sent):
        mlp = layer(group, 4, capacity=64, max_rows=64 if bounded else None)
        mlp.get_parameter("gate_up_proj").requires_grad_(not frozen)
        found = []
        for seed in range(3):
            x, index, by = (t.to(device()) for t in routed(group.rank(), 4, 9 + seed, seed))
            names.clear()
            mlp(x.requires_grad_(), index, by).sum().backward()
            found.append(names.count("exchange tokens again"))
    return found


def flops(group: dist.ProcessGroup, of_fused: bool) -> int:
    """Return the FLOPs of a layer, forward and backward, that FlopCounterMode counts."""
    mlp = layer(group, 4, capacity=64)
    x, index, by = (t.to(device()) for t in routed(group.rank(), 4, 9, 1))
    with fused() if of_fused else contextlib.nullcontext(), FlopCounterMode(display=False) as counter:
        mlp(x.requires_grad_(), index, by).sum().backward()
    return counter.get_total_flops()


def agrees(group: dist.ProcessGroup, experts: int, gated: bool, bounded: bool, compiled: bool) -> None:
    """Compare results and all gradients with a dense layer in float64 that gets all ranks' tokens.

    A rank may have no tokens. Repeated calls must have equal bits.
    """
    rank, world = group.rank(), group.size()
    room = 40 * TOP_K * world if bounded else None
    pinned: tuple[str | None, str | None] = (None, None)
    if world > 2 or (world > 1 and (bounded or not gated)):  # a first call that measures schedules takes a second
        pinned = "dispatch[by=kernel,rest=each]", "combine[chunks=1,by=store]"
    mlp: Any = layer(group, experts, gated=gated, max_rows=room, capacity=40 * TOP_K, schedules=pinned)
    exact = {name: w.double().requires_grad_() for name, w in whole(experts, gated).items()}
    first = mlp.first_name
    assert torch.equal(mlp.get_parameter(first).cpu(), exact[first].float().chunk(world)[rank])
    call = mlp
    if compiled:
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        call = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        given = [routed(r, experts, 0 if r == seed % world == 1 else 5 + 7 * r + seed, seed) for r in range(world)]
        exact_x = [x.double().requires_grad_() for x, _, _ in given]
        exact_by = [by.double().requires_grad_() for _, _, by in given]
        ys = [dense(x, index, by, exact) for x, (_, index, _), by in zip(exact_x, given, exact_by, strict=True)]
        for w in exact.values():
            w.grad = None
        torch.stack([(y**2).sum() for y in ys]).sum().backward()
        x, index, by = (t.to(device()) for t in given[rank])
        found = []
        for _ in range(2):
            mlp.zero_grad()
            leaves = x.clone().requires_grad_(), by.clone().requires_grad_()
            with poisoned_memory():
                y = call(leaves[0], index, leaves[1])
                (y**2).sum().backward()
            found.append([y.detach(), *(t.grad for t in (*leaves, mlp.get_parameter(first), mlp.down_proj))])
        if not compiled:  # activation checkpointing compares calls with and without gradients
            with torch.no_grad():
                assert torch.equal(call(x, index, by), found[0][0])
        wanted = [ys[rank].detach(), exact_x[rank].grad, exact_by[rank].grad]
        wanted += [exact[name].grad.chunk(world)[rank] for name in (first, "down_proj")]
        for one, other in zip(found[0], wanted, strict=True):
            torch.testing.assert_close(one.cpu().double(), other, rtol=2e-4, atol=2e-4)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def trains(group: dist.ProcessGroup, steps: int) -> tuple[list[float], list[float]]:
    """Train with Adam on all ranks' tokens. Return the losses of the layer, and of a dense layer in one process."""
    rank, world, experts = group.rank(), group.size(), 4
    given = [routed(r, experts, 24, 3) for r in range(world)]
    targets = [torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    mlp = layer(group, experts)
    parameters = {name: w.clone().requires_grad_() for name, w in whole(experts, True).items()}
    losses: tuple[list[float], list[float]] = ([], [])
    ours, usual = torch.optim.Adam(mlp.parameters(), lr=0.02), torch.optim.Adam(parameters.values(), lr=0.02)
    x, index, by = (t.to(device()) for t in given[rank])
    for _ in range(steps):
        ours.zero_grad()
        usual.zero_grad()
        loss = (mlp(x, index, by) - targets[rank].to(device())).square().sum()
        loss.backward()
        dist.all_reduce(found := loss.detach().clone(), group=group)
        exact = torch.stack(
            [(dense(*one, parameters) - t).square().sum() for one, t in zip(given, targets, strict=True)]
        ).sum()
        exact.backward()
        ours.step()
        usual.step()
        losses[0].append(found.item())
        losses[1].append(exact.item())
    return losses


def handled(group: dist.ProcessGroup) -> dict[str, str]:
    """Check copies, pickles, and all forms of state dicts. Return the errors for bad arguments, and the layer's repr."""
    rank, world, experts = group.rank(), group.size(), 4
    mlp, stock = layer(group, experts), whole(experts, True)
    x, index, by = (t.to(device()) for t in routed(rank, experts, 6, 1))
    wanted = mlp(x, index, by)
    gate, up = stock["gate_up_proj"].chunk(2, 1)
    forms: dict[str, dict[str, torch.Tensor]] = {"stacked": stock}
    for form, (a, b, c) in {
        "hugging face": ("gate_proj", "up_proj", "down_proj"),
        "mixtral": ("w1", "w3", "w2"),
    }.items():
        forms[form] = {
            f"{i}.{name}.weight": w[i] for name, w in ((a, gate), (b, up), (c, stock["down_proj"])) for i in range(experts)
        }  # fmt: skip
    for form, state in forms.items():
        torch.manual_seed(99)
        other = ExpertParallelMLP(HIDDEN, WIDTH, experts, group=group.group_name).to(device())
        other.load_state_dict(other.local_part(state))
        assert torch.equal(other(x, index, by), wanted), form
        model = torch.nn.ModuleDict({"gate": torch.nn.Linear(2, 2), "experts": copy.deepcopy(other)})
        gate = torch.ones(2, 2)
        of_model = {"gate.weight": gate, "gate.bias": gate[0], **{f"experts.{name}": w for name, w in state.items()}}
        model.load_state_dict(local_state_dict(model, of_model))
        assert torch.equal(model["gate"].weight, gate), form
        assert torch.equal(model["experts"](x, index, by), wanted), form
    for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert torch.equal(other(x.view(2, 3, HIDDEN), index, by), wanted.view(2, 3, HIDDEN))
    del forms["mixtral"][f"{rank * experts // world}.w3.weight"]
    return {
        "missing": told(lambda: mlp.local_part(forms["mixtral"])),
        "experts": told(lambda: layer(group, experts + 1)),
        "index": told(lambda: mlp(x, index[:3], by)),
        "weights": told(lambda: mlp(x, index, by[:, :1])),
        "shown": repr(mlp),
    }


def misrouted(group: dist.ProcessGroup) -> dict[str, str]:
    """Return each rank's errors for calls with bad input on rank 1 only. Check that the next call works."""
    rank, experts = group.rank(), 4
    mlp = layer(group, experts)
    x, index, by = (t.to(device()) for t in routed(rank, experts, 6, 1))
    wanted, found = mlp(x, index, by), {}
    for name, bad in {
        "too large": (x, index + experts, by),
        "negative": (x, index - experts, by),
        "of floats": (x, index.float(), by),
        "fewer": (x, index[:3], by),
        "none": (x, index[:, :0], by[:, :0]),
        "wide": (x[:, :5], index, by),
        "nothing": (None, index, by),
    }.items():
        found[name] = told(lambda bad=bad: mlp(*(bad if rank == 1 else (x, index, by))))  # type: ignore[misc]
        assert torch.equal(mlp(x, index, by), wanted), name
    return found


def rows_lost(group: dist.ProcessGroup) -> str:
    mlp = layer(group, 2, max_rows=5)
    x, index, by = (t.to(device()) for t in routed(group.rank(), 2, 6, 1))
    return told(lambda: mlp(x, index, by))


def captured(group: dist.ProcessGroup) -> None:
    """Replay a layer in a CUDA graph, with other routing at every replay. The CPU waits for no sizes."""
    rank, experts, tokens = group.rank(), 4, 64
    exact = {name: w.double() for name, w in whole(experts, True).items()}
    mlp = layer(
        group, experts, max_rows=tokens * TOP_K * group.size(), capacity=tokens * TOP_K,
        schedules=("dispatch[by=kernel,rest=each]", "combine[chunks=1,by=store]"),
    )  # fmt: skip
    given = [[t.to(device()) for t in routed(rank, experts, tokens, seed)] for seed in range(5)]
    held = [t.clone() for t in given[0]]
    with torch.no_grad():
        mlp(*held)
        graph, y = capture(lambda: mlp(*held))
        for one in given:
            for mine, new in zip(held, one, strict=True):
                mine.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            x, index, by = (t.cpu() for t in one)
            torch.testing.assert_close(
                y.cpu().double(), dense(x.double(), index, by.double(), exact), rtol=2e-4, atol=2e-4
            )
