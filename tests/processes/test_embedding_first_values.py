"""Initial values of embedding tables: bounds and functions in configs of weft and of TorchRec, for any placement.
Functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import error_of

import weft
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


def made(group: dist.ProcessGroup, placement: list[int] | None, seed: int) -> dict[str, torch.Tensor]:
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
        parts = pool.run(made, placement, seed, ranks=ranks)
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
