"""Run the injections 0 to N - 1 of a seed, several at a time, and record each result when it is known.

After a fault, every rank that is still alive must get the right result or a named error from every call, in time. No
memory, thread or file may be left. A campaign that was stopped continues with the injections that its record lacks. The
exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import record as records
from .draw import KINDS, between_hosts, draw, kinds_of
from .operators import ON_DEMAND, OPERATORS
from .record import Record
from .report import progress, tables
from .sharder import IMPORTS
from .trial import Trial, start_server

DEFAULT_N = {"cpu": 250, "cuda": 200}
_AT_ONCE = {"cpu": 3, "cuda": 6}


@dataclass(frozen=True)
class Campaign:
    seed: int
    device: str
    indices: Sequence[int]
    at_once: int
    until: float  # no injection begins later, by time.monotonic
    faults: bool  # False: make the same calls without faults
    families: Sequence[str]  # of faults; if empty, all
    operators: Sequence[str]  # if empty, all
    keep: Path  # folder for the traces of failed injections
    hosts: int = 1

    def run(self) -> Iterator[Record]:
        """Yield the record of each injection when it has ended."""
        start_server(self.device, IMPORTS if set(ON_DEMAND) & set(self.operators) else ())
        left, running = list(reversed(self.indices)), dict[int, Trial]()
        with tempfile.TemporaryDirectory(prefix="weft-chaos-") as scratch:
            try:
                while left or running:
                    if time.monotonic() > self.until:
                        left.clear()
                    while left and len(running) < self.at_once:
                        index = left.pop()
                        running[index] = Trial(self._drawn(index), Path(scratch, str(index)))
                    for index, trial in list(running.items()):
                        if trial.poll():
                            del running[index]
                            yield self._over(trial)
                    time.sleep(0.003)
            finally:
                for trial in running.values():
                    trial.kill()

    def _drawn(self, index: int) -> records.Injection:
        injection = draw(self.seed, index, self.device, self.families, self.operators)
        if self.hosts > 1:
            injection = between_hosts(injection)
        return injection if self.faults else replace(injection, kind="none", steps=20)

    def _over(self, trial: Trial) -> Record:
        record = records.of(trial.injection, trial.seen)
        if record["wrong"]:
            target = self.keep / f"{self.seed}-{record['index']}"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(trial.folder, target)
            (target / "injection.json").write_text(json.dumps(trial.injection.to_json(), indent=1))
            (target / "wrong.txt").write_text("\n\n".join(f"{name}: {text}" for name, text in record["wrong"]))
        shutil.rmtree(trial.folder, ignore_errors=True)
        return record


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, help="how many injections (default: 250, on GPUs 200)")
    parser.add_argument(
        "--only", type=int, action="append", metavar="INDEX", help="run only this injection, without a record"
    )
    parser.add_argument(
        "--family", action="append", choices=sorted({kind.family for kind in KINDS.values()}), default=[],
        help="only faults of this family; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--operator", action="append", choices=OPERATORS, default=[],
        help="only calls of this operator; may be given several times",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", type=Path, help="record to continue (default: build/chaos/DEVICE-SEED.jsonl)")
    parser.add_argument(
        "--keep", type=Path, help="folder for the traces of failed injections (default: beside the record)"
    )
    parser.add_argument("--at-once", type=int, help="number of concurrent injections (default: 3, on GPUs 6)")
    parser.add_argument(
        "--within", type=float, default=float("inf"), metavar="SECONDS", help="begin no injection after this time"
    )
    parser.add_argument(
        "--no-faults", action="store_true", help="make the same calls without faults: all must be right"
    )
    parser.add_argument(
        "--hosts", type=int, choices=(1, 2), default=1, help="the number of hosts on which ranks pretend to be"
    )
    given = parser.parse_args(arguments)
    try:
        sys.exit(run(given))
    except ValueError as error:
        parser.error(str(error))


def run(given: argparse.Namespace) -> int:
    begin, device = time.monotonic(), given.device
    count = DEFAULT_N[device] if given.n is None else given.n
    families, operators = sorted(set(given.family)), sorted(set(given.operator))
    if set(ON_DEMAND) & set(operators) and not all(
        importlib.util.find_spec(name) for name in ("torchrec", "fbgemm_gpu")
    ):
        raise ValueError(
            f"{', '.join(ON_DEMAND)} needs torchrec and fbgemm-gpu-cpu: run `make test-torchrec`, which installs them"
        )
    if not kinds_of(device, families, operators):
        raise ValueError(f"no fault of {', '.join(families)} is injected on {device}")
    parts = [
        device,
        *(["2-hosts"] if given.hosts > 1 else []),
        str(given.seed),
        *(name.replace(",", "").replace(" ", "-") for name in [*families, *operators]),
    ]
    name = "-".join(parts) + "-no-faults" * given.no_faults
    path = given.record or Path("build", "chaos", f"{name}.jsonl")
    recorded = [] if given.only else records.go_on(path, given.seed, device, families, operators)
    done = [record for record in recorded if record["index"] < count]
    known = {record["index"] for record in done}
    campaign = Campaign(
        seed=given.seed, device=device, indices=given.only or [i for i in range(count) if i not in known],
        at_once=given.at_once or _AT_ONCE[device], until=begin + given.within, faults=not given.no_faults,
        families=families, operators=operators, keep=given.keep or path.parent / f"wrong-{name}", hosts=given.hosts,
    )  # fmt: skip
    with progress(given.seed, len(campaign.indices), len(done)) as add:
        for record in campaign.run():
            if not given.only:
                records.append(path, record)
            done.append(record)
            add(record)
    print(tables(done))
    again = "".join(f" --family {shlex.quote(family)}" for family in families)
    again += "".join(f" --operator {shlex.quote(operator)}" for operator in operators)
    for record in (wrong := [record for record in done if record["wrong"]]):
        names = ", ".join(sorted({name for name, _ in record["wrong"]}))
        print(
            f"{names}: again by --seed {given.seed}{again} --only {record['index']}; its traces are in {campaign.keep}"
        )
    missing = 0 if given.only else count - len(done)
    print(f"seed {given.seed}: {len(done)} injections, {len(wrong)} wrong" + f", {missing} left to do" * bool(missing))
    return 1 if wrong else 0
