"""Test checkpoints of embedding tables on GPUs, and `weft.torchrec` on GPUs if TorchRec is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gpu_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from support import torchrec_loops
from support.embedding_checkpoint import ADAGRAD, ADAM, Model, joined, loads, saves, step, tables

from weft.launch import Pool

pytestmark = ranks.MARKS
needs_torchrec = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None or importlib.util.find_spec("fbgemm_gpu") is None,
    reason="needs torchrec, and fbgemm-gpu or fbgemm-gpu-cpu",
)


@pytest.mark.parametrize(("optimizer", "dtype"), [(ADAM, torch.float32), (ADAGRAD, torch.float16)], ids=str)
def test_other_placements_go_on(pair: Pool, tmp_path: Path, optimizer: Any, dtype: torch.dtype) -> None:
    wanted = joined(pair.run(saves, str(tmp_path), optimizer, dtype, ranks=2, timeout_s=120))
    for placement in ([1, 0, 1], [0, 0, 0]):
        results = pair.run(loads, str(tmp_path), optimizer, dtype, placement, ranks=2, timeout_s=120)
        found = joined([part for part, _ in results])
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), placement


def memory(group: dist.ProcessGroup) -> list[Any]:
    model = Model(group, tables(), optimizer=ADAM)
    found = [model.ebc.memory()]
    for seed in range(4):
        step(model, seed, group)
        found.append(model.ebc.memory())
    return found


def test_memory_is_counted(pair: Pool) -> None:
    """After backward the executor still holds the input of the last call, because a later error may have to name a bad
    index in it.
    """
    for before, after, *later in pair.run(memory, ranks=2, timeout_s=120):
        assert before.tables == after.tables
        assert sum(after.states.values()) == 2 * sum(after.tables.values())
        assert before.in_flight == 0
        assert (
            0 < max(one.in_flight for one in later) <= 2 * after.in_flight
        )  # the input of one call, whose bags have random lengths
        assert after.workspace > 0


@needs_torchrec
@pytest.mark.parametrize("kinds", [None, {"users": "row_wise", "pairs": "column_wise"}], ids=str)
def test_torchrecs_pipeline_learns_as_a_plain_loop(pair: Pool, kinds: dict[str, str] | None) -> None:
    plain, pipelined = (
        pair.run(torchrec_loops.pipelines, "weft", how, True, kinds, ranks=2, timeout_s=120) for how in (False, True)
    )
    assert pipelined == plain
    assert [len(losses) for losses in pipelined] == [6, 6]


def by_fbgemm(group: dist.ProcessGroup) -> bool:
    import fbgemm_gpu

    return "cuda" in str(getattr(fbgemm_gpu, "__variant__", ""))


@needs_torchrec
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": torchrec_loops.ADAGRAD},
        {"kernel": "dense"},
        {"optimizer": torchrec_loops.ADAGRAD, "kinds": {"users": "row_wise"}},
    ],
    ids=str,
)
def test_a_loop_learns_as_with_torchrecs_sharder(pair: Pool, options: dict[str, Any]) -> None:
    ours = pair.run(torchrec_loops.trains, "weft", options, ranks=2, timeout_s=120)
    assert all(torch.isfinite(torch.tensor(one["losses"])).all() for one in ours)
    if not all(pair.run(by_fbgemm, ranks=2)):
        pytest.skip("FBGEMM's build here has no CUDA kernels to compare with: weft's loop ran")
    theirs = pair.run(torchrec_loops.trains, "torchrec", options, ranks=2, timeout_s=120)
    for stock, swapped in zip(theirs, ours, strict=True):
        assert swapped["names"] == stock["names"]
        assert swapped["losses"] == pytest.approx(stock["losses"], rel=1e-4)
        for name, value in stock["tables"].items():
            torch.testing.assert_close(swapped["tables"][name], value, rtol=1e-4, atol=1e-4)
