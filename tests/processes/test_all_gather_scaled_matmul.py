"""Tests of weft.all_gather_scaled_matmul only, on CPU processes: results without an out_dtype, and scales of one row.
`test_operators.py` has the other tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import FP8, device
from support.operators.cases import ROWS
from support.operators.scaled import AllGatherScaledMatmulCall, ScaledGathered
from support.slow import in_turn

import weft
from weft.launch import Pool


def as_scaled_mm(group: dist.ProcessGroup, case: ScaledGathered, is_compiled: bool) -> list[torch.dtype]:
    """Compare `out_dtypes=[None]` with torch's own GEMM of the whole operands without an out_dtype."""
    made = AllGatherScaledMatmulCall(case, group, 5)
    one, name, dim = torch.full((1,), 20.0, device=device()), group.group_name, case.dim  # most results overflow fp8

    def call(x: torch.Tensor, Bs: list[torch.Tensor]) -> Any:
        n = len(Bs)
        return weft.all_gather_scaled_matmul(
            x, Bs, one, [one] * n, dim, name, [None] * n, [None] * n, [None] * n, [False] * n
        )

    Bs = [B for B, *_ in made.weights(made.mine)]
    call = torch.compile(call, fullgraph=True, backend="aot_eager") if is_compiled else call
    A, ys = call(made.mine[0], Bs)
    gathered = made.whole(made.inputs, made.rank)[0].movedim(dim, 0)
    wanted = [torch._scaled_mm(gathered.flatten(0, -2), B, one, one) for B in Bs]
    for y, flat in zip(ys, wanted, strict=True):
        expected = flat.unflatten(0, gathered.shape[:-1]).movedim(0, dim)
        assert y.stride() == expected.stride()
        assert torch.equal(y.float(), expected.float())
        assert (y.float().abs() == torch.finfo(FP8).max).any()
    return [y.dtype for y in (A, *ys)]


@pytest.mark.parametrize(("name", "compiled"), in_turn(["fp8", "fp8, serial, a batch"], [False, True]))
def test_none_among_out_dtypes_is_what_torch_makes_of_it(pool: Pool, name: str, compiled: bool) -> None:
    """Compare bits, also of results that overflow, and strides."""
    for dtypes in pool.run(
        as_scaled_mm, ROWS["all_gather_scaled_matmul"].results[name], compiled, ranks=2, timeout_s=60
    ):
        assert set(dtypes) == {FP8}


def scales_of_one_row(group: dist.ProcessGroup, rows: list[int] | None, by: str, of_B: tuple[int, ...]) -> None:
    """Pass an A_scale of one element together with a B_scale of one element.

    by: "row": each row has its own scale. "row of all": every rank passes the same tensor. "shard": each rank passes
    the scale of its own rows, as [1, 1].
    """
    sizes = rows or [1, 1]
    made = AllGatherScaledMatmulCall(ScaledGathered((4, 32), rows=tuple(sizes)), group, 4)
    (A, _, B, *_), (whole, _) = made.mine, made.whole(made.inputs, made.rank)
    scale = torch.arange(1.0, 1 + sum(sizes))[:, None]
    if by == "shard":
        scale = torch.full_like(scale, 3.0)
    given = {"row": scale.split(sizes)[made.rank], "row of all": scale, "shard": torch.full((1, 1), 3.0)}[by]
    for _ in range(2):
        _, (y,) = weft.all_gather_scaled_matmul(
            A, [B], given, [torch.full(of_B, 2.0)], 0, group, None, None, [torch.float32], rows=rows
        )
        torch.testing.assert_close(y, scale * (whole.float() @ B.float()) * 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of_B", [(), (1, 1), (1, 16)], ids=str)
@pytest.mark.parametrize("rows", [None, [1, 3], [0, 1], [4, 1]], ids=str)
def test_the_shape_says_that_a_scale_is_of_rows(pool: Pool, rows: list[int] | None, of_B: tuple[int, ...]) -> None:
    """This must also work if a rank has one row or none, as in torch's operator."""
    for by in ("row", "row of all", "shard"):
        pool.run(scales_of_one_row, rows, by, of_B, ranks=2, timeout_s=60)
