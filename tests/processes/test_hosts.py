"""A group on several hosts, pretended on this machine: every operator, faults, and measured links.

The functions with a `group` argument run on the ranks. `test_hosts_set_up.py` has the set-up. `test_two_hosts.py` has real network
namespaces.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import assert_deadline
from support.on_ranks import assert_errors, error_of, own_group, told
from support.operators import suite
from support.operators.cases import ROWS
from support.operators.gemms import Following, Gathered, Gemm
from support.pretended_hosts import claimed, on_two_hosts

import weft
from weft import symm
from weft.builders import MatmulReduceScatter, named
from weft.embedding import ColumnWise, DataParallel, RowWise
from weft.embedding.options import EmbeddingOptions
from weft.embedding.plan import EmbeddingPlan
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from weft.operator import between_hosts, know_links
from weft.runtime.cpu import embedding_far_first
from weft.runtime.links import is_settled, measure_links, network_of, settle
from weft.runtime.unfused import experts_far_first
from weft.schedule import Draft
from weft.schedule.expr import RANK, lookup
from weft.sim.between_hosts import HostNetwork, LinkFound, Measured

LONG_S = 50.0
PROMPT_S = 10.0


# -- operators


def every_way(group, operator):
    with on_two_hosts(group) as own:
        suite.both_ways(own, operator, ROWS[operator], 2)
        assert symm.communicator(own, "cpu").hosts == ("alpha", "alpha", "beta")


@pytest.mark.parametrize("operator", ROWS)
def test_every_operator_runs_forward_and_backward(pool: Pool, operator: str) -> None:
    pool.run(every_way, operator, ranks=3, timeout_s=120)


def differ(group, operator):
    with on_two_hosts(group) as own:
        suite.refused(own, operator, ROWS[operator].small)
        suite.one_rank_differs(own, operator, ROWS[operator].small)


@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "all_to_all_matmul"])
def test_bad_input_is_refused_and_a_rank_that_calls_otherwise_named(pool: Pool, operator: str) -> None:
    pool.run(differ, operator, ranks=2, timeout_s=60)


def warned(group):
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    tables = [weft.EmbeddingBagConfig(10, 4, f"t{i}", [f"f{i}"]) for i in range(group.size())]
    sharding = weft.place_tables(tables, group.size(), placement=range(group.size()))
    ids = torch.arange(4), torch.arange(5)
    os.environ["WEFT_QUIET"] = "0"
    said = {}
    try:
        with on_two_hosts(group) as own:
            for schedule in (None, "autotune", "heuristic", "scatter"):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    for _ in range(3):
                        y = weft.matmul_reduce_scatter(x, w, "sum", 0, own, schedule=schedule)
                        assert torch.equal(y, torch.full((4 // group.size(), 8), 8.0 * group.size()))
                        for transport in ("auto", "put", "direct"):
                            weft.embedding_all_to_all(
                                [torch.ones(10, 4)], ids, sharding, group=own, transport=transport
                            )
                said[str(schedule)] = [str(one.message) for one in caught if "torch" not in str(one.message)]
        return said
    finally:
        os.environ["WEFT_QUIET"] = "1"


def test_only_a_pinned_schedule_is_warned_of_once(pool: Pool) -> None:
    for said in pool.run(warned, ranks=2):
        assert [said.pop(name) for name in ("None", "autotune", "heuristic")] == [[], [], []]
        (text,) = said.pop("scatter")
        assert text.startswith(
            "schedule='scatter', matmul_reduce_scatter: serial runs instead, because the ranks of the group are on several "
            "hosts: lane "
        )
        assert text.endswith("memory of rank 1, on host beta, is not mapped on rank 0")


def pinned_apart(group):
    """Both ranks have called with both schedules before, so only the schedules of the last call differ. Both run serial."""
    x, w, schedules = torch.ones(4, 8), torch.ones(8, 8), ("scatter", "serial")
    with on_two_hosts(group) as own:
        for schedule in schedules:
            weft.matmul_reduce_scatter(x, w, "sum", 0, own, schedule=schedule)
        return error_of(lambda: weft.matmul_reduce_scatter(x, w, "sum", 0, own, schedule=schedules[group.rank()]))


def test_ranks_that_pin_different_schedules_disagree_although_serial_runs(pool: Pool) -> None:
    assert_errors(pool.run(pinned_apart, ranks=2), "DisagreementError", "schedule scatter", "schedule serial")


def measured_again(group):
    """Return how often serial is run to time it: on one host, on two hosts, and on two hosts again."""
    p = MatmulReduceScatter(group.size(), 16, 8, 24, "fp32")
    counts = []
    for place in (claimed("alpha"), on_two_hosts(group), on_two_hosts(group)):
        serial = mock.Mock()
        with place as own:
            comm = symm.communicator(own or own_group(group), "cpu")
            between_hosts.measure.measured(
                p, {"serial": named(p, "serial").build()}, comm, {}, None, serial, "single", 1
            )
        counts.append(serial.call_count)
    return counts


def test_times_of_one_host_are_not_used_between_hosts(pool: Pool) -> None:
    for one_host, two_hosts, again in pool.run(measured_again, ranks=2):
        assert one_host == two_hosts > 0
        assert again == 0


COLLECTIVES = "ficco_1d_collective[start=hetero,gemms=unfused,steps=2]"


def overlapped(group, operator, cases, pinned, times):
    """Make calls with new data. Return the lanes of each call. times: {end of a schedule's name: pretended measured
    time}.
    """
    native, asked = between_hosts.measure.measured, []

    def measured(p, schedules, *rest):
        asked.append(list(schedules))
        return {name: us for name in schedules for end, us in times.items() if name.endswith(end)}

    between_hosts.measure.measured = measured
    lanes = []
    try:
        with on_two_hosts(group) as own:
            for seed, case in enumerate(cases):
                call = suite.CALLS[operator](case, own, seed)
                timeline = weft.Timeline()
                call.check(own, call(own, schedule=pinned, timeline=timeline))
                lanes.append(sorted(timeline.lanes(group.rank())))
    finally:
        between_hosts.measure.measured = native
    return lanes, asked


CASES = {
    "all_gather_matmul": [Gathered((rows, 16), 6) for rows in (8, 8, 10, 64)],
    "matmul_reduce_scatter": [Gemm((rows, 16), 6) for rows in (24, 24, 30, 192)],
    "matmul_all_reduce": [
        Following((rows, 16), 6, bias=bias, eps=eps)
        for rows, bias, eps in ((24, True, 1e-6), (24, True, 1e-6), (31, True, 1e-6), (192, False, None))
    ],
}
GATHERS = tuple(f"{COLLECTIVES[:-2]}{steps}]" for steps in (1, 2, 4))
CHUNKED = tuple(f"collective[chunks={chunks}]" for chunks in (1, 2, 4))


@pytest.mark.parametrize("operator", CASES)
@pytest.mark.parametrize(
    ("pinned", "times", "wanted", "count"),
    [
        (True, {}, ["compute", "library"], 0),
        (False, {"serial": 5000.0, "1]": 4100.0, "2]": 3000.0, "4]": 4000.0}, ["compute", "library"], 2),
        (False, {"serial": 5000.0, "1]": 5000.0, "2]": 4800.0, "4]": 9000.0}, ["compute"], 2),
    ],
    ids=["pinned", "faster", "hardly faster"],
)
def test_collectives_of_chunks_overlap_where_they_are_clearly_faster(
    pool: Pool, operator: str, pinned: bool, times: dict[str, float], wanted: list[str], count: int
) -> None:
    """The choice also holds for similar sizes. The last size is not similar."""
    names = GATHERS if operator == "all_gather_matmul" else CHUNKED
    given = operator, CASES[operator], names[1] if pinned else None, times
    for lanes, asked in pool.run(overlapped, *given, ranks=3):
        assert lanes == [wanted] * 4
        assert asked == [["serial", *names]] * count


def sent(name, to):
    """Return a schedule of y = x of the rank whose `to` is this rank."""
    d = Draft(name, len(to))
    x, y, box = (
        d.buffer(one, 4, 4, "fp32", role) for one, role in zip("xyb", ("input", "output", "symmetric"), strict=True)
    )
    free, there = d.signals("free", 1), d.signals("there", 1)
    target, source = lookup(to, RANK), lookup([to.index(rank) for rank in range(len(to))], RANK)
    d.lane("out", "copy").wait(free, previous=True).copy(x.part(), box.part(at=target)).set(there, at=target)
    d.lane("compute").wait(there).copy(box.part(), y.part()).set(free, at=source)
    return d.schedule()


def own_schedules(group):
    """Run schedules of a user's own, on four ranks, two on each host."""
    rank, found = group.rank(), []
    with on_two_hosts(group) as own:
        for schedule in (sent("near", [1, 0, 3, 2]), sent("far", [1, 2, 3, 0]), sent("near", [1, 0, 3, 2])):
            given = {"x": torch.full((4, 4), float(rank)), "y": torch.empty(4, 4)}
            said = told(lambda schedule=schedule, given=given: weft.run_schedule(schedule, given, own))
            found.append(given["y"].unique().tolist() if said == "nothing" else said)
        buffer = symm.SymmetricBuffer((2,), torch.float32, group=own)
        found.append(told(lambda: buffer.peer((rank + 2) % 4)))
        buffer.peer(rank ^ 1).fill_(rank)
        symm.communicator(own, "cpu").all_gather(None, what="written")
        return found, buffer.local.tolist()


def test_memory_is_shared_within_a_host(pool: Pool) -> None:
    for rank, (found, local) in enumerate(pool.run(own_schedules, ranks=4)):
        near, far, again, peer = found
        assert near == again == [float(rank ^ 1)]
        assert far == (
            "ScheduleError: schedule far, lane out: copy x[0:+4, 0:+4] -> b@2[0:+4, 0:+4] by dma: memory of rank 2, on host beta, "
            "is not mapped on rank 1: write lane.send(src, dst) instead of the copy"
        )
        assert peer == (
            f"ValueError: rank {(rank + 2) % 4} is on another host, so its memory is not mapped: use only ranks of this host"
        )
        assert local == [float(rank ^ 1)] * 2


def trains(group, kind, placement):
    """Train for three steps on two hosts and on one host. Return the tables, which must have the same bits."""
    found = []
    for far in (True, False):
        with on_two_hosts(group) if far else claimed("alpha"):
            own = dist.new_group(range(group.size()))
            with claimed("beta" if far and group.rank() else "alpha"):
                torch.manual_seed(5)
                tables = [weft.EmbeddingBagConfig(50, 8, f"t{i}", [f"f{i}"]) for i in range(3)]
                module = kind(tables, group=own, placement=placement, optimizer=weft.RowwiseAdagrad(lr=0.1))
                generator = torch.Generator().manual_seed(group.rank())
                for _ in range(3):
                    lengths = torch.randint(0, 4, (3 * 6,), generator=generator)
                    ids = torch.randint(50, (int(lengths.sum()),), generator=generator)
                    features = weft.KeyedJaggedTensor(["f0", "f1", "f2"], ids, lengths=lengths)
                    pooled = module(features)
                    rows = [one.values() for one in pooled.values()] if isinstance(pooled, dict) else [pooled.values()]
                    torch.cat([one.flatten() for one in rows]).square().sum().backward()
                found.append({name: t.detach().clone() for name, t in module.state_dict().items()})
                assert symm.communicator(own, "cpu").all_mapped != far
    return all(torch.equal(found[0][name], found[1][name]) for name in found[1]), len(found[0])


PARTS = [RowWise(), ColumnWise((0, 1)), DataParallel()]


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        (ShardedEmbeddingBagCollection, None),
        (ShardedEmbeddingBagCollection, PARTS),
        (ShardedEmbeddingCollection, [RowWise(), 0, 1]),
    ],
    ids=["whole", "parts", "unpooled"],
)
def test_embeddings_train_to_the_bits_of_one_host(pool: Pool, kind: Any, placement: Any) -> None:
    for same, count in pool.run(trains, kind, placement, ranks=2):
        assert same
        assert count


# -- faults


def lose(group, fault, where):
    with on_two_hosts(group) as own:
        comm, last = symm.communicator(own, "cpu"), group.size() - 1
        x, w = torch.ones(group.size(), 4), torch.ones(4, 4)
        weft.matmul_reduce_scatter(x, w, "sum", 0, own)
        lost = []
        weft.on_failure(own, lost.append)
        pids = comm.all_gather(os.getpid(), what="pids")
        if group.rank() == last and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank() == last and fault == "stop":
            time.sleep(1.5)
            return None
        if where == "outside":
            until = time.monotonic() + PROMPT_S
            while not lost and time.monotonic() < until:
                time.sleep(0.01)
            return pids[last], type(lost[0]).__name__, str(lost[0]), lost[0].rank
        deadline_s = LONG_S if fault == "kill" else 0.5
        kind, text = error_of(lambda: weft.matmul_reduce_scatter(x, w, "sum", 0, own, deadline_s=deadline_s))
        return pids[last], kind, text, None


@pytest.mark.parametrize("where", ["in a call", "outside"])
def test_a_rank_killed_on_another_host_is_named_with_its_host(where: str) -> None:
    with Pool(3) as pool:
        found = pool.run(lose, "kill", where, return_exceptions=True, timeout_s=40)
    for pid, kind, text, _ in found[:2]:
        assert kind == "PeerLostError"
        assert f"rank 2 (pid {pid} on host beta) died: its connection ended without a goodbye" in text


def test_a_rank_that_does_not_come_from_another_host_is_named_with_it(pool: Pool) -> None:
    found = pool.run(lose, "stop", "in a call", ranks=3, timeout_s=40)
    assert_deadline(
        [one[1:3] for one in found[:2]], r"rank [01] waited 0.5 s for .* from .*rank 2 \(pid \d+ on host beta\)"
    )


# -- links


def links(group):
    with claimed("abc"[group.rank()]):
        own = own_group(group)
        comm = symm.communicator(own, "cpu")
    found = measure_links(comm)
    dist.destroy_process_group(own)
    assert found == found.checked()[0]
    return found.hosts, [link.hosts for link in found.links], repr(found)


def test_links_between_hosts_are_measured_on_every_rank(pool: Pool) -> None:
    found = pool.run(links, ranks=3, timeout_s=30)
    assert found[0] == found[1] == found[2]  # equal and plausible numbers on all ranks
    hosts, pairs, _ = found[0]
    assert hosts == ("a", "b", "c")
    assert {frozenset(pair) for pair in pairs} == {frozenset(pair) for pair in ("ab", "bc", "ac")}


def planned(group, folder, measured, off):
    """Make a call on two hosts. Return the measured network, and how often this rank measured it. Every rank measures
    different numbers.
    """
    asked = []

    def measure(comm, **_):
        asked.append(comm.rank)
        return replace(measured, hosts=comm.hosts, copy_bytes_per_us=1000.0 + comm.rank)

    where = {"WEFT_CACHE_DIR": str(folder / ("first" if group.rank() == 0 else "other"))}
    found = []
    with mock.patch.object(know_links, "measure_links", measure), mock.patch.dict(os.environ, where):
        for _ in range(2):
            with (
                on_two_hosts(group, measures_links=group.rank() not in off) as own,
                warnings.catch_warnings(record=True) as said,
            ):
                warnings.simplefilter("always")
                weft.matmul_reduce_scatter(torch.ones(4, 8), torch.ones(8, 8), "sum", 0, own, schedule="serial")
                comm = symm.communicator(own, "cpu")
                assert not is_settled(comm)  # a pinned schedule needs no links
                for _ in range(2):
                    weft.matmul_reduce_scatter(torch.ones(4, 8), torch.ones(8, 8), "sum", 0, own)
                found.append((network_of(comm), [str(one.message) for one in said if "links" in str(one.message)]))
                assert is_settled(comm)
    return found, len(asked)


LINK = LinkFound(("alpha", "beta"), 120.0, 400.0)


@pytest.mark.parametrize(
    ("links", "off", "known", "times"),
    [
        ((LINK,), (), True, 1),
        ((LINK,), (1,), False, 0),
        ((replace(LINK, bytes_per_us=0.0),), (), False, 2),
    ],
    ids=["measured once", "off on one rank", "implausible"],
)
def test_all_ranks_plan_with_the_first_ranks_links(
    pool: Pool, tmp_path: Path, links: tuple[LinkFound, ...], off: tuple[int, ...], known: bool, times: int
) -> None:
    measured = Measured((), links, 100.0, 1000.0, 500.0)
    found = pool.run(planned, tmp_path, measured, off, ranks=2, timeout_s=60)
    wanted = HostNetwork(("alpha", "beta"), 120.0, 400.0, 100.0, 1000.0, 500.0) if known else None
    for rank, (groups, asked) in enumerate(found):
        assert [network for network, _ in groups] == [wanted, wanted]
        assert asked == times  # the second group reads the first rank's file
        said = [text for _, texts in groups for text in texts]
        assert len(said) == (rank == 0 and not known and not off)
        assert all(
            "the link alpha - beta is ignored: a rate of 0 MB/s is outside 0.01 to 1e+06" in text for text in said
        )
    assert len(list(tmp_path.glob("first/links-*.json"))) == known
    assert not list(tmp_path.glob("other/links-*.json"))


def choices(group, network):
    """Return, for these links: whether schedules are timed, whether far first is tried, and the number of pieces."""
    timed = []

    def measured(p, schedules, *rest):
        timed.append(p)
        return dict.fromkeys(schedules, 1.0)

    def far_first(kind, method):
        return mock.patch.object(kind, method, autospec=True, side_effect=getattr(kind, method))

    tables = [weft.EmbeddingBagConfig(10, 4, f"t{i}", [f"f{i}"]) for i in range(group.size())]
    sharding = weft.place_tables(tables, group.size(), placement=range(group.size()))
    x, w, ids = torch.ones(4, 8), torch.ones(8, 8), (torch.arange(4), torch.arange(5))
    with (
        on_two_hosts(group) as own,
        mock.patch.object(between_hosts.measure, "measured", measured),
        far_first(embedding_far_first.FarFirst, "run") as pooled,
        far_first(experts_far_first.FarFirst, "dispatch") as dispatched,
    ):  # fmt: skip
        settle(symm.communicator(own, "cpu"), network)
        for _ in range(5):  # the second block of three calls tries far first; the first call of experts is in no block
            weft.matmul_reduce_scatter(x, w, "sum", 0, own)
            weft.embedding_all_to_all([torch.ones(10, 4)], ids, sharding, group=own)
            weft.all_to_all_matmul(x, w[None], torch.tensor([2, 2]), group=own)
        plan_of_tables = EmbeddingPlan(sharding, EmbeddingOptions())
        calls = embedding_far_first.FarFirst(plan_of_tables, None, symm.communicator(own, "cpu"))
        return bool(timed), sum(one.called for one in (pooled, dispatched)), calls._pieces((10_000, 10_000))


@pytest.mark.parametrize(
    ("network", "wanted"),
    [
        (HostNetwork(("alpha", "beta"), 1e4, 10.0, 1e4, 1e4, 1e4), (False, 0, 2)),
        (HostNetwork(("alpha", "beta"), 1e-2, 10.0, 1e-2, 1e4, 1e4), (True, 2, 4)),
        (None, (True, 2, 2)),
    ],
    ids=["fast", "slow", "unknown"],
)
def test_fast_links_rule_out_what_cannot_gain(
    pool: Pool, network: HostNetwork | None, wanted: tuple[bool, int, int]
) -> None:
    assert pool.run(choices, network, ranks=2, timeout_s=60) == [wanted] * 2
