"""The `Work` of training steps with checkpoints: every third step saves one, and loads it into another module.

`torch.distributed.checkpoint` communicates by collectives of torch, on a group of their own, whose timeout is the
deadline. So if a rank fails, torch's errors are right, too. A load that is reported as successful must give the tables
and states of the step.
"""

from __future__ import annotations

import copy
import datetime
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from weft.nn import LoadPlanner

from .training import checkpoint_state
from .training_tables import CutTables
from .work import Given, Results

SAVING = range(2, 1000, 3)  # the steps that save and load
DAMAGES = ("file cut", "file removed", "metadata cut", "metadata removed")
FLIPS = ("bit of a file", "bit of a file", "bit of the metadata")


class Checkpoints(CutTables):
    """Training of a `ShardedEmbeddingBagCollection` that is saved and loaded. The module that loads has the same or other
    placements.

    loads_on: "fewer" if the last rank does not load, so that the checkpoint is loaded at another world size; or "all".
    """

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        drawn = super().drawn(rng, device)
        if drawn["optimizer"] is None:
            drawn |= {"optimizer": "Adam", "nonfinite": "propagate"}
        others = [drawn["placement"], *(change["placement"] for change in cls._other_placements(2, drawn))]
        # The number of rowwise states of a column-wise table is that of its parts.
        loads = drawn["placement"] if "owwise" in drawn["optimizer"] else rng.choice(others)
        # For the same reason, such a table must be loaded on as many ranks.
        is_fixed = "owwise" in drawn["optimizer"] and drawn["placement"] in ("columns", "mixed")
        on = "all" if is_fixed or rng.random() < 0.5 else "fewer"
        return drawn | {"restores": False, "prefetch": None, "loads": loads, "loads_on": on}

    def __init__(self, group: dist.ProcessGroup, *others: Any) -> None:
        super().__init__(group, *others)
        limit = datetime.timedelta(seconds=self.options["deadline_s"])
        self.saves_on = self.loads_on = dist.new_group(list(range(self.world)), timeout=limit)
        if self.options["loads_on"] == "fewer" and self.world > 1:
            self.loads_on = dist.new_group(list(range(self.world - 1)), timeout=limit)
        self.folder, self.stale = Path(), False
        self.saved: list[Path] = []
        self.loads: Callable[[], tuple[Results, Results]] | None = None

    def make(self) -> None:
        super().make()
        self.loaded: Checkpoints | None = None
        if self.loads_on == dist.GroupMember.NON_GROUP_MEMBER:
            return
        self.loaded = copy.copy(self)
        self.loaded.group, self.loaded.world = self.loads_on, self.loads_on.size()
        self.loaded.options = self.options | {"placement": self.options["loads"]}
        self.loaded.module = self.loaded._made(self.loads_on, self.loaded._placement())
        self.loaded.parts = self.loaded._parts()

    def more(self, n: int) -> list[tuple[str, Callable[[], Results], Callable[[], Results]]]:
        if n not in SAVING:
            return []
        return [
            ("save", lambda: self._save(n), list),
            ("load", self._load, lambda: [] if self.loaded is None else self.loaded._right(self.model)),
        ]

    def _save(self, n: int) -> Results:
        folder = self.folder / f"step-{n}"
        dcp.save(checkpoint_state(self.module), checkpoint_id=folder, process_group=self.saves_on)
        self.saved.append(folder)
        self.loads = self._loads_alone(str(folder))
        return []

    def _load(self) -> Results:
        folder, self.stale = self.saved[-1 - self.stale], False
        dist.barrier(self.saves_on)  # a damage comes before any rank reads
        if self.loaded is None:
            return []
        for _, weight in self.loaded.parts:
            weight.detach().fill_(torch.nan)
            for state in self.loaded._states(weight).values():
                state.fill_(torch.nan)
        state = checkpoint_state(self.loaded.module)
        dcp.load(state, checkpoint_id=folder, process_group=self.loads_on, planner=LoadPlanner(folder))
        return self.loaded._tables()

    def damage(self, choice: int) -> str:
        """Damage the last checkpoint so that no rank can load it. Return the kind of damage."""
        kind = DAMAGES[choice % len(DAMAGES)]
        files = sorted(self.saved[-1].glob("*.distcp"))
        path = files[choice // 4 % len(files)] if kind.startswith("file") else self.saved[-1] / ".metadata"
        if kind.endswith("cut"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        else:
            path.unlink()
        return kind

    def flip(self, choice: int) -> str:
        """Flip a bit of the last checkpoint. Loading it must raise an error, or give the right tables. Return the place."""
        kind, files = FLIPS[choice % len(FLIPS)], sorted(self.saved[-1].glob("*.distcp"))
        path = files[choice % len(files)] if kind == "bit of a file" else self.saved[-1] / ".metadata"
        data, rng = bytearray(path.read_bytes()), random.Random(f"{self.seed}:{choice}")
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        return f"byte {at} of {path.name}"
