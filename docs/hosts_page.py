"""Write the tables at `<!-- hosts:NAME -->` marks of docs/hosts.md and draw docs/hosts.png: `python docs/hosts_page.py`.

Sources in benchmarks/results:

    operators    cpu-hosts-operators-1.json, -2.json: two runs, each recorded by several calls of `python benchmarks/hosts.py
                 --json FILE --append` (benchmarks/README.md lists their options)
    curves       cpu-hosts.json         recorded by `python benchmarks/hosts.py --only curves --json FILE`
    predictions  cpu-hosts-links.json   recorded by `python benchmarks/hosts.py --only links --json FILE`
    GPUs         h100-hosts.json        recorded by `python benchmarks/gpu_hosts.py --json FILE`
    simulation   sim-hosts.json         recorded by `python docs/hosts_page.py --simulate`

A test fails if the page differs from these files. The script is not installed with weft.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.bench.core.tables import markdown_table
from weft.builders import Problem, named
from weft.plan.explain import explanation, problem_on_machine
from weft.plan.predict import predict
from weft.runtime.schedule_memory import needs_far
from weft.trace.pyplot import pyplot

HERE = Path(__file__).parent
PAGE, PICTURE = HERE / "hosts.md", HERE / "hosts.png"
_RESULTS = HERE.parent / "benchmarks" / "results"
CURVES, SIMULATED, LINKS, ON_GPUS, *OPERATORS = (
    _RESULTS / f"{name}.json"
    for name in (
        "cpu-hosts",
        "sim-hosts",
        "cpu-hosts-links",
        "h100-hosts",
        "cpu-hosts-operators-1",
        "cpu-hosts-operators-2",
    )
)
_MARK = re.compile(r"(?P<open><!-- hosts:(?P<name>\w+) -->\n)(?P<body>.*?)(?P<close><!-- /hosts -->)", re.DOTALL)
_WAYS = ("one pass", "far first", "far last")
HOSTS, GPUS = (2, 4, 8, 16), 8
SHAPES: dict[str, Callable[[int], dict[str, int]]] = {
    "all_gather_matmul": lambda ranks: {"M": 1024 * ranks, "N": 8192, "K": 4096},
    "matmul_reduce_scatter": lambda ranks: {"M": 1024 * ranks, "N": 4096, "K": 8192},
    "matmul_all_reduce": lambda ranks: {"M": 16384, "N": 4096, "K": 8192},
    "matmul_all_gather": lambda ranks: {"M": 1024, "N": 4096, "K": 8192},
    "embedding_all_to_all": lambda ranks: {"M": 1024 * ranks, "N": 128, "K": 32, "tables": 8 * ranks},
    "all_to_all_matmul": lambda ranks: {"M": 8192, "N": 4096, "K": 7168, "experts": 2 * ranks, "bounded": True},
    "matmul_all_to_all": lambda ranks: {"M": 8192, "N": 7168, "K": 2048, "experts": 2 * ranks, "bounded": True},
}
"""{operator: function from the number of ranks to sizes for `weft plan`}."""
EXPERTS = ("all_to_all_matmul", "matmul_all_to_all")


# --- measured operators ---


def _compared(part: str, variants: Sequence[str]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield, for each operator and size, a record of the first variant in the first run, and a cell for each variant. A cell has
    the variant's time in the first run, and its speed relative to the first variant in both runs. The cell of a variant that was
    not measured is empty.
    """
    runs = [
        {(*_point(one), one["variant"]): one for one in json.loads(file.read_text()) if one.get("part") == part}
        for file in OPERATORS
    ]
    for key, record in runs[0].items():
        if record["variant"] != variants[0]:
            continue
        cells = [f"{record['ms']:.3g}"]
        for variant in variants[1:]:
            found = [run[*key[:-1], variant] for run in runs if (*key[:-1], variant) in run]
            if not found:
                cells.append("")
                continue
            speeds = ", ".join(f"{one['speed']:.2f}x" for one in found)
            cells.append(f"{found[0]['ms']:.3g} ({speeds})")
        yield record, [*cells, _verdict([run[*key[:-1], "weft"] for run in runs])]


def _point(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("op", "ranks", *_SIZES))


_SIZES = ("rows", "tokens", "samples", "columns", "bag")


def _verdict(runs: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{one['not_slower']} of {one['calls']}" for one in runs)


_VERDICT = "turns with weft at least 0.98x"


def gemms() -> str:
    rows = []
    sent = {
        (_point(one), one["variant"]): one["sent_MB"]
        for one in json.loads(OPERATORS[0].read_text())
        if one.get("part") == "gemm"
    }
    for record, cells in _compared("gemm", ("gloo by hand", "weft")):
        both = (f"{sent[_point(record), name]:.1f}" for name in ("gloo by hand", "weft"))
        rows.append((str(record["ranks"] // 2), str(record["rows"]), f"`{record['op']}`", *cells, *both))
    header = (
        "ranks on each host", "M", "operator", "gloo alone, ms", "weft's choice, ms", _VERDICT, "MB sent by gloo", "by weft",
    )  # fmt: skip
    return markdown_table(header, rows) + "\n"


def experts() -> str:
    rows = [
        (str(one["ranks"] // 2), str(one["tokens"]), str(one["columns"]), f"`{one['op']}`", *cells)
        for one, cells in _compared("experts", ("gloo by hand", "one by one", "far first", "weft"))
    ]
    header = (
        "ranks on each host", "tokens", "columns of the result", "operator", "gloo alone, ms", "one by one, ms",
        "far first, ms", "weft's choice, ms", _VERDICT,
    )  # fmt: skip
    return markdown_table(header, rows) + "\n"


def gpus() -> str:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in json.loads(ON_GPUS.read_text()):
        found.setdefault((record["op"], record["rows"], record["other"]), []).append(record)
    rows = []
    for (op, m, other), (serial, *chunked, weft) in found.items():
        cells = (f"{one['ms']:.3g} ({one['speed']:.2f}x)" for one in chunked)
        choice = f"{weft['chunks']} chunks" if weft["chunks"] else "serial"
        verdict = f"{weft['not_slower']} of {weft['calls']}"
        speed = f"{weft['ms']:.3g} ({weft['speed']:.2f}x)"
        rows.append((f"`{op}`", str(m), str(other), f"{serial['ms']:.3g}", *cells, choice, speed, verdict))
    header = (
        "operator", "M", "N or K", "serial, ms", "1 chunk, ms", "2 chunks, ms", "4 chunks, ms", "weft's choice", "its ms",
        _VERDICT,
    )  # fmt: skip
    return markdown_table(header, rows) + "\n"


def embeddings() -> str:
    rows = [
        (str(one["ranks"] // 2), str(one["samples"]), str(one["bag"]), *cells)
        for one, cells in _compared("embedding", ("one pass", "far first", "weft"))
    ]
    header = (
        "ranks on each host", "samples", "rows in a bag", "one pass, ms", "far first, ms", "weft's choice, ms", _VERDICT,
    )  # fmt: skip
    return markdown_table(header, rows) + "\n"


# --- measured curves ---


def points(curve: str) -> Iterator[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """Yield, for each point of a curve, (one of its records, {variant: record})."""
    records = [record for record in json.loads(CURVES.read_text()) if record["curve"] == curve]
    for start in range(0, len(records), len(_WAYS)):
        by_way = {record["way"]: record for record in records[start : start + len(_WAYS)]}
        yield records[start], by_way


def link() -> str:
    (of_link,) = (record for record in json.loads(CURVES.read_text()) if record["curve"] == "link")
    first, _ = next(points("ratio"))
    return (
        f"{of_link['cores']} cores, {first['ranks'] // first['hosts']} ranks on each of {first['hosts']} hosts, {first['batch']} "
        f"samples, four tables of dimension 64 on each rank, fp32. Measured: {of_link['rate_MBps']:.0f} MB/s, round trip "
        f"{of_link['round_trip_us']:.0f} us. The median of {first['calls']} calls that take turns.\n"
    )


def ratios() -> str:
    rows = []
    for first, by_way in points("ratio"):
        base = by_way["one pass"]
        rows.append(
            (
                f"{first['ratio']:.2f}", str(first["bag"]), f"{first['pool_ms']:.0f}", f"{first['link_ms']:.0f}",
                *(_time(by_way[way], base) for way in _WAYS),
                *(f"{by_way[way]['skew_ms']:.0f}" for way in _WAYS[:2]),
            )
        )  # fmt: skip
    header = (
        "link / pooling", "rows in a bag", "pooling ms", "link ms", *(f"{way} ms" for way in _WAYS), "skew ms, one pass",
        "skew ms, far first",
    )  # fmt: skip
    return link() + "\n" + markdown_table(header, rows) + "\n"


def slices() -> str:
    rows = []
    for first, by_way in points("slice"):
        rows.append(
            (str(first["slice"]), str(first["pieces"]), *(_time(by_way[way], by_way["one pass"]) for way in _WAYS))
        )
    return markdown_table(("samples in a slice", "slices for a rank", *(f"{way} ms" for way in _WAYS)), rows) + "\n"


def _time(record: dict[str, Any], base: dict[str, Any]) -> str:
    gain = "" if record is base else f" ({base['ms'] / record['ms']:.2f}x)"
    return f"{record['ms']:.0f}{gain}"


def draw() -> None:
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for axis, curve, x, label in (
        (axes[0], "ratio", "ratio", "link time / pooling time"),
        (axes[1], "slice", "slice", "samples in a slice"),
    ):
        found = list(points(curve))
        for way in _WAYS[1:]:
            gains = [by_way["one pass"]["ms"] / by_way[way]["ms"] for _, by_way in found]
            axis.plot([first[x] for first, _ in found], gains, "o-", label=way)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(xscale="log", xlabel=label, ylabel="speed relative to one pass")
        axis.set_xticks(
            [first[x] for first, _ in found],
            [f"{first[x]:.2g}" if x == "ratio" else str(first[x]) for first, _ in found],
        )
        axis.minorticks_off()
        axis.legend()
    found = list(points("ratio"))
    for way in _WAYS:
        axes[2].plot([f["ratio"] for f, _ in found], [by_way[way]["skew_ms"] for _, by_way in found], "o-", label=way)
    axes[2].set(xscale="log", xlabel="link time / pooling time", ylabel="first to last rank to end, ms", ylim=(0, None))
    axes[2].set_xticks([f["ratio"] for f, _ in found], [f"{f['ratio']:.2g}" for f, _ in found])
    axes[2].minorticks_off()
    axes[2].legend()
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None, "Description": description()})


def description() -> str:
    """Return the numbers of the picture as text."""
    return ratios() + slices()


# --- simulated ---


def simulate(op: str, hosts: int) -> dict[str, Any]:
    """Return the predicted times of an operator on hosts with H100s: serial, and the fastest schedule without access to other
    hosts' memory."""
    ranks = hosts * GPUS
    shape = SHAPES[op](ranks)
    given: dict[str, Any] = {**shape, "dtype": "bf16", "mode": "graph"}
    given |= {"ranks": ranks, "hw": "h100", "topology": f"hosts:{hosts}x{GPUS}"}
    if op in EXPERTS:  # no other schedule is usable, and predictions of all take minutes
        _, model, _, problem = problem_on_machine(op, **given)
        times, best = {"serial": predict(named(problem, "serial").build(), model, "graph")}, "serial"
    else:
        choice = explanation(op, **given).choice
        times = {row.candidate.name: row.us for row in choice.rows if row.us is not None}
        of_hosts = [str(rank // GPUS) for rank in range(ranks)]
        best = next(name for name in sorted(times, key=times.__getitem__) if _is_usable(choice.problem, name, of_hosts))
    return {
        "op": op, "hosts": hosts, "gpus": GPUS, "shape": shape, "serial_us": round(times["serial"], 1), "best": best,
        "best_us": round(times[best], 1),
    }  # fmt: skip


def _is_usable(problem: Problem, name: str, of_hosts: list[str]) -> bool:
    return name == "serial" or not needs_far(named(problem, name).build(), 0, of_hosts, on_gpus=True)


def simulated() -> str:
    rows = []
    for record in json.loads(SIMULATED.read_text()):
        shape, gain = (
            ", ".join(f"{name} {size}" for name, size in record["shape"].items() if name != "bounded"),
            record["serial_us"] / record["best_us"],
        )
        best = (
            "serial"
            if record["best"] == "serial"
            else f"{record['best_us'] / 1e3:.2f} ({gain:.2f}x) `{record['best']}`"
        )
        rows.append((f"`{record['op']}`", str(record["hosts"]), shape, f"{record['serial_us'] / 1e3:.2f}", best))
    return markdown_table(("operator", "hosts", "sizes", "serial ms", "best ms"), rows) + "\n"


def predictions() -> str:
    records = [record for record in json.loads(LINKS.read_text()) if record["curve"] == "prediction"]
    found = [record for record in records if record["collective"].endswith("by gloo")]
    rows = [
        (
            record["collective"], f"{record['link_ms']:.0f}", f"{record['predicted_ms']:.0f}",
            *(f"{record[key]:.0f} ({record['predicted_ms'] / record[key] - 1:+.0%})" for key in ("best_ms", "ms")),
        )
        for record in found
    ]  # fmt: skip
    one = found[0]
    measured = (
        f"{one['nbytes'] / 1e6:.1f} MB, {one['ranks'] // 2} ranks on each of 2 hosts, {one['calls']} calls of each collective. "
        f"Measured: one stream {one['bytes_per_us']:.0f} MB/s, all-to-all {one['exchange_bytes_per_us']:.0f} MB/s, round trip "
        f"{one['round_trip_us'] / 1e3:.1f} ms, copies {one['copy_bytes_per_us'] / 1e3:.1f} GB/s for each rank, to new memory "
        f"{one['fresh_bytes_per_us'] / 1e3:.2f} GB/s.\n\n"
    )
    header = ("collective", "link alone, ms", "predicted, ms", "fastest call, ms", "median, ms")
    return measured + markdown_table(header, rows) + "\n"


TABLES = {
    "gemms": gemms, "experts": experts, "embeddings": embeddings, "predictions": predictions, "ratios": ratios, "slices": slices,
    "simulated": simulated, "gpus": gpus,
}  # fmt: skip


def page() -> str:
    """Return docs/hosts.md with its tables."""
    return _MARK.sub(lambda m: m["open"] + TABLES[m["name"]]() + m["close"], PAGE.read_text())


if __name__ == "__main__":
    if "--simulate" in sys.argv:
        records = [json.dumps(simulate(op, hosts)) for op in SHAPES for hosts in HOSTS]
        SIMULATED.write_text("[\n" + ",\n".join(records) + "\n]\n")
    PAGE.write_text(page())
    draw()
