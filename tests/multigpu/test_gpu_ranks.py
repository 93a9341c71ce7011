"""Test embedding_all_to_all on two and on four GPUs: results, the bytes sent in slices, and late ranks.

The ranks compare their results with float64, and bit for bit with what one GPU computes alone. Output buffers are
filled with NaN before a call, so a rank that does not wait for its peers' stores returns NaN.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import gpu_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import FUSED, ORDERS, TRANSPORTS, assert_right
from support.reference import Problem, assert_close, problem, tables_of

import weft
from weft import symm
from weft.embedding import EmbeddingBagConfig, KeyedJaggedTensor
from weft.kernels.embedding_all_to_all import COPIES, FLAGS
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.runtime.cuda.embedding_kernel import Occupancy
from weft.symm.cuda import _slabs

pytestmark = ranks.MARKS
VARIANTS = [{"transport": t, "order": o, "slice_size": 3} for t in TRANSPORTS for o in ORDERS]
ONE_WIDTH = problem(2, (64,) * 6, 301, longest=70, rows=5000)
ANY_WIDTH = problem(2, (8, 3, 16, 1, 70, 300), 57, longest=40, weighted=True)
CASES = {
    "one width": ONE_WIDTH,
    "any width, weighted": ANY_WIDTH,
    "any width, adjacent": Problem(tables_of((8, 3, 16, 1, 70)), (0, 0, 0, 1, 1), (20, 11), longest=40),
    "fp16, int32": problem(2, (64,) * 5, 99, dtype=torch.float16, index_dtype=torch.int32, offset_dtype=torch.int32),
    "bf16, hashed": problem(2, (128,) * 4, 99, dtype=torch.bfloat16, hash=True),
    "uneven batches": Problem(tables_of((8, 12, 16)), (0, 1, 1), (0, 41)),
    "a rank without tables": Problem(tables_of((8, 12)), (1, 1), (21, 10)),
    "an empty batch": problem(2, (8, 4), 0),
}


def every_variant(group: dist.ProcessGroup, p: Problem, variants: list[dict[str, Any]]) -> None:
    """Make two calls with each variant of the options. Before the second call, output buffers are filled with NaN."""
    for options in variants:
        ranks.call(group, p, **options)
        ranks.poison(ranks.operator_of(group, p, **options))
        output = ranks.call(group, p, **options)
        ranks.synchronize(ranks.operator_of(group, p, **options))
        assert_right(group, p, output, str(options))


@pytest.mark.parametrize("name", CASES)
def test_every_transport_and_order_gives_the_bits_of_one_gpu(pair: Pool, name: str) -> None:
    pair.run(every_variant, CASES[name], VARIANTS, timeout_s=60)


def many_shapes(group: dist.ProcessGroup, problems: list[Problem], options: dict[str, Any]) -> None:
    """Make calls without synchronisation, each into buffers filled with NaN. Compare the results afterwards."""
    outputs = []
    for p in problems:
        ranks.poison(ranks.operator_of(group, p, **options))
        outputs.append(ranks.call(group, p, **options).clone())
    for number, (p, output) in enumerate(zip(problems, outputs, strict=True)):
        assert_right(group, p, output, f"{options}, call {number}")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ten_calls_in_a_row_with_other_shapes(pair: Pool, transport: str) -> None:
    sizes = ((7, 8), (1, 0), (0, 0), (300, 40), (33, 700), (0, 1), (700, 700), (2, 3), (64, 1), (1, 900))
    first = problem(2, (64,) * 6, 1, longest=20)
    problems = [replace(first, batch_sizes=size, seed=seed) for seed, size in enumerate(sizes)]
    pair.run(many_shapes, problems, {"transport": transport, "slice_size": 2}, timeout_s=60)


def many_operators(group: dist.ProcessGroup, problems: list[Problem]) -> None:
    """Call several executors of one group in turn. Results are held while other executors are called."""
    pairs = [(p, {"transport": transport, "outputs": 3}) for p in problems for transport in TRANSPORTS]
    held: list[torch.Tensor] = []
    for _ in range(3):
        held = []
        for p, options in pairs:
            ranks.poison(ranks.operator_of(group, p, **options))
            held.append(ranks.call(group, p, **options))
    for (p, options), output in zip(pairs, held, strict=True):
        assert_right(group, p, output, str(options))


def test_operators_take_turns(pair: Pool) -> None:
    pair.run(many_operators, [ONE_WIDTH, CASES["any width, adjacent"]], timeout_s=60)


def closed_in_turn(group: dist.ProcessGroup, transport: str) -> list[int]:
    """Close several modules in turn, each twice, with a call before each close. Return the free bytes of the slabs
    after each close.
    """
    ids, free = torch.arange(128, device=ranks.device()) % 20, []
    given = KeyedJaggedTensor(["f"], ids, lengths=torch.full((64,), 2, device=ids.device))
    for number in range(4):
        tables = [EmbeddingBagConfig(20, 256, name, ("f",)) for name in (f"t{number}", "other")]
        module = ShardedEmbeddingBagCollection(tables, group=group, placement=[0, 1], transport=transport)
        (bag,) = module.embedding_bags.values()
        for _ in range(2):
            own = module(given).values().split(256, dim=1)[group.rank()].clone()
            assert torch.equal(own, bag.weight[ids].view(64, 2, 256).sum(1))
            module.close()
            free.append(
                sum(
                    end - first for slab in _slabs[symm.communicator(group, ranks.device())] for first, end in slab.free
                )
            )
    return free


@pytest.mark.parametrize("transport", FUSED)
def test_a_closed_module_gives_its_memory_back(pair: Pool, transport: str) -> None:
    for free in pair.run(closed_in_turn, transport, timeout_s=60):
        assert len(set(free)) == 1


def counted(group: dist.ProcessGroup, p: Problem, slice_size: int) -> list[tuple[int, int]]:
    """Return (copies sent, flags set) for each of two calls."""
    operator = ranks.operator_of(group, p, transport="put", slice_size=slice_size)
    counts, before = [], (0, 0)
    for _ in range(2):
        assert_right(group, p, ranks.run(group, p, operator, count=True))
        ranks.synchronize(operator)
        after = int(operator.kernel.state[COPIES]), int(operator.kernel.state[FLAGS])
        counts.append((after[0] - before[0], after[1] - before[1]))
        before = after
    return counts


@pytest.mark.parametrize(("slice_size", "slices_of_rank"), [(1, (5, 3)), (2, (3, 2)), (32, (2, 2))])
def test_put_sends_one_copy_and_one_flag_per_slice(
    pair: Pool, slice_size: int, slices_of_rank: tuple[int, int]
) -> None:
    """Rank 0 has runs of four tables and of one table; rank 1 has runs of two tables and of one table."""
    p = Problem(tables_of((8, 3, 16, 1, 5, 4, 2, 9)), (0, 0, 0, 0, 1, 1, 0, 1), (40, 70))
    for rank, counts in enumerate(pair.run(counted, p, slice_size, timeout_s=60)):
        remote = 110 - p.batch_sizes[rank]
        assert counts == [(remote * slices_of_rank[rank],) * 2] * 2, f"rank {rank}"


def per_table(group: dist.ProcessGroup, p: Problem) -> None:
    operator = ranks.operator_of(group, p)
    for _ in range(2):
        ranks.poison(operator)
        assert_right(group, p, ranks.run(group, p, operator, launch_per_table=True))
    assert_right(group, p, ranks.call(group, p))


@pytest.mark.parametrize("p", [ONE_WIDTH, ANY_WIDTH], ids=["one width", "any width"])
def test_a_launch_per_table_gives_the_same(pair: Pool, p: Problem) -> None:
    pair.run(per_table, p, timeout_s=60)


def timed(group: dist.ProcessGroup, p: Problem, options: dict[str, Any]) -> weft.Timeline:
    timeline = weft.Timeline()
    assert_right(group, p, ranks.call(group, p, timeline=timeline, **options))
    return timeline


@pytest.mark.parametrize("transport", FUSED)
def test_timeline_has_the_bytes_that_leave(pair: Pool, transport: str) -> None:
    p = ONE_WIDTH
    for rank, timeline in enumerate(pair.run(timed, p, {"transport": transport}, timeout_s=60)):
        width = sum(slot.dim for slot in p.sharding.local_slots(rank))
        assert sum(span.bytes for span in timeline) == (301 - p.batch_sizes[rank]) * width * 4
        assert {span.lane for span in timeline} == {"remote", "local", "wait"} | {"put"} & {transport}
        for program in {span.program for span in timeline}:
            mine = [span for span in timeline if span.program == program]
            units = sorted((s.start_us, s.end_us) for s in mine if s.lane in ("remote", "local"))
            assert all(a[1] <= b[0] for a, b in pairwise(units))
            ends = {s.end_us: s.start_us for s in mine if s.lane == "remote"}
            assert all(ends[s.end_us] <= s.start_us <= s.end_us for s in mine if s.lane == "put")
            (wait,) = (s for s in mine if s.lane == "wait")
            assert all(end <= wait.start_us <= wait.end_us for _, end in units)


def limited(group: dist.ProcessGroup, p: Problem, options: dict[str, Any], occupancy: Occupancy) -> tuple[int, int]:
    """Run with an occupancy, check the result, and return (programs that ran, programs that fit)."""
    operator, timeline = ranks.operator_of(group, p, **options), weft.Timeline()
    ranks.poison(operator)
    assert_right(group, p, ranks.run(group, p, operator, occupancy=occupancy))
    assert_right(group, p, ranks.run(group, p, operator, occupancy=occupancy, timeline=timeline))
    found = next(
        of for key, of in operator.kernel.footprints.items() if key.timeline and key.registers == occupancy.registers
    )
    return sum(span.lane == "wait" for span in timeline), found.programs * found.multiprocessors


@pytest.mark.parametrize("transport", FUSED)
def test_an_occupancy_limits_the_programs(pair: Pool, transport: str) -> None:
    options = {"transport": transport, "slice_size": 3}
    one, two, fewest, few, more, usual = (
        pair.run(limited, ONE_WIDTH, options, Occupancy(*limits), timeout_s=60)[0]
        for limits in ((1,), (2,), (1, 64), (None, 168), (None, 64), ())
    )
    assert two[0] == min(2 * one[0], two[1])
    assert fewest[0] == one[0]
    assert usual[0] <= usual[1]
    assert few[1] < more[1]  # with fewer registers more programs fit


def straggle(group: dist.ProcessGroup, p: Problem, options: dict[str, Any], who: str) -> None:
    """Delay rank 1 on the CPU or on its stream, and check the results of both ranks."""
    ranks.call(group, p, **options)
    ranks.poison(ranks.operator_of(group, p, **options))
    if group.rank() == 1 and who == "cpu":
        time.sleep(0.5)
    elif group.rank() == 1:
        torch.cuda._sleep(1_000_000_000)  # clock cycles: about half a second
    output = ranks.call(group, p, **options)
    assert_right(group, p, output, who)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("who", ["cpu", "stream"])
def test_nobody_reads_before_a_straggler_has_stored(pair: Pool, transport: str, who: str) -> None:
    pair.run(straggle, ONE_WIDTH, {"transport": transport, "slice_size": 3}, who, timeout_s=30)


def of_own_samples(p: Problem, rank: int) -> KeyedJaggedTensor:
    """Return all features, for the samples of the rank."""
    rows, values, lengths = p.rows_of(rank), [], []
    for bags in p.bags.values():
        begin, end = (int(bags.lengths[:sample].sum()) for sample in (rows.start, rows.stop))
        values.append(bags.values[begin:end])
        lengths.append(bags.lengths[rows])
    joined = ranks.here([torch.cat(values), torch.cat(lengths)])
    return KeyedJaggedTensor(list(p.bags), joined[0], lengths=joined[1])


def in_a_module(group: dist.ProcessGroup, p: Problem) -> None:
    rank = group.rank()
    module = weft.nn.ShardedEmbeddingBagCollection(
        p.tables, group=group, placement=list(p.rank_of_table), transport="put"
    )
    assert module.device == ranks.device()
    module.load_full_weights({table.name: weight for table, weight in zip(p.tables, p.weights, strict=True)})
    for _ in range(2):
        output = module(of_own_samples(p, rank))
        assert_close(output.values().cpu(), p, p.rows_of(rank))
    assert list(output.keys()) == [slot.key for slot in p.sharding.slots]


def test_module_distributes_a_local_batch(pair: Pool) -> None:
    p = Problem(tables_of((8, 3, 16, 64)), (0, 1, 1, 0), (20, 33))
    pair.run(in_a_module, p, timeout_s=60)


# --- other numbers of hardware queues and ranks ---


def one_connection(group: dist.ProcessGroup, p: Problem) -> None:
    """Make calls while another stream is busy. The test lets all streams share one hardware queue."""
    aside = torch.cuda.Stream()
    for options in VARIANTS:
        with torch.cuda.stream(aside):
            torch.cuda._sleep(1_000_000)
        ranks.call(group, p, **options)
        ranks.poison(ranks.operator_of(group, p, **options))
        assert_right(group, p, ranks.call(group, p, **options), str(options))


def test_one_hardware_queue(pair: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with Pool(2, backend="nccl") as workers:
        workers.run(one_connection, ONE_WIDTH, timeout_s=60)


@pytest.fixture
def four(deadline: None) -> Iterator[Pool]:
    with Pool(4, backend="nccl") as workers:
        yield workers


def of_four(group: dist.ProcessGroup, problems: list[Problem], variants: list[dict[str, Any]]) -> None:
    for p in problems:
        every_variant(group, p, variants)


def test_four_ranks(four: Pool) -> None:
    tables = Problem(tables_of((8, 3, 16, 1, 70)), (3, 0, 0, 2, 1), (20, 0, 33, 7), longest=40)
    variants = [{"transport": "direct"}, {"transport": "put", "slice_size": 2}]
    four.run(of_four, [problem(4, (64,) * 8, 99, longest=20), tables], variants, timeout_s=90)
