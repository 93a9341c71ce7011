"""Pages that are generated from records and docstrings."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from support.scripts import DOCS, load

import weft
from weft import env

ROOT = Path(__file__).parents[2]
generate, page = load(DOCS / "generate.py"), load(DOCS / "package_page.py")


@pytest.mark.parametrize("name", ["api", "environment"])
def test_the_pages_are_up_to_date(name: str) -> None:
    assert getattr(generate, name)() == (DOCS / f"{name}.md").read_text(), "out of date: python docs/generate.py"


def test_every_public_name_and_argument_is_on_the_page() -> None:
    text = generate.api()
    for name in weft.__all__:
        assert not callable(getattr(weft, name)) or f"### weft.{name}\n" in text
    about = text[text.index("### weft.all_gather_matmul\n") : text.index("### weft.all_gather_scaled_matmul")]
    assert "- `gather_dim`: any dimension except the last.\n" in about
    assert "    rows: Sequence[int] | None = None,\n" in about
    assert "| `DeadlineError` | A wait exceeded its deadline. |" in text


def test_the_api_page_begins_with_its_contents() -> None:
    text = generate.api()
    contents, page = text[: text.index("\n## ")], text[text.index("\n## ") :]
    headings = re.findall(r"^#{2,3} (\S+)$", page, re.MULTILINE)
    anchors = re.findall(r"\]\(#([\w-]+)\)", contents)
    assert len(anchors) == len(set(anchors)) == len(headings)
    made = [heading.lower().replace(".", "") for heading in headings]
    assert {anchor.removesuffix("-1") for anchor in anchors} == set(made)


def test_every_variable_that_is_read_is_in_the_table() -> None:
    source = Path(env.__file__ or "").read_text()
    strings = {n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    read = {text for text in strings if re.fullmatch(r"[A-Z]+_?[A-Z_]+", text)}
    assert {"WEFT_DEADLINE_S", "WEFT_CACHE_DIR", "RANK"} <= read
    table = generate.environment()
    for name in read:
        assert f"`{name}" in table or f"`{name.partition('_')[0]}_*`" in table, name


def test_a_package_page_has_addresses_for_paths() -> None:
    readme = (ROOT / "README.md").read_text()
    made = page.package_page(readme, "https://host/weft")
    assert "![" in readme
    for picture, target in re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", made):
        assert target.startswith(("https://", "#")), target
        if target.startswith("https://host/weft/"):
            kind, _, path = target.removeprefix("https://host/weft/").partition("/main/")
            assert kind == ("raw" if picture else "blob"), target
            assert (ROOT / path.partition("#")[0]).exists(), target
    assert page.package_page(made, "https://host/weft") == made


def test_a_release_wants_a_real_address(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("![a](docs/a.png) [b](b.md) [c](https://c)")
    urls = '[project.urls]\nRepository = "https://{}/weft"\n'
    (tmp_path / "pyproject.toml").write_text(urls.format("repository.example"))
    with pytest.raises(SystemExit, match=r"pyproject.toml says https://repository.example/weft: give the repository's"):
        page.main(tmp_path)
    (tmp_path / "pyproject.toml").write_text(urls.format("host"))
    page.main(tmp_path)
    assert (tmp_path / "README.md").read_text() == (
        "![a](https://host/weft/raw/main/docs/a.png) [b](https://host/weft/blob/main/b.md) [c](https://c)"
    )


def test_every_address_of_the_project_is_of_one_repository() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= urls.keys()
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    for url in urls.values():
        path = url.partition("/main/")[2]
        assert (ROOT / path).exists(), url


def test_the_changelog_has_this_version() -> None:
    assert re.search(rf"^## {re.escape(weft.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load(DOCS / "hosts_page.py")


def test_the_page_and_its_picture_follow_from_the_records(script: ModuleType) -> None:
    assert script.page() == (DOCS / "hosts.md").read_text(), "out of date: python docs/hosts_page.py"
    assert script.ratios().split("\n")[0] in script.PICTURE.read_bytes().decode("latin-1"), "python docs/hosts_page.py"


@pytest.mark.parametrize("op", ["matmul_all_gather", "embedding_all_to_all", "all_to_all_matmul"])
def test_the_simulated_record_is_what_the_planner_predicts(script: ModuleType, op: str) -> None:
    recorded = [json.dumps(record) for record in json.loads(script.SIMULATED.read_text()) if record["op"] == op]
    assert len(recorded) == len(script.HOSTS)
    assert json.dumps(script.simulate(op, 2)) == recorded[0], "python docs/hosts_page.py --simulate"


def test_the_page_follows_from_the_records() -> None:
    script = load(DOCS / "torchrec_page.py")
    for document in (script.PAGE, script.README):
        assert script.written(document) == document.read_text(), (
            f"{document} is out of date: python docs/torchrec_page.py"
        )
        assert "<!-- torchrec-gain:h100-torchrec step -->" in document.read_text()
    assert {path.name for path in script.records("modules")} >= {"h100-torchrec.json", "h200-torchrec.json"}
    for name in re.findall(r"<!-- torchrec:(\w+) -->", script.PAGE.read_text()):
        for path in script.records(name):
            records = json.loads(path.read_text())
            assert records[0]["machine"] in script.body(name)
            speedup = "speedup" if name == "pipeline" else "step, speedup"
            assert all(f"{record['ms'][speedup]:.2f}x" in script.body(name) for record in records)


def test_the_page_on_training_follows_from_the_records() -> None:
    script = load(DOCS / "training_page.py")
    text = script.PAGE.read_text()
    assert script.written() == text, "out of date: python docs/training_page.py"
    assert set(re.findall(r"<!-- training:(\w+) -->", text)) == set(script.TABLES)
    for record in script.read("h100-row-wise-dedup")["records"]:
        gains = [float(gain) for gain in re.findall(r"([\d.]+)x", script.dedup().splitlines()[-1])]
        assert min(gains) - 0.005 <= record["sums_ms"] / record["dedup_ms"] <= max(gains) + 0.005


def test_a_speedup_is_a_geometric_mean_or_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load(DOCS / "torchrec_page.py")
    lines = [{"ms": {"forward, speedup": gain, "step, speedup": gain / 2}} for gain in (2.0, 4.5)]
    (tmp_path / "g-torchrec.json").write_text(json.dumps(lines))
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    for what, wanted in {"forward": "3.00x", "step": "1.50x", "step worst": "1.00x"}.items():
        mark, end = f"a <!-- torchrec-gain:g-torchrec {what} -->", "<!-- /torchrec-gain --> b"
        (tmp_path / "page.md").write_text(f"{mark}0.00x{end}")
        assert script.written(tmp_path / "page.md") == f"{mark}{wanted}{end}"


def test_a_pipeline_hides_a_part_of_the_exposed_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load(DOCS / "torchrec_page.py")
    ms = {"torchrec, pipeline": 4.0, "torchrec, distributed": 3.5, "torchrec, hidden by pipeline": 0.5}
    ms |= {"weft, pipeline": 2.5, "weft, prefetch": 2.25, "weft, distributed": 2.0, "speedup": 1.6}
    ms |= {"weft, hidden by pipeline": 0.25, "weft, hidden by prefetch": 0.75}
    known = {"machine": "2 x G", "peers": {"torchrec": "1"}, "versions": {"torch": "2"}, "commit": "abc"}
    (tmp_path / "g-torchrec-pipeline.json").write_text(json.dumps([{"case": "c", "ms": ms, **known}]))
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    assert "| c | 4.00 | 0.50 | 50% | 2.50 | 0.50 | 25% | 2.25 | 0.25 | 75% | 1.60x |" in script.body("pipeline")
