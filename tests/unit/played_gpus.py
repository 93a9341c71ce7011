"""Execution of modelled GPUs (`modelled_gpus`): the CPUs and streams of all ranks run one operation at a time, in
random legal orders.

A stream runs its operations in order. A copy is done row by row, and the writes of one signal one by one. Each flag
stores the run that set it. So a flag that reaches another run, or is set again before it is cleared, is found at once.
Before each run the caller writes its inputs. After each run it reads the results, and then overwrites all memory.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from modelled_gpus import (
    CPU,
    WORDS,
    AddUp,
    Agreeing,
    Host,
    Issued,
    RoundTrip,
    Stream,
    SymmetricMemory,
    Together,
    Totals,
    TrackedTiles,
    collect,
    compiled,
    poison,
)

from weft.runtime.cuda import issue
from weft.runtime.cuda.add_up import Address
from weft.runtime.cuda.context import Context, Tensors, rank_schedule
from weft.runtime.cuda.flags import AWAITED, FLAG, flags_of
from weft.runtime.cuda.kernel_call import Base, Count
from weft.runtime.cuda.round_trip import RowRange
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import Schedule
from weft.symm.memory import lent


class Played:
    """The CPUs and streams of all ranks, in `runs` runs. tensors_of: a function (rank, run) -> the tensors that the
    rank passes.

    results: {(rank, run): results}. words: for each rank, {index of a word: the run in which its flag was set, or
    None}.
    """

    def __init__(self, schedule: Schedule, runs: int, tensors_of: Callable[[int, int], dict[str, Any]]) -> None:
        flags, world = flags_of(schedule), schedule.world_size
        self.words: list[dict[int, int | None]] = [
            {t.word: 0 if t.previous else None for t in mine.values()} for mine in flags
        ]
        self.results: dict[tuple[int, int], Tensors] = {}
        self.previous = [{t.word: t.previous for t in mine.values()} for mine in flags]
        self._streams: dict[tuple[int, int], deque[Issued]] = {}
        self._reached: set[tuple] = set()
        self._met: dict[tuple[int, int], dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._memory = SymmetricMemory(world, rank_schedule(schedule, 0).layout.buffer_bytes)
        self._hosts = []
        for rank in range(world):
            context, items = compiled(schedule, rank, self._memory)
            body = partial(self._issue_runs, context, items, runs, partial(tensors_of, rank))
            self._hosts.append(Host(rank, body, partial(self._queue, rank)))

    def _queue(self, rank: int, stream: int, issued: Issued) -> None:
        self._streams.setdefault((rank, stream), deque()).append(issued)

    @staticmethod
    def _issue_runs(
        context: Context, items: issue.StreamItems, runs: int, tensors_of: Callable[[int], dict[str, Any]], host: Host
    ) -> None:
        """Issue runs as `CudaSchedule.run` does on the CPU. The caller uses its tensors before and after each run."""
        run = context.run
        for host.number in range(1, runs + 1):
            given = tensors_of(host.number)
            tensors = {name: t if callable(t) else poison(t.clone()) for name, t in given.items()}
            host.issue(0, "given", [(tensors[name], t) for name, t in given.items() if not callable(t)])
            run.caller = Stream(0)  # type: ignore[assignment]
            run.known.clear()
            run.made = {}
            items.issue(tensors, False)
            outputs = [b.name for b in context.given if b.role == "output"]
            results = {name: run.made.get(name, tensors[name]) for name in outputs}
            host.issue(0, "taken", results, list(tensors.values()))

    # --- flags ---

    def _put(self, run: int, address: int) -> None:
        rank, word = address // WORDS - 1, address % WORDS // 8
        if word in self.words[rank]:
            assert self.words[rank][word] is None, f"run {run} sets a flag that is set, word {word} of rank {rank}"
            self.words[rank][word] = run

    def _take(self, address: int) -> None:
        rank, word = address // WORDS - 1, address % WORDS // 8
        if word in self.words[rank]:
            self.words[rank][word] = None

    def _come(self, one: Issued, addresses: list[int]) -> Iterator[bool]:
        """Wait until the flag in each of these words is set, and check which run set it."""
        for address in addresses:
            rank, word = address // WORDS - 1, address % WORDS // 8
            assert rank == one.rank
            while (found := self.words[rank][word]) is None:
                yield False
            wanted = one.run - self.previous[rank][word]
            assert found == wanted, f"run {one.run} finds the flag of run {found}, rank {rank}"

    # --- operations, as generators of small steps; they yield False while they are blocked ---

    def _record(self, one: Issued, event: tuple) -> Iterator[bool]:
        self._reached.add(event)
        yield True

    def _wait_event(self, one: Issued, event: tuple) -> Iterator[bool]:
        while event not in self._reached:
            yield False

    def _given(self, one: Issued, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[bool]:
        """Write the inputs of the run, on the caller's stream before the run."""
        for target, t in pairs:
            target.copy_(t)
            yield True

    def _taken(self, one: Issued, results: Tensors, everything: list[torch.Tensor]) -> Iterator[bool]:
        """Read the results, on the caller's stream after the run, and then overwrite all memory."""
        self.results[one.rank, one.run] = {name: t.clone() for name, t in results.items()}
        yield True
        for t in everything:
            poison(t)

    def _signal(self, one: Issued, parts: list[tuple[bool, int, int, int]]) -> Iterator[bool]:
        for waits, base, offset, number in parts:
            address = one.bases[base] + offset
            if waits:
                assert number == AWAITED
                yield from self._come(one, [address])
            # Other words are for the watchdog.
            elif number == FLAG and address >= WORDS and address // WORDS - 1 != one.rank:
                self._put(one.run, address)
            elif number == 0:
                self._take(address)
            yield True

    def _copy(
        self, one: Issued, dst: int, to: int, to_pitch: int, src: int, at: int, pitch: int, width: int, rows: int
    ) -> Iterator[bool]:
        for row in range(rows):
            ctypes.memmove(one.bases[dst] + to + row * to_pitch, one.bases[src] + at + row * pitch, width)
            if row % 4 == 0:
                yield True

    def _launch(self, one: Issued, what: dict[str, Any]) -> Iterator[bool]:
        for word in what["sets_before"]:
            self._put(one.run, word)
            yield True
        source, target = (_number(one, at) for at in (what["source"], what["target"]))
        shape = what["shape"]
        width, pitch, to_pitch = shape.width, shape.source_pitch, shape.target_pitch
        copies = [(source, [target, *what["targets"]], what.get("sizes", 0))]
        for part in what["parts"]:
            copies.append((source + part.source, [part.target + part.relative * target], part.sizes))
        lines: list[tuple[list[torch.Tensor], list[int]]] = []
        for at, begins, sizes in copies:
            rows, first, to = shape.rows, 0, 0
            if sizes:
                first, to, rows = (ctypes.c_int64 * 3).from_address(sizes)
                for begin, rows_of in zip((first, to), what["rows"], strict=True):
                    room = _number(one, rows_of)
                    assert 0 <= begin <= begin + rows <= room, f"rows {begin}:+{rows} are outside of {room}"
            if lines or not what["early"]:  # only the first copy may read before the waits
                yield from self._come(one, what["waits"])
            lines.append((_lines(at + first * pitch, rows, width, pitch), [begin + to * to_pitch for begin in begins]))
        yield from self._come(one, what["waits"])
        yield True
        for read, begins in lines:
            for begin in begins:
                for row, line in enumerate(read):
                    if what["adds"]:
                        line = line.view(TORCH_DTYPE[what["adds"]])
                        lent(begin + row * to_pitch, [len(line)], line.dtype, CPU, ()).add_(line)
                    else:
                        ctypes.memmove(begin + row * to_pitch, line.data_ptr(), width)
                    if row % 4 == 0:
                        yield True
        for word in what["waits"]:
            self._take(word)
            yield True
        for word in what["sets"]:
            self._put(one.run, word)
            yield True
        yield from self._come(one, what["waits_after"])
        for word in what["waits_after"]:
            self._take(word)
            yield True

    def _add_up(self, one: Issued, sum_of: AddUp) -> Iterator[bool]:
        """Reduce row by row."""
        (rows, cols), dtype = sum_of.size, sum_of.dtype
        norm = sum_of.norm

        def at(place: Address, row: int) -> torch.Tensor:
            return lent(one.bases[place.base] + place.offset + row * place.pitch, [cols], dtype, CPU, ())

        for row in range(rows):
            out, *parts = (at(place, row) for place in (sum_of.out, *sum_of.parts))
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part
            if sum_of.parts != [sum_of.out]:
                out.copy_(total)
            if norm is not None:
                at(norm.out, row).copy_(torch.nn.functional.rms_norm(out, (cols,), at(norm.weight, row), norm.eps))
            yield True

    def _totals(self, one: Issued, totals: Totals) -> Iterator[bool]:
        held, *_ = totals._arguments
        flat = held.flatten()
        place = held.data_ptr()
        for base, count in totals.tables:
            ctypes.memmove(place, one.bases[base.number] + base.offset, 8 * count)
            place += 8 * count
            yield True
        for i, (constant, terms) in enumerate(zip(totals._constants.tolist(), totals._terms.tolist(), strict=True)):
            parts = (flat[first : first + count * step : step][:count] for first, count, step in terms)
            totals.numbers[i] = constant + sum(int(part.sum()) for part in parts)
        yield True

    def _agree(self, one: Issued, tables: Agreeing, at: Base, rows_of: int | Count) -> Iterator[bool]:
        begin, out, out_rows = 0, _number(one, at), _number(one, rows_of)
        for rows, differs in zip(
            tables.expected.sum(1).tolist(), (tables.expected != tables.sent).any(1).tolist(), strict=True
        ):
            assert begin + rows <= out_rows
            if differs:
                ctypes.memset(out + begin * tables.row_bytes, 0xFF, rows * tables.row_bytes)
            begin += rows
            yield True

    def _round_trip(self, one: Issued, call: RoundTrip, at: Base, rows_of: int | Count) -> Iterator[bool]:
        """Run the copies between two signals in a random order, row by row."""
        what, numbers, out, out_rows = call.what, itertools.count(), _number(one, at), _number(one, rows_of)
        width = what.row_bytes

        def copies(ranges: list[RowRange]) -> Iterator[bool]:
            found = []
            for each in ranges:
                first, to, rows = (ctypes.c_int64 * 3).from_address(what.sizes + 24 * next(numbers))
                target, room = (each.target, each.target_rows) if each.target else (out, out_rows)
                source, there = (each.source, each.source_rows) if each.source else (out, out_rows)
                assert 0 <= first <= first + rows <= there
                assert 0 <= to <= to + rows <= room
                found += [(target + (to + i) * width, source + (first + i) * width) for i in range(rows)]
            for target, source in random.Random(len(found)).sample(found, len(found)):
                ctypes.memmove(target, source, width)
                yield True

        yield from self._come(one, what.waits)
        for target in what.targets:
            ctypes.memmove(target, what.table.data_ptr(), what.table.nbytes)
            yield True
        yield from copies(what.sends)
        for word in what.waits:
            self._take(word)
            yield True
        for word in what.sets:
            self._put(one.run, word)
            yield True
        yield from copies(what.own)
        yield from self._come(one, what.waits_after)
        yield from copies(what.places)
        if what.compared:
            expected, sent, row = what.compared
            yield from self._agree(one, Agreeing(expected, sent, 0, row, width, 1), at, rows_of)
        for word in what.waits_after:
            self._take(word)
            yield True
        for word in what.sets_after:
            self._put(one.run, word)
            yield True

    def _call(self, one: Issued, call: Callable[[], None]) -> Iterator[bool]:
        call()
        yield True

    def _together(self, one: Issued, call: Together, src: torch.Tensor, dst: torch.Tensor) -> Iterator[bool]:
        met = self._met.setdefault((one.run, call.nth), {})
        met[one.rank] = src, dst
        if len(met) == len(self.words):
            collect(call.op, *([met[rank][side] for rank in sorted(met)] for side in (0, 1)))
        while len(met) < len(self.words):
            yield False

    def _tracked(self, one: Issued, tiles: TrackedTiles, a: torch.Tensor, w: torch.Tensor, y: int) -> Iterator[bool]:
        left = [come for come, _ in tiles.counters]
        for (row, rows, col, cols, place, pitch, *of_tile), added in zip(
            tiles.table.tolist(), tiles.added.tolist(), strict=True
        ):
            tile = (a[row : row + rows] @ w[:, col : col + cols]).contiguous()
            if added:
                tile = torch.addmm(_at(tile, *added), a[row : row + rows], w[:, col : col + cols])
            for i, line in enumerate(tile):
                ctypes.memmove(place + (y if tiles.relative else 0) + i * pitch, line.data_ptr(), line.nbytes)
            yield True
            for counter in of_tile:
                left[counter] -= 1
                for word in () if left[counter] else tiles.counters[counter][1]:
                    self._put(one.run, word)
                    yield True

    def play(self, seed: int) -> None:
        """Run everything in a random order. Raise `AssertionError` if all CPUs and streams are blocked."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # GEMMs are so small that several threads would slow them down
        try:
            self._play(random.Random(seed))
        finally:
            torch.set_num_threads(threads)
            for one in self._hosts:
                one.stop()

    def _play(self, chance: random.Random) -> None:
        running: dict[tuple[int, int], Iterator[bool]] = {}
        speed: dict[tuple[int, int], int] = {}

        def advance(key: tuple[int, int]) -> bool:
            rank, stream = key
            if stream < 0:
                return self._hosts[rank].resume(chance.choice((1, 3, 10, 1000)))
            if key not in running:
                one = self._streams[key].popleft()
                running[key] = getattr(self, f"_{one.name}")(one, *one.what)
            went = next(running[key], None)
            if went is None:
                del running[key]
            return went is not False

        while True:
            keys = [key for key, queue in self._streams.items() if queue or key in running]
            keys = sorted(keys) + [(one.rank, -1) for one in self._hosts if not one.ended]
            if not keys:
                return
            moved = False
            for key in keys:
                if key not in speed:
                    speed[key] = chance.choice([1, 1, 10])
            for key in sorted(keys, key=lambda k: chance.random() / speed[k]):
                went = advance(key)
                moved = moved or went
                if went and chance.random() < 0.7:
                    break
            assert moved, "all streams and hosts stand still"


def _number(one: Issued, argument: int | Base | Count) -> int:
    """Return the number that an argument of a kernel has in the run of `one`."""
    if isinstance(argument, Base):
        return one.bases[argument.number] + argument.offset
    return one.bases[argument.number] if isinstance(argument, Count) else argument


def _lines(source: int, rows: int, width: int, pitch: int) -> torch.Tensor:
    """Return the rows at an address as a view of bytes, [rows, width]."""
    read = torch.empty(rows, width, dtype=torch.uint8)
    for row, line in enumerate(read):
        ctypes.memmove(line.data_ptr(), source + row * pitch, width)
    return read


def _at(like: torch.Tensor, place: int, pitch: int) -> torch.Tensor:
    """Return a view of the memory at an address, shaped like `like`, with `pitch` bytes from row to row."""
    found = torch.empty_like(like)
    for i, line in enumerate(found):
        ctypes.memmove(line.data_ptr(), place + i * pitch, line.nbytes)
    return found
