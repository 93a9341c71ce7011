"""A run of `weft bench never-slower`: measure the shapes that the results file lacks. Then measure each shape on which
weft was slower a second time.

Rank 0 decides what to measure, and broadcasts its decision. If all ranks fail on a shape with the same type of error,
the error is recorded as a row, and the run continues. If only some ranks fail, or the process group is unusable
afterwards, the run ends. To continue after this shape, run the command with the same `--json` again.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from weft import env, plan
from weft.bench.core import records
from weft.bench.core.arguments import appended
from weft.bench.core.console import has_bar, progress
from weft.bench.core.run import make_ranks, on_ranks, release
from weft.bench.core.tables import Record
from weft.bench.never_slower import page
from weft.bench.never_slower.draw import bounds_here, draw, draw_changing
from weft.bench.never_slower.judge import Verdict, key, mine
from weft.bench.never_slower.measure import ShapeToMeasure, common, measured
from weft.bench.never_slower.options import Options
from weft.errors import WeftError
from weft.words import by_rank, counted

T = TypeVar("T")

_SAME = ("seed", "commit", "source", "machine", "device", "ranks", "versions", "variables", "harness")
"""Fields of a row. A run reuses a row of the results file only if all these fields equal the fields of the run."""
_CHANGING = -1


def never_slower(options: Options) -> list[Record]:
    """Run the benchmark on new processes, or, under torchrun, as one of its ranks. Print the summary, and append the
    rows to `options.json`.

    Return all rows. Raises WeftError if the process group became unusable.
    """
    return on_ranks(run_rank, options.ranks, options.device, options)


def run_rank(rank: int, world_size: int, options: Options) -> list[Record]:
    """Run one rank's part in the default process group. Return the rows on rank 0, an empty list elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", plan.NoOverlapWarning)  # each row records the selected schedule
        return _Run(options).all()


def items_of(options: Options, world_size: int) -> list[ShapeToMeasure]:
    """Return the shapes to measure in this part of the run, in this order: the first shape of each operator, then the second of
    each, and so on. Raise `ValueError` if `options.only` names a shape that is not drawn.
    """
    bounds = bounds_here(options.device, world_size)
    drawn = [
        ShapeToMeasure(op, index, draw(op, index, options.seed, bounds))
        for index in range(options.shapes if set(options.modes) != {"changing"} else 0)
        for op in options.ops
    ]
    if options.only:
        if missing := set(options.only) - {item.config for item in drawn}:
            first = f"the first {counted(options.shapes, 'shape')} of seed {options.seed}"
            raise ValueError(
                f"--only {','.join(sorted(missing))} is not among {first} of any operator in --ops: pass the --seed and --shapes "
                "of the run that printed the name"
            )
        drawn = [item for item in drawn if item.config in options.only]
    elif "changing" in options.modes:
        for op in options.ops:
            drawn.append(ShapeToMeasure(op, _CHANGING, *draw_changing(op, options.seed, bounds, options.sizes)))
    number, parts = options.part
    return drawn[number - 1 :: parts]


class _Run:
    """One rank's part of a run of `weft bench never-slower`."""

    def __init__(self, options: Options) -> None:
        self.options, self.run = options, uuid.uuid4().hex[:12]
        self.patience = timedelta(seconds=2 * env.deadline_s())
        self.ranks = make_ranks(options.device, self.patience)
        # A rank that fails alone waits in this group for its peers, which may wait elsewhere until their deadline.
        self.meeting = dist.new_group(backend="gloo", timeout=2 * self.patience)
        self.rows: list[Record] = []
        self.written = 0

    @property
    def leads(self) -> bool:
        return self.ranks.rank == 0

    def told(self, value: T) -> T:
        """Return rank 0's `value` on all ranks, by a broadcast. All ranks must make this call."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.meeting)
        found: T = box[0]
        return found

    def all(self) -> list[Record]:
        items, wrong = self.told(self.drawn() if self.leads else ([], ""))
        if wrong:
            raise ValueError(wrong)
        if self.leads:
            self.rows = self.found(items)
        todo = self.told(self.missing(items))
        self.measure(todo, again=False)
        by_key = {(item.op, item.index): item for item in items}
        suspects: dict[tuple[str, int], list[str]] = {}
        for row in Verdict(self.rows).suspects:
            suspects.setdefault((row["op"], row["index"]), []).append(row["mode"])
        self.measure(self.told([(by_key[of], tuple(modes)) for of, modes in suspects.items()]), again=True)
        if self.leads:
            if self.options.json is not None:
                print(appended(self.options.json, self.written), flush=True)
            page.show(self.rows)
        return self.rows

    def drawn(self) -> tuple[list[ShapeToMeasure], str]:
        """Return the shapes to measure, and an error text or ""."""
        try:
            return items_of(self.options, self.ranks.world_size), ""
        except ValueError as error:
            return [], str(error)

    def found(self, items: Sequence[ShapeToMeasure]) -> list[Record]:
        """Return the records of these shapes that the results file already has. Print their number."""
        path = self.options.json
        if path is None or not path.is_file():
            return []
        wanted = {
            key(row): row for item in items for mode in self.modes(item) for row in [self.common(item, mode, False)]
        }
        rows = []
        for row in mine(records.read([path])):
            same = wanted.get(key(row))
            if same is not None and all(row.get(field) == same[field] for field in _SAME):
                rows.append(row)
        print(
            f"{len(rows)} rows of this seed, code and machine are in {path} already; they are not measured again",
            flush=True,
        )
        return rows

    def common(self, item: ShapeToMeasure, mode: str, again: bool) -> Record:
        return common(item, mode, again, self.ranks, self.options) | {"run": self.run}

    def modes(self, item: ShapeToMeasure) -> tuple[str, ...]:
        if item.sizes:
            return ("changing",)
        return tuple(mode for mode in self.options.modes if mode != "changing")

    def missing(self, items: Sequence[ShapeToMeasure]) -> list[tuple[ShapeToMeasure, tuple[str, ...]]]:
        """Return the shapes that are not fully measured, as (shape, timing modes without a record)."""
        done: set[Hashable] = {key(row) for row in self.rows if not row["again"]}
        found = []
        for item in items:
            modes = tuple(mode for mode in self.modes(item) if key(self.common(item, mode, False)) not in done)
            if modes:
                found.append((item, modes))
        return found

    def measure(self, todo: Sequence[tuple[ShapeToMeasure, tuple[str, ...]]], again: bool) -> None:
        """Measure the shapes in `todo`, each in the modes listed with it, and append the records to the results file. All ranks
        must make this call.
        """
        with progress(len(todo), shown=self.leads and bool(todo), prefix="again, " * again) as step:
            for number, (item, modes) in enumerate(todo, 1):
                what = f"{number}/{len(todo)} {item.op} {item.config}"
                if has_bar():
                    step(what, 0)
                rows, dead = self.attempt(item, modes, again)
                if self.leads:
                    self.keep(rows)
                step(f"{what}: {page.in_short(rows)}", 1)
                if dead:
                    raise WeftError(
                        f"{item.op} {item.config}: {dead}. The group is unusable: run the same command with --json "
                        "FILE again; it continues after this shape"
                    )

    def keep(self, rows: Sequence[Record]) -> None:
        self.rows += rows
        self.written += len(rows)
        if self.options.json is not None:
            records.append(self.options.json, rows)

    def attempt(self, item: ShapeToMeasure, modes: tuple[str, ...], again: bool) -> tuple[list[Record], str]:
        """Measure a shape. Return (its records, the reason why the process group is unusable or ""). All ranks must make this
        call.
        """
        rows, error = self.rows_of(item, modes, again)
        errors = self.said(error)
        if not any(errors):
            release(self.ranks)
            return rows, ""
        alike = len({text.partition(":")[0] for text in errors}) == 1
        text = errors[0] if alike else by_rank((rank, text) for rank, text in enumerate(errors) if text)
        rows = [self.common(item, mode, again) | {"error": text} for mode in modes]
        if not alike:
            return rows, text
        control = dist.new_group(backend="gloo", timeout=self.patience)  # the old group may have unfinished operations
        self.ranks = replace(self.ranks, control=control)
        try:
            release(self.ranks)
            error = ""
        except Exception as dead:
            error = _shown(dead)
        return rows, next((dead for dead in self.said(error) if dead), "")

    def rows_of(self, item: ShapeToMeasure, modes: tuple[str, ...], again: bool) -> tuple[list[Record], str]:
        """Measure a shape. Return (its records, an error text or "")."""
        try:
            found = measured(item, modes, again, self.ranks, self.options)
            return [row | {"run": self.run} for row in found], ""
        except Exception as error:
            return [], _shown(error)

    def said(self, text: str) -> list[str]:
        """Exchange texts between ranks. Return the `text` of every rank, in rank order. All ranks must make this call."""
        everybody: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(everybody, text, group=self.meeting)
        return everybody


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
