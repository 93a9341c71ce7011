"""The state of a forward call of embedding_all_to_all that backward needs, besides the tensors that autograd saves."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from weft.arguments import check_tensor
from weft.embedding.check import CheckedInput, check_weights
from weft.embedding.jagged import JaggedInput, offsets_of
from weft.embedding.optimizers import SGD, EmbeddingOptimizer, state_shape
from weft.embedding.plan import EmbeddingPlan
from weft.embedding.tables import EmbeddingSharding
from weft.errors import BackwardError
from weft.words import counted


class Tables(NamedTuple):
    """The tensors that an optimizer's update changes or reads: this rank's tables and optimizer states, the learning rate, and
    the number of updates so far.

    states: for each table, its states in the order of `EmbeddingOptimizer.states`.
    """

    optimizer: EmbeddingOptimizer
    weights: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    learning_rate: torch.Tensor
    step: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tables, followed by their optimizer states."""
        return [*self.weights, *[state for states in self.states for state in states]]

    def require_intact(self, sharding: EmbeddingSharding, rank: int) -> None:
        """Raise `ValueError` if the memory of a table or state has been freed since forward, or its dtype, shape,
        layout or device has changed.
        """
        check_weights(self.weights, sharding, rank)
        for weight, states in zip(self.weights, self.states, strict=True):
            for (name, shape), state in zip(self.optimizer.states.items(), states, strict=True):
                check_tensor(f"state {name!r}", state)
                wanted = torch.Size(state_shape(weight.shape, shape))
                if state.shape != wanted or state.dtype != torch.float32 or not state.is_contiguous():
                    raise ValueError(
                        f"state {name!r} is {state.dtype} {list(state.shape)} with strides {state.stride()}: it must stay "
                        f"contiguous {torch.float32} {list(wanted)}, so change it only in place"
                    )
        for tensor in self.tensors:
            if tensor.device != self.step.device:
                raise ValueError(
                    f"a table or optimizer state is on {tensor.device}, but the optimizer's step counter is on "
                    f"{self.step.device}: move the module as a whole, and not between forward and backward"
                )


class CallNumber(NamedTuple):
    """The number of a call with gradients.

    refused: the number of calls of the group that ranks refused before this call.
    calls: the number of calls with gradients since the last refused call, this one included.
    """

    refused: int
    calls: int

    def __str__(self) -> str:
        since = f" after {counted(self.refused, 'refused call')}" if self.refused else ""
        return f"call {self.calls} of this module with gradients{since}"


@dataclass
class ForwardCall:
    """The state of a forward call that backward needs, besides the tensors that autograd saves.

    tables: the tensors that backward updates; None without an optimizer.
    sparse: without an optimizer, True if backward returns sparse COO gradients.
    factor: the number by which the sum of gradients is multiplied.
    deterministic: True if equal inputs must give equal bits.
    """

    plan: EmbeddingPlan
    rank: int
    checked: CheckedInput
    tables: Tables | None
    factor: float
    sparse: bool
    deterministic: bool = True
    number: CallNumber | None = field(default=None, kw_only=True)
    """For data-parallel tables, whose forward does not synchronise ranks: the number of this call.

    CPU ranks compare it, so that all run backward of the same call. For other tables it is None, because the rendezvous
    of backward compares the number of the forward call (`weft.runtime.meeting.in_backward`).
    """
    versions: tuple[int, ...] | None = None
    """The tables' version counters in forward; None unless needed.

    They are needed if gradients of per-sample weights read table values that an optimizer may change before backward.
    """
    is_updated: bool = field(default=False)
    layout: Hashable = field(default=None, init=False, repr=False)
    """The layouts and addresses of tables and states at their last check (`weft.runtime.layouts`), or None."""
    sorted_ahead: Any = field(default=None, init=False, repr=False)
    """On GPUs, the ids that another stream is sorting (`weft.runtime.cuda.embedding_runs.SortedAhead`). On CPU, the ids that were
    sorted while gradients were in transit.
    """

    @property
    def adds_each(self) -> bool:
        """True if a GPU may add each id's gradient to its row with atomic adds, without sorting ids.

        This needs fp32 tables, `deterministic=False`, and SGD without weight decay, clipping or `nonfinite="skip"`.
        """
        if self.deterministic or self.tables is None or self.plan.sharding.dtype != torch.float32:
            return False
        one = self.tables.optimizer
        clips = one.clip_value is not None or one.clip_norm is not None
        return isinstance(one, SGD) and one.weight_decay == 0 and not clips and one.nonfinite != "skip"

    @property
    def collected(self) -> list[Collected] | None:
        """The list in which backward collects gradients for one later update of the tables; None if backward updates the tables
        itself.
        """
        return None if self.tables is None else COLLECTED.get(id(self.tables.step))

    def require_first(self) -> None:
        """Raise `BackwardError` if an earlier backward of this call has updated the tables."""
        if self.is_updated:
            raise BackwardError(
                "second backward of the same call of embedding_all_to_all: the first backward has already "
                "updated the tables. Sum the losses and call backward once, or call the operator again. (Without "
                "an optimizer, gradients accumulate in .grad)"
            )

    def require_values_of_forward(self) -> None:
        """Raise `BackwardError` if the tables have changed since forward, because gradients of per-sample weights need
        their old values.
        """
        assert self.tables is not None
        if self.versions is not None and self.versions != tuple(weight._version for weight in self.tables.weights):
            raise BackwardError(
                "backward of embedding_all_to_all for per_sample_weights: backward of another call has updated "
                "the tables since this forward. Sum the losses and call backward once, or use accumulate()"
            )

    @property
    def said(self) -> str:
        """A description of this call: its number, the optimizer with its learning rate or the kind of gradients, and the batch
        sizes. Ranks compare it before they exchange gradients.
        """
        if self.tables is None:
            update = f"{'sparse' if self.sparse else 'dense'} gradients"
        else:
            learning_rate = float(self.tables.learning_rate)
            update = (
                f"{self.tables.optimizer.written}, learning rate {learning_rate!r}, update {int(self.tables.step) + 1}"
                f"{'' if self.collected is None else ', accumulated'}"
            )
        call = f"backward of {self.number}, " if self.number else ""
        return f"{call}{update}, factor {self.factor!r}, batch_sizes {self.checked.batch_sizes}"


class Collected(NamedTuple):
    """The input and the gradients of one call inside the context manager `accumulate()`, kept for one later update of the
    tables.

    The gradients are of the vectors that this rank pooled: [global batch, columns of its tables].
    """

    of: ForwardCall
    jagged: JaggedInput
    received: torch.Tensor


COLLECTED: dict[int, list[Collected]] = {}
"""Gradients that are collected for one update, by Python's `id` of the tensor that counts the optimizer's updates."""


def joined_calls(calls: list[Collected]) -> Collected:
    """Return several calls as one call with the samples of all of them, in order. The CPU waits for the device."""
    first = calls[0].of
    slots, batch = range(len(first.checked.key_of_slot)), sum(call.of.checked.global_batch for call in calls)
    lengths: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []
    ends = [_ends(call) for call in calls]
    for slot in slots:
        for call, offsets in zip(calls, ends, strict=True):
            size, key = call.of.checked.global_batch, call.of.checked.key_of_slot[slot]
            begin, end = offsets[key], offsets[key + 1]
            values.append(call.jagged.values[begin:end])
            lengths.append(call.jagged.offsets[key * size : (key + 1) * size + 1].diff())
            if call.jagged.weights is not None:
                weights.append(call.jagged.weights[begin:end])
    last = calls[-1].jagged
    of_values = None if last.weights is None else torch.cat([last.weights[:0], *weights])
    bags = offsets_of(torch.cat([last.offsets[:0], *lengths]))
    jagged = JaggedInput(None, torch.cat([last.values[:0], *values]), bags, of_values)
    checked = CheckedInput(tuple(slots), (batch,), batch)
    return Collected(replace(first, checked=checked), jagged, torch.cat([call.received for call in calls]))


def _ends(call: Collected) -> list[int]:
    """Return the positions in the call's tensor of ids at which the ids of each feature begin, and the end of the last
    feature's ids.
    """
    size, offsets = call.of.checked.global_batch, call.jagged.offsets
    blocks = (offsets.numel() - 1) // size if size else 0
    found: list[int] = offsets[:: size or 1][: blocks + 1].tolist()
    return found if size else [0] * (2 + max(call.of.checked.key_of_slot, default=0))
