"""A campaign: injections 0 to N - 1 of a seed, several at a time, each result written down as it comes.

The record is a file of JSON lines, a header and then one line for each injection, in the order in which they ended. A campaign that
was stopped goes on where it was; one with another seed or device needs a file of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .draw import draw
from .trial import Trial, start_server
from .verdict import Fault, judge, outcome, was_done

Record = dict[str, Any]
DEFAULT_N = {"cpu": 250, "cuda": 200}


@dataclass(frozen=True)
class Wanted:
    seed: int
    device: str
    indices: Sequence[int]
    at_once: int
    until: float = float("inf")  # when no more are begun
    faults: bool = True  # or the same calls with nothing injected


def one_after_the_other(wanted: Wanted, folder: Path) -> Iterator[Record]:
    """Records as they come, several at once."""
    start_server()
    left, running = list(reversed(wanted.indices)), dict[int, Trial]()
    try:
        while left or running:
            if time.monotonic() > wanted.until:
                left.clear()
            while left and len(running) < wanted.at_once:
                index = left.pop()
                injection = draw(wanted.seed, index, wanted.device)
                injection = injection if wanted.faults else replace(injection, kind="none", steps=20)
                running[index] = Trial(injection, folder / f"{wanted.seed}-{index}")
            for index, trial in list(running.items()):
                if trial.poll():
                    del running[index]
                    yield record_of(trial)
            time.sleep(0.003)
    finally:
        for trial in running.values():
            trial.kill()


def record_of(trial: Trial) -> Record:
    """What is kept; the folder of a trial stays if something was wrong."""
    injection, seen = trial.injection, trial.seen
    faults = judge(injection, seen)
    record = {
        "index": injection.index, "kind": injection.kind, "operator": injection.operator, "world": injection.world,
        "phase": injection.phase, "backward": injection.backward, "schedule": injection.options.get("schedule"),
        "took_s": round(seen.took_s, 2), "done": was_done(injection, seen), **outcome(seen), "wrong": _first_of_each(faults),
    }  # fmt: skip
    if faults:
        (trial.folder / "injection.json").write_text(json.dumps(injection.to_json(), indent=1))
        (trial.folder / "wrong.txt").write_text("\n\n".join(f"{kind}: {text}" for kind, text in faults))
    else:
        shutil.rmtree(trial.folder, ignore_errors=True)
    return record


def _first_of_each(faults: list[Fault], most: int = 2) -> list[Fault]:
    """One that comes at every step fills no record."""
    seen: Counter[str] = Counter()
    kept = []
    for name, text in faults:
        seen[name] += 1
        if seen[name] <= most:
            kept.append((name, text[:1500]))
    return kept


# --- the record ---


def header(seed: int, device: str) -> Record:
    return {"chaos": 1, "seed": seed, "device": device, **where()}


def where() -> Record:
    import torch

    return {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "cores": os.cpu_count()}


def read(path: Path, seed: int | None = None, device: str | None = None) -> tuple[Record | None, list[Record]]:
    """Header and injections; a last line that was cut off does not count. `ValueError` if it is another campaign's."""
    if not path.exists():
        return None, []
    lines = [line for line in path.read_text().split("\n")[:-1] if line]
    if not lines:
        return None, []
    head, *rest = map(json.loads, lines)
    for name, value in (("seed", seed), ("device", device)):
        if value is not None and head.get(name) != value:
            raise ValueError(f"{path} is of {name} {head.get(name)}, not {value}: name another file, or remove it")
    return head, list({record["index"]: record for record in rest}.values())


def append(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


# --- what is printed ---


def table(records: Iterable[Record], by: str = "family") -> str:
    """Injections by kind of fault, and by operator."""
    from .report import summary

    return summary(list(records))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=None, help="how many injections (default: 250, on GPUs 200)")
    parser.add_argument(
        "--only", type=int, action="append", metavar="INDEX", help="this injection alone; nothing is recorded"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--record", type=Path, help="file of JSON lines to go on with (default: build/chaos/DEVICE-SEED.jsonl)"
    )
    parser.add_argument("--at-once", type=int, default=None, help="injections side by side (default: 3, on GPUs 6)")
    parser.add_argument(
        "--within", type=float, default=None, metavar="SECONDS", help="begin no injection after so long"
    )
    parser.add_argument(
        "--no-faults", action="store_true", help="the same calls, with nothing injected: all must be right"
    )
    parser.add_argument("--keep", type=Path, default=None, help="folder for the traces of what went wrong")
    given = parser.parse_args(arguments)
    sys.exit(run(given))


def run(given: argparse.Namespace) -> int:
    from .report import Progress

    count = DEFAULT_N[given.device] if given.n is None else given.n
    at_once = given.at_once or {"cpu": 3, "cuda": 6}[given.device]
    named = f"{given.device}-{given.seed}{'-no-faults' * given.no_faults}"
    path = given.record or Path("build/chaos") / f"{named}.jsonl"
    keep = given.keep or path.parent / f"wrong-{given.device}-{given.seed}"
    done: list[Record] = []
    if given.only is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        head, done = read(path, given.seed, given.device)
        if head is None:
            path.write_text(json.dumps(header(given.seed, given.device)) + "\n")
    done = [record for record in done if record["index"] < count]
    known = {record["index"] for record in done}
    indices = given.only or [index for index in range(count) if index not in known]
    until = float("inf") if given.within is None else time.monotonic() + given.within
    wanted = Wanted(given.seed, given.device, indices, at_once, until, not given.no_faults)
    with (
        tempfile.TemporaryDirectory(prefix="weft-chaos-") as scratch,
        Progress(given.seed, len(indices), known) as shown,
    ):
        for record in one_after_the_other(wanted, Path(scratch)):
            if given.only is None:
                append(path, record)
            done.append(record)
            shown.add(record)
            folder = Path(scratch) / f"{given.seed}-{record['index']}"
            if folder.exists():
                target = keep / folder.name
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(folder, target)
                shutil.rmtree(folder, ignore_errors=True)
    print(table(done))
    wrong = [record for record in done if record["wrong"]]
    for record in wrong:
        counted = ", ".join(sorted({kind for kind, _ in record["wrong"]}))
        print(f"{record['index']}: {counted}: again by --seed {given.seed} --only {record['index']}")
    missing = count - len(done) if given.only is None else 0
    if missing:
        print(f"{missing} injections are left: the same command goes on")
    return 1 if wrong else 0
