"""Power and memory traffic of schedules on GPUs, from records of `weft bench OP --counters`.

The counters of the GPU's driver do not separate reads from writes of memory. So the tables also show the bytes that the
simulator computes from the schedule (`weft.sim.traffic`). Rows without a schedule are parts of an operator that ran
alone, such as the GEMM.

Sources: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 6.2 and figure 18
(memory traffic). "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", VIII-B (power).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from weft.bench.core.records import last_runs
from weft.bench.core.tables import Record, ResultTable, milliseconds, number, table
from weft.builders import described, named
from weft.hw import file_of, load_machine
from weft.sim.traffic import traffic
from weft.studies.claims import Claim
from weft.studies.pages import block, model_for, where

_ALONE = {"gemm": "the GEMM alone", "communication": "copies to the peer alone", "collective": "NCCL alone"}


class PowerRow(NamedTuple):
    """The GPU driver's counters while one variant of operator `op` ran, or while one part of the operator, such as the
    GEMM, ran alone.

    schedule: the schedule that ran; None for a part.
    counters: the mean power in watts, and the bytes of memory traffic per call.
    computed_bytes: the memory bytes per call that the simulator computes from the schedule; None if it cannot.
    """

    op: str
    config: str
    variant: str
    schedule: str | None
    counters: Record
    computed_bytes: float | None

    @property
    def name(self) -> str:
        if self.schedule is None:
            return _ALONE.get(self.variant, self.variant)
        return f"weft: {self.schedule}" if self.variant == "weft" else self.variant


def rows_of(records: Sequence[Record]) -> list[PowerRow]:
    """Return a row for each variant and each part of an operator, from the last run of each configuration. Raise
    `ValueError` if no record has counters.
    """
    mine = [r for r in records if r.get("counters")]
    if not mine:
        raise ValueError("no record has the driver's counters: run weft bench with --counters")
    rows = []
    for of_config in last_runs(mine, lambda r: (r["op"], r["config"], r["dtype"])).values():
        for r in of_config:
            schedule = r.get("chosen") or r["variant"]
            rows.append(PowerRow(r["op"], r["config"], r["variant"], schedule, r["counters"], _computed(r, schedule)))
        last = of_config[-1]
        beside = last.get("counters_beside") or {}
        rows += [PowerRow(last["op"], last["config"], name, None, of, None) for name, of in beside.items()]
    return rows


def _computed(r: Record, schedule: str) -> float | None:
    return _bytes(r["op"], r["m"], r["n"], r["k"], r["ranks"], r["dtype"], r["machine"].rpartition(" x ")[2], schedule)


@cache  # a report and its documents show the same records
def _bytes(op: str, m: int, n: int, k: int, ranks: int, dtype: str, gpu: str, schedule: str) -> float | None:
    file = file_of(gpu)
    if file is None:
        return None
    try:
        built = named(described(op, m=m, n=n, k=k, ranks=ranks, dtype=dtype), schedule).build()
    except ValueError:  # another library's variant
        return None
    return sum(traffic(built, model_for(load_machine(file), ranks, None)).values())


def tables(rows: Sequence[PowerRow]) -> list[ResultTable]:
    def counted(field: str, unit: float, digits: int) -> Callable[[PowerRow], str]:
        return lambda row: "" if row.counters[field] is None else number(row.counters[field] / unit, digits)

    columns: dict[str, Callable[[PowerRow], str]] = {
        "M x N x K": lambda row: row.config,
        "call": lambda row: row.name,
        "ms": lambda row: milliseconds(row.counters["call_ms"]),
        "W": counted("watts", 1, 0),
        "J": counted("joules", 1, 3),
        "memory, MB counted": counted("memory_bytes", 1e6, 0),
        "memory, MB computed": lambda row: "" if row.computed_bytes is None else f"{row.computed_bytes / 1e6:.0f}",
        "NVLink, MB sent": counted("sent_bytes", 1e6, 0),
    }
    return [table("Power, energy and traffic of a GPU for one call, by the driver's counters", rows, columns)]


def notes(records: Sequence[Record]) -> list[str]:
    last = [r for r in records if r.get("counters")][-1]
    said, of = [where(last)], last["counters"]
    if of["idle_watts"] is not None:
        said.append(f"Between calls the GPU draws {of['idle_watts']:.0f} W.")
    known = {name: share for name, share in of["counted_known"].items() if share is not None}
    if known:
        shares = ", ".join(f"{100 * share:.0f}% for a {name}" for name, share in known.items())
        said.append(f"Test kernels with known traffic show how much of the traffic the driver counts: {shares}.")
    else:
        said.append("The driver gives no memory traffic on this machine.")
    said.append(
        "Each call was repeated for about a second. At the GPU's power limit the clock falls, so calls may take longer than in "
        "other tables."
    )
    for row in rows_of(records):
        if "missing" in row.counters:
            said.append(f"There are no counters for {row.name} at {row.config}: {row.counters['missing']}.")
    return [" ".join(said)]


def claims(rows: Sequence[PowerRow]) -> list[Claim]:
    """Return the papers' claims on memory traffic (GEMM + reduce-scatter) and on power (all-gather + GEMM). Claims
    without records are left out.
    """
    configs: dict[tuple[str, str], dict[str, PowerRow]] = {}
    for row in rows:
        configs.setdefault((row.op, row.config), {})[row.variant] = row
    found = [
        *_traffic([of for (op, _), of in configs.items() if op == "matmul_reduce_scatter"]),
        *_power([of for (op, _), of in configs.items() if op == "all_gather_matmul"]),
    ]
    return [claim for claim in found if claim is not None]


def _traffic(configs: Sequence[Mapping[str, PowerRow]]) -> list[Claim | None]:
    """Return T3's claim that overlap saves memory accesses, with two results of weft: for the schedule that weft
    selects, and for schedules whose GEMM tiles signal copies ("tracked").
    """

    def saved(what: str, begin: str) -> Claim | None:
        shares = []
        for of in configs:
            mine = [row.counters["memory_bytes"] for name, row in of.items() if name.startswith(begin)]
            serial = of["serial"].counters["memory_bytes"] if "serial" in of else None
            if serial and mine and None not in mine:
                shares.append(100 * (1 - min(mine) / serial))
        mean = sum(shares) / len(shares) if shares else None
        text = f"memory accesses saved by {what}, mean, counted by the driver"
        return None if mean is None else Claim(text, "6.2", 22, mean, "%")

    return [saved("weft's choice", "weft"), saved("tracked GEMMs", "tracked")]


def _power(configs: Sequence[Mapping[str, PowerRow]]) -> list[Claim | None]:
    """Return FiCCO's claims on the power of copies by copy engines and by kernels, and of concurrent operations."""
    fewer, higher = list[tuple[float, float]](), list[tuple[float, float]]()
    for of in configs:
        by = {how: _of_ficco(of, how) for how in ("dma", "kernel")}
        if by["dma"] and by["kernel"]:
            fewer.append((by["dma"].counters["joules"], by["kernel"].counters["joules"]))
        alone = [of[name].counters["watts"] for name in ("gemm", "communication") if name in of]
        if by["dma"] and len(alone) == 2 and None not in alone:
            higher.append((by["dma"].counters["watts"], max(alone)))
    less = "overlap with copy engines needs less energy for a call than with copying kernels"
    more = "concurrent execution draws more power than the GEMM or the copies alone"
    return [_held(less, "J", fewer, operator.lt, 3), _held(more, "W", higher, operator.gt, 0)]


def _of_ficco(of: Mapping[str, PowerRow], how: str) -> PowerRow | None:
    found = (row for name, row in of.items() if name.startswith("ficco") and name.endswith(f"by={how}]"))
    return next((row for row in found if row.counters["watts"] is not None), None)


def _held(
    what: str, unit: str, pairs: Sequence[tuple[float, float]], holds: Callable[[float, float], bool], digits: int
) -> Claim | None:
    if not pairs:
        return None
    said = "; ".join(f"{a:.{digits}f} and {b:.{digits}f} {unit}" for a, b in pairs)
    return Claim(what, "VIII-B", "yes", said, held=all(holds(a, b) for a, b in pairs))


def markdown(records: Sequence[Record]) -> str:
    """Return the generated part of the report, as Markdown."""
    return block(notes(records), tables(rows_of(records)))
