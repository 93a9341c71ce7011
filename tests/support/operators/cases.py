"""A row for each operator: shapes, dtypes, pinned schedules, wanted gradients. The suite (`suite.py`) runs them.

These rows are for CPU processes; `tests/multigpu` has rows for GPUs. Without a pinned schedule, a first call compiles
and times all candidates, which takes seconds. On one rank serial is the only schedule.
"""

from __future__ import annotations

from typing import Any

import torch
from support.on_ranks import BF16, F16, F32, F64, FP8
from support.operators.call import Case
from support.operators.experts import Experts
from support.operators.gemms import Following, Gathered, Gemm
from support.operators.row import Row, apart, by, dtypes
from support.operators.scaled import ScaledGathered, ScaledGemm
from support.slow import slow

SHARD, GATHER = "shard[chunks=2,send=in_turn,by=dma]", "gather[by=kernel]"

ALL_GATHER_MATMUL = Row(
    results={
        "a matrix": Gathered((5, 16), return_A=True),
        "three matrices in bf16": Gathered((8, 32), 16, BF16, more=(8, 8)),
        "pinned": Gathered((6, 16), 5, schedule=SHARD),
        "pinned, A wanted": Gathered((6, 16), 5, more=(4,), return_A=True, schedule=SHARD),
        "serial": Gathered((6, 16), 5, return_A=True, schedule="serial"),
        "serial, uneven": Gathered((4, 16), 5, rows=(4, 0, 9, 2), return_A=True, schedule="serial"),
        "uneven": Gathered((4, 16), 5, rows=(4, 0, 9, 2), return_A=True, schedule=GATHER),
        "a batch of sequences": Gathered((3, 4, 16), 6, dim=1, return_A=True),
        "a batch, uneven": Gathered((2, 3, 16), 6, dim=1, rows=(3, 1, 2, 5), return_A=True),
        "no rows": Gathered((0, 16), 6, return_A=True),
    },
    every=[],  # tests/processes/test_schedule_cpu.py tries every schedule
    small=Gathered((8, 8), 3, schedule=GATHER),
    layouts=apart(Gathered((18, 24), 8), "serial", GATHER, SHARD),
    steps=[
        (Gathered((6, 16), 8, more=(4,), schedule="serial"), {"all_gather x_shard -> ", "matmul y0", "matmul y1"}),
        (Gathered((6, 16), 8, schedule=SHARD), {"copy", "matmul"}),
    ],
    late=[Gathered((4, 8), 3, schedule="shard[chunks=1,send=in_turn,by=dma]")],
    gradients=[
        (Gathered((5, 12), 6, more=(3,), rows=rows, return_A=return_A), (True, True, True))
        for rows in (None, (4, 0, 9))
        for return_A in (False, True)
    ],
    compiled_gradients=(3,),
    opcheck=Gathered((4, 8), 3, return_A=True),
)

BUILDERS = {1: {"serial"}, 2: {"serial", "scatter", "direct", "tracked", "pulled", "collective"}}
MEAN = "direct[chunks=1,by=dma,add=reduce]"
SUMMED = "direct[chunks=2,by=dma,add=gemm]"

MATMUL_REDUCE_SCATTER = Row(
    results={
        "a matrix": Gemm(),
        "the mean": Gemm(op="avg"),
        "the mean in bf16": Gemm((24, 64), 16, BF16, op="avg", schedule=MEAN),
        "serial": Gemm(n=5, dtype=F16, schedule="serial"),
        "batches": Gemm((12, 3, 16), 6, schedule=SUMMED),
        "a batch of sequences": Gemm((3, 12, 16), 6, dim=1, op="avg", schedule=SUMMED),
        "a batch of sequences, from behind": Gemm((2, 12, 3, 16), 6, dim=-3, schedule="scatter"),
        "no rows": Gemm((0, 16), 6),
        "no batch": Gemm((0, 12, 16), 6, dim=1, op="avg"),
        "nothing to sum over": Gemm((12, 0), 6),
        "columns": Gemm((23, 16), 12, dim=-1),
        "columns by number, the mean in bf16": Gemm((23, 64), 12, BF16, 1, "avg", schedule=MEAN),
        "columns of a batch": Gemm((3, 7, 16), 8, dim=2, op="avg", schedule="serial"),
        "columns of no rows": Gemm((0, 16), 8, dim=-1),
        "no columns": Gemm((3, 7, 16), 0, dim=-1),
        "columns of nothing to sum over": Gemm((12, 0), 8, dim=-1),
    },
    every=dtypes(
        lambda world, _: BUILDERS.get(world, {*BUILDERS[2], "ring"}),
        # several tiles, the last of which is partial
        lambda world, dtype: Gemm(((300 if dtype == F32 else 50) * world, 24), 40, dtype),
        4,
        *((2, F32), (3, BF16)),
    ),
    small=Gemm((8, 8), 3, schedule="scatter"),
    layouts=apart(Gemm((96, 24), 8), "serial", "scatter", "tracked[chunks=1,to=store]", "pulled[chunks=1,by=tracked]"),
    steps=[
        (Gemm((16, 8), 4, op="avg", schedule="serial"), {"matmul", "reduce_scatter"}),
        (Gemm((16, 8), 4, op="avg", schedule=SUMMED), {"matmul", "copy"}),
    ],
    late=[Gemm((4, 8), 3, schedule="scatter")],
    gradients=[
        (Gemm((12, 16), 5), (True, True)),
        (Gemm((2, 5, 16), 6, dim=-1, op="avg"), (True, True)),
        (Gemm((5, 16), 6, dim=1), (False, True)),
        (Gemm((2, 12, 16), 5, dim=1, op="avg"), (True, True)),
        (Gemm((12, 16), 5), (True, False)),
        (Gemm((12, 16), 5, op="avg"), (False, True)),
    ],
    compiled_gradients=(1,),
    block="direct[chunks=1,by=store,add=reduce]",
    many=by(
        Gemm(),
        None,
        "scatter",
        "direct[chunks=2,by=store,add=gemm]",
        "pulled[chunks=2,by=gemm]",
        "pulled[chunks=1,by=tracked]",
    ),
    opcheck=Gemm((4, 8), 3),
)

TWO_SHOT = "two_shot[chunks=2,by=dma,add=gemm]"


def summed_everywhere(world: int, m: int) -> set[str]:
    """Return the builders for an all-reduce of m rows. `tracked` needs the same number of rows for each rank."""
    overlapping = {"one_shot", "two_shot", "chunked", "collective"} | ({"tracked"} if m % world == 0 else set())
    return {"serial"} | (overlapping if world > 1 else set())


def followed(bias: bool, residual: bool) -> list[Any]:
    """Return cases of sums to which a bias or a residual is added."""
    return dtypes(
        lambda world, _: summed_everywhere(world, 14),
        lambda _, dtype: Following((2, 7, 24), 40, dtype, bias=bias, residual=residual),
        3,
        *([(3, F32)] if bias and residual else []),
        of=(F32, BF16),
    )


def normed(fewer: int) -> list[Any]:
    """Return cases of sums with a norm. fewer: 1 if the last rank has fewer rows; 0 for equal rows and a residual."""
    return dtypes(
        lambda world, _: summed_everywhere(world, 12 * world - fewer),
        lambda world, dtype: Following(
            (12 * world - fewer, 24), 40, dtype, residual=not fewer, eps=0.25 if fewer else 1e-6
        ),
        4,
        (3, F32) if fewer else (2, BF16),
        of=(F32, BF16, F16, F64),
    )


def whole(world: int, dtype: torch.dtype) -> int:
    """Return a number of rows that gives several tiles, the last of which is partial."""
    return (300 if (world, dtype) == (2, F32) else 50) * world


MATMUL_ALL_REDUCE = Row(
    results={
        "a matrix": Gemm(),
        "the mean": Gemm((23, 16), op="avg"),
        "the mean in bf16": Gemm((24, 64), 16, BF16, op="avg", schedule="two_shot[chunks=1,by=dma,add=reduce]"),
        "serial": Gemm((25, 16), 5, F16, schedule="serial"),
        "one token": Gemm((1, 1, 64), 6, BF16),
        "fewer rows than ranks": Gemm((1, 64), 6, schedule="two_shot[chunks=1,by=kernel,add=gemm]"),
        "a batch of sequences": Gemm((3, 7, 16), 6, op="avg", schedule=TWO_SHOT),
        "no rows": Gemm((0, 16), 6),
        "no batch": Gemm((0, 12, 16), 6, op="avg"),
        "no columns": Gemm((12, 16), 0),
        "nothing to sum over": Gemm((12, 0), 6),
    },
    every=[
        # With the same number of rows for each rank, and with fewer rows for the last rank.
        one
        for fewer in (0, 1)
        for one in dtypes(
            lambda world, dtype, fewer=fewer: summed_everywhere(world, whole(world, dtype) - fewer),
            lambda world, dtype, fewer=fewer: Gemm((whole(world, dtype) - fewer, 24), 40, dtype),
            8,
            *([] if fewer else [(2, F32)]),
        )
    ]
    + [one for bias, residual in ((True, True), (True, False), (False, True)) for one in followed(bias, residual)]
    + [one for fewer in (0, 1) for one in normed(fewer)],
    small=Gemm((8, 8), 3, schedule="one_shot[by=load]"),
    layouts=apart(Gemm((17, 24), 8), "serial", "one_shot[by=dma]", TWO_SHOT),
    steps=[
        (Gemm((16, 8), 4, op="avg", schedule="serial"), {"matmul", "all_reduce"}),
        (Gemm((16, 8), 4, op="avg", schedule=TWO_SHOT), {"matmul", "copy"}),
        *zip(
            by(Following((16, 8), 4, bias=True, eps=1e-6), "serial", "one_shot[by=load]", "chunked[chunks=2,by=dma]"),
            (
                {"matmul y", "all_reduce y -> y", "add y", "norm y -> normed"},
                {"reduce y, norm normed"},
                {"reduce sums", "wait complete[1]", "norm y -> normed"},
            ),
            strict=True,
        ),
    ],
    late=[Gemm((5, 8), 3, schedule="one_shot[by=dma]")],
    gradients=[
        (Gemm((12, 16), 5), (True, True)),  # these rows divide evenly; those of the next case do not
        (Gemm((2, 5, 16), 5, op="avg"), (True, True)),
        (Gemm((12, 16), 5), (True, False)),
        (Gemm((12, 16), 5, op="avg"), (False, True)),
        *(
            (Following((rows, 8), 5, bias=True, residual=True), wanted)
            for rows in (6, 7)
            for wanted in ((True, True, True, True), (False, False, True, True), (True, False, False, True))
        ),
        *((Following((rows, 8), 5, bias=True, residual=True, eps=0.1), (True,) * 5) for rows in (6, 7)),
    ],
    compiled_gradients=(2, 10),
    block="two_shot[chunks=1,by=store,add=reduce]",
    many=by(Gemm(), None, "one_shot[by=kernel]", "two_shot[chunks=2,by=store,add=gemm]", "chunked[chunks=4,by=dma]"),
    opcheck=Gemm((4, 8), 3),
)

DIRECT = "direct[chunks=2,by=dma]"

MATMUL_ALL_GATHER = Row(
    results={
        "rows": Gemm(),
        "columns": Gemm((23, 16), dim=-1),
        "columns by number": Gemm((23, 16), 7, BF16, 1, schedule="direct[chunks=2,by=kernel]"),
        "serial, rows": Gemm((25, 16), 5, F16, schedule="serial"),
        "serial, columns": Gemm((25, 16), 5, F16, -1, schedule="serial"),
        "one token": Gemm((1, 1, 64), 6, BF16, -1, schedule="direct[chunks=1,by=kernel]"),
        "sequences, columns": Gemm((3, 7, 16), 6, dim=2, schedule="direct[chunks=4,by=dma]"),
        "sequences, along them": Gemm((3, 7, 16), 6, dim=1, schedule="direct[chunks=4,by=dma]"),
        "sequences, batches": Gemm((3, 7, 16), 6, dim=-3, schedule="tracked[chunks=1]"),
        "no rows": Gemm((0, 16), 6),
        "no rows, columns": Gemm((0, 16), 6, dim=-1),
        "no batch": Gemm((0, 12, 16), 6, dim=1),
        "no columns": Gemm((12, 16), 0),
        "no columns, joined": Gemm((12, 16), 0, dim=-1),
        "nothing to sum over": Gemm((12, 0), 6),
        "nothing to sum over, columns": Gemm((12, 0), 6, dim=-1),
    },
    every=[
        one
        for dim in (0, -1)
        for one in dtypes(
            lambda world, _: {"serial"} | ({"direct", "tracked"} if world > 1 else set()),
            lambda _, dtype, dim=dim: Gemm((299, 24), 40, dtype, dim),
            8,
            (3, BF16) if dim else (2, F32),
        )
    ],
    small=Gemm((8, 8), 3, schedule="direct[chunks=1,by=dma]"),
    layouts=apart(Gemm((19, 24), 12, dim=-1), "serial", DIRECT, "tracked[chunks=1]"),
    steps=[
        (Gemm((16, 8), 4, schedule="serial"), {"matmul", "all_gather"}),
        (Gemm((16, 8), 4, dim=-1, schedule="serial"), {"matmul", "all_gather", "unpack"}),
        (Gemm((16, 8), 4, schedule=DIRECT), {"matmul", "copy"}),
        (Gemm((16, 8), 4, dim=-1, schedule=DIRECT), {"matmul", "copy"}),
    ],
    late=[Gemm((5, 8), 3, schedule="direct[chunks=1,by=dma]")],
    gradients=[
        (Gemm((12, 16), 5), (True, True)),
        (Gemm((12, 16), 5, dim=-1), (True, True)),
        (Gemm((2, 5, 16), 5, dim=1), (True, True)),
        (Gemm((2, 5, 16), 5, dim=2), (True, False)),
        (Gemm((12, 16), 5), (False, True)),
    ],
    compiled_gradients=(3,),
    block="direct[chunks=1,by=dma]",
    many=[
        one
        for dim in (0, -1)
        for one in by(Gemm(dim=dim), None, "direct[chunks=1,by=kernel]", "direct[chunks=4,by=dma]")
    ],
    opcheck=Gemm((4, 8), 3),
)

KINDS = [("tensor", BF16), ("row", BF16), ("tensor", FP8)]


def gathered_kind(world: int, by: Any, out: torch.dtype) -> tuple[int, Case, set[str]]:
    builders = {"serial"} if world == 1 else {"serial", "gather", "shard", "ficco_1d", "ficco_1d_collective"}
    return world, ScaledGathered((8, 32), more=(32,), by=by, biased=True, return_A=False, out=out), builders


ALL_GATHER_SCALED_MATMUL = Row(
    results={
        "a scale for all": ScaledGathered(),
        "a scale for each row": ScaledGathered(by="row"),
        "scales of all rows on every rank": ScaledGathered(by="row of all", more=(32,), schedule="serial"),
        "three weights, biases": ScaledGathered(more=(48, 32), biased=True, return_A=False, schedule=SHARD),
        "by row, biases in fp16": ScaledGathered(more=(32,), by="row", biased=True, out=F16, schedule=GATHER),
        "fp32, fast": ScaledGathered(out=F32, fast=True, by="row", schedule="serial"),
        "pinned, A wanted": ScaledGathered(by="row", schedule=SHARD),
        "uneven": ScaledGathered(rows=(6, 0, 3, 1), by="row", schedule=GATHER),
        "uneven, serial": ScaledGathered(rows=(6, 0, 3, 1), by="row", schedule="serial"),
        "uneven, scales of all rows": ScaledGathered(rows=(6, 0, 3, 1), by="row of all"),
        "a batch of sequences": ScaledGathered((2, 3, 16), dim=1, by="row", schedule=GATHER),
        "a batch, uneven, scales of all": ScaledGathered(
            (2, 3, 16), dim=1, rows=(3, 1, 2, 4), by="row of all", schedule=GATHER
        ),
        "one row each": ScaledGathered((1, 16), by="row", return_A=False),
        "no rows": ScaledGathered((0, 16), by="row"),
        "fp8": ScaledGathered(out=FP8, more=(32,)),
        "fp8, biases": ScaledGathered(out=FP8, biased=True, return_A=False, schedule=SHARD),
        "fp8, serial, a batch": ScaledGathered((2, 3, 16), dim=1, out=FP8, schedule="serial"),
    },
    every=[
        *(gathered_kind(2, *kind) for kind in KINDS[1:]),
        slow(*gathered_kind(2, *KINDS[0])),
        gathered_kind(1, *KINDS[0]),
        slow(*gathered_kind(3, "tensor", FP8)),
        slow(*gathered_kind(4, "row", BF16)),
    ],
    small=ScaledGathered(schedule=GATHER),
    layouts=apart(ScaledGathered((11, 32)), "serial", GATHER),
    steps=[(ScaledGathered(schedule="serial"), {"all_gather", "scaled_matmul"})],
    late=[ScaledGathered(schedule="serial")],
    compiled=["by row, biases in fp16", "uneven", *map(slow, ("a scale for all", "a batch of sequences", "fp8"))],
    opcheck=ScaledGathered(by="row", biased=True),
)

REDUCED, STORED = "direct[chunks=2,by=dma,add=reduce]", "direct[chunks=1,by=store,add=reduce]"


def scattered_kind(world: int, by: Any, out: torch.dtype) -> tuple[int, Case, set[str]]:
    builders = {"serial"} if world == 1 else {"serial", "scatter", "direct"}
    return world, ScaledGemm((50 * world, 32), 48, by=by, out=out, biased=out != F32), builders


SCALED_MATMUL_REDUCE_SCATTER = Row(
    results={
        "a scale for all": ScaledGemm(),
        "a scale for each row": ScaledGemm(by="row"),
        "serial": ScaledGemm(out=F16, schedule="serial"),
        "serial, by row, the mean": ScaledGemm(by="row", op="avg", schedule="serial"),
        "the mean": ScaledGemm(op="avg", schedule=REDUCED),
        "the mean in fp32": ScaledGemm(op="avg", out=F32, by="row", schedule=STORED),
        "fast": ScaledGemm(fast=True, schedule="scatter"),
        "biases": ScaledGemm(biased=True, n=48, schedule=REDUCED),
        "biases, by row, in fp16": ScaledGemm(biased=True, by="row", out=F16, schedule="scatter"),
        "batches": ScaledGemm((12, 3, 16), by="row", schedule=REDUCED),
        "a batch of sequences": ScaledGemm((3, 12, 16), dim=1, by="row", op="avg", schedule=REDUCED),
        "a batch of sequences, from behind": ScaledGemm((2, 12, 3, 16), dim=-3, by="row", schedule="scatter"),
        "flattened": ScaledGemm((12, 3, 16), by="row", flat=True, schedule=REDUCED),
        "flattened, another dimension": ScaledGemm((2, 3, 12, 32), dim=2, by="row", flat=True, schedule=REDUCED),
        "flattened, a scale for all": ScaledGemm((3, 12, 32), dim=1, flat=True, biased=True),
        "no rows": ScaledGemm((0, 16), by="row"),
        "no batch": ScaledGemm((0, 12, 16), dim=1, op="avg"),
    },
    every=[
        *(scattered_kind(*kind) for kind in ((1, "row", F32), (2, "tensor", BF16), (3, "row", F16))),
        slow(*scattered_kind(2, "row", F32)),
        slow(*scattered_kind(4, "tensor", F32)),
    ],
    small=ScaledGemm(schedule="scatter"),
    layouts=apart(ScaledGemm(), "serial", REDUCED),
    steps=[
        (ScaledGemm(schedule="serial"), {"scaled_matmul", "reduce_scatter"}),
        (ScaledGemm(schedule=REDUCED), {"scaled_matmul", "copy", "reduce"}),
    ],
    late=[ScaledGemm(schedule="scatter")],
    compiled=["biases, by row, in fp16", "flattened", *map(slow, ("a scale for all", "a batch of sequences"))],
    many=by(ScaledGemm(by="row"), None, "scatter", "direct[chunks=2,by=store,add=reduce]"),
    opcheck=ScaledGemm(by="row", biased=True),
)

EACH = "dispatch[by=kernel,rest=each]"


def returned(*schedules: str | None) -> list[Any]:
    """Return cases of experts with gradients, for each schedule. `make test` tries each schedule and each kind of case
    once.
    """
    kinds = [(2, True), (1, True), (2, False)]
    made = [(Experts(n, exact=exact, k=12, schedule=one), (True, True)) for n, exact in kinds for one in schedules]
    fast = [i * len(schedules) + i % len(schedules) for i in range(len(kinds))]
    return [values if i in fast else slow(*values) for i, values in enumerate(made)]


ALL_TO_ALL_MATMUL = Row(
    results={
        "chosen": Experts(3),
        "room to spare": Experts(2, exact=False, schedule="dispatch_by_expert[by=kernel,chunks=2]"),
        "bf16": Experts(2, BF16, transposed=True, schedule=EACH),
        "fp16, room to spare": Experts(2, F16, exact=False, schedule=EACH),
        "all to one": Experts(2, traffic="all to one", schedule=EACH),
        "one has nothing": Experts(1, traffic="one has nothing", schedule=EACH),
        "nothing at all": Experts(2, traffic="nothing", schedule=EACH),
        "sorted": Experts(3, BF16, transposed=True, schedule="dispatch_sorted[chunks=1]"),
        "ficco": Experts(4, BF16, schedule="ficco_1d[start=hetero,gemms=unfused,steps=0,by=dma]"),
        "ficco by columns": Experts(2, schedule="ficco_2d[start=hetero,gemms=fused,steps=2,by=dma]"),
        "the heuristic's, room to spare": Experts(4, traffic="all to one", exact=False, schedule="heuristic"),
        "serial": Experts(3, BF16, transposed=True, schedule="serial"),
        "serial, room to spare": Experts(2, traffic="all to one", exact=False, schedule="serial"),
        "serial, one expert": Experts(1, exact=False, schedule="serial"),
        "serial, nothing at all": Experts(2, traffic="nothing", exact=False, schedule="serial"),
    },
    every=[
        (3, Experts(4), {"serial", "dispatch", "dispatch_by_expert", "dispatch_sorted", "ficco_1d", "ficco_2d"}),
        (
            2,
            Experts(2, exact=False),
            {"serial", "dispatch", "dispatch_by_expert", "dispatch_sorted", "ficco_1d", "ficco_2d"},
        ),
        slow(3, Experts(2, exact=False), {"serial", "dispatch", "dispatch_by_expert", "dispatch_sorted", "ficco_2d"}),
    ],
    small=Experts(traffic="two each", k=8, n=3, schedule=EACH),
    layouts=by(Experts(traffic="two each", k=6, n=5), None),
    steps=[
        (
            Experts(schedule="serial"),
            {"exchange splits -> received", "exchange tokens -> unordered", "permute", "library_grouped_matmul"},
        ),
        (Experts(schedule="dispatch[by=dma,rest=each]"), {"read counts", "grouped_matmul"}),
    ],
    late=[Experts(traffic="two each", schedule="dispatch[by=dma,rest=each]")],
    calls=3,
    more=[(8, Experts(schedule=schedule)) for schedule in ("serial", "dispatch[by=kernel,rest=together]")]
    + [(8, Experts(exact=False, schedule=EACH))]
    # columns that are no whole 16 bytes
    + [(2, Experts(k=5, n=7, schedule="ficco_2d[start=uniform,gemms=unfused,steps=5,by=dma]"))]
    + [(3, Experts(exact=False, k=9, n=7, schedule="ficco_2d[start=hetero,gemms=fused,steps=4,by=kernel]"))],
    gradients=returned(None, "serial"),
    compiled_gradients=(0,),
    opcheck=Experts(exact=False, k=8, n=3),
)

DMA, STORE = "combine[chunks=1,by=dma]", "combine[chunks=1,by=store]"
BY_EXPERT = "combine_by_expert[chunks=1,by=kernel]"

MATMUL_ALL_TO_ALL = Row(
    results={
        "chosen": Experts(3),
        "told": Experts(2, exact=False),
        "bf16": Experts(2, BF16, transposed=True, schedule=DMA),
        "fp16, told": Experts(2, F16, exact=False, schedule=STORE),
        "all from one": Experts(2, traffic="all to one", schedule=DMA),
        "one has nothing": Experts(1, traffic="one has nothing", schedule=STORE),
        "nothing at all": Experts(2, traffic="nothing", schedule=BY_EXPERT),
        "serial": Experts(3, BF16, transposed=True, schedule="serial"),
        "serial, told": Experts(2, traffic="all to one", exact=False, schedule="serial"),
        "serial, one expert": Experts(1, exact=False, schedule="serial"),
        "serial, nothing at all": Experts(2, traffic="nothing", schedule="serial"),
    },
    every=[
        (2, Experts(), {"serial", "combine", "combine_by_expert"}),
        slow(3, Experts(), {"serial", "combine", "combine_by_expert"}),
        (3, Experts(exact=False), {"serial", "combine", "combine_by_expert"}),
    ],
    small=Experts(traffic="two each", k=8, n=3, schedule=STORE),
    layouts=by(Experts(traffic="two each", k=6, n=7), None),
    steps=[
        (Experts(schedule="serial"), {"library_grouped_matmul", "permute", "exchange ordered -> y"}),
        (Experts(schedule="combine[chunks=2,by=kernel]"), {"read counts", "returning_matmul", "copy inbox -> y"}),
    ],
    late=by(Experts(traffic="two each"), "serial", DMA),
    calls=3,
    worlds=(1, 2, 3, 4),
    more=[
        (8, Experts(schedule=DMA)),
        slow(8, Experts(schedule="serial")),
        slow(8, Experts(exact=False, schedule=BY_EXPERT)),
    ],
    gradients=[
        *returned(None, "serial", STORE),
        (Experts(k=12, schedule=DMA), (True, False)),
        (Experts(k=12, schedule=DMA), (False, True)),
    ],
    compiled_gradients=(9,),
    opcheck=Experts(exact=False, k=8, n=3),
)

ROWS = {
    "all_gather_matmul": ALL_GATHER_MATMUL,
    "matmul_reduce_scatter": MATMUL_REDUCE_SCATTER,
    "matmul_all_reduce": MATMUL_ALL_REDUCE,
    "matmul_all_gather": MATMUL_ALL_GATHER,
    "all_gather_scaled_matmul": ALL_GATHER_SCALED_MATMUL,
    "scaled_matmul_reduce_scatter": SCALED_MATMUL_REDUCE_SCATTER,
    "all_to_all_matmul": ALL_TO_ALL_MATMUL,
    "matmul_all_to_all": MATMUL_ALL_TO_ALL,
}
