"""The explanation of a choice as text: candidates, predicted and measured times, losses, and the reason.

Losses (`weft.sim.losses`) are factors by which the time of work grows in a queued run; 1 means no loss. `DIL` is the
loss from cutting an operation into pieces, `CIL` the loss from contention with concurrent work. `exposed` is the time
in which a rank has nothing to compute. The terms are from "Design Space Exploration of DMA based Finer-Grain Compute
Communication Overlap", IV.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.builders import Problem, described
from weft.hw import Machine, known_machines, load_machine
from weft.hw.topology import known_topologies, load_topology
from weft.integers import integer
from weft.plan import gemms
from weft.plan.autotune import known_times
from weft.plan.choose import Choice, decide
from weft.plan.heuristic import static_pick
from weft.plan.machine import machine_here, machine_name
from weft.plan.predict import AT_LEAST, SAME_AS, Progress, Row
from weft.plan.source import calibrated
from weft.sim import Mode, Model
from weft.sim.engine import check_mode
from weft.sim.memory import require_memory
from weft.sim.model import MatmulShape
from weft.sim.orbits import MOST_RANKS
from weft.words import counted, decimal_us, in_us, kind

HEADER = (
    "candidate",
    "predicted us",
    "measured us",
    "GEMM DIL",
    "GEMM CIL",
    "comm DIL",
    "comm CIL",
    "exposed us",
    "why not",
)
_WITHOUT_LOSSES = (0, 1, 2, -1)
LEGEND = (
    "DIL: decomposition loss, the time of the pieces / the time of the whole operation. CIL: contention loss, "
    "the time with concurrent work / the time alone. 1 is no loss"
)
HERE = "measured here: this process has measured all GEMMs of the candidate, and the prediction uses these times"
IN_A_ROW = "measured us: time per call of calls that the CPU launches ahead of the GPU, unless graphs were timed"
_SHOWN = 10
_PRUNED = "not simulated, because even a lower bound of the time is far above the best time"
MOST_OF_A_TORUS = 1 << 16
"""The maximum number of ranks of a torus, of which only one rank is simulated (`weft.sim.orbits`). 16,384 ranks take
seconds.
"""
_EXACT_RANKS = 8
"""For more ranks than this, an uneven problem is replaced by its even version (`Problem.evened`), because one rank can
then represent all ranks in the simulation.
"""


@dataclass(frozen=True)
class Explanation:
    """The planner's choice, with the machine and the heuristic's choice. `explain` returns it as a `str`."""

    choice: Choice
    machine: Machine
    notes: tuple[str, ...]
    """Sentences on the sources of the model's numbers."""
    heuristic: str | None
    """The schedule that FiCCO's static heuristic chooses; None if the heuristic does not cover this operator."""
    measured_here: frozenset[MatmulShape] = frozenset()
    """The GEMMs that this process has measured on the machine."""

    @property
    def only_asked_for(self) -> bool:
        """True if the chosen schedule was never timed on GPUs. Calls on GPUs use it only if it is pinned, or with
        "autotune".
        """
        return not self.choice.problem.tried_on_gpus and self.choice.candidate.name != "serial"

    @property
    def header(self) -> tuple[str, ...]:
        """The names of the table's columns. Columns for losses exist only if there are GEMMs."""
        return HEADER if self._has_losses else tuple(HEADER[i] for i in _WITHOUT_LOSSES)

    @property
    def _has_losses(self) -> bool:
        return self.choice.row(self.choice.candidate.name).losses is not None

    def cells(self, shown: int | None = _SHOWN) -> list[tuple[str, ...]]:
        """Return the table's rows: the `shown` fastest candidates, the serial schedule, the choice and the heuristic's choice.

        shown: the number of the fastest candidates to include; None for all candidates with a time.
        """
        timed = [row for row in self.choice.rows if row.us is not None]
        kept = timed if shown is None else timed[:shown]
        also = [row for row in timed if row.candidate.name in ("serial", self.heuristic, self.choice.candidate.name)]
        return [self._cells(row) for row in timed if row in kept or row in also]

    def _cells(self, row: Row) -> tuple[str, ...]:
        cells = _cells(row, "the choice, if pinned" if self.only_asked_for else "taken")
        name, predicted, *others = cells if self._has_losses else (cells[i] for i in _WITHOUT_LOSSES)
        return name, f"{predicted} measured here" if self._is_here(row) else predicted, *others

    def _is_here(self, row: Row) -> bool:
        return row.predicted_us is not None and bool(row.matmuls) and row.matmuls <= self.measured_here

    def legend(self) -> list[str]:
        """Return explanations of the table's terms, one line each."""
        of_calls = self.choice.mode == "graph" and any(row.measured_us is not None for row in self.choice.rows)
        here = any(map(self._is_here, self.choice.rows))
        return [*([LEGEND] if self._has_losses else []), *([HERE] if here else []), *([IN_A_ROW] if of_calls else [])]

    def left_out(self, shown: int | None = _SHOWN) -> list[str]:
        """Return lines on the candidates that are not in the table, with the reasons."""
        timed = sum(row.us is not None for row in self.choice.rows) - len(self.cells(shown))
        lines = [f"{timed} slower candidates are not shown"] if timed else []
        by_reason: dict[str, list[Row]] = {}
        for row in self.choice.rows:
            if row.us is None:
                kind = _PRUNED if row.why_not.startswith(AT_LEAST) else row.why_not
                kind = f"{SAME_AS}another" if kind.startswith(SAME_AS) else kind
                by_reason.setdefault(kind, []).append(row)
        for reason, rows in by_reason.items():
            builders = dict.fromkeys(row.candidate.builder for row in rows)
            lines.append(f"{counted(len(rows), 'candidate')} of {', '.join(builders)}: {reason}")
        return lines

    def facts(self) -> list[tuple[str, str]]:
        """Return the lines that `weft plan` prints above the table of candidates, as (label, text)."""
        p, choice = self.choice.problem, self.choice
        rows = {row.candidate.name: row for row in choice.rows}
        lines = [
            ("operator", f"{p.operator}: {p.text}, {choice.mode}"),
            ("machine", "; ".join([self.machine.name, *self.notes])),
            ("choice", choice.candidate.name),
            ("reason", choice.reason),
        ]  # fmt: skip
        if self.only_asked_for:
            lines.append(
                (
                    "calls",
                    f'GPUs run serial for {p.title}: other schedules run only if pinned, or with "autotune"',
                )
            )
        if (losses := rows[choice.candidate.name].losses) is not None:
            parts = f"GEMM {decimal_us(losses.gemm_us)}, communication {decimal_us(losses.communication_us)}"
            taken = f"a queued run of the choice takes {losses.over_ideal:.2f} times as long"
            lines.append(("ideal", f"max({parts}) = {in_us(losses.ideal_us)}; {taken}"))
        if "serial" in rows and (losses := rows["serial"].losses) is not None:
            lines.append(("serial", f"{in_us(losses.exposed_us)} of communication exposed"))
        named = {name: rows[name].algorithms for name in (choice.candidate.name, "serial") if name in rows}
        if any(named.values()):
            lines.append(("collectives", algorithms_text(named)))
        if self.heuristic is not None:
            lines.append(("heuristic", f"{self.heuristic}: {self._of_heuristic(rows)}"))
        return lines

    def _of_heuristic(self, rows: dict[str, Row]) -> str:
        row = rows.get(self.heuristic or "")
        if row is None:
            return "not simulated"
        same = rows.get(row.why_not.removeprefix(SAME_AS))  # an equal schedule was simulated under another name
        said, row = (f"{row.why_not}, ", same) if same is not None else ("", row)
        if row.us is None:
            return said + row.why_not
        return f"{said}{in_us(row.us)}" + (f", {row.why_not}" if row.why_not else ", the choice")

    def as_json(self) -> dict[str, Any]:
        """Return all results as JSON values, with times in microseconds."""
        rows = [
            {"candidate": row.candidate.name, "predicted_us": row.predicted_us, "measured_us": row.measured_us,
             "measured_here": self._is_here(row),
             "losses": asdict(row.losses) if row.losses else None, "algorithms": row.algorithms, "why_not": row.why_not}
            for row in self.choice.rows
        ]  # fmt: skip
        return {
            "op": self.choice.problem.operator, "problem": asdict(self.choice.problem), "mode": self.choice.mode,
            "machine": self.machine.name, "notes": self.notes, "choice": self.choice.candidate.name,
            "only_asked_for": self.only_asked_for, "reason": self.choice.reason, "heuristic": self.heuristic, "candidates": rows,
        }  # fmt: skip

    def __str__(self) -> str:
        facts = self.facts()
        width = max(len(what) for what, _ in facts)
        table = [self.header, *self.cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        aligned = "<" + ">" * (len(self.header) - 2) + "<"
        lines = [
            "  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, aligned, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join(
            [*(f"{what:<{width}}  {text}" for what, text in facts), "", *lines, "", *self.legend(), *self.left_out()]
        )


def algorithms_text(named: Mapping[str, Sequence[str]]) -> str:
    """Return a text with the schedules that use each algorithm. named: {schedule: algorithms of its collectives}."""
    by_algorithm: dict[str, list[str]] = {}
    for name, algorithms in named.items():
        for one in algorithms:
            by_algorithm.setdefault(one, []).append(name)
    texts = []
    for one, names in by_algorithm.items():
        more = f" and {len(names) - 2} more" if len(names) > 3 else ""
        texts.append(f"{one} ({', '.join(names[:2] if more else names)}{more})")
    return "; ".join(texts)


def explain(
    op: str,
    *,
    M: int,
    N: int,
    K: int,
    ranks: int,
    hw: str | Path | None = None,
    topology: str | Path | None = None,
    dtype: str = "bf16",
    mode: Mode = "queued",
    **options: Any,
) -> str:
    """Return a text that explains the choice for `op`: all candidates with their times, and the reason.

    Args:
        op: the name of an operator, such as "all_gather_matmul".
        M, N, K: the operator's sizes. `weft plan OP --help` defines them.
        ranks: the number of ranks.
        hw: the name or path of a machine file. Default: the file of this machine, or h200 if there is none.
        topology: the name or path of a topology file, which describes the links. Default: the topology in the machine
            file.
        dtype: the dtype of the operands.
        mode: the kind of run whose time is predicted: "queued", "graph" or "single" (`weft.plan.predict`).
        options: the operator's own options. `weft plan OP --help` lists them.

    Raise `ValueError` for an unknown operator, machine, topology, dtype, mode or option, for a size below 1, and if M
    or `experts` is not divisible by `ranks`. For MoE operators, mode "graph" needs the option `bounded`: otherwise the
    CPU reads sizes, which a graph cannot capture.
    """
    return str(explanation(op, M=M, N=N, K=K, ranks=ranks, hw=hw, topology=topology, dtype=dtype, mode=mode, **options))


def explanation(
    op: str,
    *,
    M: int,
    N: int,
    K: int,
    ranks: int,
    hw: str | Path | None,
    dtype: str,
    topology: str | Path | None = None,
    mode: Mode,
    progress: Progress = lambda what, share: None,
    **options: Any,
) -> Explanation:
    """Return the `Explanation` that `explain` returns as text.

    progress: a function that is called before each piece of work (`weft.plan.predict.Progress`).
    """
    machine, model, notes, problem = problem_on_machine(
        op, M=M, N=N, K=K, ranks=ranks, hw=hw, topology=topology, dtype=dtype, mode=mode, **options
    )
    measured = {} if topology else known_times(problem, machine.name, mode)
    choice = decide(problem, model, mode=mode, measured=measured, progress=progress)
    require_memory(choice.schedule, model)
    here = frozenset(gemms.measured_here(machine.name))
    return Explanation(choice, machine, notes, static_pick(problem, machine), here)


def problem_on_machine(
    op: str, *, M: int, N: int, K: int, ranks: int, hw: str | Path | None, dtype: str, topology: str | Path | None, mode: Mode,
    most: int = MOST_RANKS, **options: Any,
) -> tuple[Machine, Model, tuple[str, ...], Problem]:  # fmt: skip
    """Return (machine, its model, notes on the sources of the model's numbers, problem). Raise the errors of `explain`.

    most: the largest number of ranks to allow. More than `MOST_RANKS` ranks are possible only if all
        ranks do the same work, so that one rank can represent them in the simulation.
    """
    check_mode(mode)
    ranks = _checked_ranks(ranks)
    if ranks > most:
        more = (
            ", because schedules have a step for each pair of ranks. Exception: weft sim and weft.plan.comparison simulate "
            f"embedding_all_to_all on a torus of up to {MOST_OF_A_TORUS} ranks, because one rank represents all"
        )
        raise ValueError(f"ranks={ranks}: at most {most} can be simulated{more if most == MOST_RANKS else ''}")
    machine, model, notes = machine_and_model(hw, ranks, topology)
    if not isinstance(dtype, str) or dtype not in model.matmul_flops_per_us:
        raise ValueError(
            f"dtype={dtype!r}: {machine.name} has matmul rates only for {', '.join(model.matmul_flops_per_us)}: use one of these"
        )
    problem = described(op, m=M, n=N, k=K, ranks=ranks, dtype=dtype, **options)
    if not problem.has_work:
        raise ValueError(f"M={M}, N={N}, K={K}: each must be at least 1")
    if mode == "graph" and problem.not_captured:
        raise ValueError(f"mode='graph': {problem.not_captured}")
    if (uneven := problem.uneven) and ranks > _EXACT_RANKS and (evened := problem.evened) is not None:
        problem, times = evened
        notes = (
            *notes,
            f"{uneven}: simulated with {times - 1:.2%} more rows: every rank gets the slowest rank's number of rows",
        )
    if ranks > MOST_RANKS and problem.uneven:
        raise ValueError(
            f"{problem.uneven}, and the simulation of more than {MOST_RANKS} different ranks takes too long: "
            "use fewer ranks, or even sizes"
        )
    return machine, model, notes, problem


def machine_and_model(
    hw: str | Path | None, ranks: int, topology: str | Path | None = None
) -> tuple[Machine, Model, tuple[str, ...]]:
    """Return (machine, model, notes on the sources of the model's numbers).

    The model comes from the best source (`weft.plan.source`), and includes the times of GEMMs that this process has
    measured on the machine. Raises `ValueError` for an unknown machine or topology, or a number of ranks that the
    topology does not support.
    """
    notes = []
    _require_name("hw", hw, known_machines())
    _require_name("topology", topology, known_topologies())
    ranks = _checked_ranks(ranks)
    machine = machine_here() if hw is None else load_machine(hw)
    if machine is None:
        machine = load_machine("h200")
        notes.append(
            f"the default, because weft has no machine file for {machine_name()}; pass hw (--hw) for another machine"
        )
    elif machine.about:
        notes.append(machine.about)
    try:
        model, note, *_ = calibrated(machine, ranks)
        if topology is not None:
            model = replace(model, wiring=load_topology(topology, machine))
            model.wiring.of(ranks)  # raises if the topology does not support `ranks`
            notes.append(f"topology {topology} instead of {machine.topology}")
    except KeyError as error:  # the file lacks a number
        raise ValueError(error.args[0]) from error
    if here := gemms.measured_here(machine.name):
        note += f", and with {len(here)} GEMMs measured here"
    return machine, gemms.informed(model, machine.name), (*notes, note)


def _checked_ranks(ranks: Any) -> int:
    fix = "pass the number of GPUs, an integer of at least 1"
    number = integer("ranks", ranks, fix)
    if number < 1:
        raise ValueError(f"ranks={number}: {fix}")
    return number


def _require_name(what: str, given: object, known: Sequence[str]) -> None:
    if given is not None and not isinstance(given, str | os.PathLike):
        raise ValueError(
            f"{what}={given!r} is {kind(given)}: pass one of {', '.join(known)}, the path of a TOML file, or None"
        )


def _cells(row: Row, taken: str) -> tuple[str, ...]:
    def time(us: float | None) -> str:
        return "" if us is None else decimal_us(us)

    found = row.losses
    factors = () if found is None else (found.gemm_decomposition, found.gemm_contention, found.communication_decomposition,
                                        found.communication_contention)  # fmt: skip
    return (
        row.candidate.name,
        time(row.predicted_us),
        time(row.measured_us),
        *([f"{factor:.2f}" for factor in factors] or [""] * 4),
        time(found.exposed_us if found else None),
        row.why_not or taken,
    )
