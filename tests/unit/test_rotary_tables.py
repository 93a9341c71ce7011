"""Rotary tables that attention refuses. The tests of the layers use valid tables on ranks."""

from __future__ import annotations

import pytest
import torch

from weft.nn.tensor_parallel import _wrong_rotary


@pytest.mark.parametrize("shape", [(1, 4), (2, 1, 4)])
def test_a_table_of_one_position_is_refused(shape: tuple[int, ...]) -> None:
    """Such a table would be broadcast over all positions."""
    table = torch.ones(shape)
    assert f"cos of rotary has shape {shape}" in _wrong_rotary((table, table), 2, 4, 4, torch.device("cpu"))


def test_a_table_of_all_positions_is_taken() -> None:
    table = torch.ones(4, 4)
    assert _wrong_rotary((table, table), 2, 4, 4, torch.device("cpu")) == ""
