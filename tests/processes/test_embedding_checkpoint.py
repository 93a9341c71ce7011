"""Checkpoints of embedding tables by `torch.distributed.checkpoint`, and the memory of a module.

1, 2 and 3 ranks with other placements load a checkpoint of 2 ranks, and continue like the ranks that saved it.
Checkpoints that do not match are refused, and nothing is written.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.embedding_checkpoint import (
    ADAGRAD,
    ADAM,
    KEYS,
    MOMENTUM,
    Model,
    joined,
    loads,
    saves,
    state_of,
    tables,
    values,
)
from support.on_ranks import error_of
from torch import nn

import weft
from weft.embedding import KeyedJaggedTensor
from weft.launch import Pool


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        (ADAM, torch.float32),
        (replace(ADAGRAD, rounding="stochastic", seed=5), torch.float16),
        (weft.SGD(lr=0.1, rounding="stochastic"), torch.bfloat16),
    ],
    ids=str,
)
def test_other_ranks_and_placements_go_on(pool: Pool, tmp_path: Path, optimizer: Any, dtype: torch.dtype) -> None:
    wanted = joined(pool.run(saves, str(tmp_path), optimizer, dtype, ranks=2))
    assert {value.dtype for name, value in wanted.items() if name.endswith("momentum1")} <= {torch.float32}
    names = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert (MOMENTUM in names) == bool(optimizer.states)
    assert "model.sparse.ebc.embedding_bags.users.weight" in names
    for world, placement in ((1, [0, 0, 0]), (2, [1, 0, 1]), (3, [2, 0, 1])):
        results = pool.run(loads, str(tmp_path), optimizer, dtype, placement, ranks=world)
        found = joined([part for part, _ in results])
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), (world, placement)
        assert {lr for _, lr in results} == {0.03}


def loads_wrongly(
    group: dist.ProcessGroup, folder: str, changes: dict[str, Any], checks: bool = False
) -> tuple[str, str, bool]:
    """Load a checkpoint into a model with other tables. Return (type and text of the error, True if no table has changed).

    checks: True to check the checkpoint's files first.
    """
    model = Model(group, tables(**changes), optimizer=ADAM if "dtype" not in changes else ADAGRAD)
    before = values(model)
    try:
        planner = weft.nn.LoadPlanner(**{"folder": folder} if checks else {})
        dcp.load(state_of(model), checkpoint_id=folder, process_group=group, planner=planner)
    except BaseException as error:
        same = all(torch.equal(one, two) for one, two in zip(before.values(), values(model).values(), strict=True))
        return type(error).__name__, str(error), same
    return "nothing", "", False


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": 31}, r"ebc.embedding_bags.users.weight has shape \[30, 8\] in the checkpoint and \[31, 8\] here"),
        ({"dtype": torch.float16}, "users.weight is torch.float32 in the checkpoint and torch.float16 here"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(pool: Pool, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    pool.run(saves, str(tmp_path), ADAM, torch.float32, ranks=2)
    for kind, text, same in pool.run(loads_wrongly, str(tmp_path), changes, ranks=3):
        assert kind == "CheckpointException"
        assert re.search(said, text), text
        assert same


@pytest.mark.parametrize("damage", ["bit", "byte of the archive", "cut", "missing"])
def test_a_damaged_checkpoint_is_refused_before_anything_is_written(pool: Pool, tmp_path: Path, damage: str) -> None:
    pool.run(saves, str(tmp_path), ADAM, torch.float32, ranks=2)
    assert pool.run(loads_wrongly, str(tmp_path), {}, True, ranks=3) == [("nothing", "", False)] * 3
    stored: Any = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    (part,) = [stored[index] for index in stored if index.fqn == "model.sparse.ebc.embedding_bags.users.weight"]
    file = tmp_path / part.relative_path
    data = bytearray(file.read_bytes())
    archive = bytes(data[part.offset : part.offset + part.length])
    users = torch.load(io.BytesIO(archive), weights_only=True).numpy().tobytes()
    if damage == "bit":
        data[part.offset + archive.index(users) + len(users) // 2] ^= 1
    elif damage == "byte of the archive":
        data[part.offset + archive.rindex(b"PK")] ^= 0xFF
    file.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    if damage == "missing":
        file.unlink()
    for kind, text, same in pool.run(loads_wrongly, str(tmp_path), {}, True, ranks=3):
        assert kind == "CheckpointException"
        assert file.name in text, text
        assert damage != "bit" or ("users.weight in" in text and "has another CRC-32" in text)
        assert same


@pytest.mark.parametrize("offset", [4, -4, 8], ids="{:+d}".format)
def test_chunks_that_do_not_cover_a_tensor_are_refused_before_anything_is_written(
    pool: Pool, tmp_path: Path, offset: int
) -> None:
    pool.run(saves, str(tmp_path), ADAM, torch.float32, ranks=2)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    stored: Any = metadata.state_dict_metadata["model.sparse.ebc.embedding_bags.users.weight"]
    stored.chunks[0] = replace(stored.chunks[0], offsets=torch.Size([0, offset]))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for kind, text, same in pool.run(loads_wrongly, str(tmp_path), {}, True, ranks=3):
        assert kind == "CheckpointException"
        assert "the chunks of model.sparse.ebc.embedding_bags.users.weight do not cover it exactly" in text, text
        assert same


def loads_another(group: dist.ProcessGroup, folders: list[str]) -> tuple[str, str, bool]:
    return loads_wrongly(group, folders[group.rank()], {})


def test_ranks_that_load_different_checkpoints_are_refused(pool: Pool, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("first", "second")]
    for folder in folders:
        pool.run(saves, folder, ADAM, torch.float32, ranks=2)
    for kind, text, same in pool.run(loads_another, folders, ranks=2):
        assert kind == "CheckpointException"
        assert all(folder in text for folder in folders), text
        assert same


def saves_and_loads(
    group: dist.ProcessGroup, folder: str, pairs: list[tuple[Any, Any]], written_by: str
) -> list[tuple[str, bool]]:
    """Save the tables' optimizer and load it into another, for each pair. Return (error, True if nothing was loaded).

    written_by: "torchrec" saves only tables and states. "an earlier weft" saves no description of the optimizer.
    """
    found = []
    for number, (one, two) in enumerate(pairs):
        state = {"tables": weft.nn.FusedOptimizers(Model(group, tables(), optimizer=one)).state_dict()}
        if written_by == "torchrec":
            del state["tables"]["param_groups"]
        elif written_by == "an earlier weft":
            del state["tables"]["param_groups"]["sparse.ebc"]["optimizer"]
        dcp.save(state, checkpoint_id=f"{folder}/{number}", process_group=group)
        model = Model(group, tables(), optimizer=two)
        for states in weft.nn.FusedOptimizers(model).state_dict()["state"].values():
            for value in states.values():
                value.fill_(3)
        into = {"tables": weft.nn.FusedOptimizers(model)}
        before, text = values(model), ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the missing learning rate
                dcp.load(into, checkpoint_id=f"{folder}/{number}", process_group=group, planner=weft.nn.LoadPlanner())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        after = values(model)
        found.append((text, all(torch.equal(value, after[name]) for name, value in before.items())))
    return found


PAIRS = [
    (weft.Adam(lr=0.1), weft.Adagrad(lr=0.1), r"optimizer is Adam\(.*\) in the checkpoint and Adagrad\(.*\) here"),
    (
        weft.Adam(lr=0.1),
        weft.SGD(lr=0.1),
        "optimizer is Adam.* here; .*items.weight.items.momentum1 is in the checkpoint",
    ),
    (weft.Adam(lr=0.1), weft.Adam(lr=0.1, beta1=0.5), r"beta1=0.9.* in the checkpoint and .*beta1=0.5"),
    (
        weft.SGD(lr=0.1),
        weft.SGD(lr=0.1, weight_decay=0.5),
        r"weight_decay=0.0\) in the checkpoint and .*weight_decay=0.5",
    ),
    (weft.PartialRowwiseAdam(lr=0.1), weft.Adagrad(lr=0.1), r"optimizer is PartialRowwiseAdam\(.*and Adagrad\("),
]


def test_the_states_of_another_optimizer_are_refused(pool: Pool, tmp_path: Path) -> None:
    pairs = [(one, two) for one, two, _ in PAIRS]
    for found in pool.run(saves_and_loads, str(tmp_path), pairs, "weft", ranks=2):
        for (text, same), (_, _, said) in zip(found, PAIRS, strict=True):
            assert text.startswith("CheckpointException"), text
            assert re.search(f"tables.param_groups.sparse.ebc.{said}", text) or re.search(said, text), text
            assert same


@pytest.mark.parametrize("written_by", ["torchrec", "an earlier weft"])
def test_without_a_description_states_are_compared(pool: Pool, tmp_path: Path, written_by: str) -> None:
    adam, adagrad, sgd = (one(lr=0.1) for one in (weft.Adam, weft.Adagrad, weft.SGD))
    pairs = [(adam, weft.Adam(lr=0.1, beta1=0.5)), (sgd, sgd), (adam, adagrad), (adam, sgd), (adagrad, adam)]
    for found in pool.run(saves_and_loads, str(tmp_path), pairs, written_by, ranks=2):
        assert [text for text, _ in found[:2]] == ["", ""]
        assert not found[0][1]  # the states were loaded
        for (text, same), said in zip(
            found[2:],
            (
                "exp_avg_sq is in the checkpoint",
                "momentum1 is in the checkpoint",
                "exp_avg_sq is not in the checkpoint",
            ),
            strict=True,
        ):
            assert text.startswith("CheckpointException"), text
            assert said in text
            assert same


def refuses(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    model = Model(group, tables(), optimizer=ADAGRAD)
    optimizers = weft.nn.FusedOptimizers(model)
    before, whole = values(model), copy.deepcopy(optimizers.state_dict())
    path = next(iter(whole["state"]), None)
    errors = [
        error_of(lambda: weft.nn.FusedOptimizers(nn.Linear(2, 2))),
        error_of(lambda: optimizers.load_state_dict({})),
        error_of(lambda: optimizers.load_state_dict(whole | {"param_groups": {}})),
    ]
    if path is not None:
        wrong = copy.deepcopy(whole)
        name, state = next(iter(wrong["state"][path].items()))
        wrong["state"][path][name] = state.double() + 1
        errors.append(error_of(lambda: optimizers.load_state_dict(wrong)))
        more = copy.deepcopy(whole)
        more["state"][path]["users.exp_avg_sq"] = torch.zeros(1)
        errors.append(error_of(lambda: optimizers.load_state_dict(more)))
        other = copy.deepcopy(whole)
        other["param_groups"]["sparse.ebc"]["optimizer"] = {"Adagrad(eps=1.0)": torch.zeros(())}
        errors.append(error_of(lambda: optimizers.load_state_dict(other)))
    assert all(torch.equal(one, two) for one, two in zip(before.values(), values(model).values(), strict=True))
    return errors


def test_states_that_do_not_fit_are_refused_by_name(pool: Pool) -> None:
    for errors in pool.run(refuses, ranks=2):
        assert [kind for kind, _ in errors] == ["ValueError"] * len(errors)
        texts = (
            "no module",
            "no state and no",
            "param_groups",
            "float64",
            "exp_avg_sq",
            "Adagrad(eps=1.0) in the state dict",
        )
        for (_, text), said in zip(errors, texts, strict=False):
            assert said in text


def without_numbers(group: dist.ProcessGroup, folder: str) -> tuple[float, list[str]]:
    model = Model(group, tables(), optimizer=ADAGRAD)
    state = {"model": model.state_dict(), "tables": {"state": weft.nn.FusedOptimizers(model).state_dict()["state"]}}
    dcp.save(state, checkpoint_id=folder, process_group=group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load(state_of(model), checkpoint_id=folder, process_group=group, planner=weft.nn.LoadPlanner())
    optimizer = model.ebc.fused_optimizer
    optimizer.set_optimizer_step(7)
    assert int(weft.nn.FusedOptimizers(model).state_dict()["param_groups"]["sparse.ebc"]["step"]) == 7
    error_of(lambda: optimizer.set_optimizer_step(-1))
    return optimizer.param_groups[0]["lr"], [str(one.message) for one in caught]


def test_numbers_that_a_checkpoint_lacks_are_kept(pool: Pool, tmp_path: Path) -> None:
    for lr, said in pool.run(without_numbers, str(tmp_path), ranks=2):
        assert lr == pytest.approx(0.1)
        assert any("tables.param_groups.sparse.ebc.lr" in text for text in said)


def memory(group: dist.ProcessGroup) -> list[Any]:
    # Modules with equal arguments share buffers, so no other test may pass these arguments.
    model = Model(group, tables(), optimizer=ADAM, placement=[0, 1, 1], bounds_check="fatal")
    ebc = model.ebc
    first = ebc.memory()
    features = KeyedJaggedTensor(KEYS, torch.arange(9), lengths=torch.ones(9, dtype=torch.int64))
    pooled = ebc(features).values()
    waiting = ebc.memory()
    with ebc.accumulate():
        pooled.sum().backward()
        kept = ebc.memory().in_flight
    del pooled
    return [first, waiting, kept, ebc.memory()]


def test_memory_is_counted(pool: Pool) -> None:
    for rank, (first, waiting, kept, after) in enumerate(pool.run(memory, ranks=2)):
        weights = {"users": 4 * 30 * 8} if rank == 0 else {"items": 4 * 20 * 3, "pairs": 4 * 25 * 4}
        assert first.tables == weights
        assert first.states == {name: 2 * nbytes for name, nbytes in weights.items()}
        assert first.buffers == first.in_flight == first.workspace == 0
        assert first.total == 3 * sum(weights.values())
        features, columns, ids = (2, 16, 12) if rank == 0 else (1, 7, 6)
        assert waiting.in_flight >= 8 * (ids + features * 6 + 1)  # bytes of the ids and offsets of 6 samples
        assert waiting.workspace == 4 * (6 * columns + 3 * 23) + 20 * ids
        assert waiting.buffers > 0
        assert kept >= waiting.in_flight + 4 * 6 * columns
        assert after.in_flight == 0
        assert "users" in str(first) or rank == 1
