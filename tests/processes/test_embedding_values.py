"""Values of tables: initial values, and values that are copied from whole tables."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import error_of, own_group, told, waits_end_after

import weft
from weft.embedding import DataParallel, EmbeddingBagConfig, RowWise
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

ROWS, DIM, BAD_RANK = 20, 4, 1


def table(name: str, **more: Any) -> weft.EmbeddingBagConfig:
    return weft.EmbeddingBagConfig(ROWS, DIM, name, [f"of {name}"], **more)


def tables() -> list[weft.EmbeddingBagConfig]:
    return [
        table("ones", init_fn=torch.nn.init.ones_),
        table("normal", init_fn=lambda weight: weight.normal_(5.0, 0.1)),  # a lambda does not pickle
        # This function returns a new tensor instead of filling the table.
        table("another", init_fn=lambda weight: torch.full_like(weight, 2.0)),
        table("between", weight_init_min=3.0, weight_init_max=4.0),
        table("above", weight_init_max=9.0),
        table("usual"),
    ]


def drawn(group: dist.ProcessGroup, placement: list[int] | None, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed if group.rank() == 0 else 1234)
    before = torch.get_rng_state()
    ebc = ShardedEmbeddingBagCollection(tables(), group=group, placement=placement)
    torch.set_rng_state(before)
    torch.randint(2**62, ())
    after = torch.rand(1)
    torch.set_rng_state(before)
    again = ShardedEmbeddingBagCollection(tables(), group=group, placement=placement, device="meta")
    assert torch.equal(torch.rand(1), after)  # the module draws one number, for any number of tables on this rank
    again.to_empty(device="cpu")
    for module in again.modules():  # like code that initialises models made on meta
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in ebc.state_dict().items())
    return {name.split(".")[1]: value for name, value in ebc.state_dict().items()}


def test_tables_start_as_configured_whatever_the_placement(pool: Pool) -> None:
    found = []
    for ranks, placement, seed in ((2, None, 7), (2, [1, 1, 0, 1, 0, 0], 7), (1, None, 7), (2, None, 8)):
        parts = pool.run(drawn, placement, seed, ranks=ranks)
        found.append({name: value for part in parts for name, value in part.items()})
    first, moved, alone, reseeded = found
    assert first.keys() == {of.name for of in tables()}
    for other in (moved, alone):
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert first["ones"].sum() == ROWS * DIM
    assert first["another"].eq(2).all()
    assert 4.9 < first["normal"].mean() < 5.1
    bound = ROWS**-0.5
    for name, low, high in (("between", 3, 4), ("above", -bound, 9), ("usual", -bound, bound)):
        assert low <= first[name].min() < first[name].max() <= high, name
        assert first[name].std() > 0.15 * (high - low), name
        assert not torch.equal(first[name], reseeded[name]), name


def differs(group: dist.ProcessGroup, what: str) -> tuple[tuple[str, str], float]:
    here = group.rank() == BAD_RANK

    def fails(weight: torch.Tensor) -> None:
        if here:
            raise {"error": ArithmeticError, "memory": MemoryError}[what]("on purpose")

    config = {
        "bounds": lambda: table("t", weight_init_max=2.0 if here else 1.0),
        "function": lambda: table("t", init_fn=torch.nn.init.zeros_ if here else torch.nn.init.ones_),
        "shape": lambda: table("t", init_fn=lambda weight: weight[: 3 if here else ROWS] * 1.0),
    }.get(what, lambda: table("t", init_fn=fails))()
    error = error_of(lambda: ShardedEmbeddingBagCollection([config], group=group, placement=[BAD_RANK]))
    ebc = ShardedEmbeddingBagCollection([table("t", init_fn=torch.nn.init.ones_)], group=group)
    return error, sum(float(value.sum()) for value in ebc.state_dict().values())


@pytest.mark.parametrize(
    ("what", "kinds", "words"),
    [
        ("bounds", "DisagreementError", "uniform in [-0.22360679774997896, 1.0]"),
        ("function", "DisagreementError", "ones_"),
        ("error", "RefusedError", "tables could not be filled: rank 1: on purpose"),
        ("shape", "RefusedError", "rank 1: table 't': init_fn returned shape (3, 4): return (20, 4), or None"),
        ("memory", "RefusedError MemoryError", "on purpose"),
    ],
)
def test_what_one_rank_cannot_fill_all_ranks_are_told(pool: Pool, what: str, kinds: str, words: str) -> None:
    ranks = pool.run(differs, what, ranks=2)
    assert " ".join(dict.fromkeys(kind for (kind, _), _ in ranks)) == kinds
    assert all(words in text for (_, text), _ in ranks)
    assert sum(total for _, total in ranks) == ROWS * DIM


CLASSES = ["ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"]
TABLES = [EmbeddingBagConfig(6, 4, "copied", ["f"]), EmbeddingBagConfig(6, 4, "divided", ["g"])]


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {t.name: torch.randn(t.num_embeddings, t.embedding_dim, generator=generator) for t in TABLES}


def made(group: dist.ProcessGroup, name: str, deadline_s: float = 20.0) -> Any:
    placement = {"copied": DataParallel(), "divided": RowWise()}
    return getattr(weft.nn, name)(TABLES, group=group, placement=placement, deadline_s=deadline_s)


def loaded(module: Any, weights: dict[str, torch.Tensor]) -> tuple[str, str]:
    """Load `weights`. Return the error, and the state of the tables afterwards."""
    before = copy.deepcopy(module.state_dict())
    error = told(lambda: module.load_full_weights(weights))
    if all(torch.equal(before[name], now) for name, now in module.state_dict().items()):
        return error, "as before"
    full = weights_of(1)
    for part, weight in module.parts():
        rows = slice(part.row, part.row + part.rows)
        assert torch.equal(weight, full[TABLES[part.table].name][rows, part.column : part.column + part.columns])
    return error, "loaded"


def loads(group: dist.ProcessGroup, name: str) -> list[tuple[str, str]]:
    module, other = made(group, name), group.rank() == 1
    found = [loaded(module, weights_of(2) if other else weights_of(1))]
    found.append(loaded(module, {"copied": weights_of(1)["copied"]} if other else weights_of(1)))
    found.append(loaded(module, {**weights_of(1), "divided": weights_of(1)["divided"].clone()}))
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_ranks_load_equal_values_or_none(pool: Pool, name: str) -> None:
    for differ, refused, right in pool.run(loads, name, ranks=2, timeout_s=60):
        assert differ == (
            "DisagreementError: ranks 0 and 1 load different values into data-parallel table 'copied': pass the same "
            "weights on all ranks",
            "as before",
        )
        assert refused[0].startswith(
            "RefusedError: weights could not be loaded: rank 1: weights has copied, but not table 'divided' of rank 1"
        )
        assert refused[1] == "as before"
        assert right == ("nothing", "loaded")


def loads_alone(group: dist.ProcessGroup, name: str) -> tuple[str, str]:
    module = made(own_group(group), name)
    if group.rank() == 1:
        time.sleep(2.5)
        return "nothing", "as before"
    with waits_end_after(1.0):
        return loaded(module, weights_of(1))


@pytest.mark.parametrize("name", CLASSES)
def test_a_rank_that_loads_alone_raises(pool: Pool, name: str) -> None:
    (error, state), _ = pool.run(loads_alone, name, ranks=2, timeout_s=60)
    assert error.startswith("DeadlineError: ")
    assert "loading weights of data-parallel tables" in error
    assert "rank 1" in error
    assert state == "as before"
