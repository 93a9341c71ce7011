"""The CPU kernel of embedding backward has the same bits on every instruction set; tests/processes compares it with float64.
Also the numbers of optimizers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.reference import problem

import weft
from weft import _core
from weft.runtime import embedding_replicated

_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
_DIMS, _ROWS, _BATCH = (
    (1, 7, 40, 130),
    (3, 5000, 90, 4),
    700,
)  # widths from one lane to several blocks; one table has rows that occur very often
_WHOLE = (
    16,
    32,
    64,
    128,
    256,
    8,
    4,
)  # widths of whole vectors, of which some have a loop that sums and updates at once
_OPTIONS = [0.1, 0.5, 1e-8, 0.01, 0.9, 0.99, 0.1, 0.01, 2.0, 3.0, 0.7]


def updated(
    isa: str, rule: int, dtype: int, is_stochastic: bool, numbers: list[float] = _OPTIONS, dims: tuple[int, ...] = _DIMS,
    skip_nonfinite: bool = True, weighted: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the tables and states after one update of random tables by random gradients."""
    generator = torch.Generator().manual_seed(rule)
    sizes = [_ROWS[t % len(_ROWS)] for t in range(len(dims))]
    lengths = torch.randint(0, 5, (len(dims) * _BATCH,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(-1, 5000, (int(offsets[-1]),), generator=generator)
    ids = torch.where(torch.rand(len(ids), generator=generator) < 0.5, ids % 3, ids)
    weights = torch.rand(len(ids), generator=generator)
    columns = np.cumsum((0, *dims))
    slots = np.array([(t, t, columns[t], weighted and t % 2) for t in range(len(dims))], dtype=np.int64)
    grad = torch.randn(_BATCH, int(columns[-1]), generator=generator).to(_DTYPES[dtype])
    grad[3, 1] = torch.inf
    tables = [torch.randn(shape, generator=generator).to(_DTYPES[dtype]) for shape in zip(sizes, dims, strict=True)]
    states = [[torch.rand(shape, generator=generator) for shape in zip(sizes, dims, strict=True)] for _ in range(2)]
    rows = _core.SortedRows(
        slots=slots, tables=np.array(list(zip(sizes, dims, strict=True)), dtype=np.int64), values=ids.data_ptr(), values_bits=64,
        n_values=len(ids), offsets=offsets.data_ptr(), offsets_bits=64,
        per_sample_weights=weights.data_ptr() if weighted else 0, batch=_BATCH, hash=False, n_threads=2,
    )  # fmt: skip
    memory = [
        (w.data_ptr(), a.data_ptr(), b.data_ptr(), 0, n)
        for n, (w, a, b) in enumerate(zip(tables, *states, strict=True))
    ]
    skipped = rows.update(
        memory=np.array(memory, dtype=np.int64), gradients=grad.data_ptr(), stride=grad.shape[1], gradients_dtype=dtype,
        dtype=dtype, rule=rule, sparse=False, numbers=numbers, is_stochastic=is_stochastic, seed=5,
        skip_nonfinite=skip_nonfinite, n_threads=2, isa=isa,
    )  # fmt: skip
    return [*tables, *(state for of_tables in states for state in of_tables), torch.tensor([skipped])]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("dtype", range(3))
@pytest.mark.parametrize("rule", [1, 2])
def test_one_loop_for_sums_and_updates_has_the_bits_of_two(
    rule: int, dtype: int, factor: float, weighted: bool
) -> None:
    """SGD and rowwise Adagrad without options use one loop. A bound of gradients that clips nothing leads to two loops."""
    found = []
    for isa in _core.isas():
        for bound in (math.inf, 3e38):
            numbers = [0.1, factor, 1e-8, 0.0, 0.9, 0.99, 0.1, 0.01, 2.0, 3.0, bound]
            found.append(updated(isa, rule, dtype, False, numbers, _WHOLE, False, weighted)[: len(_WHOLE)])
    for tables in found[1:]:
        for one, two in zip(
            found[0][1:], tables[1:], strict=True
        ):  # the first table has an infinity, which the bound clips
            assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.skipif(len(_core.isas()) == 1, reason="this machine has one instruction set")
@pytest.mark.parametrize("dtype", range(3))
@pytest.mark.parametrize("rule", range(1, 6))
def test_instruction_sets_agree(rule: int, dtype: int) -> None:
    best, *others = [updated(isa, rule, dtype, is_stochastic=rule == 4) for isa in _core.isas()]
    for other in others:
        for found, expected in zip(other, best, strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert best[-1] > 0  # the row of the infinite gradient


@pytest.mark.parametrize("ids_of_table", [1, 60, 700, 9000])
def test_rows_are_sorted_for_any_number_of_rows(ids_of_table: int) -> None:
    """Rows are sorted by comparison, or by one to three digits. A later sort reuses the memory of an earlier sort,
    which was larger or smaller.
    """
    sizes = (1, 3, 2**13 - 1, 2**14 + 1, 3_000_000, 2**40)
    generator = torch.Generator().manual_seed(ids_of_table)
    for n_threads in (1, 2):
        ids = torch.cat([torch.randint(-2, size + 2, (ids_of_table,), generator=generator) for size in sizes])
        offsets = torch.arange(len(ids) + 1)  # one id in a bag
        slots = np.array([(t, t, t, 0) for t in range(len(sizes))], dtype=np.int64)
        grad = torch.randn(ids_of_table, len(sizes), generator=generator)
        rows = _core.SortedRows(
            slots=slots, tables=np.array([(size, 1) for size in sizes], dtype=np.int64), values=ids.data_ptr(), values_bits=64,
            n_values=len(ids), offsets=offsets.data_ptr(), offsets_bits=64, per_sample_weights=0, batch=ids_of_table, hash=False,
            n_threads=n_threads,
        )  # fmt: skip
        counts = rows.counts()
        found = [torch.full((count,), torch.nan) for count in counts]
        memory = [(0, 0, 0, one.data_ptr(), 0) for one in found]
        rows.update(
            memory=np.array(memory, dtype=np.int64), gradients=grad.data_ptr(), stride=grad.shape[1], gradients_dtype=0, dtype=0,
            rule=0, sparse=True, numbers=[0.0, 1.0, *[0.0] * 8, np.inf], is_stochastic=False, seed=0, skip_nonfinite=False,
            n_threads=n_threads,
        )  # fmt: skip
        for table, (of_table, size) in enumerate(zip(ids.split(ids_of_table), sizes, strict=True)):
            inside = (of_table >= 0) & (of_table < size)
            wanted, inverse = of_table[inside].unique(return_inverse=True)
            of_runs = torch.full((counts[table],), -1)
            rows.rows(table=table, out=of_runs.data_ptr())
            assert torch.equal(of_runs, wanted)
            sums = torch.zeros(len(wanted), dtype=torch.float64).index_add_(0, inverse, grad[inside, table].double())
            torch.testing.assert_close(found[table].double(), sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("rule", "numbers", "text"),
    [
        (weft.SGD, {"lr": -1.0}, "lr=-1.0 must not be negative"),
        (weft.SGD, {"lr": math.inf}, "lr=inf must be a finite number"),
        (weft.Adam, {"lr": 0.1, "beta1": 1.0}, "beta1=1.0 must be at least 0 and below 1"),
        (weft.Adagrad, {"lr": 0.1, "eps": True}, "eps=True must be a finite number"),
        (weft.Adagrad, {"lr": 0.1, "eps": 1e-46}, "eps=1e-46 must be between 1.4e-45 and 3.4e+38, or 0"),
        (weft.SGD, {"lr": 1e39}, "lr=1e+39 must be between 1.4e-45 and 3.4e+38, or 0"),
        (weft.SGD, {"lr": 10**400}, "must be between 1.4e-45 and 3.4e+38, or 0"),
        (weft.SGD, {"lr": 0.1, "weight_decay": 1e39}, "weight_decay=1e+39 must be between 1.4e-45 and 3.4e+38"),
        (weft.SGD, {"lr": 0.1, "nonfinite": "stop"}, "nonfinite='stop' must be one of 'propagate', 'skip', 'raise'"),
    ],
)
def test_numbers_of_optimizers_are_checked(rule: Any, numbers: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        rule(**numbers)
    assert text in str(caught.value)


def test_the_limits_of_float32_are_allowed() -> None:
    for value in (0.0, 2.0**-149, torch.finfo(torch.float32).max):
        made = weft.Adagrad(lr=value, eps=value, weight_decay=value)
        assert torch.tensor([made.lr, made.eps, made.weight_decay]).tolist() == [value] * 3


@pytest.mark.parametrize("dims", [(8, 3), (8, 8)])
def test_gradients_of_data_parallel_tables_have_version_counters_of_their_own(dims: tuple[int, ...]) -> None:
    """They share memory. With one counter, autograd would report a change of any of them as a change of all."""
    p = problem(1, dims, 5)
    flat = torch.zeros(sum(weight.numel() for weight in p.weights))
    (first, second), _ = embedding_replicated.of_tables(flat, p.sharding)
    before = second._version
    first += 1
    assert second._version == before
    assert flat.sum() == first.numel()
