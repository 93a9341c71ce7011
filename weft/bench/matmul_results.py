"""What a GEMM with communication took: records, a table on the terminal, and what all shapes say together.

The ideal is the longer of the GEMM alone and the communication alone, measured in the same run and mode. It is no bound: two
halves of a GEMM may be faster than the whole, and each row runs at the clock that it finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from weft.bench import remarks
from weft.bench.harness import Mode
from weft.bench.matmul_operator import MeasuredArms, Tables, said_of_best
from weft.bench.matmul_shapes import MatmulShape
from weft.bench.operator import Record
from weft.bench.remarks import MULTICAST_M
from weft.bench.schedules import OWN_SERIAL, WEFT, Planned, schedule_of
from weft.bench.tables import geomean, milliseconds, number, share, times
from weft.words import counted

BASELINE, ASYNCTP = "serial", "asynctp"
BASELINES = (BASELINE, ASYNCTP)
GEMM, COMMUNICATION, COLLECTIVE = "gemm", "communication", "collective"

NEVER_BELOW = 0.98
"""Of serial's speed: what counts as not slower."""
LARGE_M = 2048
"""From here on a shape counts in the mean time over the ideal."""
NEAR_PREDICTION = 0.10


@dataclass(frozen=True)
class Summary:
    """What the shapes of one mode say together. None: nothing of the kind was measured."""

    shapes: int
    over_serial: float | None
    over_asynctp: tuple[float | None, float | None]  # up to, and above, the rows for which it would use multicast
    worst: tuple[float, str]  # speed over serial, shape
    not_slower: float  # share of shapes
    over_ideal: float | None
    most_added: tuple[float, str] | None  # us, shape; single calls
    near_best: (
        tuple[float, int, int] | None
    )  # share of shapes; how many schedules, at least and at most, it is the best of
    near_calibrated: float | None  # share of shapes; by the shape's own GEMMs
    near_blind: float | None
    blind_error: float | None  # of predictions without a GEMM of the shape timed, in the geometric mean: 0.1 is 10% off

    @classmethod
    def of(cls, rows: Sequence[Record]) -> Summary | None:
        """Of one mode's records; None if there is none of `weft`."""
        mine = [r for r in rows if r["variant"] == WEFT]
        if not mine:
            return None
        overs = [(r["speedup"], r["config"]) for r in mine if r["speedup"] is not None]
        if not overs:
            return None
        added = [(r["added_us"], r["config"]) for r in mine if r["added_us"] is not None]
        small, large = ([r for r in mine if (r["m"] <= MULTICAST_M) == small] for small in (True, False))
        return cls(
            shapes=len(mine),
            over_serial=geomean([speed for speed, _ in overs]),
            over_asynctp=(_over_asynctp(small), _over_asynctp(large)),
            worst=min(overs),
            not_slower=share([speed >= NEVER_BELOW for speed, _ in overs]) or 0.0,
            over_ideal=geomean([r["ideal_ratio"] for r in mine if r["m"] >= LARGE_M and r["ideal_ratio"] is not None]),
            most_added=max(added, default=None),
            near_best=TABLES.near_best(mine, rows),
            near_calibrated=_near(mine, "predicted_ms"),
            near_blind=_near(mine, "predicted_blind_ms"),
            blind_error=_error(mine, "predicted_blind_ms"),
        )

    def __str__(self) -> str:
        speed, shape = self.worst
        said = [
            f"{WEFT} over {counted(self.shapes, 'shape')}: {times(self.over_serial)} {BASELINE} in the geometric mean, at worst "
            f"{times(speed)} ({shape}), at least {NEVER_BELOW}x on {self.not_slower:.0%} of them"
        ]
        small, large = (times(mean) for mean in self.over_asynctp)
        if small:
            said.append(f"{small} {ASYNCTP} for M <= {MULTICAST_M}{f' and {large} above' if large else ''}")
        elif large:
            said.append(f"{large} {ASYNCTP}, all for M > {MULTICAST_M}")
        if self.over_ideal is not None:
            said.append(f"{self.over_ideal:.3f} of the ideal time for M >= {LARGE_M}")
        if self.most_added is not None:
            us, shape = self.most_added
            said.append(
                f"at most {us:.1f} us more than {BASELINE} ({shape})" if us > 0 else f"never longer than {BASELINE}"
            )
        if self.near_best is not None:
            said.append(said_of_best(*self.near_best))
        if self.near_calibrated is not None:
            blind = (
                f", on {self.near_blind:.0%} blind, which are {self.blind_error:.1%} off in the geometric mean"
                if self.near_blind is not None
                else "; blind ones were not recorded"
            )
            said.append(
                f"within {NEAR_PREDICTION:.0%} of the predicted time on {self.near_calibrated:.0%} where predictions were "
                f"calibrated by the shape's own GEMMs{blind}"
            )
        return "; ".join(said) + "."


def _over_asynctp(rows: Sequence[Record]) -> float | None:
    return geomean([r["speedup_over"][ASYNCTP] for r in rows if ASYNCTP in r["speedup_over"]])


def _near(rows: Sequence[Record], prediction: str) -> float | None:
    """Share of those that were predicted."""
    predicted = [r for r in rows if r[prediction] is not None]
    return share([abs(r[prediction] / r["p50_ms"] - 1) <= NEAR_PREDICTION for r in predicted])


def _error(rows: Sequence[Record], prediction: str) -> float | None:
    """How far off predictions are, too long or too short alike."""
    off = [max(r[prediction] / r["p50_ms"], r["p50_ms"] / r[prediction]) for r in rows if r[prediction] is not None]
    mean = geomean(off)
    return None if mean is None else mean - 1


class _Tables(Tables):
    baselines = BASELINES
    compared: ClassVar = {WEFT: BASELINES}
    head, tail = ("M x N x K",), ("ideal", f"{WEFT} / ideal")

    def described(self, record: Record) -> list[str]:
        return [record["config"]]

    def judged(self, by_variant: Mapping[str, Record]) -> list[str]:
        of_any = next(iter(by_variant.values()))
        return [milliseconds(of_any["ideal_ms"]), number(by_variant.get(WEFT, {}).get("ideal_ratio"), 2)]

    def said(self, rows: Sequence[Record]) -> list[str]:
        summary = Summary.of(rows)
        return [] if summary is None else [str(summary)]

    def twin(self, record: Record) -> str | None:
        if record["variant"] == OWN_SERIAL:
            return BASELINE
        return {"serial": BASELINE}.get(record["chosen"], record["chosen"]) if record["variant"] == WEFT else None

    def remarks(self, rows: Sequence[Record]) -> list[str]:
        peers = remarks.of_asynctp(rows) if any(r["variant"] == ASYNCTP for r in rows) else []
        return [*super().remarks(rows), *peers, *remarks.of_nccl(rows)]


TABLES = _Tables()


@dataclass(frozen=True)
class MeasuredMatmul(MeasuredArms):
    shape: MatmulShape
    planned: Mapping[Mode, Planned]
    taken: Mapping[Mode, str]
    """Which schedule the operator took."""
    least_ms: float

    tables = TABLES
    beside = (GEMM, COMMUNICATION, COLLECTIVE)
    columns = ("over\nideal", "calibrated\nms", "blind\nms")

    def roofline_ms(self, mode: Mode) -> float:
        return self.least_ms

    def ideal_ms(self, mode: Mode) -> float | None:
        alone = [self.ms(mode, name) for name in (GEMM, COMMUNICATION)]
        return max(ms for ms in alone if ms is not None) if None not in alone else None

    def described(self, mode: Mode) -> Record:
        return {"m": self.shape.m, "n": self.shape.n, "k": self.shape.k, "ideal_ms": self.ideal_ms(mode)}

    def judged(self, mode: Mode, name: str) -> Record:
        ms, ideal = self.ms(mode, name), self.ideal_ms(mode)
        taken = self.taken.get(mode, "serial")
        schedule, planned = schedule_of(name, taken), self.planned.get(mode)
        return {
            "ideal_ratio": ms / ideal if ms and ideal else None,
            "chosen": taken if name == WEFT else None,
            "predicted_ms": planned.calibrated_ms.get(schedule) if planned else None,
            "predicted_blind_ms": planned.blind_ms.get(schedule) if planned else None,
        }

    def cells(self, mode: Mode, name: str) -> list[str]:
        found = self.judged(mode, name)
        return [
            number(found["ideal_ratio"], 2),
            number(found["predicted_ms"], 4),
            number(found["predicted_blind_ms"], 4),
        ]

    def said(self) -> list[str]:
        ceilings = self.ceilings[0].as_fields()
        link = "" if ceilings["link_gbps"] is None else f", {ceilings['link_gbps']:.1f} GB/s to a peer"
        return [
            f"roofline {self.least_ms:.4f} ms from {ceilings['memory_gbps']:.1f} GB/s of memory a rank{link}, "
            f"{ceilings['matmul_tflops']:.4g} TFLOP/s; ideal: the longer of {GEMM} and {COMMUNICATION}",
            *(f"{WEFT}, {mode}, takes {name}" for mode, name in self.taken.items()),
        ]
