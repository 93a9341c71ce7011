"""Write the tables of speed in docs/torchrec.md from their records: `python docs/torchrec_page.py`.

`torchrun --nproc-per-node 2 benchmarks/torchrec_modules.py --json FILE` writes a record. The page shows the records
benchmarks/results/*-torchrec.json, and a test compares it with them. Nothing here is installed with weft.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from weft.bench.core.tables import geomean, markdown_table, times

PAGE = Path(__file__).parent / "torchrec.md"
RECORDS = sorted((PAGE.parents[1] / "benchmarks" / "results").glob("*-torchrec.json"))
_MARK = re.compile(r"(?P<open><!-- torchrec -->\n).*?(?P<close><!-- /torchrec -->)", re.DOTALL)
_PARTS = ("forward", "step")


def body() -> str:
    """Return a table for each record, with a line on how it was measured."""
    tables = "\n".join(_table(json.loads(record.read_text())) for record in RECORDS)
    return f"{tables}\nA step is forward, backward and a fused SGD update. Batches are new KeyedJaggedTensors of local samples.\n"


def _table(records: list[dict[str, Any]]) -> str:
    rows = [
        [record["case"], *(cell for part in _PARTS for cell in _cells(record["ms"], part))]
        for record in records
    ]  # fmt: skip
    gains = {part: [record["ms"][f"{part}, speedup"] for record in records] for part in _PARTS}
    means = [cell for part in _PARTS for cell in ("", "", times(geomean(gains[part])))]
    columns = ["tables x rows x dimension, batch of a rank, mean ids", *(
        f"{part}, {what}" for part in _PARTS for what in ("TorchRec (ms)", "weft (ms)", "speedup")
    )]  # fmt: skip
    table = markdown_table(columns, [*rows, ["geometric mean", *means]])
    first = records[0]
    peers = " and ".join(f"{name} {release}" for name, release in first["peers"].items())
    where = f"{first['machine']}, {peers}, torch {first['versions']['torch']}, fp32, table-wise with the same owners"
    return f"{table}\n\n{where}, commit {first['commit']}.\n"


def _cells(ms: dict[str, float], part: str) -> list[str]:
    return [f"{ms[f'{part}, torchrec']:.2f}", f"{ms[f'{part}, weft']:.2f}", times(ms[f"{part}, speedup"])]


def page() -> str:
    """Return the page with the table of the record."""
    return _MARK.sub(lambda mark: f"{mark['open']}{body()}{mark['close']}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
