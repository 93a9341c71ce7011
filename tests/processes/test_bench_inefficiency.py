"""Measurements of losses on CPU processes: wrong bytes and wrong products are found, and all numbers exist and are
consistent. Cheapest first.
"""

import json
import math
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.bench import cpu_ranks
from support.slow import slow

from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.bench.table_1 import GatheredGemm
from weft.launch import Pool
from weft.studies.losses_lanes import TRANSPORTS, CpuSide, StudyLane
from weft.studies.losses_measure import (
    BASELINES,
    Matrices,
    MeasuringEffort,
    balance,
    check_cuts,
    measure,
)

CPU = torch.device("cpu")
TINY = GatheredGemm("tiny", "TP", "by hand", 128, 24, 192)
PIECES = 8
SHARD = PIECES * 512


def _gathers(group: dist.ProcessGroup) -> int:
    with CpuSide(cpu_ranks(group), SHARD) as side:
        for by in TRANSPORTS:
            for pieces in (1, 2, PIECES):
                side.check(by, pieces)
    return group.rank()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_gather_brings_every_byte(pool: Pool, ranks: int) -> None:
    assert pool.run(_gathers, ranks=ranks) == list(range(ranks))


class _Forgetful(CpuSide):
    """A gather that omits the last piece for its next neighbour."""

    def gather(self, by, pieces):
        call = super().gather(by, pieces)
        place = self._box.peer((self.ranks.rank + 1) % self.ranks.world_size)

        def forget() -> None:
            call()
            place[self.ranks.rank * self.nbytes + self.nbytes - 1] += 1

        return forget


def _forgotten(group: dist.ProcessGroup) -> str:
    with _Forgetful(cpu_ranks(group), SHARD) as side:
        try:
            side.check("dma", PIECES)
        except RuntimeError as error:
            return str(error)
    return "nothing was noticed"


def test_a_wrong_byte_is_found(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(_forgotten, ranks=2)):
        assert text.startswith(
            f"all-gather by dma in 8 pieces: rank {rank} received wrong bytes of rank {1 - rank}'s shard"
        )


class _Spoilt(Matrices):
    """GEMMs that, on the last rank, omit one piece of `cut`-`pieces` or add it twice."""

    def spoil(self, cut: str, pieces: int) -> None:
        self.spoilt = (cut, pieces)

    def cut(self, cut, pieces):
        call = super().cut(cut, pieces)
        if (cut, pieces) != self.spoilt or self.ranks.rank != self.ranks.world_size - 1:
            return call

        def spoilt() -> None:
            call()
            if cut == "rows":
                self.out[-self.out.shape[0] // pieces :] = math.nan
            else:
                k = self.a.shape[1] // pieces
                self.out.addmm_(self.a[:, :k], self.b[:k])

        return spoilt


def _products(group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, float | str]:
    matrices = _Spoilt(TINY, dtype, cpu_ranks(group))
    matrices.spoil("", 0)
    found: dict[str, float | str] = dict(check_cuts(matrices))
    for cut in ("rows", "columns"):
        matrices.spoil(cut, 64)
        try:
            check_cuts(matrices)
        except RuntimeError as error:
            found[f"spoilt {cut}"] = str(error)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_piece_is_found_on_every_rank(pool: Pool, dtype: torch.dtype) -> None:
    for found in pool.run(_products, dtype, ranks=2):
        right = [found[name] for name in ("rows-8", "columns-8", "rows-64", "columns-64")]
        assert max(right) < 0.0626  # without 1/64 of the sum, the error would be 0.125
        for cut in ("rows", "columns"):
            assert f"128 x 24 x 192 in 64 pieces by {cut} differs from the undivided GEMM" in found[f"spoilt {cut}"]


def _lanes(group: dist.ProcessGroup) -> dict:
    ranks, threads = cpu_ranks(group), {}

    def note(by: str):
        return lambda: threads.setdefault(by, threading.get_ident())

    with CpuSide(ranks, SHARD) as side:
        side.play([StudyLane(note("gemm"), 2, "gemm"), StudyLane(note("dma"), 3, "dma")])
        marks = side.play([StudyLane(note("gemm"), 2, "gemm"), StudyLane(note("kernel"), 4, "kernel")])
        lanes = (StudyLane(note("gemm"), 3, "gemm"), StudyLane(note("dma"), 5, "dma"))
        seconds = [[0.0, 1.0], [0.0, 2.0 + 2.0 * ranks.rank]]
        balance(lanes, seconds, side, longer=2)
        try:
            side.play([StudyLane(lambda: 1 / 0, 1, "library")])
        except ZeroDivisionError as error:
            threads["error"] = str(error)
    return {"threads": threads, "marks": marks, "counts": [lane.count for lane in lanes]}


def test_lanes_run_where_their_transport_says(pool: Pool) -> None:
    for found in pool.run(_lanes, ranks=2):
        threads = found["threads"]
        assert threads["gemm"] == threads["kernel"] != threads["dma"]
        assert threads["error"] == "division by zero"
        assert [len(marks) for marks in found["marks"]] == [3, 5]
        assert all(marks == sorted(marks) for marks in found["marks"])
        # The slower rank's dma lane took 4 s to the GEMM lane's 1 s; then both twice.
        assert found["counts"] == [24, 10]


def _found(group: dist.ProcessGroup) -> dict:
    shares: list[float] = []
    found = measure(
        TINY, torch.float32, cpu_ranks(group), MeasuringEffort(1e-3, 5e-3, 2), lambda what, share: shares.append(share)
    )
    return {"found": found, "shares": sum(shares)}


@pytest.mark.parametrize("ranks", [slow(2), slow(3)])
def test_every_variant_is_measured_and_all_ranks_agree(pool: Pool, ranks: int) -> None:
    first, *others = pool.run(_found, ranks=ranks)
    assert all(other["found"] == first["found"] for other in others)
    assert first["shares"] == pytest.approx(2)
    found = first["found"]
    assert set(found.timings) == {*BASELINES, *BASELINES.values()}
    assert all(t.repetitions == 2 and 0 < t.p20_ms <= t.p50_ms <= t.p80_ms for t in found.timings.values())
    assert set(found.overlap) == {name for name in found.timings if "beside" in name}
    assert all(0.4 <= share <= 1 for share in found.overlap.values())
    assert found.gathered_bytes >= 128 * 192 * 4


def _run(group: dist.ProcessGroup, folder: Path) -> list[dict]:
    options = BenchOptions(
        "inefficiency", preset="g1,g6", modes=("queued",), scale=1 / 256, quick=True,
        json=folder / "losses.jsonl", pictures=folder / "pictures",
    )  # fmt: skip
    return run_rank(group.rank(), group.size(), options)


@pytest.mark.slow
def test_a_run_records_prints_and_draws(pool: Pool, tmp_path: Path) -> None:
    rows, nothing = pool.run(_run, tmp_path, ranks=2)
    assert nothing == []
    assert rows == [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert len(list((tmp_path / "pictures").glob("figure-*.png"))) == 4
    wanted = "op config variant mode device ranks dtype p20_ms p50_ms p80_ms skew_ms baseline speedup roofline_ms roofline_ratio "
    wanted += "error machine versions commit date loss overlap op_to_byte traffic_bytes paper scaled"
    by_variant = {(r["config"], r["variant"]): r for r in rows}
    assert len(by_variant) == len(rows) == 2 * len({*BASELINES, *BASELINES.values()})
    for row in rows:
        assert set(wanted.split()) <= set(row)
        base = by_variant[row["config"], row["baseline"]]
        assert row["loss"] == pytest.approx(row["p50_ms"] / base["p50_ms"]) == pytest.approx(1 / row["speedup"])
        assert row["roofline_ratio"] == pytest.approx(row["p50_ms"] / row["roofline_ms"])
        assert (row["overlap"] is not None) == ("beside" in row["variant"])
        assert row["paper"]["m"] / row["m"] == row["paper"]["n"] / row["n"] / row["n_over"] == 256
        assert row["n_over"] == 2
