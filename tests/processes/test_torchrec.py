"""`weft.torchrec` inside TorchRec's own loops, on CPU processes with fbgemm-gpu-cpu and gloo.

A loop with the sharder swapped, step by step beside the same loop with TorchRec's; its pipeline; state dicts and checkpoints both
ways; then what is refused.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.on_ranks import told
from torch import nn

import weft
from weft.launch import Pool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None or importlib.util.find_spec("fbgemm_gpu") is None,
    reason="needs torchrec and fbgemm-gpu-cpu, which make test-torchrec installs",
)

BATCH, STEPS = 6, 4
TABLES = (
    (30, 8, "users", ("u", "friend"), "SUM"),
    (20, 4, "movies", ("i",), "MEAN"),
    (25, 4, "pairs", ("i", "u"), "SUM"),
)
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
    """The sparse part is two levels down, as in TorchRec's DLRM."""

    def __init__(self, ebc: Any) -> None:
        super().__init__()
        self.sparse = nn.Module()
        self.sparse.ebc = ebc
        generator = torch.Generator().manual_seed(3)
        self.over = nn.Linear(sum(len(c.feature_names) * c.embedding_dim for c in ebc.embedding_bag_configs()), 1)
        with torch.no_grad():
            self.over.weight.copy_(torch.randn(self.over.weight.shape, generator=generator) / 4)
            self.over.bias.zero_()

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        prediction = self.over(self.sparse.ebc(batch.sparse_features).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(prediction, batch.labels)
        return loss, loss.detach()


def batches(rank: int, count: int = STEPS, is_weighted: bool = False) -> Iterator[Any]:
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        lengths = torch.randint(0, 5, (4 * BATCH,), generator=generator)
        ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(ids), generator=generator) if is_weighted else None
        features = KeyedJaggedTensor(["i", "unused", "u", "friend"], ids, weights, lengths=lengths)
        labels = torch.randint(0, 2, (BATCH,), generator=generator).float()
        yield Batch(torch.zeros(BATCH, 1), features, labels)


def full_weights(data_type: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, dim, generator=generator).to(data_type) for rows, dim, name, *_ in TABLES}


def sharded(
    group: dist.ProcessGroup, by: str, kernel: str = "fused", optimizer: dict[str, Any] | None = None,
    ranks: dict[str, int] = RANKS, **options: Any,
) -> Any:  # fmt: skip
    """Return a DistributedModelParallel with fixed first values. by: whose sharder, "torchrec" or "weft"."""
    import torchrec
    from torchrec.distributed import collective_utils
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    import weft.torchrec

    collective_utils._INITIALIZED = False  # once for a process, by a broadcast: workers here change their group
    ebc = collection(**options)
    if optimizer is not None:
        given = dict(optimizer)
        rule = getattr(torchrec.optim, given.pop("optimizer"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply_optimizer_in_backward(rule, ebc.parameters(), given)
    world = group.size()
    stock = EmbeddingBagCollectionSharder()
    of_tables = {
        c.name: table_wise(rank=ranks[c.name] % world, compute_kernel=kernel) for c in ebc.embedding_bag_configs()
    }
    plan = construct_module_sharding_plan(
        ebc, of_tables, sharder=stock, local_size=world, world_size=world, device_type="cpu"
    )
    sharder = stock if by == "torchrec" else weft.torchrec.EmbeddingBagCollectionSharder(deadline_s=30.0)
    model = DistributedModelParallel(
        Model(ebc), device=torch.device("cpu"), plan=ShardingPlan({"sparse.ebc": plan}), sharders=[sharder]
    )
    dtype = torch.float16 if options.get("data_type") == "FP16" else torch.float32
    whole = {f"sparse.ebc.embedding_bags.{name}.weight": weight for name, weight in full_weights(dtype).items()}
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
        for shard in value.local_shards():
            if shard.tensor.numel():  # TorchRec has an empty state for SGD
                found[name] = shard.tensor.detach().clone()
    return found


def trains(group: dist.ProcessGroup, by: str, options: dict[str, Any]) -> dict[str, Any]:
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


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": ADAGRAD},
        {"optimizer": {"optimizer": "SGD", "lr": 0.3}, "is_weighted": True},
        {"optimizer": {"optimizer": "Adagrad", "lr": 0.1, "eps": 1e-8}, "data_type": "FP16"},
        {},
        {"kernel": "dense"},
    ],
    ids=str,
)
def test_a_loop_learns_as_with_torchrecs_sharder(pool: Pool, options: dict[str, Any]) -> None:
    for world in (2, 1):
        theirs, ours = (pool.run(trains, by, options, ranks=world) for by in ("torchrec", "weft"))
        tolerance = 2e-3 if options.get("data_type") == "FP16" else 1e-5
        for stock, swapped in zip(theirs, ours, strict=True):
            assert swapped["names"] == stock["names"]
            assert swapped["losses"] == pytest.approx(stock["losses"], rel=tolerance)
            # TorchRec has no rate on a rank without tables. In weft schedulers write one there, too: ranks compare rates.
            assert all(one <= other for one, other in zip(stock["rates"], swapped["rates"], strict=True))
            assert swapped["tables"].keys() == stock["tables"].keys()
            for name, value in stock["tables"].items():
                torch.testing.assert_close(swapped["tables"][name], value, rtol=tolerance, atol=tolerance)


# --- pipelines and planner ---


def pipelines(group: dist.ProcessGroup, by: str, pipelined: bool) -> list[float]:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    model = sharded(group, by, optimizer=ADAGRAD)
    optimizer, losses = optimizers_of(model), []
    if not pipelined:
        for batch in batches(group.rank(), 6):
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"), execute_all_batches=True)
    data = batches(group.rank(), 6)
    while True:
        try:
            losses.append(float(pipeline.progress(data)))
        except StopIteration:
            break
    assert model.module.sparse.ebc.is_pipelined
    return losses


def test_torchrecs_pipeline_learns_the_same(pool: Pool) -> None:
    plain, pipelined, theirs = (
        pool.run(pipelines, *how, ranks=2) for how in (("weft", False), ("weft", True), ("torchrec", True))
    )
    assert pipelined == plain
    assert [len(losses) for losses in pipelined] == [6, 6]
    for ours, stock in zip(pipelined, theirs, strict=True):
        assert ours == pytest.approx(stock, rel=1e-5)


def planned(group: dist.ProcessGroup) -> tuple[set[tuple[str, str]], float]:
    """Let TorchRec's planner decide, and keep the values of a module on meta."""
    from torchrec.distributed.model_parallel import DistributedModelParallel

    import weft.torchrec

    torch.manual_seed(7 + group.rank())
    model = DistributedModelParallel(Model(collection()), sharders=[weft.torchrec.EmbeddingBagCollectionSharder()])
    plan: Any = model.plan.get_plan_for_module("sparse.ebc")
    loss, _ = model(next(batches(group.rank(), 1)))
    loss.backward()
    bounds = [float(value.abs().max()) for name, value in tables_of(model).items() if "users.weight" in name]
    assert all(0 < bound <= (1 / 30) ** 0.5 + 0.02 for bound in bounds)
    return {(one.sharding_type, one.compute_kernel) for one in plan.values()}, float(loss)


def test_torchrecs_planner_proposes_what_weft_has(pool: Pool) -> None:
    for kinds, loss in pool.run(planned, ranks=2):
        assert kinds == {("table_wise", "fused")}
        assert loss > 0


def made_on_meta(group: dist.ProcessGroup) -> tuple[list[str], str, list[int], float]:
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv

    import weft.torchrec

    ebc, world = collection(), group.size()
    of_tables = {name: table_wise(rank=rank, compute_kernel="fused") for name, rank in RANKS.items()}
    plan = construct_module_sharding_plan(ebc, of_tables, local_size=world, world_size=world, device_type="cpu")
    sharder = weft.torchrec.EmbeddingBagCollectionSharder({"learning_rate": 0.3}, deadline_s=30.0)
    module = sharder.shard(ebc, plan, ShardingEnv.from_process_group(group), torch.device("meta"))
    own = [shard.tensor.device.type for value in module.state_dict().values() for shard in value.local_shards()]
    (batch,) = batches(group.rank(), 1)
    error = told(lambda: module(batch.sparse_features))
    module.to_empty(device="cpu").reset_parameters()
    pooled = module(batch.sparse_features).values()
    pooled.sum().backward()
    return own, error, list(pooled.shape), module.fused_optimizer.param_groups[0]["lr"]


def test_a_module_on_meta_takes_no_memory(pool: Pool) -> None:
    for own, error, shape, lr in pool.run(made_on_meta, ranks=2):
        assert set(own) == {"meta"}
        assert error.startswith("RefusedError")
        assert "on meta" in error
        assert shape == [BATCH, WIDTH]
        assert lr == pytest.approx(0.3)


# --- checkpoints ---


def step_of(model: Any, rank: int) -> float:
    (batch,) = batches(rank, 1)
    loss, _ = model(batch)
    loss.backward()
    return float(loss.detach())


def saves(group: dist.ProcessGroup, by: str, folder: str) -> dict[str, torch.Tensor]:
    model = sharded(group, by, optimizer=ADAGRAD)
    step_of(model, group.rank())
    dcp.save({"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}, checkpoint_id=folder)
    return tables_of(model)


def loads(group: dist.ProcessGroup, by: str, folder: str) -> dict[str, torch.Tensor]:
    model = sharded(group, by, optimizer=ADAGRAD, ranks={"users": 2, "movies": 0, "pairs": 1})
    state = {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder, planner=weft.nn.LoadPlanner())
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optim"])
    return tables_of(model)


def loads_into_nn(group: dist.ProcessGroup, folder: str) -> dict[str, torch.Tensor]:
    """Load into a module of weft alone."""
    tables = [weft.EmbeddingBagConfig(rows, dim, name, f, p.lower()) for rows, dim, name, f, p in TABLES]  # type: ignore[arg-type]
    ebc = weft.nn.ShardedEmbeddingBagCollection(tables, group=group, optimizer=weft.RowwiseAdagrad(lr=0.1))
    model = nn.ModuleDict({"sparse": nn.ModuleDict({"ebc": ebc})})
    state = {"model": model, "optim": weft.nn.FusedOptimizers(model)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, planner=weft.nn.LoadPlanner())
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for states in weft.nn.FusedOptimizers(model).state_dict()["state"].values():
        found |= {name: value.clone() for name, value in states.items()}
    return found


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for part in parts for name, value in part.items()}


@pytest.mark.parametrize(("writer", "reader"), [("torchrec", "weft"), ("weft", "torchrec"), ("weft", "weft")])
def test_each_loads_the_others_checkpoints(pool: Pool, tmp_path: Path, writer: str, reader: str) -> None:
    wanted = joined(pool.run(saves, writer, str(tmp_path), ranks=2))
    assert {"users.momentum1", "sparse.ebc.embedding_bags.users.weight"} <= wanted.keys()
    for world in (3, 1):
        found = joined(pool.run(loads, reader, str(tmp_path), ranks=world))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), world
    found = joined(pool.run(loads_into_nn, str(tmp_path), ranks=2))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


# --- refusals ---


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import BoundsCheckMode, ShardingEnv
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    import weft.torchrec

    env, ebc = ShardingEnv.from_process_group(group), collection()

    def plan_with(**changes: Any) -> Any:
        of_tables = {name: table_wise(rank=0, compute_kernel="fused") for name in RANKS}
        made = construct_module_sharding_plan(
            ebc, of_tables, local_size=group.size(), world_size=group.size(), device_type="cpu"
        )
        for name, value in changes.items():
            setattr(made["pairs"], name, value)
        return made

    def shard(plan: Any, **fused_params: Any) -> Any:
        return weft.torchrec.EmbeddingBagCollectionSharder(fused_params).shard(ebc, plan, env, torch.device("cpu"))

    by_rows = construct_module_sharding_plan(
        ebc, {name: row_wise() for name in RANKS}, local_size=group.size(), world_size=group.size(), device_type="cuda"
    )
    lacking = plan_with()
    del lacking["pairs"]
    module = shard(plan_with())
    few = KeyedJaggedTensor(["u"], torch.zeros(2, dtype=torch.int64), lengths=torch.ones(2, dtype=torch.int64))
    strided = KeyedJaggedTensor(
        ["i", "u", "friend"], torch.arange(6), lengths=torch.ones(6, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2], [3]],
    )  # fmt: skip
    calls = {
        "row_wise": lambda: shard(by_rows),
        "fused_uvm_caching": lambda: shard(plan_with(compute_kernel="fused_uvm_caching")),
        "ssd_virtual_table": lambda: shard(plan_with(compute_kernel="ssd_virtual_table")),
        "one kernel": lambda: shard(plan_with(compute_kernel="dense")),
        "pairs' is not in the plan": lambda: shard(lacking),
        "one rank of 0 to": lambda: shard(plan_with(ranks=[5])),
        "LAMB is not supported": lambda: shard(plan_with(), optimizer=EmbOptimType.LAMB),
        "gradient_clipping=True": lambda: shard(plan_with(), gradient_clipping=True),
        "uvm_host_mapped": lambda: shard(plan_with(), uvm_host_mapped=True),
        "weight_decay": lambda: shard(plan_with(), weight_decay=0.1),
        "differ": lambda: shard(plan_with(bounds_check_mode=BoundsCheckMode.FATAL)),
        "friend": lambda: module(few),
        "stride": lambda: module(strided),
        "resharding": lambda: weft.torchrec.EmbeddingBagCollectionSharder().reshard(module, {}, env),
    }
    return {said: told(call) for said, call in calls.items()}


def test_what_weft_lacks_is_refused_by_name(pool: Pool) -> None:
    for errors in pool.run(refused, ranks=2):
        for said, error in errors.items():
            assert error.split(":")[0] in ("ValueError", "RefusedError", "NotImplementedError"), (said, error)
            assert said in error


def test_the_page_runs_as_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "torchrec.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (changed,) = re.findall(r"^```diff\n-.*\n\+(.*)\n```$", page, re.MULTILINE)
    assert f"\n{changed}\n" in snippet
    (tmp_path / "example.py").write_text(snippet)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run([*launcher, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
