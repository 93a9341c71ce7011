"""The benchmark of training embeddings: variants learn the same as float64, wrong variants are refused, and bytes equal
those computed by hand.
"""

import importlib.util
import math

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import own_group

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Ranks
from weft.bench.core.measure import Results
from weft.bench.core.options import BenchOptions
from weft.bench.core.run import ceilings_for
from weft.bench.ops.embedding_presets import FULL, Bag, EmbeddingPreset, TableShape, Zipf
from weft.bench.ops.embedding_steps import DETERMINISTIC, FBGEMM, TORCH, WEFT, TrainingStep, WeftStep
from weft.bench.ops.embedding_training import OPERATOR, StepTraffic, TrainingWorkload
from weft.launch import Pool

TINY = EmbeddingPreset("tiny", "by hand", (TableShape(10, 4, Bag(3, 3)), TableShape(20, 4, Bag(3, 3))), False, 6)
RAGGED = EmbeddingPreset(
    "ragged", "odd sizes", tuple(TableShape(50 + i, 4 + 4 * i, Bag(0, 5)) for i in range(5)), False, 21, Zipf(1.05)
)
NO_FBGEMM = pytest.mark.skipif(importlib.util.find_spec("fbgemm_gpu") is None, reason="needs fbgemm-gpu-cpu")


def _ranks(group: dist.ProcessGroup) -> Ranks:
    own = own_group(group)  # a group on which all ranks have made equally many calls
    return Ranks(own, own, torch.device("cpu"))


def _data(group: dist.ProcessGroup, preset: EmbeddingPreset) -> TrainingWorkload:
    return TrainingWorkload(preset.config(group.size(), FULL), _ranks(group), input_sets=2, with_fbgemm=False)


def test_floors_count_rows_once_or_per_occurrence() -> None:
    traffic = StepTraffic(rows=288, distinct_rows=100, rest=200, wire=96)
    assert traffic.once_ms(Ceilings(memory=500e3, link=96e6)) == pytest.approx(1.0)
    assert traffic.per_occurrence_ms(Ceilings(memory=976e3, link=96e6)) == pytest.approx(1.0)
    assert traffic.once_ms(Ceilings(memory=1e9, link=48e3)) == pytest.approx(2.0)


def _traffic(group: dist.ProcessGroup) -> StepTraffic:
    return _data(group, TINY).traffic()


def test_bytes_of_a_tiny_step_by_hand(pool: Pool) -> None:
    # Each rank owns one table: 6 samples x 3 ids, with rows of 16 bytes and 7 offsets. Half of the vectors and of the
    # gradients are sent.
    for traffic in pool.run(_traffic, ranks=2):
        states = 8 * traffic.distinct_rows / 16
        assert traffic.rows == 6 * 3 * 16
        assert traffic.rest == 2 * (18 * 8 + 7 * 8) + 18 * 16 + 2 * 6 * 16 + states
        assert traffic.wire == 2 * 3 * 16


def _measured(group: dist.ProcessGroup, variants: tuple[str, ...]) -> list[dict]:
    options = BenchOptions(OPERATOR.name, variants=variants, modes=("queued",), quick=True, scale=1.0)
    ranks = _ranks(group)
    return OPERATOR.measure(RAGGED, ranks, options, ceilings_for(options, ranks), lambda what, share: None).records


@pytest.mark.parametrize(
    "variants", [(WEFT, TORCH), pytest.param((WEFT, TORCH, FBGEMM, DETERMINISTIC), marks=NO_FBGEMM)]
)
def test_variants_learn_the_same_as_float64(pool: Pool, variants: tuple[str, ...]) -> None:
    rows = pool.run(_measured, variants, ranks=2)[0]
    assert {r["variant"] for r in rows} == set(variants)
    assert rows[-1]["variant"] == WEFT
    for row in rows:
        assert row["error"] < 1e-6
        assert 0 < row["roofline_ms"] < row["per_occurrence_ms"]
        assert set(row["weft_parts_ms"]) == {f"weft: {part}" for part in ("forward", "sort", "exchange", "update")}
        assert all(ms > 0 for ms in row["weft_parts_ms"].values())
        assert row["speedup_over"][rows[0]["variant"]] == row["speedup"]


class _Broken(WeftStep):
    """A correct variant, except for the changes that `spoil` makes after each step on rank 1."""

    def __init__(self, work: TrainingWorkload, spoil) -> None:
        super().__init__(work)
        self.spoil = spoil

    def __call__(self, which: int) -> torch.Tensor:
        out = super().__call__(which)
        if self.work.ranks.rank == 1:
            self.spoil(self, out)
        return out


def _vector(step: TrainingStep, out: torch.Tensor) -> None:
    out[-1, -1] += 1e-3


def _all_rows(step: TrainingStep, out: torch.Tensor) -> None:
    step.work.weights[0].add_(1e-6)


def _state(step: TrainingStep, out: torch.Tensor) -> None:
    step.states[0].mul_(1.1)


def _not_finite(step: TrainingStep, out: torch.Tensor) -> None:
    step.work.weights[0].fill_(math.nan)


def _fails(which: int) -> torch.Tensor:
    raise RuntimeError("no kernel here\nfor this")


def _failures(group: dist.ProcessGroup) -> list[str]:
    work = _data(group, TINY)
    return [
        work._failure(_fails if group.rank() == 1 else work.grads.__getitem__),
        work._failure(work.grads.__getitem__),
    ]


def test_a_library_that_fails_on_a_rank_is_left_out_on_all(pool: Pool) -> None:
    assert pool.run(_failures, ranks=2) == [["on another rank", ""], ["RuntimeError: no kernel here", ""]]


def _refused(group: dist.ProcessGroup) -> dict[str, str]:
    work = _data(group, RAGGED)
    pooled, expected, found = work.reference(0), work.expected(), Results({})
    spoils = {spoil.__name__: spoil for spoil in (_vector, _all_rows, _state, _not_finite)}
    work.steps = {name: _Broken(work, spoil) for name, spoil in spoils.items()}
    for name in work.steps:
        work._check(name, found, expected, pooled, "")
    return found.wrong


def test_a_step_that_learns_something_else_is_refused_on_every_rank(pool: Pool) -> None:
    for wrong in pool.run(_refused, ranks=2):
        assert set(wrong) == {"_vector", "_all_rows", "_state", "_not_finite"}
        assert "ragged: _state differs from the float64 reference by inf" in wrong["_state"]
