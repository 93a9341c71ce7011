"""Unfused combines of experts in native code: on the CPU ranks of a host (`csrc/combine_steps.cpp`), and the steps of GPU ranks
(`csrc/expert_steps.cpp`), which gloo runs here.

1. Results of new sizes, with 1 to 3 experts a rank and a late rank, in one round and in several. They have the bits of the slow
   path, and no call takes it.
2. Arguments that the slow path must refuse, on one rank or on all. The group stays usable.
3. A rank that dies, does not arrive, or is stopped: a named error by the deadline.
4. The steps of GPU ranks: results of combines and dispatches, the numbers of rows that the CPU knows, and changed tables.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import assert_error, assert_errors, error_of, own_group, told
from support.slow import mostly
from test_native_cpu_calls import native_only

import weft
from weft.launch import Pool
from weft.runtime.meeting import DATA_BYTES
from weft.runtime.unfused.native_experts import combine_steps, dispatch_steps
from weft.runtime.unfused.sizes import Sizes, remember

K = 8


class Case:
    """The arguments of a combine on all ranks. counts: the number of rows for [source rank, target rank, expert]."""

    def __init__(self, world: int, experts: int, columns: int, counts: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.counts = torch.tensor(counts).view(world, world, experts)
        self.w = torch.randn(world, experts, K, columns, generator=generator)
        # The tokens of each cell, before their rank sorts them by expert.
        self.cells = {
            (source, target, expert): torch.randn(int(self.counts[source, target, expert]), K, generator=generator)
            for source in range(world) for target in range(world) for expert in range(experts)
        }  # fmt: skip
        self.world, self.experts = world, experts

    def of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return h, w, received and splits of a rank."""
        h = torch.cat([self.cells[source, rank, e] for e in range(self.experts) for source in range(self.world)])
        return h, self.w[rank], self.counts[:, rank].contiguous(), self.counts[rank].flatten()

    def wanted(self, rank: int) -> torch.Tensor:
        parts = [
            self.cells[rank, target, e].double() @ self.w[target, e].double()
            for target in range(self.world)
            for e in range(self.experts)
        ]
        return torch.cat(parts)


def drawn(world: int, experts: int, columns: int, seed: int, sizes: tuple[int, ...] = (0, 1, 3, 20)) -> Case:
    choose = random.Random(seed)
    counts = [choose.choice(sizes) for _ in range(world * world * experts)]
    counts[: world * experts] = [n or 1 for n in counts[: world * experts]]  # calls of an empty h take the slow path
    return Case(world, experts, columns, [n or 1 for n in counts] if experts == 1 else counts, seed)


def known(group: dist.ProcessGroup, experts: int, columns: int, **options: Any) -> Callable[..., torch.Tensor]:
    """Return a combine that native code repeats."""
    options = {"schedule": "serial", "deadline_s": 20.0} | options

    def call(h: Any, w: Any, received: Any, splits: Any, **more: Any) -> torch.Tensor:
        return weft.matmul_all_to_all(h, w, received, splits, group=group, **options, **more)

    for seed in range(3):
        size = 30 + 2 * seed  # no two tensors of a call have equal sizes
        call(*Case(group.size(), experts, columns, [size] * (group.size() ** 2 * experts), seed).of(group.rank()))
    return call


def repeats(group: dist.ProcessGroup, experts: int, columns: int) -> None:
    own, rank, world = own_group(group), group.rank(), group.size()
    call = known(own, experts, columns)
    for number in range(8):
        case = drawn(world, experts, columns, number, (2, 3, 20, 31))
        h, w, received, splits = case.of(rank)
        given = [t.clone() for t in (h, received, splits)]
        h = torch.cat((h, torch.full((number, K), torch.nan)))  # further rows are ignored
        if number % 2:
            received = torch.stack((received, received), -1)[..., 0]  # not contiguous
        if number == 1:  # the first call of this layout
            call(h, w, received, splits)
        if rank == number % world:
            time.sleep((0.0, 0.002, 0.15)[number % 3])  # 0.15 s is longer than a wait in native code
        with native_only():
            y = call(h, w, received, splits)
        torch.testing.assert_close(y.double(), case.wanted(rank), rtol=1e-4, atol=1e-4)
        in_python = call(h, w, received, splits, timeline=weft.Timeline())
        assert torch.equal(y, in_python)
        assert all(
            torch.equal(one, other) for one, other in zip(given, (h[: len(given[0])], received, splits), strict=True)
        )


@pytest.mark.parametrize("ranks", mostly([2, 3], 3))
@pytest.mark.parametrize(("experts", "columns"), [(1, 6), (3, 6), (2, 4 * DATA_BYTES // (4 * 40 * 6))])
def test_results_of_new_sizes(pool: Pool, experts: int, columns: int, ranks: int) -> None:
    pool.run(repeats, experts, columns, ranks=ranks, timeout_s=120)


def require_refused(call: Callable[[], object], text: str) -> None:
    assert_error(told(call).partition(": ")[::2], "RefusedError", match=text)


def with_rows(group: dist.ProcessGroup) -> None:
    """Pass `rows`. The same number with other tables is a call of the same family."""
    own, rank = own_group(group), group.rank()
    options: dict[str, Any] = {"group": own, "schedule": "serial", "rows": 41}
    for counts in ([20, 21, 19, 22], [15, 26, 23, 18], [10, 31, 30, 11]):
        case = Case(2, 1, 6, counts, sum(counts[:2]))
        y = weft.matmul_all_to_all(*case.of(rank), **options)
        torch.testing.assert_close(y.double(), case.wanted(rank), rtol=1e-4, atol=1e-4)
    h, w, received, splits = Case(2, 1, 6, [20, 22, 19, 22], 1).of(rank)
    require_refused(
        lambda: weft.matmul_all_to_all(h, w, received, splits, **options), "rows=41, but splits add up to 42"
    )


def test_calls_with_the_number_of_rows(pool: Pool) -> None:
    pool.run(with_rows, ranks=2, timeout_s=60)


def refuses(group: dist.ProcessGroup) -> None:
    """Pass wrong tables on rank 1 only, or tables that do not agree. Then the group is usable, in native code too."""
    own, rank, world = own_group(group), group.rank(), group.size()
    call, case = known(own, 2, 6), drawn(world, 2, 6, 4, (2, 3, 20))
    h, w, received, splits = case.of(rank)

    def changed(table: torch.Tensor, place: tuple[int, ...], by: int) -> torch.Tensor:
        table = table.clone()
        table[place] += by
        return table

    wrong: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
        r"received\[0, 1\]=-\d+: pass numbers": lambda: (h, w, changed(received, (0, 1), -90), splits),
        r"splits\[0\]=-\d+: pass numbers": lambda: (h, w, received, changed(splits, (0,), -90)),
        r"received adds up to \d+ but h has": lambda: (h[:-1], w, received, splits),
        r"rank 1 keeps .* of its own, but splits says": lambda: (h, w, received, changed(splits, (2,), 1)),
        r"rank 1 sends \d+ rows .* to rank 0, which expects": lambda: (
            torch.cat((h, h)), w, changed(received, (0, 0), 1), splits,
        ),
        r"expected|size|shape|columns|2-D|\[R, K\]": lambda: (h[:, 1:], w, received, splits),
    }  # fmt: skip
    for text, arguments in wrong.items():
        given = arguments() if rank == 1 else (h, w, received, splits)
        require_refused(lambda given=given: call(*given), text)
        for _ in range(2):
            with native_only():
                y = call(h, w, received, splits)
            torch.testing.assert_close(y.double(), case.wanted(rank), rtol=1e-4, atol=1e-4)


def test_wrong_tables_are_refused_and_the_group_stays_usable(pool: Pool) -> None:
    pool.run(refuses, ranks=2, timeout_s=120)


def differs(group: dist.ProcessGroup) -> tuple[str, str]:
    own = own_group(group)
    call, case = known(own, 2, 6), drawn(2, 2, 6, 4, (2, 3, 20))
    other = group.rank() == 1
    return error_of(lambda: weft.matmul_all_reduce(torch.randn(3, K), torch.randn(K, 6), own, deadline_s=20.0)
                    if other else call(*case.of(0)))  # fmt: skip


def test_another_operator_is_named(pool: Pool) -> None:
    assert_errors(
        pool.run(differs, ranks=2, timeout_s=60), "DisagreementError", "matmul_all_to_all", "matmul_all_reduce"
    )


def without_rank_1(group: dist.ProcessGroup, sent: int) -> list[tuple[str, str]]:
    """Kill or stop rank 1 while its peers wait in native code. Rank 0 continues it later. Return the errors of two calls."""
    own, rank, world = own_group(group), group.rank(), group.size()
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid(), group=group)
    call, case = known(own, 2, 6, deadline_s=3.0), drawn(world, 2, 6, 4, (2, 3, 20))
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), sent)
    began = time.monotonic()
    with native_only():
        first = error_of(lambda: call(*case.of(rank)))
    assert sent == signal.SIGKILL or rank == 1 or time.monotonic() - began > 2.9
    if rank == 0 and sent == signal.SIGSTOP:
        os.kill(pids[1], signal.SIGCONT)
    return [first, error_of(lambda: call(*case.of(rank)))]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_is_named(sent: signal.Signals) -> None:
    with Pool(3) as pool:
        results = pool.run(without_rank_1, sent, return_exceptions=True, timeout_s=60)
    kinds = set()
    for rank in (0, 2):
        first, second = results[rank]
        kinds.add(first[0])
        assert "rank 1" in first[1]
        assert second[0] == "PoisonedGroupError"
    assert ("PeerLostError" if sent == signal.SIGKILL else "DeadlineError") in kinds


def by_steps(group: dist.ProcessGroup, experts: int) -> None:
    own, rank, world = own_group(group), group.rank(), group.size()
    there, steps = dispatch_steps(experts, world), combine_steps(experts, world)
    assert there is not None
    assert steps is not None
    for number in range(6):
        case, generator = drawn(world, experts, 6, number, (0, 0, 2, 3, 20)), torch.Generator().manual_seed(number)
        h, w, received, splits = case.of(rank)
        h = torch.cat((h, torch.full((number % 3, K), torch.nan)))
        inputs = {"h": h, "w": w, "received": received, "splits": splits, "rows": int(splits.sum())}
        known, found = Sizes(splits, received), []
        assert known.host.came == case.counts[:, rank].sum(1).tolist()
        for prepare in (
            lambda: None,
            functools.partial(remember, known),
            functools.partial((splits if number % 2 else received).add_, 0),  # a new version
        ):
            prepare()
            made = steps.run(inputs, own)
            torch.testing.assert_close(made["y"].double(), case.wanted(rank), rtol=1e-4, atol=1e-4)
            found.append(made["numbers"] is known.numbers)
        assert found == [False, True, False]
        cells = {cell: torch.randn(len(rows), K, generator=generator) for cell, rows in case.cells.items()}
        tokens = torch.cat([cells[rank, target, e] for target in range(world) for e in range(experts)])
        sent = there.run({"tokens": tokens, "w": w, "splits": splits}, own)
        assert torch.equal(sent["received"], case.counts[:, rank])
        wanted = [cells[source, rank, e].double() @ w[e].double() for e in range(experts) for source in range(world)]
        torch.testing.assert_close(sent["y"].double(), torch.cat(wanted), rtol=1e-4, atol=1e-4)
        back = steps.run({**inputs, "received": sent["received"]}, own)
        assert back["numbers"] is sent["numbers"]
        torch.testing.assert_close(back["y"].double(), case.wanted(rank), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("experts", [1, 3])
def test_the_steps_of_gpu_ranks(pool: Pool, experts: int, ranks: int) -> None:
    pool.run(by_steps, experts, ranks=ranks, timeout_s=60)
