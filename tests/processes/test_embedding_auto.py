"""transport="auto" on CPU processes: every choice gives the right result.

Without a model the choice is `direct`. With a model (processes pretend to be H200s) the model chooses, or measured
times do, if they are requested. The choice is made once per size bucket, and is released with the module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import embedding_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from embedding_ranks import assert_same_bits
from pool import traces
from support.measuring_ranks import instead, on_h200s
from support.on_ranks import assert_errors, error_of
from support.reference import Problem, assert_close, tables_of
from test_embedding_module_close import BATCH, WIDTH, features, made, mapped_bytes

import weft
from weft.embedding.options import EmbeddingOptions
from weft.embedding.plan import plan_of
from weft.hw import load_machine
from weft.launch import Pool
from weft.operator import embedding_transport, measure, this_machine
from weft.ops import embedding_all_to_all, embedding_release
from weft.sim import model_of


def sized(world: int, batch_sizes: tuple[int, ...], seed: int = 0) -> Problem:
    """Return a problem with tables that no other test has, because times are cached. The last feature has no ids."""
    return Problem(tables_of((8, 3, 17)), tuple(i % world for i in range(3)), batch_sizes, seed=seed, weighted=True)


def taken(group: dist.ProcessGroup, p: Problem, **options: Any) -> tuple[str, torch.Tensor]:
    """Make a call. Return its transport and its result."""
    timeline, operator = weft.Timeline(), ranks.operator_of(group, p, transport="put")
    before = operator.flags_raised
    output = ranks.call(group, p, timeline=timeline, **options).clone()
    names = [span.name for span in timeline]
    how = (
        "serial" if names == ["pool", "all_to_all", "unpack"] else "put" if operator.flags_raised > before else "direct"
    )
    return how, output


@contextmanager
def timed_as(**us: float) -> Iterator[list[str]]:
    """Let calls take these times. Yield a list of the timed transports."""
    seen: list[str] = []
    names = itertools.cycle(us)

    def made_up(call: Callable[[], object], *_: Any) -> float:
        call()
        seen.append(next(names))
        return us[seen[-1]]

    with instead(measure, time_us=made_up):
        yield seen


def several(group: dist.ProcessGroup, problems: list[Problem]) -> list[tuple[str, torch.Tensor]]:
    own = dist.new_group(list(range(group.size())))
    return [taken(own, p) if group.size() > 1 else ("direct", ranks.call(own, p).clone()) for p in problems]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_without_a_model_it_is_direct(pool: Pool, world: int) -> None:
    sizes = [(4, 7, 5), (0, 9, 1), (0, 0, 0), (130, 2, 3)]
    problems = [sized(world, size[:world], seed) for seed, size in enumerate(sizes)]
    answers = pool.run(several, problems, ranks=world)
    for number, p in enumerate(problems):
        assert {answer[number][0] for answer in answers} <= ({"direct"} if sum(p.batch_sizes) else {"direct", "put"})
        outputs = [answer[number][1] for answer in answers]
        assert_same_bits(outputs, p)
        assert_close(torch.cat(outputs), p)


def by_models(group: dist.ProcessGroup, p: Problem) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the choice by the model of H200s, and the choice by a model in which signals of kernels are slow."""
    world, found = group.size(), {}
    h200 = model_of(load_machine("h200"), world)
    slow = replace(h200, signal_kernel_us=1e5)
    for name, model in {"h200": h200, "slow": slow}.items():
        own = dist.new_group(list(range(world)))
        with on_h200s(world), instead(this_machine, calibrated_model=lambda device, size, model=model: model):
            found[name] = taken(own, p)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_model_chooses(pool: Pool, world: int) -> None:
    p = sized(world, (40, 0, 9)[:world])
    answers = pool.run(by_models, p, ranks=world)
    for name, how in {"h200": "direct", "slow": "serial"}.items():
        assert {answer[name][0] for answer in answers} == {how}
        assert_same_bits([answer[name][1] for answer in answers], p)


def tuned(
    group: dist.ProcessGroup, near: list[Problem], far: Problem
) -> tuple[list[tuple[str, torch.Tensor]], list[int]]:
    """Return the transports of calls, and the number of timings after each.

    The first size in `near` is timed under "autotune". Calls outside of `use` follow, for all sizes. The last call is
    under "autotune" again, on a new group.
    """
    own, found, counts = dist.new_group(list(range(group.size()))), [], []
    with timed_as(serial=3.0, direct=2.0, put=1.0) as seen:
        for number, p in enumerate([*near, far]):
            if number == 0:
                with weft.plan.use("autotune"):
                    ranks.call(own, p)
            found.append(taken(own, p))
            counts.append(len(seen))
        again = dist.new_group(list(range(group.size())))
        with weft.plan.use("autotune"):
            found.append(taken(again, near[0]))
        counts.append(len(seen))
    return found, counts


def test_measured_times_decide_for_sizes_near_by_and_are_remembered(pool: Pool) -> None:
    near, far = [sized(2, sizes, seed) for seed, sizes in enumerate([(64, 60), (61, 66), (2, 65)])], sized(2, (3, 4))
    answers = pool.run(tuned, near, far, ranks=2)
    for number, p in enumerate([*near, far, near[0]]):
        how = "direct" if p is far else "put"
        assert {found[number][0] for found, _ in answers} == {how}, number
        assert_same_bits([found[number][1] for found, _ in answers], p)
    for _, counts in answers:
        assert counts == [9] * 5  # three transports in three rounds, for one size bucket


def close_and_go_on(group: dist.ProcessGroup) -> tuple[list[int], list[int], list[bool], tuple[str, str]]:
    """Close a module several times, once while a result is held. Return the bytes in use before and after, and True for
    each right result.
    """
    earlier, module, right, during, left = traces(), made(group, name="auto"), [], [], []
    with timed_as(serial=3.0, direct=2.0, put=1.0), weft.plan.use("autotune"):
        for _ in range(2):
            result = module(features()).values()
            (index,) = module.sharding.local_tables(group.rank())
            (bag,) = module.embedding_bags.values()
            ids = features().values().view(-1, 2)
            right.append(torch.equal(result.view(*result.shape[:-1], 2, -1)[:, index], bag.weight[ids].sum(1)))
            error = error_of(module.close)
            during.append(mapped_bytes(earlier))
            del result
            module.close()
            left.append(mapped_bytes(earlier))
    return during, left, right, error


def test_what_was_chosen_and_what_was_not_is_given_back(pool: Pool) -> None:
    for during, left, right, (kind, text) in pool.run(close_and_go_on, ranks=2):
        assert left[0] == left[1], "what is left is the group's, and does not grow"
        assert min(during) >= left[0] + 2 * 2 * BATCH * 2 * WIDTH * 4, "two results of two ranks"
        assert right == [True, True]
        assert kind == "RefusedError"
        assert "holds 1 result" in text


def differ(group: dist.ProcessGroup, p: Problem, sizes: list[tuple[int, ...]]) -> tuple[str, str]:
    own = dist.new_group(list(range(group.size())))
    with on_h200s(group.size()):
        return error_of(lambda: ranks.call(own, p, batch_sizes=sizes[group.rank()], deadline_s=30.0))


def test_ranks_that_divide_the_batch_otherwise_learn_it_when_they_choose(pool: Pool) -> None:
    assert_errors(pool.run(differ, sized(2, (8, 8)), [(8, 8), (15, 1)], ranks=2), "DisagreementError", "batch_sizes")


def choices_of(
    group: dist.ProcessGroup, problems: list[Problem], how: str
) -> tuple[list[tuple[str, torch.Tensor]], list[int], list[int]]:
    """Call many batch sizes. Return (transport, result) of each call, the choices so far, and the bytes in use after
    closing twice.
    """
    earlier, own, found, counts, left = traces(), dist.new_group(list(range(group.size()))), [], [], []
    model = replace(model_of(load_machine("h200"), group.size()), signal_kernel_us={"serial": 1e5}.get(how, 1.0))
    before = embedding_all_to_all.choose_transport
    planned = embedding_transport._planned if how != "put" else lambda found, p, comm: put_for_all(found, comm)
    chosen: list[str] = []

    def spy(*given: Any) -> Any:
        chosen.append(before(*given))
        return chosen[-1]

    with (
        on_h200s(group.size()),
        instead(this_machine, calibrated_model=lambda device, size: model),
        instead(embedding_all_to_all, choose_transport=spy),
        instead(embedding_transport, _planned=planned),
    ):
        for p in problems:
            found.append(taken(own, p))
            counts.append(len(chosen))
        plan = plan_of(problems[0].sharding, EmbeddingOptions())
        for _ in range(2):
            ranks.call(own, problems[0])
            embedding_release.release(plan, group=own, device=torch.device("cpu"), deadline_s=30.0)
            left.append(mapped_bytes(earlier))
    return found, counts, left


def put_for_all(found: Any, comm: Any) -> str:
    """Replace the planner, because no model chooses "put" for these sizes."""
    known = embedding_transport._planned_before.setdefault(comm, {}).setdefault(found, {})
    known[len(known)] = "put"
    return "put"


@pytest.mark.parametrize("how", ["direct", "serial", "put"])
def test_a_transport_for_all_sizes_is_chosen_once(pool: Pool, how: str) -> None:
    """The smallest and the largest size bucket are planned. If their choices are equal, no other bucket is planned."""
    problems = [sized(2, sizes, seed) for seed, sizes in enumerate([(40, 9), (150, 7), (3, 1), (700, 650), (11, 20)])]
    for found, counts, left in (answers := pool.run(choices_of, problems, how, ranks=2)):
        assert {name for name, _ in found} == {how}
        assert counts == [1, 2, 2, 2, 2]
        assert left[0] == left[1], "closing returns what the settled calls hold"
    for number, p in enumerate(problems):
        assert_same_bits([found[number][1] for found, _, _ in answers], p)
