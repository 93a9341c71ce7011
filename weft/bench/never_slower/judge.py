"""The verdict: is weft ever slower than serial, the hand-written calls without overlap?

The verdict is computed from rows. A row is the record of one shape in one timing mode. It has the times of weft and of
serial in ms, for each repetition. A repetition runs both.

- Modes `queued` and `graph`: a run of a shape is *under* if weft's speed is less than `NEVER_BELOW` times serial's speed in at
  least four of five repetitions. A shape is *below* if two runs of it are under.
- Mode `single`: the criterion is the median of the microseconds that weft adds to a call.
- Mode `changing`: each call has another size. A row has statistics over all sizes, and the criteria are the mean time
  and the 99th percentile.

The limits are for GPUs. Times of CPU processes vary by more with the load of the machine, so no limit applies to their rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from weft.bench.core.tables import Record, geomean, share
from weft.bench.ops.any_operator import NEVER_BELOW
from weft.words import counted

BENCHMARK = "never-slower"
"""The field `benchmark` of this benchmark's rows."""

SERIAL = "serial"
"""The schedule without overlap."""
GAINS_BELOW = 0.9
"""Overlap can gain if the ideal time is below this fraction of serial's time."""
OVERLAPPED_SHARE = 0.6
ADDED_US = {True: 20.0, False: 10.0}
"""The longest time in microseconds that weft may add to a single call. The key is True if weft's schedule overlaps."""
CHANGING_MEAN, CHANGING_P99_MS = 1.03, 0.3
"""The limits for mode `changing`: weft's mean time / serial's, and weft's 99th percentile minus serial's in milliseconds."""

_OF_REPETITIONS = 0.8
_JUDGED = ("queued", "graph")


def is_mine(record: Record) -> bool:
    """True if a record is of the benchmark `never-slower`."""
    return record.get("benchmark") == BENCHMARK


def key(row: Record) -> tuple[Hashable, ...]:
    """Return a key of a row, the record of one shape in one timing mode. Rows of the same shape and mode have equal keys."""
    return row["seed"], row["op"], row["index"], row["config"], row["mode"]


def speed(row: Record) -> float:
    """Return weft's speedup over serial: serial's median time divided by weft's."""
    return float(median(row["serial_ms"]) / median(row["weft_ms"]))


def is_under(row: Record) -> bool:
    """True if in at least four of five repetitions, weft's speed was less than serial's speed times `NEVER_BELOW`."""
    pairs = [*zip(row["serial_ms"], row["weft_ms"], strict=True)]
    under = sum(serial / weft < NEVER_BELOW for serial, weft in pairs)
    return under >= math.ceil(_OF_REPETITIONS * len(pairs))


def is_timed(row: Record) -> bool:
    return "weft_ms" in row


def is_suspect(row: Record) -> bool:
    """True if a row of a first run shows weft slower than serial (`is_under`), so that its shape needs a second run."""
    return is_timed(row) and row["mode"] in _JUDGED and not row["again"] and is_under(row)


def added_us(row: Record) -> float:
    """Return the microseconds that weft adds to a call: weft's median time minus serial's."""
    return 1e3 * (median(row["weft_ms"]) - median(row["serial_ms"]))


def overlaps(row: Record) -> bool:
    return bool(row["chosen"] != SERIAL)


def ideal_ratio(row: Record) -> float | None:
    """Return the ideal time as a fraction of serial's time; None if it was not measured. The ideal time is the longer
    of the computation alone and the collective alone.
    """
    ideal = row["ideal_ms"]
    return None if ideal is None else float(ideal / median(row["serial_ms"]))


def can_gain(row: Record) -> bool:
    ratio = ideal_ratio(row)
    return ratio is not None and ratio < GAINS_BELOW


@dataclass(frozen=True)
class Verdict:
    """The verdict on `rows`: whether weft is ever slower than serial calls. If several rows have the same shape and mode, only
    the last counts, separately for first and second runs.
    """

    rows: Sequence[Record]

    @cached_property
    def _runs(self) -> tuple[dict[Hashable, Record], dict[Hashable, Record]]:
        first, second = dict[Hashable, Record](), dict[Hashable, Record]()
        for row in self.rows:
            if not row["again"]:
                second.pop(key(row), None)  # a new first run invalidates the old second run
            (second if row["again"] else first)[key(row)] = row
        return first, second

    @cached_property
    def timed(self) -> list[Record]:
        """The rows of first runs that have times, in all modes except `changing`."""
        return [row for row in self._runs[0].values() if is_timed(row)]

    @cached_property
    def judged(self) -> list[Record]:
        """The rows of `timed` in the modes `queued` and `graph`, in which speed is the criterion."""
        return [row for row in self.timed if row["mode"] in _JUDGED]

    @cached_property
    def suspects(self) -> list[Record]:
        """The rows of `judged` that need a second run (`is_suspect`) and have none yet."""
        return [row for row in self.judged if is_suspect(row) and key(row) not in self._runs[1]]

    @cached_property
    def below(self) -> list[Record]:
        """The rows of `judged` whose shape was too slow (`is_under`) in both runs."""
        again = self._runs[1]
        seconds = [(row, again.get(key(row))) for row in self.judged if is_suspect(row)]
        return [row for row, second in seconds if second is not None and is_timed(second) and is_under(second)]

    @property
    def limited(self) -> bool:
        """True if the limits apply to `rows`: they apply only on GPUs."""
        return all(row["device"] != "cpu" for row in self.rows)

    @property
    def worst(self) -> list[Record]:
        """The rows of `judged`, or of `timed` if there are none, sorted by weft's speedup, the smallest first."""
        return sorted(self.judged or self.timed, key=speed)

    @property
    def serial(self) -> list[Record]:
        """The rows of `judged` for which weft selected the serial schedule."""
        return [row for row in self.judged if not overlaps(row)]

    @property
    def gaining(self) -> list[Record]:
        """The rows of `judged` in which overlap can gain: `ideal_ratio` is below `GAINS_BELOW`."""
        return [row for row in self.judged if can_gain(row)]

    @property
    def overlapped_share(self) -> float | None:
        """The fraction of the rows `gaining` for which weft selected a schedule with overlap; None if `gaining` is empty."""
        return share([overlaps(row) for row in self.gaining])

    def single(self, overlapped: bool) -> list[Record]:
        """Return the rows of mode `single` whose schedule overlaps, or, if `overlapped` is False, the rows with the serial
        schedule.
        """
        return [row for row in self.timed if row["mode"] == "single" and overlaps(row) == overlapped]

    def added_us(self, overlapped: bool) -> float | None:
        """Return the median of the microseconds that weft adds to a call of `single(overlapped)`; None if there are no rows."""
        found = [added_us(row) for row in self.single(overlapped)]
        return median(found) if found else None

    @property
    def changing(self) -> list[Record]:
        return [row for row in self._runs[0].values() if "changing" in row]

    @property
    def errors(self) -> list[Record]:
        return [row for run in self._runs for row in run.values() if row.get("error")]

    @property
    def skipped(self) -> list[Record]:
        return [row for row in self._runs[0].values() if row.get("skipped")]

    @property
    def mean_ideal_of_serial(self) -> float | None:
        """The geometric mean of `ideal_ratio` over the rows for which weft selected the serial schedule."""
        return geomean([ratio for row in self.serial if (ratio := ideal_ratio(row)) is not None])

    @property
    def failures(self) -> list[str]:
        """A list with a phrase for each criterion that the results do not meet; empty if all are met. On CPU ranks, errors are
        the only criterion.
        """
        found = self._exceeded if self.limited else []
        if self.errors:
            found.append(f"{counted(len(self.errors), 'row')} ended with an error")
        return found

    @property
    def _exceeded(self) -> list[str]:
        """A list with a phrase for each limit that is exceeded."""
        found = []
        if self.below:
            found.append(f"{len(self.below)} of {len(self.judged)} pairs of shape and mode are below {NEVER_BELOW}x")
        if self.suspects:
            found.append(f"{len(self.suspects)} were below {NEVER_BELOW}x once, and were not measured again")
        overlapped = self.overlapped_share
        if overlapped is not None and overlapped < OVERLAPPED_SHARE:
            found.append(f"weft overlaps {overlapped:.0%} of the shapes that can gain (wanted: {OVERLAPPED_SHARE:.0%})")
        for how, most in ADDED_US.items():
            added = self.added_us(how)
            if added is not None and added > most:
                found.append(
                    f"single calls of {'overlapped' if how else 'serial'} schedules add {added:.0f} us (limit: {most:.0f} us)"
                )
        beyond = []
        for row in self.changing:
            mean, p99_ms = changing_ratios(row)
            if mean > CHANGING_MEAN or p99_ms > CHANGING_P99_MS:
                beyond.append(f"{row['op']} {mean:.2f}x and {p99_ms:+.2f} ms")
        if beyond:
            limits = f"mean time {CHANGING_MEAN}x serial's, 99th percentile {CHANGING_P99_MS} ms above serial's"
            found.append(f"calls with changing sizes exceed a limit ({limits}): {', '.join(beyond)}")
        return found


def changing_ratios(row: Record) -> tuple[float, float]:
    """Return two numbers for a row of mode `changing`: weft's mean time divided by serial's, and weft's 99th percentile minus
    serial's in ms.
    """
    weft, serial = row["changing"]["weft_ms"], row["changing"]["serial_ms"]
    return weft["mean"] / serial["mean"], weft["p99"] - serial["p99"]


def mine(records: Iterable[Record]) -> list[Record]:
    """Return the records that are of the benchmark `never-slower` (its rows)."""
    return [record for record in records if is_mine(record)]
