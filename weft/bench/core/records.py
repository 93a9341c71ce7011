"""Records: a JSON object for each measured (configuration, variant, mode), with all data needed to repeat the measurement."""

from __future__ import annotations

import contextlib
import datetime
import platform
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import torch

import weft
from weft import env, reading
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import HARNESS
from weft.bench.core.operators import measured, operator
from weft.bench.core.options import BenchOptions
from weft.bench.core.tables import Record
from weft.bench.provenance import provenance
from weft.files import append_json
from weft.plan.machine import cpu_name
from weft.words import counted

_MOST_BYTES = 256 << 20


def common_fields(
    options: BenchOptions, config: str, world_size: int, baseline: str, roofline_ms: float | None, ceilings: list[Ceilings]
) -> Record:  # fmt: skip
    """Return the fields that every operator's records have, and that are equal for all records of a configuration.

    roofline_ms: a lower bound of the time; None if bytes and FLOPs are not counted. The caller adds field `run`, the
    run's id.
    """
    return {
        "op": options.op, "config": config, "device": options.device, "ranks": world_size, "dtype": options.dtype,
        "baseline": baseline, "roofline_ms": roofline_ms,
        "threads": torch.get_num_threads() if options.device == "cpu" else None,
        "ceilings": [c.as_fields() for c in ceilings], **environment(options.device),
    }  # fmt: skip


@lru_cache
def environment(device_type: str) -> Record:
    """Return the machine, versions, commit, date, and the environment variables that affect baselines."""
    versions = {"weft": weft.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if device_type == "cuda":
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        for name in ("triton", "fbgemm_gpu"):
            module = sys.modules.get(name)
            if module is not None:
                versions[name] = str(getattr(module, "__version__", "?"))
    else:
        machine = f"{counted(torch.get_num_threads(), 'thread')} a rank on {cpu_name()}"
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    code = provenance()
    return {
        "machine": machine, "versions": versions, "commit": code.commit, "source": code.source,
        "variables": env.peer_variables(), "harness": HARNESS, "date": date,
    }  # fmt: skip


append = append_json


class _Line(Record):
    """A record that was read from a line of a file. Reading a missing field raises `ValueError` with file and line."""

    where = ""

    def __missing__(self, field: str) -> NoReturn:
        raise ValueError(
            f"{self.where}: the record has no {field!r}: remove the line, or measure {self.get('config', 'it')} again"
        )


def read(paths: Iterable[Path]) -> list[Record]:
    """Return all records of these files, in order.

    Raises `ValueError`, with file and line, for a line that is not a record. A record raises the same error when a
    missing field is read.
    """
    found: list[Record] = []
    for path in paths:
        for number, line in enumerate(reading.read_bytes(path, _MOST_BYTES).splitlines(), 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            fields = reading.parse_json(line, where, fix="remove the line, or record the run again")
            if not isinstance(fields, dict):
                raise ValueError(
                    f"{where}: found a {type(fields).__name__}, but a record is a JSON object: remove the line"
                )
            record = _Line(fields)
            record.where = where
            try:
                operator(str(record["op"]))
            except ValueError:
                known = f"remove the line, or correct it to one of {', '.join(measured())}"
                raise ValueError(f"{where}: unknown op {record['op']!r}: {known}") from None
            found.append(record)
    return found


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Context manager: raise `ValueError` if the enclosed code fails on a record's values, such as text instead of a number."""
    try:
        yield
    except (TypeError, AttributeError, ArithmeticError, LookupError, StopIteration) as error:
        raise ValueError(
            f"a record has a value of a wrong type or size ({error}): measure it again, or remove it"
        ) from error


def last_runs(found: Iterable[Record], key: Callable[[Record], Hashable]) -> dict[Hashable, list[Record]]:
    """Group records by `key`. In each group, keep only the records of the latest run. Groups are in the order of first
    appearance.
    """
    found, runs = list(found), dict[Hashable, list[Record]]()
    last = {key(r): r["run"] for r in found}
    for r in found:
        runs.setdefault(key(r), []).extend([r] * (r["run"] == last[key(r)]))
    return runs
