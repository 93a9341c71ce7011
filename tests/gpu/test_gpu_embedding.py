"""Test the Triton kernel on one GPU, by `embedding_pool` and by `embedding_all_to_all` in a group of one rank.

The cheapest tests come first: results against float64 for kinds of input, widths and dtypes. Then come bad indices,
held results, repeated calls, graphs, and the timeline. Each case compiles one or two kernels, so cases combine several
options.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.graphs import capture
from support.reference import Problem, assert_close, problem, tables_of

import weft
from weft import symm
from weft.embedding import EmbeddingBagConfig
from weft.embedding.options import EmbeddingOptions
from weft.embedding.plan import plan_of
from weft.errors import PoisonedGroupError, RefusedError, WeftError
from weft.runtime.embedding import executor_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here"),
]
DEVICE = torch.device("cuda", 0)
NAN_BYTE = 0xFF  # an element whose bytes all have this value is a NaN in fp32, fp16 and bf16


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    store = dist.FileStore(str(Path(tmp_path_factory.mktemp("store"), "store")), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def there(tensors: Any) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def pooled(p: Problem, **options: Any) -> torch.Tensor:
    return weft.embedding_pool(there(p.weights), tuple(there(p.whole())), p.tables, hash=p.hash, **options)


def exchanged(group: dist.ProcessGroup, p: Problem, features: Any = None, **options: Any) -> torch.Tensor:
    features = tuple(there(p.tupled(0))) if features is None else features
    weights = there(p.local_weights(0))
    sizes = p.batch_sizes
    return weft.embedding_all_to_all(
        weights, features, p.sharding, group=group, batch_sizes=sizes, hash=p.hash, **options
    )


def operator_of(group: dist.ProcessGroup, p: Problem, **options: Any) -> Any:
    """Return the executor that `exchanged` with these options uses, for tests of its internals."""
    plan = plan_of(p.sharding, EmbeddingOptions(**{"transport": "direct", "hash": p.hash} | options))
    return executor_of(plan, symm.communicator(group, DEVICE))


def poison(operator: Any) -> None:
    """Fill all unused output buffers with NaN."""
    pool = operator.outputs
    if pool.slot_bytes:
        memory = pool._region.tensor(operator.comm.rank, (pool.count, pool.slot_bytes), torch.uint8)
        for slot in pool._free:
            memory[slot].fill_(NAN_BYTE)


SHARED = (
    EmbeddingBagConfig(50, 8, "users", ("u", "friend")),
    EmbeddingBagConfig(9, 16, "pairs", ("i", "u"), "mean"),
)
# tables_of gives every second table mean pooling.
CASES = {
    "one width": problem(1, (64,) * 6, 300, longest=70, rows=5000),
    "one width, fp16": problem(1, (64,) * 6, 300, longest=70, rows=5000, dtype=torch.float16),
    "one width, bf16": problem(1, (64,) * 6, 300, longest=70, rows=5000, dtype=torch.bfloat16),
    "128 wide, int32": problem(1, (128,) * 3, 64, index_dtype=torch.int32, offset_dtype=torch.int32),
    "256 wide, int32 offsets, weighted": problem(1, (256,) * 3, 64, offset_dtype=torch.int32, weighted=True),
    "any width, weighted": problem(1, (8, 3, 16, 1, 70, 300), 50, longest=40, weighted=True),
    "any width, fp16, int32 ids": problem(1, (8, 3, 16, 1, 70, 513), 50, dtype=torch.float16, index_dtype=torch.int32),
    "any width, bf16, weighted": problem(1, (8, 3, 16, 1), 50, dtype=torch.bfloat16, weighted=True),
    "one column": problem(1, (1, 1), 33),
    "hashed": problem(1, (8, 4, 64), 50, hash=True),
    "hashed int32": problem(1, (8, 4, 64), 50, hash=True, index_dtype=torch.int32),
    "shared features and tables": Problem(SHARED, (0, 0), (23,), weighted=True),
    "empty bags": problem(1, (8, 4), 50, longest=0),
    "one sample": problem(1, (8, 4), 1),
    "an empty batch": problem(1, (8, 4), 0),
    "many samples": problem(1, (16,) * 4, 20_000, longest=3),
}


@pytest.mark.parametrize("dims", [(16,) * 13, (64,) * 40, (8, 3, 16, 1, 70)], ids=["narrow", "many", "any width"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_bags_of_one_id_have_the_bits_of_other_bags(
    dims: tuple[int, ...], weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.runtime.cuda.embedding_kernel import EmbeddingKernel

    tables, batch = tables_of(dims), 500
    lengths = torch.ones(len(dims) * batch, dtype=torch.int64)
    lengths[[7, *range(20, 60)]] = 0
    lengths[9], lengths[61] = 2, 41  # as many ids as bags
    generator = torch.Generator().manual_seed(5)
    rows = min(table.num_embeddings for table in tables)
    values = torch.randint(0, rows, (len(lengths),), generator=generator)
    psw = [torch.randn(len(values), generator=generator)] if weighted else []
    features = tuple(there([values, torch.cat([lengths[:1] * 0, lengths.cumsum(0)]), *psw]))
    weights = there([torch.randn(t.num_embeddings, t.embedding_dim, generator=generator) for t in tables])
    single = weft.embedding_pool(weights, features, tables)
    monkeypatch.setattr(EmbeddingKernel, "_pools_single_ids", lambda kernel, jagged: False)
    assert torch.equal(single.view(torch.int32), weft.embedding_pool(weights, features, tables).view(torch.int32))


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(group: dist.ProcessGroup, name: str) -> None:
    p = CASES[name]
    alone = pooled(p)
    assert_close(alone.cpu(), p)
    for order in ("remote_first", "natural"):
        assert torch.equal(exchanged(group, p, order=order), alone), f"{order}: not the bits of embedding_pool"
    for transport in ("put", "serial"):
        assert torch.equal(exchanged(group, p, transport=transport), alone), (
            f"{transport}: not the bits of embedding_pool"
        )


def test_values_and_offsets_may_begin_anywhere(group: dist.ProcessGroup) -> None:
    """Call with views whose first element is not at a multiple of 8 or 16 bytes."""
    for index_dtype in (torch.int32, torch.int64):
        p = problem(1, (64, 64), 40, longest=50, weighted=True, index_dtype=index_dtype, offset_dtype=index_dtype)
        shifted = []
        for tensor in p.tupled(0):
            room = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)
            room[1:] = tensor.to(DEVICE)
            shifted.append(room[1:])
        assert torch.equal(exchanged(group, p, tuple(shifted)), exchanged(group, p))


# --- indices out of range ---


def test_a_bad_index_is_a_zero_row_and_the_next_call_warns(group: dist.ProcessGroup) -> None:
    p = problem(1, (4, 6), 13, weighted=True, seed=3)
    values, offsets, weights = p.tupled(0)
    spoiled = values.clone()
    for at, value in {0: -1, 2: 30, 4: 2**62}.items():
        spoiled[at] = value
        p.bags["f0"].weights[at] = 0  # has the same effect as a zero row
    output = exchanged(group, p, tuple(there((spoiled, offsets, weights))))
    assert_close(output.cpu(), p)
    torch.cuda.synchronize()
    first = next(sample for sample, length in enumerate(p.bags["f0"].lengths.tolist()) if length)
    where = (
        rf"rank 0: 3 indices .* zero rows; the first: table 't0', feature 'f0', sample {first} .*position 0: index -1 "
    )
    with pytest.warns(UserWarning, match=where):
        exchanged(group, p)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.cuda.synchronize()
        operator_of(group, p).check()
        exchanged(group, p)


def test_trusted_indices_do_not_warn(group: dist.ProcessGroup) -> None:
    p = problem(1, (4, 6), 13)
    assert_close(exchanged(group, p, bounds_check="none").cpu(), p)
    assert_close(pooled(p, bounds_check="none").cpu(), p)


def test_ignored_indices_read_zeros_and_do_not_warn(group: dist.ProcessGroup) -> None:
    p = problem(1, (4, 6), 13, weighted=True, seed=3)
    values, offsets, weights = p.tupled(0)
    spoiled = values.clone()
    for at, value in {0: -1, 2: 30, 4: 2**62}.items():
        spoiled[at] = value
        p.bags["f0"].weights[at] = 0  # has the same effect as a zero row
    given = tuple(there((spoiled, offsets, weights)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):  # later calls take the fast path
            assert_close(exchanged(group, p, given, bounds_check="ignore").cpu(), p)
            torch.cuda.synchronize()


def test_fatal_bounds_check_refuses(group: dist.ProcessGroup) -> None:
    p = problem(1, (4, 6), 13)
    assert_close(exchanged(group, p, bounds_check="fatal").cpu(), p)
    values, offsets = p.tupled(0)
    values[3] = 30
    spoiled = tuple(there((values, offsets)))
    said = r"'t0'.*'f0'.*index 30 is not in \[0, 30\)"
    with pytest.raises(ValueError, match=said):
        weft.embedding_pool(there(p.weights), spoiled, p.tables, bounds_check="fatal")
    alone = dist.new_group([0])
    with pytest.raises(RefusedError, match=said):
        exchanged(alone, p, spoiled, bounds_check="fatal")
    with pytest.raises(PoisonedGroupError, match="make a new process group"):
        exchanged(alone, p, bounds_check="fatal")


def test_offsets_that_leave_the_values_are_cut_and_the_next_call_warns(group: dist.ProcessGroup) -> None:
    p = problem(1, (8, 12), 13)
    values, offsets = there(p.tupled(0))
    offsets[-1] = 2**40
    output = exchanged(group, p, (values, offsets))
    torch.cuda.synchronize()
    assert_close(output.cpu(), p)
    with pytest.warns(UserWarning, match="1 bag had offsets that descend or leave the values"):
        exchanged(group, p)


# --- held results and repeated calls ---


@pytest.mark.parametrize("outputs", [2, 3])
def test_held_results_stay_as_they_are(group: dist.ProcessGroup, outputs: int) -> None:
    """Hold results until one buffer is left; further results are then copies. A dropped result returns its buffer."""
    problems = [problem(1, (8, 3, 16), 11, seed=seed) for seed in range(5)]
    operator = operator_of(group, problems[0], outputs=outputs)
    held = []
    for p in problems:
        poison(operator)
        held.append(exchanged(group, p, outputs=outputs))
    poison(operator)
    for p, output in zip(problems, held, strict=True):
        assert_close(output.cpu(), p)
    assert operator.outputs.copied == len(problems) - (outputs - 1)
    assert len(operator.outputs._free) == 1
    held.clear()
    del output
    assert len(operator.outputs._free) == outputs


def test_one_buffer_cannot_be_held(group: dist.ProcessGroup) -> None:
    p = problem(1, (8, 4), 9)
    held = exchanged(group, p, outputs=1)
    with pytest.raises(WeftError, match=r"outputs=1.*outputs=2"):
        exchanged(group, p, outputs=1)
    assert_close(held.cpu(), p)
    del held
    assert_close(exchanged(group, p, outputs=1).cpu(), p)


def test_calls_in_a_row_with_other_shapes(group: dist.ProcessGroup) -> None:
    """Call without synchronisation in between, each time into buffers filled with NaN. Some buffers have grown."""
    sizes = (700, 3, 0, 64, 1500, 1, 700, 31, 2, 1400)
    first = problem(1, (64,) * 3, 1, longest=9)
    problems = [replace(first, batch_sizes=(size,), seed=seed) for seed, size in enumerate(sizes)]
    outputs = []
    for p in problems:
        poison(operator_of(group, p))
        outputs.append(exchanged(group, p).clone())
    for p, output in zip(problems, outputs, strict=True):
        assert_close(output.cpu(), p)


class Fixed:
    """A call whose tables and input stay in place, so that a graph can capture it."""

    def __init__(self, group: dist.ProcessGroup, samples: int, **options: Any) -> None:
        self.problem = p = problem(1, (64, 8, 16), samples, rows=500, longest=6)
        self.group, self.options, self.scale = group, options, 1.0
        self.weights, self.features = there(p.local_weights(0)), tuple(there(p.tupled(0)))

    def __call__(self) -> torch.Tensor:
        sharding = self.problem.sharding
        return weft.embedding_all_to_all(self.weights, self.features, sharding, group=self.group, **self.options)

    def renew(self) -> float:
        """Multiply the tables by -2. Return the factor by which results now differ from the problem's."""
        for weight in self.weights:
            weight.mul_(-2)
        self.scale *= -2
        return self.scale

    def assert_close(self, output: torch.Tensor, scale: float) -> None:
        assert_close((output / scale).cpu(), self.problem)  # exact, because the scale is a power of 2


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    call()
    return capture(call)


def assert_replays(graph: torch.cuda.CUDAGraph, output: torch.Tensor, fixed: Fixed) -> None:
    scale = fixed.renew()
    output.fill_(math.nan)
    graph.replay()
    fixed.assert_close(output, scale)


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_replays_leave_results_alone_that_somebody_holds(group: dist.ProcessGroup, outputs: int) -> None:
    fixed = Fixed(group, 40, outputs=outputs, transport="direct")
    # `* 1` makes a new tensor, so the operator's result is dropped.
    graphs = [captured(lambda: fixed() * 1) for _ in range(4)]
    held = []
    for _ in range(5):
        scale = fixed.renew()
        held.append((fixed(), scale))
        if outputs == 1:
            held[-1] = held[-1][0].clone(), scale
        for graph, output in graphs:
            assert_replays(graph, output, fixed)
    for result, scale in held:
        fixed.assert_close(result, scale)


@pytest.mark.parametrize("transport", ["direct", "serial"])
def test_replays_are_right_after_calls_of_other_sizes(group: dist.ProcessGroup, transport: str) -> None:
    """Replay after calls whose tables displace the graph's tables from every cache, and whose results need more memory."""
    fixed = Fixed(group, 40, transport=transport)
    graph, output = captured(fixed)
    for samples in (*range(1, 70), 900):
        Fixed(group, samples, transport=transport)()
    spoilt = [torch.full((n,), -1, dtype=torch.int64, device=DEVICE) for n in (2, 4, 16, 64, 512) for _ in range(200)]
    for _ in range(3):
        assert_replays(graph, output, fixed)
    assert all((one == -1).all() for one in spoilt)


def test_what_was_never_called_is_not_captured(group: dist.ProcessGroup) -> None:
    fixed, graph = Fixed(group, 41, transport="direct", outputs=5), torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match=r"call .*once .*before capturing it"), torch.cuda.graph(graph):
        fixed()
    fixed.assert_close(fixed(), 1.0)


def test_a_pool_writes_all_of_its_output() -> None:
    """Let the allocator reuse memory that was filled with NaN."""
    p = Problem(tables_of((8, 3, 16)), (0, 0, 0), (500,))
    pooled(p).fill_(torch.nan)
    assert_close(pooled(p).cpu(), p)


def test_timeline(group: dist.ProcessGroup) -> None:
    p = problem(1, (64,) * 4, 200, longest=30)
    timeline = weft.Timeline()
    output = exchanged(group, p, timeline=timeline)
    assert_close(output.cpu(), p)
    assert {(span.lane, span.bytes) for span in timeline} <= {("local", 0), ("wait", 0)}
    assert sum(span.lane == "local" for span in timeline) >= 200  # such a span covers at most one sample
    assert all(0 < span.start_us <= span.end_us for span in timeline)
    assert max(span.end_us for span in timeline) - min(span.start_us for span in timeline) < 60e6
