"""A call of an operator in tests: the inputs of all ranks, the public function's arguments, and the expected results.

Each operator has a subclass, and the suite (`suite.py`) knows operators only by these subclasses. `reference` computes
every rank's results as a differentiable function of every rank's inputs. In float64 it gives the expected results and
gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from support.on_ranks import close, poisoned_outputs

from weft.builders import Problem
from weft.operator.spec import Operator

Tensors = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The parameters of a call. schedule: the pinned schedule."""

    schedule: str | None = None


class Call:
    """A call of an operator on this rank.

    inputs: for each rank, its input tensors, in the order that `arguments` expects.
    """

    spec: ClassVar[Operator[Any]]
    public: ClassVar[Callable[..., Any]]
    operands: ClassVar[tuple[str, str]]
    """The names of the rows and of the weights in error texts."""
    places: ClassVar[tuple[int, int]] = (0, 1)
    """The indices of the rows and of the (first) weights among the inputs."""
    atol: ClassVar[float] = 2e-3
    """The absolute tolerance of gradients in fp32."""
    reduces: ClassVar[bool] = False
    """True if the ranks' products are reduced. In unfused calls torch.distributed reduces them, in an order that may
    change.
    """

    def __init__(self, case: Any, group: dist.ProcessGroup, seed: int) -> None:
        self.case, self.rank, self.world, self.seed = case, group.rank(), group.size(), seed
        self.inputs = [self.drawn(rank) for rank in range(self.world)]

    # --- defined by each operator ---

    def drawn(self, rank: int) -> Tensors:
        """Return the inputs of `rank`."""
        raise NotImplementedError

    def arguments(self, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | str) -> dict[str, Any]:
        """Return the arguments of the public function for this rank's `inputs`."""
        raise NotImplementedError

    def results(self, returned: Any) -> Tensors:
        """Return the results of the public function as a list of tensors, in the order of the spec's outputs."""
        return [returned]

    def reference(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        """Return the results of every rank, computed in the dtype of `inputs`."""
        raise NotImplementedError

    def usual(self, group: dist.ProcessGroup) -> Tensors:
        """Return this rank's results by torch's own ops in the dtype of the call. All ranks must make this call."""
        return self.reference(self.inputs)[self.rank]

    def problem(self) -> Problem:
        """Return the problem of this call. Its sizes are those of two-dimensional operands."""
        raise NotImplementedError

    def kept(self, results: Tensors) -> Tensors:
        """Return the parts of the results that are compared."""
        return results

    def alike(self, results: Tensors) -> Tensors:
        """Return the results that must have the same bits on all ranks."""
        return []

    @classmethod
    def sized(cls, case: Any, rows: int, world: int) -> Any:
        """Return `case` with about `rows` rows on each rank."""
        raise NotImplementedError

    def impossible(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return {name: (changed arguments that are refused, a part of the error text)}."""
        raise NotImplementedError

    def different(self) -> dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]]:
        """Return {name: (changed arguments of rank 0, changed arguments of the other ranks, parts of the error text)}."""
        raise NotImplementedError

    def operations(self, group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
        """Return the argument lists with which `opcheck` calls the operator in torch.ops."""
        raise NotImplementedError

    # --- the same for all operators ---

    @property
    def mine(self) -> Tensors:
        return self.inputs[self.rank]

    def __call__(self, group: dist.ProcessGroup | str, *inputs: torch.Tensor, **options: Any) -> Tensors:
        """Call the public function with `inputs`; by default with this rank's inputs."""
        arguments = self.arguments(inputs or self.mine, group)
        return self.results(type(self).public(**{"schedule": self.case.schedule} | arguments | options))

    def exact(self) -> Tensors:
        return self.reference([[t.double() for t in of_rank] for of_rank in self.inputs])[self.rank]

    def expected(self, group: dist.ProcessGroup) -> tuple[Tensors, Tensors]:
        """Return this rank's results in float64, and its results by torch's own ops."""
        return self.exact(), self.usual(group)

    def check(self, group: dist.ProcessGroup, found: Tensors, expected: tuple[Tensors, Tensors] | None = None) -> None:
        """Check the results. Copied results must have the same bits. The error of other results may be twice that of
        torch's own ops.
        """
        (exact, usual), found = expected or self.expected(group), self.kept(found)
        assert len(found) == len(exact) == len(usual)
        for number, (y, of_float64, by_torch) in enumerate(zip(found, exact, usual, strict=True)):
            assert y.shape == of_float64.shape
            assert y.dtype == by_torch.dtype
            if number < self.copied:
                assert torch.equal(y.float(), by_torch.float())
            else:
                close(y, of_float64, by_torch)

    @property
    def copied(self) -> int:
        """The number of results, at the beginning of the list, that are copies of inputs."""
        return 0

    def poisoned(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which new results are filled with NaN before anything is written."""
        return poisoned_outputs(self.spec)
