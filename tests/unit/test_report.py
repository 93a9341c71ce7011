"""Tables in documents come from recorded results, and the tables in this repository are up to date."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from weft.bench.core import records
from weft.bench.core.harness import HARNESS
from weft.bench.ops.all_gather_matmul import OPERATOR
from weft.bench.report import main, markdown, marks, rewrite
from weft.files import write_whole
from weft.studies import ficco, t3, t3_hardware

ROOT = Path(__file__).parents[2]
SCHEDULE = "shard[chunks=1,send=in_turn,by=dma]"
VARIANTS = {"embedding_bag": 10.0, "batched": 6.0, "direct": 4.0, "put": 5.0}
CODE = {"commit": "abcdef0123", "source": "0123456789abcdef", "variables": {}, "harness": HARNESS}


def _spread(ms: float, noise: float = 0.001) -> dict:
    """Return a record's fields for a time of `ms` whose median has the relative error `noise`."""
    half = noise * ms * math.sqrt(9) * 1.6832 / 1.2533 / 2
    return {"p20_ms": ms - half, "p50_ms": ms, "p80_ms": ms + half, "repetitions": 9}


def _records(config: str, run: str = "a", factor: float = 1.0, scale: float = 1.0) -> list[dict]:
    return [
        {
            "op": "embedding_all_to_all", "config": config, "variant": variant,
            "mode": "queued", "dtype": "fp32", "run": run, "ranks": 2,
            "roofline_ratio": ms * factor / 3.2, "scale": scale, "rows_scale": scale, "device": "cpu",
            "machine": "an abacus", "versions": {"torch": "2.13.0"}, "date": "2026-11-21T10:00:00Z",
        } | CODE | _spread(ms * factor)
        for variant, ms in VARIANTS.items()
    ]  # fmt: skip


def test_a_gain_may_be_of_the_worst_configuration() -> None:
    slower = [r | {"p50_ms": r["p50_ms"] * (4 if r["variant"] == "put" else 1)} for r in _records("two")]
    mark = "<!-- gain:a queued fp32 put/embedding_bag{} --><!-- /gain -->"
    said = rewrite(mark.format("") + mark.format(" worst"), {"a": [*_records("one"), *slower]})
    assert re.findall(r"\d\.\d\dx", said) == ["1.00x", "0.50x"]
    assert marks(said) == [("a", "queued", "fp32", "put", "embedding_bag")]


def test_speedups_and_their_geometric_mean() -> None:
    table = markdown([*_records("one"), *_records("two", factor=0.5, scale=1 / 64)])
    assert f"; torch 2.13.0; commit abcdef0123 (sources 0123456789abcdef), harness {HARNESS}; 2026-11-21." in table
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    header, one, two, mean = rows[0], rows[2], rows[3], rows[4]
    column = header.index("direct vs embedding_bag")
    assert one[0] == "one"
    assert two[0] == "two (1/64)"
    assert one[column] == two[column] == mean[column] == "2.50x"
    assert not [name for name in header if name.startswith(("put vs", "put /"))]  # only the default variant is compared
    assert one[header.index("put, ms")]
    assert one[header.index("direct / roofline")] == "1.25"
    assert two[header.index("embedding_bag, ms")] == "5"
    assert all(len(row) == len(header) for row in rows)


def _shape(config: str, variant: str, ms: float, *, asynctp: float | None = 1.2, mode: str = "queued", **more) -> dict:
    over = {"serial": 1.0 / ms} | ({"asynctp": asynctp / ms} if asynctp else {})
    return {
        "config": config, "variant": variant, "mode": mode, "speedup": 1.0 / ms, "speedup_over": over,
        "device": "cuda", "dtype": "bf16", "ranks": 2, "chosen": SCHEDULE if variant == "weft" else None,
        "predicted_blind_ms": None,
        "m": int(config.split("x")[0]), "ideal_ms": 0.5, "ideal_ratio": ms / 0.5, "added_us": None, "predicted_ms": None,
    } | CODE | _spread(ms) | more  # fmt: skip


def test_what_the_shapes_say_together() -> None:
    rows = []
    measured = {"512x1x1": (1.0, 0.99), "2048x1x1": (0.5, 0.5), "4096x1x1": (1.1, 0.8), "8192x1x1": (0.8, 0.79)}
    for config, (mine, best) in measured.items():
        rows += [_shape(config, "serial", 1.0), _shape(config, "asynctp", 1.2)]
        rows += [
            _shape(config, "weft", mine, predicted_ms=0.95, predicted_blind_ms=1.05),
            _shape(config, SCHEDULE, best),
        ]
    text = OPERATOR.table(rows)
    assert "| M x N x K | serial | asynctp | weft | weft vs serial | weft vs asynctp | ideal | weft / ideal |" in text
    assert (
        "| 2048x1x1 | 1 | 1.2 | 0.5 | 2.00x | 2.40x | 0.5 | 1.00 | 0.5 | shard[chunks=1,send=in_turn,by=dma] |" in text
    )
    serial, small, large = (1 * 2 / 1.1 / 0.8) ** (1 / 4), 1.2 * 2**0.5, 1.2 * (1 / 1.1 / 0.8) ** 0.5
    assert (
        f"on 4 shapes: the geometric mean is {serial:.2f}x the speed of serial, the worst 0.91x (4096x1x1). 75% of the shapes "
        "reach at" in text
    )
    assert f" asynctp the mean is {small:.2f}x for M <= 2048, and {large:.2f}x above." in text, (
        "with 2048 rows torch would gather by multicast"
    )
    assert f"For M >= 2048, weft takes {(1.0 * 2.2 * 1.6) ** (1 / 3):.3f} times the ideal time." in text, (
        "512 rows are too few to count"
    )
    assert "more than serial" not in text
    assert "On 75% of the shapes the time is within 3% of the time of the only schedule pinned by name" in text
    assert (
        "On 25% of the shapes the prediction from measured GEMMs is within 10% of the measured time. Of the predictions from the "
        "machine file alone (blind), 50% are within 10%, with a geometric mean error of 32.0%" in text
    )
    error = (1.05 / 1.0 * 1.05 / 0.5 * 1.1 / 1.05 * 1.05 / 0.8) ** 0.25 - 1
    assert f"mean error of {error:.1%}" in text
    (added,) = OPERATOR.sentences([_shape("64x1x1", "weft", 1.0, mode="single", asynctp=None, added_us=7.5)])
    assert added.endswith(
        "100% of the shapes reach at least 0.98x. A call takes at most 7.5 us more than serial (64x1x1)."
    )
    assert OPERATOR.sentences(rows[:2]) == []


def _layer(config: str, ms: dict[str, float], mode: str) -> list[dict]:
    base = "padded" if mode == "graph" else "serial"
    return [
        {
            "op": "all_to_all_matmul", "config": config, "variant": variant, "mode": mode, "dtype": "bf16", "run": "a", "ranks": 2,
            "baseline": base, "speedup": ms[base] / of, "roofline_ms": 0.5, "roofline_ratio": of / 0.5,
            "speedup_over": {o: ms[o] / of for o in ("serial", "padded") if o in ms},
            "rank_skew": 1.234, "capacity": 24, "experts": 8, "rows": 96,
            "machine": "an abacus", "versions": {"torch": "2.13.0"}, "date": "2026-11-21T10:00:00Z", "device": "cuda",
            "skew": 0.5 if "zipf" in config else 0.0, "gemm_ms": 0.4, "gemm_each_ms": None, "chosen": None,
        } | CODE | _spread(of)
        for variant, of in ms.items()
    ]  # fmt: skip


def test_experts_have_baselines_by_mode() -> None:
    queued = {
        "serial": 2.0,
        "padded": 4.0,
        "weft": 1.0,
        "weft-bounded": 0.8,
        "dispatch[x]": 0.9,
        "dispatch[x]-bounded": 0.5,
    }
    rows = [*_layer("one", queued, "queued"), *_layer("two-zipf1", {"serial": 2.0, "weft": 4.0}, "queued")]
    text = markdown([*rows, *_layer("one", {"padded": 3.0, "weft-bounded": 1.5}, "graph")])
    lines = {line.split(" | ")[0]: line for line in text.splitlines()}
    assert "| 2 | 4 | 1 | 0.8 | 2.00x | 2.50x | 5.00x | 0.4 | 0.5 | 0.5 | dispatch[x]-bounded |" in text
    assert "| 2 |  | 4 |  | 0.50x |  |  | 0.4 | 0.5 |  |  |" in lines["| two-zipf1"], (
        "what was not measured is left empty"
    )
    said = next(line for line in text.splitlines() if line.startswith("Geometric means of the speed of weft:"))
    assert "with even routing (1 shape) 2.00x serial; with skewed routing (1 shape) 0.50x serial" in said, "means apart"
    assert "The worst speed is 0.50x serial (two-zipf1). 50% of the shapes reach at least 0.98x serial." in said
    assert "On 0% of the shapes the time is within 3% of the time of the only schedule pinned by name" in said
    bounded = next(
        line for line in text.splitlines() if line.startswith("Geometric means of the speed of weft-bounded:")
    )
    assert (
        "with even routing (1 shape) 2.50x serial and 5.00x padded. The worst speed is 2.50x serial (one) "
        "and 5.00x padded (one)." in bounded
    )
    graph = text[text.index("**graph**") :]
    assert "| 3 | 1.5 | 2.00x | 0.4 | 0.5 |" in graph
    assert "with even routing (1 shape) 2.00x padded. The worst speed is 2.00x padded (one)" in graph


_GATHER = {
    "op": "all_gather_matmul", "dtype": "bf16", "run": "b", "ranks": 2, "machine": "an abacus",
    "versions": {"torch": "2.13.0"}, "date": "2026-11-21T10:00:00Z",
}  # fmt: skip
"""The fields of that operator's record about its run."""


def test_one_file_may_hold_several_operators() -> None:
    measured = {"serial": 1.0, "asynctp": 1.2, "weft": 0.8}
    shapes = [_shape("64x1x1", variant, ms) | _GATHER for variant, ms in measured.items()]
    both = markdown([*_records("one"), *shapes])
    assert both.index("embedding_all_to_all, **queued**, fp32") < both.index("all_gather_matmul, **queued**, bf16")
    assert "| 64x1x1 | 1 | 1.2 | 0.8 | 1.25x | 1.50x | 0.5 | 1.60 |" in both
    assert "100% of the shapes reach at least 0.98x. Relative to asynctp the mean is 1.50x for M <= 2048." in both
    assert "all_gather_matmul" not in markdown(shapes), "a file of one operator need not name it"


def test_a_later_run_replaces_an_earlier_one_whole() -> None:
    later = [r for r in _records("one", run="b", factor=2) if r["variant"] != "put"]
    table = markdown([*_records("one"), *later])
    assert "put" not in table
    assert "| 20 |" in table
    captured = [r | {"mode": "graph"} for r in later]
    both = markdown([*_records("one"), *captured])
    assert "**queued**" in both, "other modes of it may have been measured in another run"
    assert "**graph**" in both


def test_what_calls_cost_the_host_is_said_of_queued_ones() -> None:
    common = _GATHER | {"host_us": 80.0, "first_call_ms": 3.0}
    rows = [_shape("64x1x1", variant, 1.0) | common for variant in ("serial", "weft")]
    said = (
        "Medians: a call keeps the CPU busy for 80 us with serial, 80 us with weft. The first call of a shape takes 3 ms with "
        "serial, 3 ms with weft."
    )
    assert said in markdown([r | {"mode": "queued"} for r in rows])
    assert "Medians:" not in markdown([r | {"mode": "graph"} for r in rows])


def test_the_fastest_of_each_kind_is_told_where_there_are_many() -> None:
    common = _GATHER | {"mode": "queued"}
    measured = {"serial": 9.0, "weft": 3.0, "gather[by=dma]": 4.0, "shard[chunks=1]": 2.0, "shard[chunks=2]": 3.0}
    few = [_shape("64x1x1", variant, ms) | common for variant, ms in measured.items()]
    assert "of each kind" not in markdown(few)
    many = markdown([*few, _shape("64x1x1", "ficco_1d[steps=0]", 5.0) | common])
    assert "| M x N x K | gather (1) | shard (2) | ficco_1d (1) |" in many
    assert "| 64x1x1 | 4 | 2 | 5 |" in many


def test_serial_is_not_faster_than_serial() -> None:
    rows = [_shape("64x1x1", "serial", 2.0), _shape("64x1x1", "weft", 1.0, asynctp=None, chosen="serial")]
    text = markdown([r | _GATHER for r in rows])
    assert "| 64x1x1 | 2 | 1 | (2.00x) |" in text
    assert (
        "1 pair of variants ran the same schedule. Because of noise and of weft's own code, their times differ by 50.0%"
        in text
    )


def test_times_under_a_millisecond_on_cpu_are_not_shown() -> None:
    table = markdown([*_records("short", factor=0.2), *_records("long")])
    assert "| long |" in table
    assert "short" not in table, "though only some of its times are short: ratios are of two"
    gpu = [r | {"device": "cuda"} for r in _records("short", factor=0.2)]
    assert "| short |" in markdown(gpu)
    with pytest.raises(ValueError, match="all 4 records have times under 1 ms on CPU"):
        markdown(_records("short", factor=0.2))


def test_rows_of_another_harness_are_told_apart() -> None:
    old = [r | {"commit": "1234567", "source": None, "variables": None, "harness": 1} for r in _records("old")]
    table = markdown([*_records("new"), *_records("newer"), *old])
    assert (
        f"old: commit 1234567 (hash of sources not recorded), harness 1 (newest: {HARNESS}); all others: commit abcdef0123"
        in table
    )
    assert "all others" not in markdown(_records("new"))


def test_a_bar_in_a_name_does_not_break_the_table() -> None:
    assert "| fused-inter/256\\|64 |" in markdown(_records("fused-inter/256|64"))


def test_only_what_is_marked_is_rewritten(tmp_path: Path) -> None:
    document = "before\n<!-- results:cpu -->\nold\n<!-- /results -->\nafter\n"
    new = rewrite(document, {"cpu": _records("one")})
    assert new.startswith("before\n<!-- results:cpu -->\n2 ranks")
    assert new.endswith("<!-- /results -->\nafter\n")
    assert "old" not in new
    assert rewrite(new, {"cpu": _records("one")}) == new
    with pytest.raises(ValueError, match="shows records of cpu, but only records of gpu are given: pass"):
        rewrite(document, {"gpu": _records("one")})
    empty = document.replace("old\n", "")
    assert rewrite(empty, {"gpu": _records("one")}) == empty, "a block may wait for its first recorded run"
    path, results = tmp_path / "README.md", tmp_path / "cpu.jsonl"
    path.write_text(document)
    records.append(results, _records("one"))
    main([str(path), str(results)])
    assert path.read_text() == new


def test_without_a_document_the_tables_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "cpu.jsonl", tmp_path / "later.jsonl"]
    for path, factor in zip(paths, (1.0, 2.0), strict=True):
        records.append(path, _records("one", factor=factor))
    main([str(path) for path in paths])
    shown = capsys.readouterr().out
    assert shown == f"cpu\n\n{markdown(_records('one'))}\nlater\n\n{markdown(_records('one', factor=2.0))}\n"
    assert "| one |" in shown
    records.append(paths[1], _records("short", factor=0.2))
    main([str(paths[1])])
    shown = capsys.readouterr().out
    assert "| short |" in shown
    assert shown.endswith("\nTimes under 1 ms on CPU are here too; documents leave them out.\n\n")
    paths[0].write_text("")
    with pytest.raises(SystemExit) as end:
        main([str(paths[0])])
    assert end.value.code == 2
    assert "cpu has no records: record a run" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "study"), [("sim-ficco", ficco), ("sim-t3", t3), ("sim-t3-hardware", t3_hardware)])
def test_simulated_records_are_shown_as_their_study_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, study: ModuleType
) -> None:
    results = ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    simulated = records.read([results])
    tables = study.markdown(simulated)
    main([str(results)])
    assert capsys.readouterr().out == f"{name}\n\n{tables}\n"
    assert markdown([*simulated, *_records("one")]) == f"{markdown(_records('one'))}\n{tables}", "measured ones apart"
    document = f"<!-- results:{name} -->\n<!-- /results -->\n"
    assert tables in rewrite(document, {name: simulated})
    page = tmp_path / "page.md"
    page.write_text(document.replace("results:", "study:inefficiency "))
    with pytest.raises(SystemExit):
        main([str(page), str(results)])
    assert (
        "study:inefficiency: there is no study with this name, or it has no page: use one of ficco, fused_embedding, "
        in capsys.readouterr().err
    )
    with pytest.raises(
        ValueError, match=r"no study simulates embedding_all_to_all \(studies simulate all_gather_matmul, matmul_"
    ):
        markdown([r | {"device": "simulated"} for r in _records("one")])


@pytest.mark.slow
def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    results = ROOT / "benchmarks" / "results" / "sim-ficco.jsonl"
    command = [sys.executable, "-m", "weft.bench.report", str(results)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        assert program.stderr.read() == ""
        assert program.wait(timeout=300) == 1


def test_a_file_is_written_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.md"
    path.write_text("before")
    path.chmod(0o640)
    write_whole(path, "after")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("after", 0o640)
    link = tmp_path / "link.md"
    link.symlink_to(path)
    write_whole(link, "through a link")
    assert (path.read_text(), link.is_symlink()) == ("through a link", True)

    def ended_half_way(part: Path, text: str) -> int:
        with part.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", ended_half_way)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "never")
    assert path.read_text() == "through a link"
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_records_are_appended_whole_and_behind_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    records.append(path, _records("one"))
    path.write_bytes(path.read_bytes()[:-1])
    records.append(path, _records("two"))
    assert records.read([path]) == [*_records("one"), *_records("two")]
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        records.append(path, [*_records("three"), {"p50_ms": math.nan}])
    assert path.read_bytes() == before


def test_a_sentence_has_its_factor_from_the_records(tmp_path: Path) -> None:
    sentence = "**<!-- gain:cpu queued fp32 direct/embedding_bag -->9x<!-- /gain --> as fast.** <!-- /x -->\n"
    new = rewrite(sentence, {"cpu": [*_records("one"), *_records("two", factor=3)]})
    assert new == sentence.replace("9x", "2.50x")
    with pytest.raises(ValueError, match="queued fp32 times of both 'direct' and 'nccl'"):
        rewrite(sentence.replace("embedding_bag", "nccl"), {"cpu": _records("one")})
    with pytest.raises(ValueError, match="shows records of cpu, but no records are given"):
        rewrite(sentence, {})
    two, results = [tmp_path / "README.md", tmp_path / "page.md"], tmp_path / "cpu.jsonl"
    for path in two:
        path.write_text(sentence)
    records.append(results, _records("one"))
    main([str(path) for path in (*two, results)])
    assert [path.read_text() for path in two] == [sentence.replace("9x", "2.50x")] * 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 cannot be read: Expecting property name"),
        ("[" * 100_000, "line 2 cannot be read: it is nested 100000 deep"),
        ("[1]", "line 2: found a list, but a record is a JSON object"),
        ('{"op": "sorting"}', "line 2: unknown op 'sorting': remove the line, or correct it to one of all_gather_"),
        ('{"op": []}', "line 2: unknown op []"),
        (json.dumps({"op": "a." * 1000}), "unknown op 'a.a."),
        ('{"config": "one"}', "line 2: the record has no 'op': remove the line, or measure one again"),
        (json.dumps({k: v for k, v in _records("one")[2].items() if k != "roofline_ratio"}), "line 2: the record has no 'roof"),
        (json.dumps({**_records("one")[2], "p50_ms": "fast"}), "a record has a value of a wrong type or size"),
        (None, "results:cpu has no records: record a run"),
    ],
)  # fmt: skip
def test_broken_records_are_a_sentence_with_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str | None, says: str
) -> None:
    path, results = tmp_path / "README.md", tmp_path / "cpu.jsonl"
    path.write_text(document := "<!-- results:cpu -->\nold\n<!-- /results -->\n")
    results.write_text("" if line is None else f"{json.dumps(_records('one')[0])}\n{line}\n")
    with pytest.raises(SystemExit) as end:
        main([str(path), str(results)])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert "line 2" not in says or f"error: {results}, line 2" in said
    assert path.read_text() == document


@pytest.mark.parametrize("missing", ["README.md", "cpu.jsonl"])
def test_files_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str) -> None:
    paths = [tmp_path / "README.md", tmp_path / "cpu.jsonl"]
    for path in paths:
        path.touch()
    (tmp_path / missing).unlink()
    with pytest.raises(SystemExit) as end:
        main([str(path) for path in paths])
    assert end.value.code == 2
    assert f"No such file or directory: '{tmp_path / missing}'" in capsys.readouterr().err


def test_the_documents_of_this_repository_are_up_to_date() -> None:
    results = {path.stem: records.read([path]) for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        assert rewrite(path.read_text(), results) == path.read_text(), f"{path.name} is out of date: run make docs"
