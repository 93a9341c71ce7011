"""Start several ranks on this machine from one Python call: `run_ranks` for one function, `Pool` for workers that
persist between calls.

Importing torch takes seconds in each new interpreter. So a fork server imports torch once, and forks each rank in
milliseconds. The server has no threads and no CUDA context, so the fork is safe even if the calling process has both.
Ranks find each other by a file in a private temporary directory, without a TCP port.

The function must be importable by name (a top-level function). Its arguments and results must be picklable; tensors are
copied. If a rank raises, dies or exceeds the time limit, all workers are killed, and the next run starts new ones.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing import connection, forkserver, process, resource_tracker, util
from pathlib import Path
from typing import Any

from weft.errors import PoisonedGroupError, WeftError
from weft.integers import integer
from weft.words import kind

PRELOADED = ["torch", "torch.distributed", "numpy", "weft._core"]


class RankDiedError(WeftError):
    """A worker process ended without returning a result: it was killed, crashed, or called `os._exit`."""


class _RemoteTracebackError(Exception):
    """The traceback of another process as text. It is the cause (`__cause__`) of the error raised in this process."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 600.0,
    return_exceptions: bool = False,
) -> list[Any]:
    """Run `function(rank, world_size, *args)` on `world_size` new processes with a process group. Return the results by
    rank.

    The default process group (`dist.group.WORLD`) is initialised with `backend` before the call. With an NCCL backend,
    rank r uses CUDA device r modulo the number of devices. If there are fewer GPUs than ranks, ranks share GPUs.
    Results are then correct (NCCL uses sockets), but measured times mean nothing.

    Raises at most 3 seconds after the first failure, even if other ranks still run:

    - the error of the first rank that failed, with its traceback as the cause. A `PoisonedGroupError`, which only reports
      the failure of another rank, is raised only if no rank raises another error,
    - `RankDiedError` if a process ended without a result,
    - `TimeoutError` after `timeout_s` seconds, with the stack of every running rank.

    With `return_exceptions=True`, wait for all ranks, and return errors in the list. All worker processes have ended
    when this function returns or raises.
    """
    with Pool(world_size, backend=backend) as pool:
        return pool._run(_with_rank, (function, *args), world_size, timeout_s, return_exceptions)


class Pool:
    """A context manager with `world_size` worker processes, which share a process group and persist between calls.

    Workers start at the first `run`, and exit if the parent process dies. Each uses `threads` torch threads. Workers
    ignore Ctrl-C: the parent process handles it.
    """

    def __init__(self, world_size: int, *, backend: str = "gloo", threads: int = 1):
        world_size = integer("world_size", world_size, "pass the number of processes, an integer")
        threads = integer("threads", threads, "pass the number of torch threads of each process, an integer")
        if world_size < 1 or threads < 1:
            raise ValueError(f"world_size={world_size} and threads={threads} must be at least 1")
        if not isinstance(backend, str):
            raise ValueError(f"backend={backend!r} is {kind(backend)}: pass 'gloo' or 'nccl'")
        if "nccl" in backend:
            import torch  # here, because this module is imported where torch is not needed

            if not torch.cuda.device_count():
                raise ValueError(
                    f"backend={backend!r} needs GPUs, but torch sees none: pass backend='gloo' for CPU processes"
                )
        self.world_size = world_size
        self.backend = backend
        self.threads = threads
        self._workers: list[tuple[process.BaseProcess, connection.Connection]] = []
        self._world = 0  # number of process groups made; each has its own store file
        self._ranks_in_world = 0
        self._directory: tempfile.TemporaryDirectory | None = None
        self._finalizer: weakref.finalize | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        timeout_s: float = 120.0,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Run `function(group, *args)` on the first `ranks` workers (default: all). Return the results by rank.

        `group` is the default process group (`dist.group.WORLD`) of these workers. `group.rank()` and `group.size()`
        give a worker's rank and the number of ranks. Consecutive runs with the same number of ranks share the group and
        its caches. A different number needs a new group, which takes tens of milliseconds. Raises the errors of
        `run_ranks`.
        """
        return self._run(function, args, self.world_size if ranks is None else ranks, timeout_s, return_exceptions)

    def close(self) -> None:
        """Stop the workers and remove their directory. The next `run` starts new workers."""
        for _, pipe in self._workers:
            pipe.close()  # an idle worker sees the closed pipe and exits
        until = time.monotonic() + 5
        for worker, _ in self._workers:
            worker.join(max(0.0, until - time.monotonic()))
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pids(self) -> list[int]:
        """Return the process ids of the workers by rank. Start the workers if they are not running."""
        self._start()
        return [worker.pid or 0 for worker, _ in self._workers]

    def _start(self) -> None:
        if self._workers:
            return
        context = mp.get_context("forkserver")
        # Every worker imports the main module again (for example pytest), so its package is preloaded too. This has no
        # effect if the program has already started a fork server.
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        context.set_forkserver_preload([*PRELOADED, *([spec.parent] if spec and spec.parent else [])])
        _start_fork_server()
        self._directory = tempfile.TemporaryDirectory(prefix="weft-ranks-", dir=util.get_temp_dir())
        # Runs at close, when the pool is collected, and at interpreter exit, whichever is first.
        self._finalizer = weakref.finalize(self, _kill, self._workers, self._directory)
        self._ranks_in_world = 0
        # If a signal ends this process, the workers also remove multiprocessing's directory. A child process shares the
        # directory of its parent.
        remains = util.get_temp_dir() if mp.parent_process() is None else self._directory.name
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_work,
                args=(
                    theirs,
                    rank,
                    self.world_size,
                    self.backend,
                    self.threads,
                    self._directory.name,
                    remains,
                    dict(os.environ),
                ),
                name=f"weft-rank-{rank}",
                daemon=True,
            )
            worker.start()
            theirs.close()
            self._workers.append((worker, ours))

    def _run(
        self, function: Callable[..., Any], args: tuple, ranks: int, timeout_s: float, return_exceptions: bool
    ) -> list[Any]:
        if not 1 <= ranks <= self.world_size:
            raise ValueError(f"ranks={ranks} must be between 1 and the pool's world_size={self.world_size}")
        call = pickle.dumps((function, args))
        self._start()
        told = ranks
        if ranks != self._ranks_in_world:
            # Notify workers that leave the group too, because NCCL waits for all of them.
            told = max(ranks, self._ranks_in_world)
            self._world, self._ranks_in_world = self._world + 1, ranks
        job = pickle.dumps((self._world, ranks, sys.path, call))  # `call` is unpickled after sys.path is set
        results: list[Any] = [None] * ranks
        try:
            for _, pipe in self._workers[:told]:
                with contextlib.suppress(OSError):  # the worker has died: reading from it below reports that
                    pipe.send_bytes(job)
            failed = self._collect(results, timeout_s, grace_s=timeout_s if return_exceptions else 3.0)
        except BaseException:
            if self._finalizer is not None:
                self._finalizer()
            raise
        if failed:
            if self._finalizer is not None:
                self._finalizer()
            if not return_exceptions:
                raise next((error for error in failed if not isinstance(error, PoisonedGroupError)), failed[0])
        return results

    def _collect(self, results: list[Any], timeout_s: float, grace_s: float) -> list[BaseException]:
        """Wait for all ranks, and store their return values or errors in `results`. Return the errors in order of
        arrival.

        timeout_s: the time limit for all ranks.
        grace_s: the time limit for the remaining ranks after the first error. These ranks may wait in a collective for
            the failed rank.
        """
        until = time.monotonic() + timeout_s
        failed: list[BaseException] = []
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[: len(results)])}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = waiting.pop(pipe)
                try:
                    ok, value, text = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    worker = self._workers[rank][0]
                    worker.join(5)
                    ok, value, text = (
                        False,
                        RankDiedError(
                            f"rank {rank} ended with exit code {worker.exitcode}, without a result: its output may tell why"
                        ),
                        "",
                    )
                results[rank] = value
                if not ok:
                    if text:
                        value.__cause__ = _RemoteTracebackError(f"\n--- rank {rank} ---\n{text}")
                    failed.append(value)
                    until = min(until, time.monotonic() + grace_s)
            if not ready:
                stacks = self._stacks(sorted(waiting.values()))
                error = TimeoutError(
                    f"ranks {sorted(waiting.values())} were still running after {timeout_s} s: raise timeout_s, or see below "
                    f"what they wait for\n{stacks}"
                )
                if not failed:
                    raise error
                for rank in waiting.values():
                    results[rank] = error
                break
        return failed

    def _stacks(self, ranks: list[int]) -> str:
        """Return the Python stacks of `ranks` as one text."""
        assert self._directory is not None
        for rank in ranks:
            pid = self._workers[rank][0].pid
            if pid is not None and self._workers[rank][0].is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        texts = []
        for rank in ranks:
            path = Path(self._directory.name, f"stack-{rank}")
            texts.append(f"--- rank {rank} ---\n{path.read_text() if path.exists() else '(not started)'}")
        return "\n".join(texts)


def share_gpus(rank: int) -> None:
    """Let this rank use a GPU that another rank of this machine uses too. `run_ranks` and `Pool` call this function if
    there are fewer GPUs than ranks.

    Under torchrun, before `init_process_group`:

        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank % torch.cuda.device_count())
        weft.launch.share_gpus(rank)

    Results are correct, even with NCCL and torch's symmetric memory, but measured times mean nothing. The function sets
    `NCCL_HOSTID`, `NCCL_SOCKET_IFNAME` and `TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES`. NCCL refuses two ranks of one
    host on one GPU, so each rank reports a host of its own.
    """
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


def _kill(workers: list[tuple[process.BaseProcess, connection.Connection]], directory: Any) -> None:
    for worker, pipe in workers:
        worker.kill()
        pipe.close()
    for worker, _ in workers:
        worker.join()
    workers.clear()
    directory.cleanup()


def _start_fork_server() -> None:
    """Start the fork server if it is not running. Ctrl-C is blocked during the server's imports, where it would print a
    traceback.
    """
    resource_tracker.ensure_running()  # first, because it unblocks Ctrl-C when it has started its process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _with_rank(group: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(group.rank(), group.size(), *args)


def _work(
    pipe: connection.Connection,
    rank: int,
    world_size: int,
    backend: str,
    threads: int,
    directory: str,
    remains: str,
    environment: dict[str, str],
) -> None:
    """Run a worker process: join the process group, then run the calls from `pipe` until it closes.

    directory: the pool's temporary directory. It contains stack traces, and the files by which ranks find each other.
    remains: the directory to delete if the parent process dies.
    environment: the parent's environment variables.
    """
    # Objects that the fork server imported are never freed. Collecting garbage among them takes 0.2 s and copies their
    # memory.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        stack = os.open(Path(directory, f"stack-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    except FileNotFoundError:  # the pool was closed before this worker had begun
        return
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    parent = mp.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with, args=(parent.sentinel, remains), daemon=True).start()
    os.environ.clear()  # the fork server has the environment of its start
    os.environ.update(environment)
    os.environ["LOCAL_RANK"] = str(rank)
    # All ranks are on this machine. Loopback always works, but a host name may not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if "nccl" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if world_size > torch.cuda.device_count():
            share_gpus(rank)
    world = 0
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        try:
            wanted, ranks, sys.path[:], call = pickle.loads(job)
            if rank >= ranks:  # not part of this run, and nobody reads an answer
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
                continue
            function, args = pickle.loads(call)
            if wanted != world:
                if dist.is_initialized():
                    dist.destroy_process_group()
                world = wanted
                store = dist.FileStore(str(Path(directory, f"store-{world}")), ranks)
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=120)
                )
            answer = pickle.dumps((True, function(dist.group.WORLD, *args), ""))
        except Exception as error:
            answer = _portable(error)
        pipe.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def _portable(error: Exception) -> bytes:
    """Return (False, the error, its traceback as text), pickled. An error that cannot be pickled becomes a RuntimeError
    with its text.
    """
    text = traceback.format_exc()
    try:
        answer = pickle.dumps((False, error, text))
        pickle.loads(answer)
        return answer
    except Exception:
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}"), text))


def _exit_with(sentinel: int, remains: str) -> None:
    """Wait until the parent process ends. Then delete the directory `remains`, which the parent would have deleted, and exit.

    sentinel: the file descriptor that becomes readable when the parent ends.
    """
    connection.wait([sentinel])
    shutil.rmtree(remains, ignore_errors=True)
    os._exit(1)
