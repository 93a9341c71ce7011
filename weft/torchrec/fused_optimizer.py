"""The optimizer that updates tables during backward, as TorchRec's `KeyedOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim import fused

import weft.nn


class FusedOptimizer(fused.FusedOptimizer):
    """A TorchRec `KeyedOptimizer` of this rank's tables, which backward updates.

    `step()` and `zero_grad()` do nothing. A learning rate written to `param_groups[0]["lr"]` applies to the next update. States
    have TorchRec's names, such as "<table>.momentum1", and are ShardedTensors that share memory with the optimizer. As in
    TorchRec, `state_dict()` contains neither the learning rate nor the number of updates. Adam's bias correction needs the
    number of updates: after loading a state dict, set it with `set_optimizer_step`.
    """

    def __init__(
        self, by_weft: weft.nn.FusedOptimizer, params: Mapping[str, nn.Parameter],
        states: Mapping[str, Mapping[str, ShardedTensor]],
    ) -> None:  # fmt: skip
        """Wrap weft's optimizer `by_weft`.

        params: the parameters of the tables, by their names in the module.
        states: the optimizer states, by the parameter's name and then by the state's name.
        """
        self._by_weft = by_weft
        of_params = {parameter: dict(states[name]) for name, parameter in params.items()}
        super().__init__(params, of_params, [by_weft.param_groups[0]])  # type: ignore[arg-type]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Do nothing: backward has already updated the tables. If `closure` is given, call it and return its value."""
        return self._by_weft.step(closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing: the tables have no gradients."""

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of updates so far, for Adam's bias correction."""
        self._by_weft.set_optimizer_step(step)
