"""The CPU kernel of embedding backward has the same bits on every instruction set; tests/processes compares it with float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft import _core

_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
_DIMS, _ROWS, _BATCH = (
    (1, 7, 40, 130),
    (3, 5000, 90, 4),
    700,
)  # columns of one lane to several blocks; one table with hot rows


def updated(isa: str, rule: int, dtype: int, is_stochastic: bool) -> list[torch.Tensor]:
    """Return the tables and states after one update of random tables by random gradients."""
    generator = torch.Generator().manual_seed(rule)
    lengths = torch.randint(0, 5, (len(_DIMS) * _BATCH,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(-1, 5000, (int(offsets[-1]),), generator=generator)
    ids = torch.where(torch.rand(len(ids), generator=generator) < 0.5, ids % 3, ids)
    columns = np.cumsum((0, *_DIMS))
    slots = np.array([(t, t, columns[t], t % 2) for t in range(len(_DIMS))], dtype=np.int64)
    grad = torch.randn(_BATCH, int(columns[-1]), generator=generator).to(_DTYPES[dtype])
    grad[3, 1] = torch.inf
    tables = [torch.randn(shape, generator=generator).to(_DTYPES[dtype]) for shape in zip(_ROWS, _DIMS, strict=True)]
    states = [[torch.rand(shape, generator=generator) for shape in zip(_ROWS, _DIMS, strict=True)] for _ in range(2)]
    rows = _core.SortedRows(
        slots=slots, tables=np.array(list(zip(_ROWS, _DIMS, strict=True)), dtype=np.int64), values=ids.data_ptr(), values_bits=64,
        n_values=len(ids), offsets=offsets.data_ptr(), offsets_bits=64, per_sample_weights=0, batch=_BATCH, hash=False, n_threads=2,
    )  # fmt: skip
    memory = [
        (w.data_ptr(), a.data_ptr(), b.data_ptr(), 0, n)
        for n, (w, a, b) in enumerate(zip(tables, *states, strict=True))
    ]
    skipped = rows.update(
        memory=np.array(memory, dtype=np.int64), gradients=grad.data_ptr(), stride=grad.shape[1], gradients_dtype=dtype,
        dtype=dtype, rule=rule, sparse=False, numbers=[0.1, 0.5, 1e-8, 0.01, 0.9, 0.99, 0.1, 0.01, 2.0, 3.0, 0.7],
        is_stochastic=is_stochastic, seed=5, skip_nonfinite=True, n_threads=2, isa=isa,
    )  # fmt: skip
    return [*tables, *(state for of_tables in states for state in of_tables), torch.tensor([skipped])]


@pytest.mark.skipif(len(_core.isas()) == 1, reason="this machine has one instruction set")
@pytest.mark.parametrize("dtype", range(3))
@pytest.mark.parametrize("rule", range(1, 6))
def test_instruction_sets_agree(rule: int, dtype: int) -> None:
    best, *others = [updated(isa, rule, dtype, is_stochastic=rule == 4) for isa in _core.isas()]
    for other in others:
        for found, expected in zip(other, best, strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert best[-1] > 0  # the row of the infinite gradient
