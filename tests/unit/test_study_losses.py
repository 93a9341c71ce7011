"""Numbers derived from losses: sizes that fit, concurrent lanes, rank correlations, the paper's claims, pictures.
Nothing is measured: all rows are invented.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.bench.core.options import BenchOptions
from weft.bench.table_1 import SYNTHETIC, TABLE_1, GatheredGemm, find_gemms, fit
from weft.studies.losses import (
    PAPER_MEANS,
    LossRow,
    by_chance,
    claims,
    draw,
    rows_of,
    shares,
    spearman,
    tables,
)
from weft.studies.losses_bench import OPERATOR
from weft.studies.losses_lanes import TRANSPORTS, in_turns, shard_bytes
from weft.studies.losses_measure import (
    BASELINES,
    CUTS,
    PAIRS,
    cut_name,
    gather_beside,
    gather_name,
    gemm_beside,
    together,
)
from weft.studies.pages import figure

BF16 = 2
PAPERS_RANKS = 8


def test_a_gemm_by_hand() -> None:
    gemm = GatheredGemm("g", "TP", "model", 4, 3, 2)
    assert gemm.ops == 48
    assert gemm.traffic == 2 * (8 + 6 + 12)
    assert gemm.op_to_byte == pytest.approx(48 / 52)
    assert (gemm.piece(rows=2).m, gemm.piece(columns=2).k) == (2, 1)


def test_table_1_and_its_names() -> None:
    assert [gemm.name for gemm in TABLE_1] == [f"g{i}" for i in range(1, 17)]
    # According to the paper, M is less than K for these four.
    assert {gemm.name for gemm in TABLE_1 if gemm.m < gemm.k} == {"g1", "g3", "g5", "g7"}
    assert [gemm.name for gemm in find_gemms(["g7", "g2"])] == ["g2", "g7"]
    assert find_gemms([]) == TABLE_1
    with pytest.raises(ValueError, match="no GEMM 'g17' in table I: give names from g1 to g16"):
        find_gemms(["g17"])


def test_synthetic_gemms_are_of_table_1s_ranges_and_stay_as_they_are() -> None:
    assert len({gemm.name for gemm in SYNTHETIC}) == 16
    for what in ("m", "n", "k", "op_to_byte", "traffic"):
        of, known = ([getattr(g.sharded(PAPERS_RANKS), what) for g in gemms] for gemms in (SYNTHETIC, TABLE_1))
        assert min(known) <= min(of) < max(of) <= max(known), what
    assert all(gemm.m % 4096 == gemm.n % 1024 == gemm.k % 1024 == 0 for gemm in SYNTHETIC)
    assert [str(gemm) for gemm in SYNTHETIC[:2]] == [
        "708608 x 57344 x 23552",
        "512000 x 17408 x 29696",
    ]  # the names that records use


@given(
    st.sampled_from(TABLE_1),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([Fraction(1), Fraction(1, 8), Fraction(1, 32), Fraction(1, 100)]),
    st.floats(1e7, 1e15),
    st.floats(1e6, 1e12),
)
def test_what_fits_keeps_its_character(
    gemm: GatheredGemm, ranks: int, scale: Fraction, ops: float, nbytes: float
) -> None:
    fitted = fit(gemm, ranks=ranks, scale=scale, most_ops=ops, most_bytes=nbytes)
    run = fitted.run
    assert run.ops <= ops
    assert run.run_bytes <= nbytes
    assert run.m % 64 == 0
    assert run.k % 64 == 0
    assert run.m == run.k == 64 or (run.m <= run.k) == (gemm.m < gemm.k) or run.m == run.k
    assert fitted.all_by >= 1 / scale
    assert run.n <= max(8, gemm.n / ranks)


def test_a_gemm_that_nothing_makes_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="g5 does not fit, even reduced to 64 x 16 x 64: it needs 38912 bytes, and 1e"):
        fit(TABLE_1[4], ranks=2, scale=Fraction(1), most_ops=1e15, most_bytes=1e4)


def test_a_gemm_that_fits_is_the_papers() -> None:
    fitted = fit(TABLE_1[1], ranks=8, scale=Fraction(1), most_ops=1e15, most_bytes=1e12)
    assert (str(fitted.run), str(fitted)) == ("131072 x 2048 x 16384", "N/8")
    fitted = fit(TABLE_1[7], ranks=2, scale=Fraction(1), most_ops=1.25e13, most_bytes=1e12)
    assert (str(fitted.run), str(fitted)) == ("32768 x 14336 x 8192", "N/2, M/8")


@pytest.mark.parametrize(
    ("gathered", "world", "shard"), [(1 << 20, 2, 1 << 19), (1, 3, 4096), (3 * 8192 + 1, 3, 12288)]
)
def test_shards_have_pieces_that_are_alike(gathered: int, world: int, shard: int) -> None:
    assert shard_bytes(gathered, world, 8) == shard
    assert shard * world >= gathered


def test_lanes_take_turns_by_how_far_they_have_come() -> None:
    assert list(in_turns([2, 4])) == [0, 1, 1, 0, 1, 1]
    assert list(in_turns([3])) == [0, 0, 0]
    assert list(in_turns([])) == []


def test_only_the_time_in_which_both_lanes_ran_counts() -> None:
    gemm = [0.0, 2.0, 4.0, 6.0]
    # Both ran from 1 to 6, when the gather made 5 calls of 1 s each. Its later calls ran alone and were faster.
    gather = [1.0, *np.arange(2.0, 7.0), 6.1, 6.2, 6.3, 6.4]
    assert together(gemm, gather) == pytest.approx([2.0, 1.0, 5 / 6.4])
    assert together(gather, gemm) == pytest.approx([1.0, 2.0, 5 / 6.4])
    assert together([0.0, 1.0], [1.0, 2.0])[2] == 0.0


def test_spearman_by_hand() -> None:
    assert spearman([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)
    assert spearman([1, 2, 3, 4], [8, 6, 4, 2]) == pytest.approx(-1)
    # the ranks are 1, 2.5, 2.5, 4 and 1, 2, 3, 4
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1, 1], [1, 2]))
    with pytest.raises(ValueError, match="must match exactly"):
        spearman([1, 2], [1, 2, 3])


def test_chance_is_counted_over_all_orders() -> None:
    x, y = [1, 2, 3, 4, 5], [1, 2, 3, 5, 4]
    exact = np.mean([spearman(x, order) >= spearman(x, y) - 1e-9 for order in permutations(y)])
    assert by_chance(x, y, 1) == pytest.approx(exact, abs=0.01)
    assert by_chance(x, y, -1) > 0.95


def _row(gemm: GatheredGemm, loss: Callable[[str], float]) -> LossRow:
    """Return a row whose losses are given by `loss(name)`."""
    ms = {"whole": 8.0} | {gather_name(by, 1): 2.0 for by in TRANSPORTS}
    for name in [cut_name(*cut) for cut in CUTS] + [gather_name(by) for by in TRANSPORTS]:
        ms[name] = ms[BASELINES[name]] * loss(name)
    for name in [f(*pair) for f in (gemm_beside, gather_beside) for pair in PAIRS]:
        ms[name] = ms[BASELINES[name]] * loss(name)
    overlap = {name: 0.9 for name in ms if "beside" in name}
    return LossRow(gemm, "M/2", gemm.m * gemm.k * BF16, ms, overlap)


def _as_in_the_paper(gemm: GatheredGemm) -> LossRow:
    def loss(name: str) -> float:
        traffic = gemm.traffic / 1e12
        if "beside" in name:
            return 1.1 + traffic + (0 if "dma" in name else 0.2)
        if name.startswith("gather"):
            return 1.1 - gemm.m * gemm.k / 1e12
        cut, pieces = name.split("-")
        hurt = 10 if (cut == "rows") == (gemm.m < gemm.k) else 1
        return 1 + 1e5 * hurt * int(pieces) ** 2 / gemm.piece(**{cut: int(pieces)}).op_to_byte ** 2

    return _row(gemm, loss)


def test_every_claim_holds_where_it_does() -> None:
    # Without the four GEMMs for which cuts by rows are slow, the op-to-byte ratio alone orders the losses of each cut.
    tall = [_as_in_the_paper(gemm) for gemm in TABLE_1 if gemm.m > gemm.k]
    found = claims(tall)
    assert [(c.text, c.numbers) for c in found if c.held is not True] == []
    assert {c.where for c in found} == {"IV-C1", "IV-C2", "IV-D1", "IV-D2", "not in the paper"}
    shaped = [c for c in claims([_as_in_the_paper(gemm) for gemm in TABLE_1]) if "M < K" in c.text]
    assert [(c.held, c.numbers) for c in shaped] == [(True, "16 of 16")] * 2


def test_a_claim_that_does_not_hold_says_so() -> None:
    rows = [_as_in_the_paper(gemm) for gemm in TABLE_1]
    turned = [replace(row, ms={name: 1 / ms for name, ms in row.ms.items()}) for row in rows]
    assert not any(c.held for c in claims(turned))
    swapped = dict(rows[0].ms)
    for pieces in (8, 64):
        one, other = cut_name("rows", pieces), cut_name("columns", pieces)
        swapped[one], swapped[other] = swapped[other], swapped[one]
    exceptions = [c for c in claims([replace(rows[0], ms=swapped), *rows[1:]]) if "M < K" in c.text]
    assert [(c.held, c.numbers) for c in exceptions] == [(True, "15 of 16; not for g1")] * 2
    assert {c.held for c in claims(rows[:3]) if "grows" in c.text or "falls" in c.text} == {None}


def test_variation_on_a_rank_and_between_ranks() -> None:
    rows = [_as_in_the_paper(gemm) for gemm in TABLE_1]
    assert not any(c.where == "IV-A" for c in claims(rows)), "nothing is said of what was not recorded"
    rows = [replace(row, varies=(0.01 * (i == 3), 0.05)) for i, row in enumerate(rows)]
    on, between = (c for c in claims(rows) if c.where == "IV-A")
    assert (on.held, on.numbers) == (True, "at most 1.0% (g4)")
    rows = [replace(row, varies=(0.07 * (i < 2), 0.05)) for i, row in enumerate(rows)]
    on, between = (c for c in claims(rows) if c.where == "IV-A")
    assert (on.held, on.numbers) == (False, "at most 7.0% (g2); more than 6% for 2 of 16")
    assert between.held is True
    record = {
        "config": "g1",
        "m": 8,
        "n": 8,
        "k": 8,
        "item_bytes": 2,
        "scaled": "",
        "gathered_bytes": 1,
        "overlap": None,
    }
    record |= {"variant": "whole", "p20_ms": 1.9, "p50_ms": 2.0, "p80_ms": 2.1, "skew_ms": 0.3, "run": "a"}
    (row,) = rows_of([record])
    assert row.varies == pytest.approx((0.1, 0.15))


def test_a_difference_within_the_noise_is_no_exception() -> None:
    row = _row(TABLE_1[0], lambda name: {"rows-8": 1.10, "columns-8": 1.11}.get(name, 1.2))
    (claim,) = [c for c in claims([row]) if c.text.startswith("in 8")]
    assert claim.held is True
    row = _row(TABLE_1[0], lambda name: {"rows-8": 1.10, "columns-8": 1.15}.get(name, 1.2))
    (claim,) = [c for c in claims([row]) if c.text.startswith("in 8")]
    assert (claim.held, claim.numbers) == (False, "0 of 1")


def test_tables_have_every_loss_and_the_papers_means() -> None:
    rows = [_as_in_the_paper(gemm) for gemm in TABLE_1[:2]]
    cut, moved, beside = tables(rows)
    for table in (cut, moved, beside):
        assert {len(cells) for cells in table.cells} == {len(table.columns)}
        assert [cells[0] for cells in table.cells[:3]] == ["g1", "g2", "mean"]
    mean = math.sqrt(rows[0].loss("rows-8") * rows[1].loss("rows-8"))
    assert cut.cells[2][6] == f"{mean:.2f}"
    assert len(PAPER_MEANS) == 5
    assert "1.10" in moved.cells[3]
    assert {"1.11", "1.12", "1.07", "1.03"} <= set(beside.cells[3])


def test_rows_are_of_the_last_run() -> None:
    def record(run: str, variant: str, ms: float) -> dict:
        shape = {"m": 64, "n": 8, "k": 128, "item_bytes": 2, "gathered_bytes": 64, "scaled": "K/2"}
        shape |= {"p20_ms": ms, "p80_ms": ms, "skew_ms": 0.0}
        return {"config": "g5", "run": run, "variant": variant, "p50_ms": ms, "overlap": None, **shape}

    (row,) = rows_of([record("a", "whole", 1.0), record("a", "rows-8", 9.0), record("b", "whole", 2.0)])
    assert row.ms == {"whole": 2.0}
    assert (row.gemm.model, str(row.gemm)) == ("llama-2-70b", "64 x 8 x 128")


@pytest.mark.slow
def test_pictures_are_written(tmp_path) -> None:
    rows = [_as_in_the_paper(gemm) for gemm in TABLE_1[:3]]
    written = draw(tmp_path / "new", rows, "2 ranks")
    assert [path.name[:10] for path in written] == ["figure-7-g", "figure-8-g", "figure-9-c", "figure-10-"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(tmp_path, [], "")


def test_the_label_of_a_logarithmic_axis_says_so(tmp_path) -> None:
    with figure(tmp_path / "a.png", "a", (4, 3)) as (axis,):
        axis.plot([1, 2], [1, 8], label="b")
        axis.set(xlabel="x", ylabel="loss", yscale="log")
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("x", "loss, logarithmic axis")


def test_shares_of_what_is_lost() -> None:
    assert shares(1.1, 1.3) == pytest.approx((0.25, 0.75))
    assert shares(0.9, 1.3) == (0.0, 1.0)
    assert shares(0.9, 1.0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 1}, "ranks=1: an all-gather needs at least 2"),
        ({"scale": 2.0}, r"scale=2\.0 must be at least 1/65536 and at most 1"),
        ({"variants": ("dma",)}, "compares all variants"),
        ({"seconds": 1.0}, r"seconds=1\.0: inefficiency repeats"),
        ({"preset": "g1,g99"}, "no GEMM 'g99'"),
        ({"modes": ("single",)}, "modes="),
    ],
)
def test_options_are_refused_with_a_reason(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchOptions(**{"op": "inefficiency", "modes": ("queued",), **wrong})
    assert OPERATOR.default_dtype("cuda") == "bf16"


def test_only_who_draws_takes_a_folder_for_pictures(tmp_path) -> None:
    with pytest.raises(ValueError, match="embedding_all_to_all draws no pictures"):
        BenchOptions("embedding_all_to_all", pictures=tmp_path)
