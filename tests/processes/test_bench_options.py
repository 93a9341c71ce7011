"""An operator's options in its benchmark: the meaning of their strings, and the schedules that calls with options take."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch.distributed as dist
from support.bench import cpu_ranks, quick, records_of

from weft import symm
from weft.bench.__main__ import options_of
from weft.bench.core.operators import operator
from weft.bench.core.options import BenchOptions
from weft.bench.ops import any_operator
from weft.launch import Pool
from weft.operator import select

REFUSED: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "embedding_all_to_all": (
        {},
        [
            ({"preset": "x"}, "no preset 'x'"),
            ({"ranks": 0}, "ranks=0 must be at least 1"),
            ({"device": "tpu"}, "device='tpu'"),
            ({"dtype": "fp8"}, "dtype='fp8'"),
            ({"modes": ("graph",)}, "modes=.*supports only single, queued"),
            ({"seconds": 0.0}, r"seconds=0\.0 must be above 0"),
            ({"scale": 3.0}, r"scale=3\.0"),
            ({"variants": ("fbgemm",)}, "variant 'fbgemm' cannot run here: it is a baseline only on GPUs"),
        ],
    ),
    "embedding_training": (
        {},
        [
            (
                {"preset": "meta-2021"},
                "no preset 'meta-2021': give one of pgas-weak, pgas-strong, 64x200k, 128x100k, dcnv2",
            ),
            ({"variants": ("put",)}, "no variant 'put': give fbgemm-deterministic, fbgemm, torch, weft"),
            ({"modes": ("graph",)}, "modes=.*supports only single, queued"),
        ],
    ),
    "tensor_parallel": (
        {"modes": ("queued",)},
        [
            ({"variants": ("fast",)}, "no variant 'fast': give some of serial, weft, weft-compiled, asynctp"),
            ({"variants": ("asynctp",)}, "variant 'asynctp' runs only on GPUs: use device='cuda'"),
            (
                {"variants": ("asynctp",), "device": "cuda", "preset": "llama-3-8b-whole"},
                "variant 'asynctp' cannot run preset llama-3-8b-whole, because AsyncTP has no all-reduce",
            ),
            ({"preset": "llama"}, "no preset 'llama': give some of llama-3-8b, llama-3-70b, llama-3-405b, cpu"),
            ({"ranks": 1}, "ranks=1: a tensor-parallel block needs at least 2 ranks"),
            ({"ranks": 3}, "length=512 of cpu must be divisible by ranks=3"),
            ({"ranks": 16, "preset": "llama-3-8b"}, "kv_heads=8 of llama-3-8b must be divisible by ranks=16"),
            ({"modes": ("single",)}, "tensor_parallel on cpu supports only"),
            ({"scale": 0.5}, r"scale=0\.5: tensor_parallel cannot be scaled"),
            ({"dtype": "fp8"}, "tensor_parallel, which has no scaled GEMMs"),
        ],
    ),
    "all_to_all_matmul": (
        {"preset": "24x40x16-e6-top2-zipf0.7"},
        [
            (
                {"variants": ("fast",)},
                r"no variant 'fast': give serial, padded, weft, weft-bounded, weft-serial, all, .*dispatch, ",
            ),
            ({"variants": ("dispatch-bounded",)}, "no variant 'dispatch-bounded'"),
            (
                {"variants": ("dispatch[by=kernel,rest=together]",)},
                r"supports none of these shapes \(first shape: with 2 ranks there is only one peer, so rest=together would be "
                "the same as rest=each",
            ),
            ({"modes": ("graph",)}, "modes=.*all_to_all_matmul on cpu supports only"),
            ({"scale": 0.5}, r"scale=0\.5: .* only tables can: name a smaller shape"),
            ({"ranks": 4}, "6 experts cannot be divided evenly over 4 ranks: use 1, 2, 3 or 6 ranks"),
            ({"preset": "8x8x8-e2-top3"}, "top_k=3 must be at most experts=2"),
            (
                {"preset": "mixtral"},
                "no preset 'mixtral': give one of mixtral-8x7b, .*, or a shape TOKENSxNxK-eEXPERTS-topK",
            ),
        ],
    ),
    "matmul_all_to_all": (
        {"preset": "24x16x40-e6-top2-zipf0.7"},
        [
            (
                {"variants": ("fast",)},
                r"no variant 'fast': give serial, padded, weft, weft-bounded, weft-serial, all, .*combine",
            ),
            (
                {"variants": ("combine[chunks=1,by=dma]-bounded",)},
                r"supports none of these shapes \(first shape: the CPU must not wait for sizes",
            ),
            ({"ranks": 4}, "6 experts cannot be divided evenly over 4 ranks: use 1, 2, 3 or 6 ranks"),
        ],
    ),
    "all_gather_matmul": (
        {"preset": "24x10x16"},
        [
            ({"variants": ("fast",)}, r"no variant 'fast': give serial, .*ficco_1d, .*such as shard\["),
            ({"variants": ("asynctp",)}, "variant 'asynctp' runs only on GPUs: use device='cuda'"),
            (
                {"variants": ("shard[chunks=500,send=in_turn,by=dma]",)},
                r"variant 'shard\[chunks=500,.*' supports none of these shapes .*500",
            ),
            (
                {"variants": ("shard[chunks=1,send=at_once,by=dma]",)},
                r"variant 'shard\[.*at_once.*' supports none of these shapes .*peer",
            ),
            ({"modes": ("graph",)}, "modes=.*all_gather_matmul on cpu supports only"),
            ({"scale": 0.5}, r"scale=0\.5: .* only tables can: name a smaller shape"),
            ({"dtype": "fp8"}, "must be a positive multiple of 16 for fp8 GEMMs"),
            ({"ranks": 5}, "m=24 must be divisible by world_size=5: use 20 or 25"),
            ({"preset": "llama"}, "no preset 'llama': give one of measured, llama-3-8b.*or a shape MxNxK"),
            ({"preset": "24x10x16-symmetric"}, "preset 24x10x16-symmetric: torch has symmetric memory only on GPUs"),
        ],
    ),
}
"""{benchmark: (options, [(further options, the error)])}"""


@pytest.mark.parametrize(
    ("op", "wrong", "message"),
    [(op, given | wrong, message) for op, (given, cases) in REFUSED.items() for wrong, message in cases],
)
def test_options_are_checked_before_anything_starts(op: str, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchOptions(op, **wrong)


def test_an_operators_own_options_are_measured_and_named() -> None:
    given = ["--preset", "24x10x16", "--ranks", "2", "--device", "cpu", "--option", "gather_dim=-1"]
    options = options_of(["matmul_all_gather", *given])
    (shape,) = operator("matmul_all_gather").presets(options)
    ((p, _),) = shape.problems("matmul_all_gather", 2, "fp32")
    assert (p.columns, shape.name) == (True, "24x10x16 gather_dim=-1")
    with pytest.raises(ValueError, match=r"gather_dim=-1: matmul_all_reduce has no such option \(matmul_all_gather"):
        options_of(["matmul_all_reduce", *given])
    with pytest.raises(ValueError, match=r"option=.*gather_dim.*: tensor_parallel has no options: do not pass it"):
        options_of(["tensor_parallel", *given[2:]])
    for wrong, said in {
        "gather_dim": "option 'gather_dim' has no value: write it as gather_dim=VALUE",
        "gather_dim=": "option 'gather_dim=' has no value: write it as gather_dim=VALUE",
        "=-1": "option '=-1' has no name: write NAME=VALUE, such as gather_dim=-1",
        "gather_dim=rows": "gather_dim=rows: give an integer",
    }.items():
        with pytest.raises(ValueError, match=said):
            options_of(["matmul_all_gather", *given[:-1], wrong])


def _following(*options: str) -> tuple[str, Any]:
    """Return the name and the problem of a GEMM + all-reduce with these options."""
    given = [word for one in options for word in ("--option", one)]
    typed = options_of(["matmul_all_reduce", "--preset", "24x10x16", "--ranks", "2", "--device", "cpu", *given])
    (shape,) = operator("matmul_all_reduce").presets(typed)
    ((p, _),) = shape.problems("matmul_all_reduce", 2, "fp32")
    return shape.name, p


def test_an_options_text_is_what_its_type_says() -> None:
    name, p = _following("norm=false", "residual=no")
    assert (p.eps, p.residual, name) == (None, False, "24x10x16 norm=False residual=False")
    name, p = _following("norm=YES", "residual=true")
    assert (p.eps, p.residual, name) == (1e-6, True, "24x10x16 norm=True residual=True")
    with pytest.raises(ValueError, match=r"norm=maybe: give true or false \(1 or 0, yes or no\)"):
        _following("norm=maybe")
    with pytest.raises(
        ValueError, match="eps=1e-5: matmul_all_reduce has no such option; its own options are residual, norm"
    ):
        _following("eps=1e-5")


TAKEN = "two_shot[chunks=2,by=dma,add=gemm]"


def _chosen(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the schedules that a benchmark reports for an overlapped call: normally, after the operator has dropped
    the call, and without a call.
    """
    symm.communicator(group, "cpu").close()  # this also drops choices of other tests for this shape
    typed = options_of(
        ["matmul_all_reduce", "--preset", "8x4x8", "--ranks", "2", "--device", "cpu", "--option", "residual=true"]
    )
    op = operator("matmul_all_reduce")
    (shape,) = op.presets(typed)
    work, found, original = op.workload(shape, cpu_ranks(group), typed), {}, select._names_near
    select._names_near = lambda *given, **named: (TAKEN, TAKEN)  # type: ignore[assignment]
    try:
        with contextlib.suppress(KeyError):
            found["not called"] = work.taken("weft", "queued")
        work.weft("weft", None)(0)
        work.called("weft")
        found["serial is noise"] = work.twins("queued")
    finally:
        select._names_near = original
    made, any_operator.prepared_calls = any_operator.prepared_calls, lambda op, group: []  # type: ignore[assignment]
    try:
        found["forgotten"] = work.taken("weft", "queued")
        with contextlib.suppress(RuntimeError):
            work.called("weft")
            found["of another problem"] = work.taken("weft", "queued")
    finally:
        any_operator.prepared_calls = made
        symm.communicator(group, "cpu").close()
    return found


def test_what_a_call_with_options_took_is_recorded_and_never_guessed(pool: Pool) -> None:
    for found in pool.run(_chosen, ranks=2):
        assert found == {"serial is noise": {}, "forgotten": TAKEN}


def _with_a_residual(group: dist.ProcessGroup) -> list[dict]:
    given = (("residual", True), ("norm", False))
    return records_of(group, quick("matmul_all_reduce", "24x10x16", modes=("queued",), option=given))


def test_a_run_with_options_is_measured(pool: Pool) -> None:
    rows = pool.run(_with_a_residual, ranks=2)[0]
    assert {r["config"] for r in rows} == {"24x10x16 residual=True norm=False"}
    assert [(r["variant"], r["chosen"] is None) for r in rows] == [("serial", True), ("weft", False)]
