"""Measurements on two or more GPUs for `weft.plan.calibrate` and self-calibration: GEMMs, copies, signals and collectives.

All ranks measure at the same time, because schedules, too, use links in both directions and load all GPUs at the same
time. A result is the time of the slowest rank. A sleep kernel delays the device until the CPU has enqueued the work, so
that the CPU's time does not count.

A kernel that is loaded while a stream waits for a peer could hang the device. So set-up loads the kernels of copies and of
GEMMs with the given shapes. Each measurement first runs once without the sleep kernel. Signals to a peer are timed as stream
operations, which need no kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from weft import _core
from weft.builders import AllGatherMatmul, candidates
from weft.errors import RefusedError
from weft.kernels.signals import FLAG
from weft.runtime.collectives import all_gather_single
from weft.runtime.cuda.move import MAX_PROGRAMS, CopyLaunch, CopyShape, prepare
from weft.runtime.cuda.schedule import CudaSchedule
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.sim.model import MatmulShape
from weft.symm import Communicator
from weft.words import by_rank

_SLEEP_CYCLES = 1_000_000
_CYCLES_PER_US = 2000  # an upper bound on the clock of current GPUs
_ROUNDS = 3
_LONG_US = 200.0
_LARGEST_OPERAND = 1 << 31


@dataclass(frozen=True)
class Effort:
    """The effort of a calibration: the duration of each measurement, and the size of its buffers."""

    buffer_bytes: int = 1 << 30
    enough_us: float = 2000.0  # measured work after one sleep
    warm_us: float = 20_000.0  # before long work is timed: a GPU that has rested runs at a higher clock


FULL, QUICK = Effort(), Effort(64 << 20, 1000.0, 8000.0)


class GpuMeasure:
    """Measurements on GPUs for `weft.plan.calibration`. All ranks must construct this object, and make the same calls in the
    same order.
    """

    def __init__(self, comm: Communicator, effort: Effort = FULL, gemms: Sequence[MatmulShape] = ()) -> None:
        """Allocate buffers and load kernels.

        gemms: the shapes of the GEMMs that will be measured.
        effort: the duration of each measurement, and the size of its buffers.

        Raises `RefusedError` on every rank if a rank lacks memory or cannot run these GEMMs.
        """
        self.comm, self.world_size, device = comm, comm.world_size, comm.device
        self.machine = torch.cuda.get_device_name(device)
        units = torch.cuda.get_device_properties(device).multi_processor_count
        self.copy_units = min(MAX_PROGRAMS, units)
        self._device, self._effort = device, effort
        # A separate generator leaves the user's random state unchanged.
        self._random = torch.Generator(device).manual_seed(0)
        self._host_us = 50.0  # CPU time of one of the calls that were timed last
        self._peer = (comm.rank + 1) % comm.world_size
        self._made: dict[MatmulShape, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        why = ""
        try:
            self._set_up_alone(gemms)
        except Exception as error:  # only this rank failed: without a message, the others would wait
            why = f"{type(error).__name__}: {error}"
        whys = comm.all_gather(why, what="setting up a calibration")
        if any(whys):
            raise RefusedError(by_rank((rank, text) for rank, text in enumerate(whys) if text))
        self._region = comm.allocate(effort.buffer_bytes, what="calibration")
        self._words = comm.allocate(64, what="signals of the calibration")
        self._meet()
        self._began = time.monotonic()

    def _set_up_alone(self, gemms: Sequence[MatmulShape]) -> None:
        prepare(self._device)
        self._local = torch.zeros(self._effort.buffer_bytes, dtype=torch.uint8, device=self._device)
        self._side = torch.cuda.Stream(self._device, priority=-1)
        for shape in gemms:
            a, b, out = self._made[shape] = self._operands(*shape)
            torch.mm(a, b, out=out)
        torch.cuda.synchronize(self._device)

    @cached_property
    def _pool(self) -> torch.Tensor:
        return torch.randn(_LARGEST_OPERAND // 4, device=self._device, generator=self._random)

    def elapsed_s(self) -> float:
        return max(self.comm.all_gather(time.monotonic() - self._began, what="time of the calibration"))

    def gemm_us(self, m: int, n: int, k: int, dtype: str) -> float:
        a, b, out = self._made.get((m, n, k, dtype)) or self._operands(m, n, k, dtype)
        return self._queued(lambda: torch.mm(a, b, out=out))

    def launch_us(self) -> float:
        one = torch.zeros(1, device=self._device)
        return self._queued(lambda: one.add_(1))

    def host_step_us(self) -> float:
        p = AllGatherMatmul.even(128 * self.world_size, 256, 256, self.world_size)
        found = next(
            c for c in candidates(p, ("shard",)) if dict(c.parameters) == {"chunks": 1, "send": "in_turn", "by": "dma"}
        )
        executor = CudaSchedule(found.build(), self.comm)
        tensors = {
            "x_shard": torch.zeros(p.rows[0], p.k),
            "w0": torch.zeros(p.k, p.n[0]),
            "y0": torch.zeros(p.m, p.n[0]),
        }
        tensors = {name: t.to(self._device, torch.bfloat16) for name, t in tensors.items()}
        times = []
        for _ in range(1 + 10 * _ROUNDS):
            self._meet()
            start = time.perf_counter()
            executor.run(tensors)
            times.append((time.perf_counter() - start) * 1e6)
        self._meet()
        steps = len(executor.context.order)
        executor.close()
        return self._slowest(sorted(times[1:])[len(times) // 2] / steps)

    def copy_us(self, count: int) -> float:
        return self._program(lambda program: program.copy(0, 0, 0, count, 1, 0, count, count, 1))

    def copy_rows_us(self, rows: int, row_bytes: int) -> float:
        return self._program(lambda program: program.copy(0, 0, 0, 2 * row_bytes, 1, 0, 2 * row_bytes, row_bytes, rows))

    def kernel_copy_us(self, count: int, put: bool) -> float:
        move = CopyLaunch(self._device, shape=CopyShape(1, count, count, count))
        here, there = self._local.data_ptr(), self._region.address(self._peer)
        return self._queued(lambda: move.launch(here, there) if put else move.launch(there, here))

    def all_gather_us(self, count: int) -> float:
        shard = max(16, count // max(1, self.world_size - 1))
        whole = self._local[: shard * self.world_size] if shard * self.world_size <= self._effort.buffer_bytes else None
        if whole is None:
            whole = torch.empty(shard * self.world_size, dtype=torch.uint8, device=self._device)
        mine = self._pool.view(torch.uint8)[:shard]
        return self._queued(lambda: all_gather_single(whole, mine, group=self.comm.group))

    def signal_us(self, remote: bool) -> float:
        turns = 64
        if not remote:
            # The driver skips work between waits without work. So put a kernel on each side, and subtract its time.
            program = _core.StreamProgram(1, 2, 2)
            program.record(0, 0)
            program.wait_event(1, 0)
            program.record(1, 1)
            program.wait_event(0, 1)
            one, other = (torch.zeros(1, device=self._device) for _ in range(2))
            streams = [torch.cuda.current_stream(self._device).cuda_stream, self._side.cuda_stream]

            def there_and_back() -> None:
                one.add_(1)
                program.run(0, 2, [0], streams)
                with torch.cuda.stream(self._side):
                    other.add_(1)
                program.run(2, 4, [0], streams)

            return max(0.0, self._queued(there_and_back) / 2 - self.launch_us())
        # Rank 0 sets a flag in its neighbour's word, and the neighbour sets a flag in rank 0's word. A round trip is two
        # signals.
        program = _core.StreamProgram(2, 1, 0)
        put, take = (False, 1, 0, FLAG), [(True, 0, 0, FLAG), (False, 0, 0, 0)]
        for _ in range(turns):
            program.signal(0, [put, *take] if self.comm.rank % 2 == 0 else [*take, put])
        partner = self.comm.rank ^ 1
        if partner >= self.world_size:
            partner = self.comm.rank
        bases = [self._words.address(self.comm.rank), self._words.address(partner)]
        stream = torch.cuda.current_stream(self._device).cuda_stream
        return self._queued(lambda: program.run(0, len(program), bases, [stream]), calls=4) / (2 * turns)

    def gemm_beside_copy_us(
        self, m: int, n: int, k: int, dtype: str, by: Literal["dma", "kernel"]
    ) -> tuple[float, float]:
        a, b, out = self._made.get((m, n, k, dtype)) or self._operands(m, n, k, dtype)
        count = 64 << 20
        if by == "dma":
            program = _core.StreamProgram(2, 1, 0)
            program.copy(0, 0, 0, count, 1, 0, count, count, 1)
            bases = [self._region.address(self._peer), self._local.data_ptr()]

            def copy() -> None:
                program.run(0, 1, bases, [self._side.cuda_stream])
        else:
            move = CopyLaunch(self._device, shape=CopyShape(1, count, count, count))

            def copy() -> None:
                move.launch(self._local.data_ptr(), self._region.address(self._peer))

        calls = 4
        alone = self.gemm_us(m, n, k, dtype)
        # Enqueue more copies than fit into the GEMMs' time, and measure the rate of the copies that end during the
        # GEMMs.
        copies = int(4 * calls * alone * 400e3 / count) + 16
        stamps = [torch.cuda.Event(enable_timing=True) for _ in range(copies + 1)]
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._meet()
        torch.cuda._sleep(20 * _SLEEP_CYCLES)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            stamps[0].record()
            for stamp in stamps[1:]:
                copy()
                stamp.record()
        begin.record()
        for _ in range(calls):
            torch.mm(a, b, out=out)
        end.record()
        torch.cuda.synchronize(self._device)
        during = begin.elapsed_time(end)
        done = [t for t in (stamps[0].elapsed_time(stamp) for stamp in stamps[1:]) if t <= during] or [
            stamps[0].elapsed_time(stamps[1])
        ]
        rate = len(done) * count / (done[-1] * 1e3)
        return self._slowest(during * 1e3 / calls), min(self.comm.all_gather(rate, what="rates beside a GEMM"))

    def close(self) -> None:
        self._region.close()
        self._words.close()

    # --- timing ---

    def _operands(self, m: int, n: int, k: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return random operands `[m, k]` and `[k, n]`, and an output `[m, n]`. The second operand is column-major, like
        `linear.weight.t()`.
        """
        a = torch.randn(m, k, device=self._device, generator=self._random).to(TORCH_DTYPE[dtype])
        b = torch.randn(n, k, device=self._device, generator=self._random).to(TORCH_DTYPE[dtype]).t()
        return a, b, torch.empty(m, n, dtype=a.dtype, device=self._device)

    def _program(self, record: Callable[[_core.StreamProgram], int]) -> float:
        """Measure a copy from this rank to its neighbour, the next rank. Return its time in microseconds.

        record: a function that records the copy into a program. In the program, base address 0 is the target, and 1 is the
            source.
        """
        program = _core.StreamProgram(2, 1, 0)
        record(program)
        bases = [self._region.address(self._peer), self._local.data_ptr()]
        stream = torch.cuda.current_stream(self._device).cuda_stream
        return self._queued(lambda: program.run(0, 1, bases, [stream]))

    def _queued(self, call: Callable[[], object], calls: int | None = None) -> float:
        call()
        us = self._once(call, 2, 1)
        calls = calls or max(3, min(50, int(self._effort.enough_us / max(us, 1.0))))
        # Warm up with at least one call, so that a collective's first call, in which ranks wait for each other, is not
        # timed.
        warm = max(1, int(self._effort.warm_us / us) if us > _LONG_US else 0)
        return sorted(self._once(call, calls, warm) for _ in range(_ROUNDS))[_ROUNDS // 2]

    def _once(self, call: Callable[[], object], calls: int, warm: int = 0) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._meet()
        # The CPU may take longer for a collective than the GPUs, so the GPUs sleep until all calls are enqueued.
        torch.cuda._sleep(_SLEEP_CYCLES + int((warm + calls) * self._host_us * _CYCLES_PER_US))
        start = time.perf_counter()
        for _ in range(warm):
            call()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        self._host_us = 1.2e6 * (time.perf_counter() - start) / (warm + calls)
        torch.cuda.synchronize(self._device)
        return self._slowest(begin.elapsed_time(end) * 1e3 / calls)

    def _meet(self) -> None:
        torch.cuda.synchronize(self._device)
        self.comm.all_gather(None, what="before a measurement")

    def _slowest(self, us: float) -> float:
        return max(self.comm.all_gather(us, what="a measured time"))
