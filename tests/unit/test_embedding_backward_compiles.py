"""The kernels of embedding_all_to_all's backward compile for NVIDIA and AMD, without a GPU, for every rule and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.embedding_training import OPTIMIZERS
from support.slow import mostly

from weft import env

triton = pytest.importorskip("triton", reason="Triton is not installed here: it compiles the GPU kernels")
if env.triton_interpreted():
    pytest.skip("TRITON_INTERPRET=1: this process interprets kernels, it compiles none", allow_module_level=True)

from test_kernel_compiles import TARGETS, compiling_for  # noqa: E402

from weft.kernels import embedding_backward as device_code  # noqa: E402
from weft.runtime.cuda.embedding_backward import SEGMENT  # noqa: E402
from weft.runtime.cuda.tensor_maps import TRITON_TYPE  # noqa: E402

I64, F32 = torch.int64, torch.float32
RULES = [0, *sorted({optimizer.rule for optimizer in OPTIMIZERS})]
CASES: dict[str, dict[str, Any]] = {
    **{f"rule {rule}": {"rule": rule} for rule in RULES},
    **{
        f"rule {rule}, bf16, weighted, wide keys": {"rule": rule, "dtype": torch.bfloat16, "scaled": True, "keys": I64}
        for rule in RULES
    },
    "fp16, skipping": {"rule": 2, "dtype": torch.float16, "skip": True},
    "fp16 at random, by fp32": {"rule": 3, "dtype": torch.float16, "grads": F32, "random": True},
    "bf16 at random": {"rule": 2, "dtype": torch.bfloat16, "random": True},
    "fp32 gradients of bf16": {"rule": 0, "dtype": F32, "grads": torch.bfloat16},
    "squares": {"rule": 6, "dtype": torch.bfloat16},
    "sparse gradients of tables with several features": {"rule": 0, "sparse": True, "split": 3},
    "wide": {"rule": 4, "lanes": 1, "block_d": 4096, "warps": 8},
    "narrow": {"rule": 2, "lanes": 16, "block_d": 16, "warps": 1},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name", mostly(CASES, "rule 2", "rule 4, bf16, weighted, wide keys", "wide", "fp16 at random, by fp32")
)
def test_kernels_compile(name: str, target: str) -> None:
    usual = {"dtype": F32, "scaled": False, "skip": False, "sparse": False, "split": 1, "keys": torch.int32}
    case = usual | {"lanes": 4, "block_d": 256, "warps": 2} | CASES[name]
    tile = {"ROWS": case["lanes"], "BLOCK_D": case["block_d"]}
    of_sums = tile | {"SCALED": case["scaled"], "SEGMENT": SEGMENT}
    of_rows = {"SPLIT": case["split"], "DTYPE": TRITON_TYPE[case["dtype"]]}
    grads = case.get("grads", case["dtype"])
    data = I64, I64, F32, grads  # order, places, scales, gradients
    with compiling_for(TARGETS[target]):
        options = {"grid": (1,), "num_warps": case["warps"]}
        sums = device_code.segment_sums_kernel.warmup(*data, I64, I64, I64, I64, I64, I64, F32, **of_sums, **options)
        rules = {"RULE": case["rule"], "SPARSE": case["sparse"], "SKIP": case["skip"]}
        rules |= {"STOCHASTIC": case.get("random", False)}
        extra = F32 if case["rule"] == 6 else I64
        update = device_code.update_rows_kernel.warmup(
            case["keys"],
            *data,
            I64,
            I64,
            I64,
            F32,
            I64,
            I64,
            F32,
            extra,
            I64,
            **of_sums,
            **of_rows,
            **rules,
            **options,
        )
        weights = device_code.gradients_of_weights_kernel.warmup(
            case["keys"], I64, grads, I64, I64, F32, 1000, **tile, **of_rows, NO_ROW=10**6, **options
        )
    code = "cubin" if target == "sm_90" else "hsaco"
    assert all(one.asm[code] for one in (sums, update, weights))
