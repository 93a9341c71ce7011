"""The builders `two_levels`, on ranks that pretend to be on several hosts.

1. Results against float64 in many calls in a row, with uneven shards, poisoned memory and late ranks; also in fp8. 2. Each byte
crosses the network once per host, scales of fp8 rows included. 3. `verify` for other numbers of ranks. 4. Ranks that hang or
die. 5. The choice between hosts. Functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter

import pytest
import torch
from pool import assert_deadline, wait_for_failure
from schedule_cpu_ranks import intercept
from support.on_ranks import BF16, F32, F64, NAMES, close, error_of, own_group, told
from support.pretended_hosts import claimed, on_two_hosts
from support.slow import slow

import weft
from weft import symm
from weft.builders import (
    AllGatherMatmul,
    MatmulAllReduce,
    MatmulReduceScatter,
    NotApplicableError,
    Problem,
    ScaledMatmulReduceScatter,
    candidates,
    named,
)
from weft.builders.problems.all_gather_matmul import Scaled
from weft.launch import Pool, RankDiedError
from weft.operator import between_hosts
from weft.runtime.cpu.memory import memory_of
from weft.runtime.cpu.schedule import CpuSchedule
from weft.schedule import ITEM_BYTES, Send, value
from weft.schedule.verify import verify

K, N = 16, 12
LONG_S = 30.0
F8 = torch.float8_e4m3fn
GRIDS = [(4, 2), (8, 2), (6, 3)]
UNEVEN = (5, 8, 0, 3, 7, 1, 4, 2)


def poison_memory(comm: symm.Communicator) -> None:
    """Fill the memory that ranks of a host share for schedules. All ranks of `comm` must make this call."""
    mapped = memory_of(comm).mapped
    if mapped is not None:
        comm.all_gather(None, what="before memory is poisoned")
        mapped.scratch.fill_(0xFF)
        comm.all_gather(None, what="memory is poisoned")


def operands(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def called(group, n_hosts, chunks):
    """Call all operators in turn, with new data in each call. Before a call, poison the memory that schedules share."""
    rank, world = group.rank(), group.size()
    name, seed = f"two_levels[hosts={n_hosts},chunks={chunks}]", 0
    with claimed(f"host {rank * n_hosts // world}"):
        own = own_group(group)
        comm = symm.communicator(own, "cpu")
        for dtype in (F32, BF16, F64):
            for rows in ([6] * world, UNEVEN[:world]):
                for _ in range(4):
                    seed += 1
                    if seed % world == rank:
                        time.sleep(0.01)
                    poison_memory(comm)
                    xs = [operands(r, (count, K), dtype, seed) for r, count in enumerate(rows)]
                    ws = [operands(90 + i, (K, N + i), dtype, seed) for i in range(2)]
                    timeline, x = weft.Timeline(), torch.cat(xs)
                    _, ys = weft.all_gather_matmul(
                        xs[rank], ws, 0, own, return_A=False, rows=list(rows), schedule=name, timeline=timeline
                    )
                    for w, y in zip(ws, ys, strict=True):
                        close(y, x.double() @ w.double(), x @ w)
                    assert {"rail", "near"} <= {span.lane for span in timeline.spans}
                wholes = [operands(r, (world * 4, K), dtype, seed) for r in range(world)]
                y = weft.matmul_reduce_scatter(wholes[rank], ws[0], "sum", 0, own, schedule=name)
                exact = sum(one.double() @ ws[0].double() for one in wholes).split(4)[rank]  # type: ignore[attr-defined]
                usual = torch.stack([(one @ ws[0]).split(4)[rank] for one in wholes]).sum(0)
                close(y, exact, usual)
            for m in (4 * world, 5 * world - 3, 3):  # with 3 rows, some ranks own no row
                seed += 1
                reduced(own, m, dtype, seed, name)


def reduced(own, m, dtype, seed, name):
    """Call matmul_all_reduce, without options and with all of them. All ranks must get the same bits."""
    rank, world = own.rank(), own.size()
    xs, w = [operands(r, (m, K), dtype, seed) for r in range(world)], operands(90, (K, N), dtype, seed)
    bias, residual, norm = (operands(91 + i, (*rows, N), dtype, seed) for i, rows in enumerate([(), (m,), ()]))
    comm = symm.communicator(own, "cpu")
    total, usual = sum(x.double() @ w.double() for x in xs), sum(x @ w for x in xs)  # gloo rounds each addition
    for more, exact, plain in (
        ({}, total, usual),
        ({"bias": bias, "residual": residual, "norm": norm}, total + bias.double() + residual.double(), usual + bias + residual),
    ):  # fmt: skip
        found = weft.matmul_all_reduce(xs[rank], w, own, schedule=name, **more)
        normed, y = found if more else (None, found)
        close(y, exact, plain)
        if normed is not None:
            wanted = torch.rms_norm(exact, [N], norm.double(), 1e-6)
            close(normed, wanted, torch.rms_norm(plain, [N], norm, 1e-6))
        bits = [one.contiguous().view(torch.uint8).numpy().tobytes() for one in (y, y if normed is None else normed)]
        assert len(set(comm.all_gather(tuple(bits), what="results"))) == 1


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("ranks", "n_hosts"), GRIDS)
def test_results_equal_those_of_one_machine(pool: Pool, ranks: int, n_hosts: int, chunks: int) -> None:
    pool.run(called, n_hosts, chunks, ranks=ranks, timeout_s=120)


def scaled(group, n_hosts, chunks):
    """Call the fp8 operators in turn, with new data and scales in each call. Before a call, poison the memory that schedules
    share.
    """
    rank, world, n = group.rank(), group.size(), 16
    name, seed = f"two_levels[hosts={n_hosts},chunks={chunks}]", 0

    def scales(*shape, seed):
        return 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(seed))

    def multiplied(x, w, x_scale, w_scale, bias, wide):
        y = (x.to(wide) * x_scale.to(wide)) @ (w.to(wide) * w_scale.to(wide))
        return y if bias is None else y + bias.to(wide)

    with claimed(f"host {rank * n_hosts // world}"):
        own = own_group(group)
        comm = symm.communicator(own, "cpu")
        for by_row in (True, False):
            for bias in (None, operands(95, (n,), BF16, 1)):
                for rows in ([6] * world, [max(2, count) for count in UNEVEN[:world]]):
                    seed += 1
                    if seed % world == rank:
                        time.sleep(0.01)
                    poison_memory(comm)
                    xs = [operands(r, (count, K), F8, seed) for r, count in enumerate(rows)]
                    w = operands(90, (n, K), F8, seed).t()
                    w_scale = scales(1, n, seed=seed) if by_row else scales(seed=seed)
                    x_scales = [
                        scales(len(x), 1, seed=100 * seed + r) if by_row else scales(seed=1) for r, x in enumerate(xs)
                    ]
                    _, (y,) = weft.all_gather_scaled_matmul(
                        xs[rank], [w], x_scales[rank], [w_scale], 0, own, [bias], [None], [BF16], [False], return_A=False,
                        rows=list(rows), schedule=name,
                    )  # fmt: skip
                    whole = torch.cat(xs), w, torch.cat(x_scales) if by_row else x_scales[0], w_scale, bias
                    close(y, multiplied(*whole, F64), multiplied(*whole, F32).to(BF16))
                wholes = [operands(r, (world * 4, K), F8, seed) for r in range(world)]
                every = [scales(world * 4, 1, seed=r) if by_row else scales(seed=r) for r in range(world)]
                y = weft.scaled_matmul_reduce_scatter(
                    wholes[rank],
                    w,
                    every[rank],
                    w_scale,
                    "sum",
                    0,
                    0,
                    own,
                    [world * 4, n],
                    bias,
                    None,
                    BF16,
                    schedule=name,
                )
                parts = [
                    [
                        multiplied(x, w, scale, w_scale, bias, wide).split(4)[rank]
                        for x, scale in zip(wholes, every, strict=True)
                    ]
                    for wide in (F64, F32)
                ]
                close(y, sum(parts[0]), sum(part.to(BF16) for part in parts[1]))  # gloo rounds each addition


@pytest.mark.parametrize("chunks", [1, slow(3)])
@pytest.mark.parametrize(("ranks", "n_hosts"), [(4, 2), slow(6, 3)])
def test_fp8_results_equal_those_of_one_machine(pool: Pool, ranks: int, n_hosts: int, chunks: int) -> None:
    pool.run(scaled, n_hosts, chunks, ranks=ranks, timeout_s=120)


def crossing(schedule, n_hosts):
    """Return the bytes that each host sends to other hosts, and check that sends leave the host."""
    per_host, found = schedule.world_size // n_hosts, Counter()
    for rank in range(schedule.world_size):
        for step in (step for lane in schedule.of_rank(rank) for step in lane.steps if isinstance(step, Send)):
            host, to = rank // per_host, value(step.dst.at) // per_host
            assert host != to
            size = value(step.src.rows) * value(step.src.cols) * ITEM_BYTES[schedule.buffer(step.src.buffer).dtype]
            found[host, to] += size
    return found


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "n_hosts"), [*GRIDS, (16, 2), (12, 4)])
def test_each_byte_crosses_once_per_host(ranks: int, n_hosts: int, chunks: int) -> None:
    name, per_host = f"two_levels[hosts={n_hosts},chunks={chunks}]", ranks // n_hosts
    rows = tuple(4 + rank for rank in range(ranks))
    gather = named(AllGatherMatmul(ranks, rows, (N, 3), K, "fp32"), name).build()
    scatter = named(MatmulReduceScatter(ranks, 5 * ranks, N, K, "bf16"), name).build()
    reduce = named(MatmulAllReduce(ranks, 4 * ranks, N, K, "bf16", bias=True, eps=1e-6), name).build()
    by_row = Scaled("row", ("bf16",), (True,), (False,))
    fp8 = named(AllGatherMatmul(ranks, rows, (16,), K, "fp8", scaled=by_row), name).build()
    scaled_scatter = named(ScaledMatmulReduceScatter(ranks, 5 * ranks, 16, K, "bf16", "row", True, False), name).build()
    pairs = [(host, to) for host in range(n_hosts) for to in range(n_hosts) if host != to]
    shards = {pair: sum(rows[pair[0] * per_host : (pair[0] + 1) * per_host]) * K * 4 for pair in pairs}
    assert crossing(gather, n_hosts) == shards
    of_row = K + 4  # bytes, with the scale
    assert crossing(fp8, n_hosts) == {pair: count // (4 * K) * of_row for pair, count in shards.items()}
    assert crossing(scaled_scatter, n_hosts) == dict.fromkeys(pairs, per_host * 5 * 16 * 2)
    assert crossing(scatter, n_hosts) == dict.fromkeys(pairs, per_host * 5 * N * 2)
    # A host sends its sums of the other hosts' pieces, and the result of its own piece.
    assert crossing(reduce, n_hosts) == dict.fromkeys(pairs, 2 * 4 * ranks // n_hosts * N * 2)
    if ranks <= 12:
        for schedule in (gather, scatter, reduce, fp8, scaled_scatter):
            verify(schedule)


@pytest.mark.parametrize(
    ("p", "hosts", "text"),
    [
        (AllGatherMatmul.even(8, 4, 4, 4), 3, "4 ranks on 3 hosts: this schedule needs the same number of ranks on each host"),
        (MatmulReduceScatter(4, 8, 4, 4, "bf16"), 4, "4 ranks on 4 hosts: this schedule needs"),
        (MatmulAllReduce(6, 3, 4, 4, "bf16"), 2, "rows of a product (3) cannot be cut into 4 pieces"),
        (AllGatherMatmul(4, (2,) * 4, (4,), 4, "bf16", return_gathered=True), 2, "use return_A=False"),
    ],
)  # fmt: skip
def test_what_two_levels_do_not_support(p: Problem, hosts: int, text: str) -> None:
    with pytest.raises(NotApplicableError, match=re.escape(text)):
        named(p, f"two_levels[hosts={hosts},chunks=4]").build()


BAD_RANK = 3


def stuck(group, op, step, doing):
    """Run once. In the second run, let a rank of the other host hang or die at a step."""
    rank, world = group.rank(), group.size()
    with claimed(f"node{2 * rank // world}"):
        comm = symm.communicator(own_group(group), "cpu")
    name = "two_levels[hosts=2,chunks=2]"
    m, dtype = 8 * world, NAMES[F32]
    p, shapes = {
        "all_gather_matmul": (
            AllGatherMatmul.even(m, N, K, world, dtype), {"x_shard": (8, K), "w0": (K, N), "y0": (m, N)}
        ),
        "matmul_reduce_scatter": (
            MatmulReduceScatter(world, m, N, K, dtype), {"x": (m, K), "w": (K, N), "y": (8, N)}
        ),
        "matmul_all_reduce": (MatmulAllReduce(world, m, N, K, dtype), {"x": (m, K), "w": (K, N), "y": (m, N)}),
    }[op]  # fmt: skip
    executor, tensors = (
        CpuSchedule(named(p, name).build(), comm),
        {key: torch.ones(shape) for key, shape in shapes.items()},
    )
    executor.run(tensors)

    def fail() -> None:
        if doing == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_failure(comm)

    if rank == BAD_RANK:
        intercept(executor, step, before=fail)
    started = time.monotonic()
    error = told(lambda: executor.run(tensors, deadline_s=2.0 if doing == "hang" else LONG_S)).split(": ", 1)
    took_s, again = time.monotonic() - started, error_of(lambda: executor.run(tensors))
    executor.close()
    return error, took_s, again


SENDS = [
    ("all_gather_matmul", "send x_shard -> box@1"),
    ("matmul_reduce_scatter", "send sums -> arrived@1"),
    ("matmul_all_reduce", "send total -> arrived@1"),
]


@pytest.mark.parametrize(("op", "step"), SENDS)
def test_a_rank_that_does_not_send_is_named(pool: Pool, op: str, step: str) -> None:
    """Rank 1 waits for a message of rank 3, and may be told first by a rank that waits for rank 1."""
    answers = pool.run(stuck, op, step, "hang", ranks=4)
    errors = [error for rank, (error, _, _) in enumerate(answers) if rank != BAD_RANK and error != ["nothing"]]
    assert_deadline(errors, r"rank \d waited 2 s for .* from rank [013] ")
    assert (
        any(re.search(r"from rank 3 \(pid \d+ on host node1\)", text) for _, text in errors) or "rank 1" in errors[0][1]
    )
    assert all(took_s < LONG_S / 2 for _, took_s, _ in answers)


@pytest.mark.parametrize(("op", "step"), SENDS)
def test_a_rank_that_dies(op: str, step: str) -> None:
    with Pool(4) as pool:
        answers = pool.run(stuck, op, step, "die", return_exceptions=True, timeout_s=60)
    assert isinstance(answers[BAD_RANK], RankDiedError)
    for rank in range(3):
        error, took_s, (kind, text) = answers[rank]
        assert took_s < LONG_S / 2
        assert error == ["nothing"] or error[0] in ("PeerLostError", "PoisonedGroupError")
        assert kind in ("PeerLostError", "PoisonedGroupError")
        assert re.search(r"rank 3 \(pid \d+ on host node1\) died", text), text


def chosen(group):
    """Return the schedules that the first call of each operator times."""
    rank, world = group.rank(), group.size()
    native, asked = between_hosts.measure.measured, []

    def measured(p, schedules, *given):
        asked.append(list(schedules))
        return {name: 5000.0 if name == "serial" else 1000.0 + len(asked) for name in schedules}

    between_hosts.measure.measured = measured
    try:
        with on_two_hosts(group) as own:
            for rows in ([4] * world, list(range(1, 1 + world))):
                x, w = torch.ones(rows[rank], K), torch.ones(K, N)
                _, (y,) = weft.all_gather_matmul(x, [w], 0, own, return_A=False, rows=list(rows))
                assert torch.equal(y, torch.full((sum(rows), N), float(K)))
            y = weft.matmul_reduce_scatter(torch.ones(4 * world, K), w, "sum", 0, own)
            assert torch.equal(y, torch.full((4, N), float(world * K)))
            y = weft.matmul_all_reduce(torch.ones(4 * world, K), w, own)
            assert torch.equal(y, torch.full((4 * world, N), float(world * K)))
    finally:
        between_hosts.measure.measured = native
    return asked


def test_ranks_in_rails_time_the_schedules_in_two_levels(pool: Pool) -> None:
    names = [f"two_levels[hosts=2,chunks={chunks}]" for chunks in (1, 2, 4)]
    for asked in pool.run(chosen, ranks=4):
        assert asked == [["serial", *names]] * 4


def test_schedules_for_several_hosts_are_listed_only_by_name() -> None:
    """So no GPU and no group on one host tries them."""
    problems = (
        AllGatherMatmul.even(8, 4, 4, 4),
        MatmulReduceScatter(4, 8, 4, 4, "bf16"),
        MatmulAllReduce(4, 8, 4, 4, "bf16"),
        AllGatherMatmul.sized(8, 16, 16, 4, "fp8"),
        ScaledMatmulReduceScatter.sized(8, 16, 16, 4, "fp8"),
    )
    for p in problems:
        assert not [one.name for one in candidates(p) if one.builder == "two_levels"]
        assert [one.name for one in candidates(p, ("two_levels",))] == list(p.between_hosts(2))
