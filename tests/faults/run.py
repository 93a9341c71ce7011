"""Run pytest in copies of the source tree. Usage: python tests/faults/run.py, with a request in each line of stdin.

A new Python for each fault would spend more time on imports of torch and pytest than on most tests. This process
imports them once, but not weft, and forks for each request. If the tests start multiprocessing's fork server, it is a
fork of this process too.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import sys
from multiprocessing import process, util
from pathlib import Path
from typing import Any

IMPORTED = (
    "hypothesis", "numpy", "pytest", "torch", "torch.distributed", "torch._dynamo.backends.debugging",
    "torch._functorch.aot_autograd", "torch._inductor.pattern_matcher",
)  # fmt: skip


class Ends:
    """A pytest plugin that records how each test ends: "passed", or the type of its first error."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if self.of.get(item.nodeid, "passed") == "passed":
            self.of[item.nodeid] = "passed" if call.excinfo is None else call.excinfo.typename


def run(tree: str, tests: list[str]) -> None:
    """Run tests in `tree`, and write how each of them ended to said.json there. Each call has its own process."""
    os.setsid()
    os.chdir(tree)
    process.ORIGINAL_DIR = tree  # type: ignore[attr-defined]  # the working directory of workers
    os.environ["PYTHONPATH"] = sys.path[0] = tree
    printed = os.open("said.txt", os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, nothing), (1, printed), (2, printed)):
        os.dup2(file, number)
    _fork_the_fork_server()
    import pytest

    ends = Ends()
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[ends])
    sys.stdout.flush()
    Path("said.json").write_text(json.dumps(ends.of))


def _fork_the_fork_server() -> None:
    """Fork a process that becomes the fork server if a test starts one.

    It has to be forked before this process has threads.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        command, files, *_ = socket.recv_fds(theirs, 1 << 16, 2)
        if files:  # empty if the tests have ended and started no fork server
            exec(re.sub(r"main\(\d+, \d+,", "main({}, {},".format(*files), command.decode(), count=1), {})
        os._exit(0)
    theirs.close()
    start = util.spawnv_passfds

    def start_or_send(path: Any, arguments: Any, files: Any) -> int:
        if "forkserver import main" not in arguments[-1] or ours.fileno() < 0:
            return start(path, arguments, files)
        socket.send_fds(ours, [arguments[-1].encode()], files)
        ours.close()
        return pid

    util.spawnv_passfds = start_or_send


def _serve() -> None:
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith(("_editable", "_weft_editable"))]
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                run(request["tree"], request["tests"])
            finally:
                os._exit(0)
        end = os.pidfd_open(pid)
        if not select.select([end], [], [], request["timeout_s"])[0]:
            os.killpg(pid, signal.SIGKILL)
        os.close(end)
        os.waitpid(pid, 0)
        print(pid, flush=True)


if __name__ == "__main__":
    _serve()
