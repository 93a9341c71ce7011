"""`weft.torchrec` inside TorchRec's own loops, on CPU processes with fbgemm-gpu-cpu and gloo.

Each step of a loop with weft's sharder is compared with the same loop with TorchRec's sharder. Then TorchRec's
pipeline, state dicts and checkpoints in both directions, and refusals.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.on_ranks import told
from support.torchrec_loops import (
    ADAGRAD,
    BATCH,
    KEYS,
    RANKS,
    TABLES,
    WIDTH,
    Model,
    batches,
    collection,
    full_weights,
    optimizers_of,
    pipelines,
    sharded,
    tables_of,
    trains,
    unpooled_loop,
)
from torch import nn

import weft
from weft.launch import Pool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None or importlib.util.find_spec("fbgemm_gpu") is None,
    reason="needs torchrec and fbgemm-gpu-cpu, which make test-torchrec installs",
)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": ADAGRAD},
        {"optimizer": {"optimizer": "SGD", "lr": 0.3}, "is_weighted": True},
        {"optimizer": {"optimizer": "Adagrad", "lr": 0.1, "eps": 1e-8}, "data_type": "FP16"},
        {},
        {"optimizer": ADAGRAD, "output": "FP16"},
        {"kernel": "dense"},
        {"optimizer": ADAGRAD, "kinds": {"users": "row_wise", "pairs": "row_wise"}},
        {"optimizer": ADAGRAD, "kinds": {"users": "column_wise"}},
        {"optimizer": ADAGRAD, "kinds": {"users": "data_parallel", "pairs": "row_wise"}, "divides": False},
        {"optimizer": ADAGRAD, "kinds": dict.fromkeys(RANKS, "data_parallel")},
    ],
    ids=str,
)
def test_a_loop_learns_as_with_torchrecs_sharder(pool: Pool, options: dict[str, Any]) -> None:
    for world in (3, 1) if "data_parallel" in options.get("kinds", {}).values() else (2, 1):
        theirs, ours = (pool.run(trains, by, options, ranks=world) for by in ("torchrec", "weft"))
        tolerance = 2e-3 if "FP16" in options.values() else 1e-5
        for stock, swapped in zip(theirs, ours, strict=True):
            assert swapped["names"] == stock["names"]
            assert swapped["losses"] == pytest.approx(stock["losses"], rel=tolerance)
            # TorchRec has no learning rate on a rank without tables. With weft, schedulers also write a rate there,
            # because ranks compare rates.
            assert all(one <= other for one, other in zip(stock["rates"], swapped["rates"], strict=True))
            assert swapped["tables"].keys() == stock["tables"].keys()
            for name, value in stock["tables"].items():
                torch.testing.assert_close(swapped["tables"][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_a_loop_without_pooling_learns_as_with_torchrecs_sharder(pool: Pool, kind: str) -> None:
    for world in (2, 1):
        theirs, ours = (pool.run(unpooled_loop, by, kind, ranks=world) for by in ("torchrec", "weft"))
        for stock, swapped in zip(theirs, ours, strict=True):
            assert swapped["names"] == stock["names"]
            assert swapped["lengths"] == stock["lengths"]
            assert swapped["losses"] == pytest.approx(stock["losses"], rel=1e-5)
            assert swapped["tables"].keys() == stock["tables"].keys()
            for name, value in stock["tables"].items():
                torch.testing.assert_close(swapped["tables"][name], value, rtol=1e-5, atol=1e-5)


def test_a_loop_without_pooling_has_gradients(pool: Pool) -> None:
    """This is not compared with TorchRec: with kernel "dense", its EmbeddingCollection corrupts memory on CPU, or pools
    rows.
    """
    for world in (1, 2, 3):
        first, *others = (
            pool.run(unpooled_loop, "weft", kind, "dense", ranks=world)
            for kind in ("table_wise", "row_wise", "data_parallel")
        )
        for found in others:
            for one, other in zip(first, found, strict=True):
                assert one["losses"][0] != one["losses"][-1]
                assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
        assert all(kind == "Tensor" for _, kind, _ in found[0]["names"])  # each rank has the whole tables


# --- pipelines and planner ---


@pytest.mark.parametrize(
    "kinds",
    [None, {"users": "row_wise", "pairs": "column_wise"}, {"users": "row_wise", "pairs": "data_parallel"}],
    ids=str,
)
@pytest.mark.parametrize("has_two", [False, True])
def test_torchrecs_pipeline_learns_the_same(pool: Pool, has_two: bool, kinds: dict[str, str] | None) -> None:
    plain, pipelined, theirs = (
        pool.run(pipelines, *how, has_two, kinds, ranks=2)
        for how in (("weft", False), ("weft", True), ("torchrec", True))
    )
    assert pipelined == plain
    assert [len(losses) for losses in pipelined] == [6, 6]
    for ours, stock in zip(pipelined, theirs, strict=True):
        assert ours == pytest.approx(stock, rel=1e-5)


def test_a_pipeline_without_pooling_learns_the_same(pool: Pool) -> None:
    plain, pipelined = (pool.run(unpooled_loop, "weft", "row_wise", "fused", how, ranks=2) for how in (False, True))
    for one, other in zip(plain, pipelined, strict=True):
        assert other["lengths"] == one["lengths"]
        assert all(torch.equal(other["tables"][name], value) for name, value in one["tables"].items())


def planned(group: dist.ProcessGroup, by: str) -> tuple[set[tuple[str, str]], float]:
    """Let TorchRec's planner place a module that is on meta, and keep its values."""
    from torchrec.distributed import collective_utils
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel

    import weft.torchrec

    collective_utils._INITIALIZED = False
    torch.manual_seed(7 + group.rank())
    sharder = EmbeddingBagCollectionSharder if by == "torchrec" else weft.torchrec.EmbeddingBagCollectionSharder
    model = DistributedModelParallel(Model(collection()), sharders=[sharder()])
    plan: Any = model.plan.get_plan_for_module("sparse.ebc")
    loss, _ = model(next(batches(group.rank(), 1)))
    loss.backward()
    bounds = [float(value.abs().max()) for name, value in tables_of(model).items() if "users.weight" in name]
    assert all(0 < bound <= (1 / 30) ** 0.5 + 0.02 for bound in bounds)
    return {(one.sharding_type, one.compute_kernel) for one in plan.values()}, float(loss)


def test_torchrecs_planner_proposes_the_same(pool: Pool) -> None:
    theirs, ours = (pool.run(planned, by, ranks=2) for by in ("torchrec", "weft"))
    for (stock, _), (kinds, loss) in zip(theirs, ours, strict=True):
        assert kinds == stock
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


def loads_wrongly(group: dist.ProcessGroup) -> list[str]:
    model = sharded(group, "weft", optimizer=ADAGRAD)
    other = sharded(group, "weft", optimizer=ADAGRAD, ranks={"users": 0, "movies": 1, "pairs": 0})
    before, key = tables_of(model), "sparse.ebc.embedding_bags.pairs.weight"
    whole = {name: torch.zeros(value.size()) for name, value in model.state_dict().items()}
    errors = [
        told(lambda: model.load_state_dict(whole | {key: torch.zeros(26, 4)})),
        told(lambda: model.load_state_dict(whole | {key: [1.0]})),
        told(lambda: model.load_state_dict(other.state_dict())),
    ]
    after = tables_of(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return errors


def test_tables_that_do_not_fit_are_refused_by_name(pool: Pool) -> None:
    for shape, other, plan in pool.run(loads_wrongly, ranks=2):
        assert "pairs.weight has shape [26, 4] but must have [25, 4]" in shape
        assert "pairs.weight is a list" in other
        assert "is sharded in another way than this module's plan" in plan


def of_nn(group: dist.ProcessGroup, placement: Any = None) -> nn.Module:
    """Return a module of weft.nn, without TorchRec."""
    tables = [weft.EmbeddingBagConfig(rows, dim, name, f, p.lower()) for rows, dim, name, f, p in TABLES]  # type: ignore[arg-type]
    ebc = weft.nn.ShardedEmbeddingBagCollection(
        tables, group=group, optimizer=weft.RowwiseAdagrad(lr=0.1, eps=1e-6), placement=placement
    )
    return nn.ModuleDict({"sparse": nn.ModuleDict({"ebc": ebc})})


def loads_into_nn(group: dist.ProcessGroup, folder: str) -> dict[str, torch.Tensor]:
    model = of_nn(group)
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


def by_columns(group: dist.ProcessGroup, writer: str, reader: str, folder: str) -> list[dict[str, torch.Tensor]]:
    """Save a model whose table "users" is divided by columns, and load it into another model. Return this rank's values
    of both.
    """
    found = []
    for does, by in ((dcp.save, writer), (dcp.load, reader)):
        model: Any
        if by == "nn":
            model = of_nn(group, {"users": weft.embedding.ColumnWise((0, 1)), "movies": 0, "pairs": 1})
            features = next(batches(group.rank(), 1)).sparse_features
            if does is dcp.save:
                model["sparse"]["ebc"](features).values().sum().backward()
            state = {"model": weft.nn.ModelState(model), "optim": weft.nn.FusedOptimizers(model)}
            does(state, checkpoint_id=folder, **({"planner": weft.nn.LoadPlanner()} if does is dcp.load else {}))
            values = weft.nn.ModelState(model).state_dict()
            for states in weft.nn.FusedOptimizers(model).state_dict()["state"].values():
                values |= states
            found.append({n: v.local_shards()[0].tensor.clone() for n, v in values.items() if "users" in n})
        else:
            model = sharded(group, by, optimizer=ADAGRAD, kinds={"users": "column_wise"})
            if does is dcp.save:
                step_of(model, group.rank())
            tables = {name: value for name, value in model.state_dict().items() if "embedding_bags" in name}
            stored = {"model": tables, "optim": model.fused_optimizer.state_dict()}
            does(stored, checkpoint_id=folder, **({"planner": weft.nn.LoadPlanner()} if does is dcp.load else {}))
            model.load_state_dict(tables, strict=False)
            model.fused_optimizer.load_state_dict(stored["optim"])
            found.append({name: value for name, value in tables_of(model).items() if "users" in name})
    return found


@pytest.mark.filterwarnings("ignore:Please use DTensor instead")
@pytest.mark.parametrize(("writer", "reader"), [("torchrec", "nn"), ("nn", "torchrec"), ("weft", "nn")])
def test_columns_load_the_others_checkpoints(pool: Pool, tmp_path: Path, writer: str, reader: str) -> None:
    for saved, loaded in pool.run(by_columns, writer, reader, str(tmp_path), ranks=2):
        assert saved.keys() == loaded.keys()
        assert saved["users.momentum1"].any()
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())


def copied_tables(group: dist.ProcessGroup, by: str, kinds: dict[str, str], folder: str, saves: bool) -> dict[str, Any]:
    """Train and save, or load. Return this rank's tables."""
    model = sharded(group, by, optimizer=ADAGRAD, kinds=kinds)
    optimizer = optimizers_of(model)
    if saves:
        step_of(model, group.rank())
        optimizer.step()
    state = {"model": model.state_dict()}
    if saves:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder, planner=weft.nn.LoadPlanner())
        model.load_state_dict(state["model"])
    return {name: value for name, value in tables_of(model).items() if name.endswith("weight")}


@pytest.mark.parametrize(("writer", "reader"), [("torchrec", "weft"), ("weft", "torchrec")])
def test_replicated_tables_load_the_others_checkpoints(pool: Pool, tmp_path: Path, writer: str, reader: str) -> None:
    before, after = {"users": "data_parallel"}, {"movies": "data_parallel"}
    wanted = joined(pool.run(copied_tables, writer, before, str(tmp_path), True, ranks=2))
    assert not torch.equal(wanted["sparse.ebc.embedding_bags.users.weight"], full_weights()["users"])
    for world in (3, 1):
        found = joined(pool.run(copied_tables, reader, after, str(tmp_path), False, ranks=world))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), world


# --- refusals ---


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, row_wise, table_wise
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

    copied = data_parallel()(
        ebc.embedding_bags["pairs"].weight, 1, 1, "cpu", weft.torchrec.EmbeddingBagCollectionSharder()
    )
    lacking = plan_with()
    del lacking["pairs"]
    by_rows = construct_module_sharding_plan(
        ebc, {name: row_wise(compute_kernel="fused") for name in RANKS}, local_size=group.size(), world_size=group.size(),
        device_type="cpu",
    )  # fmt: skip
    module, cut = shard(plan_with()), shard(by_rows)
    few = KeyedJaggedTensor(["u"], torch.zeros(2, dtype=torch.int64), lengths=torch.ones(2, dtype=torch.int64))
    strided = KeyedJaggedTensor(
        ["i", "u", "friend"], torch.arange(6), lengths=torch.ones(6, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2], [3]],
    )  # fmt: skip
    calls = {
        "not supported for data_parallel": lambda: shard(plan_with(sharding_type="data_parallel", ranks=[0, 1])),
        "must be all ranks": lambda: shard(dict(plan_with(), pairs=copied)),
        "table_row_wise": lambda: shard(plan_with(sharding_type="table_row_wise")),
        "fused_uvm_caching": lambda: shard(plan_with(compute_kernel="fused_uvm_caching")),
        "ssd_virtual_table": lambda: shard(plan_with(compute_kernel="ssd_virtual_table")),
        "plan the same kernel": lambda: shard(plan_with(compute_kernel="dense")),
        "pairs' is not in the plan": lambda: shard(lacking),
        "names rank 5": lambda: shard(plan_with(ranks=[5])),
        "exactly one rank from 0 to": lambda: shard(plan_with(ranks=[0, 1])),
        "LAMB is not supported": lambda: shard(plan_with(), optimizer=EmbOptimType.LAMB),
        "gradient_clipping=True": lambda: shard(plan_with(), gradient_clipping=True),
        "uvm_host_mapped": lambda: shard(plan_with(), uvm_host_mapped=True),
        "weight_decay": lambda: shard(plan_with(), weight_decay=0.1),
        "learning_rate=None is not a number": lambda: shard(plan_with(), learning_rate=None),
        "eps='small' is not a number": lambda: shard(plan_with(), optimizer=EmbOptimType.ADAM, eps="small"),
        "betas=(0.9,) must be two numbers": lambda: shard(plan_with(), optimizer=EmbOptimType.ADAM, betas=(0.9,)),
        "pass a member of EmbOptimType": lambda: shard(plan_with(), optimizer="adam"),
        "differ": lambda: shard(plan_with(bounds_check_mode=BoundsCheckMode.FATAL)),
        "friend": lambda: module(few),
        "needs feature": lambda: cut(few),
        "stride": lambda: module(strided),
        "resharding": lambda: weft.torchrec.EmbeddingBagCollectionSharder().reshard(module, {}, env),
    }
    return {said: told(call) for said, call in calls.items()}


def differs(group: dist.ProcessGroup) -> str:
    own = {**ADAGRAD, "eps": 1e-6 * (1 + group.rank())}
    return told(lambda: sharded(group, "weft", optimizer=own))


def test_ranks_with_other_optimizers_are_told(pool: Pool) -> None:
    for error in pool.run(differs, ranks=2):
        assert error.startswith("DisagreementError")
        assert "eps=1e-06" in error


def refused_on_one_rank(group: dist.ProcessGroup) -> tuple[list[str], tuple[int, ...]]:
    """Construct modules whose options or plan rank 0 refuses. Then train with a module that all ranks accept."""
    first = group.rank() == 0
    errors = [
        told(lambda: sharded(group, "weft", output="INT8" if first else "FP32")),
        told(lambda: sharded(group, "weft", kernel="key_value" if first else "fused")),
        told(lambda: unpooled_loop(group, "weft", "table_wise", "key_value" if first else "fused")),
    ]
    model = sharded(group, "weft", optimizer=ADAGRAD)
    return errors, tuple(model.module.sparse.ebc(next(batches(group.rank(), 1)).sparse_features).values().shape)


def test_a_plan_that_one_rank_refuses_is_refused_by_all(pool: Pool) -> None:
    for errors, shape in pool.run(refused_on_one_rank, ranks=2):
        for error in errors:
            assert error.startswith("RefusedError: arguments refused by rank 0: table "), error
        assert shape == (BATCH, WIDTH)


def in_orders(group: dist.ProcessGroup) -> bool:
    """Pool the same samples with keys in two orders."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    model, (batch,) = sharded(group, "weft"), batches(group.rank(), 1)
    parts = batch.sparse_features.to_dict()
    found = []
    for keys in (KEYS, KEYS[::-1]):
        features = KeyedJaggedTensor(
            keys,
            torch.cat([parts[key].values() for key in keys]),
            lengths=torch.cat([parts[key].lengths() for key in keys]),
        )
        found.append(model.module.sparse.ebc(features).values())
    return torch.equal(*found)


def test_keys_may_change_their_order(pool: Pool) -> None:
    """TorchRec keeps the order of the first batch."""
    assert all(pool.run(in_orders, ranks=2))


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
    ran = subprocess.run([*launcher, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
