"""The base class of an operator's specification: the arguments of its calls, checks, problem, buffers and gradients.

weft derives everything else from the specification: the comparison of calls across ranks, the cache of compiled
operators, the choice of a schedule, and the unfused call. It also derives plans, benchmarks, and autograd in eager mode
and under torch.compile.

A specification is a class with one instance, in the file of the public function (`weft.ops`). The function puts its
arguments into a NamedTuple, the *form* of a call, and passes the call to `weft.operator.calls.made`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeAlias, TypeVar, get_type_hints

import torch
import torch.distributed as dist

from weft import _core
from weft.builders import Problem
from weft.builders.problem import PROBLEMS
from weft.operator.select import Chosen
from weft.runtime.executors import Tensors
from weft.runtime.unfused.begun import Begun
from weft.runtime.unfused.turn import Turn
from weft.symm import Communicator

C = TypeVar("C", bound=tuple[Any, ...])

Across: TypeAlias = Literal["alike", "layout", "equal", "given", "own"]
"""The comparison of an argument across ranks:

    alike    equal on all ranks
    layout   one or several tensors: shape and dtype must be equal; the data may differ
    equal    a tensor whose data must be equal too, which `WEFT_CHECK_CALLS=1` compares
    given    all ranks must pass it, or none; the value may differ
    own      not compared here: it has no effect on other ranks' results, or weft compares it in another way
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


class NativeSteps(NamedTuple):
    """An unfused call as steps of native code, for any number of rows.

    tensors: the first inputs of the steps. named: the keyword arguments of the public function that are the next inputs.
    """

    steps: _core.PlainSteps
    tensors: Sequence[torch.Tensor]
    named: Sequence[str] = ()


class Operator(ABC, Generic[C]):
    """The base class of specifications. Subclasses must implement the methods without a default, and may override the
    others.
    """

    name: ClassVar[str]
    form: ClassVar[type[tuple[Any, ...]]]
    """The form of a call: a NamedTuple of tensors, lists of tensors, numbers, flags and strings. `_SCHEMA` lists the
    allowed types.
    """
    across_ranks: ClassVar[Mapping[str, Across]] = {}
    """The comparison of each parameter of the public function across ranks. Tests check the names against the function's signature,
    and check calls in which ranks differ.
    """
    compared: ClassVar[tuple[str, ...]] = ()
    """Fields that have no effect on the operator's work, so that `key` omits them. `given` contains them, so that ranks
    compare them.
    """
    is_combine: ClassVar[bool] = False
    """True if CPU ranks of one host make unfused calls by `weft.runtime.unfused.experts_on_one_host.Combined`, and the
    first fields are h, w, received, splits and rows. Native code then repeats such calls.
    """
    gradients_of: ClassVar[Mapping[str, str]] = {}
    """{field with a gradient: its argument name in the public function}"""
    arguments: ClassVar[Mapping[str, str]] = {}
    """{buffer: argument of the public function}, for names that differ. Messages use the argument's name."""
    caller_names: ClassVar[Mapping[str, str]] = {}
    """{field: argument of the public function}, for names that differ. Messages use the argument's name."""
    of_size: ClassVar[str] = ""
    """A field that depends only on the sizes of tensors, and has the value of the keyword argument of this name; "" if there is
    none. Calls with another number of rows are replayed with any value of it.
    """
    hint: ClassVar[str] = ""
    """Advice for the error that ranks raise if their calls differ."""
    tags: ClassVar[tuple[torch.Tag, ...]] = ()
    """Tags of the operator under torch.compile."""
    compiled: Any
    """The operator in torch.ops, set by registration.

    This is an attribute, not an entry of a table. An operator may be registered during a trace, and Dynamo sees a table
    as it was when the trace began.
    """
    backward_tags: ClassVar[tuple[torch.Tag, ...]] = ()

    # --- the call and its problem ---

    @abstractmethod
    def problem(self, call: C, world: int, most: int) -> Problem:
        """Return the problem: the sizes, dtypes and options of the call, for which weft then chooses a schedule. Raise
        `ValueError` if the call is invalid.

        world: the number of ranks. most: the result of the method `size` on the rank where it is largest.
        """

    def size(self, call: C) -> int:
        """Return a size of the call that may differ between ranks, such as the number of tokens; 0 if there is none.

        The method `problem` gets the largest size of all ranks as `most`. Leave the size out of the text of the method
        `said`, which must be equal on all ranks.
        """
        return 0

    def said(self, call: C, world: int) -> str:
        """Return the description of the call that must be equal on all ranks. Raise the errors of `problem`.

        The text may have several lines. Lines after the first have the form "name: value". If the ranks' texts differ,
        the error shows the first line, and the first later line that differs.
        """
        return str(self.problem(call, world, self.size(call)))

    def given(self, call: C) -> str:
        """Return further arguments that must be equal on all ranks, as text such as 'reduce_op="avg"'; "" for defaults.

        Include arguments that the public function uses itself, and does not pass to the operator. Examples are
        dimensions, shapes before flattening, and the kind of reduction.
        """
        return ""

    def equal(self, call: C) -> dict[str, torch.Tensor]:
        """Return the tensors whose values must be equal on all ranks, by argument name."""
        return {}

    def pairs(self, call: C, world: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return two tables of row counts: the rows that this rank sends to each rank, and the rows that it expects
        from each rank. Return None for an operator without such tables.

        Both are int64 [world, n], with n counts for each rank, such as one for each of n experts. Row r of the first
        table counts the rows that this rank sends to rank r. Row r of the second table counts the rows that it expects
        from rank r. weft checks that sender and receiver have the same counts.
        """
        return None

    def key(self, call: C) -> Hashable:
        """Return the key in the cache of compiled operators. Calls with equal keys share a compiled operator.

        If two keys differ, the texts of `said` must differ too. Otherwise ranks could agree on a call although only
        some of them have to compile an operator for it.
        """
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
        """Check a call and return it, normalised if needed. This is the only check of compiled calls, which bypass the
        public function.
        """
        return call

    def averages(self, call: C) -> bool:
        """True if the public function divides the first result in place by the number of ranks, as for reduce_op="avg". Default:
        the field `average` of the call.
        """
        return bool(getattr(call, "average", False))

    def multiple_of_rows(self, world: int) -> int:
        """Return a number m: a call remains valid if its first argument has another number of rows that is a multiple of m. Such
        calls may be replayed too. Default: 1.
        """
        return 1

    def note(self, call: C) -> None:
        """Store data of this call for later calls of this or another operator. Default: nothing."""

    def note_read(self, call: C, results: Sequence[torch.Tensor], read: Mapping[str, Sequence[int]], rank: int) -> None:
        """Store dynamic sizes of this call, which the CPU has read, for later calls of this or another operator.
        Default: nothing.

        read: {buffer: its contents}, from `Executor.read`.
        """

    # --- memory ---

    def inputs(self, p: Any, call: C) -> Tensors:
        """Return {buffer name: tensor} of the input buffers. By default, these are all fields of the call. Each field
        must then be a matrix, and must have the name of its buffer.
        """
        return call._asdict()  # type: ignore[attr-defined, no-any-return]

    @abstractmethod
    def outputs(self, call: C, world: int) -> Tensors:
        """Return new memory for the output buffers, by name, in the order in which the call returns them."""

    def fake(self, call: C, world: int) -> list[torch.Tensor]:
        """Return results without values for a traced call."""
        return list(self.outputs(call, world).values())

    def does_not_fit(self, p: Any, call: C) -> str:
        """Return the reason why this call exceeds the sizes of `p`; "" if the call fits.

        weft does not call this method for unfused calls without gradients.
        """
        return ""

    def to_choose_with(self, p: Any, rank: int, call: C) -> C:
        """Return the call that is timed to choose a schedule. Default: `call`, the first call of a shape. An operator may
        return a call with more typical sizes.
        """
        return call

    def finished(self, call: C, results: Sequence[torch.Tensor], rank: int) -> None:
        """Check the results of a call, and raise errors that can be found only in the results. weft calls this method only on CPU,
        where results are complete when a call returns.
        """

    def gemms(self, call: C, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        """Return (rows, weights) for FLOP counts (`weft.operator.flops`): this rank multiplies `rows` rows by each
        weight [K, N], or by the weights of experts [E, K, N].

        results: the results of the call, or their gradients.
        """
        return 0, []

    # --- gradients ---

    def tracked(self, call: C) -> list[torch.Tensor | None]:
        """Return the tensors that autograd tracks in eager mode. Default: all tensors of the call. Each tracked tensor
        costs CPU time in every call, so omit tensors that never need gradients.
        """
        return self.tensors(call)

    def saved(self, call: C, results: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Return the tensors that `gradients` needs. Default: all tensors of the call.

        wanted: for each tensor, True if its gradient is wanted. The tensors are as in `tracked`, or in a compiled call
            all tensors of the call.
        """
        return self.tensors(call)

    def beside(
        self, call: C, group: dist.ProcessGroup, saved: Sequence[torch.Tensor | None], inputs: Tensors | None
    ) -> Any:
        """Start work for backward right after the call. Return any object; `gradients` receives it as `beside`.

        The object exists as long as the autograd graph. Tensors whose in-place changes autograd must detect belong in
        `saved`, not in the object.

        inputs: the input buffers of the call, by name; None for a compiled call, which runs this method at the start of
            its backward.
        """

    def require_backward(self, beside: Any) -> None:
        """Raise an error if backward of this call cannot run, or cannot run a second time. beside: the object that the method
        `beside` returned. weft calls this method before autograd unpacks the tensors of `saved`.
        """

    def gradients(
        self, p: Any, group: dist.ProcessGroup, saved: Sequence[Any], grads: list[torch.Tensor], wanted: Sequence[bool],
        turn: Turn, beside: Any,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Return a gradient, or None, for each entry of `wanted`. `wanted` is equal on all ranks.

        Gradients are sums over ranks, not means. grads: the gradients of the results.
        """
        raise NotImplementedError(
            f"{self.name} sets gradients_of ({', '.join(self.gradients_of)}): its spec must implement gradients()"
        )

    # --- the unfused call, if it is not the steps of the serial schedule ---

    def unfused(self, p: Any, call: C, group: dist.ProcessGroup, turn: Turn) -> list[torch.Tensor] | None:
        """Return the results, computed by torch's collectives and GEMMs. Return None to run the steps of the serial
        schedule instead.
        """
        return None

    def steps_on_gpu(self, call: C, world: int) -> NativeSteps | None:
        """Return an unfused call of GPU ranks, without gradients, as steps of native code. Return None if Python makes the call.

        Operators that run the steps of the serial schedule do not override this method.
        """
        return None

    def begun(self, p: Any, call: C, group: dist.ProcessGroup, turn: Turn) -> Begun | None:
        """Return an unfused call whose first part may run before CPU ranks on several hosts have synchronised. Return None if
        ranks must synchronise first.
        """
        return None

    # --- the operator's own kernels ---

    def own_executors(
        self, p: Any, call: C, comm: Communicator, tensors: Tensors, deadline_s: float | None
    ) -> Chosen:  # fmt: skip
        """Return the executors of all calls with this call's `key`. All ranks must make this call.

        Override this method only for an operator with its own kernels, which then obeys these rules:

        - Options of the call choose the executor. Users cannot pin a schedule.
        - Calls with equal `key` can use the same executor.
        - `inputs` checks every call. Its values may be of any type.
        - The executor returns the results, so `outputs` returns nothing.
        """
        raise NotImplementedError

    # --- benchmarks ---

    def drawn(self, p: Any, rank: int, generator: torch.Generator) -> C:
        """Return a call of the problem `p` with random tensors on the generator's device, for benchmarks."""
        raise NotImplementedError(f"{self.name} cannot be benchmarked: its spec must implement drawn()")

    def expected(self, p: Any, rank: int, calls: Sequence[C]) -> list[torch.Tensor]:
        """Return the correct results of a rank in float64. Benchmarks compare the operator's results with them.

        calls: the calls of all ranks.
        """
        raise NotImplementedError(f"{self.name} cannot be benchmarked: its spec must implement expected()")

    # --- derived from these ---

    def __init__(self) -> None:
        hints = get_type_hints(self.form)
        of_call: tuple[str, ...] = self.form._fields  # type: ignore[attr-defined]
        for field in of_call:
            if hints[field] not in _SCHEMA:
                known = ", ".join(
                    getattr(one, "__name__", "") if isinstance(one, type) else str(one) for one in _SCHEMA
                )
                raise TypeError(f"{self.name}: form.{field} has type {hints[field]}: use one of {known}")
        if unknown := [field for field in self.gradients_of if field not in of_call]:
            raise TypeError(
                f"{self.name}: gradients_of has {', '.join(unknown)}: use only fields of 'form' ({', '.join(of_call)})"
            )
        self.kinds = tuple(_SCHEMA[hints[field]] for field in of_call)
        self._compared = tuple(field in self.compared for field in of_call)
        self.differentiable = tuple(of_call.index(field) for field in self.gradients_of)
        self._none = (False,) * len(self.differentiable)
        self.has_executors = type(self).own_executors is not Operator.own_executors
        """True if the operator has its own kernels."""
        self.sizes_are_alike = type(self).size is Operator.size and not self.has_executors
        """True if ranks whose descriptions of a call (`said`) are equal also have the same size (`size`)."""
        self.title = PROBLEMS[self.name].title if self.name in PROBLEMS else self.name
        """The operator's name in messages."""

    @property
    def fields(self) -> str:
        """The fields of a call in the notation of torch's schemas."""
        return ", ".join(f"{kind} {name}" for kind, name in zip(self.kinds, self.form._fields, strict=True))  # type: ignore[attr-defined]

    def tensors(self, call: C) -> list[torch.Tensor | None]:
        """Return the tensors of the call as one flat list."""
        return self.flat(call)

    def named_tensors(self, call: C) -> list[tuple[str, torch.Tensor]]:
        """Return (argument name, tensor) for each tensor of the call."""
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
        """Return the values of all tensors of a call as one flat list.

        of_fields: a value for each field, such as the call itself or torch's needs_input_grad. The value of a field
            with several tensors is a list.
        """
        found: list[Any] = []
        for kind, one in zip(self.kinds, of_fields, strict=False):
            if kind in _ONE:
                found.append(one)
            elif kind in _SEVERAL:
                found += one
        return found

    def described(self, wanted: tuple[bool, ...]) -> str:
        """Return the wanted gradients as text, for the comparison between ranks."""
        return f"gradients wanted of ({', '.join(self.gradients_of.values())}): {wanted}" if self._none else ""


def _wants(value: Any) -> bool:
    if isinstance(value, list):
        return True in [t.requires_grad for t in value]
    return value is not None and value.requires_grad
