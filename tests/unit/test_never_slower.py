"""`weft bench never-slower` without ranks: random shapes, verdicts from times, and documents.

Cheapest first: options and shapes, then rows with invented times.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from weft.bench.__main__ import run
from weft.bench.core.harness import HARNESS
from weft.bench.never_slower import page
from weft.bench.never_slower.draw import RANGES, Bounds, draw, draw_changing, fits
from weft.bench.never_slower.judge import Verdict, is_under, mine
from weft.bench.never_slower.options import MODES, Options, forward_operators, options_of
from weft.bench.never_slower.run import items_of
from weft.bench.ops.embedding_presets import EmbeddingPreset
from weft.bench.ops.moe_shape import MoeShape
from weft.bench.report import main, rewrite

GPU = Bounds("cuda", 2, 5000 * 989e6, 5000 * 3.35e6, 20e9)
CPU = Bounds("cpu", 2, 1e8, 8e6, 64e6)
SEED = "89614071"


def test_every_forward_operator_is_measured() -> None:
    assert {"all_gather_matmul", "matmul_all_to_all", "embedding_all_to_all"} < set(forward_operators())
    assert not any("gradients" in name or name.endswith("_parallel") for name in forward_operators())


def test_options() -> None:
    options = options_of(["--device", "cpu", "--part", "2/3", "--seed", "ABC"], "weft bench")
    assert (options.part, options.seed, options.ranks, options.sizes) == ((2, 3), "abc", 2, 60)
    assert options.modes == ("queued", "single", "changing")  # CPU calls are never captured
    assert options_of(["--device", "cpu", "--modes", "queued, graph"], "weft bench").modes == ("queued",)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--ops", "matmul"], "no operator 'matmul': give one of all_gather_matmul, "),
        (["--ops", "tensor_parallel"], "no operator 'tensor_parallel': give one of "),
        (["--modes", "fast"], "no mode 'fast': give one of queued, graph, single, changing"),
        (["--modes", "graph"], "CPU calls cannot be captured"),
        (["--modes", ","], "--modes ',' has no name: pass at least one, or omit --modes"),
        (["--modes", "graph,"], "--modes graph: CPU calls cannot be captured"),
        (["--ops", ""], "--ops '' has no name"),
        (["--only", ","], "--only ',' has no name"),
        (["--seed", ""], "--seed : pass 1 to 16 hexadecimal digits"),
        (["--device", ""], "device='' must be 'cpu' or 'cuda'"),
        (["--part", "4/3"], "--part 4/3: parts are numbered from 1 to 3"),
        (["--part", "0/3"], "--part 0/3: parts are numbered from 1 to 3"),
        (["--part", "one"], "--part one: write it as I/N, such as 1/3"),
        (["--seed", "seed"], "--seed seed: pass 1 to 16 hexadecimal digits"),
        (["--ranks", "1"], "--ranks 1: a single rank does not communicate: use --ranks 2 or more"),
        (["--shapes", "0"], "--shapes 0 must be at least 1"),
        (["--json", "/no/such/folder/a.jsonl"], "the folder /no/such/folder does not exist"),
    ],
)
def test_options_that_cannot_be(wrong: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options_of(["--device", "cpu", *wrong], "weft bench")


@pytest.mark.parametrize(
    ("gpus", "ranks", "message"),
    [
        (0, [], "--device cuda, but torch sees no GPU: run `weft doctor` to see why, or use --device cpu"),
        (0, ["--ranks", "2"], "--device cuda, but torch sees no GPU"),
        (
            1,
            [],
            "--ranks 1: a single rank does not communicate: use at least 2 GPUs, one for each rank, or --device cpu",
        ),
        (1, ["--ranks", "1"], "--ranks 1: a single rank does not communicate"),
        (1, ["--ranks", "2"], "--ranks 2, but torch sees 1 GPU"),
    ],
)
def test_gpus_that_are_missing(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: list[str], message: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=message):
        options_of(["--device", "cuda", *ranks], "weft bench")


def test_its_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["never-slower", "--help"], "weft bench")
    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for part in (
        "usage: weft bench never-slower",
        "in at least four of these five",
        "weft bench never-slower --json never.jsonl",
        "So no limit applies there, and the verdict only counts errors.",
        *MODES,
    ):
        assert part in said


# --- draws ---


@pytest.mark.parametrize("bounds", [GPU, CPU, Bounds("cuda", 8, 5000 * 989e6, 5000 * 3.35e6, 20e9)], ids=str)
@pytest.mark.parametrize("op", forward_operators())
def test_draws_are_in_range_and_within_bounds(op: str, bounds: Bounds) -> None:
    ranges, sizes = RANGES[bounds.device], []
    for index in range(200):
        drawn = draw(op, index, SEED, bounds)
        assert fits(drawn, bounds)
        if isinstance(drawn, EmbeddingPreset):
            assert bounds.ranks <= drawn.global_batch <= ranges.batch[1]
            assert all(ranges.rows[0] <= table.rows <= ranges.rows[1] for table in drawn.tables)
            continue
        assert all(ranges.nk[0] <= size <= ranges.nk[1] and size % 64 == 0 for size in (drawn.n, drawn.k))
        assert 1 <= drawn.m <= (ranges.tokens if isinstance(drawn, MoeShape) else ranges.m)
        if isinstance(drawn, MoeShape):
            assert drawn.experts % bounds.ranks == 0
        else:
            drawn.problems(op.replace("_scaled", "") if "gather" in op else op, bounds.ranks, "bf16")
        sizes.append(drawn.m)
    assert not sizes or (
        min(sizes) <= ranges.decode < max(sizes) and any(size % 2 for size in sizes) == (op not in EVEN)
    )


EVEN = ("all_gather_matmul", "all_gather_scaled_matmul", "matmul_reduce_scatter", "scaled_matmul_reduce_scatter")


def test_a_draw_is_a_function_of_seed_operator_and_number() -> None:
    drawn = [draw("matmul_all_reduce", index, SEED, GPU) for index in range(20)]
    assert [draw("matmul_all_reduce", index, SEED, GPU) for index in reversed(range(20))] == drawn[::-1]
    assert len(set(drawn)) > 15
    assert drawn != [draw("matmul_all_reduce", index, "1", GPU) for index in range(20)]
    assert drawn != [draw("matmul_all_gather", index, SEED, GPU) for index in range(20)]


@pytest.mark.parametrize("op", forward_operators())
def test_sizes_that_follow_each_other_are_all_different(op: str) -> None:
    drawn, sizes = draw_changing(op, SEED, GPU, 1000)
    assert draw_changing(op, SEED, GPU, 1000) == (drawn, sizes)
    assert len(set(sizes)) == 1000
    assert fits(drawn, GPU)
    assert max(sizes) <= (drawn.global_batch if isinstance(drawn, EmbeddingPreset) else drawn.m)
    assert len(draw_changing(op, SEED, CPU, 10**6)[1]) < 10**6  # all possible sizes


def test_what_never_fits_is_said() -> None:
    with pytest.raises(ValueError, match=r"no shape of matmul_all_reduce fits .*flops=1"):
        draw("matmul_all_reduce", 0, SEED, Bounds("cuda", 2, 1.0, 1.0, 1.0))


# --- verdicts ---


def _row(weft_over_serial: float = 1.0, *, noise: float = 0.0, again: bool = False, **given: Any) -> dict[str, Any]:
    rng = Random(str(given) + str(again))
    serial = [1.0 + noise * rng.uniform(-1, 1) for _ in range(5)]
    weft = [weft_over_serial * (1.0 + noise * rng.uniform(-1, 1)) for _ in range(5)]
    return {
        "benchmark": "never-slower", "op": "matmul_all_reduce", "config": "8x512x512", "index": 0, "seed": SEED, "mode": "queued",
        "again": again, "dtype": "bf16", "device": "cuda", "ranks": 2, "machine": "2 x NVIDIA H100", "commit": "abcdef0123",
        "source": "0123456789abcdef", "harness": HARNESS, "versions": {"torch": "2.13.0"}, "variables": {},
        "date": "2026-11-25T10:00:00Z", "run": "a", "serial_ms": serial, "weft_ms": weft, "ideal_ms": 0.8, "chosen": "two_shot",
    } | given  # fmt: skip


def test_a_constant_loss_is_below() -> None:
    rows = [_row(1 / 0.97, index=i) for i in range(3)]
    assert all(is_under(row) for row in rows)
    assert len(Verdict(rows).suspects) == 3
    again = [_row(1 / 0.97, index=i, again=True) for i in range(3)]
    assert len(Verdict(rows + again).below) == 3
    assert not Verdict(rows + again).suspects
    assert (
        "some limits are exceeded (1 shape measured): 3 of 3 pairs of shape and mode are below 0.98x"
        in page.verdict_of(Verdict(rows + again))
    )


def test_noise_is_not_below() -> None:
    rows = [_row(1.0, noise=0.05, index=i, again=again) for i in range(500) for again in (False, True)]
    assert len(Verdict(rows).below) < 10  # happens if four of five pairs are slower by chance, in both measurements
    assert any(is_under(row) for row in rows)


def test_a_loss_in_one_run_alone_is_not_below() -> None:
    first, again = _row(1 / 0.97), _row(1.0, again=True)
    verdict = Verdict([first, again])
    assert is_under(first)
    assert (verdict.below, verdict.suspects) == ([], [])
    assert page.verdict_of(verdict) == "all limits hold (1 shape measured): none is below 0.98x of the baseline's speed"
    assert not Verdict([_row(1.0), _row(1 / 0.97, again=True)]).below
    assert not Verdict([_row(1 / 0.97), _row(1 / 0.97, again=True), first]).below  # the first row is from another run


def test_three_of_five_are_not_enough() -> None:
    assert not is_under(_row(weft_ms=[1.1, 1.1, 1.1, 1.0, 1.0]))
    assert is_under(_row(weft_ms=[1.1, 1.1, 1.1, 1.1, 0.5]))


def test_a_single_call_is_judged_by_what_it_adds() -> None:
    def rows(us: float, chosen: str) -> list[dict]:
        return [_row(1 + us / 1e3, mode="single", chosen=chosen, index=i) for i in range(3)]

    assert not Verdict(rows(9, "serial") + rows(19, "two_shot")).failures
    assert not Verdict(rows(50, "two_shot")).suspects  # 0.95x of the speed, for a call of one millisecond
    assert Verdict(rows(11, "serial")).failures == ["single calls of serial schedules add 11 us (limit: 10 us)"]
    assert Verdict(rows(21, "two_shot")).failures == ["single calls of overlapped schedules add 21 us (limit: 20 us)"]


def test_serial_is_no_way_out() -> None:
    rows = [_row(index=i, chosen="serial" if i < 5 else "two_shot") for i in range(10)]
    assert Verdict(rows).overlapped_share == 0.5
    assert Verdict(rows).mean_ideal_of_serial == pytest.approx(0.8)
    assert Verdict(rows).failures == ["weft overlaps 50% of the shapes that can gain (wanted: 60%)"]
    assert not Verdict([row | {"ideal_ms": 0.95} for row in rows]).failures
    assert Verdict([row | {"ideal_ms": None} for row in rows]).overlapped_share is None


def _changing(mean: float, p99: float) -> dict[str, Any]:
    row = _row(mode="changing", index=-1, config="16384x512x512, 1000 sizes")
    of_serial = {"mean": 1.0, "p50": 1.0, "p99": 2.0, "max": 2.0}
    del row["weft_ms"], row["serial_ms"]
    return row | {"changing": {"weft_ms": of_serial | {"mean": mean, "p99": p99}, "serial_ms": of_serial, "sizes": 980}}


def test_changing_sizes_are_judged_by_mean_and_99th_percentile() -> None:
    assert not Verdict([_changing(1.02, 2.2)]).failures
    for mean, p99 in ((1.05, 2.0), (1.0, 2.4)):
        (said,) = Verdict([_changing(mean, p99)]).failures
        assert f"matmul_all_reduce {mean:.2f}x and {p99 - 2:+.2f} ms" in said


def _without_times(**given: Any) -> dict[str, Any]:
    row = _row(mode="graph", **given)
    del row["weft_ms"], row["serial_ms"]
    return row


def test_an_error_is_said_and_a_skip_does_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [_row(1.0), _without_times(skipped="it waits"), _without_times(index=1, error="ValueError: no")]
    assert Verdict(rows).failures == ["1 row ended with an error"]
    assert not Verdict(rows[:2]).failures
    page.show(rows)
    said = capsys.readouterr().out
    assert "skipped, matmul_all_reduce, graph: it waits (1)" in said
    assert "error, matmul_all_reduce 8x512x512, graph: ValueError: no" in said
    assert said.strip().endswith("Verdict: some limits are exceeded (1 shape measured): 1 row ended with an error")


def test_no_limit_applies_on_cpu_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """The same rows exceed every limit on GPUs, and none on CPU ranks, whose summary names no limit."""

    def rows(device: str) -> list[dict[str, Any]]:
        queued = [_row(2.0, again=again, chosen="serial") for again in (False, True)]
        single = [_row(2.0, mode="single", index=i, chosen=chosen) for i, chosen in ((1, "serial"), (2, "two_shot"))]
        return [row | {"device": device} for row in (*queued, *single, _changing(1.5, 9.0))]

    assert len(Verdict(rows("cuda")).failures) == 5
    page.show(rows("cuda"))
    assert "wanted: at most 10" in capsys.readouterr().out
    verdict = Verdict(rows("cpu"))
    assert len(verdict.below) == 1
    assert verdict.failures == []
    page.show(rows("cpu"))
    said = capsys.readouterr().out
    assert "single, serial: 0.50x of serial's speed (geometric mean)" in said
    assert "wanted" not in said
    assert "exceeded" not in said
    assert said.strip().endswith(
        "Verdict: no limit applies on CPU ranks, because their times vary with the machine's load (1 shape measured)"
    )
    wrong = _without_times(index=3, error="ValueError: no", device="cpu")
    assert page.verdict_of(Verdict([*rows("cpu"), wrong])).endswith("(1 shape measured). 1 row ended with an error")


# --- documents ---


def _recorded() -> list[dict[str, Any]]:
    rows = [
        _row(0.8, index=i, mode=mode, config=f"{i + 1}x512x512")
        for i in range(2)
        for mode in ("queued", "graph", "single")
    ]
    rows += [_row(1.25, index=2, config="3x512x512", chosen="serial", again=again) for again in (False, True)]
    return [*rows, _row(0.5, op="matmul_all_gather", noise=0.01), _changing(1.02, 2.2)]


def test_operators_that_changing_sizes_slow_down_are_listed() -> None:
    document = "With: <!-- never-slower-says:a changing -->of before<!-- /never-slower-says -->."
    for mean, said in ((1.02, "none"), (1.05, "matmul_all_reduce 1.050x")):
        assert rewrite(document, {"a": [_changing(mean, 2.2)]}) == document.replace("of before", said)
    with pytest.raises(ValueError, match="no row of calls with changing sizes: measure with --modes changing"):
        rewrite(document, {"a": [_row(1.0)]})


def test_a_table_for_each_operator_and_a_sentence() -> None:
    document = (
        "<!-- never-slower:a -->\n(the last record)\n<!-- /never-slower -->\n"
        "So: <!-- never-slower-says:a --><!-- /never-slower-says -->.\n"
        "<!-- never-slower:later -->\n<!-- /never-slower -->\n<!-- never-slower-says:later --><!-- /never-slower-says -->"
    )
    rows = mine(json.loads(json.dumps(_recorded())))
    found = rewrite(document, {"a": rows})
    lines = [line for line in found.splitlines() if line.startswith("| matmul_")]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        "matmul_all_reduce", "3", "1.08x", "0.80x", "1.25x", "1.25x", "1 of 5", "1 of 5", "80% of 5", "", "-200.0", "1.020", "0.20",
    ]  # fmt: skip
    assert lines[1].startswith("| matmul_all_gather | 1 |")
    shapes = [line for line in found.splitlines() if "x512x512 |" in line]
    assert shapes[0] == "| matmul_all_reduce | 3x512x512 | queued | 1 | 0.80 | 0.80x below | serial |"
    assert "| matmul_all_reduce | 1x512x512 | graph | 1 | 0.80 | 1.25x | two_shot |" in shapes
    assert "(the last record)" not in found
    assert "seed 89614071" in found
    assert "says:a -->4 random shapes of 2 operators on 2 x NVIDIA H100: the geometric mean is" in found
    assert "1 of them (25.0%) ran below 0.98x, as queued calls" in found
    # The table is empty until a record exists.
    assert found.endswith(document[document.index("<!-- never-slower:later") :])
    assert rewrite(found, {"a": rows}) == found
    with pytest.raises(ValueError, match="shows records of a, but only records of b are given: pass"):
        rewrite(found, {"b": rows})


def test_the_report_prints_what_was_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "never.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _recorded()))
    main([str(path)])
    assert "| matmul_all_reduce | 3 |" in capsys.readouterr().out


def test_a_sentence_needs_queued_or_captured_calls() -> None:
    with pytest.raises(ValueError, match="no row of queued or graph calls"):
        page.sentence([_row(mode="single")])


def test_named_shapes_alone_are_those_of_the_whole_run() -> None:
    def items(only: str, modes: str = "queued,changing") -> list[Any]:
        given = ["--device", "cpu", "--seed", SEED, "--shapes", "4", "--modes", modes, "--only", only]
        return items_of(options_of(given, "weft bench"), 2)

    whole = items("", "queued")
    some = whole[1], whole[-1]
    assert items(", ".join(item.config for item in some)) == list(some)
    with pytest.raises(ValueError, match=f"--only 1x2x3 is not among the first 4 shapes of seed {SEED} of any"):
        items(f"{whole[0].config},1x2x3")


def test_parts_are_all_shapes_once() -> None:
    def items(part: tuple[int, int]) -> list[Any]:
        ops = ("all_gather_matmul", "matmul_all_to_all", "embedding_all_to_all")
        return items_of(Options(ops, ("queued", "changing"), "cpu", 2, SEED, shapes=4, sizes=5, part=part), 2)

    whole = items((1, 1))
    assert len(whole) == 3 * 4 + 3
    parts = [item for i in (1, 2, 3) for item in items((i, 3))]
    assert len(parts) == len(whole)
    assert all(item in parts for item in whole)
