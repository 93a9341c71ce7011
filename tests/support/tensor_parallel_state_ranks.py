"""Saving, sharding by FSDP2, and initialising weft.nn's tensor-parallel layers. These functions run on the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.on_ranks import data, device, told
from support.tensor_parallel_ranks import HEAD_DIM, HIDDEN, Block, parallel, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weft


def saved_and_loaded(group: dist.ProcessGroup, folder: str) -> list[str]:
    """Save a model with torch.distributed.checkpoint on two ranks, and load it on all ranks. Return the saved names and
    shapes.
    """
    import torch.distributed.checkpoint as dcp

    def made(of: dist.ProcessGroup, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = nn.ModuleDict({kind: parallel(kind, True, of, 1) for kind in ("attention", "mlp")})
        layers["experts"] = weft.nn.ExpertParallelMLP(8, 12, 4, group=of, device=device())
        layers["norm"] = weft.nn.RMSNorm(HIDDEN, group=of, device=device())
        return layers

    two, names = dist.new_group([0, 1]), []
    if group.rank() < 2:
        assert two is not None
        saved = made(two, 1)
        dcp.save(weft.nn.distributed_state_dict(saved), checkpoint_id=folder, process_group=two)
        names = sorted(f"{name} {list(t.shape)}" for name, t in weft.nn.distributed_state_dict(saved).items())
    dist.barrier()
    loaded, right = made(group, 2), made(group, 1)  # with one seed, groups of any size draw the same whole model
    assert not torch.equal(loaded["mlp"].up_proj.weight, right["mlp"].up_proj.weight)  # type: ignore[index]
    dcp.load(weft.nn.distributed_state_dict(loaded), checkpoint_id=folder)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, right.get_parameter(name)), name
    moments = {name: torch.ones_like(p) for name, p in loaded.named_parameters()}
    assert isinstance(weft.nn.distributed_state_dict(loaded, moments)["mlp.up_proj.weight"], DTensor)
    return names


def sharded_by_fsdp(group: dist.ProcessGroup, recompute: bool) -> float:
    """Shard a block by FSDP2 over pairs of ranks. Return the largest difference between its gradients and the pair's mean
    gradients without FSDP2.
    """
    mesh = init_device_mesh(device().type, (2, group.size() // 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
    blocks = []
    for _ in range(2):
        torch.manual_seed(3)
        blocks.append(Block(tp, recompute))
    fully_shard(blocks[1], mesh=mesh["dp"])
    refusal = told(lambda: weft.nn.distributed_state_dict(blocks[1]))
    assert "a separate folder for each rank" in refusal, refusal
    x = shard(data(dp.rank(), (2, 16, HIDDEN), torch.float32, 5), 1, tp).clone()
    rotary, apart = weft.nn.rotary_embedding(16, HEAD_DIM, device=device()), 0.0
    for _ in range(2):
        for block in blocks:
            block.zero_grad()
            y = block(x, rotary)
            (y * data(group.rank(), tuple(y.shape), torch.float32, 6)).sum().backward()
        for plain, sharded in zip(*(block.parameters() for block in blocks), strict=True):
            assert plain.grad is not None
            assert isinstance(sharded.grad, DTensor)
            dist.all_reduce(plain.grad, group=dp)
            apart = max(apart, float((plain.grad / 2 - sharded.grad.full_tensor()).abs().max()))
    return apart


def drawn_under_fsdp(group: dist.ProcessGroup) -> None:
    """Check that layers made on meta, then divided by FSDP2, then initialised, have the values of layers that are made
    directly.

    Data-parallel ranks have different seeds, and all get the values of the first rank.
    """
    mesh = init_device_mesh(device().type, (2, group.size() // 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()

    def made() -> nn.ModuleDict:
        return nn.ModuleDict({
            "mlp": weft.nn.ParallelMLP(8, 8, group=tp, bias=True),
            "experts": weft.nn.ExpertParallelMLP(8, 6, 4, group=tp),
        })  # fmt: skip

    def draw(model: nn.Module, seed: int) -> None:
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    with torch.device("meta"):
        divided = made()
    for module in divided.values():
        fully_shard(module, mesh=mesh["dp"])
    divided.to_empty(device=device())
    for p in divided.parameters():
        nn.init.constant_(p, torch.nan)
    draw(divided, 1 + dp.rank())
    plain = made().to(device())
    draw(plain, 1)
    for one, other in zip(divided.parameters(), plain.parameters(), strict=True):
        assert isinstance(one, DTensor)
        assert torch.equal(one.full_tensor(), other)
