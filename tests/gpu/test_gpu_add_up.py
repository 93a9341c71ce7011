"""Test the summing kernel on a GPU."""

from __future__ import annotations

import pytest
import torch
from support.add_up_cases import CASES, play

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", CASES)
def test_sums(name: str) -> None:
    play(name, torch.device("cuda", 0))
