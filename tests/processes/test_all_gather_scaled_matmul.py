"""weft.all_gather_scaled_matmul on CPU processes: results by every schedule, torch.compile, layouts, bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import scaled_ranks as ranks
from support.scaled_ranks import FP8, Case
from support.slow import slow

from weft.launch import Pool

SHARD = "shard[chunks=2,send=in_turn,by=dma]"
GATHER = {"schedule": "gather[by=kernel]"}
# Without a schedule all candidates are compiled and timed before one is taken, which costs seconds.
FORWARD = {
    "a scale for all": Case(),
    "a scale for each row": Case(by="row"),
    "scales of all rows on every rank": Case(by="row of all", widths=(16, 32), options={"schedule": "serial"}),
    "three weights, biases": Case(widths=(16, 48, 32), biased=True, return_A=False, options={"schedule": SHARD}),
    "by row, biases in fp16": Case(widths=(16, 32), by="row", biased=True, out=torch.float16, options=GATHER),
    "fp32, fast": Case(out=torch.float32, fast=True, by="row", options={"schedule": "serial"}),
    "pinned, A wanted": Case(by="row", options={"schedule": SHARD}),
    "uneven": Case(rows=(6, 0, 3, 1), by="row", options=GATHER),
    "uneven, serial": Case(rows=(6, 0, 3, 1), by="row", options={"schedule": "serial"}),
    "uneven, scales of all rows": Case(rows=(6, 0, 3, 1), by="row of all"),
    "a batch of sequences": Case(shape=(2, 3, 16), gather_dim=1, by="row", options=GATHER),
    "a batch, uneven, scales of all": Case((2, 3, 16), 1, rows=(3, 1, 2, 4), by="row of all", options=GATHER),
    "one row each": Case(shape=(1, 16), by="row", return_A=False),
    "no rows": Case(shape=(0, 16), by="row"),
    "fp8": Case(out=FP8, widths=(16, 32)),
    "fp8, biases": Case(out=FP8, biased=True, return_A=False, options={"schedule": SHARD}),
    "fp8, serial, a batch": Case(shape=(2, 3, 16), gather_dim=1, out=FP8, options={"schedule": "serial"}),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("world", [1, 2, 4])  # the one that changes last: each change makes a new group
def test_results(pool: Pool, world: int, name: str) -> None:
    case = FORWARD[name]
    if world == 1:
        case = replace(case, options={})
    pool.run(ranks.forward, case, 2, ranks=world, timeout_s=60)


KINDS = [("tensor", torch.bfloat16), ("row", torch.bfloat16), ("tensor", FP8)]


@pytest.mark.parametrize(
    ("world", "by", "out"),
    [*((world, *kind) for world in (1, 2) for kind in KINDS), slow(3, "tensor", FP8), slow(4, "row", torch.bfloat16)],
)
def test_every_schedule(pool: Pool, world: int, by: str, out: torch.dtype) -> None:
    case = Case(shape=(8, 32), widths=(16, 32), by=by, biased=True, return_A=False, out=out)  # type: ignore[arg-type]
    builders = {name.split("[")[0] for name in pool.run(ranks.every_schedule, case, ranks=world, timeout_s=120)[0]}
    assert builders == ({"serial"} if world == 1 else {"serial", "gather", "shard", "ficco_1d", "ficco_1d_collective"})


@pytest.mark.parametrize("name", ["a scale for all", "by row, biases in fp16", "a batch of sequences", "fp8", "uneven"])
def test_compiled(pool: Pool, name: str) -> None:
    pool.run(ranks.compiled, FORWARD[name], ranks=2, timeout_s=120)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["fp8", "fp8, serial, a batch"])
def test_none_among_out_dtypes_is_what_torch_makes_of_it(pool: Pool, name: str, compiled: bool) -> None:
    """Bit by bit, beyond the largest number too, and as it lies in memory."""
    for dtypes in pool.run(ranks.as_scaled_mm, FORWARD[name], compiled, ranks=2, timeout_s=60):
        assert set(dtypes) == {FP8}


def test_opcheck(pool: Pool) -> None:
    pool.run(ranks.checked_as_op, ranks=1, timeout_s=120)


@pytest.mark.parametrize("of_B", [(), (1, 1), (1, 16)], ids=str)
@pytest.mark.parametrize("rows", [None, [1, 3], [0, 1], [4, 1]], ids=str)
def test_the_shape_says_that_a_scale_is_of_rows(pool: Pool, rows: list[int] | None, of_B: tuple[int, ...]) -> None:
    """Also where a rank has one row, or none, as in torch's operator."""
    for by in ("row", "row of all", "shard"):
        pool.run(ranks.scales_of_one_row, rows, by, of_B, ranks=2, timeout_s=60)


def test_weights_by_rows_are_copied_and_warned_about_once(pool: Pool) -> None:
    for told in pool.run(ranks.copies, ranks=2, timeout_s=60):
        assert sum("Bs[0] is copied at every call" in text for text in told) == 1


def test_bad_arguments_name_the_values_and_the_fix(pool: Pool) -> None:
    expected = {
        "dtype": "A_shard is torch.bfloat16: use torch.float8_e4m3fn",
        "K": "K=24 must be a positive multiple of 16 for fp8 GEMMs: use 16 or 32",
        "N": "N of Bs[0]=8 must be a positive multiple of 16 for fp8 GEMMs: use 16",
        "no matrix": "Bs is empty",
        "one tensor": "B_scales is one tensor of shape (1,): pass a list",
        "lengths": "B_scales has 2 entries: pass one for each of 1 Bs",
        "shape of A_scale": "A_scale has shape (5, 1): pass one element, or, for each row a scale, (7, 1) or (14, 1)",
        "dtype of A_scale": "A_scale is torch.float16 on cpu: use torch.float32",
        "a number": "A_scale is a float: pass a torch.Tensor",
        "shape of B_scales": "B_scales[0] has shape (16, 1): pass [1, 16]",
        "rows of B only": "B_scales[0] has shape (1, 16): pass one element, or A_scale with a scale for each row",
        "bias": "biases[0] is torch.float32 on cpu: use torch.bfloat16",
        "shape of bias": "biases[0] has shape (15,), strides (1,): pass a contiguous [16]",
        "bias of fp32": "fp8 GEMMs add none there; use bf16",
        "result scale": "result_scales are not supported: pass None for each, and scale B_scales",
        "out": "out_dtypes has torch.float64: use one of torch.bfloat16",
        "fp8 by row": "out_dtypes[0] is torch.float8_e4m3fn (or None): with scales of rows",
        "bias of fp8": "biases[0] is torch.float32 on cpu: use torch.bfloat16",
        "gradient": "an input wants gradients, and there are none of fp8",
        "2D": "no scaled GEMMs",
        "deadline": "deadline_s=0 must be positive",
        "timeline": "timeline=3 is no timeline: pass weft.Timeline()",
    }
    for told in pool.run(ranks.errors, ranks=2, timeout_s=60):
        assert told.keys() == expected.keys()
        for name, text in expected.items():
            assert text in told[name], name


def test_one_rank_that_differs_is_named_on_every_rank(pool: Pool) -> None:
    with Pool(2) as alone:
        found = alone.run(ranks.one_rank_differs, timeout_s=60)
    for told in found:
        assert told["refuses"].startswith("RefusedError: rank 0: K=24")
        for name in ("scales", "out", "fast"):
            assert told[name].startswith("DisagreementError: ranks make different calls"), name
        assert "scaled by row" in told["scales"]
        assert "out_dtypes=[torch.float16]" in told["out"]
