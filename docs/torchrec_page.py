"""Write the tables of speed in docs/torchrec.md, and the speedups over TorchRec there and in the README, from their
records: `python docs/torchrec_page.py`.

`torchrun --nproc-per-node 2 benchmarks/torchrec_NAME.py --json FILE` writes a record. The page shows the records
benchmarks/results/*-torchrec.json (of NAME=modules) and *-torchrec-NAME.json. A mark `<!-- torchrec-gain:RECORD PART -->`
is followed by the geometric mean over the record's cases; with ` worst` after PART, by the smallest speedup. A test
compares both documents with the records. Nothing here is installed with weft.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from weft.bench.core.tables import geomean, markdown_table, times

PAGE = Path(__file__).parent / "torchrec.md"
README = PAGE.parents[1] / "README.md"
RESULTS = PAGE.parents[1] / "benchmarks" / "results"
_MARK = re.compile(r"(?P<open><!-- torchrec:(?P<name>\w+) -->\n).*?(?P<close><!-- /torchrec -->)", re.DOTALL)
_GAIN = re.compile(
    r"(?P<open><!-- torchrec-gain:(?P<record>\S+) (?P<part>forward|step)(?P<worst> worst)? -->)[^<]*<!-- /torchrec-gain -->"
)
_CASE = "tables x rows x dimension, batch of a rank, mean ids"
_NOTES = {
    "modules": (
        "fp32, table-wise with the same owner of each table",
        "A step is forward, backward and a fused SGD update. Batches are new KeyedJaggedTensors of local samples.",
    ),
    "sharders": (
        "fp32, the same plans",
        "All times are of `DistributedModelParallel`, with TorchRec's sharder or with weft's. A step is forward, backward and "
        "the update of all\ntables. The update is SGD. The cases `row-wise, rows` look up rows without pooling, with "
        "`use_index_dedup=True` and rowwise Adagrad: B is\nsamples x ids of a sample, and 2% of the ids of a batch are distinct. "
        "In the\ncase `distinct ids`, all ids are distinct, so removing duplicates only costs time. "
        "TorchRec without\n`use_index_dedup` was not timed.",
    ),
    "pipeline": (
        "fp32, table-wise with the same owner of each table",
        "A step trains the tables and two dense layers. Exposed: the time of a step minus the time of a step whose ids were "
        "distributed\nbeforehand. Hidden: the share of a plain loop's exposed time that the pipeline hides.",
    ),
}


def records(name: str) -> list[Path]:
    """Return the records of benchmarks/torchrec_NAME.py."""
    return sorted(RESULTS.glob("*-torchrec.json" if name == "modules" else f"*-torchrec-{name}.json"))


def body(name: str) -> str:
    """Return a table for each record, with a line on how it was measured."""
    table, (how, note) = (_pipelines if name == "pipeline" else _steps), _NOTES[name]
    found = []
    for record in records(name):
        lines = json.loads(record.read_text())
        first = lines[0]
        peers = " and ".join(f"{peer} {release}" for peer, release in first["peers"].items())
        where = f"{first['machine']}, {peers}, torch {first['versions']['torch']}, {how}, commit {first['commit']}."
        found.append(f"{table(lines, has_mean=name == 'modules')}\n\n{where}\n")
    return "\n".join(found) + f"\n{note}\n"


def _steps(lines: list[dict[str, Any]], has_mean: bool) -> str:
    parts = ("forward", "step")
    rows = [[line["case"], *(cell for part in parts for cell in _pair(line["ms"], part))] for line in lines]
    gains = {part: [line["ms"][f"{part}, speedup"] for line in lines] for part in parts}
    means = [cell for part in parts for cell in ("", "", times(geomean(gains[part])))]
    columns = [f"{part}, {what}" for part in parts for what in ("TorchRec (ms)", "weft (ms)", "speedup")]
    return markdown_table([_CASE, *columns], [*rows, *([["geometric mean", *means]] if has_mean else [])])


def _pair(ms: dict[str, float], part: str) -> list[str]:
    return [f"{ms[f'{part}, torchrec']:.2f}", f"{ms[f'{part}, weft']:.2f}", times(ms[f"{part}, speedup"])]


def _pipelines(lines: list[dict[str, Any]], has_mean: bool) -> str:
    ways = {
        "TorchRec": ("torchrec", "pipeline"),
        "weft's sharder": ("weft", "pipeline"),
        "`weft.nn.prefetched`": ("weft", "prefetch"),
    }
    rows = []
    for line in lines:
        row, ms = [line["case"]], line["ms"]
        for by, way in ways.values():
            step = ms[f"{by}, {way}"]
            row += [f"{step:.2f}", f"{step - ms[f'{by}, distributed']:.2f}", f"{ms[f'{by}, hidden by {way}']:.0%}"]
        rows.append([*row, times(ms["speedup"])])
    columns = [f"{way}, {what}" for way in ways for what in ("step (ms)", "exposed (ms)", "hidden")]
    return markdown_table([_CASE, *columns, "weft's sharder, speedup"], rows)


def _gain(mark: re.Match[str]) -> str:
    lines = json.loads((RESULTS / f"{mark['record']}.json").read_text())
    gains = [line["ms"][f"{mark['part']}, speedup"] for line in lines]
    return f"{mark['open']}{times(min(gains) if mark['worst'] else geomean(gains))}<!-- /torchrec-gain -->"


def written(document: Path) -> str:
    """Return the document with the tables and speedups of the records."""
    text = _MARK.sub(lambda mark: f"{mark['open']}{body(mark['name'])}{mark['close']}", document.read_text())
    return _GAIN.sub(_gain, text)


if __name__ == "__main__":
    for document in (PAGE, README):
        document.write_text(written(document))
