"""T3's claims, except the claims on speedups and traffic of sub-layers (`t3_sublayers`).

The claims are on communication's share of an iteration (figure 4), sliced GEMMs (5), compute units split between
operations (6), and accesses of a ring step (10). Further claims are on the reduce-scatter alone (figure 14), traffic
over time (17), iterations (19), and more compute units (20). Claims without a figure are on the tracker's size, and on
direct reduce-scatters (section 7.1).

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 2.4, 3.2, 4.2, 5.1,
6.3 to 7.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weft.bench.core.tables import Record, geomean
from weft.sim.memory_controller import TrackingGpu
from weft.studies import t3_figures as figures
from weft.studies import t3_iteration as iteration
from weft.studies.claims import Claim
from weft.studies.t3_sublayers import HardwareRow

_LAYER_SPEEDUPS = {"t3": "T3", "t3-mca": "T3-MCA"}


def claims(
    small: Sequence[HardwareRow], large: Sequence[HardwareRow], found: Mapping[str, Record], gpu: TrackingGpu
) -> Iterator[Claim]:
    """Yield the claims with the simulation's numbers.

    small, large: the sub-layers of Mega-GPT-2 and T-NLG, and of GPT-3, PALM and MT-NLG.
    found: the records of the other figures, by figure.
    """
    yield from _shares([*small, *large], found["4"])
    yield _same_stages(gpu)
    yield from _splits(found["6"])
    yield _steps(small)
    yield _ring(found["14"])
    yield _traffic(found["17"])
    yield _worst(small)
    yield _stagger(found["4.4"])
    yield from _iterations(small, large)
    yield _attention(small)
    yield from _more_units(found["20"])
    yield _tracker(gpu, found["assumptions"])
    lines = found["7.1"]["lines"]
    held = all(line[6] < line[5] and line[4] <= line[2] for line in lines)
    ring = f"{min(line[5] for line in lines):.2f} to {max(line[5] for line in lines):.2f}"
    said = f"accesses except GEMM reads: {lines[0][6]:.2f} per element of the output; {ring} with a ring"
    yield Claim("direct reduce-scatter: only the GEMM's stores access memory", "7.1", "yes", said, held=held)


def _shares(rows: Sequence[HardwareRow], future: Record) -> Iterator[Claim]:
    lines = iteration.phases_of(rows, future)
    for large, whose, paper in (
        (False, "Mega-GPT-2 and T-NLG", (34, 43)), (True, "the very large and futuristic networks", (46, 44)),
    ):  # fmt: skip
        for i, phase in enumerate(iteration.PHASES):
            shares = [pair[i].collectives / pair[i].total() for _, pair in lines if pair[i].large == large]
            what = f"communication's share of {phase}, maximum of {whose}"
            yield Claim(what, "2.4, figure 4", paper[i], 100 * max(shares), "%")
    twice = [iteration.share_with_faster_gemms(pair[1]) for _, pair in lines]
    what = "communication's share if GEMMs are twice as fast (ours: maximum of the sub-layers)"
    yield Claim(what, "2.4", 75, 100 * max(twice), "%")


def _same_stages(gpu: TrackingGpu) -> Claim:
    cells = figures.stages_table(gpu).cells
    alike = len({line[2:4] for line in cells}) == 1
    said = f"{cells[0][2]} work-groups in {cells[0][3]} stages, on {', '.join(line[0] for line in cells)} ranks"
    return Claim("slicing k keeps work-groups and stages", "2.5, figure 5", "yes", said, held=alike)


def _splits(record: Record) -> Iterator[Claim]:
    for split, (ring, gemm, speedup) in figures.splits(record).items():
        paper = figures.PAPER_SPLITS[split]
        name = "ideal" if split == figures.SPLITS[0] else f"{split[0]}-{split[1]} units"
        if paper[0]:
            derived = " (used to derive the rate of a unit)" if split == (72, 8) else ""
            yield Claim(f"{name}: all-reduce slower{derived}", "3.2.1, figure 6", 100 * paper[0], 100 * ring, "%")
        if paper[1]:
            yield Claim(f"{name}: GEMM slower", "3.2.1, figure 6", 100 * paper[1], 100 * gemm, "%")
        assert paper[2] is not None
        yield Claim(f"{name}: speedup of an overlap", "3.2.1, figure 6", paper[2], speedup, "x")


def _steps(rows: Sequence[HardwareRow]) -> Claim:
    """Return the claim on how many bytes a ring reduce-scatter reads and updates in memory (figure 10)."""
    held = True
    for row in rows:
        chunk = row.moved["sequential"]["GEMM writes"] / row.ranks
        wanted = {"sequential": (2 * row.ranks - 1, row.ranks), "t3-mca": (row.ranks - 2, row.ranks - 1)}
        for which, counts in wanted.items():
            counted = (row.moved[which][kind] / chunk for kind in ("RS reads", "RS writes"))
            held &= all(abs(a - b) < 1e-6 * b for a, b in zip(counted, counts, strict=True))
    return Claim(
        "accesses of each step of the ring", "4.1, figure 10", "counts", f"equal in {len(rows)} sub-layers", held=held
    )


def _ring(record: Record) -> Claim:
    over = [line[1] / figures.ring_bound_us(record, line[0]) for line in record["sizes"]]
    said = f"no hardware; {min(over):.3f} to {max(over):.3f} times the links' time"
    return Claim("reduce-scatter of 6 to 192 MB, error against 4 MI210", "5.1.1, figure 14", "6%", said, held=False)


def _traffic(record: Record) -> Claim:
    runs = record["runs"]
    slower = {name: runs[name]["gemm_us"] / runs["GEMM alone"]["gemm_us"] for name in ("T3", "T3-MCA")}
    said = f"GEMM {slower['T3']:.2f}x as long in T3, {slower['T3-MCA']:.2f}x in T3-MCA"
    held = slower["T3-MCA"] < slower["T3"]
    return Claim("the GEMM waits for the ring's bursts, less with MCA", "6.1.3, figure 17", "yes", said, held=held)


def _worst(rows: Sequence[HardwareRow]) -> Claim:
    """Return the claim that names the sub-layer in which T3-MCA is furthest from the ideal speedup."""
    lost = {row.name: row.speedup("ideal") / row.speedup("t3-mca") for row in rows}
    worst = max(lost, key=lambda name: lost[name])
    target = "T-NLG FC-1, 16 ranks"
    said = f"{worst} ({100 * (lost[worst] - 1):.0f}%); {target}: {100 * (lost[target] - 1):.0f}%"
    what = "the sub-layer in which T3-MCA is furthest from the ideal, because its output bypasses the L2"
    return Claim(what, "6.1.3", target, said, held=worst == target)


def _stagger(record: Record) -> Claim:
    slower = [together / staggered - 1 for _, staggered, together in record["lines"]]
    said = f"{100 * min(slower):.0f} to {100 * max(slower):.0f}% slower in one order"
    return Claim("staggered chunks are faster than one order of all ranks", "4.4", "yes", said, held=min(slower) > 0)


def _iterations(small: Sequence[HardwareRow], large: Sequence[HardwareRow]) -> Iterator[Claim]:
    for (phase, is_large), papers in iteration.PAPER.items():
        of = list(iteration.iterations(large if is_large else small, phase))  # type: ignore[arg-type]
        where, whose = ("6.4", "large networks") if is_large else ("6.3, figure 19", "Mega-GPT-2 and T-NLG")
        for variant, (mean, most) in papers.items():
            speedups = [one.speedup(variant) for one in of]
            for what, paper, ours in (
                ("geometric mean", mean, geomean(speedups) or 1.0),
                ("maximum", most, max(speedups)),
            ):
                if paper is not None:
                    name = f"{phase} of {whose}, {_LAYER_SPEEDUPS[variant]} faster, {what}"
                    yield Claim(name, where, paper, 100 * (ours - 1), "%", 3)


def _attention(rows: Sequence[HardwareRow]) -> Claim:
    shares = [
        100 * one.rest["attention"] / one.total() for phase in iteration.PHASES for one in iteration.iterations(rows, phase)
    ]  # fmt: skip
    said = f"{min(shares):.0f} to {max(shares):.0f}% by the roofline"
    held = min(shares) >= 40 and max(shares) <= 45
    return Claim("the attention takes 40 to 45% of an iteration", "6.3", "40 to 45%", said, held=held)


def _more_units(record: Record) -> Iterator[Claim]:
    more = figures.gain_with_more_units(record)
    of_ideal, of_mca, of_op = more["ideal"], more["FC-2"], more["OP"]
    said = f"{of_mca[0]} of {of_mca[1]} by T3-MCA, {of_ideal[0]} of {of_ideal[1]} in the ideal"
    held = of_mca[0] == of_mca[1]
    yield Claim("twice the units: FC-2 gains more", "7.5, figure 20", "yes", said, held=held)
    yield Claim(
        "twice the units: OP gains less",
        "7.5, figure 20",
        "yes",
        f"{of_op[1] - of_op[0]} of {of_op[1]}",
        held=not of_op[0],
    )


def _tracker(gpu: TrackingGpu, assumptions: Record) -> Claim:
    """Return the claim that the paper's tracker is large enough: with an unlimited tracker, T3 is at most 1% faster."""
    t3 = {name: mean for name, mean, *_ in assumptions["lines"]}
    lost = t3["a tracker without limits"] / t3["as it is"] - 1
    each = 19 * 1024 / (gpu.count("tracker.sets") * gpu.count("tracker.ways"))
    said = f"T3 {100 * lost:.1f}% slower than without limits; {each:.1f} bytes an entry (used to derive tracker.ways)"
    return Claim("a tracker of 256 entries is enough, in 19 KB", "4.2.1", "yes", said, held=lost <= 0.01)
