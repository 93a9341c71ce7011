"""Write tables and numbers from recorded results into documents, so that no number is typed by hand.

    python -m weft.bench.report README.md docs/*.md docs/studies/*.md benchmarks/results/*.jsonl    # rewrites documents in place
    python -m weft.bench.report results.jsonl                                                       # prints the tables of a file

A pair of marks encloses text that is generated. The opening mark says which text. NAME is the name of a results file
without ".jsonl".

- `<!-- results:NAME -->` to `<!-- /results -->`: a table for each operator, dtype and mode, with a row for each
  configuration and columns that the operator defines. For simulated records, the text is the page of their study
  (`weft.studies`).
- `<!-- study:STUDY NAME -->` to `<!-- /study -->`: the page of a study, for simulated or measured records.
- `<!-- never-slower:NAME -->` to `<!-- /never-slower -->`: the result of `weft bench never-slower`, one line for each
  operator.
- `<!-- never-slower-says:NAME -->` to `<!-- /never-slower-says -->`: the same result in a sentence. With ` changing` after
  NAME: the operators that are slower than serial if each call has another size.
- `<!-- gain:NAME MODE DTYPE VARIANT/BASELINE -->` to `<!-- /gain -->`: the speedup of a variant over a baseline, as the
  geometric mean over configurations. `BASELINE worst` shows the smallest speedup of any configuration instead.

Only the latest run of each configuration and mode is used. So a table never compares variants from different runs.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from weft.bench.core import records
from weft.bench.core.console import end_quietly
from weft.bench.core.harness import HARNESS
from weft.bench.core.operators import operator
from weft.bench.core.tables import Record, by_config, geomean, times
from weft.bench.never_slower import judge, page
from weft.files import write_whole
from weft.words import counted

GAIN = re.compile(
    r"(?P<open><!-- gain:(?P<name>[\w.-]+) (?P<mode>\w+) (?P<dtype>\w+) (?P<variant>[^/ ]+)/(?P<baseline>\S+)"
    r"(?: (?P<worst>worst))? -->)[^<]*<!-- /gain -->"
)
_MARKED = re.compile(
    r"(?P<open><!-- (?:(?P<kind>results|never-slower):|study:(?P<study>\w+) )(?P<name>[\w.-]+) -->\n)(?P<body>.*?)"
    r"(?P<close><!-- /(?:results|never-slower|study) -->)",
    re.DOTALL,
)
_SAYS = re.compile(
    r"(?P<open><!-- never-slower-says:(?P<name>[\w.-]+)(?P<changing> changing)? -->)(?P<body>[^<]*)<!-- /never-slower-says -->"
)

_SIMULATED_BY = {"all_gather_matmul": "ficco", "matmul_reduce_scatter": "t3"}
"""{operator: study that simulates it (`weft reproduce`)}. The study's tables show simulated records; the operator's
tables show measured records.
"""

_OTHER_STUDIES = (
    "fused_embedding", "fused_embedding_measured", "launches", "pgas", "pgas_measured", "power", "t3_hardware",
)  # fmt: skip
"""Further studies whose records documents show. Their records contain the study's name, because several studies may
simulate the same operator.
"""


class Mark(NamedTuple):
    """A mark in a document that encloses a generated speedup (`gain`)."""

    name: str
    mode: str
    dtype: str
    variant: str
    baseline: str


TOO_SHORT_MS = 1.0
"""CPU rows with shorter times are omitted from documents, because the operating system may suspend a process for this long."""


def markdown(found: Sequence[Record], *, short: bool = False) -> str:
    """Return the tables of one results file, with a line about the machine and the code.

    Simulated records appear as the page of their study. short: True to include times below `TOO_SHORT_MS`.
    """
    simulated = [r for r in found if r["device"] == "simulated"]
    parts = [_measured([r for r in found if r["device"] != "simulated"], short)] if len(simulated) < len(found) else []
    for op, study in dict.fromkeys((r["op"], r.get("study")) for r in simulated):
        if study is None and op not in _SIMULATED_BY:
            known = ", ".join(_SIMULATED_BY)
            raise ValueError(f"no study simulates {op} (studies simulate {known}): remove its records, or measure {op}")
        mine = [r for r in simulated if (r["op"], r.get("study")) == (op, study)]
        parts.append(_study(study or _SIMULATED_BY[op]).markdown(mine))
    return "\n".join(parts)


def _study(name: str) -> Any:
    if name not in (known := sorted([*_SIMULATED_BY.values(), *_OTHER_STUDIES])):
        raise ValueError(
            f"study:{name}: there is no study with this name, or it has no page: use one of {', '.join(known)}"
        )
    return importlib.import_module(f"weft.studies.{name}")


def _measured(found: Sequence[Record], short: bool) -> str:
    latest = _latest_runs(found) if short else _long_enough(_latest_runs(found))
    if not latest:
        raise ValueError(
            f"all {counted(len(found), 'record')} have times under {TOO_SHORT_MS:g} ms on CPU, which are not shown: record larger "
            "shapes"
        )
    last = latest[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    parts = [
        f"{counted(last['ranks'], 'rank')}, {last['machine']}; {versions}; {', '.join(dict.fromkeys(map(_code, latest)))}; "
        f"{last['date'][:10]}. Milliseconds are the slowest rank's median."
    ]
    several = len({r["op"] for r in latest}) > 1
    for op, dtype in dict.fromkeys((r["op"], r["dtype"]) for r in latest):
        for mode in ("queued", "graph", "single"):
            rows = [r for r in latest if (r["op"], r["dtype"], r["mode"]) == (op, dtype, mode)]
            if rows:
                title = f"{op}, **{mode}**, {dtype}" if several else f"**{mode}**, {dtype}"
                parts += [title, operator(op).table(rows), *_measured_by(rows, latest)]
    return "\n\n".join(parts) + "\n"


def _code(record: Record) -> str:
    source = f"sources {record['source']}" if record["source"] is not None else "hash of sources not recorded"
    newest = "" if record["harness"] == HARNESS else f" (newest: {HARNESS})"
    return f"commit {record['commit']} ({source}), harness {record['harness']}{newest}"


def _measured_by(rows: Sequence[Record], latest: Sequence[Record]) -> list[str]:
    """Return a list with one note, which names the version of weft for each row. The list is empty if all records are
    from the same version.
    """
    if len(set(map(_code, latest))) == 1:
        return []
    configs: dict[str, dict[str, None]] = {}
    for r in rows:
        configs.setdefault(_code(r), {})[r["config"]] = None
    *few, most = sorted(configs, key=lambda code: len(configs[code]))
    said = [f"{', '.join(configs[code])}: {code}" for code in few]
    return [
        "Version of weft in this table: " + "; ".join([*said, f"{'all others' if few else 'all rows'}: {most}"]) + "."
    ]


def _long_enough(found: Sequence[Record]) -> list[Record]:
    """Return the records without CPU times below `TOO_SHORT_MS`.

    If one variant is too short, all variants of the operator in this configuration and mode are left out.
    """

    def key(r: Record) -> tuple[str, ...]:
        alone = [r["variant"]] * (r["op"] == "inefficiency")  # each of its variants has its own table cell
        return r["op"], r["config"], r["dtype"], r["mode"], *alone

    short = {key(r) for r in found if r["device"] == "cpu" and r["p50_ms"] < TOO_SHORT_MS}
    return [r for r in found if key(r) not in short]


def rewrite(document: str, results: Mapping[str, Sequence[Record]]) -> str:
    """Return `document` with newly generated text between all marks. results: the records of each results file, by its
    NAME. Raise `ValueError` if a NAME has no results.
    """

    def given(name: str) -> Sequence[Record]:
        if name not in results:
            given_files = f"only records of {', '.join(results)}" if results else "no records"
            raise ValueError(
                f"the document shows records of {name}, but {given_files} are given: pass {name}.jsonl or {name}.json, too"
            )
        if not results[name]:
            raise ValueError(
                f"results:{name} has no records: record a run (weft bench OPERATOR --json FILE), or leave the file out"
            )
        return results[name]

    def block(found: re.Match[str]) -> str:
        if found["name"] not in results and not found["body"].strip():
            return found[0]
        shown = _study(found["study"]).markdown if found["study"] else markdown
        if found["kind"] == judge.BENCHMARK:
            shown = page.markdown
        return f"{found['open']}{shown(given(found['name']))}{found['close']}"

    def says(found: re.Match[str]) -> str:
        if found["name"] not in results and not found["body"].strip():
            return found[0]
        text = page.slower_with_changing_sizes if found["changing"] else page.sentence
        return f"{found['open']}{text(given(found['name']))}<!-- /never-slower-says -->"

    def factor(found: re.Match[str]) -> str:
        which = (found["mode"], found["dtype"], found["variant"], found["baseline"])
        gains = speedups(given(found["name"]), *which).values()
        return f"{found['open']}{times(min(gains) if found['worst'] else geomean(list(gains)))}<!-- /gain -->"

    return GAIN.sub(factor, _SAYS.sub(says, _MARKED.sub(block, document)))


def marks(document: str) -> list[Mark]:
    """Return the `gain` marks of a document, without duplicates and without `worst` marks."""
    found = (of for of in GAIN.finditer(document) if not of["worst"])
    return list(dict.fromkeys(Mark(of["name"], of["mode"], of["dtype"], of["variant"], of["baseline"]) for of in found))


def speedups(found: Sequence[Record], mode: str, dtype: str, variant: str, baseline: str) -> dict[str, float]:
    """Return {configuration: speedup of `variant` over `baseline`}. Raise `ValueError` if no configuration has both times."""
    cases = by_config([r for r in _long_enough(_latest_runs(found)) if (r["mode"], r["dtype"]) == (mode, dtype)])
    both = {name: (of[baseline], of[variant]) for name, of in cases.items() if {variant, baseline} <= of.keys()}
    if not both:
        raise ValueError(
            f"no configuration has {mode} {dtype} times of both {variant!r} and {baseline!r}: record both in one run of weft bench"
        )
    return {name: base["p50_ms"] / mine["p50_ms"] for name, (base, mine) in both.items()}


def _printed(name: str, found: Sequence[Record]) -> str:
    if not found:
        raise ValueError(f"{name} has no records: record a run (weft bench OPERATOR --json FILE)")
    if drawn := judge.mine(found):
        others = [record for record in found if not judge.is_mine(record)]
        return "\n".join([f"{name}\n\n{page.markdown(drawn)}", *([_printed(name, others)] if others else [])])
    shown = markdown(found, short=True)
    if len(_long_enough(found)) < len(found):
        shown += f"\nTimes under {TOO_SHORT_MS:g} ms on CPU are here too; documents leave them out.\n"
    return f"{name}\n\n{shown}"


def _latest_runs(found: Sequence[Record]) -> list[Record]:
    """Return the records of the latest run of each (operator, configuration, dtype, mode), in the order of first appearance."""

    runs = records.last_runs(found, itemgetter("op", "config", "dtype", "mode"))
    return [r for of_run in runs.values() for r in of_run]


def main(arguments: Sequence[str]) -> None:
    """Rewrite documents, or print tables. If an input cannot be read, print an error, change nothing, and exit with
    status 2.
    """
    parser = argparse.ArgumentParser(prog="python -m weft.bench.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="DOCUMENT.md|RESULTS.jsonl",
        help="documents to rewrite, and all results files that they show; without documents, print the results' tables",
    )
    given: list[Path] = parser.parse_args(arguments).paths
    documents = [path for path in given if path.suffix == ".md"]
    try:
        results = {path.stem: records.read([path]) for path in given if path not in documents}
        with records.understood():
            written = {path: rewrite(path.read_text(), results) for path in documents}
        for path, text in written.items():
            write_whole(path, text)
        if not documents:
            with records.understood():
                shown = [_printed(name, found) for name, found in results.items()]
            print("\n".join(shown), flush=True)
    except BrokenPipeError:
        end_quietly()
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
