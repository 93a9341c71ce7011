"""`weft.embedding_all_to_all`: pooled embeddings that are stored at their destination, without a separate all-to-all.

A call passes through these modules:

    weft.operator.calls               finds the compiled operator for the sharding and the options
    this module                       checks the input, and chooses the transport at the first call
    weft.runtime.cpu.embedding        runs the call on CPU, with csrc/embedding_all_to_all.cpp
    weft.runtime.cuda.embedding       runs the call on a GPU, with weft.kernels.embedding_all_to_all
    weft.runtime.embedding_unfused    runs transport "serial" on both
    weft.runtime.embedding_backward   runs backward
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from weft import plan
from weft.arguments import checked_sizes
from weft.builders import EmbeddingAllToAll
from weft.embedding import EmbeddingSharding, as_jagged
from weft.embedding.check import CheckedInput, check_jagged
from weft.embedding.forward_call import ForwardCall, Tables
from weft.embedding.jagged import JaggedInput
from weft.embedding.optimizers import optimizer_of
from weft.embedding.options import BoundsCheck, EmbeddingOptions, Order, OutputDtype, Transport
from weft.embedding.plan import EmbeddingPlan, plan_of, problem_of
from weft.embedding.tables import sharding_of
from weft.embedding.training import NOT_TRAINED, Training, training_of
from weft.embedding.update import FusedUpdate
from weft.operator.calls import made
from weft.operator.embedding_transport import choose_transport, settled
from weft.operator.registration import registered
from weft.operator.select import Chosen
from weft.operator.spec import Across, Operator
from weft.runtime import embedding_backward
from weft.runtime.embedding import executor_of
from weft.runtime.layouts import known_layout
from weft.runtime.unfused.turn import Turn
from weft.symm import Communicator
from weft.symm.groups import backend_device, group_of, rank_of, size_of
from weft.timeline import Timeline
from weft.words import counted, joined, kind

Form = tuple[str, Transport, Order, int | None, BoundsCheck, bool, int, OutputDtype]
"""An `EmbeddingPlan` as a hashable tuple: the sharding as JSON, and the options."""


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
    output_dtype: OutputDtype = "table",
    update: FusedUpdate | None = None,
    sparse: bool = False,
    requires_grad: bool = False,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> torch.Tensor:
    """Pool this rank's tables for the global batch, and send every pooled vector to the rank that owns its sample.

    Equivalent to one `nn.EmbeddingBag` per table, an all-to-all, and a permutation to `[local batch, sum(D)]`. One
    kernel does all three, and stores each vector into its owner's output as soon as it is pooled. All ranks of `group`
    must make the call. Only one thread per rank may make calls at a time.

    weights: this rank's tables, each `[num_embeddings, embedding_dim]`, contiguous, in fp32, fp16 or bf16, in the order
        of `sharding.local_tables(rank)`. Sums are in fp32.
    features: the sparse input of the *global* batch for (at least) this rank's features. Pass a KeyedJaggedTensor
        (weft's or TorchRec's), or `(values, offsets[, per_sample_weights])` with one block for each feature of this
        rank's tables, in the order of their columns in the result. values: int32 or int64 row numbers. offsets: int32
        or int64 `[features * global batch + 1]`, feature-major. Samples are ordered by the rank that owns them.
        Weighted mean pooling divides by the length of the bag, as FBGEMM does.
    sharding: the owner rank of each table (`weft.place_tables`), equal on all ranks.
    group: a process group that contains this rank.
    batch_sizes: the number of samples of each rank. Default: the global batch divided evenly; the first ranks get the
        remainder.
    transport: how vectors are sent. "direct" stores each vector into the peer's memory. "put" sends slices of up to
        `slice_size` vectors of a sample, each as one contiguous copy and a flag. "serial" pools everything, calls
        NCCL's all-to-all, and reorders the columns. "auto" uses the transport with the shortest predicted time on this
        GPU (`weft.plan.explain`). Calls with similar numbers of samples share one choice. On CPU, and on GPUs without a
        performance model, "auto" is "direct". If ranks are on several hosts, weft uses "serial" for every value.
    slice_size: for "put", the number of vectors in a slice (default: as many as fill about 2 KiB). For "direct" on CPU,
        only the number of adjacent vectors that one span of `timeline` covers. "direct" on GPUs ignores slice_size.
    order: "remote_first" pools the samples of peers before this rank's own; "natural" pools samples in the order of the
        batch. "direct" on GPUs pools feature by feature if bags have two or more ids on average, and samples in this order
        for each feature.
    bounds_check: how out-of-range indices are treated. "warning" reads them as zero rows, counts them and warns (on
        GPUs at the next call). "ignore" reads them as zero rows, without a warning. "fatal" refuses the call on every rank
        before anything is written (on GPUs the CPU waits for the device). "none" does not check: all indices must be in
        range, because an invalid index reads memory outside the table.
    hash: True to map any 64-bit id to a row, by splitmix64's finalizer modulo the number of rows
        (`weft.embedding.hash_ids`).
    outputs: the number of result buffers per rank in symmetric memory, each as large as the largest result so far. With
        n buffers, the caller may keep n - 1 results during the next call. If the caller keeps more, results are copied
        out of the buffers. With 1, keeping a result during the next call is an error. A CUDA graph keeps one buffer for
        each call that it captured. If only one buffer is then left for other calls, their results are copied out of it.
        "serial" has no such buffers: its results are ordinary tensors.
    output_dtype: "fp16" or "bf16" rounds each pooled vector, which is summed in fp32, to this dtype before sending.
        This halves the bytes sent for fp32 tables. Gradients are sent in the same dtype. "table": the tables' dtype. On
        CPU, calls with "fp16" or "bf16" use transport "serial", and sums of 16-bit tables are first rounded to the
        tables' dtype.
    update: an optimizer with its states for `weights`. Backward then reduces the gradients of each row that the batch
        has read, updates the row in place, and returns no gradient of the tables. A second backward of the same call
        raises `WeftError`. Not supported under torch.compile.
    sparse: True for sparse COO gradients of tables, in which each row occurs once, in ascending order. Not supported
        with `update` or under torch.compile.
    requires_grad: for ranks without tables, in calls without `update`: True if the tables of other ranks require
        gradients, so that this rank takes part in backward. Ranks with tables need not pass it: their weights show it.
    deadline_s: the longest wait for a peer, in seconds, at most 1e6 (default: WEFT_DEADLINE_S, 60). It applies in
        backward too.
    timeline: records the times of all steps, for profiling. On GPUs the call then synchronises with the device.

    Returns `[batch_sizes[rank], sharding.total_dim]` in the tables' dtype or `output_dtype`, with columns in table
    order. On GPUs it is valid in stream order.

    All ranks must run backward too. Backward sends the gradients of pooled vectors to the owners of the tables. The
    owners reduce them by row, in fp32, in a fixed order. So equal inputs give equal bits for any number of ranks,
    unless `update` has `deterministic=False`. Gradients are sums over all samples of all ranks. With `update`, backward
    updates the tables. Otherwise it returns the gradients of tables that require them. fp16 and bf16 gradients are
    rounded once. Out-of-range ids get no gradients. Second derivatives raise an error.

    Memory: `outputs` result buffers. "put" also stages the vectors to send (on CPU at most 4 MiB per thread, on GPUs
        one or two slices per Triton program) and keeps 8 bytes per slice. "serial" keeps send and receive buffers
        instead. Each combination of a sharding and options keeps this memory until the group is destroyed, or until
        `weft.nn.ShardedEmbeddingBagCollection.close`. Backward needs memory for the gradients of pooled vectors that it
        sends and receives, up to 40 bytes for each id, and, without `update`, the gradients of tables.

    Raises:

    - `RefusedError` (a `ValueError`) on every rank if any rank passes bad arguments.
    - `ValueError` or `TypeError` on this rank only, for an invalid group.
    - `DisagreementError` if ranks describe different calls.
    - `DeadlineError`, `PeerLostError` or `PoisonedGroupError` if a rank is late, is lost, or has failed.

    Sources: "Accelerating Multi-GPU Embedding Retrieval with PGAS-Style Communication for Deep Learning Recommendation
        Systems" (`direct`). "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 3.2
        (`put`: slices, flags, remote work first).
    """

    def form(group: dist.ProcessGroup | str | None) -> _Call:
        if not isinstance(sharding, EmbeddingSharding):
            raise TypeError(f"sharding is {kind(sharding)}: pass weft.place_tables(tables, {size_of(group)})")
        if sharding.world_size != (world := size_of(group)):
            raise ValueError(
                f"the sharding is for {counted(sharding.world_size, 'rank')} and the group has {world}: call "
                f"place_tables(tables, {world})"
            )
        if not isinstance(weights, (list, Sequence, torch.Tensor)):
            raise TypeError(f"weights is {kind(weights)}: pass a list with one tensor per table of this rank")
        options = transport, order, slice_size, bounds_check, hash, outputs, output_dtype
        if not torch.compiler.is_compiling():
            EmbeddingOptions.of(*options)
        plan: Form = _written(sharding), *options
        if isinstance(update, FusedUpdate):
            update.require_tables(weights)
        training = training_of(update, sparse, requires_grad, device_of(weights, features, group))
        return form_of(plan, list(weights), features, rank_of(group), batch_sizes, training)

    (output,) = made(
        OPERATOR, group, lambda: device_of(weights, features, group), form, deadline_s=deadline_s, timeline=timeline
    )
    return output


def _written(sharding: EmbeddingSharding) -> str:
    return sharding.written


_written._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what `assume_constant_result` does, without loading Dynamo


def device_of(weights: Any, features: Any, group: dist.ProcessGroup | str | None) -> torch.device:
    """Return the device of this rank's call. If the arguments do not determine a device, return the device of the
    group's backend; a later check refuses the arguments.
    """
    try:
        like = weights[0] if len(weights) else as_jagged(features).values
        if like.is_cuda or like.is_cpu:
            return like.device
    except Exception:  # a later check raises it again, and notifies the other ranks
        pass
    return backend_device(group_of(group))


class _Call(NamedTuple):
    """The arguments of a call. `JaggedInput` explains the fields `keys`, `stride` and `whole`.

    The fields `states` to `deterministic` are the options of backward (`Training`). The fields `sharding` to
    `output_dtype` are the options of forward (`Form`).
    """

    weights: list[torch.Tensor]
    values: torch.Tensor
    offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None
    batch_sizes: list[int] | None
    keys: list[str] | None
    stride: int | None
    whole: bool
    rank: int
    states: list[torch.Tensor]
    learning_rate: torch.Tensor | None
    step: torch.Tensor | None
    anchor: torch.Tensor | None
    optimizer: str
    factor: float
    sparse: bool
    deterministic: bool
    sharding: str
    transport: str
    order: str
    slice_size: int | None
    bounds_check: str
    hash: bool
    outputs: int
    output_dtype: str


def form_of(
    plan: Form, weights: list[torch.Tensor], features: Any, rank: int, batch_sizes: Sequence[int] | None,
    training: Training = NOT_TRAINED,
) -> _Call:  # fmt: skip
    """Return the arguments of a call as a `_Call`, from its options (`plan`, `training`), tables and input. Check only
    `features` and `batch_sizes`; `_EmbeddingAllToAll.inputs` checks the rest.
    """
    keys, values, offsets, of_values, stride, whole = as_jagged(features)
    sizes = None if batch_sizes is None else checked_sizes("batch_sizes", batch_sizes)
    return _Call(weights, values, offsets, of_values, sizes, keys, stride, whole, rank, *training, *plan)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024, typed=True)  # typed, because 1 is refused where True is valid
def plan_in(sharding: str, *options: Any) -> EmbeddingPlan:
    """Return the plan for a sharding and options. Plans are cached.

    sharding: the sharding as JSON (`EmbeddingSharding.written`).
    options: the other fields of a `Form`, in order.
    """
    return plan_of(sharding_of(sharding), EmbeddingOptions(*options))


def _checked(call: _Call) -> tuple[JaggedInput, CheckedInput]:
    """Return the input of a call, and the result of its checks. Raise `ValueError` for bad arguments. The checks do not
    read GPU memory, so the CPU does not wait.
    """
    plan, weights, rank = _plan(call), call.weights, call.rank
    keys = None if call.keys is None else tuple(call.keys)
    jagged = JaggedInput(keys, call.values, call.offsets, call.per_sample_weights, call.stride, call.whole)
    layout, known = known_layout(plan.checked_tables, rank, weights)
    device = weights[0].device if known and weights else None
    checked = check_jagged(jagged, plan.sharding, rank, call.batch_sizes, device or weights, layout)
    if not known:
        plan.checked_tables[rank] = layout
    return jagged, checked


def _wants(tensor: Any) -> bool:
    return getattr(tensor, "requires_grad", False)


def _plan(call: _Call) -> EmbeddingPlan:
    return plan_in(*call[_FORM:])  # type: ignore[arg-type]


_FORM = _Call._fields.index("sharding")
_OF_VALUES = 2
"""The index of the per-sample weights among a call's tensors, counted from the end of the tables. The order is: tables,
values, offsets, per-sample weights, anchor (`Training.anchor`).
"""
_TRACKED = 4
"""The number of tensors that autograd tracks in a call with an optimizer: all except the tables."""


def _batch_size(call: _Call, sharding: EmbeddingSharding, rank: int) -> int:
    """Return the number of samples of `rank`. The input may be unchecked."""
    if call.batch_sizes is not None:
        return call.batch_sizes[rank]
    blocks, world = len(sharding.local_slots(call.rank) if call.keys is None else call.keys), sharding.world_size
    samples = (call.offsets.numel() - 1) // blocks if blocks else call.stride or 0
    return (samples + world - 1 - rank) // world


class _EmbeddingAllToAll(Operator[_Call]):
    """The operator, compiled once per plan, and with transport="auto" once per size bucket: calls with similar numbers
    of samples.

    `weft.operator.embedding_transport` then chooses a transport for the middle of the size bucket (`weft.plan.nearby`).
    """

    name, form = "embedding_all_to_all", _Call
    across_ranks: ClassVar[Mapping[str, Across]] = {
        "weights": "own", "features": "own", "sharding": "alike", "group": "own", "batch_sizes": "alike", "transport": "alike",
        "order": "alike", "slice_size": "alike", "bounds_check": "alike", "hash": "alike", "outputs": "alike",
        "output_dtype": "alike", "update": "own", "sparse": "own", "requires_grad": "own", "deadline_s": "own", "timeline": "own",
    }  # fmt: skip
    """Each rank checks its weights against the sharding. Ranks compare the other arguments at the first call of a
    shape. On CPU they also compare optimizers, learning rates and `sparse` at each backward
    (`weft.runtime.embedding_backward`).
    """
    gradients_of: ClassVar[Mapping[str, str]] = {"weights": "weights", "per_sample_weights": "per_sample_weights"}
    tags = (torch.Tag.cudagraph_unsafe,)  # results are in buffers that later calls reuse

    def checked(self, call: _Call, group: dist.ProcessGroup) -> _Call:
        """Replace transport="auto" by a fixed transport, if the transport is the same for all batch sizes."""
        if call.transport != "auto":
            return call
        device = next(t.device for t in self.tensors(call) if isinstance(t, torch.Tensor))
        transport = settled(_plan(call), device, group)
        return call if transport is None else call._replace(transport=transport)

    def key(self, call: _Call) -> tuple[EmbeddingPlan, int | None]:
        plan = _plan(call)
        if call.transport != "auto" or not isinstance(call.offsets, torch.Tensor):
            return plan, None
        sizes = call.batch_sizes
        return plan, _octave(_batch_size(call, plan.sharding, 0) if sizes is None else max(sizes, default=0))

    def problem(self, call: _Call, world: int, most: int) -> EmbeddingAllToAll:
        sharding = _plan(call).sharding
        found = plan.typical(problem_of(sharding, [_batch_size(call, sharding, rank) for rank in range(world)]))
        assert isinstance(found, EmbeddingAllToAll)
        return found

    def given(self, call: _Call) -> str:
        if call.optimizer:
            return f"updated by {call.optimizer} with factor {call.factor!r}"
        if call.factor == 1.0:
            return "with sparse gradients" * call.sparse
        return joined("with sparse gradients" * call.sparse, f"with factor {call.factor!r}")

    def wanted(self, call: _Call) -> tuple[bool, ...]:
        if not torch.is_grad_enabled():
            return self._none
        # A later check refuses arguments of other types, and notifies peers.
        of_tables = call.anchor is not None or True in [_wants(weight) for weight in call.weights]
        return of_tables, _wants(call.per_sample_weights)

    def said(self, call: _Call, world: int) -> str:
        _, checked = _checked(call)
        return f"a sharding with options\nbatch_sizes: {checked.batch_sizes}\n{_plan(call).said}"

    def inputs(self, p: EmbeddingAllToAll, call: _Call) -> dict[str, Any]:
        return {"tables": call.weights, "bags": _checked(call)}

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        return {}

    def fake(self, call: _Call, world: int) -> list[torch.Tensor]:
        plan = _plan(call)
        shape = _batch_size(call, plan.sharding, call.rank), plan.sharding.total_dim
        return [call.values.new_empty(shape, dtype=plan.output_dtype)]

    def gemms(self, call: _Call, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        return 0, []  # torch's FLOP counter also counts 0 for embeddings

    # --- gradients ---

    def tracked(self, call: _Call) -> list[torch.Tensor | None]:
        """Return the tensors that autograd tracks. Tables and states that an optimizer updates in backward are not tracked,
        because they get no gradients.
        """
        if not call.optimizer:
            return self.tensors(call)
        return [call.values, call.offsets, call.per_sample_weights, call.anchor]

    def saved(self, call: _Call, results: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Save ids, offsets and per-sample weights. If per-sample weights need gradients and there is no optimizer,
        which could change tables before backward, save the tables too.
        """
        is_read = not call.optimizer and wanted[len(call.weights) + _OF_VALUES]
        return [call.values, call.offsets, call.per_sample_weights, *(call.weights if is_read else [])]

    def beside(
        self, call: _Call, group: dist.ProcessGroup, saved: Sequence[torch.Tensor | None], inputs: dict[str, Any] | None
    ) -> ForwardCall:
        """Return the state for backward that autograd does not save: the checked input, and the tables and optimizer
        states to update. On GPUs, also start to sort the ids for backward.
        """
        tables = None
        if call.optimizer:
            assert call.learning_rate is not None
            assert call.step is not None
            optimizer = optimizer_of(call.optimizer)
            states, each = call.states, len(optimizer.states)
            of_tables: list[list[torch.Tensor]] = [[]] * len(call.weights)
            if each:
                of_tables = [states[i : i + each] for i in range(0, len(states), each)]
            tables = Tables(optimizer, call.weights, of_tables, call.learning_rate, call.step)
        versions = None
        if tables is not None and call.per_sample_weights is not None and call.per_sample_weights.requires_grad:
            versions = tuple(weight._version for weight in call.weights)
        jagged, checked = _checked(call) if inputs is None else inputs["bags"]
        made = ForwardCall(
            _plan(call), call.rank, checked, tables, call.factor, call.sparse, call.deterministic, versions
        )
        if tables is not None and inputs is not None:
            embedding_backward.sort_ahead(made, jagged)
        return made

    def require_backward(self, beside: ForwardCall) -> None:
        beside.require_first()

    def gradients(
        self, p: EmbeddingAllToAll, group: dist.ProcessGroup, saved: Sequence[Any], grads: list[torch.Tensor],
        wanted: Sequence[bool], turn: Turn, beside: ForwardCall,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Return the gradients of tables and per-sample weights. If the call has `update=`, update the tables instead, and
        return no gradients of tables.
        """
        values, offsets, per_sample_weights, *kept = saved
        # Tables that an optimizer updates are not tracked by autograd (`tracked`).
        is_short = len(wanted) == _TRACKED and beside.tables is not None
        count = 0 if is_short else len(beside.plan.sharding.local_tables(beside.rank))
        jagged = JaggedInput(None, values, offsets, per_sample_weights)
        weights = kept if beside.tables is None else beside.tables.weights
        of_tables, of_values = any(wanted[:count]) or wanted[-1], wanted[count + _OF_VALUES]
        both = embedding_backward.gradients(beside, jagged, weights, grads[0], (of_tables, of_values), group, turn)
        found: list[torch.Tensor | None] = [None] * len(wanted)
        if both[0] is not None:
            found[:count] = [grad if want else None for grad, want in zip(both[0], wanted[:count], strict=True)]
        found[count + _OF_VALUES] = both[1]
        return found

    def own_executors(
        self, p: EmbeddingAllToAll, call: _Call, comm: Communicator, tensors: dict[str, Any], deadline_s: float | None
    ) -> Chosen:
        found = _plan(call)
        narrows = comm.device.type == "cpu" and found.output_dtype != found.sharding.dtype
        if not comm.all_mapped or narrows:  # the CPU kernels of "direct" and "put" support only the tables' dtype
            found = found.sent_by("serial")
        elif found.options.transport == "auto":
            found = found.sent_by(choose_transport(found, p, comm, tensors, deadline_s))
        executor, name = executor_of(found, comm), found.options.transport
        return Chosen(executor, executor, (name, name))


@functools.lru_cache(maxsize=4096)
def _octave(most: int) -> int:
    """Return the number of a call's size bucket: calls with similar numbers of samples have the same number. most: the largest
    number of samples of a rank.
    """
    return plan.octave_of(EmbeddingAllToAll.size_of((most,)))


OPERATOR = registered(_EmbeddingAllToAll())
