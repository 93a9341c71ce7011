"""The planner of embedding tables: it respects the memory limit, is close to the optimum in small cases, and reports
tables that do not fit.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft.embedding import ColumnWise, DataParallel, EmbeddingBagConfig, RowWise, TableWise, plan_tables
from weft.embedding.planner import _choices, _Costs

GIB = 1 << 30
KINDS: Any = ("table_wise", "column_wise", "row_wise", "data_parallel")


def table(name: str, rows: int, dim: int = 64, **more: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(rows, dim, name, (f"of {name}",), **more)


def test_each_table_gets_the_sharding_that_suits_it() -> None:
    tables = [table("tiny", 50), table("huge", 200_000_000), *(table(f"t{n}", 1_000_000) for n in range(4))]
    options: Any = {"samples": 4096, "rows_read": [1, 8, 4, 4, 4, 4], "memory_bytes": 40 * GIB}
    options |= {"optimizer": weft.RowwiseAdagrad(lr=0.1)}
    plan = plan_tables(tables, 4, **options)
    assert plan.placement["tiny"] == DataParallel()
    assert plan.placement["huge"] in (RowWise(), *(ColumnWise(ranks) for ranks in itertools.permutations(range(4))))
    assert max(plan.nbytes) <= 40 * GIB
    assert max(plan.seconds) < 1.5 * sum(plan.seconds) / 4
    text = str(plan)
    assert "huge" in text
    assert "does not fit: table_wise: rank" in text
    assert all(line.count("us  of 40.0 GiB") for line in text.splitlines()[-4:])
    again = plan_tables(tables, 4, **options)
    assert again == plan


def test_a_plan_can_be_trained_as_it_is() -> None:
    plan = plan_tables([table("a", 100), table("b", 90)], 2, samples=8)
    parts = weft.embedding.partition.partition_tables(list(plan.partition.tables), 2, placement=plan.placement)
    assert parts == plan.partition


@pytest.mark.parametrize("seed", range(4))
def test_small_plans_are_near_the_best_of_all(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(10, 400_000, (4,), generator=generator).tolist()
    tables = [table(f"t{n}", rows) for n, rows in enumerate(sizes)]
    read = torch.randint(1, 40, (4,), generator=generator).tolist()
    plan = plan_tables(tables, 2, samples=2048, rows_read=read)
    costs = _Costs(2, 2048, None, 3000e9, 400e9)
    per_table = [list(_choices(one, costs, float(rows), KINDS, None)) for one, rows in zip(tables, read, strict=True)]
    best = min(
        max(sum(choice.loads[rank].seconds for choice in chosen) for rank in range(2))
        for chosen in itertools.product(*per_table)
    )
    assert max(plan.seconds) <= 1.1 * best


@given(data=st.data())
def test_memory_is_kept_or_the_table_is_named(data: Any) -> None:
    world = data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(1, 10**7), min_size=1, max_size=8))
    tables = [table(f"t{n}", rows, data.draw(st.sampled_from([4, 32, 128]))) for n, rows in enumerate(sizes)]
    memory = data.draw(st.sampled_from([None, 10**8, 2 * 10**9]))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, unique=True))
    optimizer = data.draw(st.sampled_from([None, weft.Adam(lr=0.1)]))
    try:
        plan = plan_tables(tables, world, samples=64, optimizer=optimizer, memory_bytes=memory, kinds=kinds)
    except ValueError as error:
        assert "fits on no rank" in str(error)  # noqa: PT017
        return
    held = sum(t.nbytes * (3 if optimizer else 1) for t in tables)
    assert sum(plan.nbytes) >= held * (1 - 1e-9)
    if memory is not None:
        assert max(plan.nbytes) <= memory
    found = {TableWise: "table_wise", ColumnWise: "column_wise", RowWise: "row_wise", DataParallel: "data_parallel"}
    assert {found[type(one)] for one in plan.placement.values()} <= set(kinds)


def test_a_table_too_large_is_named_with_what_would_fit() -> None:
    large = table("large", 100_000_000)
    with pytest.raises(ValueError, match="fits on no rank") as caught:
        plan_tables(
            [large],
            4,
            samples=10,
            memory_bytes=10 * GIB,
            kinds=["table_wise", "data_parallel"],
            optimizer=weft.SGD(lr=1.0),
        )
    assert "table 'large' of 23.8 GiB with its optimizer states fits on no rank" in str(caught.value)
    assert "table_wise: rank 0 needs 23.8 GiB beside 0 B of other tables, and has 10.0 GiB" in str(caught.value)
    assert "column_wise or row_wise would fit: add it to kinds" in str(caught.value)
    with pytest.raises(ValueError, match=r"all ranks together have 20\.0 GiB left: use more ranks"):
        plan_tables([large], 2, samples=10, memory_bytes=10 * GIB)


def test_skewed_rows_are_dear() -> None:
    one = [table("t", 10_000_000)]
    even = plan_tables(one, 4, samples=4096, rows_read=[50], kinds=["row_wise"])
    skewed = plan_tables(
        one, 4, samples=4096, rows_read=[50], kinds=["row_wise"], row_shares={"t": (0.85, 0.05, 0.05, 0.05)}
    )
    assert max(skewed.seconds) > 2 * max(even.seconds)
    assert skewed.seconds.index(max(skewed.seconds)) == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"samples": 0}, "samples=0 must be above 0"),
        ({"kinds": ["rows"]}, "kinds has 'rows': choose from 'table_wise'"),
        ({"row_shares": {"t": (0.5, 0.6)}}, "give 2 shares that add up to 1"),
        ({"row_shares": {"x": (0.5, 0.5)}}, "name a table"),
        ({"link_gbps": float("nan")}, "link_gbps=nan must be above 0"),
    ],
)
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"above|choose|name") as caught:
        plan_tables([table("t", 100)], 2, **{"samples": 8, **options})
    assert text in str(caught.value)
