"""A command that adds a record of a run of the GPU tests to a JSON file.

    python -m weft.bench.gpu_tests gpu-tests.json pytest's-junit.xml ...

The JSON file contains a list of records. A record has the numbers of passed, failed and skipped tests, and the commit.
A junit file that does not exist is recorded as missing, because its tests did not finish.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft import reading
from weft.bench.core.records import environment


def summary(junits: Sequence[Path]) -> dict[str, Any]:
    """Return the record's fields from pytest's junit files: counts, seconds, names of failed tests, {reason of a skip:
    count}, and the junit files that are missing.
    """
    there = [junit for junit in junits if junit.exists()]
    suites = [suite for junit in there for suite in ElementTree.parse(junit).getroot().iter("testsuite")]
    cases = [case for suite in suites for case in suite.iter("testcase")]
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if _has(case, "failure", "error")]
    skips = Counter(skip.get("message", "") for case in cases for skip in case.iter("skipped"))
    return {
        "finished": there == list(junits),
        "missing": [junit.stem for junit in junits if junit not in there],
        "passed": sum(not _has(case, "failure", "error", "skipped") for case in cases),
        "failed": len(failed),
        "skipped": skips.total(),
        "seconds": round(sum(float(suite.get("time", 0)) for suite in suites), 3),
        "failures": failed,
        "skips": dict(skips),
    }


def _has(case: ElementTree.Element, *tags: str) -> bool:
    return any(case.find(tag) is not None for tag in tags)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m weft.bench.gpu_tests", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("out", type=Path, help="the JSON file to which the record is added")
    parser.add_argument("junit", type=Path, nargs="+", help="a file that pytest --junit-xml wrote; may be missing")
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="the device to describe in the record. Default: cuda"
    )
    given = parser.parse_args(arguments)
    known = reading.read_json(given.out) if given.out.exists() else []
    known.append({**summary(given.junit), **environment(given.device)})
    given.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
