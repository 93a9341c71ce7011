"""The parameters of each operator's tests on two GPUs, like `support/operators/cases.py` for CPU processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.on_ranks import BF16, F16, F32, FP8
from support.operators.call import Case
from support.operators.experts import Experts
from support.operators.gemms import Gathered, Gemm
from support.operators.row import by
from support.operators.scaled import ScaledGathered, ScaledGemm

from weft.builders import MatmulAllGather, MatmulAllReduce, MatmulReduceScatter, Problem, ScaledMatmulReduceScatter

FP8_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not FP8_GPU, reason="fp8 GEMMs need compute capability 8.9")


@dataclass(frozen=True)
class Row:
    """The parameters of an operator's tests on two GPUs.

    captured: cases that are called twice in one graph. replayed: problems of which every schedule is captured and
    replayed. The other fields are as for CPU processes.
    """

    results: Mapping[str, Case]
    every: Sequence[tuple[Case, set[str]]] = ()
    replayed: Sequence[Problem] = ()
    gradients: Sequence[tuple[Case, tuple[bool, ...]]] = ()
    many: Sequence[Case] = ()
    layouts: Sequence[Case] = ()
    steps: Sequence[tuple[Case, set[str]]] = ()
    captured: Sequence[Case] = ()
    compiled: Sequence[str] = ()
    calls: int = 3
    marks: Sequence[Any] = ()


WHOLE, ODD = (2048, 512, 256), (601, 19, 43)


def sized(sizes: tuple[int, int, int], dtype: torch.dtype, **options: Any) -> Gemm:
    """Return the case with these sizes (M, N, K)."""
    m, n, k = sizes
    return Gemm((m, k), n, dtype, **options)


EACH = [(sizes, dtype) for sizes in (WHOLE, ODD) for dtype in (BF16, F16, F32)]
SHARD, GATHER = "shard[chunks=2,send=in_turn,by=dma]", "gather[by=kernel]"

ALL_GATHER_MATMUL = Row(
    results={
        "large": Gathered((2048, 1024), 512, BF16),
        "small": Gathered((16, 512), 256, BF16, more=(128,)),
        "A wanted": Gathered((512, 512), 256, F16, return_A=True),
        "odd, fp32": Gathered((37, 43), 19, return_A=True),
        "uneven": Gathered((64, 256), 128, BF16, rows=(64, 300), return_A=True),
        "a batch of sequences": Gathered((4, 256, 512), 384, BF16, dim=1, return_A=True),
        "no rows": Gathered((0, 128), 64, BF16),
        "pinned": Gathered((256, 512), 384, BF16, schedule=GATHER),
    },
    gradients=[
        (Gathered((50, 12), 6, more=(3,), rows=rows, return_A=return_A), (True, True, True))
        for rows in (None, (4, 90))
        for return_A in (False, True)
    ],
    many=by(Gathered(), None, "shard[chunks=1,send=in_turn,by=dma]"),
    layouts=by(Gathered((64, 128), 96, BF16), None, "serial", GATHER, SHARD),
    steps=[
        (Gathered((6, 16), 8, more=(4,), schedule="serial"), {"all_gather x_shard -> ", "matmul y0", "matmul y1"}),
    ],
    captured=[Gathered((m, 1024), 512, BF16) for m in (8, 1024)],
)

SOME = [
    "scatter", "direct[chunks=2,by=dma,add=gemm]", "direct[chunks=1,by=store,add=reduce]", "tracked[chunks=1,to=store]",
    "pulled[chunks=2,by=gemm]", "pulled[chunks=1,by=tracked]",
]  # fmt: skip
CUT = "tracked[chunks=2,to=dma]"
"""A schedule for at least two tiles of rows."""


def twice_in_a_graph(case: Any, schedules: Sequence[str | None], cut: str) -> list[Any]:
    """Return `case` with few and with many rows, in shapes that no other test calls. Only many rows allow the schedule
    `cut`.
    """
    few, many = (replace(case, shape=(m, 320), n=384, dtype=BF16) for m in (64, 2048))
    return [*by(few, *schedules), *by(many, *schedules, cut)]


MATMUL_REDUCE_SCATTER = Row(
    results={
        "large": Gemm((4096, 1024), 2048, BF16),
        "small": Gemm((32, 512), 256, BF16, op="avg"),
        "odd, fp32": Gemm((74, 43), 19),
        "a batch of sequences": Gemm((4, 512, 512), 384, F16, 1, "avg"),
        "batches": Gemm((8, 100, 256), 512, BF16),
        "no rows": Gemm((0, 128), 64, BF16),
        "nothing to sum over": Gemm((64, 0), 64, BF16),
        "serial": Gemm((512, 512), 384, BF16, op="avg", schedule="serial"),
    },
    every=[
        (sized((m - m % 2, n, k), dtype), {"serial", "scatter", "direct", "tracked", "pulled", "collective"})
        for (m, n, k), dtype in EACH
    ],
    replayed=[MatmulReduceScatter(2, *WHOLE, "bf16")],
    gradients=[
        (Gemm((128, 64), 40), (True, True)),
        (Gemm((3, 64, 48), 40, dim=1, op="avg"), (True, True)),
        (Gemm((128, 64), 40), (True, False)),
        (Gemm((128, 64), 40, op="avg"), (False, True)),
    ],
    many=[one for dtype in (BF16, F32) for one in by(Gemm(dtype=dtype), None, *SOME)],
    layouts=by(Gemm((32, 24), 8), "serial", *SOME),
    captured=twice_in_a_graph(Gemm(), [None, *SOME], CUT),
)

SUMS = [
    "one_shot[by=kernel]", "one_shot[by=load]", "two_shot[chunks=2,by=dma,add=gemm]", "two_shot[chunks=1,by=store,add=reduce]",
    "chunked[chunks=2,by=dma]",
]  # fmt: skip

MATMUL_ALL_REDUCE = Row(
    results={
        "large": Gemm((4096, 1024), 2048, BF16),
        "small": Gemm((32, 512), 256, BF16, op="avg"),
        "one token": Gemm((1, 1, 512), 256, BF16, schedule="one_shot[by=kernel]"),
        "odd, fp32": Gemm((75, 43), 19),
        "a batch of sequences": Gemm((4, 511, 512), 384, F16, op="avg"),
        "no rows": Gemm((0, 128), 64, BF16),
        "nothing to sum over": Gemm((64, 0), 64, BF16),
        "serial": Gemm((512, 512), 384, BF16, op="avg", schedule="serial"),
    },
    every=[
        (
            sized(sizes, dtype),
            {"serial", "one_shot", "two_shot", "chunked", "collective"} | ({"tracked"} if sizes == WHOLE else set()),
        )
        for sizes, dtype in EACH
    ],
    replayed=[MatmulAllReduce(2, *WHOLE, "bf16")],
    gradients=[
        (Gemm((128, 64), 40), (True, True)),
        (Gemm((3, 65, 48), 40, op="avg"), (True, True)),
        (Gemm((128, 64), 40), (True, False)),
        (Gemm((128, 64), 40, op="avg"), (False, True)),
    ],
    many=[one for dtype in (BF16, F32) for one in by(Gemm(dtype=dtype), None, *SUMS)],
    layouts=by(Gemm((17, 24), 8), "serial", *SUMS),
    captured=twice_in_a_graph(Gemm(), [None, *SUMS, "tracked[chunks=1,to=store]"], CUT),
)

GATHERS = ["direct[chunks=1,by=kernel]", "direct[chunks=4,by=dma]"]

MATMUL_ALL_GATHER = Row(
    results={
        "large": Gemm((4096, 1024), 2048, BF16),
        "large, columns": Gemm((4096, 1024), 2048, BF16, -1),
        "one token": Gemm((1, 1, 512), 256, BF16, -1, schedule="direct[chunks=1,by=kernel]"),
        "odd, fp32": Gemm((75, 43), 19),
        "odd, columns": Gemm((75, 43), 19, dim=-1, schedule="direct[chunks=2,by=dma]"),
        "a batch of sequences": Gemm((4, 511, 512), 384, F16, 1, schedule="direct[chunks=2,by=dma]"),
        "no rows": Gemm((0, 128), 64, BF16),
        "nothing to sum over": Gemm((64, 0), 64, BF16, -1),
        "serial": Gemm((512, 512), 384, BF16, -1, schedule="serial"),
    },
    every=[(sized(sizes, dtype, dim=dim), {"serial", "direct", "tracked"}) for dim in (0, -1) for sizes, dtype in EACH],
    replayed=[MatmulAllGather(2, *WHOLE, "bf16", columns) for columns in (False, True)],
    gradients=[
        (Gemm((128, 64), 40), (True, True)),
        (Gemm((3, 65, 48), 40, dim=-1), (True, True)),
        (Gemm((3, 65, 48), 40, dim=1), (True, False)),
        (Gemm((128, 64), 40, dim=-1), (False, True)),
    ],
    many=[one for dtype in (BF16, F32) for dim in (0, -1) for one in by(Gemm(dtype=dtype, dim=dim), None, *GATHERS)],
    layouts=by(Gemm((17, 24), 8, dim=-1), "serial", *GATHERS),
    captured=[one for dim in (0, -1) for one in twice_in_a_graph(Gemm(dim=dim), [None, *GATHERS], "tracked[chunks=2]")],
)

KERNEL = "shard[chunks=1,send=in_turn,by=kernel]"

ALL_GATHER_SCALED_MATMUL = Row(
    results={
        "large": ScaledGathered((2048, 1024), 512, return_A=False),
        "large, by row": ScaledGathered((2048, 1024), 512, by="row", return_A=False),
        "large, fast": ScaledGathered((2048, 1024), 512, fast=True, return_A=False),
        "small, three weights": ScaledGathered((16, 512), 256, more=(128, 128), by="row", return_A=False),
        "A wanted": ScaledGathered((512, 512), 256, by="row"),
        "scales of all rows on every rank": ScaledGathered((512, 512), 256, by="row of all"),
        "biases": ScaledGathered((256, 512), 256, more=(64,), biased=True),
        "biases, by row": ScaledGathered((256, 512), 256, more=(64,), biased=True, by="row"),
        "biases in fp16": ScaledGathered((256, 512), 256, biased=True, out=F16),
        "fp32": ScaledGathered((256, 512), 256, out=F32),
        "fp8": ScaledGathered((256, 512), 256, more=(64,), out=FP8),
        "fp8, biases": ScaledGathered((256, 512), 256, out=FP8, biased=True, return_A=False),
        "odd rows": ScaledGathered((37, 48)),
        "odd rows, by row": ScaledGathered((37, 48), by="row", return_A=False),
        "one row": ScaledGathered((1, 256), 128, return_A=False),
        "one row, by row": ScaledGathered((1, 256), 128, by="row", return_A=False),
        "uneven": ScaledGathered((64, 256), 128, rows=(64, 300)),
        "uneven, by row": ScaledGathered((64, 256), 128, rows=(64, 301), by="row"),
        "a batch of sequences": ScaledGathered((4, 256, 512), 384, dim=1, by="row"),
        "no rows": ScaledGathered((0, 128), 64, by="row"),
    },
    every=[
        (
            ScaledGathered((rows, 512), 256, more=(64,), by=kind, return_A=False),  # type: ignore[arg-type]
            {"serial", "gather", "shard", "ficco_1d", "ficco_1d_collective"},
        )
        for kind in ("tensor", "row")
        for rows in (256, 50)  # 50 is no multiple of 4
    ],
    layouts=by(ScaledGathered((96, 272), 144), "serial", GATHER),
    captured=[
        one
        for kind in ("tensor", "row")
        for one in by(
            ScaledGathered((256, 512), 256, by=kind, return_A=False),  # type: ignore[arg-type]
            None,
            "serial",
            GATHER,
            SHARD,
            KERNEL,
        )
    ],
    compiled=["A wanted"],
    marks=[needs_fp8],
)

SCATTER, DIRECT = "scatter", "direct[chunks=2,by=dma,add=reduce]"
BY_KERNEL, STORE = "direct[chunks=1,by=kernel,add=reduce]", "direct[chunks=1,by=store,add=reduce]"

SCALED_MATMUL_REDUCE_SCATTER = Row(
    # Cases with row-wise scales have bf16 results, because some GPUs have row-wise scaled GEMMs for bf16 only.
    results={
        "large": ScaledGemm((4096, 1024), 2048),
        "large, by row": ScaledGemm((4096, 1024), 2048, by="row", schedule=DIRECT),
        "large, fast": ScaledGemm((4096, 1024), 512, fast=True, schedule=STORE),
        "large, by row, fast": ScaledGemm((4096, 1024), 512, by="row", fast=True, op="avg", schedule=SCATTER),
        "small": ScaledGemm((32, 512), 256, op="avg", schedule=SCATTER),
        "biases": ScaledGemm((512, 512), 256, biased=True, schedule=DIRECT),
        "biases, by row": ScaledGemm((512, 512), 256, biased=True, by="row", schedule=DIRECT),
        "biases in fp16": ScaledGemm((512, 512), 256, biased=True, out=F16, schedule=BY_KERNEL),
        "fp32": ScaledGemm((512, 512), 256, out=F32, schedule=DIRECT),
        "odd rows": ScaledGemm((74, 48), schedule=STORE),
        "odd rows, by row": ScaledGemm((74, 48), by="row", schedule=DIRECT),
        "one row each": ScaledGemm((2, 256), 128, by="row", schedule=SCATTER),
        "batches": ScaledGemm((256, 4, 512), 384, by="row", schedule=DIRECT),
        "a batch of sequences": ScaledGemm((4, 256, 512), 384, dim=1, by="row", op="avg", schedule=DIRECT),
        "a batch of sequences, serial": ScaledGemm((4, 256, 512), 384, dim=1, by="row", op="avg", schedule="serial"),
        "a batch of sequences, a scale for all": ScaledGemm((4, 256, 512), 384, dim=1, schedule=STORE),
        "flattened": ScaledGemm((4, 256, 512), 384, dim=1, by="row", flat=True, schedule=DIRECT),
        "no rows": ScaledGemm((0, 128), 64, by="row"),
        "autotuned": ScaledGemm((1024, 512), 512, by="row", schedule="autotune"),
    },
    every=[
        (ScaledGemm((rows, 512), 256, by=kind), {"serial", "scatter", "direct"})  # type: ignore[arg-type]
        for kind in ("tensor", "row")
        for rows in (512, 100)  # with 100, the rows of a chunk are no multiple of 4
    ],
    replayed=[
        ScaledMatmulReduceScatter(2, *WHOLE, "bf16", "tensor", True, False),
        ScaledMatmulReduceScatter(2, *WHOLE, "bf16", "row", False, True),
    ],
    many=by(ScaledGemm(n=96, by="row"), None, SCATTER, DIRECT, STORE),
    layouts=by(ScaledGemm((448, 256), 144), "serial", DIRECT),
    captured=[
        one
        for kind in ("tensor", "row")
        for one in by(
            ScaledGemm((544, 512), 272, by=kind),  # not of `every`: a first call is refused in a capture
            None,
            "serial",
            SCATTER,
            DIRECT,
            BY_KERNEL,
            STORE,  # type: ignore[arg-type]
        )
    ],
    compiled=["biases", "a batch of sequences", "flattened"],
    marks=[needs_fp8],
)

COMBINES = ["combine[chunks=1,by=dma]", "combine[chunks=1,by=store]"]
TOLD = ["combine[chunks=1,by=kernel]", "combine[chunks=1,by=store]", "combine_by_expert[chunks=2,by=kernel]"]


def experts(case: Experts, *schedules: str | None) -> dict[str, Case]:
    """Return {name: `case` with a schedule}, for each of `schedules`."""
    how = "exact" if case.exact else "told"
    return {f"{how}, {case.traffic}, {case.dtype}, {one.schedule}": one for one in by(case, *schedules)}


MATMUL_ALL_TO_ALL = Row(
    results={
        **experts(Experts(3, BF16), None, "serial", *COMBINES),
        **experts(Experts(3, BF16, "all to one"), None, "serial", *COMBINES),
        **experts(Experts(3, BF16, "one has nothing"), None, "serial", *COMBINES),
        **experts(Experts(3, BF16, "nothing"), None, "serial", *COMBINES),
        **experts(Experts(2, BF16, "uneven", False, True, 64, 40), None, "serial", *TOLD),
        **experts(Experts(2, F16, "uneven", False, True, 64, 40), None, "serial", *TOLD),
        **experts(Experts(2, F32, "uneven", False, True, 64, 40), None, "serial", *TOLD),
    },
    steps=[(Experts(schedule="serial"), {"library_grouped_matmul", "permute", "exchange ordered -> y"})],
    calls=6,
)

ALL_TO_ALL_MATMUL = Row(
    results={},
    steps=[
        (
            Experts(schedule="serial"),
            {"exchange splits -> received", "exchange tokens -> unordered", "permute", "library_grouped_matmul"},
        )
    ],
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
