"""The report on PGAS embedding retrieval as measured by `weft bench pgas`: claims, tables and pictures from its records.

Source: "Accelerating Multi-GPU Embedding Retrieval with PGAS-Style Communication for Deep Learning Recommendation Systems",
III-A, IV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from weft.bench.core.tables import Record, ResultTable, milliseconds, table, times
from weft.studies.claims import Claim, claims_table
from weft.studies.measured import Rows, note_on_run, rows_of_study
from weft.studies.pages import block, figure

STUDY = "pgas_measured"
BASELINE, COMPUTATION = "embedding_bag-async", "computation"
_SENT = 0.99  # the share of the bytes that must have left
_SAVES = 1.01  # a smaller gain than 1% is not called a gain


class _Scaling(NamedTuple):
    name: str
    where: str
    speedup: float
    figures: tuple[str, str, str]


_SCALINGS = (
    _Scaling("weak", "IV-A", 2.10, ("figure 5", "figure 6", "figure 7")),
    _Scaling("strong", "IV-B", 2.95, ("figure 8", "figure 9", "figure 10")),
)


def rows_of(records: Sequence[Record]) -> Rows:
    """Return the records of the last run of each configuration; raise `ValueError` if there are none."""
    return rows_of_study(records, STUDY, "PGAS retrieval")


class Parts(NamedTuple):
    """The times of the baseline's parts in ms: computation, communication, and synchronisation with unpacking.

    They are measured by the paper's method (`weft.studies.pgas_measure`), in which the CPU waits for the device in each
    call.
    """

    computation: float
    communication: float
    sync_and_unpack: float
    whole: float
    direct: float
    batched_computation: float


def parts_of(by: Mapping[str, Record]) -> Parts | None:
    """Return the times of the baseline's parts in one configuration; None if they were not measured."""
    names = (COMPUTATION, "phase", "one float", BASELINE, "direct", "batched computation")
    if any("single_ms" not in by.get(name, {}) for name in names):
        return None
    pooled, phase, one, whole, direct, batched = (by[name]["single_ms"] for name in names)
    return Parts(pooled, phase - one, one, whole, direct, batched)


def sending_share(record: Record) -> float | None:
    """Return the fraction of the kernel's time after which 99% of its bytes are sent; None if bytes over time were not
    recorded.
    """
    if "us" not in record:
        return None
    total = record["sent_mb"][-1]
    end = next(us for us, mb in zip(record["us"], record["sent_mb"], strict=True) if mb >= _SENT * total)
    return float(end / record["us"][-1])


def peak_gbps(record: Record) -> float | None:
    """Return the highest rate in GB/s at which the kernel sends: its time is cut into fifty equal intervals, and the rate is
    averaged over each. Return None if bytes over time were not recorded.
    """
    if "us" not in record:
        return None
    step = record["us"][1] - record["us"][0]
    return float(max(b - a for a, b in pairwise(record["sent_mb"])) / step * 1e3)


def peak_claim(what: str, where: str, by: Mapping[str, Record]) -> Claim | None:
    """Return the claim that `direct` needs less bandwidth: its peak rate is below the mean rate of NCCL's all-to-all.
    None if a rate was not measured.
    """
    peak = peak_gbps(by.get("direct", {}))
    if peak is None or "exchange" not in by:
        return None
    nccl = by["direct"]["sent_mb"][-1] / by["exchange"]["p50_ms"]
    return Claim(what, where, "yes", f"{peak:.0f} GB/s at most, NCCL's all-to-all {nccl:.0f} GB/s", held=peak < nccl)


def claims(rows: Rows) -> list[Claim]:
    """Return the paper's claims with the measured numbers. Claims without measurements are left out."""
    return [*(claim for scaling in _SCALINGS for claim in _of_scaling(scaling, rows)), *_of_others(rows)]


def _of_scaling(scaling: _Scaling, rows: Rows) -> Iterator[Claim]:
    name, where, (of_factor, of_parts, of_volume) = scaling.name, scaling.where, scaling.figures
    one, two = rows.get((name, "1")), rows.get((name, "2"))
    if two is not None:
        ours = two[BASELINE]["p50_ms"] / two["direct"]["p50_ms"]
        yield Claim(
            f"measured: {name} scaling, 2 GPUs: speedup over EmbeddingBagCollection", where, scaling.speedup, ours, "x"
        )
    if one is not None and two is not None:
        base = two[BASELINE]["p50_ms"] / one[COMPUTATION]["p50_ms"]  # one GPU exchanges nothing
        direct = two["direct"]["p50_ms"] / one["direct"]["p50_ms"]
        if name == "weak":
            yield Claim(
                "measured: weak scaling factor of the baseline, 2 GPUs", f"{where}1, {of_factor}", 0.46, 1 / base
            )
            said = f"{direct:.2f} times the time of one GPU"
            what = "measured: weak scaling of PGAS is close to ideal"
            yield Claim(what, f"{where}1, {of_factor}", "yes", said, held=direct <= 1.1)
        else:
            what = "measured: strong scaling of the baseline, 2 GPUs: its time over one GPU's"
            yield Claim(what, f"{where}1, {of_factor}", 1.8, base, "x")
            what = "measured: strong scaling of PGAS, 2 GPUs: speedup over one GPU"
            yield Claim(what, f"{where}1, {of_factor}", 1.6, 1 / direct, "x")
    if two is not None and (parts := parts_of(two)) is not None:
        said = f"{parts.communication:.2f} of {parts.computation:.2f} ms"
        what = f"measured: communication takes less time than computation, {name}, 2 GPUs"
        yield Claim(what, f"{where}2, {of_parts}", "yes", said, held=0 < parts.communication < parts.computation)
        said = f"{parts.direct:.2f} ms; computation {parts.computation:.2f} ms with a kernel for each table, "
        said += f"{parts.batched_computation:.2f} ms with one kernel"
        what = f"measured: PGAS takes only slightly longer than its computation, {name}, 2 GPUs"
        held = parts.direct <= 1.1 * parts.batched_computation
        yield Claim(what, f"{where}2, {of_parts}", "yes", said, held=held)
    if two is not None and (share := sending_share(two["direct"])) is not None:
        said = f"over the first {share:.0%}"
        what = f"measured: bytes leave a GPU during the whole kernel, {name}, 2 GPUs"
        yield Claim(what, f"{where}2, {of_volume}", "yes", said, held=share > 0.95)
        what = f"measured: PGAS uses the links more evenly than the baseline, {name}, 2 GPUs"
        if (peak := peak_claim(what, f"{where}2, {of_volume}", two)) is not None:
            yield peak


def _of_others(rows: Rows) -> Iterator[Claim]:
    batches = {
        int(config): parts for (of, config), by in rows.items() if of == "batch" and (parts := parts_of(by)) is not None
    }
    if batches:
        batch = min(batches)
        parts = batches[batch]
        said = f"batch {batch}: {parts.sync_and_unpack:.3f} ms sync + unpack, {parts.computation:.3f} ms computation, "
        said += f"{parts.communication:.3f} ms communication"
        held = parts.sync_and_unpack > max(parts.computation, parts.communication)
        yield Claim("measured: synchronisation dominates small batches", "III-A", "yes", said, held=held)
    for (of, config), by in rows.items():
        if of == "dlrm":
            before, after = (by[name] for name in ("direct", "direct, MLP beside"))
            said = f"{after['p50_ms']:.3f} ms a batch instead of {before['p50_ms']:.3f} ms"
            what = f"measured: running the dense MLP concurrently with the lookup saves time, {config}"
            yield Claim(what, "II-C, figure 4", "yes", said, held=before["p50_ms"] > _SAVES * after["p50_ms"])
            base = by["baseline, MLP beside"]
            if "retrieval_ms" in base:
                what = f"measured: inference over 100 batches, {config} scaling, 2 GPUs: speedup of the lookup"
                paper = next(scaling.speedup for scaling in _SCALINGS if scaling.name == config)
                yield Claim(what, "IV", paper, base["retrieval_ms"] / after["retrieval_ms"], "x")
    widths = {int(config): by for (of, config), by in rows.items() if of == "width"}
    if len(widths) > 1:
        few, many = (_gbps(widths[dim]["direct"]) for dim in (min(widths), max(widths)))
        said = f"{few:.0f} GB/s with vectors of {4 * min(widths)} bytes, {many:.0f} GB/s with {4 * max(widths)} bytes"
        yield Claim(
            "measured: small messages reach a lower rate on the links", "IV-A2", "yes", said, held=few < 0.95 * many
        )


def _gbps(record: Record) -> float:
    return float(record["sent_bytes"] / record["p50_ms"] / 1e6)


# --- tables ---


def tables(rows: Rows) -> list[ResultTable]:
    made = [claims_table("The paper's numbers and ours", claims(rows))]
    made += [table_ for scaling in _SCALINGS if (table_ := _scaling_table(scaling, rows)) is not None]
    parts = [
        (f"{of}, {config}", found)
        for (of, config), by in rows.items()
        if of != "width" and (found := parts_of(by)) is not None
    ]
    if parts:
        made.append(_parts_table(parts))
    if widths := [(config, by) for (of, config), by in rows.items() if of == "width"]:
        made.append(_widths_table(widths))
    if inference := [(config, record) for (of, config), by in rows.items() if of == "dlrm" for record in by.values()]:
        made.append(_inference_table(inference))
    return made


def _scaling_table(scaling: _Scaling, rows: Rows) -> ResultTable | None:
    one, two = rows.get((scaling.name, "1"), {}), rows.get((scaling.name, "2"), {})
    names = [name for name in two if "error" in two[name] and two[name]["error"] is not None]
    if not names:
        return None

    def factor(name: str) -> str:
        return f"{one[name]['p50_ms'] / two[name]['p50_ms']:.2f}" if name in one else ""

    columns: dict[str, Callable[[str], str]] = {
        "variant": str, "1 GPU, ms": lambda v: milliseconds(one[v]["p50_ms"]) if v in one else "",
        "2 GPUs, ms": lambda v: milliseconds(two[v]["p50_ms"]), "scaling factor": factor,
        "speedup, 2 GPUs": lambda v: times(two[BASELINE]["p50_ms"] / two[v]["p50_ms"]),
        "1 GPU, synchronised, ms": lambda v: milliseconds(one[v]["single_ms"]) if v in one else "",
        "2 GPUs, synchronised, ms": lambda v: milliseconds(two[v]["single_ms"]),
    }  # fmt: skip
    title = f"{scaling.name.capitalize()} scaling ({scaling.figures[0]}); scaling factor: time on one GPU / time on two GPUs"
    return table(title, names, columns)


def _parts_table(parts: Sequence[tuple[str, Parts]]) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "configuration": lambda of: of[0], "computation ms": lambda of: milliseconds(of[1].computation),
        "communication ms": lambda of: milliseconds(of[1].communication),
        "sync + unpack ms": lambda of: milliseconds(of[1].sync_and_unpack), "baseline ms": lambda of: milliseconds(of[1].whole),
        "direct ms": lambda of: milliseconds(of[1].direct),
        "computation in one kernel ms": lambda of: milliseconds(of[1].batched_computation),
    }  # fmt: skip
    title = "The baseline's components by the paper's method, and direct, each call synchronised (figures 6, 9)"
    return table(title, parts, columns)


def _widths_table(widths: Sequence[tuple[str, Mapping[str, Record]]]) -> ResultTable:
    def ms(name: str) -> Callable[[Any], str]:
        return lambda of: milliseconds(of[1][name]["p50_ms"]) if name in of[1] else ""

    def rate(name: str) -> Callable[[Any], str]:
        return lambda of: f"{_gbps(of[1][name]):.0f}" if name in of[1] else ""

    columns: dict[str, Callable[[Any], str]] = {
        "D": lambda of: of[0],
        "bytes of a vector": lambda of: str(4 * int(of[0])),
    }
    columns |= {f"{name} ms": ms(name) for name in ("batched computation", "exchange", "batched", "direct", "put")}
    columns |= {f"{name} GB/s": rate(name) for name in ("exchange", "direct", "put")}
    return table(
        "Cost of small messages: the same number of bytes, as vectors of D columns; one row a bag", widths, columns
    )


def _inference_table(lines: Sequence[tuple[str, Record]]) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "scaling": lambda of: of[0], "pipeline": lambda of: of[1]["variant"], "batches": lambda of: str(of[1]["batches"]),
        "ms a batch": lambda of: milliseconds(of[1]["p50_ms"]), "speedup": lambda of: times(of[1]["speedup"]),
        "lookup, ms a batch": lambda of: milliseconds(of[1].get("retrieval_ms")),
    }  # fmt: skip
    return table(
        "Inference of a DLRM on two GPUs (figure 4); MLP beside: the dense MLP runs concurrently with the lookup; speedup over "
        "the baseline without this",
        lines,
        columns,
    )


def conclusions(rows: Rows) -> list[str]:
    made = claims(rows)
    met = sum(bool(claim.reproduced) for claim in made)
    said = [f"{met} of {len(made)} of the paper's claims are reproduced on these GPUs (the first table)."]
    for scaling in _SCALINGS:
        one, two = rows.get((scaling.name, "1"), {}), rows.get((scaling.name, "2"), {})
        if {BASELINE, "direct"} <= one.keys():
            alone = one[BASELINE]["p50_ms"] / one["direct"]["p50_ms"]
            said.append(
                f"In {scaling.name} scaling on one GPU, which sends nothing, `direct` is {alone:.2f} times as fast as the baseline."
            )
        if {BASELINE, "batched", "direct"} <= two.keys():
            ms = [two[name]["p50_ms"] for name in (BASELINE, "batched", "direct")]
            said.append(
                f"On two GPUs one pooling kernel for all tables and NCCL's all-to-all (`batched`) are {ms[0] / ms[1]:.2f} times as "
                f"fast as the baseline, and `direct` is {ms[1] / ms[2]:.2f} times as fast as `batched`."
            )
    widths = {int(config): by for (of, config), by in rows.items() if of == "width" and "batched computation" in by}
    if len(widths) > 1:
        few, many = (widths[dim]["batched computation"]["p50_ms"] for dim in (min(widths), max(widths)))
        said.append(
            f"With vectors of {4 * min(widths)} bytes, pooling alone takes {few / many:.1f} times as long as with vectors of "
            f"{4 * max(widths)} bytes, so messages are not the only reason for the lower rate of `direct`."
        )
    return said


def notes(records: Sequence[Record]) -> list[str]:
    return [note_on_run(records, STUDY, ranks=False)]


def markdown(records: Sequence[Record]) -> str:
    """Return the generated part of the report, as Markdown."""
    rows = rows_of(records)
    return block(notes(records), tables(rows), conclusions(rows))


def draw(directory: Path, rows: Rows, title: str) -> list[Path]:
    """Write pictures of the bytes sent over time (figures 7 and 10) into `directory`, created if needed."""
    shown = [
        (scaling, by) for scaling in _SCALINGS if "us" in (by := rows.get((scaling.name, "2"), {})).get("direct", {})
    ]
    if not shown:
        return []
    path = directory / "measured-7-volume.png"
    with figure(path, f"{title} (figures 7, 10)", (9, 3 * len(shown)), len(shown)) as axes:
        for axis, (scaling, by) in zip(axes, shown, strict=True):
            for name, colour in (("direct", "#2f7d5b"), ("put", "#e0a030")):
                if "us" in by.get(name, {}):
                    axis.plot([us / 1e3 for us in by[name]["us"]], by[name]["sent_mb"], color=colour, label=name)
            parts, total = parts_of(by), by["direct"]["sent_mb"][-1]
            if parts is not None:  # as in the paper: the bytes are spread over the communication
                ends = (0, parts.computation, parts.computation + parts.communication, parts.whole)
                axis.plot(ends, (0, 0, total, total), "--", color="#b8432f", label="baseline")
            axis.set_ylabel(f"{scaling.name}: MB sent", fontsize=9)
        axes[-1].set_xlabel("ms", fontsize=9)
    return [path]
