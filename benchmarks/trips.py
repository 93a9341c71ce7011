"""The files and folders of weft that a call enters: a measure of how hard the code is to follow.

    python benchmarks/trips.py [--files]

It traces steady calls on two CPU ranks, and a schedule from its builder to a run on modelled GPUs
(`tests/unit/modelled_gpus.py`). It counts Python functions of weft on all threads of rank 0, but no native code. It also counts
calls into a higher layer (docs/architecture.md), such as a spec's hook or a callback.
"""

from __future__ import annotations

import argparse
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import weft
from weft.embedding import EmbeddingBagConfig, EmbeddingSharding
from weft.launch import run_ranks

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "weft"


class Trip(NamedTuple):
    """The files that a call enters. files: in the order of entry. back: calls into a higher layer, as (caller's file,
    called file).
    """

    files: list[str]
    functions: int
    back: list[tuple[str, str]]

    @property
    def rooms(self) -> int:
        return len({str(Path(file).parent) for file in self.files})


def layers() -> dict[str, int]:
    """Return the height of each layer, from pyproject.toml."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(one["layers"] for one in contracts if "exhaustive" in one)
    return {name.strip(): height for height, row in enumerate(reversed(rows)) for name in row.split("|")}


class Walk:
    """A recorder of weft's functions that run in a call, on this thread and on threads started after its construction."""

    def __init__(self) -> None:
        self._height, self._on = layers(), False
        threading.setprofile(self._look)

    def of(self, call: Callable[[], object]) -> Trip:
        self._files, self._functions, self._back = dict[str, None](), 0, list[tuple[str, str]]()
        sys.setprofile(self._look)
        self._on = True
        try:
            call()
        finally:
            self._on = False
            sys.setprofile(None)
        return Trip(list(self._files), self._functions, self._back)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if not self._on or event != "call" or not (to := _file(frame)):
            return
        self._files.setdefault(to)
        self._functions += 1
        caller = frame.f_back
        while caller is not None and not (source := _file(caller)):
            caller = caller.f_back
        if caller is not None and self._layer(to) > self._layer(source):
            self._back.append((source, to))

    def _layer(self, file: str) -> int:
        return self._height.get(file.partition("/")[0].removesuffix(".py"), len(self._height))


def _file(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""


def steady(walk: Walk, call: Callable[[], object]) -> Trip:
    for _ in range(5):
        call()
    return walk.of(call)


def calls(rank: int, world: int) -> dict[str, Trip]:
    """Return {name of a call: its trip on this rank}. No call is the first of its shape."""
    walk, group = Walk(), dist.group.WORLD
    x, w = torch.randn(8, 16), torch.randn(16, 4)
    tokens, w_experts = torch.randn(16, 16), torch.randn(2, 16, 8)
    splits = torch.full((2 * world,), 8 // world)
    tables = [EmbeddingBagConfig(100, 8, f"t{i}", (f"f{i}",)) for i in range(4)]
    sharding = EmbeddingSharding(tuple(tables), tuple(i * world // 4 for i in range(4)), world)
    weights = [torch.randn(100, 8) for _ in sharding.local_tables(rank)]
    bags = len(weights) * 8
    features = torch.randint(0, 100, (2 * bags,)), torch.arange(0, 2 * bags + 1, 2)

    def gathered(schedule: str) -> object:
        return weft.all_gather_matmul(x, [w], 0, group, return_A=False, schedule=schedule)

    def dispatched(schedule: str) -> object:
        return weft.all_to_all_matmul(tokens, w_experts, splits, group=group, schedule=schedule)

    def pooled(transport: Any) -> object:
        return weft.embedding_all_to_all(weights, features, sharding, group=group, transport=transport)

    return {
        "x_shard of all_gather_matmul, serial": steady(walk, lambda: gathered("serial")),
        "x_shard of all_gather_matmul, shard": steady(walk, lambda: gathered("shard[chunks=1,send=in_turn,by=dma]")),
        "features of embedding_all_to_all, direct": steady(walk, lambda: pooled("direct")),
        "tokens of all_to_all_matmul, serial": steady(walk, lambda: dispatched("serial")),
        "tokens of all_to_all_matmul, dispatch": steady(walk, lambda: dispatched("dispatch[by=dma,rest=each]")),
    }


def to_gpus() -> Trip:
    """Return the trip of a schedule through builder, checks, compiler, and a run on modelled GPUs.

    Modelled GPUs replace streams, kernel launches, NCCL and cuBLAS."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "unit")]
    import modelled_gpus
    import pytest
    from played_gpus import Played

    from weft.builders import AllGatherMatmul, named
    from weft.runtime.cuda.runnable import require_runnable_on_gpus
    from weft.schedule.verify import verify

    def shard(rank: int, run: int) -> dict[str, torch.Tensor]:
        return {"x_shard": torch.randn(32, 32), "w0": torch.randn(32, 32), "y0": torch.empty(64, 32)}

    def go() -> None:
        schedule = named(AllGatherMatmul.even(64, 32, 32, 2, "fp32"), "shard[chunks=2,send=in_turn,by=dma]").build()
        verify(schedule)
        require_runnable_on_gpus(schedule, 0)
        Played(schedule, 1, shard).play(0)

    with pytest.MonkeyPatch.context() as patch:
        modelled_gpus.model(patch)
        return Walk().of(go)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the files in the order in which they are entered")
    given = parser.parse_args()
    found = run_ranks(2, calls)[0] | {"a schedule of all_gather_matmul, from its builder to GPUs": to_gpus()}
    for name, trip in found.items():
        print(
            f"{name}: {trip.functions} functions in {len(trip.files)} files of {trip.rooms} folders, {len(trip.back)} calls back"
        )
        if given.files:
            print("   ", *trip.files, sep=" ")
            print("    back:", *sorted({f"{a} -> {b}" for a, b in trip.back}), sep="\n      ")
