"""The hash of ids against numpy's uint64 arithmetic, for negative, large and int32 ids; and the distribution of hashed
ids.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.embedding import hash_ids


def reference(ids: np.ndarray, rows: int) -> np.ndarray:
    z = ids.astype(np.int64).view(np.uint64).copy()
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z % np.uint64(rows)).astype(np.int64)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50), st.integers(1, 2**62 - 1))
def test_any_id_and_any_number_of_rows(ids, rows):
    array = np.array(ids, dtype=np.int64)
    np.testing.assert_array_equal(hash_ids(torch.from_numpy(array), rows).numpy(), reference(array, rows))


def test_the_extremes_and_known_values():
    ids = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    for rows in (1, 2, 3, 40_000_000, 2**62 - 1):
        hashed = hash_ids(ids, rows)
        np.testing.assert_array_equal(hashed.numpy(), reference(ids.numpy(), rows))
        assert ((hashed >= 0) & (hashed < rows)).all()
    # A splitmix64 generator with seed 0 hashes the multiples of its increment. Its first output is widely published.
    assert hash_ids(torch.tensor([0x9E3779B97F4A7C15 - 2**64]), 2**61).item() == 0xE220A8397B1DCDAF % 2**61


def test_int32_ids_are_sign_extended():
    ids = torch.tensor([-5, 7, 2**31 - 1, -(2**31)], dtype=torch.int32)
    assert torch.equal(hash_ids(ids, 1000), hash_ids(ids.to(torch.int64), 1000))


def test_consecutive_ids_spread_evenly():
    counts = torch.bincount(hash_ids(torch.arange(1_000_000), 100), minlength=100)
    # Each count is binomial with mean 10000 and standard deviation 99.5. Six deviations are allowed.
    assert counts.min() > 9400
    assert counts.max() < 10600


def test_bad_arguments():
    with pytest.raises(ValueError, match="rows=0"):
        hash_ids(torch.tensor([1]), 0)
    with pytest.raises(ValueError, match=r"float32.*int64"):
        hash_ids(torch.tensor([1.0]), 5)
