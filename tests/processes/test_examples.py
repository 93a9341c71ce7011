"""The examples run as described in their headers, on CPU processes. docs/schedules.md shows the output of its code."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.scripts import EXAMPLES, load

from weft.builders import MatmulReduceScatter, named, unregister
from weft.errors import ScheduleError
from weft.hw import load_machine
from weft.schedule.verify import verify
from weft.sim import model_of, simulate

ROOT = Path(__file__).parents[2]
GEMMS = ("matmul h", "matmul y")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    found = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("dlrm_inference.py --check", "start one process per rank: torchrun --nproc-per-node 2 "),
        ("dlrm.py --lr nan", "--lr nan must be a finite number of at least 0"),
        ("dlrm.py --ranks 0", "--ranks 0 must be at least 1"),
        ("tp_transformer.py --length 0", "--length 0 must be at least 1"),
        ("moe.py --schedule nope", "no schedule 'nope' for all_to_all_matmul; the nearest are "),
        ("moe.py --back combine", "no schedule 'combine' for matmul_all_to_all; the nearest are "),
        ("survivors.py --steps 0", "--steps 0 must be at least 1"),
    ],
)
def test_bad_options_are_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, command: str, text: str
) -> None:
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit):
        load(EXAMPLES / sys.argv[0]).main()
    assert f"{sys.argv[0]}: error: {text}" in capsys.readouterr().err


def test_dlrms_help_explains_each_placement(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["dlrm.py", "--help"])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit):
        load(EXAMPLES / "dlrm.py").main()
    choices, text = re.search(r"\n  --placement \{(.*?)\}(.*?)--criteo", capsys.readouterr().out, re.DOTALL).groups()
    assert re.findall(r"(\w+): ", text) == choices.split(",")


@pytest.mark.slow
def test_dlrm_agrees_with_the_unsharded_model() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--device", "cpu", "--check", "--batch", "128", "--steps", "3"]
    printed = run(*launcher, EXAMPLES / "dlrm_inference.py", *arguments)
    for rank in range(2):
        assert f"rank {rank}: 4 batches agree with the unsharded model" in printed
    assert "samples/s on 2 ranks" in printed


# -- training a DLRM


def trained(*options: str) -> float:
    """Run the example with these options. Return the AUC on held-out samples that it prints."""
    printed = run(EXAMPLES / "dlrm.py", *options, "--device", "cpu")
    return float(re.findall(r"held-out AUC (\d\.\d+)", printed)[-1])


@pytest.mark.slow
def test_dlrm_learns_as_embedding_bags_in_one_process() -> None:
    """The example trains for few steps here. With its default number of steps the AUC is 0.84. A click depends mostly
    on the ids.
    """
    small = ["--steps", "60", "--every", "60", "--batch", "1024", "--held-out", "4"]
    ours, reference, dense = trained(*small), trained(*small, "--reference"), trained(*small, "--dense-only")
    assert abs(trained(*small, "--placement", "rows") - reference) <= 0.002
    assert ours >= 0.75
    assert abs(ours - reference) <= 0.002
    assert dense < 0.6


def test_criteos_files_are_read(tmp_path: Path) -> None:
    data = load(EXAMPLES / "click_data.py")
    ids = [f"{i:08x}" for i in range(26)]
    rows = [["1", *map(str, range(13)), *ids], ["0", "", "-3", *[""] * 11, *[""] * 25, "ffffffff"]]
    path = tmp_path / "day.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    (batch,) = data.criteo(path, 8)
    assert batch.clicks.tolist() == [1.0, 0.0]
    assert batch.dense[0].expm1().round().tolist() == list(range(13))
    assert batch.dense[1].tolist() == [0.0] * 13
    assert batch.lengths.view(26, 2).tolist() == [[1, 0]] * 25 + [[1, 1]]
    assert batch.ids.tolist() == [*range(25), 25, 0xFFFFFFFF]
    second = batch.part(1, 2)
    assert (second.ids.tolist(), second.lengths.tolist()) == ([0xFFFFFFFF], [0] * 25 + [1])
    path.write_text("1\t2\n")
    with pytest.raises(ValueError, match="line 1 has 2 fields: a Criteo file has 40"):
        next(data.criteo(path, 8))


def test_click_batches_are_parts_of_one_batch() -> None:
    data = load(EXAMPLES / "click_data.py")
    clicks = data.ClickModel(rows=50)
    whole, again, other = clicks.batch(3, 10), clicks.batch(3, 10), clicks.batch(4, 10)
    assert all((one == two).all() for one, two in zip(vars(whole).values(), vars(again).values(), strict=True))
    assert (whole.dense != other.dense).any()
    parts = [whole.part(0, 4), whole.part(4, 4), whole.part(4, 10)]
    lengths = [part.lengths.view(26, -1) for part in parts]
    assert [one.shape[1] for one in lengths] == [4, 0, 6]
    ids = [part.ids.split(of.sum(1).tolist()) for part, of in zip(parts, lengths, strict=True)]
    joined = [i for feature in range(26) for of_part in ids for i in of_part[feature].tolist()]
    assert joined == whole.ids.tolist()


# -- a mixture-of-experts layer


@pytest.mark.slow
def test_experts_agree_with_a_dense_layer_in_float64() -> None:
    small = ["--preset", "mixtral", "--shrink", "128", "--tokens", "32", "--repetitions", "1"]
    pinned = ["--schedule", "dispatch[by=kernel,rest=each]", "--back", "combine[chunks=1,by=kernel]"]
    printed = run(EXAMPLES / "moe.py", *small, *pinned)
    errors = re.findall(r"(\S.*): error (\S+) against float64; unfused calls: (\S+)", printed)
    assert [what for what, _, _ in errors] == ["y", "x grad", "router grad", "gate_up grad", "down grad"]
    assert all(0 < float(ours) <= 2 * float(usual) < 1e-5 for _, ours, usual in errors)
    assert "to peers: copy tokens -> inbox@1" in printed
    assert "copy outbox -> inbox@1" in printed
    trained = re.search(r"^8 steps of training: loss (\S+) -> (\S+); .*: the same to (\S+)$", printed, re.MULTILINE)
    assert trained is not None
    first, last, off = map(float, trained.groups())
    assert last < 0.9 * first
    assert off <= 1e-5
    assert re.search(r"^forward and backward: .*: \d+\.\d\dx$", printed, re.MULTILINE)


@pytest.mark.slow
def test_experts_under_torchrun_with_the_librarys_calls() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    small = ["--preset", "deepseek", "--shrink", "128", "--tokens", "32", "--repetitions", "1"]
    printed = run(*launcher, EXAMPLES / "moe.py", *small, "--schedule", "serial", "--back", "serial")
    assert "    compute: exchange splits -> received (" in printed
    assert re.search(r"^8 steps of training: .* to 0.0e\+00$", printed, re.MULTILINE)
    assert re.search(r"^forward and backward: .*: the same schedule", printed, re.MULTILINE), (
        "no gain over itself is claimed"
    )
    assert printed.count("against float64") == 5


@pytest.mark.slow
def test_the_help_of_moe_teaches() -> None:
    text = run(EXAMPLES / "moe.py", "--help")
    for words in (
        "top_k(softmax(x @ router))",
        "weft.matmul_all_to_all: rows leave as they are computed",
        "--preset deepseek --ranks 4",
        "torchrun --nproc-per-node 2",
        "{mixtral,deepseek}",
    ):
        assert words in text


# -- a chain of GEMMs as one schedule


@pytest.mark.slow
def test_the_chain_runs_prints_itself_and_is_drawn(tmp_path: Path) -> None:
    import matplotlib.image  # not imported at the top, because ranks and workers import this file too

    printed = run(EXAMPLES / "gemm_chain.py", "--rows", "64", "--width", "48", "--hidden", "96", "--trace", tmp_path)
    assert "lane GEMM 2 (compute)" in printed
    errors = re.findall(r"rank (\d): error (\S+) against float64; torch, one step after the other: (\S+)", printed)
    assert [rank for rank, _, _ in errors] == ["0", "1"]
    assert all(0 < float(ours) <= 2 * float(usual) < 1e-5 for _, ours, usual in errors)
    events = json.loads((tmp_path / "gemm_chain.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events if e["name"] == "matmul y"} == {0, 1}
    assert min(matplotlib.image.imread(tmp_path / "gemm_chain.png").shape[:2]) > 300


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_what_the_first_gemm_has_done_flows_on(world: int) -> None:
    schedule = load(EXAMPLES / "gemm_chain.py").chain(world, 512, 512, 1024, 4)
    verify(schedule)
    timeline = simulate(schedule, model_of(load_machine("h200"), world)).timeline
    for rank in range(world):
        starts = {name: [s.start_us for s in timeline if (s.rank, s.name) == (rank, name)] for name in GEMMS}
        assert [len(times) for times in starts.values()] == [4 * world] * 2
        assert starts["matmul y"][0] < starts["matmul h"][2]


def test_its_help_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    load(EXAMPLES / "gemm_chain.py").parser().print_help()
    text = capsys.readouterr().out
    for words in ("as one schedule", "python examples/gemm_chain.py --trace", "--chunks CHUNKS", "(default: 2)"):
        assert words in text


# -- a tensor-parallel transformer


def losses(printed: str) -> list[tuple[float, float]]:
    """Return the losses of weft's model, and of torch's."""
    found = re.findall(r"^step +\d+  loss (\S+)  unfused (\S+)  apart \S+$", printed, re.MULTILINE)
    return [(float(ours), float(torchs)) for ours, torchs in found]


@pytest.mark.slow
def test_the_transformer_learns_as_torchs_does(tmp_path: Path) -> None:
    text, steps = tmp_path / "text", 12
    text.write_text("weft weaves communication through computation. " * 30)
    printed = run(EXAMPLES / "tp_transformer.py", "--unfused", "--ranks", "4", "--steps", str(steps), "--text", text)
    found = losses(printed)
    assert len(found) == steps
    assert all(abs(ours / torchs - 1) < 1e-5 for ours, torchs in found)
    assert found[0][0] > 5  # an untrained model predicts one of 256 bytes: log(256) = 5.5
    assert found[-1][0] < 2.7
    assert f"{text.stat().st_size} bytes of {text}" in printed


def test_the_transformers_help_teaches_and_bad_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    module = load(EXAMPLES / "tp_transformer.py")
    module.parser().print_help()
    text = capsys.readouterr().out
    for words in (
        "weft.nn.ParallelMLP",
        "--unfused",
        "--ranks 4 --text FILE",
        "torchrun --nproc-per-node 2",
        "(default: 60)",
    ):
        assert words in text
    for words, ranks, message in (
        (["--text", "nowhere"], 2, "--text nowhere does not exist"),
        (["--length", "129"], 2, "--length 129 must be divisible by --ranks 2"),
        (["--hidden", "96"], 2, "--hidden 96 must be divisible by 64"),
        (["--length", "1000000"], 2, "give a file with more than --length 1000000 bytes"),
        (["--steps", "0"], 2, "must be at least 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            module.check(module.parser().parse_args(words), ranks)


# -- the page on schedules

PAGE = (ROOT / "docs" / "schedules.md").read_text()
SCRIPT, MESSAGES, NORM, LATE, SEEING, MAP = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TABLE, RACE, HANG = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def functions_of(script: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(script, "docs/schedules.md", "exec"), names)
    return names


@pytest.mark.slow
def test_the_whole_page_is_one_program(tmp_path: Path) -> None:
    """Ranks import the page's code again, so code other than definitions must be guarded."""
    (tmp_path / "page.py").write_text("\n\n".join((SCRIPT, MESSAGES, NORM, LATE, SEEING, MAP)))
    printed = run("page.py", cwd=tmp_path)
    assert printed.startswith(TABLE)
    assert printed.removeprefix(TABLE).count("a rank has nothing to compute\n") == 1
    assert {"from_the_left.json", "from_the_left.png"} < {path.name for path in tmp_path.iterdir()}
    assert re.sub(r"\s+", " ", PAGE[: PAGE.index("## Words")]).count("form one program") == 1


def test_every_block_of_the_page_is_guarded() -> None:
    for block in (SCRIPT, MESSAGES, NORM, LATE, SEEING, MAP):
        *_, last = ast.parse(block).body
        assert isinstance(last, ast.If)
        assert ast.unparse(last.test) == "__name__ == '__main__'"
        assert not any(isinstance(one, (ast.Expr, ast.Assign)) for one in ast.parse(block).body)


def test_the_pages_norm() -> None:
    names = functions_of(SCRIPT)
    exec(NORM, names)
    assert "reduce  y = a + b; z = rms_norm(y) * g, eps 1e-06" in str(names["normed_sum"](rows=4, n=8))


@pytest.mark.parametrize("message", [RACE, HANG], ids=["race", "hang"])
def test_what_is_left_out_is_missed_as_the_page_says(message: str) -> None:
    """The page marks the lines to omit, and shows the beginning of the message, with its own line breaks."""
    left_out = re.findall(r"Without\s`([^`]+)`", PAGE[: PAGE.index(message)])[-1]
    assert SCRIPT.count(left_out) == 1
    build = functions_of(SCRIPT.replace(left_out, ""))["from_the_left"]
    with pytest.raises(ScheduleError) as caught:
        verify(build(world=2, rows=64, k=32, n=16, chunks=2))
    assert " ".join(str(caught.value).split()).startswith(" ".join(message.removesuffix("...\n").split()))


def test_the_page_sees_its_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(SEEING, functions_of(SCRIPT) | {"__name__": "__main__"})
    assert re.fullmatch(r"\d+ us. During \d+ us of this time, a rank has nothing to compute\n", capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"from_the_left.json", "from_the_left.png"}


def test_the_pages_output_map_is_a_candidate() -> None:
    try:
        exec(MAP, functions_of(SCRIPT))
        for world in (2, 3, 4):
            verify(named(MatmulReduceScatter(world, 8 * world, 3, 2, "bf16"), "both_ways").build())
    finally:
        unregister(MatmulReduceScatter, "both_ways")


def test_the_pages_links_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
    for path in re.findall(r"`((?:weft|tests)/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path
