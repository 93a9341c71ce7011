"""Backward of embedding_all_to_all on a rank, on CPU and GPUs: gradients are sent to the owners of tables and summed by
row.

    grad       [local batch, all columns], for this rank's samples
    received   [global batch, columns of this rank's tables], from all ranks
    rows       the summed gradient of each row that the batch has read: for an optimizer's update, or for `.grad`

On one host, gradients are stored in the memory of the tables' owners: on GPUs by a kernel, on CPU by a copy. On several
hosts, and with transport="serial", each rank reorders `grad` by owner and calls `all_to_all_single`. CPU ranks on several hosts
send the gradients for other hosts first, and sort ids while gradients are in transit.

CPU ranks synchronise before the exchange. They compare the number of the forward call (the n-th call of the group), its
batch sizes, the optimizer and the learning rate. If any of these differ, all ranks raise an error with the difference
before anything is written. GPU ranks do not synchronise.

The order of sums depends only on ids and samples (csrc/embedding_backward.hpp). So equal inputs give equal bits, for any
number of ranks, any placement of tables, and any delays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft import symm
from weft.embedding import EmbeddingSharding, JaggedInput
from weft.embedding.check import check_weights
from weft.embedding.forward_call import COLLECTED, Collected, ForwardCall, Tables, joined_calls
from weft.embedding.options import Transport
from weft.embedding.update import FusedUpdate
from weft.errors import RefusedError
from weft.runtime.collectives import all_gather_single
from weft.runtime.cpu.embedding_push import pushed_on as pushed_by_cpus
from weft.runtime.gradients_to_owners import NAME, device_code, in_rails, nothing, to_owners
from weft.runtime.layouts import layout_of
from weft.runtime.meeting import Topic, meeting_of, shown
from weft.runtime.rails import Cargo
from weft.runtime.unfused.turn import Turn
from weft.symm import Communicator
from weft.words import by_rank, counted

_KNOWN = 4  # layouts of tables and states to remember, since copies of a module share a plan


def gradients(
    of: ForwardCall, jagged: JaggedInput, weights: Sequence[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, bool],
    group: dist.ProcessGroup, turn: Turn,
) -> tuple[list[torch.Tensor] | None, torch.Tensor | None]:  # fmt: skip
    """Run backward of the forward call `of`. Return the gradients of the tables and of the per-sample weights.

    With an optimizer, update the tables, and return None in place of their gradients.

    turn: runs the exchange of gradients, with the deadline.
    jagged: the input of the forward call. weights: the weights of this rank's tables.
    grad: the gradient of the forward call's output, [local batch, all columns].
    wanted: two booleans: True to compute the gradients of the tables (or to update the tables), and True to compute the
        gradients of the per-sample weights.
    """
    of.require_first()
    sharding, sizes = of.plan.sharding, of.checked.batch_sizes
    _require_intact(of, weights, wanted[1])
    transport, dtype, riding = of.plan.options.transport, _dtype_on_the_way(of, grad.dtype), None
    if grad.device.type == "cpu":
        what, comm = (
            f"backward of embedding_all_to_all of {counted(len(sharding.tables), 'table')}",
            turn.comm_between_hosts,
        )
        if comm is not None:
            riding = in_rails(grad, sharding, of.rank, sizes, comm, dtype)
        compare_ranks(comm or symm.communicator(group, grad.device), what, of, turn.deadline_s, riding and riding[0])
    device = device_code(grad.device)
    if wanted[0]:
        sort_ahead(of, jagged)  # concurrently with the exchange, unless forward has begun it
    sorts = wanted[0] and of.collected is None and grad.device.type == "cpu"
    meanwhile = partial(device.sort_ahead, of, jagged) if sorts else nothing
    receiving: contextlib.AbstractContextManager[Received]
    if riding is None:
        receiving = received(grad, sharding, of.rank, sizes, group, turn, transport, dtype, meanwhile)
    else:
        leaving = riding[0].end()
        receiving = contextlib.nullcontext(Received(turn.done(NAME, riding[1], leaving), None, True))
    with receiving as (found, ok, is_kept):
        if of.tables is not None and of.tables.optimizer.nonfinite == "raise":
            _require_finite(of, found, group, turn.deadline_s)
        of_weights = device.gradients_of_weights(of, jagged, weights, found.to(sharding.dtype)) if wanted[1] else None
        of_tables = None
        if wanted[0]:
            if of.tables is None:
                of_tables = device.gradients_of_tables(of, device.sorted_rows(of, jagged), found)
            elif (collected := of.collected) is not None:
                collected.append(Collected(of, jagged, found if is_kept else found.clone()))
            else:
                of.is_updated = True
                _update(Collected(of, jagged, found), group, turn.deadline_s, ok)
    return of_tables, of_weights


def _dtype_on_the_way(of: ForwardCall, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are sent: the optimizer's `gradient_dtype` if it has one, else `dtype`, the dtype of
    the gradients.
    """
    wanted = "table" if of.tables is None else of.tables.optimizer.gradient_dtype
    return {"table": dtype, "fp16": torch.float16, "bf16": torch.bfloat16}[wanted]


class Received(NamedTuple):
    """The gradients of the vectors that a rank pooled.

    gradients: the gradients of these vectors, [global batch, columns of this rank's tables].
    ok: a tensor on the GPU that is 1 if all gradients have arrived, else 0. It is None if all gradients are known to have
        arrived.
    is_kept: True if the caller may keep `gradients`. False if the next exchange overwrites them.
    """

    gradients: torch.Tensor
    ok: torch.Tensor | None
    is_kept: bool


@contextlib.contextmanager
def received(
    grad: torch.Tensor, sharding: EmbeddingSharding, rank: int, batch_sizes: Sequence[int], group: dist.ProcessGroup, turn: Turn,
    transport: Transport = "auto", dtype: torch.dtype | None = None, meanwhile: Callable[[], None] = nothing,
) -> Iterator[Received]:  # fmt: skip
    """Send `grad`, the gradient of this rank's output, to the ranks that own the tables of its columns. Yield the gradients
    that this rank received.

    CPU ranks must have synchronised. Peers write gradients into memory that is valid only inside this context manager,
    unless `Received.is_kept`.

    transport: the option of the forward call. With "serial", backward uses no symmetric memory either.
    dtype: the dtype in which gradients are sent; by default their own dtype.
    meanwhile: work that needs no gradients. CPU ranks on several hosts do it while gradients are in transit.
    """
    pushes, on_gpu = sharding.world_size > 1 and transport != "serial", grad.device.type == "cuda"
    dtype = dtype or grad.dtype
    if not pushes or not (comm := symm.communicator(group, grad.device)).all_mapped:
        yield Received(to_owners(grad, sharding, rank, batch_sizes, group, turn, dtype, meanwhile), None, True)
        return
    if not on_gpu:
        found = pushed_by_cpus(comm).run(grad, sharding, batch_sizes, turn.deadline_s, dtype)
        leaving = len(grad) * (grad.shape[1] - found.shape[1]) * dtype.itemsize
        yield Received(turn.done("gradients to owners", found, leaving), None, False)
        return
    from weft.runtime.cuda.embedding_push import pushed_on  # needs Triton

    exchange = pushed_on(comm)
    try:
        found = exchange.run(grad, sharding, batch_sizes, turn.deadline_s, dtype)
        yield Received(found, exchange.ok, False)
    finally:
        exchange.free()


@contextlib.contextmanager
def collecting(update: FusedUpdate) -> Iterator[list[Collected]]:
    """Collect the gradients of several backward calls in the list that this context manager yields, for one update of the
    tables (`update_collected`). Inside this context manager, backward does not update the tables of `update`.
    """
    key, collected = id(update.step), list[Collected]()
    if key in COLLECTED:
        raise ValueError(
            "accumulate() was called inside accumulate() of the same module: remove the inner call; the tables "
            "are updated once, when the outer block ends"
        )
    COLLECTED[key] = collected
    try:
        yield collected
    finally:
        del COLLECTED[key]


def update_collected(
    update: FusedUpdate, collected: list[Collected], group: dist.ProcessGroup, device: torch.device, deadline_s: float | None
) -> None:  # fmt: skip
    """Update the tables once, with the gradients of several backward calls. All ranks must make this call.

    CPU ranks compare the calls and the learning rate, which may have changed since the last backward.
    """
    for one in collected[:1]:  # before ranks synchronise, so that an error leaves the group usable
        assert one.of.tables is not None
        _require_intact(one.of, one.of.tables.weights, False)
    if device.type == "cpu" and group.size() > 1:
        said = f"{update.optimizer.written}, learning rate {update.lr!r}, update {int(update.step) + 1}"
        details = f"update: {said}, {counted(len(collected), 'call')}"
        _meet(symm.communicator(group, device), "the end of accumulate() of embedding_all_to_all", details, deadline_s)
    if collected:
        for one in collected:
            one.of.is_updated = True
        with torch.no_grad():
            _update(joined_calls(collected), group, deadline_s)


def _require_intact(of: ForwardCall, weights: Sequence[torch.Tensor], reads_tables: bool) -> None:
    """Raise `ValueError` if the layout of a table or optimizer state has changed since forward, because kernels could then
    access memory outside the tensor.

    reads_tables: True if backward reads the tables. Then also raise `WeftError` if an optimizer has updated them since
        forward.
    """
    try:
        if of.tables is not None:
            _require_tables(of, of.tables)
        elif reads_tables:
            check_weights(weights, of.plan.sharding, of.rank)
    except ValueError as error:
        raise ValueError(f"backward of embedding_all_to_all: the tables have changed since forward: {error}") from error
    if reads_tables and of.tables is not None:
        of.require_values_of_forward()


def _require_tables(of: ForwardCall, tables: Tables) -> None:
    """Raise `ValueError` if the layout of a table or optimizer state is invalid. A layout that was found valid is not
    checked again.
    """
    layout = layout_of([*tables.tensors, tables.step])
    known = of.plan.intact_tables.setdefault(of.rank, [])
    for one in known:
        if one == (tables.optimizer.rule, layout):
            of.layout = one  # this object has a cached hash
            return
    tables.require_intact(of.plan.sharding, of.rank)
    if layout is not None:
        of.layout = tables.optimizer.rule, layout
        known.insert(0, of.layout)
        del known[_KNOWN:]


def _update(
    call: Collected, group: dist.ProcessGroup, deadline_s: float | None, ok: torch.Tensor | None = None
) -> None:
    """Update the tables of `call` with the gradients of `call`. The caller has checked the tables.

    ok: a tensor on the device, 0 if gradients have not arrived. The tables then stay unchanged.
    """
    of, tables = call.of, call.of.tables
    assert tables is not None
    device = device_code(call.received.device)
    if of.adds_each and call.received.device.type == "cuda":
        tables.step.add_(1)
        device.add_each(of, tables, call.jagged, call.received, ok)
        return
    rows, scale = device.sorted_rows(of, call.jagged), None
    if ok is not None:
        rows.ok = ok
    if tables.optimizer.clip_norm is not None:
        squares = device.sum_of_squares(of, tables, rows, call.received)
        scale = scale_of_norm(squares, tables.optimizer.clip_norm, group, deadline_s)
    tables.step.add_(1)
    device.update(of, tables, rows, call.received, scale)


def scale_of_norm(
    squares: torch.Tensor, clip_norm: float, group: dist.ProcessGroup, deadline_s: float | None
) -> torch.Tensor:
    """Return the factor, float64 [], by which to multiply all gradients, so that their norm over all ranks is at most
    `clip_norm`. All ranks must make this call.

    squares: the sum of squares of this rank's gradients. The sums of all ranks are added in the order of ranks. As in
        `torch.nn.utils.clip_grad_norm_`, the factor is NaN if a gradient is NaN.
    """
    if group.size() > 1 and squares.device.type == "cpu":
        comm = symm.communicator(group, squares.device)
        of_ranks = comm.all_gather(float(squares), what="the norm of gradients", deadline_s=deadline_s)
        squares = squares.new_tensor(sum(of_ranks), dtype=torch.float64)
    elif group.size() > 1:
        gathered = squares.new_empty(group.size())
        all_gather_single(gathered, squares.view(1), group=group)
        squares = gathered.sum()
    return (clip_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)


def _require_finite(
    of: ForwardCall, received: torch.Tensor, group: dist.ProcessGroup, deadline_s: float | None
) -> None:
    """Raise `RefusedError` on every rank if a gradient of any table is infinite or NaN. The CPU waits for the device.
    All ranks must make this call.
    """
    refuse_nonfinite(nonfinite_tables(of.plan.sharding, of.rank, received), group, received.device, deadline_s)


def nonfinite_tables(sharding: EmbeddingSharding, rank: int, received: torch.Tensor) -> list[str]:
    """Return a description, for error texts, of each feature of `rank`'s tables that has infinite or NaN gradients. The CPU
    waits for the device.

    received: the gradients, [global batch, columns of `rank`'s tables].
    """
    column, bad = 0, list[str]()
    finite = received.isfinite().all(0).tolist()
    for slot in sharding.local_slots(rank):
        if not all(finite[column : column + slot.dim]):
            bad.append(f"table {sharding.tables[slot.table].name!r}, feature {slot.feature!r}")
        column += slot.dim
    return bad


def refuse_nonfinite(bad: list[str], group: dist.ProcessGroup, device: torch.device, deadline_s: float | None) -> None:
    """Raise `RefusedError` on every rank if `bad` is not empty on any rank. All ranks must make this call.

    bad: this rank's result of `nonfinite_tables`.
    """
    said = f"gradients are infinite or NaN: {'; '.join(bad)}" if bad else None
    comm = symm.communicator(group, device)
    everyone = comm.all_gather(said, what="non-finite gradients", deadline_s=deadline_s)
    if reasons := by_rank((rank, text) for rank, text in enumerate(everyone) if text is not None):
        raise RefusedError(f"backward of embedding_all_to_all has updated nothing: {reasons}")


def sort_ahead(of: ForwardCall, jagged: JaggedInput) -> None:
    """Start to sort the ids of a forward call for its backward, on a GPU concurrently with later work. Do nothing on CPU,
    where backward sorts.
    """
    if jagged.values.device.type == "cuda" and of.collected is None and not of.adds_each:
        device_code(jagged.values.device).sort_ahead(of, jagged)


def compare_ranks(
    comm: Communicator, what: str, of: ForwardCall, deadline_s: float | None, cargo: Cargo | None = None
) -> None:  # fmt: skip
    """Synchronise CPU ranks before the backward of the forward call `of`. Raise `DisagreementError` on every rank if tables,
    optimizers, learning rates or batch sizes differ, or if ranks run backward of different calls
    (`weft.runtime.meeting.in_backward`).

    what: the name of the call, for error texts.
    cargo: a small collective whose data are sent with the messages of the rendezvous, between ranks on several hosts;
        otherwise None.
    """
    plan = of.plan  # backward does not depend on the transport, so ranks do not compare all options
    _meet(
        comm, what, f"tables: {plan.sharding.written}\nhash: {plan.options.hash}\nupdate: {of.said}", deadline_s, cargo
    )


def _meet(
    comm: Communicator, what: str, details: str, deadline_s: float | None, cargo: Cargo | None = None
) -> None:  # fmt: skip
    topic = Topic(what, details, difference=lambda: f"{what}: {shown(comm, details)()}")
    meeting_of(comm).meet(topic, deadline_s=deadline_s, cargo=cargo)
