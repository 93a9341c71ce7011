"""A closed-form model of FiCCO's schedules: formulas with the machine's numbers, without simulation or thresholds.

A rank sends the pieces of its shard one after the other, so piece s has arrived on all peers after s + 1 copies:

    arrived(s) = (s + 1) copy + signal        copy = latency + max(time of the copy engine, time of the busiest link)
    end(0) = the time of the own shard's GEMM if the schedule begins with it (`start=hetero`), else 0
    end(s + 1) = max(end(s), arrived(s)) + step(s)
    time = the later of the last end and the last arrival

`end(s)` is the time at which s steps have ended. `step(s)` is the time of the step's GEMMs by the wave model
(`Model.matmul`), plus the time of its gathers and scatters. Until the last piece has arrived, steps take `slowdown`
times as long, because copies use the same resources. All numbers are from the machine file; none is fitted to schedules
or GEMMs.

`slowdown` is the only effect of copies on GEMMs in the formulas. The formulas leave out the signals that free buffers
between calls. On eight MI300X, the formulas' times differ from the simulator's by up to 7%. The ratios of two schedules'
times differ by less. docs/studies/ficco.md compares the choices.

Source of schedules and losses: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV and V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from weft.builders import AllGatherMatmul
from weft.schedule import ITEM_BYTES
from weft.sim import Model
from weft.sim.collectives import algorithms


@dataclass(frozen=True)
class _Shape:
    """A schedule of FiCCO: 1D or 2D, hetero or uniform, fused or unfused. `weft.builders.ficco` defines these terms."""

    dim: str
    start: str
    gemms: str

    @property
    def name(self) -> str:
        return f"ficco_{self.dim}[start={self.start},gemms={self.gemms},steps=0,by=dma]"


_EIGHT = tuple(
    _Shape(dim, start, gemms)
    for dim, start, gemms in product(("1d", "2d"), ("uniform", "hetero"), ("fused", "unfused"))
)


def closed_form_pick(problem: AllGatherMatmul, model: Model) -> str:
    """Return the name of the FiCCO schedule that is fastest by the formulas.

    Raise `ValueError` under the conditions of `closed_form_us`.
    """
    times = closed_form_us(problem, model)
    return min(times, key=lambda name: times[name])


def closed_form_us(problem: AllGatherMatmul, model: Model) -> dict[str, float]:
    """Return {name: time in us} of FiCCO's eight schedules, with W steps for W ranks and copies by copy engine.

    Raise `ValueError` if ranks have different numbers of rows, or if W does not divide the shards' rows and K.
    """
    world, rows = problem.world_size, problem.m // problem.world_size
    if len(set(problem.rows)) > 1 or world < 2:
        raise ValueError(
            f"{problem.text}: the closed form needs at least 2 ranks with equal numbers of rows: plan with the simulator"
        )
    if rows % world or problem.k % world:
        raise ValueError(
            f"{rows} rows of a shard and K={problem.k} must be divisible by {world} ranks: pad, or plan with the simulator"
        )
    return {shape.name: _time_us(shape, problem, model) for shape in _EIGHT}


def _time_us(shape: _Shape, p: AllGatherMatmul, model: Model) -> float:
    world, shard, item = p.world_size, p.m // p.world_size, ITEM_BYTES[p.dtype]
    by_rows, hetero, fused = shape.dim == "1d", shape.start == "hetero", shape.gemms == "fused"
    rows, k = (shard // world, p.k) if by_rows else (shard, p.k // world)
    copy_us, slowdown = _copy_us(rows * k * item, 0 if by_rows else rows, world, model)
    sources = world - hetero  # the number of chunks that a step's fused GEMM multiplies
    end_us = _Clock(world * copy_us, slowdown)
    if hetero:
        end_us.work(_gemms_us(model, shard, p.n, p.k, p.dtype, update=False))
    for s in range(world):
        update = not by_rows and s > 0
        if not hetero and not fused:
            end_us.work(_gemms_us(model, rows, p.n, k, p.dtype, update))
        end_us.wait((s + 1) * copy_us + model.signal_remote_us)
        if not fused:
            end_us.work((world - 1) * _gemms_us(model, rows, p.n, k, p.dtype, update))
            continue
        gathered_us = 0.0 if hetero else _moves_us(model, 1, [rows * k * item])
        scattered_us = _moves_us(model, sources, [rows * n * item for n in p.n]) if by_rows else 0.0
        end_us.work(gathered_us + _gemms_us(model, sources * rows, p.n, k, p.dtype, update) + scattered_us)
    if fused and hetero and not by_rows:
        end_us.work(_moves_us(model, world - 1, [shard * n * item for n in p.n]))
    return max(end_us.now, end_us.busy_until)


class _Clock:
    """The time on a rank's compute lane. Until all copies have ended, at `busy_until`, work takes `slowdown` times as
    long.
    """

    def __init__(self, busy_until: float, slowdown: float) -> None:
        self.now, self.busy_until, self._slowdown = 0.0, busy_until, slowdown

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def work(self, us: float) -> None:
        done_us = max(0.0, self.busy_until - self.now) / self._slowdown
        self.now += us * self._slowdown if us <= done_us else us + done_us * (self._slowdown - 1)


def _copy_us(count: int, rows: int, world: int, model: Model) -> tuple[float, float]:
    """Return (time in us of a copy of `count` bytes to all peers at the same time, slowdown of concurrent GEMMs).

    rows: the number of rows of a two-dimensional copy, each of which takes additional time; 0 for a contiguous copy.
    """
    (direct,) = (one for one in algorithms(model.wiring.of(world), "all_gather") if one.name == "direct")
    us = max(model.transfer_us("copy", count), world * count * direct.us_per_byte) + rows * model.copy_row_us
    us += model.copy_latency_us
    lost = min(0.9, 2 * model.copy_disturbance * (world - 1) * count / us)
    return us, 1 / (1 - lost)


def _gemms_us(model: Model, m: int, widths: Sequence[int], k: int, dtype: str, update: bool) -> float:
    """Return the total time in us of a GEMM [m, k] @ [k, width] for each of `widths`, with launches.

    update: True if the GEMMs accumulate into their output.
    """
    us = 0.0
    for n in widths:
        out_us = m * n * ITEM_BYTES[dtype] / model.hbm_bytes_per_us
        found = model.matmul(m, n, k, dtype)
        us += max(found.time_us, found.hbm_bytes / model.hbm_bytes_per_us + update * out_us)
        us += model.launch_us + update * out_us
    return us


def _moves_us(model: Model, parts: int, counts: Sequence[int]) -> float:
    """Return the total time in us of copy kernels within a GPU, one after the other.

    parts: the number of parts that each kernel copies.
    counts: for each kernel, the bytes of a part.
    """
    return sum(model.launch_us + 2 * parts * count / model.hbm_bytes_per_us for count in counts)
