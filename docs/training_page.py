"""Write the tables at `<!-- training:NAME -->` marks of docs/training_embeddings.md: `python docs/training_page.py`.

    dedup         *-row-wise-dedup.json: `python benchmarks/row_wise_dedup.py --json FILE`
    alternatives  h100-embedding-alternatives.json: ways to send gradients that weft does not have, measured once
    atomics       the same record: SGD that sorts ids, and SGD by atomic additions
    prefetch      h100-embedding-prefetch.json: `torchrun --nproc-per-node 2 benchmarks/embedding_prefetch.py --json FILE`

Records are in benchmarks/results. A test compares the page with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from weft.bench.core.tables import markdown_table

PAGE = Path(__file__).parent / "training_embeddings.md"
RESULTS = PAGE.parents[1] / "benchmarks" / "results"
DEDUP = {
    "CPU processes on two hosts, 1 Gbit/s": "cpu-hosts-row-wise-dedup",
    "CPU processes on one host": "cpu-row-wise-dedup",
    "two H100s with NVLink": "h100-row-wise-dedup",
}
ALTERNATIVES = "h100-embedding-alternatives"
PREFETCH = "h100-embedding-prefetch"
_MARK = re.compile(r"(?P<open><!-- training:(?P<name>\w+) -->\n).*?(?P<close><!-- /training -->)", re.DOTALL)
_BAGS: dict[str, Callable[[float], bool]] = {
    "at most 0.5 distinct ids a bag": lambda ids: ids <= 0.5,
    "1 to 3 distinct ids a bag": lambda ids: 0.5 < ids <= 3,
    "more": lambda ids: ids > 3,
}
"""Columns of the table of `dedup`: which numbers of distinct ids per bag each column has."""


def read(record: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{record}.json").read_text())


def dedup() -> str:
    """Return a table of the speedup by `dedup`: a row for each record, a column for each range of distinct ids per bag."""
    rows = []
    for ranks, record in DEDUP.items():
        found = [(of["distinct_per_bag"], of["sums_ms"] / of["dedup_ms"]) for of in read(record)["records"]]
        assert all(any(belongs(ids) for belongs in _BAGS.values()) for ids, _ in found)
        rows.append([ranks, *(_range([gain for ids, gain in found if belongs(ids)]) for belongs in _BAGS.values())])
    return markdown_table(["ranks", *_BAGS], rows)


def _range(gains: list[float]) -> str:
    return f"{min(gains):.2f}x to {max(gains):.2f}x"


def alternatives() -> str:
    """Return a table of milliseconds: the exchange of gradients and the update, beside ways that weft does not have."""
    columns: dict[str, Callable[[Any], float]] = {
        "exchange, then rowwise Adagrad": itemgetter("exchange, then update"),
        "rowwise Adagrad beside the exchange, without waits": lambda of: min(
            ms for name, ms in of.items() if name.startswith("update beside exchange")
        ),
        "exchange, then SGD by local atomics": itemgetter("SGD, exchange and local atomics"),
        "SGD by remote atomics": itemgetter("SGD, remote atomics"),
    }
    return _milliseconds("parts", columns)


def atomics() -> str:
    """Return a table of milliseconds of whole training steps by SGD."""
    return _milliseconds("whole steps", {name: itemgetter(name) for name in ("SGD, sorted", "SGD, atomics")})


def prefetch() -> str:
    """Return a table of milliseconds of a step: with and without `prefetch`, with and without `max_ids`."""
    columns = {
        "plain": "plain", "prefetch": "`prefetch`", "bounded": "`max_ids`", "ahead": "`max_ids` and `prefetch`",
        "distributed": "without the exchange of ids",
    }  # fmt: skip
    rows = [[of["case"], *(f"{of['ms'][way]:.2f}" for way in columns)] for of in read(PREFETCH)["records"]]
    return markdown_table(["milliseconds", *columns.values()], rows)


def _milliseconds(part: str, columns: dict[str, Callable[[Any], float]]) -> str:
    rows = []
    for of in read(ALTERNATIVES)[part]:
        rows_kept = re.search(r"rows of tables by (1/\d+)", of["scale"])
        shape = of["preset"] + (f", rows {rows_kept[1]}" if rows_kept else "")
        rows.append([shape, *(f"{ms(of):.2f}" for ms in columns.values())])
    return markdown_table(["milliseconds", *columns], rows)


TABLES = {"dedup": dedup, "alternatives": alternatives, "atomics": atomics, "prefetch": prefetch}


def written() -> str:
    """Return the page with the tables of the records."""
    return _MARK.sub(lambda mark: f"{mark['open']}{TABLES[mark['name']]()}\n{mark['close']}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(written())
