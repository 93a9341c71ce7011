"""The specification of an operator: the normalised form of its calls, their checks, its problem, its buffers, its gradients.

Everything else is made from it, in the same way for all operators. That is the comparison across ranks, the cache of
shapes, the choice of a schedule, the unfused run, autograd in eager mode and under torch.compile, plans and benchmarks.

An operator is a class with one instance, in the file of its public function (`weft.ops`). The function normalises its arguments
into the form of a call and passes it to `weft.operator.calls.made`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, get_type_hints

import torch
import torch.distributed as dist

from weft.builders import Problem
from weft.builders.problem import PROBLEMS
from weft.operator.select import Chosen
from weft.runtime.executors import Tensors
from weft.runtime.unfused.turn import Turn
from weft.symm import Communicator

C = TypeVar("C", bound=tuple[Any, ...])

Across: TypeAlias = Literal["alike", "layout", "equal", "given", "own"]
"""The comparison of an argument across ranks:

    alike    equal on all ranks, and compared
    layout   one or several tensors: shape and dtype are equal and compared; the data may differ
    equal    a tensor whose data are equal too, which `WEFT_CHECK_CALLS=1` compares
    given    ranks compare if it is given; its value may differ
    own      an argument without effect on other ranks' results, or that weft compares in another way
"""

_SCHEMA: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    list[torch.Tensor]: "Tensor[]",
    list[torch.Tensor | None]: "Tensor?[]",
    int: "SymInt",
    int | None: "SymInt?",
    list[int]: "SymInt[]",
    list[int] | None: "SymInt[]?",
    Sequence[int] | None: "int[]?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    list[bool]: "bool[]",
    str: "str",
    list[str]: "str[]",
    list[str] | None: "str[]?",
}
_ONE, _SEVERAL = ("Tensor", "Tensor?"), ("Tensor[]", "Tensor?[]")


class Operator(ABC, Generic[C]):
    """The base class of specifications. Override any method; those without a default are required."""

    name: ClassVar[str]
    form: ClassVar[type[tuple[Any, ...]]]
    """The form of a call: a NamedTuple of tensors, lists of tensors, numbers, flags and strings (`_SCHEMA` has the types)."""
    across_ranks: ClassVar[Mapping[str, Across]] = {}
    """The comparison of each parameter of the public function, if there is one. Tests check it against the signature, and against
    calls in which ranks differ."""
    compared: ClassVar[tuple[str, ...]] = ()
    """The fields of the form that ranks compare (`given`), and that do not affect the work."""
    gradients_of: ClassVar[Mapping[str, str]] = {}
    """The fields that can be differentiated, with the argument names that callers know."""
    arguments: ClassVar[Mapping[str, str]] = {}
    """The argument names that callers know, for buffers with other names, for messages."""
    caller_names: ClassVar[Mapping[str, str]] = {}
    """The argument names that callers know, for fields with other names, for messages."""
    hint: ClassVar[str] = ""
    """Advice in the error for ranks that describe different calls."""
    tags: ClassVar[tuple[torch.Tag, ...]] = ()
    """Tags of the operator under torch.compile."""
    compiled: Any
    """The operator in torch.ops. Registration sets it here, because an operator may be registered while a call is
    traced, and Dynamo reads a table as it was at the start of the trace."""
    backward_tags: ClassVar[tuple[torch.Tag, ...]] = ()

    # --- the call and its problem ---

    @abstractmethod
    def problem(self, call: C, world: int, most: int) -> Problem:
        """Return the problem that describes the call. Raise `ValueError` for an invalid call. most: the largest `size` of all
        ranks."""

    def size(self, call: C) -> int:
        """Return a number that may differ between ranks in calls with equal descriptions. All ranks learn the largest."""
        return 0

    def said(self, call: C, world: int) -> str:
        """Return the text that must be equal on all ranks. Raise the same errors as `problem`.

        If it has several lines, messages show the first line, and the first later line, "name: value", that differs.
        """
        return str(self.problem(call, world, self.size(call)))

    def given(self, call: C) -> str:
        """Return the other arguments that must be equal on all ranks, as a part of a sentence; empty for defaults. The public
        function applies them around the problem: dimensions, shapes before flattening, the kind of reduction."""
        return ""

    def equal(self, call: C) -> dict[str, torch.Tensor]:
        """Return the tensors whose values must be equal on all ranks, by the names that callers know."""
        return {}

    def pairs(self, call: C, world: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the numbers of rows that this rank sends to each rank, and that it expects from each; None for an operator
        without such tables.

        Both are int64 [world, n]. A sender's n numbers for a rank must equal the numbers that this rank expects from the sender.
        """
        return None

    def key(self, call: C) -> Hashable:
        """Return the key of calls of one description. Keys that differ have different `said`, so that a shape is new on all ranks
        or on none."""
        found: list[Hashable] = []
        for kind, value, compared in zip(self.kinds, call, self._compared, strict=True):
            if compared:
                continue
            if kind in _ONE and value is not None:
                found.append((value.shape, value.dtype, value.device))
            elif kind in _SEVERAL:
                found.append(tuple([None if t is None else (t.shape, t.dtype, t.device) for t in value]))
            else:
                found.append(tuple(value) if type(value) is list else value)
        return tuple(found)

    def checked(self, call: C, group: dist.ProcessGroup) -> C:
        """Check every call first. A compiled call bypasses the public function, so this is its only check."""
        return call

    def repeats(self, call: C) -> bool:
        """True if calls that differ only in the addresses of tensors are otherwise equal (see `weft.operator.replay`).

        Then the form contains no values read from tensors, and the public function changes no result, except for `averages`.
        """
        return True

    def averages(self, call: C) -> bool:
        """True if the public function divides the first result by the number of ranks, in place: the form's field `average`."""
        return bool(getattr(call, "average", False))

    def takes_rows(self, rows: int, world: int) -> bool:
        """True if a call may have `rows` rows in its first argument, given a valid call with another number of rows."""
        return True

    def note(self, call: C) -> None:
        """Remember values of this call for later calls."""

    # --- memory ---

    def inputs(self, p: Any, call: C) -> Tensors:
        """Return the input buffers for executors. Default: the call's fields, if they are matrices of the buffers' names."""
        return call._asdict()  # type: ignore[attr-defined, no-any-return]

    @abstractmethod
    def outputs(self, call: C, world: int) -> Tensors:
        """Return new memory for the output buffers, in their order."""

    def fake(self, call: C, world: int) -> list[torch.Tensor]:
        """Return fake results for a call that is traced."""
        return list(self.outputs(call, world).values())

    def does_not_fit(self, p: Any, call: C) -> str:
        """Return the reason why this call exceeds the sizes of `p`; empty if it does not. Not called if the call runs unfused
        without gradients."""
        return ""

    def to_choose_with(self, p: Any, rank: int, call: C) -> C:
        """Return the call that is used to choose a schedule, if the first call is not typical."""
        return call

    def finished(self, call: C, results: Sequence[torch.Tensor], rank: int) -> None:
        """Raise errors that only the results reveal. Called on CPU, where the results are complete."""

    def gemms(self, call: C, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        """Return (rows, weights): this rank multiplies `rows` rows with each of the weights [K, N], or with the weights of
        experts [E, K, N]. `weft.operator.flops` counts them. results: the results of the call, or their gradients."""
        return 0, []

    # --- gradients ---

    def tracked(self, call: C) -> list[torch.Tensor | None]:
        """Return the tensors that autograd tracks in eager mode. Each costs time in every call. Default: the call's tensors."""
        return self.tensors(call)

    def saved(self, call: C, results: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Return the tensors that `gradients` needs. Default: the call's tensors. wanted: the requested gradients, in the order
        of `tracked`; in a compiled call, of the call's tensors."""
        return self.tensors(call)

    def beside(
        self, call: C, group: dist.ProcessGroup, saved: Sequence[torch.Tensor | None], inputs: Tensors | None
    ) -> Any:
        """Begin additional work for backward right after the call, and return it.

        inputs: the inputs of the call; None for a compiled call, which has no place for this work before its backward.

        What it returns lives as long as the graph: keep tensors of the call only through `saved`, unless autograd must not
        watch them.
        """

    def require_backward(self, beside: Any) -> None:
        """Raise an error if there may be no backward of this call (any more). Autograd has not been asked for `saved` yet."""

    def gradients(
        self, p: Any, group: dist.ProcessGroup, saved: Sequence[Any], grads: list[torch.Tensor], wanted: Sequence[bool],
        turn: Turn, beside: Any,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Return the wanted gradients, one for each entry of `wanted`. All ranks want the same gradients. Gradients are sums
        over ranks, not means.

        grads: the gradients of the results.
        """
        raise NotImplementedError(
            f"{self.name} has gradients of {', '.join(self.gradients_of)}: its spec must implement `gradients`"
        )

    # --- the unfused call, if it is not the steps of the serial schedule ---

    def unfused(self, p: Any, call: C, group: dist.ProcessGroup, turn: Turn) -> list[torch.Tensor] | None:
        """Return the results of torch's collectives and GEMMs; None: `weft.runtime.unfused` runs the serial schedule."""
        return None

    # --- the operator's own kernels ---

    def own_executors(
        self, p: Any, call: C, comm: Communicator, tensors: Tensors, deadline_s: float | None
    ) -> Chosen:  # fmt: skip
        """Return the executors of calls with this call's `key`, if the operator has its own kernels. Collective.

        Default: the planner chooses a schedule, and an executor of schedules runs it. An operator that overrides this method must
        follow these rules. Options of the call choose the executor, so no schedule is pinned. Calls with equal `key` are equal.
        `inputs` checks every call, and its tensors may be of any type. The executor returns the results, so `outputs` is empty.
        """
        raise NotImplementedError

    # --- benchmarks ---

    def drawn(self, p: Any, rank: int, generator: torch.Generator) -> C:
        """Return a call of `p` on random numbers, on the generator's device."""
        raise NotImplementedError(f"{self.name} cannot be measured: its spec draws no calls (`drawn`)")

    def expected(self, p: Any, rank: int, calls: Sequence[C]) -> list[torch.Tensor]:
        """Return the results of a rank in float64, computed from the calls of all ranks."""
        raise NotImplementedError(
            f"{self.name} cannot be measured: its spec has no results to compare with (`expected`)"
        )

    # --- derived from these ---

    def __init__(self) -> None:
        hints = get_type_hints(self.form)
        of_call: tuple[str, ...] = self.form._fields  # type: ignore[attr-defined]
        for field in of_call:
            if hints[field] not in _SCHEMA:
                known = ", ".join(
                    getattr(one, "__name__", "") if isinstance(one, type) else str(one) for one in _SCHEMA
                )
                raise TypeError(
                    f"{self.name}: {field} of its form has type {hints[field]}; torch's operators accept {known}"
                )
        if unknown := [field for field in self.gradients_of if field not in of_call]:
            raise TypeError(
                f"{self.name}: gradients_of names {', '.join(unknown)}; the fields of its form are {', '.join(of_call)}"
            )
        self.kinds = tuple(_SCHEMA[hints[field]] for field in of_call)
        self._compared = tuple(field in self.compared for field in of_call)
        self.differentiable = tuple(of_call.index(field) for field in self.gradients_of)
        self._none = (False,) * len(self.differentiable)
        self.has_executors = type(self).own_executors is not Operator.own_executors
        """True if the operator has its own kernels."""
        self.sizes_are_alike = type(self).size is Operator.size and not self.has_executors
        """True if calls with equal descriptions have the same size on all ranks."""
        self.title = PROBLEMS[self.name].title if self.name in PROBLEMS else self.name
        """The name in messages."""

    @property
    def fields(self) -> str:
        """The call's fields, in the notation of torch's schemas."""
        return ", ".join(f"{kind} {name}" for kind, name in zip(self.kinds, self.form._fields, strict=True))  # type: ignore[attr-defined]

    def tensors(self, call: C) -> list[torch.Tensor | None]:
        """Return the call's tensors as one list."""
        return self.flat(call)

    def named_tensors(self, call: C) -> list[tuple[str, torch.Tensor]]:
        """Return the call's tensors with the names that callers know."""
        found: list[tuple[str, torch.Tensor]] = []
        for kind, field, value in zip(self.kinds, self.form._fields, call, strict=True):  # type: ignore[attr-defined]
            name = self.caller_names.get(field, field)
            if kind in _ONE and value is not None:
                found.append((name, value))
            elif kind in _SEVERAL:
                found += [(f"{name}[{i}]", one) for i, one in enumerate(value) if one is not None]
        return found

    def wanted(self, call: C) -> tuple[bool, ...]:
        """Return, for each differentiable field, True if its gradient is wanted."""
        if not self._none or not torch.is_grad_enabled():
            return self._none
        return tuple([_wants(call[i]) for i in self.differentiable])

    def flat(self, of_fields: Sequence[Any]) -> list[Any]:
        """Return the entries of `of_fields` for fields that are tensors, with lists flattened: a call's tensors, or torch's flags
        for them."""
        found: list[Any] = []
        for kind, one in zip(self.kinds, of_fields, strict=False):
            if kind in _ONE:
                found.append(one)
            elif kind in _SEVERAL:
                found += one
        return found

    def described(self, wanted: tuple[bool, ...]) -> str:
        """Return the wanted gradients as part of the text that ranks compare."""
        return f"gradients wanted of ({', '.join(self.gradients_of.values())}): {wanted}" if self._none else ""


def _wants(value: Any) -> bool:
    if isinstance(value, list):
        return True in [t.requires_grad for t in value]
    return value is not None and value.requires_grad
