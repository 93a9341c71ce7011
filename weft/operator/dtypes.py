"""The dtypes of the matrices that operators multiply.

CPU processes also support fp64, for `torch.autograd.gradcheck`. weft's GPU kernels reduce in fp32, so GPUs do not support fp64.
"""

from __future__ import annotations

import torch

from weft.runtime.schedule_memory import TORCH_DTYPE

_NAMES = {TORCH_DTYPE[name]: name for name in ("fp32", "fp16", "bf16", "fp64")}


def name_of_dtype(name: str, x: torch.Tensor, why: str = "") -> str:
    """Return weft's name of `x.dtype`, such as "bf16". Raise `ValueError` if GEMMs on this type of device do not
    support the dtype.

    name: the argument's name in error texts. why: text to append to the error text.
    """
    if x.dtype == torch.float64 and x.device.type != "cpu":
        raise ValueError(
            f"{name} is torch.float64 on {x.device}: fp64 is only for CPU processes, to check gradients; on GPUs "
            "use torch.float32, torch.float16 or torch.bfloat16"
        )
    if x.dtype not in _NAMES:
        raise ValueError(f"{name} is {x.dtype}: use one of {', '.join(map(str, _NAMES))}{why}")
    return _NAMES[x.dtype]
