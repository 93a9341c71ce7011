"""weft.embedding_all_to_all: pooled embeddings that arrive where they are used, without a separate all-to-all.

The path of a call: this file checks the input. `weft.operator.embedding` finds the compiled operator for (group, device, plan of
the schedule), requested or selected (`weft.builders.embedding_all_to_all`). `weft.runtime.cpu.embedding`,
`weft.runtime.cuda.embedding` or, for both, `weft.runtime.embedding_unfused` runs a rank's side of the call;
`csrc/embedding_all_to_all.cpp` or `weft.kernels.embedding_all_to_all` does the work.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weft import symm
from weft.arguments import checked_deadline
from weft.embedding import EmbeddingSharding, as_jagged
from weft.embedding.check import CheckedInput, check_jagged
from weft.embedding.jagged import JaggedInput
from weft.embedding.options import BoundsCheck, EmbeddingOptions, Order, Transport
from weft.embedding.plan import EmbeddingPlan, plan_of
from weft.operator.derivatives import require_plain
from weft.operator.embedding import OPERATOR, known_operator, new_operator, operator_of_handle
from weft.operator.spec import Across
from weft.operator.together import together
from weft.runtime.layouts import layout_of
from weft.runtime.opaque import never_left_out, opaque
from weft.timeline import Timeline
from weft.words import counted, kind

ACROSS_RANKS: Mapping[str, Across] = {
    "weights": "own", "features": "own", "sharding": "alike", "group": "own", "batch_sizes": "alike", "transport": "alike",
    "order": "alike", "slice_size": "alike", "bounds_check": "alike", "hash": "alike", "outputs": "alike", "deadline_s": "own",
    "timeline": "own",
}  # fmt: skip
"""Each rank checks its weights against the sharding."""


@opaque
def embedding_all_to_all(
    weights: Sequence[torch.Tensor],
    features: Any,
    sharding: EmbeddingSharding,
    *,
    group: dist.ProcessGroup,
    batch_sizes: Sequence[int] | None = None,
    transport: Transport = "auto",
    order: Order = "remote_first",
    slice_size: int | None = None,
    bounds_check: BoundsCheck = "warning",
    hash: bool = False,
    outputs: int = 2,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> torch.Tensor:
    """Pool this rank's tables for the global batch and send every pooled vector to the rank that owns its sample.

    Equals one `nn.EmbeddingBag` per table, an all-to-all, and the rearrangement to `[local batch, sum(D)]`, in one kernel: each
    vector is stored into its owner's output as soon as it is ready. Collective over `group`, by one thread of a rank at a time.
    Forward only.

    weights: this rank's tables, `[num_embeddings, embedding_dim]`, contiguous, fp32, fp16 or bf16 (accumulated in fp32), in the
        order of `sharding.local_tables(rank)`.
    features: the sparse input of the *global* batch for (at least) this rank's features: a KeyedJaggedTensor (ours or
        TorchRec's), or `(values, offsets)` or `(values, offsets, per_sample_weights)` with one block per local slot in column
        order. values: int32 or int64 row numbers; offsets: int32 or int64 `[features * global batch + 1]`, feature-major. Samples
        are ordered by the rank that owns them. Weighted mean pooling divides by the length of the bag, as FBGEMM does.
    sharding: the owner rank of each table (`weft.place_tables`), equal on all ranks.
    group: a process group that this rank is in, all of its ranks on one host.
    batch_sizes: samples per rank; default: the global batch divided evenly, the first ranks get the odd ones.
    transport: "direct" stores each vector into the peer. "put" sends slices of up to `slice_size` vectors of a sample (default:
        about 2 KiB of them), each as one contiguous copy and a flag. "serial" pools everything, then calls NCCL's all-to-all,
        then puts the columns in order. "auto" selects the transport that is predicted to be the fastest for this number of
        samples on this GPU's model (`weft.plan.explain`), once for similar numbers of samples; "direct" on CPU, and without a
        model.
    slice_size: with "direct", the number of vectors that a CPU thread stores in a row; on GPUs "direct" does not use it.
    order: "remote_first" pools the peers' samples before this rank's own, "natural" follows the batch.
    bounds_check: "warning" reads out-of-range indices as zero rows, counts them and warns (on GPUs at the next call); "fatal"
        refuses the call on every rank before anything is written (on GPUs it waits for the device); "ignore" trusts the caller.
    hash: map any 64-bit id to a row by splitmix64's finalizer modulo the rows (`weft.embedding.hash_ids`).
    outputs: result buffers kept per rank in symmetric memory, each as large as the largest result so far. With n, n - 1 results
        may be held while the next is computed, and a further one is copied out; with 1, holding one is an error. A call that a
        CUDA graph captures keeps its buffer, except for the last one, from which results are copied. "serial" has no such
        buffers: its results are ordinary tensors.
    deadline_s: seconds, at most 1e6, that a wait for a peer may take (default: WEFT_DEADLINE_S, 60).
    timeline: filled with the times of all steps (profiling: on GPUs it waits for the device).

    Returns `[batch_sizes[rank], sharding.total_dim]` in the tables' dtype, in table order; on GPUs valid in stream order.

    Memory: `outputs` result buffers. `put` also stages the vectors to send (on CPU at most 4 MiB a thread, on GPUs a slice or two
        a program) and holds 8 bytes per slice; `serial` has its sent and received vectors instead. Kept for each sharding and
        options until the group ends, or the module that called is closed (`weft.nn.ShardedEmbeddingBagCollection.close`).

    Raises `ValueError` for bad arguments, and on every rank: `RefusedError` if a rank refuses its input, `DisagreementError` if
    ranks describe different calls, `DeadlineError`, `PeerLostError`, `PoisonedGroupError`.

    Sources: "Accelerating Multi-GPU Embedding Retrieval with PGAS-Style Communication for Deep Learning Recommendation Systems"
        (`direct`); "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 3.2 (`put`: slices, flags,
        remote work first).
    """
    with together(OPERATOR, group, lambda: device_of(weights, features, group), deadline_s):
        device = device_of(weights, features, group)
        deadline_s = checked_deadline(deadline_s)
        if not isinstance(sharding, EmbeddingSharding):
            raise TypeError(f"sharding is {kind(sharding)}: pass weft.place_tables(tables, {group.size()})")
        if timeline is not None and not isinstance(timeline, Timeline):
            raise TypeError(f"timeline={timeline!r} is no timeline: pass weft.Timeline(), or None")
        if sharding.world_size != group.size():
            raise ValueError(
                f"the sharding is for {counted(sharding.world_size, 'rank')} and the group has {group.size()}: call "
                f"place_tables(tables, {group.size()})"
            )
        plan = _plan(sharding, transport, order, slice_size, bounds_check, hash, outputs)
        return pool_and_send(plan, _listed(weights), features, group, device, batch_sizes, deadline_s, timeline)


@opaque
def planned_call(
    plan: EmbeddingPlan, weights: list[torch.Tensor], features: Any, group: dist.ProcessGroup, batch_sizes: Sequence[int] | None,
    deadline_s: float | None,
) -> torch.Tensor:  # fmt: skip
    """Call `embedding_all_to_all` with options and tables that were checked."""
    with together(OPERATOR, group, lambda: device_of(weights, features, group), deadline_s):
        return pool_and_send(
            plan, weights, features, group, device_of(weights, features, group), batch_sizes, deadline_s
        )


@opaque
def pool_and_send(
    plan: EmbeddingPlan, weights: list[torch.Tensor], features: Any, group: dist.ProcessGroup, device: torch.device,
    batch_sizes: Sequence[int] | None, deadline_s: float | None, timeline: Timeline | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run `planned_call` inside of `together`."""
    require_plain(OPERATOR, lambda: weights)
    jagged, rank = as_jagged(features), group.rank()
    layout = layout_of(weights)
    before = _checked_tables.get((plan, rank))
    known = layout is not None and layout == before
    if known:
        layout = before  # this object has its hash cached
    checked = check_jagged(jagged, plan.sharding, rank, batch_sizes, device if known else weights, layout)
    if not known and torch.is_grad_enabled() and True in [weight.requires_grad for weight in weights]:
        raise ValueError(
            "embedding_all_to_all has no backward yet, and a weight requires a gradient: call it under "
            "torch.no_grad(), or weight.requires_grad_(False)"
        )
    if not known and layout is not None:
        if len(_checked_tables) >= 64:
            _checked_tables.clear()
        _checked_tables[plan, rank] = layout
    domain = symm.domain(group, device, deadline_s=deadline_s)
    operator = known_operator(plan, domain, checked.batch_sizes)
    if operator is None:
        operator = new_operator(plan, domain, (weights, jagged, checked), deadline_s)
    if timeline is not None:
        return operator(weights, jagged, checked, deadline_s=deadline_s, timeline=timeline)
    if not is_in_torch_dispatch_mode():
        # Bypass the dispatcher, which would unpack and pack the list of tensors: a microsecond per table.
        return operator(weights, jagged, checked, deadline_s=deadline_s)
    return torch.ops.weft.embedding_all_to_all(
        weights, jagged.values, jagged.offsets, jagged.weights, checked.batch_sizes, checked.key_of_slot,
        operator.handle, deadline_s or 0.0,
    )  # fmt: skip


@functools.lru_cache(maxsize=64, typed=True)  # typed: 1 is refused, True is not
def _plan(sharding: EmbeddingSharding, *options: Any) -> EmbeddingPlan:
    return plan_of(sharding, EmbeddingOptions(*options))


def _listed(weights: Any) -> list[torch.Tensor]:
    """Return weights as a list; raise `TypeError` for anything but a sequence or a tensor."""
    if not isinstance(weights, (list, Sequence, torch.Tensor)):
        raise TypeError(f"weights is {kind(weights)}: pass a list with one tensor per table of this rank")
    return list(weights)


def device_of(weights: Any, features: Any, group: dist.ProcessGroup) -> torch.device:
    """Return the device of this rank's call. If the arguments do not tell, a later check refuses them, and notifies the other
    ranks."""
    try:
        like = weights[0] if len(weights) else as_jagged(features).values
        if like.is_cuda or like.is_cpu:
            return like.device
    except Exception:  # raised again by a check that notifies the other ranks
        pass
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


# Checking 64 tables takes longer than launching the kernel, and they are the same at every call. Their addresses and layouts
# determine all that is checked.
_checked_tables: dict[tuple[EmbeddingPlan, int], Hashable] = {}


# --- registration with the dispatcher; handles are numbers of operators ---

_library = torch.library.Library("weft", "FRAGMENT")
_library.define(
    "embedding_all_to_all(Tensor[] weights, Tensor values, Tensor offsets, Tensor? per_sample_weights, SymInt[] batch_sizes, "
    "int[] key_of_slot, int handle, float deadline_s) -> Tensor"
)


@opaque
def _run(
    weights: list[torch.Tensor], values: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None,
    batch_sizes: Sequence[int], key_of_slot: Sequence[int], handle: int, deadline_s: float,
) -> torch.Tensor:  # fmt: skip
    sizes = tuple(batch_sizes)
    checked = CheckedInput(tuple(key_of_slot), sizes, sum(sizes))
    jagged = JaggedInput(None, values, offsets, per_sample_weights)
    return operator_of_handle(handle)(weights, jagged, checked, deadline_s=deadline_s or None)


def _fake(
    weights: list[torch.Tensor], values: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None,
    batch_sizes: Sequence[int], key_of_slot: Sequence[int], handle: int, deadline_s: float,
) -> torch.Tensor:  # fmt: skip
    operator = operator_of_handle(handle)
    sharding = operator.plan.sharding
    return values.new_empty((batch_sizes[operator.domain.rank], sharding.total_dim), dtype=sharding.dtype)


for _key in ("CPU", "CUDA"):
    _library.impl("embedding_all_to_all", _run, _key)
torch.library.register_fake("weft::embedding_all_to_all", _fake, lib=_library)
never_left_out("embedding_all_to_all")
