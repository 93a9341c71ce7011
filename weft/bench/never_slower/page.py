"""The results as text: a summary for the terminal, tables for documents, and a sentence for the README."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from weft.bench.core.console import print_table
from weft.bench.core.tables import Record, geomean, markdown_table, milliseconds, number, times
from weft.bench.never_slower.judge import (
    ADDED_US,
    CHANGING_MEAN,
    GAINS_BELOW,
    OVERLAPPED_SHARE,
    Verdict,
    changing_ratios,
    ideal_ratio,
    key,
    speed,
)
from weft.bench.ops.any_operator import NEVER_BELOW
from weft.words import counted, joined

_WORST = 10
_SPEEDS = ("queued", "graph")
"""The modes for which the speed relative to serial is shown."""
_HOW = {True: "overlapped", False: "serial"}


def in_short(rows: Sequence[Record]) -> str:
    """Return the results of one shape in a few words, for the progress display."""
    found = []
    for row in rows:
        if row.get("error"):
            found.append(f"{row['mode']} {row['error']}")
        elif row.get("skipped"):
            found.append(f"{row['mode']} skipped")
        elif "changing" in row:
            mean, p99_ms = changing_ratios(row)
            found.append(f"changing {mean:.2f}x the time, {p99_ms:+.2f} ms at the 99th percentile")
        else:
            found.append(f"{row['mode']} {times(speed(row))} ({row['chosen']})")
    return joined(*found)


def show(rows: Sequence[Record]) -> None:
    """Print the ten rows in which weft is slowest relative to serial, the summary, and the verdict."""
    verdict = Verdict(rows)
    if verdict.timed:
        below = {key(row) for row in verdict.below}
        lines = [
            [f"{row['op']} {row['config']}", row["mode"], times(speed(row)), milliseconds(median(row["serial_ms"])),
             number(ideal_ratio(row), 2), row["chosen"], "below" if key(row) in below else ""]
            for row in verdict.worst[:_WORST]
        ]  # fmt: skip
        columns = ("shape", "mode", "vs\nserial", "serial\nms", "ideal /\nserial", "chosen", "")
        where = f"{counted(rows[0]['ranks'], 'rank')}, {rows[0]['machine']}, seed {rows[0]['seed']}"
        print_table(
            f"never-slower, {where}: the slowest relative to serial", columns, lines, optional=("ideal /\nserial",)
        )
    print("\n".join(["", *said(verdict), "", f"Verdict: {verdict_of(verdict)}"]), flush=True)


def verdict_of(verdict: Verdict) -> str:
    """Return the verdict (is weft ever slower than serial?) as one line of text."""
    if not (verdict.timed or verdict.changing):
        return "nothing was measured"
    measured = counted(len({(row["op"], row["config"]) for row in verdict.timed}), "shape")
    failures = "; ".join(verdict.failures)
    if not verdict.limited:
        none = f"no limit applies on CPU ranks, because their times vary with the machine's load ({measured} measured)"
        return none + (f". {failures}" if failures else "")
    if failures:
        return f"some limits are exceeded ({measured} measured): {failures}"
    return f"all limits hold ({measured} measured): none is below {NEVER_BELOW}x of the baseline's speed"


def said(verdict: Verdict) -> list[str]:
    """Return the summary of the results as lines of text."""
    lines = []
    if judged := verdict.judged:
        lines.append(
            f"below {NEVER_BELOW}x of serial's speed in two runs: {len(verdict.below)} of {len(judged)} pairs of shape and mode "
            f"({len(verdict.below) / len(judged):.1%}). Geometric mean of weft's speed: "
            f"{times(geomean([speed(row) for row in judged]))} of serial's"
        )
        serial, ideal = verdict.serial, verdict.mean_ideal_of_serial
        lines.append(
            f"serial chosen: {len(serial)} of {len(judged)}"
            + (f". There the ideal time is {ideal:.2f} of serial's time (geometric mean)" if ideal is not None else "")
        )
        if verdict.overlapped_share is not None:
            lines.append(
                f"ideal time below {GAINS_BELOW} of serial's time: {len(verdict.gaining)}. weft overlaps "
                f"{verdict.overlapped_share:.0%} of these" + f" (wanted: {OVERLAPPED_SHARE:.0%})" * verdict.limited
            )
    for how, most in ADDED_US.items():
        if not verdict.limited:
            if single := verdict.single(how):
                lines.append(
                    f"single, {_HOW[how]}: {times(geomean([*map(speed, single)]))} of serial's speed (geometric mean)"
                )
        elif (added := verdict.added_us(how)) is not None:
            lines.append(
                f"single, {_HOW[how]}: {added:+.1f} us relative to serial at the median (wanted: at most {most:.0f})"
            )
    for row in verdict.changing:
        mean, p99_ms = changing_ratios(row)
        lines.append(
            f"changing, {row['op']} {row['config']}: {mean:.3f} of serial's mean time, {p99_ms:+.3f} ms at the 99th percentile"
        )
    reasons: dict[str, int] = {}
    for row in verdict.skipped:
        what = f"skipped, {row['op']}, {row['mode']}: {row['skipped']}"
        reasons[what] = reasons.get(what, 0) + 1
    lines += [f"{what} ({count})" for what, count in reasons.items()]
    return lines + [f"error, {row['op']} {row['config']}, {row['mode']}: {row['error']}" for row in verdict.errors]


# --- documents ---


def markdown(rows: Sequence[Record]) -> str:
    """Return, as Markdown, a table with a line for each operator, the summary, and a table of the slowest shapes."""
    verdict = Verdict(rows)
    ops = list(dict.fromkeys(row["op"] for row in rows))
    header = [
        "operator", "shapes", "queued, mean", "queued, worst", "graph, mean", "graph, worst", "below", "serial chosen",
        "overlapped, of shapes that can gain", "single, us added by serial", "single, us added if overlapped",
        "changing sizes, mean",
        "changing sizes, 99th percentile, ms",
    ]  # fmt: skip
    table = markdown_table(header, [_line(op, [row for row in rows if row["op"] == op]) for op in ops])
    slowest = _slowest(verdict)
    return "\n\n".join([_head(rows), table, _total(verdict), *([slowest] if slowest else [])]) + "\n"


def _head(rows: Sequence[Record]) -> str:
    last = rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    codes = dict.fromkeys(f"commit {row['commit']} (sources {row['source']}), harness {row['harness']}" for row in rows)
    seeds = dict.fromkeys(row["seed"] for row in rows)
    return (
        f"{counted(last['ranks'], 'rank')}, {last['machine']}; {versions}; {', '.join(codes)}; {last['date'][:10]}. Shapes "
        f"drawn by {', '.join(f'seed {seed}' for seed in seeds)}."
    )


def _line(op: str, rows: Sequence[Record]) -> list[str]:
    verdict = Verdict(rows)
    by_mode = {mode: [speed(row) for row in verdict.timed if row["mode"] == mode] for mode in _SPEEDS}
    speeds = [cell for of in by_mode.values() for cell in (times(geomean(of)), times(min(of)) if of else "")]
    judged, changing = verdict.judged, [changing_ratios(row) for row in verdict.changing]
    return [
        op, str(len({(row["seed"], row["config"]) for row in verdict.timed})), *speeds,
        f"{len(verdict.below)} of {len(judged)}" if judged else "", f"{len(verdict.serial)} of {len(judged)}" if judged else "",
        "" if verdict.overlapped_share is None else f"{verdict.overlapped_share:.0%} of {len(verdict.gaining)}",
        *(number(verdict.added_us(how), 1) for how in (False, True)),
        number(max((mean for mean, _ in changing), default=None), 3), number(max((ms for _, ms in changing), default=None), 2),
    ]  # fmt: skip


def _slowest(verdict: Verdict) -> str:
    """Return a Markdown table of the rows in which weft is slowest relative to serial: the worst ten, and all rows that fail
    the criterion "never slower" (`Verdict.below`).
    """
    below = {key(row) for row in verdict.below}
    rows = [row for i, row in enumerate(verdict.worst) if i < _WORST or key(row) in below]
    header = ["operator", "shape", "mode", "serial, ms", "ideal / serial", "speed of weft", "chosen"]
    lines = [
        [row["op"], row["config"], row["mode"], milliseconds(median(row["serial_ms"])), number(ideal_ratio(row), 2),
         times(speed(row)) + " below" * (key(row) in below), row["chosen"]]
        for row in rows
    ]  # fmt: skip
    return f"The slowest shapes relative to serial:\n\n{markdown_table(header, lines)}" if lines else ""


def _total(verdict: Verdict) -> str:
    said = f"{sentence(verdict.rows)} " if verdict.judged else ""
    return f"{said}Verdict: {verdict_of(verdict)}."


def sentence(rows: Sequence[Record]) -> str:
    """Return the README's sentence about "never slower"; raise `ValueError` for rows without times."""
    verdict = Verdict(rows)
    judged = verdict.judged
    if not judged:
        raise ValueError(
            "never-slower: no row of queued or graph calls: measure with --modes queued,graph,single,changing"
        )
    shapes = len({(row["seed"], row["op"], row["config"]) for row in judged})
    by_mode = {"queued": "queued calls", "graph": "CUDA graphs"}
    modes = [text for mode, text in by_mode.items() if any(row["mode"] == mode for row in judged)]
    below = len({(row["seed"], row["op"], row["config"]) for row in verdict.below})
    operators = counted(len({row["op"] for row in judged}), "operator")
    found = "No shape" if not below else f"{below} of them ({below / shapes:.1%})"
    return (
        f"{counted(shapes, 'random shape')} of {operators} on {rows[-1]['machine']}: the geometric mean is "
        f"{times(geomean([*map(speed, judged)]))}, the worst {times(min(map(speed, judged)))}. {found} ran below "
        f"{NEVER_BELOW}x, as {' or as '.join(modes)}."
    )


def slower_with_changing_sizes(rows: Sequence[Record]) -> str:
    """Return the operators whose mean time in mode `changing` exceeds the limit, each with its time divided by serial's;
    "none" if there is none. Raise `ValueError` for rows without calls of changing sizes.
    """
    changing = Verdict(rows).changing
    if not changing:
        raise ValueError("never-slower: no row of calls with changing sizes: measure with --modes changing")
    means = [(row["op"], changing_ratios(row)[0]) for row in changing]
    return ", ".join(f"{op} {mean:.3f}x" for op, mean in means if mean > CHANGING_MEAN) or "none"
