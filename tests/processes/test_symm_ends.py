"""Symmetric memory whose process group is destroyed, or whose process forks or exits.

The functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import barrier
from support.on_ranks import error_of

import weft
from weft import symm
from weft.launch import Pool


def destroy_the_group(group):
    own = dist.new_group([0, 1])
    comm = symm.communicator(own, "cpu")
    buffer = symm.SymmetricBuffer((4,), torch.float32, group=own)
    comm.all_gather("both are here")
    dist.destroy_process_group(own)
    refused = error_of(lambda group=own: symm.communicator(group, "cpu"))
    del own
    gc.collect()
    assert comm.closed
    return [refused, error_of(lambda: buffer.local), error_of(comm.check), error_of(lambda: comm.group)]


def test_destroying_the_process_group_closes_its_communicator(pool: Pool) -> None:
    for refused, buffer, check, group in pool.run(destroy_the_group, ranks=2):
        assert "was destroyed" in refused[1]
        assert "closed" in buffer[1]
        assert "process group was destroyed" in check[1]
        assert "was destroyed" in group[1]


def fork_a_child(group):
    """Fork a child. It cannot use the communicator, and its exit is not mistaken for the rank's death."""
    comm = symm.communicator(group, "cpu")
    with symm.Signal(group=group) as signal:
        child = os.fork()
        if child == 0:
            text = error_of(comm.check)[1]
            os._exit(0 if "forked" in text and "forked" in error_of(lambda: signal.set(1, peer=0))[1] else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        barrier(signal, 1)
        assert comm.all_gather(group.rank()) == [0, 1]


def test_a_forked_child_is_told_off_and_does_no_harm(pool: Pool) -> None:
    pool.run(fork_a_child, ranks=2)


EXIT_WITHOUT_CLOSING = """
import sys, torch, torch.distributed as dist
import weft
from weft import symm
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
buffer = symm.SymmetricBuffer((4,), torch.float32, group=dist.group.WORLD)
signal = symm.Signal(group=dist.group.WORLD)
signal.set(1, peer=1 - rank)
signal.wait(1)
if rank == 1:
    import time; time.sleep(0.3)  # rank 0 is gone by now, in order: no failure
    signal.comm.check()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_process_may_exit_with_everything_open(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", EXIT_WITHOUT_CLOSING]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, noise = process.communicate(timeout=300)
        noise = "\n".join(line for line in noise.splitlines() if "destroy_process_group" not in line)  # torch's own
        assert (process.returncode, noise) == (0, "")


def pid_in_group(group: dist.ProcessGroup) -> int:
    weft.all_gather_matmul(
        torch.ones(4, 8), [torch.ones(8, 4)], 0, group, schedule="shard[chunks=1,send=in_turn,by=dma]", return_A=False
    )
    assert "memfd" in Path("/proc/self/maps").read_text()
    return os.getpid()


def has_left(group: dist.ProcessGroup, pid: int) -> bool:
    """Wait until the process has no symmetric memory mapped."""
    until = time.monotonic() + 10
    while "memfd" in Path(f"/proc/{pid}/maps").read_text():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_workers_that_a_run_leaves_out_leave_the_last_group() -> None:
    """Otherwise NCCL would wait for these workers when the others leave the group."""
    with Pool(3) as fresh:
        *_, pid = fresh.run(pid_in_group, timeout_s=60)
        assert fresh.run(has_left, pid, ranks=1, timeout_s=60) == [True]
        assert fresh.run(pid_in_group, timeout_s=60)[2] == pid
