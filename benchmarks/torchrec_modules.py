"""weft's embedding module compared with TorchRec's: forward, and forward + backward + fused SGD.

    torchrun --nproc-per-node 2 benchmarks/torchrec_modules.py [--json FILE] [--quick]

Both modules have the same table-wise sharding and cycle through twenty batches. Each batch is a new KeyedJaggedTensor of local
samples. `DistributedModelParallel` shards TorchRec's module, which runs FBGEMM's kernels; it needs torchrec and fbgemm_gpu. The
modules alternate. Times are the slowest rank's median of rounds, in milliseconds. Outputs are compared before the timing, and
tables after it.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from embedding_prefetch import BATCHES, batches_of, run, timed

import weft
from weft.nn import ShardedEmbeddingBagCollection

LR, LIMIT = 0.01, 1e-4
WAYS = ("torchrec", "weft")


def of_torchrec(configs: list[Any], device: torch.device) -> tuple[Any, dict[str, int]]:
    """Return TorchRec's sharded module with fused SGD, and the rank of each table."""
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    world: Any = dist.group.WORLD
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": LR})
    whole = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    topology = Topology(world_size=world.size(), compute_device=device.type, local_world_size=world.size())
    planner = EmbeddingShardingPlanner(topology=topology, constraints={config.name: whole for config in configs})
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = planner.collective_plan(module, [sharder], world)
    sharded = DistributedModelParallel(
        module, env=ShardingEnv.from_process_group(world), device=device, plan=plan, sharders=[sharder]
    )
    ranks = {name: sharding.ranks[0] for of_module in plan.plan.values() for name, sharding in dict(of_module).items()}
    return sharded, ranks


def measured(case: tuple[int, ...], device: torch.device, control: Any, calls: int) -> dict[str, float]:
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

    tables, rows, dim, _, _ = case
    names = [f"f{i}" for i in range(tables)]
    configs = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=rows, feature_names=[names[i]])
        for i in range(tables)
    ]
    theirs, ranks = of_torchrec(configs, device)
    group: Any = dist.group.WORLD
    ours = ShardedEmbeddingBagCollection(
        configs, group=group, device=device, placement=ranks, optimizer=weft.SGD(lr=LR)
    )
    own = {
        name.split(".")[-2]: tensor.local_shards()[0].tensor
        for name, tensor in theirs.state_dict().items()
        if tensor.local_shards()
    }
    with torch.no_grad():
        for name, bag in ours.embedding_bags.items():
            bag.weight.copy_(own[name])
    batches = batches_of(case, dist.get_rank(), device)

    def features(number: int) -> Any:
        ids, lengths = batches[number % BATCHES]
        return KeyedJaggedTensor(names, ids, lengths=lengths)

    def call(which: str, number: int) -> Any:
        found = (theirs if which == "torchrec" else ours)(features(number))
        return found.wait() if hasattr(found, "wait") else found

    def forward(which: str, count: int) -> None:
        with torch.no_grad():
            for number in range(count):
                call(which, number).values()

    def step(which: str, count: int) -> None:
        for number in range(count):
            call(which, number).values().sum().backward()

    with torch.no_grad():
        columns = [torch.cat([pooled[name] for name in names], 1) for pooled in (call(which, 0) for which in WAYS)]
    require_close(*columns, "outputs")
    parts, ms = {"forward": forward, "step": step}, dict[str, float]()
    for part, way in parts.items():
        ways = {which: functools.partial(way, which) for which in WAYS}
        ms |= {f"{part}, {which}": value for which, value in timed(ways, device, control, calls).items()}
    for name, bag in ours.embedding_bags.items():
        require_close(own[name], bag.weight.detach(), f"table {name} after training")
    ours.close()
    return ms | {f"{part}, speedup": ms[f"{part}, torchrec"] / ms[f"{part}, weft"] for part in parts}


def require_close(wanted: torch.Tensor, found: torch.Tensor, what: str) -> None:
    error = float((wanted - found).abs().max() / wanted.abs().max().clamp_min(1e-30))
    if not error < LIMIT:
        raise RuntimeError(f"{what}: weft and TorchRec differ by {error:.2g} of the largest element")


def releases() -> dict[str, str | None]:
    """Return {package: its version} of torch, TorchRec and FBGEMM; None for a missing package."""

    def release(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {"torchrec": release("torchrec"), "fbgemm_gpu": release("fbgemm-gpu") or release("fbgemm-gpu-cpu")}


if __name__ == "__main__":
    run(__doc__, f"milliseconds; {releases()}", measured, BATCHES, {"peers": releases()})
