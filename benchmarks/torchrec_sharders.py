"""TorchRec's DistributedModelParallel with weft's sharders, compared with TorchRec's own sharders.

    torchrun --nproc-per-node 2 benchmarks/torchrec_sharders.py [--json FILE] [--quick]

Cases: column-wise and data-parallel pooled tables with SGD, and a row-wise table of sequences without pooling, with
`use_index_dedup=True` and rowwise Adagrad. In two row-wise cases 2% of a batch's ids are distinct, as in DLRMv4. In the
last case, almost all ids are distinct. Both models have the same plan and the same initial tables, and cycle through
the same batches in turn. With row-wise tables, a third model has weft's sharder without `use_index_dedup`. A step is
forward, backward and the update of all tables. Outputs are compared before the timing, and tables after it. Times are
the slowest rank's median of rounds, in milliseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from embedding_prefetch import batches_of, run, timed
from torchrec_modules import LR, WAYS, releases, require_close

EPS = 1e-8


class Case(NamedTuple):
    """A case of the comparison. mean: the mean number of ids of a bag. With kind "row_wise", each sample is a sequence of
    `mean` ids. distinct: with kind "row_wise", the share of distinct ids in a batch.
    """

    kind: str
    tables: int
    rows: int
    dim: int
    batch: int
    mean: int
    distinct: float = 0.02


CASES = {
    "column-wise 26 x 1M x 128, B 8192, L 10": Case("column_wise", 26, 1_000_000, 128, 8192, 10),
    "column-wise 26 x 1M x 128, B 16384, one-hot": Case("column_wise", 26, 1_000_000, 128, 16384, 1),
    "data-parallel 26 x 10k x 128, B 8192, L 10": Case("data_parallel", 26, 10_000, 128, 8192, 10),
    "data-parallel 64 x 1k x 64, B 2048, one-hot": Case("data_parallel", 64, 1000, 64, 2048, 1),
    "row-wise, rows, 1 x 10M x 512, B 16 x 4096": Case("row_wise", 1, 10_000_000, 512, 16, 4096),
    "row-wise, rows, 1 x 10M x 512, B 64 x 4096": Case("row_wise", 1, 10_000_000, 512, 64, 4096),
    "row-wise, rows, 1 x 10M x 512, B 16 x 4096, distinct ids": Case("row_wise", 1, 10_000_000, 512, 16, 4096, 1.0),
}
SMALL = {
    "column-wise": Case("column_wise", 6, 1000, 16, 64, 3),
    "data-parallel": Case("data_parallel", 6, 100, 16, 64, 3),
    "row-wise, rows": Case("row_wise", 1, 1000, 16, 8, 50),
}
BATCHES_OF_SEQUENCES = 5
WITHOUT_DEDUP = "weft without dedup"


class Tables(torch.nn.Module):
    """A model that consists of a collection of tables."""

    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: Any) -> Any:
        return self.tables(features)


def sharded(model: torch.nn.Module, path: str, kind: str, by: str, device: torch.device) -> Any:
    """Return a DistributedModelParallel of `model`, with the tables at `path` sharded by `kind`.

    Table-wise tables are spread over ranks in turn. by: the sharder, "torchrec", "weft" or WITHOUT_DEDUP.
    """
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed import embedding, embeddingbag, sharding_plan
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan

    import weft.torchrec

    module, world = model.get_submodule(path), dist.get_world_size()
    options: dict[str, Any] = {}
    if isinstance(module, EmbeddingBagCollection):
        configs, stock = module.embedding_bag_configs(), embeddingbag.EmbeddingBagCollectionSharder
        swapped = weft.torchrec.EmbeddingBagCollectionSharder
    else:
        configs, stock = module.embedding_configs(), embedding.EmbeddingCollectionSharder
        swapped = weft.torchrec.EmbeddingCollectionSharder
        # FBGEMM has no such kernel for CPUs.
        options = {"use_index_dedup": by != WITHOUT_DEDUP and (device.type == "cuda" or by == "weft")}
    of_kind: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda number: sharding_plan.table_wise(rank=number % world, compute_kernel="fused"),
        "column_wise": lambda number: sharding_plan.column_wise(ranks=list(range(world)), compute_kernel="fused"),
        "row_wise": lambda number: sharding_plan.row_wise(compute_kernel="fused"),
        "data_parallel": lambda number: sharding_plan.data_parallel(),
    }
    plan = sharding_plan.construct_module_sharding_plan(
        module,
        {config.name: of_kind[kind](number) for number, config in enumerate(configs)},
        sharder=stock(),
        local_size=world,
        world_size=world,
        device_type=device.type,
    )
    sharder = (stock if by == "torchrec" else swapped)(**options)
    return DistributedModelParallel(model, device=device, plan=ShardingPlan({path: plan}), sharders=[sharder])


def own_tables(model: Any) -> dict[str, torch.Tensor]:
    """Return this rank's parts of tables: {name of the table and offsets of the part in the table: part}."""
    found = {}
    for name, value in model.state_dict().items():
        if not (name.endswith(".weight") and ".embedding" in name):
            continue
        if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
            found[name] = value
        else:
            found |= {f"{name} {one.metadata.shard_offsets}": one.tensor for one in value.local_shards()}
    return found


def copy_tables(source: Any, target: Any) -> None:
    sources, targets = own_tables(source), own_tables(target)
    if sources.keys() != targets.keys():
        raise RuntimeError(
            f"the two sharders divide tables differently; only one has {sorted(sources.keys() ^ targets.keys())}: use the same plan"
        )
    with torch.no_grad():
        for name, tensor in targets.items():
            tensor.copy_(sources[name])


def made(case: Case, by: str, device: torch.device) -> tuple[Any, torch.optim.Optimizer | None]:
    """Return (the sharded model, the optimizer of data-parallel tables). The second is None for other tables, which are
    updated in backward.
    """
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    pools = case.kind != "row_wise"
    config = EmbeddingBagConfig if pools else EmbeddingConfig
    configs = [
        config(name=f"t{i}", embedding_dim=case.dim, num_embeddings=case.rows, feature_names=[f"f{i}"])
        for i in range(case.tables)
    ]
    tables: Any = (EmbeddingBagCollection if pools else EmbeddingCollection)(
        device=torch.device("meta"), tables=configs
    )
    if case.kind == "row_wise":
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": LR, "eps": EPS})
    elif case.kind == "column_wise":
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": LR})
    model = sharded(Tables(tables), "tables", case.kind, by, device)
    if case.kind != "data_parallel":
        return model, None
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)


def inputs_of(case: Case, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (ids, lengths) of each batch of this rank."""
    rank = dist.get_rank()
    if case.kind != "row_wise":
        return batches_of(case[1:6], rank, device)
    generator, found, count = torch.Generator().manual_seed(7 + rank), [], case.batch * case.mean
    for _ in range(BATCHES_OF_SEQUENCES):
        distinct = torch.randint(0, case.rows, (max(1, int(case.distinct * count)),), generator=generator)
        repeats = torch.randint(0, len(distinct), (count,), generator=generator)
        ids = distinct[repeats if case.distinct < 1 else slice(None)]
        found.append((ids.to(device), torch.full((case.batch,), case.mean, device=device)))
    return found


def measured(case: Case, device: torch.device, control: Any, calls: int) -> dict[str, float]:
    from torchrec import KeyedJaggedTensor

    names, inputs = [f"f{i}" for i in range(case.tables)], inputs_of(case, device)
    variants = (*WAYS, WITHOUT_DEDUP) if case.kind == "row_wise" else WAYS
    models = {by: made(case, by, device) for by in variants}
    for model, _ in models.values():
        if model is not models["torchrec"][0]:
            copy_tables(models["torchrec"][0], model)

    def call(by: str, number: int) -> torch.Tensor:
        """Run the sharded model on batch `number`. Return the pooled vectors, or for "row_wise" the unpooled rows, as a tensor."""
        ids, lengths = inputs[number % len(inputs)]
        found = models[by][0](KeyedJaggedTensor(names, ids, lengths=lengths))
        return found[names[0]].values() if case.kind == "row_wise" else found.values()

    shape = call("torchrec", 0).shape
    upstream = torch.randn(shape, generator=torch.Generator(device).manual_seed(3), device=device)

    def forward(by: str, count: int) -> None:
        with torch.no_grad():
            for number in range(count):
                call(by, number)

    def step(by: str, count: int) -> None:
        optimizer = models[by][1]
        for number in range(count):
            if optimizer is not None:
                optimizer.zero_grad()
            call(by, number).backward(upstream)
            if optimizer is not None:
                optimizer.step()

    with torch.no_grad():
        wanted = call("torchrec", 0)
        for by in variants[1:]:
            require_close(wanted, call(by, 0), f"outputs, {by}")
    ms: dict[str, float] = {}
    for part, way in {"forward": forward, "step": step}.items():
        ways = {by: functools.partial(way, by) for by in variants}
        ms |= {f"{part}, {by}": value for by, value in timed(ways, device, control, calls).items()}
    trained = own_tables(models["torchrec"][0])
    for by in variants[1:]:
        for name, tensor in own_tables(models[by][0]).items():
            require_close(trained[name], tensor, f"{name} after training, {by}")
    return ms | {f"{part}, speedup": ms[f"{part}, torchrec"] / ms[f"{part}, weft"] for part in ("forward", "step")}


if __name__ == "__main__":
    run(
        __doc__, f"milliseconds; {releases()}", measured, 20, {"peers": releases()}, cases=CASES, small=SMALL
    )  # fmt: skip
