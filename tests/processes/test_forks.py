"""A forked child inherits process groups whose sockets it must not use. Every call in the child raises an error with
this reason, and the parent's groups stay usable.

Functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schedule_cpu_ranks import build, comm_of, tensors_of
from support.on_ranks import error_of

import weft
from weft import symm
from weft.builders import AllGatherMatmul
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.runtime.cpu.schedule import CpuSchedule

P = AllGatherMatmul(2, (4, 4), (3,), 8, "fp32")
TABLES = [weft.EmbeddingBagConfig(10, 4, "one", ["a"]), weft.EmbeddingBagConfig(10, 4, "two", ["b"])]

SAID = "this process was forked from the process that made the group: make a new process group in the child"


def in_child(do: Callable[[], Any]) -> Any:
    """Return the result of a function in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = do()
        except BaseException as error:
            answer = repr(error)
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pickle.load(pipe)
    os.waitpid(child, 0)
    return answer


def product(group: dist.ProcessGroup, rows: int = 4) -> float:
    return float(weft.all_gather_matmul(torch.ones(rows, 8), [torch.ones(8, 3)], 0, group)[1][0].sum())


def use_what_was_inherited(group):
    own = dist.new_group(list(range(group.size())))
    comm, tensors = comm_of(own), tensors_of(P, group.rank(), 0)
    module = ShardedEmbeddingBagCollection(TABLES, group=own)
    features = weft.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4, dtype=torch.int64))
    pooled = module(features).values().clone()
    before = product(own)
    with symm.Signal(group=own) as signal, symm.Exchange(comm) as exchange, CpuSchedule(build(P), comm) as executor:
        uses: dict[str, Callable[[], Any]] = {
            "communicator": lambda: symm.communicator(own, "cpu"),
            "communicator of another group": lambda: symm.communicator(group, "cpu"),
            "a call": lambda: product(own),
            "a call of a new shape": lambda: product(own, 5),
            "a module": lambda: ShardedEmbeddingBagCollection(TABLES, group=own),
            "a call of a module": lambda: module(features),
            "closing a module": module.close,
            "a signal": lambda: signal.set(1, peer=0),
            "an exchange": lambda: exchange.exchange(b""),
            "all_gather": lambda: comm.all_gather(1),
            "memory": lambda: comm.allocate(64),
            "a schedule": lambda: executor.run(tensors),
        }
        told = in_child(lambda: {name: error_of(use) for name, use in uses.items()})
        # The groups of the parents still work.
        assert comm.all_gather(group.rank()) == [0, 1]
        executor.run(tensors)
        assert product(own) == before
        assert torch.equal(module(features).values(), pooled)
    return told


def test_whatever_a_child_does_with_the_parents_group_says_that_it_is_one(pool: Pool) -> None:
    for told in pool.run(use_what_was_inherited, ranks=2):
        for name, (kind, text) in told.items():
            assert kind == "ValueError", name
            assert SAID in text, name


FORKS = """
import multiprocessing, sys, torch.distributed as dist, weft  # and no more of weft than that

def use():
    try:
        weft.symm.communicator(dist.group.WORLD, "cpu")
    except ValueError as error:
        print(error, flush=True)

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
    assert "weft.symm" not in sys.modules
    child = multiprocessing.get_context("fork").Process(target=use)
    child.start()
    child.join()
    dist.destroy_process_group()
    sys.exit(child.exitcode)
"""


@pytest.mark.slow
def test_to_have_imported_weft_is_enough(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", FORKS, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout.startswith(SAID)) == (0, True), done.stdout + done.stderr
