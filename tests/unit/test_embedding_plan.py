"""EmbeddingPlan: how the work of a rank is cut into slices, and the text that ranks compare."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import tables_of

from weft import _core
from weft.builders.embedding_all_to_all import Unit
from weft.embedding import EmbeddingBagConfig, EmbeddingSharding
from weft.embedding.options import EmbeddingOptions
from weft.embedding.plan import EmbeddingPlan, plan_of


def plan(owners: tuple[int, ...], dims: tuple[int, ...] = (8, 3, 16, 1, 5), **options: Any) -> EmbeddingPlan:
    return plan_of(EmbeddingSharding(tables_of(dims[: len(owners)]), owners, 3), EmbeddingOptions(**options))


def test_slices_of_adjacent_columns() -> None:
    p = plan((0, 0, 0, 1, 0), slice_size=2)
    assert p.slices(0) == (Unit(0, 2, 0, 11), Unit(2, 3, 11, 16), Unit(3, 4, 28, 5))
    assert p.slices(1) == (Unit(0, 1, 27, 1),)
    assert p.slices(2) == ()
    assert p.slices_per_sample == (3, 1, 0)


def test_a_table_with_several_features_is_several_slots() -> None:
    table = EmbeddingBagConfig(9, 4, "t", ("a", "b", "c"))
    p = plan_of(EmbeddingSharding((table,), (0,), 1), EmbeddingOptions(slice_size=2))
    assert p.slices(0) == (Unit(0, 2, 0, 8), Unit(2, 3, 8, 4))


@settings(max_examples=200)
@given(
    dims=st.lists(st.sampled_from((1, 3, 8, 64)), min_size=1, max_size=12),
    owners=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    slice_size=st.integers(1, 14),
)
def test_slices_tile_a_ranks_columns_as_the_native_kernel_does(
    dims: list[int], owners: list[int], slice_size: int
) -> None:
    sharding = EmbeddingSharding(tables_of(dims), tuple(owners[: len(dims)]), 3)
    p = plan_of(sharding, EmbeddingOptions("put", slice_size=slice_size))
    for rank in range(3):
        slots, slices = sharding.local_slots(rank), p.slices(rank)
        assert [n for unit in slices for n in range(unit.first, unit.end)] == list(range(len(slots)))
        for unit in slices:
            own = slots[unit.first : unit.end]
            assert 1 <= len(own) <= slice_size
            assert unit.column == own[0].column
            assert [s.column - unit.column for s in own] == np.cumsum([0, *(s.dim for s in own)])[:-1].tolist()
            assert unit.width == sum(s.dim for s in own)
        lines = np.array([(0, 1, s.dim, 0, s.column, 0) for s in slots], dtype=np.int64).reshape(-1, 6)
        native = _core.slice_runs(lines, slice_size)
        assert native == [(u.first, u.end - u.first, u.column, u.width) for u in slices]


OPTIONS: dict[str, Any] = {
    "transport": "put", "order": "natural", "slice_size": 5, "bounds_check": "fatal", "hash": True, "outputs": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_compared(name: str) -> None:
    one, other = plan((0, 1)), plan((0, 1), **{name: OPTIONS[name]})
    assert one.fingerprint != other.fingerprint
    differing = [what for what in one.text if one.text[what] != other.text[what]]
    assert differing == [name]
    assert other.text[name] == str(OPTIONS[name])


def test_tables_placement_and_world_are_compared() -> None:
    tables = tables_of((8, 3))
    table = EmbeddingBagConfig(30, 8, "t0", ("f0",), "mean")
    fp16 = tables_of((8, 3), dtype=torch.float16)
    shardings = [
        EmbeddingSharding(tables, (0, 1), 2),
        EmbeddingSharding(tables, (1, 0), 2),
        EmbeddingSharding(tables, (0, 1), 3),
        EmbeddingSharding(tables[::-1], (0, 1), 2),
        EmbeddingSharding((table, tables[1]), (0, 1), 2),
        EmbeddingSharding(tables[:1], (0,), 2),
        EmbeddingSharding(fp16, (0, 1), 2),
    ]
    assert len({plan_of(sharding, EmbeddingOptions()).fingerprint for sharding in shardings}) == len(shardings)


@pytest.mark.slow
def test_equal_plans_have_one_fingerprint_in_every_process() -> None:
    program = (
        "from support.reference import tables_of; from weft.embedding.options import EmbeddingOptions; "
        "from weft.embedding.plan import plan_of; "
        "from weft.embedding import EmbeddingSharding; "
        "print(plan_of(EmbeddingSharding(tables_of((8, 3)), (0, 1), 3), EmbeddingOptions()).fingerprint)"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    mine = plan((0, 1)).fingerprint
    assert int(there.stdout) == mine
    assert 0 <= mine < 2**62


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transport": "pigeon"}, "transport='pigeon' must be one of 'auto', 'serial', 'direct', 'put'"),
        ({"order": ""}, "order='' must be one of 'remote_first'"),
        ({"bounds_check": "error"}, "bounds_check='error' must be one of 'fatal', 'warning', 'ignore', 'none'"),
        ({"slice_size": 0}, "slice_size=0 must be at least 1"),
        ({"outputs": 0}, "outputs=0 must be between 1 and 255"),
        ({"outputs": 256}, "outputs=256 must be between 1 and 255"),
        ({"outputs": True}, "outputs=True is a bool: pass an integer, between 1 and 255"),
        ({"slice_size": True}, "slice_size=True is a bool: pass an integer, at least 1"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan((0, 1), **options)
