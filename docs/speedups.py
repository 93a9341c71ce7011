"""Draw docs/speedups.png, the README's picture of GPU results: `python docs/speedups.py`.

It has a row for each `<!-- gain:... -->` mark of the README whose record has the first row's machine. So the picture, the table and
the text show the same variants and records. A dot is one shape; the bar is the geometric mean in the README. The PNG's description
has the numbers, so a test can detect an outdated picture. The script is not installed with weft.
"""

from __future__ import annotations

from pathlib import Path

from weft.bench.core import records
from weft.bench.core.tables import geomean, times
from weft.bench.report import Mark, marks, speedups
from weft.trace.pyplot import pyplot
from weft.words import counted

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "speedups.png"
_OVER = {
    "fbgemm": "FBGEMM + NCCL", "batched": "one pooling kernel + NCCL", "embedding_all_to_all": "nn.EmbeddingBag + NCCL",
    "all_to_all_matmul": "NCCL + grouped GEMMs", "matmul_all_to_all": "grouped GEMMs + NCCL",
}  # fmt: skip
_OF_GEMMS = "NCCL + cuBLAS"
_NOT_SLOWER = 0.98  # as in the tables of results
_TICKS = (0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 2.5)


def rows() -> dict[Mark, tuple[str, dict[str, float], str]]:
    """Return {mark: (label, {shape: speedup}, machine)}."""
    found: dict[Mark, tuple[str, dict[str, float], str]] = {}
    for mark in marks((ROOT / "README.md").read_text()):
        of_file = records.read([ROOT / "benchmarks" / "results" / f"{mark.name}.jsonl"])
        if found and of_file[-1]["machine"] != next(iter(found.values()))[2]:
            continue
        gains = speedups(of_file, mark.mode, mark.dtype, mark.variant, mark.baseline)
        op = of_file[-1]["op"]
        over = _OVER.get(mark.baseline, _OVER.get(op, _OF_GEMMS))
        label = f"{op}\nover {over}; {mark.dtype}, {counted(len(gains), 'shape')}"
        found[mark] = label, gains, of_file[-1]["machine"]
    return found


def description() -> str:
    """Return the numbers of the picture as text."""
    return "\n".join(
        f"{' '.join(mark)}: {' '.join(f'{gain:.3f}' for gain in gains.values())}"
        for mark, (_, gains, _) in rows().items()
    )


def draw() -> None:
    plt, shown = pyplot(), rows()
    (machine,) = {machine for *_, machine in shown.values()}  # all rows share one machine, which the title names
    (mode,) = {mark.mode for mark in shown}
    figure, axis = plt.subplots(figsize=(9, 0.62 * len(shown) + 1.1), layout="constrained")
    for y, (_, gains, _) in enumerate(shown.values()):
        mean, ordered = geomean(list(gains.values())), sorted(gains.values())
        for i, gain in enumerate(ordered):
            colour = "#4063a3" if gain >= _NOT_SLOWER else "#b8432f"
            axis.plot(gain, y + 0.12 * (i % 3 - 1), "o", color=colour, markersize=4, alpha=0.6, markeredgewidth=0)
        axis.plot([mean, mean], [y - 0.32, y + 0.32], color="black", linewidth=2)
        axis.annotate(
            times(mean), (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=9, fontweight="bold"
        )
    axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    axis.set_xlim(_TICKS[0], 1.02 * max(_TICKS[-1], *(max(gains.values()) for _, gains, _ in shown.values())))
    axis.set_xticks(_TICKS, [f"{tick:g}x" for tick in _TICKS], fontsize=8)
    axis.minorticks_off()
    axis.set_yticks(range(len(shown)), [label for label, *_ in shown.values()], fontsize=8)
    axis.set_ylim(len(shown) - 0.5, -0.5)
    axis.set_xlabel(
        "speed of weft over the baseline of the same run (logarithmic axis); red: more than 2% slower", fontsize=9
    )
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    title = f"{machine}, {mode} calls. A dot is one shape, the bar is the geometric mean."
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    figure.savefig(PICTURE, dpi=130, metadata={"Description": description()})
    plt.close(figure)


if __name__ == "__main__":
    draw()
