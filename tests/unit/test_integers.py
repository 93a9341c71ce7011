"""Public arguments that are whole numbers: integers of numpy and tensors with one integer are allowed. Other types are refused
with the value, its type and the fix.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft.arguments import checked_count, checked_deadline
from weft.builders import described
from weft.builders.output_map.map import OutputMap
from weft.builders.problems.all_gather_matmul import AllGatherMatmul
from weft.builders.problems.all_to_all_matmul import AllToAllMatmul
from weft.builders.problems.matmul_all_reduce import MatmulAllReduce
from weft.embedding import ColumnWise, EmbeddingBagConfig, RowWise, TableWise, place_tables
from weft.embedding.options import EmbeddingOptions
from weft.nn.making import checked_input_options

META = "=tensor(..., device='meta', size=(), dtype=torch.int64) has no value that can be read (Tensor.item() cannot be called on"
TABLE = EmbeddingBagConfig(8, 4, "t", ("f",))
PLACES: dict[str, Callable[[Any], Any]] = {
    "max_rows": lambda n: checked_count("max_rows", n),
    "max_ids": lambda n: checked_input_options("local_batch", False, n)[0],
    "batch_size": lambda n: checked_input_options("local_batch", False, 9, n)[1],
    "slice_size": lambda n: EmbeddingOptions(slice_size=n).slice_size,
    "outputs": lambda n: EmbeddingOptions(outputs=n).outputs,
    "num_embeddings": lambda n: EmbeddingBagConfig(n, 4, "t", ("f",)).num_embeddings,
    "embedding_dim": lambda n: EmbeddingBagConfig(8, n, "t", ("f",)).embedding_dim,
    "rank": lambda n: TableWise(n).rank,
    "ranks[0]": lambda n: RowWise((n,)).ranks[0],  # type: ignore[index]
    "ranks[1]": lambda n: ColumnWise((0, n)).ranks[1],
    "columns[0]": lambda n: ColumnWise((0, 1), (n, 1)).columns[0],  # type: ignore[index]
    "world_size": lambda n: place_tables([TABLE], n).world_size,
    "placement of table 't'": lambda n: place_tables([TABLE], 4, placement=[n]).rank_of_table[0],
    "rank_of_table[0]": lambda n: weft.EmbeddingSharding((TABLE,), (n,), 4).rank_of_table[0],
    "seed": lambda n: weft.SGD(lr=0.1, seed=n).seed,
    "m": lambda n: MatmulAllReduce(2, n, 4, 4, "fp32").m,
    "n[0]": lambda n: AllGatherMatmul(2, (4, 4), (n,), 4, "fp32").n[0],
    "k": lambda n: described("matmul_all_gather", m=4, n=4, k=n, ranks=2).k,  # type: ignore[attr-defined]
    "experts": lambda n: AllToAllMatmul(2, n, (6, 6), 4, 4, "fp32", 6).experts,
    "rows": lambda n: OutputMap(n, 4).rows,
    "chunks": lambda n: OutputMap(4, n).chunks,
    "chunk": lambda n: OutputMap(4, 4).local(n).entries[0].chunk,
    "chunk 0: to": lambda n: OutputMap(4, 4).dma_map(0, to=n).entries[0].to,
    "chunk 0: after": lambda n: OutputMap(4, 4).dma_map(0, to=1, after=n).entries[0].after,
}


@pytest.mark.parametrize("name", PLACES)
def test_whole_numbers_of_other_libraries(name: str) -> None:
    for given in (3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)):
        number = PLACES[name](given)
        assert (type(number), number) == (int, 3), given


@pytest.mark.parametrize("name", PLACES)
def test_numbers_that_are_not_whole(name: str) -> None:
    refused: list[tuple[Any, str]] = [
        (3.0, "=3.0 is a float: "), (np.float32(3), "=np.float32(3.0) is a float32: "), (True, "=True is a bool: "),
        (torch.tensor(3.0), "=tensor(3.) is a Tensor: "), (torch.tensor(True), "=tensor(True) is a Tensor: "),
        (np.bool_(True), "=np.True_ is a bool: "), ("3", "='3' is a str: "), (3j, "=3j is a complex: "),
        (Decimal(3), "=Decimal('3') is a Decimal: "), (Fraction(3), "=Fraction(3, 1) is a Fraction: "),
        (float("inf"), "=inf is a float: "),
        (np.timedelta64(3), "=np.timedelta64(3) is a timedelta64: "), (np.array([3]), "=array([3]) is a ndarray: "),
        (torch.tensor([3, 4]), "=tensor([3, 4]) is a Tensor: "), (torch.tensor(3, device="meta"), META),
    ]  # fmt: skip
    for given, text in refused:
        with pytest.raises(ValueError, match=r" is an? | has no value ") as error:
            PLACES[name](given)
        assert f"{name}{text}" in str(error.value), given


@pytest.mark.parametrize("name", ["max_ids", "batch_size", "slice_size", "outputs", "num_embeddings", "world_size"])
def test_numbers_below_one(name: str) -> None:
    for given in (0, -1, np.int64(-5)):
        with pytest.raises(ValueError, match=rf"{name}={int(given)} must be (at least 1|between 1 and)"):
            PLACES[name](given)


def test_deadlines() -> None:
    assert [checked_deadline(given) for given in (np.float32(2), np.int64(2), 2)] == [2.0] * 3
    for given, text in (
        (torch.tensor(2.0), "=tensor(2.) is a Tensor"),
        ("2", "='2' is a str"),
        (True, "=True is a bool"),
        (np.timedelta64(2, "s"), "=np.timedelta64(2,'s') is a timedelta64"),
    ):
        with pytest.raises(ValueError, match=r" is an? ") as error:
            checked_deadline(given)
        assert f"deadline_s{text}: pass the number of seconds" in str(error.value)
    with pytest.raises(ValueError, match="deadline_s=a number of 16610 bits must be positive and at most 1000000"):
        checked_deadline(10**5000)
