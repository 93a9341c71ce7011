"""The optimizer that updates embedding tables during backward, as a `torch.optim.Optimizer` for schedulers and
checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from weft.arguments import check_tensor
from weft.embedding.optimizers import LARGEST
from weft.embedding.update import FusedUpdate


class FusedOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` for this rank's tables, which backward updates.

    `step()` and `zero_grad()` do nothing, so a training loop can call them on all its optimizers. A learning rate
    written to `param_groups[0]["lr"]`, for example by a scheduler, applies to all later updates of this rank, including
    replays of a CUDA graph. All ranks must write the same value; CPU ranks compare it at each backward. Other
    hyperparameters are fixed.

    `state_dict()` has torch's form and TorchRec's names: state "<table>.momentum1" of parameter
    "embedding_bags.<table>.weight". The dict contains only this rank's part. `load_state_dict()` copies into the states
    in place. For checkpoints that another number of ranks can load, use `weft.nn.FusedOptimizers`.
    """

    def __init__(self, update: FusedUpdate, tables: Mapping[str, nn.Parameter]) -> None:
        self._update = update
        super().__init__([{"params": list(tables.values())}], {"lr": update.lr, **update.optimizer.numbers})
        self.param_groups[0] = _Group(self.param_groups[0], update)
        for (name, parameter), states in zip(tables.items(), update.states, strict=True):
            if states:
                self.state[parameter] = {f"{name}.{state}": tensor for state, tensor in states.items()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Do nothing: backward has already updated the tables. If `closure` is given, call it and return its value."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the tables have no gradients."""

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of updates, for Adam's bias correction and the random bits of stochastic rounding. Use it after
        loading a TorchRec checkpoint, which lacks this number.
        """
        if not 0 <= step < 2**63:
            raise ValueError(f"step={step} must be the number of updates so far, an integer of at least 0")
        self._update.step.fill_(step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `ValueError`: a fused optimizer has only its module's tables."""
        if getattr(self, "param_groups", None):
            raise ValueError(
                "a fused optimizer has only the tables of its module: use another optimizer for other parameters"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return states and hyperparameters, with the number of updates as "step". On GPUs the CPU waits for the
        device.
        """
        found = super().state_dict()
        found["param_groups"] = [{**group, "step": int(self._update.step)} for group in found["param_groups"]]
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Copy states, learning rate and number of updates.

        Raise `ValueError`, before anything is copied, if the state dict is of another optimizer or other tables.
        """
        if missing := [name for name in ("param_groups", "state") if name not in state_dict]:
            raise ValueError(
                f"the state dict has no {' and no '.join(missing)}: pass what fused_optimizer.state_dict() returned"
            )
        groups, given = state_dict["param_groups"], state_dict["state"]
        own = self.param_groups[0]
        if len(groups) != 1 or len(groups[0]["params"]) != len(own["params"]):
            raise ValueError(
                f"the state dict has groups of {[len(g['params']) for g in groups]} parameters, but this rank has "
                f"one group of {len(own['params'])} tables: load the state of the same rank and placement"
            )
        if missing := [name for name in ("lr", "step") if name not in groups[0]]:
            raise ValueError(
                f"the state dict has no {' and no '.join(missing)}: pass what fused_optimizer.state_dict() returned"
            )
        _checked_lr(groups[0]["lr"])
        for index, parameter in enumerate(own["params"]):
            names = self.state.get(parameter, {}).keys()
            if unknown := [name for name in given.get(index, {}) if name not in names]:
                raise ValueError(
                    f"the state dict has {', '.join(unknown)}, but this optimizer has "
                    f"{', '.join(names) or 'no states'}: load a state dict of the same optimizer class"
                )
        for name, number in self._update.optimizer.numbers.items():
            if groups[0].get(name) != number:
                raise ValueError(
                    f"the state dict has {name}={groups[0].get(name)}, but this optimizer has {number}: construct "
                    "the module with the value of the state dict"
                )
        copies = [
            (state, _of_state(given.get(number, {}), name, state))
            for number, parameter in enumerate(own["params"])
            for name, state in self.state.get(parameter, {}).items()
        ]
        with torch.no_grad():
            for own_state, value in copies:
                own_state.copy_(value)
        self._update.step.fill_(groups[0]["step"])
        own.update({name: value for name, value in groups[0].items() if name not in ("params", "step")})

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce_ex__(0)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a fused optimizer cannot be copied or pickled, because it writes to its module's states. Copy the "
            "module and use the copy's fused_optimizer, or save state_dict()"
        )


class _Group(dict[str, Any]):
    """A parameter group that copies a new learning rate to the device, and refuses changes of other hyperparameters."""

    def __init__(self, group: Mapping[str, Any], update: FusedUpdate) -> None:
        super().__init__(group)
        self._update = update
        self._fixed = update.optimizer.numbers

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "lr":
            value = _checked_lr(value)
            self._update.lr = value
        elif name in self._fixed and value != self._fixed[name]:
            raise ValueError(
                f"{name}={value} cannot be set: a fused optimizer keeps {name}={self._fixed[name]}, "
                "and only lr can change"
            )
        super().__setitem__(name, value)

    def update(self, *others: Any, **more: Any) -> None:
        for name, value in dict(*others, **more).items():
            self[name] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[override, misc]
        self.update(other)
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Let `copy` and `pickle` turn this object into an ordinary dict."""
        return dict, (dict(self),)


def _checked_lr(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not 0 <= number <= LARGEST:  # tiny numbers become 0, because schedulers decay learning rates towards 0
        raise ValueError(f"lr={value!r} must be a finite number of at least 0 and at most {LARGEST:.2g}")
    return number


def _of_state(states: Mapping[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:
    if name not in states:
        _refuse(name, states)
    check_tensor(name, states[name])
    if states[name].shape != like.shape:
        raise ValueError(
            f"state {name!r} has shape {list(states[name].shape)} but must have {list(like.shape)}: load a state dict that "
            "this rank's optimizer saved"
        )
    if states[name].dtype != like.dtype:
        raise ValueError(
            f"state {name!r} is {states[name].dtype} but must be {like.dtype}: load a state dict that this rank's "
            "optimizer saved"
        )
    found: torch.Tensor = states[name]
    return found


def _refuse(name: str, states: Iterable[str]) -> NoReturn:
    raise ValueError(
        f"the state dict has no {name!r}, only {', '.join(states) or 'nothing'}: load a state dict of the same "
        "optimizer class"
    )
