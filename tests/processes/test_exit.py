"""Exit of a process in which a thread still waits for another process: it exits at once, and normally.

The two processes do not come from a pool, because their exits are tested. The second process stays until the first has
exited.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.slow import mostly


def first_of_two(program: str, directory: Path, *arguments: str, timeout_s: float) -> tuple[int, str]:
    """Run two ranks. Return rank 0's exit status and output. Both ranks get rank, directory and `arguments`."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(rank), str(directory), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said, _ = processes[0].communicate(timeout=timeout_s)
        assert processes[1].poll() is None
        processes[1].communicate(timeout=timeout_s)
    finally:
        for process in processes:
            process.kill()
    return processes[0].returncode, said


LEAVES = """
    import sys, threading, time, torch, torch.distributed as dist, weft
    from dataclasses import replace
    from weft.ops import all_gather_matmul
    from weft.runtime.unfused import collectives
    from weft.symm.entries import Entry

    rank, directory = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", store=dist.FileStore(directory + "/store", 2), rank=rank, world_size=2)

    other = dist.new_group([0, 1])

    def call(deadline_s, group=dist.group.WORLD, schedule="serial"):
        options = {"schedule": schedule, "return_A": False, "deadline_s": deadline_s}
        x, w = torch.ones(4, 8), torch.ones(8, 3, requires_grad=True)  # backward gathers x again by gloo
        return weft.all_gather_matmul(x, [w], 0, group, **options)[1][0].sum()

    y = call(30, other, sys.argv[3])
    of_this = Entry.of_this_process  # on several hosts, gloo runs the collectives
    Entry.of_this_process = staticmethod(lambda *given: replace(of_this(*given), host=f"host {rank}", kernel=f"{rank}"))
    y = call(30)
    y = call(0.5)
    if rank == 1:
        for module in (collectives, all_gather_matmul):
            module.all_gather_single = lambda *_, **__: sys.stdin.read()  # until the other process has ended
    try:
        y.backward() if "backward" in sys.argv else call(0.5)
    except weft.errors.WeftError as error:
        print(type(error).__name__)
    if "waits" in sys.argv:
        threading.excepthook = lambda _: None  # a daemon thread that prints at the exit may abort it
        threading.Thread(target=call, args=(50, other, sys.argv[3]), daemon=True).start()
        time.sleep(0.5)
    if "destroy" in sys.argv:
        dist.destroy_process_group()
"""


GATHER = "gather[by=kernel]"
HOWS = [
    f"{GATHER} waits",
    "serial waits",
    "shard[chunks=1,send=in_turn,by=dma] waits",
    *(f"{GATHER} {how}destroy" for how in ("", "backward ")),
]


@pytest.mark.parametrize("how", mostly(HOWS, HOWS[0]))
def test_a_collective_that_was_given_up_holds_up_no_exit(tmp_path: Path, how: str) -> None:
    """Let a daemon thread wait, too, for a schedule (`waits`). It leaves native code in time: while the interpreter is
    ending, it would abort the process.
    """
    status, said = first_of_two(LEAVES, tmp_path, *how.split(), timeout_s=60)
    assert status == 0
    assert said == "DeadlineError\n"


SLEEPS = """
    import sys, time, torch, torch.distributed as dist, weft
    from weft import symm

    rank, directory = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", store=dist.FileStore(directory + "/store", 2), rank=rank, world_size=2)
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    communicators = [symm.communicator(group, "cpu") for group in groups]
    if rank == 1:
        sys.stdin.read()  # until the other process has ended
        sys.exit()
    for group, communicator in zip(groups, communicators):
        weft.on_failure(group, lambda error: (print("told", flush=True), time.sleep(1000)))
        communicator.poison("the table is on fire")
    time.sleep(0.5)
"""


@pytest.mark.slow
def test_a_callback_that_sleeps_holds_up_no_exit(tmp_path: Path) -> None:
    status, said = first_of_two(SLEEPS, tmp_path, timeout_s=60)
    assert status == 0
    assert said.count("told") == 2


STAYS = """
    import test_exit
    from weft.launch import run_ranks

    if __name__ == "__main__":
        run_ranks(2, test_exit.stay)
"""


def stay(rank: int, world_size: int) -> None:
    os.write(1, b"here\n")  # one write, so that lines of two ranks do not mix
    time.sleep(60)


def test_ranks_of_a_terminated_process_leave_no_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(STAYS)]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(path for path in sys.path if path)}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True)
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["here\n"] * 2
    assert list(tmp_path.iterdir())
    parent.terminate()
    assert parent.stdout.read() == ""  # until the last rank has ended
    assert parent.wait() == -signal.SIGTERM
    assert not list(tmp_path.iterdir())
