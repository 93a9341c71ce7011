"""What streams of several ranks would do, played one operation after another in random orders: tokens come to the run that
waits for them, none is put onto another, and every run ends.

Programs are compiled as for GPUs, but recorded in a list; copies and GEMMs take no part. A stream does its operations in order,
writes of one signal one by one, and events hold as CUDA's do: for the last record that the host issued before.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here: it compiles the kernels that programs launch")

from slow import mostly

from weft.errors import ScheduleError
from weft.runtime.cuda import compile as stream_compiler
from weft.runtime.cuda.context import Context, Run, rank_schedule
from weft.runtime.cuda.groups import Grouping
from weft.runtime.cuda.tokens import AWAITED, TOKEN, missing, tokens_of
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import (
    RANK,
    AllGatherMatmul,
    AllToAllMatmul,
    Collective,
    Draft,
    MatmulAllToAll,
    MatmulReduceScatter,
    NotApplicableError,
    Schedule,
    candidates,
)
from weft.schedule.order import issue_order

RUNS = 4
WORDS = 1 << 50  # where a rank's words lie, as an address: this times 1 + its rank
PROBLEMS = {
    "2 ranks": AllGatherMatmul.even(64, 32, 32, 2),
    "3 ranks, uneven": AllGatherMatmul(3, (8, 24, 16), (32,), 32, "bf16"),
    "4 ranks, the gathered input wanted": AllGatherMatmul(4, (16, 16, 16, 16), (32,), 32, "bf16", True),
    "a rank without rows": AllGatherMatmul(2, (0, 64), (32,), 32, "bf16"),
    "scattered to 2 ranks": MatmulReduceScatter(2, 1024, 300, 32, "bf16"),
    "scattered to 4 ranks": MatmulReduceScatter(4, 1200, 40, 32, "fp32"),
}


class Recorded:
    """In place of `_core.StreamProgram`."""

    def __init__(self, *_: int) -> None:
        self.operations: list[tuple] = []

    def __len__(self) -> int:
        return len(self.operations)

    def __getattr__(self, name: str) -> Any:
        def record(stream: int, *what: Any) -> int:
            self.operations.append((name, stream, *what))
            return len(self.operations) - 1

        return record


class Launch:
    """In place of `weft.runtime.cuda.move.Move`."""

    def __init__(self, device: torch.device, **what: Any) -> None:
        self.what = what

    def record(self, program: Recorded, stream: int, *places: Any) -> bool:
        program.launch(stream, self.what)
        return True


class TrackedLaunch(stream_compiler.Tracked):
    """A tracked GEMM on the first stream that puts all its tokens when it ends."""

    def __init__(self, context: Context, regions: Any, kernel: Any, step: Any, words_set: Any) -> None:
        super().__init__(context, regions, kernel, step, words_set)
        sets = [address for counter in step.sets() for address in words_set(*counter)]
        words_set.__self__.program.launch(0, {"opens": [], "waits": [], "sets": sets, "answers": []})


class Memory:
    def address(self, rank: int) -> int:
        return WORDS * (1 + rank)

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")


def context_of(schedule: Schedule, rank: int) -> Context:
    """Without memory, streams and a group."""
    mine, streams = rank_schedule(schedule, rank), [SimpleNamespace(cuda_stream=0)] * len(schedule.lanes)
    own = {
        name: torch.empty(int(b.rows), b.cols, dtype=TORCH_DTYPE[b.dtype], device="meta")
        for name, b in mine.buffers.items()
        if b.role in ("symmetric", "scratch")
    }
    domain = SimpleNamespace(world_size=schedule.world_size, group=None)
    instead: dict[str, Any] = {
        "domain": domain,
        "region": Memory(),
        "words": Memory(),
        "side": streams[1:],
        "monitor": streams[0],
        "run": Run(),
    }
    return Context(**vars(mine), device=torch.device("cpu"), own=own, begun_word=torch.zeros(1), **instead)


def compiled(schedule: Schedule, rank: int) -> list[tuple]:
    """(name, stream, ...) of what the host issues on a rank in a run; words as (rank, number)."""
    context = context_of(schedule, rank)
    program: Any = stream_compiler.compile_streams(context, False).program
    operations = program.operations
    scratch = sum(b.role == "scratch" for b in context.buffers.values())
    first_words = len(context.given) + scratch + schedule.world_size
    found = []
    for name, stream, *what in operations:
        if name == "signal":
            what = [[(waits, base - first_words, offset // 8, n) for waits, base, offset, n in what[0]]]
        found.append((name, stream, *what))
    return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_compiler, "_core", SimpleNamespace(StreamProgram=Recorded))
    monkeypatch.setattr(stream_compiler, "Move", Launch)
    monkeypatch.setattr(stream_compiler, "Tracked", TrackedLaunch)


class Played:
    """All ranks' streams. `words[rank][number]` holds the run in which its token was put, or None."""

    def __init__(self, schedule: Schedule) -> None:
        self.tokens = tokens_of(schedule)
        self.words: list[dict[int, int | None]] = [
            {t.word: 0 if t.previous else None for t in mine.values()} for mine in self.tokens
        ]
        self.previous = [{t.word: t.previous for t in mine.values()} for mine in self.tokens]
        self.streams: dict[tuple[int, int], deque] = {}
        self.reached: set[tuple] = set()
        for rank in range(schedule.world_size):
            last: dict[int, tuple] = {}
            program = compiled(schedule, rank)
            for run in range(1, RUNS + 1):
                for number, (name, stream, *what) in enumerate(program):
                    if name == "record":
                        last[what[0]] = (rank, run, number)
                        what = [last[what[0]]]
                    elif name == "wait_event":
                        what = [last[what[0]]]
                    elif name == "copy":
                        continue
                    self.streams.setdefault((rank, stream), deque()).append((run, name, what))

    def put(self, rank: int, word: int, run: int) -> None:
        if word in self.words[rank]:
            assert self.words[rank][word] is None, f"run {run} puts a token where one lies, word {word} of rank {rank}"
            self.words[rank][word] = run

    def take(self, rank: int, word: int) -> None:
        if word in self.words[rank]:
            self.words[rank][word] = None

    def has_come(self, rank: int, word: int, run: int) -> bool:
        found = self.words[rank][word]
        if found is not None:
            assert found == run - self.previous[rank][word], f"run {run} finds the token of run {found}, rank {rank}"
        return found is not None

    def steps(self, rank: int, run: int, name: str, what: list) -> Iterator[bool]:
        """One operation in small steps; False while it cannot go on."""
        if name == "record":
            self.reached.add(what[0])
        elif name == "wait_event":
            while what[0] not in self.reached:
                yield False
        elif name == "signal":
            for waits, at, word, number in what[0]:
                if waits:
                    assert number == AWAITED
                    while not self.has_come(rank, word, run):
                        yield False
                elif number == TOKEN and at != rank and at < len(self.words):  # else for the watchdog
                    self.put(at, word, run)
                elif number == 0:
                    self.take(at, word)
                yield True
        else:
            yield from self.launch(rank, run, what[0])
        yield True

    def launch(self, rank: int, run: int, what: dict[str, Any]) -> Iterator[bool]:
        place = {name: [divmod(a, WORDS) for a in what[name]] for name in ("opens", "waits", "sets", "answers")}
        for puts, waits in (("opens", "waits"), ("sets", "answers")):
            for owner, offset in place[puts]:
                self.put(owner - 1, offset // 8, run)
                yield True
            for _, offset in place[waits]:
                while not self.has_come(rank, offset // 8, run):
                    yield False
            for _, offset in place[waits]:
                self.take(rank, offset // 8)
                yield True

    def play(self, seed: int) -> None:
        chance = random.Random(seed)
        running: dict[tuple[int, int], Iterator[bool]] = {}
        speed = {key: chance.choice([1, 1, 10]) for key in self.streams}
        while any(self.streams.values()) or running:
            keys = sorted(key for key in self.streams if self.streams[key] or key in running)
            chance.shuffle(keys)
            moved = False
            for key in sorted(keys, key=lambda k: chance.random() / speed[k]):
                if key not in running:
                    run, name, what = self.streams[key].popleft()
                    running[key] = self.steps(key[0], run, name, what)
                went = next(running[key], None)
                if went is None:
                    del running[key]
                moved = moved or went is not False
                if went is not False and chance.random() < 0.7:
                    break
            assert moved, "all streams stand still"


@pytest.mark.parametrize(
    "name", mostly(PROBLEMS, "2 ranks", "3 ranks, uneven", "scattered to 2 ranks", "scattered to 4 ranks")
)
def test_tokens_come_to_the_run_that_waits_for_them(recorded: None, name: str) -> None:
    count = 0
    for candidate in candidates(PROBLEMS[name]):
        try:
            schedule = candidate.build()
        except NotApplicableError:
            continue
        for seed in range(4):
            Played(schedule).play(seed)
        count += any(tokens_of(schedule))
    assert count >= 4


class Shared(Memory):
    """Of all ranks, in this process."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, int], torch.Tensor] = {}

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
        return self.tensors.setdefault((rank, offset), torch.full(shape, 7, dtype=dtype))


@pytest.mark.parametrize("name", mostly(PROBLEMS, "2 ranks", "scattered to 2 ranks", "scattered to 4 ranks"))
def test_kernels_are_loaded_without_a_change_of_what_peers_read(
    recorded: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A new layout's kernels are loaded while peers may be in the run before, or have sent what is for the next one."""
    for what in ("current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, what, lambda *_: contextlib.nullcontext())
    loaded = set()
    for candidate in candidates(PROBLEMS[name]):
        try:
            schedule = candidate.build()
        except NotApplicableError:
            continue
        if any(isinstance(step, Collective) for lane in schedule.lanes for step in lane.steps):
            continue  # there is no library here
        context, shared = context_of(schedule, 1), Shared()
        places = context.layout.buffers  # of symmetric ones
        own = {
            buffer: shared.tensor(1, t.shape, t.dtype, places[buffer])
            if buffer in places
            else torch.ones_like(t, device="cpu")
            for buffer, t in context.own.items()
        }
        items = stream_compiler.compile_streams(replace(context, region=shared, own=own), False)
        items.warm_up({b.name: torch.ones(int(b.rows), b.cols, dtype=TORCH_DTYPE[b.dtype]) for b in context.given})
        assert all((t == 7).all() for t in shared.tensors.values()), candidate.name
        loaded |= {candidate.builder} if items.calls else set()
    assert len(loaded) >= 2


def test_tokens_of_experts_can_be_taken_in_time() -> None:
    for problem, builders in (
        (AllToAllMatmul, ("dispatch", "dispatch_by_expert")),
        (partial(AllToAllMatmul, return_x=True), ("dispatch", "dispatch_by_expert")),
        (MatmulAllToAll, ("combine", "combine_by_expert")),
    ):
        for candidate in candidates(problem(3, 8, (24,) * 3, 64, 64, "bf16", 24), builders):
            assert any(tokens_of(candidate.build()))


def test_a_signal_that_may_come_twice_before_its_wait_ends_is_refused() -> None:
    d = Draft("careless", 2)
    x, y = d.buffer("x", 8, 8, "fp32", "input"), d.buffer("y", 8, 8, "fp32", "output")
    told = d.signals("told", 2)
    compute = d.lane("compute").copy(x.part(), y.part(), "kernel").set(told, RANK, at=(RANK + 1) % 2)
    d.lane("late", "copy").wait(told, (RANK + 1) % 2)
    compute.copy(x.part(), y.part(), "kernel")
    with pytest.raises(
        ScheduleError, match=r"may set told\[\d\] of rank \d again before lane 'late' there has ended its wait"
    ):
        tokens_of(d.schedule())


@pytest.mark.parametrize(
    ("previous", "heard", "safe"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_an_answer_protects_a_token_only_if_it_is_heard_in_time(previous: bool, heard: bool, safe: bool) -> None:
    """Each rank tells its peer at once in every run; the peer answers once its wait has ended. A rank that waits for the answer in
    another lane ends its run only then: in time for the token of the next run, and too late for one that a wait for the
    previous run has left until then."""
    d, peer = Draft("answered", 2), (RANK + 1) % 2
    x, y = d.buffer("x", 8, 8, "fp32", "input"), d.buffer("y", 8, 8, "fp32", "output")
    told, answered = d.signals("told", 2), d.signals("answered", 2)
    d.lane("compute").copy(x.part(), y.part(), "kernel").set(told, RANK, at=peer)
    d.lane("answers", "copy").wait(told, peer, previous=previous).set(answered, RANK, at=peer)
    if heard:
        d.lane("hears", "copy").wait(answered, peer)
    if safe:
        assert all(tokens_of(d.schedule()))
    else:
        with pytest.raises(ScheduleError, match=r"may set told\[\d\] of rank \d again before lane 'answers' there"):
            tokens_of(d.schedule())


@pytest.mark.parametrize(
    ("name", "standing", "come", "wanted"),
    [
        ("shard[chunks=1,send=in_turn,by=dma]", 0, {"free"}, None),  # idle: rows of the run before have been read
        ("shard[chunks=1,send=in_turn,by=dma]", 0, set(), "arrived"),  # room was there and is taken, or never was
        ("shard[chunks=1,send=in_turn,by=dma]", 0, {"arrived"}, "free"),
        ("gather[by=kernel]", 0, set(), None),
        ("gather[by=kernel]", 1, set(), "room"),
        ("gather[by=kernel]", 2, set(), "arrived"),
        ("gather[by=kernel]", 1, {"room"}, "arrived"),
    ],
)
def test_what_a_run_waits_for_is_told_from_its_words(
    name: str, standing: int, come: set[str], wanted: str | None
) -> None:
    schedule = next(c for c in candidates(PROBLEMS["2 ranks"]) if c.name == name).build()
    tokens = tokens_of(schedule)[0]
    words = [0] * len(tokens)
    for token in tokens.values():
        words[token.word] = TOKEN if token.key[0] in come else 0
    assert [token.key[0] for _, token in missing(tokens, words, standing)] == ([wanted] if wanted else [])


def test_all_ranks_are_named_whose_signal_may_be_missing() -> None:
    """Of three, one did not come: tokens of the other have come and are taken, and both lack the same."""
    schedule = next(c for c in candidates(PROBLEMS["3 ranks, uneven"]) if c.name.startswith("shard[chunks=1")).build()
    tokens = tokens_of(schedule)[2]
    found = missing(tokens, [0] * len(tokens), 0)
    assert {token.key for _, token in found} == {("arrived", 0), ("arrived", 1)}
    assert {token.setter for _, token in found} == {0, 1}


class Cut(Grouping):
    """As it was before: what a launch sets may go behind other lanes' waits."""

    def _may_put_off(self, *_: object) -> bool:
        return True


def test_sets_are_not_put_off_behind_waits_of_other_lanes() -> None:
    """In one hardware queue they would never come: each rank's copy lane waits for the set of the other's launch."""
    d = Draft("two lanes", 2)
    x, y, box = (
        d.buffer("x", 8, 8, "fp32", "input"), d.buffer("y", 8, 8, "fp32", "output"), d.buffer("box", 8, 8, "fp32", "symmetric"),
    )  # fmt: skip
    first, tail, peer = d.signals("first", 2), d.signals("tail", 2), (RANK + 1) % 2
    d.lane("compute").copy(x.part(), y.part(), "kernel").wait(first, peer).set(tail, RANK, at=peer)
    d.lane("side", "copy").copy(x.part(), box.part(), "kernel").set(first, RANK, at=peer).wait(tail, peer)
    schedule = d.schedule()
    arguments = 0, ["compute", "side"], issue_order(schedule)[0], tokens_of(schedule)[0], lambda _: 32

    def launched(grouping: Grouping) -> int:
        """Steps of the launch on the side."""
        return next(len(group.steps) for group in grouping.groups() if group.lane == 1 and group.moves)

    assert launched(Grouping(*arguments)) == 2, "the copy and its set"
    assert launched(Cut(*arguments)) == 3, "with the wait, until whose place in the order the set is put off"
