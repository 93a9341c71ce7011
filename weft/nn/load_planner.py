"""A planner for `torch.distributed.checkpoint.load` that checks the whole checkpoint before it writes anything."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from weft.caller import warn
from weft.nn.checkpoint import OPTIONAL

_SHOWN = 8


class LoadPlanner(DefaultLoadPlanner):
    """A `planner` for `torch.distributed.checkpoint.load` that checks the checkpoint before it writes to the model.

    It compares names, shapes and dtypes of all tensors with the checkpoint. If they differ on any rank, every rank
    raises torch's `CheckpointException` with a `ValueError` that names the tensors. (torch's own planner silently
    converts dtypes.) TorchRec's checkpoints have no learning rates and no numbers of updates: the current values stay,
    with a warning.
    """

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored, bad, kept = self.metadata.state_dict_metadata, list[str](), list[str]()
        for name, value in self.state_dict.items():
            if name in stored:
                bad += _differences(name, value, stored[name])
            elif OPTIONAL.search(name):
                kept.append(name)
            else:
                bad.append(f"{name} is not in the checkpoint")
        if bad:
            more = f"; {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            raise ValueError(
                "the checkpoint does not match the module, so nothing was loaded: "
                f"{'; '.join(bad[:_SHOWN])}{more}. Load it into a model with the same tables"
            )
        if kept:
            warn(f"the checkpoint has no {', '.join(kept)}: the present values are kept")
            self.state_dict = {name: value for name, value in self.state_dict.items() if name not in kept}
        return super().create_local_plan()


def _differences(name: str, value: Any, stored: Any) -> list[str]:
    size, dtype = getattr(value, "size", None), getattr(value, "dtype", None)
    if not callable(size) or not isinstance(dtype, torch.dtype):
        return []
    if not isinstance(stored, TensorStorageMetadata):
        return [f"{name} is not a tensor in the checkpoint"]
    if tuple(stored.size) != tuple(size()):
        return [f"{name} has shape {list(stored.size)} in the checkpoint and {list(size())} here"]
    if stored.properties.dtype != dtype:
        return [f"{name} is {stored.properties.dtype} in the checkpoint and {dtype} here"]
    return []
