"""The kernels of embedding_all_to_all's backward, and of the exchange of headers, compile for NVIDIA and AMD without a GPU, for
every rule and dtype.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.embedding_training import OPTIMIZERS
from support.slow import pairs

from weft import env

triton = pytest.importorskip("triton", reason="Triton is not installed here: it compiles the GPU kernels")
if env.triton_interpreted():
    pytest.skip("TRITON_INTERPRET=1: this process interprets kernels, it compiles none", allow_module_level=True)

from test_kernel_compiles import TARGETS, compiling_for  # noqa: E402
from triton import language as tl  # noqa: E402

from weft.kernels import embedding_backward as device_code  # noqa: E402
from weft.kernels import embedding_push as push_code  # noqa: E402
from weft.kernels import embedding_runs as runs_code  # noqa: E402
from weft.kernels import input_dist as input_code  # noqa: E402
from weft.runtime.cuda.embedding_runs import SEGMENT  # noqa: E402
from weft.runtime.cuda.tensor_maps import TRITON_TYPE  # noqa: E402

I32, I64, F32 = torch.int32, torch.int64, torch.float32
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
    "wide": {"rule": 4, "lanes": 1, "block_d": 4096, "warps": 8, "group": 1, "uniform": True},
    "narrow": {"rule": 2, "lanes": 16, "block_d": 16, "warps": 1, "group": 32, "align": 1},
}
USUAL = {
    "dtype": F32, "scaled": False, "skip": False, "sparse": False, "split": 1, "keys": I32, "lanes": 4, "block_d": 256, "warps": 2,
    "group": 2, "uniform": False, "align": 4,
}  # fmt: skip


def _binary(target: str) -> str:
    return "cubin" if target == "sm_90" else "hsaco"


@pytest.mark.parametrize(
    ("name", "target"),
    pairs(
        CASES, TARGETS, ("rule 2", "sm_90"), ("rule 4, bf16, weighted, wide keys", "gfx942"),
        ("fp16 at random, by fp32", "sm_90"),
    ),
)  # fmt: skip
def test_kernels_compile(name: str, target: str) -> None:
    case = USUAL | CASES[name]
    dtype, grads = case["dtype"], case.get("grads", case["dtype"])
    of_tile = {"BLOCK_D": case["block_d"], "UNIFORM": case["uniform"], "ALIGN": case["align"], "SCALED": case["scaled"]}
    of_tile |= {"SEGMENT": SEGMENT, "SPLIT": case["split"], "STEPS": 3}
    options = {"grid": (1,), "num_warps": case["warps"]}
    rules = {"RULE": case["rule"], "SPARSE": case["sparse"], "SKIP": case["skip"]}
    rules |= {"CLIPS": case["skip"], "DECAYS": case["skip"], "PTX": target == "sm_90"}
    rules |= {"STOCHASTIC": case.get("random", False), "DTYPE": TRITON_TYPE[dtype], "ITEM_BYTES": dtype.itemsize}
    data = case["keys"], I32, F32, grads, I32  # keys of runs, places, scales, gradients, starts
    with compiling_for(TARGETS[target]):
        sums = device_code.segment_sums_kernel.warmup(
            *data, I32, I32, I64, I64, F32, 5, ROWS=case["lanes"], **of_tile, **options
        )
        of_runs = device_code.run_sums_kernel.warmup(
            I32, I32, I32, I64, F32, ROWS=2 * case["lanes"], BLOCK_D=case["block_d"], SEGMENT=SEGMENT, **options
        )
        extra = F32 if case["rule"] == 6 else I64
        update = device_code.update_rows_kernel.warmup(
            *data, I64, I64, I32, F32, I64, F32, F32, extra, I64, 5, GROUP=case["group"], **of_tile, **rules, **options
        )
        added = device_code.add_each_kernel.warmup(
            case["keys"], I32, F32, grads, I64, F32, F32, I64, 1000, 10**6, 5, ROWS=case["lanes"],
            **{name: value for name, value in of_tile.items() if name != "SEGMENT"}, **options,
        )  # fmt: skip
        weights = device_code.gradients_of_weights_kernel.warmup(
            case["keys"], I32, grads, I64, F32, 1000, 10**6, 5,
            ROWS=case["lanes"], BLOCK_D=case["block_d"], SPLIT=case["split"], STEPS=3, DTYPE=TRITON_TYPE[dtype], **options,
        )  # fmt: skip
    assert all(kernel.asm[_binary(target)] for kernel in (sums, of_runs, update, added, weights))


@pytest.mark.parametrize(("wide", "target"), pairs([False, True], TARGETS, (False, "sm_90")))
def test_kernels_of_runs_compile(wide: bool, target: str) -> None:
    keys, split = (I64, 3) if wide else (I32, 1)
    block = {"BLOCK": 1024, "SPLIT": split}
    with compiling_for(TARGETS[target]):
        found = [
            runs_code.occurrences_kernel.warmup(
                keys, keys, F32, I64, I64, keys, keys, F32, F32, 1000, 100, 10, 10, 64, 10**6,
                HASH=wide, WEIGHTED=wide, ANY_MEAN=wide, BAG=tl.int64 if wide else tl.int32, grid=(1,), **block,
            ),
            runs_code.count_runs_kernel.warmup(keys, I64, 1000, 10**6, grid=(1,), **block),
            runs_code.sum_runs_kernel.warmup(I64, I64, I64, 100, BLOCK=1024, grid=(1,)),
            runs_code.runs_kernel.warmup(
                keys, I64, keys, F32, I64, I32, keys, keys, F32, I64, 1000, 10**6, SCALED=wide, SEGMENT=SEGMENT, ORDER=0,
                grid=(1,), **block,
            ),
            *(
                runs_code.runs_kernel.warmup(
                    I32, I32, I32, F32, I64, I32, I32, I32, F32, I64, 1000, 10**6, SCALED=False, SEGMENT=SEGMENT, ORDER=order,
                    grid=(1,), **block,
                )
                for order in (1, 2)
            ),
            runs_code.long_runs_kernel.warmup(I32, I64, I64, I32, I32, I32, BLOCK=256, SEGMENT=SEGMENT, grid=(1,)),
        ]  # fmt: skip
    assert all(kernel.asm[_binary(target)] for kernel in found)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_that_exchange_compile(target: str) -> None:
    of_world = {"RANK": 1, "WORLD": 3, "WORLD_P2": 4, "PTX": target == "sm_90", "grid": (1,)}
    with compiling_for(TARGETS[target]):
        found = [
            push_code.push_kernel.warmup(
                F32, I64, I64, I64, I64, I64, 100, 200, 7, 640, 10**10, ROWS=8, BLOCK=512, ALIGN=8, DTYPE=tl.bfloat16,
                ITEM_BYTES=2, WAIT=True, **of_world,
            ),
            push_code.free_kernel.warmup(I64, I64, **of_world),
            input_code.exchange_kernel.warmup(I64, I64, I64, I64, I64, I64, 1024, 10**10, BLOCK=256, WAIT=True, **of_world),
        ]  # fmt: skip
    assert all(kernel.asm[_binary(target)] for kernel in found)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("is_boxed", [False, True])
def test_kernels_of_the_input_distribution_compile(target: str, is_boxed: bool) -> None:
    options = {"WEIGHTED": True, "BOXED": is_boxed, "BLOCK": 1024, "grid": (1, 1)}
    with compiling_for(TARGETS[target]):
        found = [
            input_code.header_kernel.warmup(
                I64, I64, I64, I64, I64, 26, 100, 64, 512, 9999, KEYS=32, GIVEN=True, PADDED=is_boxed, BLOCK=1024, grid=(1,)
            ),
            input_code.pack_kernel.warmup(
                I64, I32, F32, I64, I64, I64, I32, I64, 26, 26, 512, 2, 9999, PIECES=32, KEYS=32, ID_WORDS=2, **options
            ),
            input_code.unpack_kernel.warmup(
                I64 if is_boxed else I32, I64, I64, F32, I64, I64, I64, 2, 13, 9999, 512, 9999, RANK=1, PIECES=32, ID_WORDS=2,
                BAGS=1024, SUM=8192, **options,
            ),
        ]  # fmt: skip
    assert all(kernel.asm[_binary(target)] for kernel in found)
