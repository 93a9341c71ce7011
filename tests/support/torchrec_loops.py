"""TorchRec's training loops with its own sharder and with weft's, on CPU processes and on GPUs. Only the ranks import
TorchRec.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.on_ranks import device as device_here
from torch import nn

BATCH, STEPS = 6, 4
TABLES = (
    (30, 8, "users", ("u", "friend"), "SUM"),
    (20, 4, "movies", ("i",), "MEAN"),
    (25, 4, "pairs", ("i", "u"), "SUM"),
)
KEYS = ["i", "unused", "u", "friend"]
RANKS = {"users": 1, "movies": 0, "pairs": 1}
WIDTH = 8 + 8 + 4 + 4 + 4
ADAGRAD = {"optimizer": "RowWiseAdagrad", "lr": 0.1, "eps": 1e-6}


def collection(device: str = "meta", is_weighted: bool = False, data_type: str = "FP32") -> Any:
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(
            num_embeddings=rows, embedding_dim=dim, name=name, feature_names=list(features), pooling=PoolingType[pooling],
            data_type=DataType[data_type],
        )
        for rows, dim, name, features, pooling in TABLES
        if not (is_weighted and pooling == "MEAN")
    ]  # fmt: skip
    return EmbeddingBagCollection(tables=configs, is_weighted=is_weighted, device=torch.device(device))


class Model(nn.Module):
    """A model whose sparse part is two levels down, as in TorchRec's DLRM."""

    def __init__(self, ebc: Any, weighted: Any = None) -> None:
        super().__init__()
        self.sparse = nn.Module()
        self.sparse.ebc = ebc
        configs = ebc.embedding_bag_configs()
        if weighted is not None:
            self.sparse.weighted = weighted
            configs = configs + weighted.embedding_bag_configs()
        generator = torch.Generator().manual_seed(3)
        self.over = nn.Linear(sum(len(c.feature_names) * c.embedding_dim for c in configs), 1)
        with torch.no_grad():
            self.over.weight.copy_(torch.randn(self.over.weight.shape, generator=generator) / 4)
            self.over.bias.zero_()

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.sparse.ebc(batch.sparse_features).values()
        if hasattr(self.sparse, "weighted"):
            pooled = torch.cat([pooled, self.sparse.weighted(batch.dense_features).values()], dim=1)
        prediction = self.over(pooled.float()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(prediction, batch.labels)
        return loss, loss.detach()


def batches(rank: int, count: int = STEPS, is_weighted: bool = False, has_two: bool = False) -> Iterator[Any]:
    """Yield batches of TorchRec. has_two: True to put the input of a second, weighted collection into `dense_features`."""
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        lengths = torch.randint(0, 5, (4 * BATCH,), generator=generator)
        ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(ids), generator=generator) if is_weighted else None
        features = KeyedJaggedTensor(KEYS, ids, weights, lengths=lengths)
        labels = torch.randint(0, 2, (BATCH,), generator=generator).float()
        others: Any = torch.zeros(BATCH, 1)
        if has_two:
            others = KeyedJaggedTensor(KEYS, ids.flip(0), torch.rand(len(ids), generator=generator), lengths=lengths)
        yield Batch(others, features, labels).to(device_here())


def full_weights(data_type: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, dim, generator=generator).to(data_type) for rows, dim, name, *_ in TABLES}


def _sharding(kind: str, rank: int, world: int, kernel: str) -> Any:
    from torchrec.distributed import sharding_plan

    if kind == "row_wise":
        return sharding_plan.row_wise(compute_kernel=kernel)
    if kind == "column_wise":
        return sharding_plan.column_wise(ranks=list(range(world)), compute_kernel=kernel)
    if kind == "data_parallel":
        return sharding_plan.data_parallel()
    return sharding_plan.table_wise(rank=rank, compute_kernel=kernel)


def sharded(
    group: dist.ProcessGroup, by: str, kernel: str = "fused", optimizer: dict[str, Any] | None = None,
    ranks: dict[str, int] = RANKS, has_two: bool = False, kinds: dict[str, str] | None = None, output: str | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Return a DistributedModelParallel with fixed initial values.

    by: the sharder, "torchrec" or "weft". has_two: True for a second, weighted collection. output: FBGEMM's name of the
    dtype of pooled vectors.
    """
    import torchrec
    from fbgemm_gpu.split_embedding_configs import SparseType
    from torchrec.distributed import collective_utils
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    import weft.torchrec

    # TorchRec initialises once per process, but workers of tests change their group.
    collective_utils._INITIALIZED = False
    model = Model(collection(**options), collection(is_weighted=True, **options) if has_two else None)
    if optimizer is not None:
        given = dict(optimizer)
        rule = getattr(torchrec.optim, given.pop("optimizer"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply_optimizer_in_backward(rule, model.sparse.parameters(), given)
    world, stock, plan = group.size(), EmbeddingBagCollectionSharder(), {}
    for name, ebc in model.sparse.named_children():
        of_tables = {
            c.name: _sharding((kinds or {}).get(c.name, "table_wise"), ranks[c.name] % world, world, kernel)
            for c in ebc.embedding_bag_configs()
        }
        plan[f"sparse.{name}"] = construct_module_sharding_plan(
            ebc, of_tables, sharder=stock, local_size=world, world_size=world, device_type=device_here().type
        )
    fused_params = None if output is None else {"output_dtype": SparseType[output]}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params)
    if by == "weft":
        sharder = weft.torchrec.EmbeddingBagCollectionSharder(fused_params, deadline_s=30.0)
    model = DistributedModelParallel(model, device=device_here(), plan=ShardingPlan(plan), sharders=[sharder])
    dtype = torch.float16 if options.get("data_type") == "FP16" else torch.float32
    whole = {
        f"sparse.{module}.embedding_bags.{name}.weight": weight
        for name, weight in full_weights(dtype).items()
        for module in ("ebc", "weighted")
    }
    model.load_state_dict({name: whole.get(name, value) for name, value in model.state_dict().items()})
    return model


def optimizers_of(model: Any) -> Any:
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.SGD(params, lr=0.2)
    )
    return CombinedOptimizer([model.fused_optimizer, dense])


def tables_of(model: Any) -> dict[str, torch.Tensor]:
    """Return this rank's tables and optimizer states."""
    values = {name: value for name, value in model.state_dict().items() if "embedding_bags" in name}
    for states in model.fused_optimizer.state_dict()["state"].values():
        values |= states
    found = {}
    for name, value in values.items():
        own = [value] if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards") else []
        for tensor in own or [shard.tensor for shard in value.local_shards()]:
            if tensor.numel():  # TorchRec has an empty state for SGD
                found[name] = tensor.detach().cpu().clone()
    return found


def trains(group: dist.ProcessGroup, by: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train. options: arguments of `sharded`, and `divides`: False to call `set_gradient_division(False)`."""
    from torchrec.distributed.comm_ops import set_gradient_division

    options = dict(options)
    set_gradient_division(options.pop("divides", True))
    try:
        return _trained(group, by, options)
    finally:
        set_gradient_division(True)


def _trained(group: dist.ProcessGroup, by: str, options: dict[str, Any]) -> dict[str, Any]:
    model = sharded(group, by, **options)
    optimizer = optimizers_of(model)
    losses, rates = [], []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for batch in batches(group.rank(), is_weighted=options.get("is_weighted", False)):
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss))
        rates.append({round(one["lr"], 6) for one in optimizer.param_groups})  # TorchRec has a group for each kernel
    names = {
        "state": [(name, type(value).__name__, tuple(value.shape)) for name, value in model.state_dict().items()],
        "optimizer": {
            name: {key: tuple(value.shape) for key, value in states.items()}
            for name, states in model.fused_optimizer.state_dict()["state"].items()
        },
        "parameters": [(name, tuple(p.shape)) for name, p in model.named_parameters()],
        "keys": list(
            model.module.sparse.ebc(next(batches(0, 1, options.get("is_weighted", False))).sparse_features).keys()
        ),
    }
    return {"losses": losses, "rates": rates, "names": names, "tables": tables_of(model)}


def bytes_sent(ebc: Any) -> list[int]:
    """Return a list that grows when `ebc`, a sharded collection of weft, sends the ids of a batch. The new element is
    the number of bytes that the batch keeps in flight.
    """
    distribution, found = ebc._parts._input_dist, list[int]()
    send = distribution.send

    def recorded(begun: Any) -> Any:
        sent = send(begun)
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in sent.tensors))
        return sent

    distribution.send = recorded
    return found


def pipelines(
    group: dist.ProcessGroup, by: str, pipelined: bool, has_two: bool = False, kinds: dict[str, str] | None = None
) -> list[float]:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    model = sharded(group, by, optimizer=ADAGRAD, has_two=has_two, kinds=kinds)
    optimizer, losses = optimizers_of(model), []
    data = batches(group.rank(), 6, has_two=has_two)
    if not pipelined:
        for batch in data:
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses
    pipeline = TrainPipelineSparseDist(model, optimizer, device_here(), execute_all_batches=True)
    sent = bytes_sent(model.module.sparse.ebc) if by == "weft" else []
    while True:
        try:
            losses.append(float(pipeline.progress(data)))
        except StopIteration:
            break
        if by == "weft":
            steps, is_ahead = len(losses), len(losses) < 6
            assert len(sent) == steps + is_ahead, f"ids of {len(sent)} batches were sent in {steps} steps"
            ahead, kept = sent[-1] * is_ahead, model.module.sparse.ebc.weft_module.memory().in_flight
            # On GPUs the executor also keeps the last call's input.
            is_counted = kept >= ahead if device_here().type == "cuda" else kept == ahead
            assert is_counted, f"{kept} bytes are in flight after {steps} steps, {ahead} of the next batch"
    assert all(module.is_pipelined for module in model.module.sparse.children())
    return losses


class Unpooled(nn.Module):
    def __init__(self, ec: Any) -> None:
        super().__init__()
        self.ec = ec

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.ec(batch.sparse_features)
        losses = [
            (rows[key].values() - 0.1 * number).square().mean() for number, key in enumerate(("u", "friend", "i"))
        ]
        return losses[0] + losses[1] + losses[2], rows["i"].lengths()


def unpooled_loop(
    group: dist.ProcessGroup, by: str, kind: str, kernel: str = "fused", pipelined: bool = False
) -> dict[str, Any]:
    """Train an EmbeddingCollection. Return losses, names, and this rank's tables and states."""
    import torchrec
    from torchrec.distributed import collective_utils
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    import weft.torchrec

    collective_utils._INITIALIZED = False
    configs = [
        EmbeddingConfig(num_embeddings=30, embedding_dim=8, name="users", feature_names=["u", "friend"]),
        EmbeddingConfig(num_embeddings=21, embedding_dim=8, name="films", feature_names=["i"]),
    ]
    model = Unpooled(EmbeddingCollection(tables=configs, device=torch.device("meta")))
    if kernel == "fused":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, model.ec.parameters(), {"lr": 0.1})
    world, stock = group.size(), EmbeddingCollectionSharder()
    of_tables = {c.name: _sharding(kind, place % world, world, kernel) for place, c in enumerate(configs)}
    plan = construct_module_sharding_plan(
        model.ec, of_tables, sharder=stock, local_size=world, world_size=world, device_type=device_here().type
    )
    sharder = stock if by == "torchrec" else weft.torchrec.EmbeddingCollectionSharder(deadline_s=30.0)
    sharded_model = DistributedModelParallel(
        model, device=device_here(), plan=ShardingPlan({"ec": plan}), sharders=[sharder], init_data_parallel=False
    )
    generator = torch.Generator().manual_seed(4)
    whole = {f"ec.embeddings.{c.name}.weight": torch.randn(c.num_embeddings, 8, generator=generator) for c in configs}
    sharded_model.load_state_dict(dict(whole))
    has_gradients = kernel == "dense" or kind == "data_parallel"
    dense = [p for p in sharded_model.parameters() if p.numel()] if has_gradients else []
    optimizer = torch.optim.SGD([*dense, torch.zeros(1, requires_grad=True)], lr=0.3)
    losses: list[float] = []
    lengths: list[Any] = []
    pipeline = TrainPipelineSparseDist(sharded_model, optimizer, device_here()) if pipelined else None
    data = batches(group.rank())
    for _ in range(STEPS):
        if pipeline is not None:
            lengths.append(pipeline.progress(data).tolist())
            continue
        loss, of_bags = sharded_model(next(data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        lengths.append(of_bags.tolist())
    names = [(name, type(value).__name__, tuple(value.shape)) for name, value in sharded_model.state_dict().items()]
    found = {}
    for name, value in sharded_model.state_dict().items():
        if kind == "data_parallel":
            found[name] = value.detach().cpu().clone()
            continue
        found |= {f"{name} {s.metadata.shard_offsets}": s.tensor.detach().cpu().clone() for s in value.local_shards()}
    for states in sharded_model.fused_optimizer.state_dict()["state"].values():
        for name, value in states.items():
            found |= {f"{name} {s.metadata.shard_offsets}": s.tensor.cpu().clone() for s in value.local_shards()}
    return {"losses": losses, "lengths": lengths, "names": names, "tables": found}
