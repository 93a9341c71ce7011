"""The choice of the source for a machine's model: the first in this list that exists and is usable.

- calibration: measured by `weft plan calibrate`, on this machine, with the same number of ranks and the installed
  versions
- machine file: `weft/hw/*.toml`
- self-calibration: for GPUs without a calibration or machine file. Some numbers are measured at a group's first call, the others
  are derived
- derived numbers: a measured machine's numbers, scaled in proportion to properties that the driver reports
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Literal, NamedTuple, TypeAlias

from weft import env
from weft.hw import Machine
from weft.plan import calibration, self_calibration, store
from weft.sim import Model, model_of
from weft.words import counted

Source: TypeAlias = Literal["calibration", "machine file", "self-calibration", "derived"]


class Calibrated(NamedTuple):
    model: Model
    note: str
    """The source of the model's numbers."""
    refused: bool
    """True if a calibration exists but is not usable. `note` then has the reason and the fix."""
    source: Source


def calibrated(machine: Machine, ranks: int) -> Calibrated:
    """Return the model of `ranks` GPUs of this machine from the best source.

    Raise `KeyError` with the missing number if the machine file is incomplete.
    """
    base = model_of(machine, ranks)
    refused = True
    try:
        found = calibration.find(machine.name, ranks)
        if found is not None:
            return Calibrated(found.apply(base), f"calibrated on {_dated(found.date)}", False, "calibration")
        others = store.ranks_of("calibration", machine.name)
        why = f"not calibrated with {counted(ranks, 'rank')}"
        refused = bool(others)
        if others:
            known = ", ".join(map(str, others))
            why += f" (only for {known}: run `weft plan calibrate --ranks {ranks}`)"
    except ValueError as error:
        why = f"not calibrated: {error}"
    if not machine.about:
        return Calibrated(base, f"{why}, so the machine file's numbers are used", refused, "machine file")
    model, note, source = _self_calibrated(machine, base, ranks)
    return Calibrated(model, f"{why}, {note}", refused, source)


def _self_calibrated(machine: Machine, base: Model, ranks: int) -> tuple[Model, str, Source]:
    if not env.self_calibration():
        return base, "so derived numbers are used (WEFT_SELF_CALIBRATION=0)", "derived"
    try:
        found = self_calibration.find(machine.name, ranks)
    except ValueError as error:
        return base, f"so derived numbers are used: {error}", "derived"
    if found is None:
        return base, "so derived numbers are used", "derived"
    model, used, dropped = found.apply(base)
    note = f"self-calibrated on {_dated(found.date)}: {', '.join(used) or 'nothing'} measured"
    return model, "; ".join([note, *dropped]), "self-calibration"


def _dated(day: str) -> str:
    """Return a text with the date `day` and its age."""
    try:
        age = (datetime.now(UTC).date() - date.fromisoformat(day)).days
    except ValueError:
        return day
    return f"{day} ({counted(max(0, age), 'day')} ago)"
