"""A norm with a replicated weight, for an input that is sharded along the sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from weft.arguments import check_flag, checked_shape, not_dense
from weft.nn.layer_arguments import DTYPES, check_device, check_dtype, checked_size
from weft.operator.layers import compare_options, given, replicated, tells_peers, wrong_device
from weft.schedule.regions import checked_eps
from weft.symm.groups import member_group


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` for activations that are sharded along the sequence. The weight is replicated, and its gradient is
    summed over `group`.

        x [..., hidden]  ->  [..., hidden]        x: this rank's part of the sequence

    Forward has no collective. All ranks of `group` must run every backward, which all-reduces the weight's gradient.
    Forward raises `ValueError` if x is on another device than the weight; the next call of the other ranks then raises
    `RefusedError`.

    For replicated activations (layers with `sequence_dim=None`) use torch's `nn.RMSNorm`. Other arguments are as for
    `nn.RMSNorm`.
    """

    def __init__(
        self,
        normalized_shape: int | list[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        group: dist.ProcessGroup | str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        several = isinstance(normalized_shape, tuple | list)
        sizes = checked_shape("normalized_shape", normalized_shape) if several else [normalized_shape]
        shape = [checked_size("normalized_shape", size) for size in sizes]
        if not shape:
            raise ValueError(
                f"normalized_shape={normalized_shape!r} has no dimension: pass the size of the last dimension of x"
            )
        check_flag("elementwise_affine", elementwise_affine)
        check_device(device)
        check_dtype(dtype)
        eps = None if eps is None else checked_eps(eps)
        super().__init__(shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.group_name = member_group(group).group_name

    @tells_peers
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x over the last dimensions, `normalized_shape`."""
        # Forward has no collective, so without this check and `tells_peers` only this rank would raise.
        if wrong := self._wrong_input(x):
            raise ValueError(f"RMSNorm: {wrong}")
        compare_options(
            "RMSNorm", self.group_name, x, is_collective=False, normalized_shape=self.normalized_shape, eps=self.eps,
            weight=given(self.weight),
        )  # fmt: skip
        weight = None if self.weight is None else replicated(self.weight, self.group_name)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)

    def _wrong_input(self, x: torch.Tensor) -> str:
        """Return the error text for a bad x; "" for a valid x."""
        if wrong := not_dense("x", x):
            return wrong
        shape, last = tuple(x.shape), tuple(self.normalized_shape)
        if shape[-len(last) :] != last or x.dtype not in DTYPES:
            return f"x is {x.dtype} {shape}: pass a floating-point tensor [..., {', '.join(map(str, last))}]"
        return "" if self.weight is None else wrong_device(x, self.weight)
