"""The reduction kernel under Triton's interpreter (`tests/support/interpreted.py`)."""

from __future__ import annotations

from functools import partial

import torch
from support.add_up_cases import CASES, play
from support.interpreted import play_all, wrong_in

SMALL = [name for name in CASES if name != "large"]


def test_sums() -> None:
    assert wrong_in(__file__, SMALL) == {}


if __name__ == "__main__":
    play_all({name: partial(play, name, torch.device("cpu")) for name in SMALL})
