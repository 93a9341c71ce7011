"""Steady calls of embedding_all_to_all on GPUs: calls that differ from an earlier call only in their ids.

From a call of the module to the launch of its kernel, a hundred Python functions run. Most of them check properties that do
not change between calls. For a steady call, native code instead compares the call with a recorded call, and launches the
kernel (`csrc/pooled_call.cpp`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from weft import _core
from weft.embedding import JaggedInput, KeyedJaggedTensor
from weft.embedding.check import CheckedInput
from weft.kernels import embedding_all_to_all as device_code
from weft.kernels.signals import R_STATUS
from weft.runtime.cuda import embedding_kernel, embedding_tables
from weft.runtime.cuda.embedding import EmbeddingAllToAllCuda
from weft.runtime.cuda.embedding_kernel import EmbeddingKernel, RankAddresses, VariantKey, first_sample
from weft.runtime.layouts import READER

_WATCHED = (R_STATUS, device_code.R_BAD_OFFSETS)
"""The words of the kernel's record that Python must read if they are not 0. Unless bad indices are ignored, Python must also
read their number.
"""
_as_jagged = functools.partial(tuple.__new__, JaggedInput)


def steady_call(
    executor: Any, weights: list[torch.Tensor], jagged: JaggedInput, checked: CheckedInput, out: torch.Tensor,
    deadline_s: float | None,
) -> _core.PooledCall | None:  # fmt: skip
    """Return the launch of further calls with the features and batch sizes of a call that `executor` has run. Return None if such
    calls must run in Python.

    weights: the tables of the call. jagged, checked: its input. out: its result. deadline_s: its deadline.
    """
    if (
        not isinstance(executor, EmbeddingAllToAllCuda)
        or executor.plan.options.refuses_bad_ids
        or executor._memory is None
    ):
        return None
    launch = launch_words(
        executor.kernel, weights, jagged, checked, executor._memory, deadline_s or executor._usual_deadline_s
    )
    if READER is None or launch is None:
        return None
    outputs, rank = executor.outputs, executor.comm.rank
    watched = (*_WATCHED, device_code.R_BAD_INDICES) if executor.plan.options.reports_bad_ids else _WATCHED
    return _core.PooledCall(
        {
            **launch,
            "reader": READER, "executor": executor, "memory": executor._memory, "owner": outputs._region.owner(rank),
            "free": outputs._free, "shared": outputs._shared, "outputs": outputs.count, "out": out,
            "base": outputs._region.address(rank), "slot_bytes": outputs.slot_bytes,
            "record": executor.kernel.record.data_ptr(), "watched": watched,
            "rows": checked.batch_sizes[rank], "columns": executor.plan.sharding.total_dim,
            "stream": torch._C._cuda_getCurrentRawStream, "as_tensor": torch._C._from_dlpack,
            "keyed": KeyedJaggedTensor, "jagged": JaggedInput, "make_jagged": _as_jagged,
            "tables": READER.read(weights, False), "keys": jagged.keys, "checked": checked,
            "values": jagged.values, "offsets": jagged.offsets, "weights": jagged.weights,
        }
    )  # fmt: skip


def launch_words(
    kernel: EmbeddingKernel, weights: list[torch.Tensor], jagged: JaggedInput, checked: CheckedInput, memory: RankAddresses,
    deadline_s: float,
) -> dict[str, Any] | None:  # fmt: skip
    """Return the arguments of `_core.PooledCall`, which launches further calls like this call. Return None if only
    Python can launch them. The arguments are as for `EmbeddingKernel.launch`.
    """
    weighted, batch = jagged.weights is not None, checked.global_batch
    single = kernel._pools_single_ids(jagged)
    key = (jagged.values.dtype, jagged.offsets.dtype, False, weighted, True, False, False, True, True, None, single)
    variant = kernel._variants.get(VariantKey(*key))
    if variant is None or variant.program is None or not embedding_tables._is_even(checked.batch_sizes, batch):
        return None
    works, size = [], 1
    while size <= min(embedding_tables._MAX_UNIT_SLOTS, max(1, len(kernel._slots))):
        works.append(kernel._work_of(checked, 0 if kernel._staged else size, None))
        size *= 2
    slot_table = kernel._slot_table(weights, checked)
    order = kernel.plan.options.order
    return {
        "program": variant.program,
        "kept": (slot_table, works, variant, kernel),
        "before": [slot_table.data_ptr()],
        "addresses": [*memory.ranks.addresses, *variant.tables.addresses],
        "numbers": [memory.output_bytes, kernel._fingerprint(checked), int(deadline_s * 1e9)],
        "after": [
            kernel._slices_before, kernel._slices_in_all, first_sample(checked.batch_sizes, kernel.rank, order), 1
        ],
        "works": [
            [0 if kernel._staged else 1 << power, *work.tables.addresses, work.per_sample]
            for power, work in enumerate(works)
        ],
        "bags": jagged.offsets.numel() - 1, "batch": batch, "most": embedding_kernel._INT32_POSITIONS,
        "single": single, "staged": kernel._staged, "by_slot": kernel._pools_by_slot, "features": len(kernel._slots),
        "multiprocessors": kernel._sms, "resident": variant.resident, "mean_bytes": kernel._mean_bytes,
        "program_bags": embedding_kernel._PROGRAM_BAGS, "program_bytes": embedding_kernel._PROGRAM_BYTES,
        "programs_per_sm": embedding_kernel._PROGRAMS_PER_SM, "by_slot_ids": embedding_kernel._BY_SLOT_IDS,
        "most_unit_slots": embedding_tables._MAX_UNIT_SLOTS, "unit_bytes": embedding_tables._UNIT_BYTES,
    }  # fmt: skip
