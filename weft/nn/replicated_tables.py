"""The data-parallel tables of a collection. Every rank reads rows for its own samples, and backward all-reduces the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from weft.embedding import EmbeddingOptimizer, EmbeddingSharding, FusedUpdate, JaggedInput
from weft.embedding.check import CheckedInput, check_contents, check_jagged
from weft.embedding.forward_call import CallNumber, ForwardCall, Tables
from weft.embedding.options import EmbeddingOptions
from weft.embedding.partition import Partition
from weft.embedding.plan import EmbeddingPlan
from weft.nn.embedding_memory import BatchesInFlight
from weft.operator.derivatives import once
from weft.operator.together import together
from weft.runtime import embedding_replicated as runtime
from weft.runtime.embedding_backward import device_code, nonfinite_tables, refuse_nonfinite
from weft.runtime.embedding_rows import RowGradients
from weft.runtime.embedding_unfused import pool_alone
from weft.runtime.layouts import known_layout
from weft.runtime.meeting import refused_on
from weft.words import counted


class ReplicatedTables:
    """The data-parallel tables of a collection, of which every rank of `group` has a copy.

    sharding: the configs of the data-parallel tables, as a sharding in which one rank owns them all.
    weights: a function that returns this rank's copies of the tables.
    factor: the number by which the sum of gradients over ranks is multiplied: 1 / number of ranks for the mean.
    sparse: True if tables without an optimizer get sparse gradients.
    name: the name of the collection, for error texts.
    """

    def __init__(
        self, sharding: EmbeddingSharding, group: dist.ProcessGroup, options: EmbeddingOptions,
        optimizer: EmbeddingOptimizer | None, weights: Callable[[], list[torch.Tensor]], factor: float,
        sparse: bool, deadline_s: float | None, name: str,
    ) -> None:  # fmt: skip
        self.name = name
        self.group, self.weights, self.deadline_s, self.sparse, self._factor = (
            group,
            weights,
            deadline_s,
            sparse,
            factor,
        )
        self._options = replace(options, transport="direct", slice_size=None)
        self.plan = EmbeddingPlan(sharding, self._options)
        self.update = None if optimizer is None else FusedUpdate(optimizer, weights(), factor=factor)
        self.collected: list[tuple[ForwardCall, torch.Tensor]] | None = None
        """The reduced gradients that wait for the update at the end of `accumulate()`; None outside of `accumulate()`.
        """
        self._number = CallNumber(0, 0)
        self._batches = BatchesInFlight()

    @property
    def bytes_in_flight(self) -> int:
        """The bytes of ids, offsets and weights whose backward has not run, and of the gradients that `accumulate()` keeps."""
        return self._batches.nbytes + sum(flat.nbytes for _, flat in self.collected or ())

    def count(self, trains: bool) -> None:
        """Count a call of the collection if `trains` is True. All ranks must count the same calls since the last call that a
        rank has refused.
        """
        # Ranks do not synchronise in forward. If a rank refuses another call, its peers learn of it only after they have
        # counted this one. So all ranks begin anew.
        refused = refused_on(self.group)
        self._number = CallNumber(refused, trains + (self._number.calls if self._number.refused == refused else 0))

    def settle(self, sharding: EmbeddingSharding) -> None:
        """Store the tables' new dtype and device after a conversion such as `half()`."""
        self.plan = EmbeddingPlan(sharding, self._options)
        if self.update is not None and self.update.step.device != self.weights()[0].device:
            self.update.move(self.weights()[0].device)

    def checked(self, jagged: JaggedInput | None) -> CheckedInput:
        """Check the input of the data-parallel tables, and return the result. Raise `ValueError` for bad input."""
        assert jagged is not None
        weights, plan = self.weights(), self.plan
        with torch.no_grad():  # tables that require gradients have a layout, too
            layout, is_known = known_layout(plan.checked_tables, 0, weights)
        checked = check_jagged(jagged, plan.sharding, 0, None, weights[0].device if is_known else weights)
        plan.checked_tables[0] = layout  # not kept in `checked`: the tables of a prefetched batch may move
        check_contents(jagged, self.plan.sharding, 0, checked, self.plan.options)
        return checked

    def pooled(
        self, jagged: JaggedInput | None, checked: CheckedInput, parts: torch.Tensor | None, trains: bool,
        step: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:  # fmt: skip
        """Return `parts` unchanged, and the pooled vectors of this rank's samples, [samples, columns of all tables].

        Ranks communicate only in backward, which all ranks must run.

        parts: the vectors of sharded tables, which are returned unchanged. They pass through the same autograd node, so
            that on all ranks the backward of data-parallel tables runs before the backward of sharded tables.
        trains: True if backward must compute gradients or update tables.
        step: the number of earlier updates of the sharded tables, a tensor on the device, from which data-parallel
            tables continue. None: they count their own updates.
        """
        assert jagged is not None
        weights = self.weights()
        call = self._call(checked, trains, jagged.weights)
        if trains:
            self._batches.keep([jagged.values, jagged.offsets, jagged.weights])
        keeps = (trains and self.update is None) or not torch.is_grad_enabled()
        inputs = weights if keeps else [weight.detach() for weight in weights]
        anchor = torch.empty(0, device=weights[0].device, requires_grad=trains and self.update is not None)
        return _Pooled.apply(self, call, jagged._replace(keys=None), step, parts, jagged.weights, anchor, *inputs)  # type: ignore[no-any-return]

    def _call(self, checked: CheckedInput, trains: bool, per_sample: torch.Tensor | None) -> ForwardCall:
        tables, update = None, self.update
        if trains and update is not None:
            states = [list(of_table.values()) for of_table in update.states]
            tables = Tables(update.optimizer, self.weights(), states, update.learning_rate, update.step)
        versions = None
        if tables is not None and per_sample is not None and per_sample.requires_grad:
            versions = tuple(weight._version for weight in tables.weights)
        number = self._number if trains else None
        return ForwardCall(self.plan, 0, checked, tables, self._factor, self.sparse, number=number, versions=versions)

    def looked_up(
        self, ids: Sequence[torch.Tensor], parts: torch.Tensor | None, trains: bool, step: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:  # fmt: skip
        """Return `parts` unchanged, and a row for each id, without pooling: [number of ids, embedding_dim].

        Ranks communicate only in backward. All tables have the same number of columns.

        ids: the row numbers to read, as a tensor for each (table, feature) in column order. A row number out of range
            reads a zero row.
        parts, trains, step: the vectors of sharded tables, True if backward trains, and the number of earlier updates,
            as for `pooled`.
        """
        weights = self.weights()
        if trains:
            self._batches.keep(ids)
        call = self._call(CheckedInput((), (), 0), trains, None)
        inputs = weights if trains and self.update is None else [weight.detach() for weight in weights]
        anchor = torch.empty(0, device=weights[0].device, requires_grad=trains and self.update is not None)
        return _Rows.apply(self, call, tuple(ids), step, parts, anchor, *inputs)  # type: ignore[no-any-return]

    def reduce_and_update(self, of: ForwardCall, flat: torch.Tensor, step: torch.Tensor | None) -> Sequence[Any]:
        """Sum gradients over ranks, and update the tables or return the sums. All ranks must make this call.

        With an optimizer, update the tables, or keep the sum for the end of `accumulate()`, and return None for each
        table. Otherwise return the gradient of each table.

        flat: this rank's gradients of all tables, as one tensor.
        step: the number of earlier updates of the sharded tables, as for `pooled`.
        """
        flat = runtime.reduced(flat, of, self.group, self.deadline_s, self.collected is not None)
        if of.tables is None:
            return runtime.gradients(of, flat)
        if self.collected is not None:
            self.collected.append((of, flat))
        else:
            self.apply(of, flat, step)
        return [None] * len(of.plan.sharding.tables)

    def apply(self, of: ForwardCall, flat: torch.Tensor, step: torch.Tensor | None) -> None:
        """Update the tables with `flat`, the gradients that have been summed over ranks.

        step: the number of earlier updates of the sharded tables, as for `pooled`.
        """
        assert of.tables is not None
        of.is_updated = True
        of.tables.step.copy_(of.tables.step if step is None else step)
        of.tables.step.add_(1)
        runtime.update(of, flat, self.group, self.deadline_s)

    def end_accumulation(self, step: torch.Tensor | None) -> None:
        """Update the tables once, with the gradients that were kept during `accumulate()`. step: the number of earlier
        updates of the sharded tables, as for `pooled`.
        """
        collected, self.collected = self.collected, None
        if collected:
            of, total = collected[0]
            for other, flat in collected[1:]:
                other.is_updated, total = True, total + flat
            # Compared before anything is updated: the learning rate may have changed since the last backward.
            what = "the end of accumulate() of data-parallel tables"
            runtime.compare(of, what, self.group, total.device, self.deadline_s)
            with torch.no_grad():
                self.apply(of, total, step)


def _require_finite(
    tables: ReplicatedTables, of: ForwardCall, bad: list[str], grad: torch.Tensor, of_parts: torch.Tensor | None
) -> None:
    """Raise `RefusedError` on every rank if a gradient is infinite or NaN. All ranks must make this call.

    bad: the names of data-parallel tables with such gradients on this rank.
    of_parts: the gradients of the vectors of sharded tables. These tables are updated later, so their gradients are
        checked here too.
    """
    # The exchange of `refuse_nonfinite` is no rendezvous: a rank that refuses its call would wait for peers that are already
    # in the exchange.
    what = f"backward of {counted(len(of.plan.sharding.tables), 'data-parallel table')}"
    runtime.compare(of, what, tables.group, grad.device, tables.deadline_s)
    if of_parts is not None and not of_parts.isfinite().all():
        bad.append("sharded tables")
    refuse_nonfinite(bad, tables.group, grad.device, tables.deadline_s)


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tables: ReplicatedTables, of: ForwardCall, jagged: JaggedInput, step: Any,
        parts: torch.Tensor | None, per_sample: torch.Tensor | None, anchor: torch.Tensor, *weights: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:  # fmt: skip
        ctx.tables, ctx.of, ctx.step = tables, of, step
        # Only gradients of per-sample weights read the tables.
        kept = weights if of.tables is None and ctx.needs_input_grad[5] else ()
        ctx.save_for_backward(jagged.values, jagged.offsets, per_sample, *kept)
        sharding = of.plan.sharding
        out = torch.empty(
            of.checked.global_batch, sharding.total_dim, dtype=sharding.dtype, device=jagged.values.device
        )
        warn = pool_alone(of.plan, list(weights), jagged, of.checked, out)
        if warn is not None:
            warn()
        return None if parts is None else parts.view_as(parts), out

    @staticmethod
    @once("ShardedEmbeddingBagCollection", lambda ctx: ctx.tables.group)
    def backward(ctx: Any, saved: Sequence[Any], of_parts: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        tables, of = ctx.tables, ctx.of
        values, offsets, per_sample, *kept = saved
        jagged = JaggedInput(None, values, offsets, per_sample)
        of_weights: Sequence[Any] = [None] * len(of.plan.sharding.tables)
        of_per_sample = None
        with together(f"backward of {tables.name}", tables.group, grad, tables.deadline_s):
            of.require_first()
            weights = kept if of.tables is None else of.tables.weights
            if ctx.needs_input_grad[5]:
                if of.tables is not None:
                    of.require_values_of_forward()
                of_per_sample = device_code(grad.device).gradients_of_weights(of, jagged, weights, grad.contiguous())
            if of.tables is not None or any(ctx.needs_input_grad[7:]):
                if of.tables is not None:
                    of.tables.require_intact(of.plan.sharding, 0)
                    if of.tables.optimizer.nonfinite == "raise":
                        _require_finite(tables, of, nonfinite_tables(of.plan.sharding, 0, grad), grad, of_parts)
                flat = runtime.local_gradients(of, jagged, grad, tables.group.size())
                of_weights = tables.reduce_and_update(of, flat, ctx.step)
        return None, None, None, None, of_parts, of_per_sample, None, *of_weights


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tables: ReplicatedTables, of: ForwardCall, ids: tuple[torch.Tensor, ...], step: Any,
        parts: torch.Tensor | None, anchor: torch.Tensor, *weights: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:  # fmt: skip
        ctx.tables, ctx.of, ctx.ids, ctx.step = tables, of, ids, step
        rows = [rows_or_zero(weights[slot.table], own) for slot, own in zip(of.plan.sharding.slots, ids, strict=True)]
        return None if parts is None else parts.view_as(parts), torch.cat(rows)

    @staticmethod
    @once("ShardedEmbeddingCollection", lambda ctx: ctx.tables.group)
    def backward(ctx: Any, saved: Sequence[Any], of_parts: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        tables, of = ctx.tables, ctx.of
        sharding = of.plan.sharding
        of_weights: Sequence[Any] = [None] * len(sharding.tables)
        with together(f"backward of {tables.name}", tables.group, grad, tables.deadline_s):
            of.require_first()
            if of.tables is not None or any(ctx.needs_input_grad[6:]):
                blocks = grad.split([len(own) for own in ctx.ids])
                ids, grads = ([list[torch.Tensor]() for _ in sharding.tables] for _ in range(2))
                for slot, own, block in zip(sharding.slots, ctx.ids, blocks, strict=True):
                    ids[slot.table].append(own)
                    grads[slot.table].append(block)
                given = [
                    RowGradients(table, number, torch.cat(ids[number]), torch.cat(grads[number]))
                    for number, table in enumerate(sharding.tables)
                ]
                if of.tables is not None:
                    of.tables.require_intact(sharding, 0)
                    if of.tables.optimizer.nonfinite == "raise":
                        bad = [f"table {one.table.name!r}" for one in given if not one.grads.isfinite().all()]
                        _require_finite(tables, of, bad, grad, of_parts)
                of_weights = tables.reduce_and_update(of, runtime.gradients_of_rows(of, given), ctx.step)
        return None, None, None, None, of_parts, None, *of_weights


def rows_or_zero(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of `weight` for `ids`, [number of ids, columns]. Ids out of range get zero rows."""
    inside = (ids >= 0) & (ids < len(weight))
    found = weight.detach()[ids.clamp(0, len(weight) - 1)]
    return torch.where(inside[:, None], found, 0)  # where, because 0 times an infinite row would be NaN


class JointUpdate(FusedUpdate):
    """The optimizers and states of a collection's sharded tables and data-parallel tables, as one `FusedUpdate`. The module's
    `fused_optimizer` wraps it.
    """

    def __init__(self, sharded: FusedUpdate, replicated: FusedUpdate) -> None:
        self._both, self.optimizer, self.factor = (sharded, replicated), sharded.optimizer, sharded.factor

    @property
    def lr(self) -> float:
        return self._both[0].lr

    @lr.setter
    def lr(self, value: float) -> None:
        for one in self._both:
            one.lr = value

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [state for one in self._both for state in one.tensors]

    @property
    def states(self) -> list[dict[str, torch.Tensor]]:  # type: ignore[override]
        return [states for one in self._both for states in one.states]

    @property
    def step(self) -> torch.Tensor:  # type: ignore[override]
        """The number of updates of the sharded tables. Data-parallel tables get the same number."""
        return self._both[0].step

    @property
    def learning_rate(self) -> torch.Tensor:  # type: ignore[override]
        return self._both[0].learning_rate


def joint_update(of_parts: FusedUpdate | None, replicated: ReplicatedTables | None) -> FusedUpdate | None:
    """Return one object with the optimizers and states of both the sharded parts and the data-parallel tables; None if backward
    updates no tables.
    """
    of_replicated = None if replicated is None else replicated.update
    if of_parts is None or of_replicated is None:
        return of_parts or of_replicated
    return JointUpdate(of_parts, of_replicated)


def require_sharded_norm(partition: Partition, optimizer: EmbeddingOptimizer | None) -> None:
    """Raise `ValueError` if the optimizer has `clip_norm` and updates data-parallel tables, whose gradients are not in
    the norm.
    """
    if optimizer is None or optimizer.clip_norm is None or not partition.replicated_tables:
        return
    if partition.fuses_replicated:
        name = partition.tables[partition.replicated_tables[0]].name
        raise ValueError(
            f"clip_norm={optimizer.clip_norm} does not support data-parallel table {name!r}, whose gradients are not in the "
            "norm of sharded tables: use clip_value, another sharding, or DataParallel(fused=False)"
        )
