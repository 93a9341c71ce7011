"""T3's evaluation on its own hardware: records, tables and pictures of `weft reproduce t3`.

`weft.studies.t3_sublayers` simulates sub-layers, and has the main claims. `t3_figures` has other figures and the
sensitivity analysis. `t3_iteration` has whole iterations. `weft.studies.t3` runs the same sub-layers in software on
existing GPUs.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 2 to 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.bench.core.tables import Record, ResultTable
from weft.sim.memory_controller import t3_gpu
from weft.studies import t3_figures as figures
from weft.studies import t3_iteration as iteration
from weft.studies import t3_sublayers as sub
from weft.studies.claims import Claim, claims_table
from weft.studies.numbers import numbers_table
from weft.studies.pages import block, head_of, last_run, where_simulated
from weft.studies.t3_claims import claims as other_claims
from weft.words import counted

STUDY = "t3_hardware"
_STEPS = 75  # progress steps


class Rows(NamedTuple):
    """The results of a run.

    small, large: the results of the sub-layers of small networks (Mega-GPT-2, T-NLG) and of large networks (GPT-3, PALM,
        MT-NLG). Both are dicts by link rate: GB/s in one direction.
    figures: the records of the other figures, by figure.

    There are two link rates, because the paper's "150 GB/s bi-directional" can mean 75 or 150 GB/s in each direction.
    """

    small: dict[str, list[sub.HardwareRow]]
    large: dict[str, list[sub.HardwareRow]]
    figures: dict[str, Record]


def simulated(*, progress: Callable[[str, float], None] = lambda what, share: None) -> list[Record]:
    """Return the records of the study: each sub-layer with each of two link rates, then a record for each other figure."""

    def step(what: str) -> None:
        progress(f"simulating {what}", 1 / _STEPS)

    gpu = t3_gpu()
    assumed = [sum(one.source == "assumed" for one in gpu.quantities.values()), len(gpu.quantities)]
    common = {
        **head_of("matmul_reduce_scatter", gpu.name, assumed), "study": STUDY, "dtype": "fp16", "topology": "ring",
        "baseline": "sequential",
    }  # fmt: skip
    found = []
    for reading, machine in sub.READINGS.items():
        for large in (False, True):
            rows = sub.rows_on(machine(), list(sub.sublayers(large)), step=step)
            found += [{**common, "figure": "sub-layers", "reading": reading, **sub.fields_of(row)} for row in rows]
    others = [
        simulate(gpu)
        for simulate in (
            figures.simulate_splits, figures.simulate_ring, figures.simulate_traffic, figures.simulate_more_units,
            figures.simulate_direct, figures.simulate_stagger,
            figures.simulate_dram, iteration.simulate_future,
        )
    ]  # fmt: skip
    others += [figures.simulate_sensitivity(gpu, step), figures.simulate_assumptions(step)]
    return [*found, *({**common, "config": one["figure"], "variant": "t3-mca", **one} for one in others)]


def _last_run(records: Sequence[Record]) -> list[Record]:
    return last_run(records, STUDY, "T3's hardware", "t3")


def rows_of(records: Sequence[Record]) -> Rows:
    """Return the results of the last run; raise `ValueError` if there are no records."""
    last = _last_run(records)
    small: dict[str, list[sub.HardwareRow]] = {}
    large: dict[str, list[sub.HardwareRow]] = {}
    for record in last:
        if record["figure"] == "sub-layers":
            row = sub.row_from(record)
            (large if row.large else small).setdefault(record["reading"], []).append(row)
    return Rows(small, large, {r["figure"]: r for r in last if r["figure"] != "sub-layers"})


def tables(rows: Rows) -> list[ResultTable]:
    small, large, gpu = rows.small["75"], rows.large["75"], t3_gpu()
    smaller = "Sub-layers of Mega-GPT-2 and T-NLG (figures 15 and 16)"
    return [
        claims_table("The paper's numbers and ours (sections 6.1, 6.2 and 6.4)", sub.claims(small, large)),
        sub.speedups_table(small, smaller),
        sub.speedups_table(large, "Sub-layers of the large networks: GPT-3, PALM and MT-NLG (section 6.4)"),
        sub.memory_table(small),
        *other_tables(rows, gpu),
        iteration.shares_table([*small, *large], rows.figures["4"]),
        iteration.iterations_table(
            small, "How much faster whole iterations become, with the paper's numbers in brackets (figure 19)"
        ),
        iteration.iterations_table(
            large,
            "How much faster whole iterations of the large networks become, with the paper's numbers in brackets (section 6.4)",
        ),
        iteration.roofline_table(small, large),
        iteration.rest_table(small, large),
        _other_reading(rows),
        figures.dram_table(rows.figures["dram"]),
        figures.sensitivity_table(rows.figures["sensitivity"]),
        figures.assumptions_table(rows.figures["assumptions"]),
        figures.networks_table(),
        numbers_table("The numbers of the simulated GPU: from the paper (table 1), or assumed", gpu),
    ]


def other_tables(rows: Rows, gpu: sub.TrackingGpu) -> list[ResultTable]:
    return [
        figures.stages_table(gpu),
        figures.splits_table(rows.figures["6"]),
        figures.step_table(),
        figures.ring_table(rows.figures["14"]),
        figures.more_units_table(rows.figures["20"]),
        figures.more_units_readings_table(rows.figures["20"]),
        figures.direct_table(rows.figures["7.1"]),
        figures.stagger_table(rows.figures["4.4"]),
    ]


def _other_reading(rows: Rows) -> ResultTable:
    cells = []
    for reading in sub.READINGS:
        for what, of in (
            ("Mega-GPT-2 and T-NLG", rows.small[reading]),
            ("GPT-3, PALM and MT-NLG", rows.large[reading]),
        ):
            means = sub.summary(of)
            cells.append((
                f"{reading} GB/s in each direction, {what}",
                *(f"{means[v][0]:.3f}x, at most {means[v][1]:.2f}x" for v in ("t3", "t3-mca", "ideal")),
            ))  # fmt: skip
    title = (
        'Speedups for both meanings of "150 GB/s bi-directional", each with the rate of memory that follows from section 6.1.1: '
        "geometric mean and maximum"
    )
    return ResultTable(title, ("link bandwidth", "T3", "T3-MCA", "ideal"), cells)


def claims(rows: Rows) -> list[Claim]:
    """Return a claim for each number in the paper's text, with the model's number. Claims on sub-layers come first."""
    small, large = rows.small["75"], rows.large["75"]
    return [*sub.claims(small, large), *other_claims(small, large, rows.figures, t3_gpu())]


def conclusions(rows: Rows) -> list[str]:
    """Return sentences for the report: how many of the paper's numbers the model reproduces, and which it does not
    reproduce.
    """
    found = sub.claims(rows.small["75"], rows.large["75"])
    judged = [claim for claim in found if claim.limit is not None]
    missed = [f"{claim.what} ({claim.where})" for claim in judged if claim.said == "no"]
    met = f"{len(judged) - len(missed)} of {counted(len(judged), 'number')} for which a limit is set"
    said = f"{met} deviate from the paper's by less than the limit"
    said += f"; these deviate by more: {', '.join(missed)}." if missed else "."
    order = "have" if sub.in_order(rows.small["75"]) else "do not have"
    said += f" The geometric means of speedups {order} the paper's order T3 < T3-MCA < ideal."
    return [f"{said} {_ranges(rows)} {_differs(rows)}"]


def _ranges(rows: Rows) -> str:
    """Return a sentence on how far the mean speedups of T3 and T3-MCA change under other assumptions."""
    lines = rows.figures["assumptions"]["lines"]
    t3, mca = ([100 * (line[i] - 1) for line in lines] for i in (1, 2))
    reverse = [line[0] for line in lines if line[1] > line[2]]
    said = f"Under the other assumptions T3 is {min(t3):.0f} to {max(t3):.0f}% faster and T3-MCA {min(mca):.0f} to {max(mca):.0f}%"
    return f"{said}. T3-MCA is slower than T3 in these cases: {'; '.join(reverse)}." if reverse else f"{said}."


def _differs(rows: Rows) -> str:
    """Return sentences on results of the paper that the model does not reproduce."""
    more = figures.gain_with_more_units(rows.figures["20"])
    said = (
        "With twice the compute units, the paper's FC-2 layers gain more and its OP layers less. "
        f"Here {more['FC-2'][0]} of {more['FC-2'][1]} FC-2 layers gain more with T3-MCA ({more['ideal'][0]} with the ideal), "
        f"and {more['OP'][0]} of {more['OP'][1]} OP layers, because memory and links stay the same."
    )
    off = iteration.largest_deviation({False: rows.small["75"], True: rows.large["75"]})
    return f"{said} {off}"


def notes(records: Sequence[Record]) -> list[str]:
    last = _last_run(records)[-1]
    return [where_simulated(last, f"{last['machine']}, rings of 8, 16 and 32, {last['dtype']}")]


def markdown(records: Sequence[Record]) -> str:
    """Return the generated part of the report, as Markdown."""
    rows = rows_of(records)
    return block(notes(records), tables(rows)[1:], conclusions(rows))  # docs/reproduction.md has the claims


def draw(directory: Path, rows: Rows, title: str) -> list[Path]:
    """Write four PNG files into `directory`, created if needed. title: a description of the run.

    Two pictures show the speedups of sub-layers: of Mega-GPT-2 and T-NLG (figure 16), and of the large networks (section 6.4).
    The other two show memory traffic over time (figure 17), and the memory accesses of each sub-layer (figure 18).
    """
    return [
        sub.draw_speedups(directory, rows.small["75"], f"{title} (figure 16)", "figure-16-hardware.png"),
        sub.draw_speedups(directory, rows.large["75"], f"{title} (section 6.4)", "figure-20-large.png"),
        figures.draw_traffic(directory, rows.figures["17"]),
        sub.draw_memory(directory, rows.small["75"], f"{title} (figure 18)"),
    ]
