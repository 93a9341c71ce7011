"""Bad arguments of the classes and functions that describe tables, features, problems and machines: each error gives the
argument, its value or type, and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft import nn as layers
from weft.builders import AllGatherMatmul, AllToAllMatmul, MatmulReduceScatter, candidates
from weft.embedding import EmbeddingSharding, hash_ids, plan_tables
from weft.hw import load_machine
from weft.launch import Pool
from weft.plan import choose
from weft.sim import model_of, simulate

TABLE = weft.EmbeddingBagConfig(8, 4, "t", ("f",))
VALUES = torch.arange(2)
NO_TABLES = "pass a list of table configs, such as weft.EmbeddingBagConfig"
NO_MODULE = "pass a torch.nn.Module"
PROBLEM, MODEL = AllGatherMatmul(2, (64, 64), (64,), 64, "bf16"), model_of(load_machine("h200"), 2)
SERIAL = candidates(PROBLEM)[0].build()


def config(**changed: Any) -> Callable[[], Any]:
    arguments = {"num_embeddings": 8, "embedding_dim": 4, "name": "t", "feature_names": ("f",)}
    return lambda: weft.EmbeddingBagConfig(**{**arguments, **changed})


def ids(**changed: Any) -> Callable[[], Any]:
    arguments = {"keys": ["f"], "values": VALUES, "lengths": torch.tensor([1, 1])}
    return lambda: weft.KeyedJaggedTensor(**{**arguments, **changed})


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no features": (config(feature_names=None), "table 't': feature_names is a NoneType: pass a list with the names"),
    "an array of poolings": (config(pooling=np.array(["sum", "mean"])), "must be 'sum' or 'mean'"),
    "an array of dtypes": (config(dtype=np.array([1, 2])), "table 't': dtype=array([1, 2]) must be one of torch.float32"),
    "one table": (lambda: weft.place_tables(TABLE, 2), f"tables is an EmbeddingBagConfig: {NO_TABLES}"),
    "tables of a sharding": (lambda: EmbeddingSharding(None, (), 2), f"tables is a NoneType: {NO_TABLES}"),  # type: ignore[arg-type]
    "names as tables": (lambda: EmbeddingSharding(("t",), (0,), 2), "tables has 't', which is a str: pass weft.EmbeddingBag"),
    "kinds": (lambda: plan_tables([TABLE], 2, samples=8, kinds=None), "kinds is a NoneType: pass a list of 'table_wise'"),  # type: ignore[arg-type]
    "keys": (ids(keys=None), "keys is a NoneType: pass a list with the names of the features"),
    "a key alone": (ids(keys="f"), "keys is a str: pass a list with the names of the features"),
    "stride": (ids(stride=2.0), "stride=2.0 is a float: pass an integer, a number of samples"),
    "strides": (ids(stride=torch.tensor([1, 2])), "stride=tensor([1, 2]) is a Tensor: pass an integer"),
    "lengths of columns": (
        lambda: weft.KeyedTensor(["f"], 4, torch.ones(2, 4)),  # type: ignore[arg-type]
        "length_per_key is an int: pass a list",
    ),
    "columns": (lambda: weft.KeyedTensor(["f"], [4], np.ones((2, 4))), "values is a ndarray: pass a tensor [B, columns"),  # type: ignore[arg-type]
    "no columns": (lambda: weft.KeyedTensor(["f"], [4], torch.tensor(1.0)), "do not match values of shape ()"),
    "hashed to a part of a row": (lambda: hash_ids(VALUES, 1.5), "rows=1.5 is a float: pass an integer"),  # type: ignore[arg-type]
    "hashed list": (lambda: hash_ids([1], 3), "ids is a list: pass a torch.Tensor"),  # type: ignore[arg-type]
    "pooled without weights": (
        lambda: weft.embedding_pool(None, ids()(), [TABLE]),  # type: ignore[arg-type]
        "weights is a NoneType: pass a list",
    ),
    "pooled with options": (
        lambda: weft.embedding_pool([torch.ones(8, 4)], ids()(), [TABLE], bounds_check=[]),  # type: ignore[arg-type]
        "bounds_check=[] must be one of 'fatal'",
    ),
    "rows of a problem": (lambda: AllGatherMatmul(2, 4, (4,), 4, "fp32"), "rows=4 is an int: pass a list of sizes"),  # type: ignore[arg-type]
    "weights of a problem": (lambda: AllGatherMatmul(2, (4, 4), 4, 4, "fp32"), "n=4 is an int: pass a list of sizes"),  # type: ignore[arg-type]
    "a list of sizes": (lambda: MatmulReduceScatter(2, [4], 4, 4, "fp32"), "m=[4] is a list: pass a size, an integer"),  # type: ignore[arg-type]
    "rows of experts": (lambda: AllToAllMatmul(2, 2, 6, 4, 4, "fp32", 6), "rows=6 is an int: pass a list of sizes"),  # type: ignore[arg-type]
    "rows of a map": (lambda: weft.OutputMap([8], 4), "rows=[8] is a list: pass a size, an integer"),  # type: ignore[arg-type]
    "order of a map": (lambda: weft.OutputMap(8, 4, order=3), "order=3 is an int: pass a list with the position"),  # type: ignore[arg-type]
    "a machine": (lambda: load_machine(None), "name=None is a NoneType: pass one of a100, "),  # type: ignore[arg-type]
    "GPUs of a model": (lambda: model_of(load_machine("h200"), 2.5), "world_size=2.5 is a float: pass the number of GPUs"),  # type: ignore[arg-type]
    "a schedule's name": (lambda: choose(PROBLEM, MODEL, pinned=3), "schedule=3 is an int: pass the name of a schedule"),  # type: ignore[arg-type]
    "a mode to plan": (lambda: choose(PROBLEM, MODEL, mode=[]), "mode=[] is unknown: use one of queued, graph, single"),  # type: ignore[arg-type]
    "a problem to plan": (lambda: choose("all_gather_matmul", MODEL), "problem is a str: pass a problem of weft.builders"),  # type: ignore[arg-type]
    "a model to plan": (lambda: choose(PROBLEM, "h200"), "model is a str: pass weft.sim.model_of(...)"),  # type: ignore[arg-type]
    "times to plan": (lambda: choose(PROBLEM, MODEL, measured=3), "measured is an int: pass a dict, {candidate: time"),  # type: ignore[arg-type]
    "a mode to simulate": (lambda: simulate(SERIAL, MODEL, mode="x"), "mode='x' is unknown: use one of queued, graph"),  # type: ignore[arg-type]
    "runs to simulate": (lambda: simulate(SERIAL, MODEL, runs=1.5), "runs=1.5 is a float: pass the number of consecutive"),  # type: ignore[arg-type]
    "delays to simulate": (lambda: simulate(SERIAL, MODEL, late_us=[0.0, math.nan]), "late_us=(0.0, nan) must have 2 times"),
    "processes": (lambda: Pool("2"), "world_size='2' is a str: pass the number of processes, an integer"),  # type: ignore[arg-type]
    "threads": (lambda: Pool(2, threads=0), "world_size=2 and threads=0 must be at least 1"),
    "backend": (lambda: Pool(2, backend=None), "backend=None is a NoneType: pass 'gloo' or 'nccl'"),  # type: ignore[arg-type]
    "a state in place of a model": (lambda: layers.local_state_dict({}, {}), f"model is a dict: {NO_MODULE}"),  # type: ignore[arg-type]
    "no state": (lambda: layers.local_state_dict(nn.Linear(2, 2), None), "whole is a NoneType: pass a state dict"),  # type: ignore[arg-type]
    "distributed": (lambda: layers.distributed_state_dict(nn.Linear(2, 2), 3), "state is an int: pass a state dict"),  # type: ignore[arg-type]
    "ignored tables": (lambda: layers.ignore_tables(None), f"model is a NoneType: {NO_MODULE}"),  # type: ignore[arg-type]
    "optimizers": (lambda: layers.FusedOptimizers({}), f"model is a dict: {NO_MODULE}"),  # type: ignore[arg-type]
    "a model's state": (lambda: layers.ModelState([]), f"model is a list: {NO_MODULE}"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_named(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert words in str(error.value)


@pytest.mark.parametrize("number", [np.float32(0.25), np.int64(2)])
def test_optimizers_accept_numbers_of_numpy(number: Any) -> None:
    made = weft.SGD(lr=number)
    assert (type(made.lr), made.lr) == (float, number)
