"""Arguments with the same meaning make the same call for every operator, in whatever form each rank passes them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from operators_called import OPERATORS, Arguments, leaves, mapped, set_to
from support.slow import in_turn, mostly
from torch.utils.flop_counter import FlopCounterMode

from weft.launch import Pool


class Named(torch.Tensor):
    """A subclass of Tensor that behaves like a tensor."""


def scattered(w: torch.Tensor) -> torch.Tensor:
    """Return a copy whose rows and columns are not contiguous."""
    wide = torch.zeros(*w.shape[:-2], 2 * w.shape[-2], 2 * w.shape[-1], dtype=w.dtype)
    wide[..., ::2, ::2] = w
    return wide[..., ::2, ::2]


OF_GATHERS: dict[str, Callable[[Arguments], None]] = {
    "gather_dim from the end": set_to(gather_dim=-2),
    "gather_dim of numpy": set_to(gather_dim=np.int64(0)),
    "rows, all alike": set_to(rows=[4, 4]),
    "rows in a tensor": set_to(rows=torch.tensor([4, 4])),
    "a tuple of weights": lambda a: a.update(Bs=tuple(a["Bs"])),
    "weights one by one": lambda a: a.update(Bs=iter(a["Bs"])),
    "weights by rows": mapped("Bs", torch.Tensor.contiguous),
    "weights by columns": mapped("Bs", lambda w: w.t().contiguous().t()),
    "scattered weights": mapped("Bs", scattered),
    "a wide weight's columns": mapped("Bs", lambda w: torch.cat((w.t(), w.t())).contiguous().t()[:, : w.shape[1]]),
    "a scattered shard": mapped("A_shard", scattered),
    "another type": mapped("A_shard", lambda x: x.as_subclass(Named)),
    "a deadline": set_to(deadline_s=30),
}
OF_PRODUCTS: dict[str, Callable[[Arguments], None]] = {
    "a name": lambda a: a.update(group=a["group"].group_name),
    "scattered rows": mapped("x", scattered),
    "weights by columns": mapped("w", lambda w: w.t().contiguous().t()),
    "scattered weights": mapped("w", scattered),
    "another type": mapped("x", lambda x: x.as_subclass(Named)),
    "a deadline": set_to(deadline_s=30),
}
SAME: dict[str, dict[str, Callable[[Arguments], None]]] = {
    "matmul_all_gather": {
        **OF_PRODUCTS,
        "from behind": set_to(gather_dim=-2),
        "of numpy": set_to(gather_dim=np.int64(0)),
    },
    "matmul_all_reduce": {
        **OF_PRODUCTS,
        "a scattered residual": mapped("residual", scattered),
        "a bias with gaps": mapped("bias", lambda bias: bias.repeat_interleave(2)[::2]),
        "the usual eps": set_to(eps=np.float64(1e-6)),
    },
    "all_gather_matmul": {
        **OF_GATHERS,
        "parameters": mapped("Bs", lambda w: torch.nn.Parameter(w, requires_grad=False)),
    },
    "all_gather_scaled_matmul": {
        **OF_GATHERS,
        "scales of all rows": mapped("A_scale", lambda scale: torch.cat((scale, scale))),
        "one scale for all columns": mapped("B_scales", lambda scale: scale[0, :1]),
        "no dimensions": mapped("B_scales", lambda scale: scale[0, 0]),
        "dtypes": set_to(out_dtypes=[torch.bfloat16]),
        "slow": set_to(use_fast_accum=[False]),
        "no result scales": set_to(result_scales=(None,)),
    },
    "matmul_reduce_scatter": {
        "a name": lambda a: a.update(group=a["group"].group_name),
        "from behind": set_to(scatter_dim=-2),
        "scattered rows": mapped("A", scattered),
        "weights by columns": mapped("B", lambda w: w.t().contiguous().t()),
        "scattered weights": mapped("B", scattered),
        "another type": mapped("A", lambda x: x.as_subclass(Named)),
        "a deadline": set_to(deadline_s=30),
    },
    "scaled_matmul_reduce_scatter": {
        "a name": lambda a: a.update(group=a["group"].group_name),
        "from behind": set_to(orig_scatter_dim=-2, scatter_dim_after_maybe_reshape=-2),
        "of numpy": set_to(orig_scatter_dim=np.int64(0), output_shape=np.array([4, 16])),
        "weights by rows": mapped("B", lambda w: w.contiguous()),
        "one scale for all columns": mapped("B_scale", lambda scale: scale[0, :1]),
        "no dimensions": mapped("B_scale", lambda scale: scale[0, 0]),
        "scattered scales": mapped("A_scale", scattered),
        "slow": set_to(use_fast_accum=False),
        "the usual dtype": set_to(out_dtype=torch.bfloat16),
        "a deadline": set_to(deadline_s=30),
    },
    "all_to_all_matmul": {
        "int32": mapped("splits", torch.Tensor.int),
        "strided splits": mapped("splits", lambda splits: splits.repeat_interleave(2)[::2]),
        "scattered tokens": mapped("tokens", scattered),
        "scattered weights": mapped("w_experts", scattered),
        "transposed weights": mapped("w_experts", lambda w: w.mT.contiguous().mT),
        "another type": mapped("w_experts", lambda w: w.as_subclass(Named)),
        "a deadline": set_to(deadline_s=30),
    },
    "matmul_all_to_all": {
        "int32": mapped("received", torch.Tensor.int),
        "int32 splits": mapped("splits", torch.Tensor.int),
        "strided splits": mapped("splits", lambda splits: splits.repeat_interleave(2)[::2]),
        "scattered rows": mapped("h", scattered),
        "transposed weights": mapped("w_experts", lambda w: w.mT.contiguous().mT),
        "another type": mapped("w_experts", lambda w: w.as_subclass(Named)),
        "a deadline": set_to(deadline_s=30),
    },
    "embedding_all_to_all": {
        "int32": mapped("offsets", torch.Tensor.int),
        "batch sizes": set_to(batch_sizes=[1, 1]),
        "batch sizes of numpy": set_to(batch_sizes=np.array([1, 1])),
        "the usual transport": set_to(transport="direct"),
        "a deadline": set_to(deadline_s=30),
    },
}
SCHEDULES: dict[str, list[str | None]] = {
    "all_gather_matmul": ["serial", "gather[by=kernel]"],
    "all_gather_scaled_matmul": ["serial", "gather[by=kernel]"],
    "matmul_all_gather": ["serial", "direct[chunks=2,by=dma]"],
    "matmul_all_reduce": ["serial", "one_shot[by=kernel]", "two_shot[chunks=2,by=dma,add=gemm]"],
    "matmul_reduce_scatter": ["serial", "scatter", "direct[chunks=2,by=dma,add=gemm]"],
    "scaled_matmul_reduce_scatter": ["serial", "scatter", "direct[chunks=2,by=dma,add=reduce]"],
    "all_to_all_matmul": ["serial", "dispatch[by=dma,rest=each]"],
    "matmul_all_to_all": ["serial", "combine[chunks=1,by=dma]"],
    "embedding_all_to_all": [None],
}


def written_otherwise(group: dist.ProcessGroup, operator: str) -> None:
    """Write each call differently on rank 1 than on rank 0, for a new and for a known shape.

    Operators with several schedules alternate: with one schedule the shape is new, with the next it is known.
    """
    for number, schedule in enumerate(SCHEDULES[operator]):
        options = {} if schedule is None else {"schedule": schedule}
        make = OPERATORS[operator]
        wanted = leaves(make(group)(**options))
        for index, (name, same) in enumerate(SAME[operator].items()):
            for known in (False, True) if len(SCHEDULES[operator]) == 1 else ((number + index) % 2 == 1,):
                own = dist.new_group([0, 1])
                call = make(own)
                if known:
                    call(**options)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # warnings of copies
                    for change in (same if group.rank() == 1 else None, None):
                        found = leaves(call(change, **options))
                        for one, other in zip(found, wanted, strict=True):
                            torch.testing.assert_close(
                                one.reshape(other.shape), other, msg=lambda text, name=name: f"{name}: {text}"
                            )
                dist.destroy_process_group(own)


@pytest.mark.parametrize(
    "operator",
    mostly(SAME, "all_gather_scaled_matmul", "matmul_all_reduce", "all_to_all_matmul", "embedding_all_to_all"),
)
def test_what_means_the_same_makes_one_call(pool: Pool, operator: str) -> None:
    pool.run(written_otherwise, operator, ranks=2, timeout_s=120)


def counted_by_one(group: dist.ProcessGroup, operator: str, known: bool) -> None:
    """Count the FLOPs of a call and of its backward on rank 0 only. torch then uses a dispatch mode for both."""
    found = []
    for counting in (False, True):
        own = dist.new_group([0, 1])
        call = OPERATORS[operator](own)
        tensors = [place.given(call.arguments) for place in call.tensors.values()]
        tensors = [t.requires_grad_() for t in tensors if t.is_floating_point()]
        for _ in range(1 + known):
            with contextlib.ExitStack() as stack:
                if counting and group.rank() == 0:
                    stack.enter_context(FlopCounterMode(display=False))
                results = leaves(call())
                grads = torch.autograd.grad(results[0].sum(), tensors)
            counting = known
        found.append([*results, *grads])
        dist.destroy_process_group(own)
    for one, other in zip(*found, strict=True):
        # Each group measures its schedules, so the two may choose different ones, which round differently.
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("operator", "known"),
    in_turn(
        [
            "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather", "all_to_all_matmul",
            "matmul_all_to_all",
        ],
        [True, False],
    ),
)  # fmt: skip
def test_a_mode_of_torchs_on_one_rank_makes_the_same_call(pool: Pool, operator: str, known: bool) -> None:
    pool.run(counted_by_one, operator, known, ranks=2, timeout_s=60)
