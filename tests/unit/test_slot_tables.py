"""The cached tables of features: another tensor at the same address is another table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft.embedding.check import CheckedInput
from weft.embedding.options import EmbeddingOptions
from weft.embedding.plan import EmbeddingPlan
from weft.runtime.cpu.embedding import EmbeddingAllToAllCpu
from weft.runtime.cuda.embedding_tables import KernelTables


def made_for_gpus(plan: EmbeddingPlan) -> Any:
    return KernelTables(plan, 0, torch.device("cpu"), 1)._slot_table


def made_for_cpus(plan: EmbeddingPlan) -> Any:
    executor: Any = object.__new__(EmbeddingAllToAllCpu)
    executor.plan, executor._tables = plan, {}
    executor.comm = type("Communicator", (), {"rank": 0})
    return executor._table


@pytest.mark.parametrize("made", [made_for_gpus, made_for_cpus])
def test_fewer_rows_at_the_same_address_are_another_table(made: Any) -> None:
    sharding = weft.place_tables([weft.EmbeddingBagConfig(8, 4, "t", ["f"])], 1)
    of = made(EmbeddingPlan(sharding, EmbeddingOptions("direct")))
    weight, checked = torch.zeros(8, 4), CheckedInput((0,), (2,), 2)
    for rows in (8, 4, 8):
        table = of([weight[:rows]], checked)
        assert table[0][1] == rows
        assert table is of([weight[:rows]], checked)
