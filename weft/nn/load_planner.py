"""A planner for `torch.distributed.checkpoint.load` that checks the whole checkpoint before it writes anything."""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from weft.caller import warn
from weft.nn.checkpoint import OPTIMIZER, OPTIONAL
from weft.words import kind

_SHOWN = 8
_STATE = re.compile(r"(?P<table>(?:.*\.)?embedding(?:_bag)?s\.[^.]+\.weight)\..+")


class LoadPlanner(DefaultLoadPlanner):
    """A `planner` for `torch.distributed.checkpoint.load` that checks the checkpoint before it writes to the model.

    It compares names, shapes and dtypes of all tensors with the checkpoint, and the classes and hyperparameters of the
    tables' optimizers, except learning rates. An optimizer state in the checkpoint that the model's optimizer lacks is
    also a difference. If there are differences on any rank, every rank raises torch's `CheckpointException` with a
    `ValueError` that names them. (torch's own planner silently converts dtypes.) Every rank also raises this exception
    if ranks load different checkpoints. (torch's own planner mixes their values.)

    TorchRec's checkpoints have no learning rates and no numbers of updates: the model keeps its own, and a warning says
    so. They also lack the class and hyperparameters of the optimizer, so only its states are compared.

    folder: the folder of the checkpoint, to find damaged data, such as a flipped bit. Each rank then compares the CRC-32 of all
        data that it will read with the checksums in the files, before anything is written. So the data are read twice. (torch
        stores these checksums, but does not compare them.) It also checks that the chunks of each tensor cover the tensor. (torch
        leaves elements without a chunk as they are.) The check needs torch's default format. Default: None, no check.

    Raises `TypeError` if `folder` is neither a path nor None.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise TypeError(f"folder is {kind(folder)}: pass the path of the checkpoint's folder, or None")
        self._folder = None if folder is None else Path(folder)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored, bad, kept = self.metadata.state_dict_metadata, list[str](), list[str]()
        optimizers = {found["entry"]: found["described"] for name in stored if (found := OPTIMIZER.fullmatch(name))}
        without = set[str]()
        for name, value in self.state_dict.items():
            if name in stored:
                bad += _differences(name, value, stored[name])
            elif own := OPTIMIZER.fullmatch(name):
                without.add(name)
                if there := optimizers.get(own["entry"]):
                    bad.insert(0, f"{own['entry']} is {there} in the checkpoint and {own['described']} here")
            elif OPTIONAL.search(name):
                kept.append(name)
            else:
                bad.append(f"{name} is not in the checkpoint")
        tables = set(_tables(self.original_state_dict))
        for name in stored:
            if name not in self.state_dict and (state := _STATE.fullmatch(name)) and state["table"] in tables:
                bad.append(f"{name} is in the checkpoint, but the optimizer here has no such state")
        if bad:
            more = f"; {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            raise ValueError(
                "the checkpoint does not match the module, so nothing was loaded: "
                f"{'; '.join(bad[:_SHOWN])}{more}. Load it into a model with the same tables and optimizers"
            )
        if kept:
            warn(
                f"the checkpoint has no {', '.join(kept)}: the present values are kept. If they are wrong, set them by "
                "fused_optimizer.param_groups and fused_optimizer.set_optimizer_step()"
            )
        without.update(kept)
        if without:
            self.state_dict = {name: value for name, value in self.state_dict.items() if name not in without}
        plan = super().create_local_plan()
        if self._folder is not None and (damaged := _damaged(self._folder, plan, self.metadata, self.state_dict)):
            raise ValueError(
                f"the checkpoint is damaged, so nothing was loaded: {'; '.join(damaged[:_SHOWN])}. Load another checkpoint"
            )
        return replace(plan, planner_data=_saved_as(self.metadata))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        saved = [plan.planner_data for plan in global_plan]
        for rank, (number, folder) in enumerate(saved):
            if number != saved[0][0]:
                raise ValueError(
                    "ranks load different checkpoints, so nothing was loaded: rank 0 loads a checkpoint that was saved as "
                    f"{saved[0][1]}, and rank {rank} a checkpoint that was saved as {folder}. Pass the same checkpoint_id on "
                    "every rank"
                )
        return super().create_global_plan(global_plan)


def _damaged(folder: Path, plan: LoadPlan, metadata: Metadata, names: Iterable[str]) -> list[str]:
    """Return a text for each part of the checkpoint that `plan` reads and that differs from what was saved.

    names: the names of the tensors to load. `plan` does not read elements that are in no chunk.
    """
    if gaps := [name for name in names if not _is_covered(metadata.state_dict_metadata[name])]:
        return [f"the chunks of {name} do not cover it exactly" for name in gaps]
    stored: Any = metadata.storage_data
    places = {(one := stored[item.storage_index]).relative_path: set[Any]() for item in plan.items}
    for item in plan.items:
        one = stored[item.storage_index]
        places[one.relative_path].add((one.offset, one.length, item.storage_index.fqn))
    found = []
    for name, parts in places.items():
        with open(folder / name, "rb") as file:
            for begin, length, tensor in sorted(parts):
                if text := _difference(file, begin, length):
                    found.append(f"{tensor} in {name}: {text}")
    return found


def _is_covered(stored: Any) -> bool:
    """Return whether each element of a stored tensor is in exactly one chunk. True for anything but a tensor.

    It is if the signed corners of all chunks add up to those of the whole tensor.
    """
    if not isinstance(stored, TensorStorageMetadata):
        return True
    corners = Counter[tuple[int, ...]]()
    boxes = [(chunk.offsets, chunk.sizes, 1) for chunk in stored.chunks]
    for offsets, sizes, sign in [*boxes, ([0] * len(stored.size), stored.size, -1)]:
        for ends in product((False, True), repeat=len(stored.size)):
            corner = tuple(at + size * end for at, size, end in zip(offsets, sizes, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def _difference(file: IO[bytes], begin: int, length: int) -> str:
    """Check `length` bytes of a file, from `begin` on: they must be a zip archive as torch.save writes it, and each
    part must have its saved CRC-32. Return an error text; "" if there is no error.
    """
    try:
        with zipfile.ZipFile(_Window(file, begin, length)) as archive:
            bad = archive.testzip()
    except Exception as error:  # damaged archives raise errors of many classes
        return f"{type(error).__name__}: {error}"
    return "" if bad is None else f"{bad} has another CRC-32 than when it was saved"


class _Window(io.RawIOBase):
    """A readable file that shows only a part of another file. With it, zipfile need not hold the whole part in memory."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _saved_as(metadata: Metadata) -> tuple[str | None, str]:
    """Return (the unique number of a save, or None if the checkpoint has none; the checkpoint_id that was saved)."""
    found = getattr(metadata, "storage_meta", None)
    return getattr(found, "save_id", None), str(getattr(found, "checkpoint_id", None))


def _tables(state_dict: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the checkpoint names of all tables that `state_dict` lists under an optimizer, even if the optimizer has no
    states.

    prefix: the path of `state_dict` in the checkpoint.
    """
    for name, value in state_dict.items():
        if not isinstance(value, Mapping):
            continue
        if name == "state" and "param_groups" in state_dict:
            yield from (f"{prefix}state.{table}" for table in value)
        else:
            yield from _tables(value, f"{prefix}{name}.")


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
