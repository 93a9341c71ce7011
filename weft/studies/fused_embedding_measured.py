"""The report on fused embedding + all-to-all as measured by `weft bench fused_embedding`: claims, tables and pictures from
its records.

Source: "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 3.4, 4.2, 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from weft.bench.core.tables import Record, ResultTable, milliseconds, table
from weft.studies.claims import Claim, claims_table
from weft.studies.measured import Rows, note_on_run, rows_of_study
from weft.studies.pages import bars, block, figure

STUDY = "fused_embedding_measured"
BASELINE = "embedding_bag"
GRIDS = {"grid": "70 rows a bag", "grid-short": "1 to 10 rows a bag"}
FUSED = {"put": "slices of 32", "per-table": "zero-copy, a kernel for each table", "direct": "zero-copy, one kernel"}
_COMPILED = "weft"
"""In a list of kernels, the name of the entry for weft's kernel as Triton compiled it. The entries after it are kernels
that the profiler saw.
"""
_ORDERS = (("natural", "-natural", 7.0), ("remote first", "", 1.0))


def rows_of(records: Sequence[Record]) -> Rows:
    """Return the records of the last run of each configuration; raise `ValueError` if there are none."""
    return rows_of_study(records, STUDY, "fused embedding")


def _configs(rows: Rows, figure_name: str) -> list[tuple[str, Mapping[str, Record]]]:
    return [(config, by) for (of, config), by in rows.items() if of == figure_name]


def saved(by: Mapping[str, Record], variant: str, baseline: str = BASELINE) -> float | None:
    """Return the percentage of the baseline's time that `variant` saves; None if a time is missing."""
    if variant not in by or baseline not in by:
        return None
    return 100 * (1 - by[variant]["p50_ms"] / by[baseline]["p50_ms"])


def skew(record: Record) -> float:
    """Return the excess of the slowest rank's time over the fastest rank's, in percent."""
    return 100 * (max(record["rank_ms"]) / min(record["rank_ms"]) - 1)


def claims(rows: Rows) -> list[Claim]:
    """Return the paper's claims with the measured numbers. Claims without measurements are left out."""
    return [*_of_grids(rows), *_of_occupancy(rows), *_of_slices(rows), *_of_timeline(rows), *_of_kernels(rows)]


def _of_grids(rows: Rows) -> Iterator[Claim]:
    for grid, bags in GRIDS.items():
        cases = [by for _, by in _configs(rows, grid)]
        for variant, where, mean, most in (("put", "4.2, figure 10", 31, 58), ("per-table", "4.3, figure 14", 25, 35)):
            gains = [gain for by in cases if (gain := saved(by, variant)) is not None]
            if gains:
                what = f"two GPUs of a host, {bags}, {FUSED[variant]}: time saved"
                yield Claim(f"{what}, mean", where, mean, fmean(gains), "%")
                yield Claim(f"{what}, maximum", where, most, max(gains), "%")
        if not cases:
            continue
        small = min(cases, key=lambda by: by[BASELINE]["batch"])
        hidden = 100 * min(small[name]["p50_ms"] for name in ("pooling", "exchange")) / small[BASELINE]["p50_ms"]
        ours = saved(small, "put") or 0.0
        said = f"{ours:.0f}% saved at batch {small[BASELINE]['batch']}; perfect overlap would save {hidden:.0f}%"
        what = f"measured, {bags}: at the smallest batch, fusion saves more than perfect overlap would"
        yield Claim(what, "4.2, figure 10", "yes", said, held=ours > hidden)
        rival = [
            1 - (saved(by, "put", "pipelined-4") or 0) / 100 for by in cases if {"put", "pipelined-4"} <= by.keys()
        ]
        of_rival = [100 * (1 - ratio) for ratio in (fmean(rival), max(rival), min(rival))]
        said = "{:.0f}% less time on average, from {:.0f} to {:.0f}%".format(*of_rival)
        what = f"measured, {bags}: one fused kernel (put) is faster than 4 pooling kernels overlapped with NCCL (pipelined-4)"
        yield Claim(what, "2.2, 5", "yes", said, held=fmean(rival) < 1)
    cases = [by for _, by in _configs(rows, "grid")]
    for transport in ("put", "direct"):
        for order, suffix, paper in _ORDERS:
            skews = [skew(by[transport + suffix]) for by in cases if transport + suffix in by]
            if skews:
                what = f"skew of two GPUs of a host, {transport}, {order} order, mean (the paper's is between nodes)"
                yield Claim(what, "4.2, figure 13", paper, fmean(skews), "%")


def _of_occupancy(rows: Rows) -> Iterator[Claim]:
    for _, by in _configs(rows, "occupancy"):
        for transport in ("put", "direct"):
            mine = [r for name, r in by.items() if name.startswith(f"{transport}-programs")]
            ms = {round(8 * r["of_usual"]): r["p50_ms"] for r in mine}
            where, what = "4.2, figure 11", f"measured, {transport}: time"
            if {2, 6} <= ms.keys():
                text = f"{what} saved with 75% of the programs that fit on an SM, instead of 25%"
                yield Claim(text, where, 46, 100 * (1 - ms[6] / ms[2]), "%")
            top = 7 if 7 in ms else 8
            if {6, top} <= ms.keys():
                text = f"{what} added with {12.5 * top:g}% of the programs that fit on an SM, instead of 75%"
                yield Claim(text, where, 25, 100 * (ms[top] / ms[6] - 1), "%")


def _of_slices(rows: Rows) -> Iterator[Claim]:
    for _, by in _configs(rows, "slices"):
        ms = {size: by[f"put-slice{size}"]["p50_ms"] for size in (4, 64, 128) if f"put-slice{size}" in by}
        if len(ms) == 3:
            where = "4.2, figure 12"
            yield Claim("measured: slices of 64 instead of 4: time saved", where, 55, 100 * (1 - ms[64] / ms[4]), "%")
            yield Claim(
                "measured: slices of 128 instead of 64: time saved", where, 0, 100 * (1 - ms[128] / ms[64]), "%"
            )


def _of_timeline(rows: Rows) -> Iterator[Claim]:
    for _, by in _configs(rows, "timeline"):
        put = by.get("put-slice16")
        if put is not None and put.get("puts_first") is not None:
            said = f"in {100 * put['puts_first']:.0f}% of the programs"
            what = "measured: programs put their slices before they pool local ones"
            yield Claim(what, "4.2, figure 9", "yes", said, held=put["puts_first"] > 0.95)
            least, median, most = put["wait_us"]
            said = f"{least:.1f} to {most:.1f} us, median {median:.1f} us, of {put['kernel_us']:.0f} us"
            yield Claim(
                "measured: programs wait for different times", "4.2, figure 9", "yes", said, held=most > 2 * least
            )
        direct, exchange = by.get("direct"), by.get("exchange")
        if direct is not None and exchange is not None and "peak_gbps" in direct:
            said = f"{direct['peak_gbps']:.0f} GB/s at most, NCCL's all-to-all {exchange['peak_gbps']:.0f} GB/s"
            what = "measured: the fused kernel needs less bandwidth at its peak"
            yield Claim(what, "3.2", "yes", said, held=direct["peak_gbps"] < exchange["peak_gbps"])


def _of_kernels(rows: Rows) -> Iterator[Claim]:
    for _, by in _configs(rows, "kernels"):
        theirs = [k for k in by.get(BASELINE, {}).get("kernels", ()) if "EmbeddingBag" in k["name"]]
        ours = [k for k in by.get("put", {}).get("kernels", ()) if k["name"] == _COMPILED]
        if theirs and ours:
            lower = 100 * (theirs[0]["occupancy"] - ours[0]["occupancy"])
            what = "measured: occupancy of the fused kernel below that of torch's EmbeddingBag, in points"
            yield Claim(what, "3.4, 4.2", 12.5, lower, "%")


# --- tables ---


def tables(rows: Rows) -> list[ResultTable]:
    made = [claims_table("The paper's numbers and ours", claims(rows))]
    for grid, bags in GRIDS.items():
        if cases := _configs(rows, grid):
            made += [
                _times_table(f"Global batch | tables of a GPU, {bags}, ms (figures 10, 14)", cases),
                _rates_table(bags, cases),
            ]
    if cases := _configs(rows, "grid"):
        made.append(_skew_table(cases))
    for _, by in _configs(rows, "occupancy"):
        made.append(_occupancy_table(by))
    for _, by in _configs(rows, "slices"):
        shown = [r for name, r in by.items() if name.startswith("put-slice")]
        columns: dict[str, Callable[[Record], str]] = {
            "vectors of a slice": lambda r: r["variant"].removeprefix("put-slice"), "ms": lambda r: milliseconds(r["p50_ms"]),
        }  # fmt: skip
        made.append(table("Size of slices, 1024|256 (figure 12)", shown, columns))
    made += [_timeline_table(by) for _, by in _configs(rows, "timeline")]
    made += [_kernels_table(by) for _, by in _configs(rows, "kernels")]
    return made


def _times_table(title: str, cases: Sequence[tuple[str, Mapping[str, Record]]]) -> ResultTable:
    names = list(dict.fromkeys(name for _, by in cases for name in by))
    columns: dict[str, Callable[[Any], str]] = {"configuration": lambda case: case[0]}

    def ms(name: str) -> Callable[[Any], str]:
        return lambda case: milliseconds(case[1][name]["p50_ms"]) if name in case[1] else ""

    def gain(name: str) -> Callable[[Any], str]:
        return lambda case: "" if (found := saved(case[1], name)) is None else f"{found:.0f}%"

    columns |= {name: ms(name) for name in names}
    columns |= {f"saved by {name}": gain(name) for name in (*FUSED, "batched", "pipelined-4") if name in names}
    return table(title, cases, columns)


def _rates_table(bags: str, cases: Sequence[tuple[str, Mapping[str, Record]]]) -> ResultTable:
    memory = min(ceiling["memory_gbps"] for ceiling in cases[0][1][BASELINE]["ceilings"])
    columns: dict[str, Callable[[Any], str]] = {
        "configuration": lambda case: case[0], "MB read from a table": lambda case: f"{_row_bytes(case[1][BASELINE]) / 1e6:.0f}",
    }  # fmt: skip

    def us(name: str) -> Callable[[Any], str]:
        return lambda case: f"{1e3 * case[1][name]['p50_ms'] / case[1][name]['tables']:.1f}" if name in case[1] else ""

    def rate(name: str) -> Callable[[Any], str]:
        return lambda case: f"{_gbps(case[1][name]):.0f}" if name in case[1] else ""

    names = [name for name in ("direct", "per-table") if all(name in by for _, by in cases)]
    columns |= {f"{name}, us a table": us(name) for name in names} | {f"{name}, GB/s": rate(name) for name in names}
    title = (
        f"Rows read from tables, {bags}: a row counts once for each id that refers to it. Copies in memory reach "
        f"{memory:.0f} GB/s"
    )
    return table(title, cases, columns)


def _row_bytes(record: Record) -> float:
    """Return the bytes that a rank reads from one table per call. A row that is read twice counts twice."""
    return float(record["batch"] * record["bag"] * record["dim"] * 4)


def _gbps(record: Record) -> float:
    return _row_bytes(record) * record["tables"] / record["p50_ms"] / 1e6


def _skew_table(cases: Sequence[tuple[str, Mapping[str, Record]]]) -> ResultTable:
    def ranks(name: str) -> Callable[[Any], str]:
        def said(case: Any) -> str:
            record = case[1].get(name)
            if record is None:
                return ""
            times = ", ".join(f"{ms:.3f}" for ms in record["rank_ms"])
            return f"{times} ({skew(record):.1f}%)"

        return said

    columns: dict[str, Callable[[Any], str]] = {"configuration": lambda case: case[0]}
    columns |= {name: ranks(name) for name in ("put-natural", "put", "direct-natural", "direct")}
    return table(
        "Times of rank 0 and rank 1 in ms, and by what percentage the slower rank takes longer, in both orders (figure 13)",
        cases,
        columns,
    )


def _occupancy_table(by: Mapping[str, Record]) -> ResultTable:
    shown = [r for r in by.values() if "programs" in r]
    base = min((r["p50_ms"] for r in shown), default=1.0)
    columns: dict[str, Callable[[Record], str]] = {
        "variant": lambda r: r["variant"], "programs of an SM": lambda r: str(r["programs"]),
        "share of the 16 programs that fit without a register limit": lambda r: f"{r['of_usual']:.0%}",
        "occupancy": lambda r: f"{r['occupancy']:.0%}",
        "registers of a thread": lambda r: str(r["registers"]), "spilled registers": lambda r: str(r["spilled"]),
        "fewest to most programs seen on an SM": lambda r: " to ".join(map(str, r.get("programs_of_multiprocessors", ()))),
        "ms": lambda r: milliseconds(r["p50_ms"]), "time relative to the fastest": lambda r: f"{r['p50_ms'] / base:.2f}",
    }  # fmt: skip
    return table("Occupancy, 1024|256 (figure 11)", shown, columns)


def _timeline_table(by: Mapping[str, Record]) -> ResultTable:
    shown = [r for r in by.values() if "peak_gbps" in r]
    columns: dict[str, Callable[[Record], str]] = {
        "variant": lambda r: r["variant"], "ms": lambda r: milliseconds(r["p50_ms"]),
        "GB/s at the peak": lambda r: f"{r['peak_gbps']:.0f}", "puts": lambda r: str(r.get("puts", "")),
        "last put, us": lambda r: f"{r['last_put_us']:.0f}" if "last_put_us" in r else "",
        "programs that put first": lambda r: f"{r['puts_first']:.0%}" if r.get("puts_first") is not None else "",
        "wait, us (least, median, most)": lambda r: ", ".join(f"{us:.1f}" for us in r.get("wait_us", ())),
        "wait, share of the kernel": lambda r: f"{r['wait_share']:.1%}" if "wait_share" in r else "",
    }  # fmt: skip
    return table("Puts, waits and bandwidth of rank 0, 1024|256 (figure 9)", shown, columns)


def _kernels_table(by: Mapping[str, Record]) -> ResultTable:
    shown = [
        (variant, kernel)
        for variant, record in by.items()
        for kernel in record.get("kernels", ())
        if kernel["name"] != _COMPILED or len(record["kernels"]) == 1
    ]
    columns: dict[str, Callable[[Any], str]] = {
        "variant": lambda of: of[0], "kernel": lambda of: _short(of[1]["name"]),
        "launches": lambda of: str(of[1].get("launches", "")), "registers": lambda of: str(of[1]["registers"]),
        "threads": lambda of: str(of[1]["threads"]), "theoretical occupancy": lambda of: f"{of[1]['occupancy']:.1%}",
    }  # fmt: skip
    return table("Kernels of a call on rank 0, 1024|64 (section 3.4)", shown, columns)


def _short(kernel: str) -> str:
    """Return a kernel's name without its return type, namespaces and arguments."""
    name = kernel.replace("(anonymous namespace)", "").partition("<")[0].partition("(")[0]
    return name.rpartition("::")[2].removeprefix("void ")


def conclusions(rows: Rows) -> list[str]:
    made = claims(rows)
    met = sum(bool(claim.reproduced) for claim in made)
    said = [f"{met} of {len(made)} of the paper's claims are reproduced on these GPUs (the first table)."]
    for grid, bags in GRIDS.items():
        cases = [by for _, by in _configs(rows, grid)]
        batched, direct = _ratios(cases, "batched", BASELINE), _ratios(cases, "direct", "batched")
        if batched and direct:
            said.append(
                f"With {bags}, one pooling kernel for all tables and NCCL's all-to-all (`batched`) are {_span(batched)} times as "
                f"fast as the baseline. `direct` is {_span(direct)} times as fast as `batched`."
            )
        if ratios := _ratios(cases, "per-table", "direct"):
            faster = [ratio for ratio in ratios if ratio > 1]
            much = f", by at most {100 * (1 - 1 / max(faster)):.0f}%" if faster else ""
            said.append(
                f"A launch for each table (`per-table`) takes less time than `direct` in {len(faster)} of {len(ratios)} "
                f"configurations{much}."
            )
        if ratios := _ratios(cases, "direct", "direct-natural"):
            least, most = 100 * (1 / max(ratios) - 1), 100 * (1 / min(ratios) - 1)
            said.append(
                f"With {bags}, the order remote first changes the time of `direct` by {least:+.1f}% to {most:+.1f}%, "
                "compared with the natural order."
            )
    for _, by in _configs(rows, "kernels"):
        alone, fused = _occupancy(by, "batched"), _occupancy(by, "put")
        if alone is not None and fused is not None:
            said.append(
                f"The theoretical occupancy of weft's kernel is {fused:.1%} with puts, and {alone:.1%} if it only pools "
                f"(`batched`). So communication lowers it by {100 * (alone - fused):.1f} points."
            )
    return said


def _occupancy(by: Mapping[str, Record], variant: str) -> float | None:
    """Return the theoretical occupancy of the weft kernel that a call of `variant` launched; None if none was recorded."""
    found = (k for k in by.get(variant, {}).get("kernels", ()) if "embedding_all_to_all" in k["name"])
    return next((kernel["occupancy"] for kernel in found), None)


def _ratios(cases: Sequence[Mapping[str, Record]], variant: str, over: str) -> list[float]:
    """Return the speedup of `variant` over the variant `over`, for each configuration that has both times."""
    return [by[over]["p50_ms"] / by[variant]["p50_ms"] for by in cases if {variant, over} <= by.keys()]


def _span(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def notes(records: Sequence[Record]) -> list[str]:
    return [note_on_run(records, STUDY, ranks=True)]


def markdown(records: Sequence[Record]) -> str:
    """Return the generated part of the report, as Markdown."""
    rows = rows_of(records)
    return block(notes(records), tables(rows), conclusions(rows))


# --- pictures ---


def draw(directory: Path, rows: Rows, title: str) -> list[Path]:
    """Write pictures of the figures that were measured into `directory`, created if needed."""
    drawn = []
    for grid, bags in GRIDS.items():
        if cases := _configs(rows, grid):
            drawn.append(directory / f"measured-10-{grid}.png")
            names = [name for name in ("batched", "pipelined-4", *FUSED) if all(name in by for _, by in cases)]
            heights = {name: [by[name]["p50_ms"] / by[BASELINE]["p50_ms"] for _, by in cases] for name in names}
            with figure(drawn[-1], f"{title}; {bags} (figures 10, 14)", (9, 3.6)) as axes:
                bars(axes[0], [config for config, _ in cases], heights, _COLOURS)
                axes[0].set_ylabel("time / baseline", fontsize=9)
                axes[0].set_xlabel("global batch | tables of a GPU", fontsize=9)
    for _, by in _configs(rows, "timeline"):
        if spans := by.get("put-slice16", {}).get("spans"):
            drawn.append(directory / "measured-9-timeline.png")
            with figure(drawn[-1], f"{title} (figure 9)", (9, 5)) as axes:
                _programs(axes[0], spans)
    lines = [
        ("11-occupancy", "occupancy", lambda name: name.partition("-programs")[0], "programs", "programs of an SM"),
        ("12-slices", "slices", lambda name: "put", None, "vectors of a slice"),
    ]
    for name, figure_name, group, field, label in lines:
        for _, by in _configs(rows, figure_name):
            shown = [(v, r) for v, r in by.items() if "-programs" in v or v.startswith("put-slice")]
            if shown:
                drawn.append(directory / f"measured-{name}.png")
                with figure(drawn[-1], f"{title} (figure {name[:2]})", (7, 3.4)) as axes:
                    for one in dict.fromkeys(group(v) for v, _ in shown):
                        mine = [
                            (r[field] if field else int(v.removeprefix("put-slice")), r["p50_ms"])
                            for v, r in shown
                            if group(v) == one
                        ]
                        axes[0].plot(*zip(*sorted(mine), strict=True), marker="o", label=one)
                    axes[0].set_xlabel(label, fontsize=9)
                    axes[0].set_ylabel("ms", fontsize=9)
                    axes[0].set_ylim(0, 1.1 * max(r["p50_ms"] for _, r in shown))
                    if field is None:
                        axes[0].set_xscale("log", base=2)
    return drawn


def _programs(axis: Any, spans: Sequence[Any]) -> None:
    """Draw a timeline with a row for each program: when it pools, sends ("put") and waits for peers. Most waits are
    shorter than a pixel, so a triangle marks the beginning of each.

    spans: the times of units and waits of each program, from `spans_of`.
    """
    named: set[str] = set()

    def label(name: str) -> str | None:
        known = name in named
        named.add(name)
        return None if known else name

    for program, (units, wait) in enumerate(spans):
        for start, end, put in units:
            name, colour = ("pool for a peer", "#7da7d9") if put else ("pool for this rank", "#24476b")
            axis.barh(
                program, end - start, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.5,
                label=label(name),
            )  # fmt: skip
            if put:
                axis.plot(
                    [put],
                    [program],
                    marker="|",
                    markeredgewidth=1.6,
                    color="#d9381e",
                    linestyle="none",
                    label=label("put"),
                )
        if wait:
            axis.barh(program, wait[1] - wait[0], left=wait[0], height=0.8, color="#c8c8c8")
            axis.plot(
                [wait[0]], [program], marker=5, markersize=5, color="#e0a030", linestyle="none", label=label("wait")
            )
    axis.set_xlim(left=0)
    axis.set_xlabel("us", fontsize=9)
    axis.set_ylabel("program", fontsize=9)
    axis.set_yticks(np.arange(0, len(spans), 4))
    axis.invert_yaxis()


_COLOURS = ("#c8c8c8", "#e0a030", "#7da7d9", "#24476b", "#2f7d5b")
