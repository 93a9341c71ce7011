"""Test output maps on two GPUs: weft's maps and random maps, with late ranks and in graphs, and beside hand-written
schedules.

The functions that run on the ranks are shared with the CPU tests, except `captured`.
"""

from __future__ import annotations

import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from support import output_maps as maps
from support.graphs import capture
from support.on_ranks import close, device

from weft import symm
from weft.launch import Pool
from weft.runtime.executors import executor

pytestmark = gpu_ranks.MARKS
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WHOLE, ODD = (1024, 512, 256), (50, 19, 43)
"""(rows of each rank's part, n, k). With WHOLE, rows begin at multiples of 16 bytes; with ODD, not all do."""


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("sizes", [WHOLE, ODD], ids=["whole", "odd"])
def test_every_map_of_wefts(pair: Pool, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    pair.run(maps.run_library, sizes, dtype, timeout_s=200)


def test_random_maps(pair: Pool) -> None:
    pair.run(maps.run_random, WHOLE, BF16, range(12), timeout_s=100)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_they_give_the_bits_of_schedules_written_by_hand(pair: Pool, dtype: torch.dtype) -> None:
    pair.run(maps.like_the_hand_written, dtype, timeout_s=100)


def captured(group: dist.ProcessGroup, name: str) -> None:
    """Capture the schedule of a map in a CUDA graph, and replay it with fresh data."""
    one = maps.library(group.size(), WHOLE[0])[name]
    made = executor(one.schedule(*WHOLE[1:], "bf16"), symm.communicator(group, device()))
    cases = [maps.Case(group, one.collective, *WHOLE, BF16, seed) for seed in range(5)]
    first = cases[0].tensors
    made.run(first)
    torch.cuda.synchronize()
    close(first["y"], cases[0].exact, cases[0].usual)
    graph, _ = capture(lambda: made.run(first), torch.cuda.Stream())
    for case in cases[1:]:
        first["x"].copy_(case.tensors["x"])
        first["w"].copy_(case.tensors["w"])
        first["y"].fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        close(first["y"], case.exact, case.usual)
    made.check()
    made.close()


@pytest.mark.parametrize("name", maps.library(2, WHOLE[0]))
def test_they_are_captured_and_replayed(pair: Pool, name: str) -> None:
    pair.run(captured, name, timeout_s=60)
