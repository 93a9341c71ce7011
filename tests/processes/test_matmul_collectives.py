"""GEMM + reduce-scatter, GEMM + all-reduce and GEMM + all-gather on CPU processes: every schedule, results, gradients,
torch.compile, layouts, bad input, ranks that come late or not at all, benchmark and plan; what follows an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import gathered_product_ranks as gathered
from support import reduce_ranks as reduced
from support import scatter_ranks as scattered
from support.slow import pairs, slow
from typer.testing import CliRunner

from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.cli.app import app
from weft.launch import Pool

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


@dataclass(frozen=True)
class Of:
    """The parameters of one operator's tests: arguments of the functions that run on ranks, and their expected results.

    forward: up to the schedule, by name. gradients: of `backward`, up to `compiled`; eager calls are `by` this schedule. many: of
    `many_sizes`, for each schedule of `many_by`. layouts_by: schedules of calls with other strides. differs: what all are told.
    """

    ranks: ModuleType
    forward: dict[str, tuple[Any, ...]]
    gradients: Sequence[tuple[tuple[Any, ...], tuple[bool, bool]]]
    by: str
    many: Sequence[tuple[Any, ...]]
    many_by: Sequence[str | None]
    operands: tuple[str, str]
    layouts_by: Sequence[str]
    differs: dict[str, str]
    spans: Sequence[tuple[tuple[Any, ...], set[str]]]
    measured: str
    planned: Sequence[tuple[Sequence[str], str]]
    shape: str
    in_plan: str


OPERATORS = {
    "matmul_reduce_scatter": Of(
        scattered,
        {  # shape of A, dimension, N, dtype, op, schedule
            "a matrix": ((24, 16), 0, 7, F32, "sum", None),
            "the mean": ((24, 16), 0, 7, F32, "avg", None),
            "the mean in bf16": ((24, 64), 0, 16, BF16, "avg", "direct[chunks=1,by=dma,add=reduce]"),
            "serial": ((24, 16), 0, 5, F16, "sum", "serial"),
            "batches": ((12, 3, 16), 0, 6, F32, "sum", "direct[chunks=2,by=dma,add=gemm]"),
            "a batch of sequences": ((3, 12, 16), 1, 6, F32, "avg", "direct[chunks=2,by=dma,add=gemm]"),
            "a batch of sequences, from behind": ((2, 12, 3, 16), -3, 6, F32, "sum", "scatter"),
            "no rows": ((0, 16), 0, 6, F32, "sum", None),
            "no batch": ((0, 12, 16), 1, 6, F32, "avg", None),
            "nothing to sum over": ((12, 0), 0, 6, F32, "sum", None),
            "columns": ((23, 16), -1, 12, F32, "sum", None),
            "columns by number, the mean in bf16": ((23, 64), 1, 12, BF16, "avg", "direct[chunks=1,by=dma,add=reduce]"),
            "columns of a batch": ((3, 7, 16), 2, 8, F32, "avg", "serial"),
            "columns of no rows": ((0, 16), -1, 8, F32, "sum", None),
            "no columns": ((3, 7, 16), -1, 0, F32, "sum", None),
            "columns of nothing to sum over": ((12, 0), -1, 8, F32, "sum", None),
        },
        [
            (((12, 16), 0, 5, "sum"), (True, True)),
            (((2, 5, 16), -1, 6, "avg"), (True, True)),
            (((5, 16), 1, 6, "sum"), (False, True)),
            (((2, 12, 16), 1, 5, "avg"), (True, True)),
            (((12, 16), 0, 5, "sum"), (True, False)),
            (((12, 16), 0, 5, "avg"), (False, True)),
        ],
        by="direct[chunks=1,by=store,add=reduce]",
        many=[()],
        many_by=[
            None,
            "scatter",
            "direct[chunks=2,by=store,add=gemm]",
            "pulled[chunks=2,by=gemm]",
            "pulled[chunks=1,by=tracked]",
        ],
        operands=("A", "B"),
        layouts_by=["serial", "scatter", "tracked[chunks=1,to=store]", "pulled[chunks=1,by=tracked]"],
        differs={
            "rows": "[4, 6] @ [6, 3] on each of 2 ranks",
            "schedule": "schedule scatter",
            "gradients": "gradients wanted of (A, B): (False, True)",
        },
        spans=[
            (("serial",), {"matmul", "reduce_scatter"}),
            (("direct[chunks=2,by=dma,add=gemm]",), {"matmul", "copy"}),
        ],
        measured="scatter",
        planned=[((), "")],
        shape="8192,8192,4096",
        in_plan="tracked[chunks=4,to=dma]",
    ),
    "matmul_all_reduce": Of(
        reduced,
        {  # shape of x, N, dtype, op, schedule
            "a matrix": ((24, 16), 7, F32, "sum", None),
            "the mean": ((23, 16), 7, F32, "avg", None),
            "the mean in bf16": ((24, 64), 16, BF16, "avg", "two_shot[chunks=1,by=dma,add=reduce]"),
            "serial": ((25, 16), 5, F16, "sum", "serial"),
            "one token": ((1, 1, 64), 6, BF16, "sum", None),
            "fewer rows than ranks": ((1, 64), 6, F32, "sum", "two_shot[chunks=1,by=kernel,add=gemm]"),
            "a batch of sequences": ((3, 7, 16), 6, F32, "avg", "two_shot[chunks=2,by=dma,add=gemm]"),
            "no rows": ((0, 16), 6, F32, "sum", None),
            "no batch": ((0, 12, 16), 6, F32, "avg", None),
            "no columns": ((12, 16), 0, F32, "sum", None),
            "nothing to sum over": ((12, 0), 6, F32, "sum", None),
        },
        [
            (((12, 16), 5, "sum"), (True, True)),  # as many rows for each rank, and not
            (((2, 5, 16), 5, "avg"), (True, True)),
            (((12, 16), 5, "sum"), (True, False)),
            (((12, 16), 5, "avg"), (False, True)),
        ],
        by="two_shot[chunks=1,by=store,add=reduce]",
        many=[()],
        many_by=[None, "one_shot[by=kernel]", "two_shot[chunks=2,by=store,add=gemm]", "chunked[chunks=4,by=dma]"],
        operands=("x", "w"),
        layouts_by=["serial", "one_shot[by=dma]", "two_shot[chunks=2,by=dma,add=gemm]"],
        differs={
            "rows": "[4, 6] @ [6, 3] on each of 2 ranks",
            "schedule": "schedule one_shot[by=load]",
            "gradients": "gradients wanted of (x, w, bias, residual, norm): (False, True, False, False, False)",
            "norm": "rank 1: matmul_all_reduce of a shape that is new here: [8, 6] @ [6, 3] on each of 2 ranks, added up, all",
            "eps": "added up and normed (eps 0.5), all of it to each",
            "eps by little": "eps=1.0000001e-06); rank 1: MatmulAllReduce(",
        },
        spans=[(("serial",), {"matmul", "all_reduce"}), (("two_shot[chunks=2,by=dma,add=gemm]",), {"matmul", "copy"})],
        measured="one_shot[by=load]",
        planned=[
            ((), ""),
            (
                ("--option", "residual=true", "--option", "norm=true"),
                "added up + residual and normed (eps 1e-06), all of it to each",
            ),
        ],
        shape="8191,8192,4096",
        in_plan="one_shot[by=load]",
    ),
    "matmul_all_gather": Of(
        gathered,
        {  # shape of x, N, dtype, dimension, schedule
            "rows": ((24, 16), 7, F32, 0, None),
            "columns": ((23, 16), 7, F32, -1, None),
            "columns by number": ((23, 16), 7, BF16, 1, "direct[chunks=2,by=kernel]"),
            "serial, rows": ((25, 16), 5, F16, 0, "serial"),
            "serial, columns": ((25, 16), 5, F16, -1, "serial"),
            "one token": ((1, 1, 64), 6, BF16, -1, "direct[chunks=1,by=kernel]"),
            "sequences, columns": ((3, 7, 16), 6, F32, 2, "direct[chunks=4,by=dma]"),
            "sequences, along them": ((3, 7, 16), 6, F32, 1, "direct[chunks=4,by=dma]"),
            "sequences, batches": ((3, 7, 16), 6, F32, -3, "tracked[chunks=1]"),
            "no rows": ((0, 16), 6, F32, 0, None),
            "no rows, columns": ((0, 16), 6, F32, -1, None),
            "no batch": ((0, 12, 16), 6, F32, 1, None),
            "no columns": ((12, 16), 0, F32, 0, None),
            "no columns, joined": ((12, 16), 0, F32, -1, None),
            "nothing to sum over": ((12, 0), 6, F32, 0, None),
            "nothing to sum over, columns": ((12, 0), 6, F32, -1, None),
        },
        [
            (((12, 16), 5, 0), (True, True)),
            (((12, 16), 5, -1), (True, True)),
            (((2, 5, 16), 5, 1), (True, True)),
            (((2, 5, 16), 5, 2), (True, False)),
            (((12, 16), 5, 0), (False, True)),
        ],
        by="direct[chunks=1,by=dma]",
        many=[(0,), (-1,)],
        many_by=[None, "direct[chunks=1,by=kernel]", "direct[chunks=4,by=dma]"],
        operands=("x", "w"),
        layouts_by=["serial", "direct[chunks=2,by=dma]", "tracked[chunks=1]"],
        differs={
            "rows": "[4, 6] @ [6, 3] on each of 2 ranks",
            "dimension": "the columns of all",
            "schedule": "schedule direct[chunks=1,by=dma]",
            "gradients": "gradients wanted of (x, w): (False, True)",
        },
        spans=[
            ((0, "serial"), {"matmul", "all_gather"}),
            ((-1, "serial"), {"matmul", "all_gather", "unpack"}),
            ((0, "direct[chunks=2,by=dma]"), {"matmul", "copy"}),
            ((-1, "direct[chunks=2,by=dma]"), {"matmul", "copy"}),
        ],
        measured="direct[chunks=2,by=dma]",
        planned=[
            (("--option", "gather_dim=0"), "the rows of all"),
            (("--option", "gather_dim=-1"), "the columns of all"),
        ],
        shape="8191,8192,4096",
        in_plan="tracked[chunks=8]",
    ),
}
# Of numbers of ranks and dtypes, those with which `make test` tries every schedule.
SOME = ((1, F32), (2, F32), (3, BF16), (4, F16))

each_operator = pytest.mark.parametrize("operator", OPERATORS)


def each(field: str, argument: str) -> Any:
    """All operators with each entry of that field of theirs."""
    found = [(name, entry) for name, of in OPERATORS.items() for entry in getattr(of, field)]
    return pytest.mark.parametrize(("operator", argument), found)


@each("forward", "name")
@pytest.mark.parametrize("world", [1, 2, 4])  # the one that changes last: each change makes a new group
def test_results(pool: Pool, operator: str, world: int, name: str) -> None:
    of = OPERATORS[operator]
    *given, schedule = of.forward[name]
    pool.run(of.ranks.forward, *given, schedule if world > 1 else None, 3, ranks=world, timeout_s=60)


@pytest.mark.parametrize(("world", "dtype"), pairs([1, 2, 3, 4], [F32, BF16, F16], *SOME), ids=str)
def test_every_schedule_of_reduce_scatter(pool: Pool, world: int, dtype: torch.dtype) -> None:
    m = (300 if dtype == F32 else 50) * world  # several tiles, and a part of one
    (names, *_) = pool.run(scattered.every_schedule, m, 40, 24, dtype, 0.02, ranks=world, timeout_s=100)
    builders = {name.split("[")[0] for name in names}
    assert builders == {1: {"serial"}, 2: {"serial", "scatter", "direct", "tracked", "pulled"}}.get(
        world, {"serial", "scatter", "direct", "tracked", "ring", "pulled"}
    )


@pytest.mark.parametrize(("world", "dtype"), pairs([1, 2, 3, 4, 8], [F32, BF16, F16], *SOME), ids=str)
def test_every_schedule_of_all_reduce(pool: Pool, world: int, dtype: torch.dtype) -> None:
    """Results repeat to the bit, and are the same bits on all ranks; with as many rows for each rank, and with fewer for the
    last."""
    whole = (300 if (world, dtype) == (2, F32) else 50) * world  # several tiles, and a part of one
    for m in (whole, whole - 1):
        (names, *_) = pool.run(reduced.every_schedule, m, 40, 24, dtype, 0.02, ranks=world, timeout_s=200)
        builders = {name.split("[")[0] for name in names}
        overlapping = {"one_shot", "two_shot", "chunked"} | ({"tracked"} if m == whole else set())
        assert builders == {"serial"} | (overlapping if world > 1 else set())


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize(("world", "dtype"), pairs([1, 2, 3, 4, 8], [F32, BF16, F16], *SOME), ids=str)
def test_every_schedule_of_all_gather(pool: Pool, world: int, dim: int, dtype: torch.dtype) -> None:
    """Results repeat to the bit, and are the same bits on all ranks."""
    (names, *_) = pool.run(gathered.every_schedule, 299, 40, 24, dim, dtype, 0.02, ranks=world, timeout_s=200)
    assert {name.split("[")[0] for name in names} == {"serial"} | ({"direct", "tracked"} if world > 1 else set())


@each("gradients", "case")
@pytest.mark.parametrize(("world", "compiled"), [(1, False), (3, False), (2, True), slow(1, True), slow(3, True)])
def test_gradients(pool: Pool, operator: str, world: int, case: tuple[Any, Any], compiled: bool) -> None:
    of = OPERATORS[operator]
    given, wanted = case
    schedule = None if world == 1 or compiled else of.by
    pool.run(of.ranks.backward, *given, wanted, compiled, schedule, ranks=world, timeout_s=120)


@each("many_by", "schedule")
def test_many_sizes_in_a_row(pool: Pool, operator: str, schedule: str | None) -> None:
    of = OPERATORS[operator]
    for given in of.many:
        pool.run(of.ranks.many_sizes, *given, schedule, F32, ranks=2, timeout_s=60)


@each("layouts_by", "schedule")
def test_operands_may_lie_otherwise_on_each_rank_and_in_each_call(operator: str, schedule: str) -> None:
    of = OPERATORS[operator]
    with Pool(2) as fresh:  # which has not warned of these strides
        first, second = fresh.run(of.ranks.layouts, schedule, timeout_s=60)
    for operand in of.operands:
        assert sum(f"{operand} is copied at every call" in text for text in first) == 1
    assert not second


@each_operator
def test_operands_that_cannot_be_are_refused_on_every_rank(pool: Pool, operator: str) -> None:
    of = OPERATORS[operator]
    x, w = of.operands
    expected = {
        "integers": f"{x} is torch.int64: use one of torch.float32, torch.float16, torch.bfloat16, torch.float64",
        "fp8": f"{x} is torch.float8_e4m3fn: use one of",
        "complex": f"{x} is torch.complex64: use one of",
        "other K": f"{w} has shape (5, 3): it must be [K=8, N] to follow {x} [..., 8]",
        "other dtype": f"{w} is torch.float16 on cpu and {x} is torch.float32 on cpu",
        "three dimensions": f"{w} has shape (1, 8, 3): it must be [K=8, N]",
    }
    if of is not OPERATORS["matmul_all_gather"]:
        expected["integers"] += ", in which the ranks' products"
    for told in pool.run(of.ranks.bad_operands, ranks=2, timeout_s=60):
        for name, text in expected.items():
            assert told[f"{name}, all"].startswith(f"RefusedError: ranks 0, 1: {text}"), name
            assert told[f"{name}, one"].startswith(f"RefusedError: rank 0: {text}"), name


def test_memory_that_does_not_hold_the_values(pool: Pool) -> None:
    for freed in pool.run(scattered.memory_of_other_values, "direct[chunks=1,by=dma,add=gemm]", ranks=2, timeout_s=60):
        for name, told in zip("xw", freed, strict=True):
            assert told.startswith(f"RefusedError: ranks 0, 1: {name} has no memory: its storage was freed")


@each_operator
def test_one_rank_that_differs_is_named_on_every_rank(operator: str) -> None:
    of = OPERATORS[operator]
    with Pool(2) as alone:
        for told in alone.run(of.ranks.one_rank_differs, timeout_s=60):
            assert told.keys() == of.differs.keys()
            for name, text in told.items():
                assert text.startswith("DisagreementError: ranks make different calls"), name
                assert of.differs[name] in text


@each_operator
def test_backward_waits_as_long_as_the_call_says(operator: str) -> None:
    with Pool(2) as alone:
        told, _ = alone.run(OPERATORS[operator].ranks.backward_alone, timeout_s=60)
    assert told.startswith("DeadlineError")
    assert "waited 1 s" in told


@each_operator
def test_timelines(pool: Pool, operator: str) -> None:
    of = OPERATORS[operator]
    for given, wanted in of.spans:
        for found in pool.run(of.ranks.spans, *given, ranks=2):
            assert found == wanted if given[-1] == "serial" else wanted <= found


@each_operator
def test_opcheck(pool: Pool, operator: str) -> None:
    pool.run(OPERATORS[operator].ranks.checked_as_op, ranks=1, timeout_s=120)


def measured(group: dist.ProcessGroup, operator: str) -> list[dict[str, Any]]:
    named = ("weft", OPERATORS[operator].measured)
    return run_rank(group.rank(), 2, BenchOptions(operator, "64x24x32", variants=named, quick=True, seconds=0.05))


@each_operator
def test_it_is_measured(pool: Pool, operator: str) -> None:
    written = pool.run(measured, operator, ranks=2, timeout_s=120)[0]
    assert {r["variant"] for r in written} == {"serial", "weft", OPERATORS[operator].measured}
    assert all(r["p50_ms"] > 0 and r["error"] < 1e-5 for r in written)


@each_operator
def test_it_is_planned(operator: str) -> None:
    of = OPERATORS[operator]
    runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})
    for options, text in of.planned:
        arguments = ["plan", operator, "--shape", of.shape, "--hw", "h200", *options]
        for more in ([], ["--ranks", "4", "--mode", "graph", "--all"]):
            done = runner.invoke(app, [*arguments, *more])
            assert done.exit_code == 0, done.output
            assert "less than serial's" in " ".join(done.output.split())
            assert text in " ".join(done.output.split())
        assert of.in_plan in done.output


# --- of the all-reduce alone: what is added to the sums, and they themselves ---


@pytest.mark.parametrize(("world", "dtype"), pairs([1, 2, 3], [F32, BF16], (1, F32), (2, BF16), (3, F32)), ids=str)
def test_what_follows_is_added_by_every_schedule(pool: Pool, world: int, dtype: torch.dtype) -> None:
    for bias, residual in ((True, True), (True, False), (False, True)):
        pool.run(reduced.following, (2, 7, 24), 40, dtype, bias, residual, ranks=world, timeout_s=200)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("wanted", [(True, True, True, True), (False, False, True, True), (True, False, False, True)])
def test_gradients_of_what_follows(pool: Pool, rows: int, wanted: tuple[bool, ...], compiled: bool) -> None:
    pool.run(reduced.backward_following, rows, wanted, compiled, ranks=2, timeout_s=120)


def test_a_pinned_schedule_that_cannot_do_a_shape_is_named_with_what_to_pass(pool: Pool) -> None:
    for told in pool.run(reduced.pinned_for_nothing, ranks=2, timeout_s=60):
        for what, shape, why in (
            ("no rows", "[0, 8] @ [8, 3]", "there is nothing to multiply"),
            ("no K", "[4, 0] @ [0, 3]", "there is nothing to multiply"),
            ("no N", "[4, 8] @ [8, 0]", "there is nothing to multiply"),
            ("few rows", "[2, 8] @ [8, 3]", "rows of a rank's part: 1 cannot be cut into 2 pieces"),
        ):
            assert told[what] == (
                "RefusedError: ranks 0, 1: schedule 'two_shot[chunks=2,by=dma,add=gemm]' cannot do matmul_all_reduce of "
                f'{shape} on each of 2 ranks, added up, all of it to each, fp32: {why}. Pass schedule="serial", or pin none'
            )


def test_what_cannot_follow_is_refused(pool: Pool) -> None:
    for told in pool.run(reduced.bad_following, ranks=2, timeout_s=60):
        assert "bias has shape (1, 3): it must be [N]" in told["bias of two dimensions"]
        assert "bias has 4 columns: it must have the N=3 of w" in told["bias of other length"]
        assert "bias is torch.float16 on cpu and x is torch.float32 on cpu" in told["bias of another dtype"]
        assert "residual has shape (4, 3) and x (5, 8): all but the last" in told["residual of fewer rows"]
        assert "residual has 2 columns: it must have the N=3 of w" in told["residual of fewer columns"]
        assert 'op="avg" does not support bias, residual and norm' in told["mean"]
        assert "residual is a list: pass a torch.Tensor" in told["no tensor"]
        assert "norm has shape (1, 3): it must be [N]" in told["a norm of two dimensions"]
        assert "norm has 2 columns: it must have the N=3 of w" in told["a norm of other length"]
        assert "norm is torch.float64 on cpu and x is torch.float32 on cpu" in told["a norm of another dtype"]
        assert "norm is torch.float32 on meta and x is torch.float32 on cpu" in told["a norm elsewhere"]
        assert 'op="avg" does not support bias, residual and norm' in told["the mean's norm"]
        assert "eps='0' must be a finite number of at least 0" in told["no number"]
        assert "eps=-1e-09 must be a finite number of at least 0" in told["a negative number"]
        assert "eps=0.5 without norm" in told["a number for nothing"]
        assert "eps=None and norm=" in told["no number, below"]


@pytest.mark.parametrize(
    ("world", "dtype"), pairs([1, 2, 3, 4], [F32, BF16, F16, F64], (1, F32), (2, BF16), (3, F32), (4, F64)), ids=str
)
def test_sums_are_normed_by_every_schedule(pool: Pool, world: int, dtype: torch.dtype) -> None:
    """Results repeat to the bit; with as many rows for each rank, and with fewer for the last."""
    for shape, residual, eps in (((2, 6 * world, 24), True, 1e-6), ((1, 12 * world - 1, 24), False, 0.25)):
        (names, *_) = pool.run(reduced.normed, shape, 40, dtype, residual, eps, ranks=world, timeout_s=200)
        overlapping = {"one_shot", "two_shot", "chunked"} | ({"tracked"} if residual else set())
        assert {name.split("[")[0] for name in names} == {"serial"} | (overlapping if world > 1 else set())


def test_norms_of_little_compiled_and_of_scattered_weights(pool: Pool) -> None:
    pool.run(reduced.normed_alike, ranks=2, timeout_s=120)


@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        ("serial", {"matmul y", "all_reduce y -> y", "add y", "norm y -> normed"}),
        ("one_shot[by=load]", {"reduce y, norm normed"}),
        ("chunked[chunks=2,by=dma]", {"reduce sums", "wait complete[1]", "norm y -> normed"}),
    ],
)
def test_norms_in_timelines(pool: Pool, schedule: str, names: set[str]) -> None:
    for found in pool.run(reduced.normed_spans, schedule, ranks=2):
        assert names <= found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("rows", "of", "wanted"),
    [
        (6, "yt", (True, True, True, True, True)),  # as many rows for each rank, and not
        (7, "yt", (True, True, True, True, True)),
        (6, "y", (True, False, False, True, True)),
        (6, "t", (False, True, True, False, True)),
        (6, "y", (False, False, False, False, True)),
    ],
)
def test_gradients_of_norms(pool: Pool, rows: int, of: str, wanted: tuple[bool, ...], compiled: bool) -> None:
    pool.run(reduced.backward_normed, rows, wanted, of, compiled, ranks=2, timeout_s=120)


def test_gradients_are_those_of_torchs_all_reduce(pool: Pool) -> None:
    pool.run(reduced.as_torch_has_it, ranks=3, timeout_s=60)


@pytest.mark.parametrize("schedule", ["serial", "one_shot[by=load]", "two_shot[chunks=1,by=dma,add=gemm]"])
def test_sums_beyond_fp16_are_infinite_and_means_of_them_too(pool: Pool, schedule: str) -> None:
    for found in pool.run(reduced.overflow, schedule, ranks=2, timeout_s=60):
        assert found == (torch.inf, torch.inf)


def test_the_librarys_sum_leaves_what_it_adds_up(pool: Pool) -> None:
    pool.run(reduced.librarys_sum, ranks=2, timeout_s=60)
