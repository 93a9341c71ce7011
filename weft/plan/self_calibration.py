"""Self-calibration: measurements of up to two seconds, for GPUs with neither a machine file nor a calibration.

`weft.hw.derived` computes each number from the properties of the GPU. A measured number is used only if it is between
half and twice the computed number. Other numbers are dropped and reported, because on a busy machine a measurement may
be many times too slow. `weft plan calibrate` drops nothing. `weft.operator.self_calibrate` runs the measurements when a
group first chooses a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from weft.plan import saved, store
from weft.plan.calibration import Measure
from weft.plan.machine import versions
from weft.sim import Model
from weft.sim.model import MatmulShape

WHAT = "self-calibration"
_DTYPE = "bf16"
BUDGET_S = 2.0
_FAR = 2.0
_COPY_US, _GEMM_US = 3000.0, 2000.0  # the maximum time of a copy and of a GEMM, by derived numbers
_COPIES = tuple(1 << i for i in range(26, 19, -1))  # 64 MiB to 1 MiB
_CUBES = (8192, 4096, 2048, 1024)
_SMALLER = 4  # the second GEMM is smaller by this factor in each dimension
_AGAIN = "the first call of the next group measures again"


class ProbeSizes(NamedTuple):
    """The sizes to measure: the bytes of copies, and the sizes of GEMMs."""

    copy_bytes: int
    gemms: tuple[MatmulShape, ...]


class Applied(NamedTuple):
    model: Model
    used: tuple[str, ...]
    """The names of the measured numbers that the model uses."""
    dropped: tuple[str, ...]
    """A sentence for each number for which the model keeps the derived value."""


class _Number(NamedTuple):
    name: str
    unit: str
    measured: float | None
    derived: float
    into: Callable[[Model], Model]
    """A function that inserts the measured number into a model, and returns the new model."""


@dataclass(frozen=True)
class SelfCalibration:
    """The measured numbers. A field is None if there was no time to measure it."""

    machine: str
    world_size: int
    date: str
    versions: Mapping[str, str]
    copy_units: int
    copy_bytes_per_us: float | None = None
    put_bytes_per_us: float | None = None
    get_bytes_per_us: float | None = None
    gemms: tuple[tuple[int, int, int, str, float | None], ...] = ()  # m, n, k, dtype, us
    signal_remote_us: float | None = None
    signal_local_us: float | None = None
    host_step_us: float | None = None

    def apply(self, base: Model) -> Applied:
        """Return `base`, a model of derived numbers, with the measured numbers that are close to the derived numbers.

        The result also lists the used and the dropped numbers.
        """
        model, used, dropped = base, list[str](), list[str]()
        for number in self._numbers(base):
            text = f"{number.name} stays at the derived {number.derived:.3g} {number.unit}"
            if number.measured is None:
                dropped.append(f"{text}: there was no time to measure it")
            elif not number.derived / _FAR <= number.measured <= number.derived * _FAR:
                dropped.append(
                    f"{text}: the measured {number.measured:.3g} {number.unit} differs by more than {_FAR:g}x"
                )
            else:
                model = number.into(model)
                used.append(number.name)
        return Applied(model, tuple(used), tuple(dropped))

    def _numbers(self, base: Model) -> Iterator[_Number]:
        wiring = base.wiring.at_least(self.copy_bytes_per_us or 0.0)
        into = _setting(copy_bytes_per_us=self.copy_bytes_per_us, wiring=wiring)
        yield _bandwidth("copies by engine", self.copy_bytes_per_us, base.copy_bytes_per_us, into)
        kernel = replace(base, kernel_copy_units=self.copy_units)
        for name, field, put in (
            ("stores by kernel", "put_bytes_per_us", True),
            ("loads by kernel", "get_bytes_per_us", False),
        ):
            rate, derived = getattr(self, field), kernel.kernel_copy_bytes_per_us(put)
            curve = tuple((units, of_units * (rate or 0.0) / derived) for units, of_units in getattr(base, field))
            yield _bandwidth(name, rate, derived, _setting(**{field: curve}))
        for m, n, k, dtype, us in self.gemms:
            shape = m, n, k, dtype
            yield _Number(f"the GEMM {m} x {n} x {k}", "us", us, base.matmul_us(*shape), _measuring(shape, us))
        for name, field in (
            ("a signal to a peer", "signal_remote_us"),
            ("a signal between streams", "signal_local_us"),
            ("the launch of a step", "host_step_us"),
        ):
            us = getattr(self, field)
            yield _Number(name, "us", us, getattr(base, field), _setting(**{field: us}))


def _bandwidth(name: str, rate: float | None, derived: float, into: Callable[[Model], Model]) -> _Number:
    """Return the measured and the derived bandwidth as a `_Number` in GB/s.

    rate, derived: the measured and the derived rate in bytes/us.
    into: a function that inserts the measured number into a model.
    """
    return _Number(name, "GB/s", None if rate is None else rate * 1e-3, derived * 1e-3, into)


def _setting(**fields: Any) -> Callable[[Model], Model]:
    return lambda model: replace(model, **fields)


def _measuring(shape: MatmulShape, us: float | None) -> Callable[[Model], Model]:
    return lambda model: model.with_measured({**model.measured_us, shape: us or 0.0})


def sizes_for(base: Model) -> ProbeSizes:
    """Return the sizes to measure. On the model `base`, the copies take up to 3 ms, and the GEMMs up to 2 ms."""
    rate = min(base.copy_bytes_per_us, *(rates[-1][1] for rates in (base.put_bytes_per_us, base.get_bytes_per_us)))
    count = next((count for count in _COPIES if count <= _COPY_US * rate), _COPIES[-1])
    cube = next((c for c in _CUBES if base.matmul_us(c, c, c, _DTYPE) <= _GEMM_US), _CUBES[-1])
    return ProbeSizes(count, tuple((side, side, side, _DTYPE) for side in (cube, cube // _SMALLER)))


def measure(measure: Measure, sizes: ProbeSizes, budget_s: float = BUDGET_S) -> SelfCalibration:
    """Measure the numbers of a `SelfCalibration`, the most important first. All ranks must make this call.

    budget_s: the time in seconds after which no measurement is started.
    """
    count = sizes.copy_bytes
    gemms = {shape: partial(measure.gemm_us, *shape) for shape in sizes.gemms}
    asked: dict[Any, Callable[[], float]] = {
        "copy_bytes_per_us": lambda: count / measure.copy_us(count),
        "put_bytes_per_us": lambda: count / measure.kernel_copy_us(count, True),
        "get_bytes_per_us": lambda: count / measure.kernel_copy_us(count, False),
        **gemms,
        "signal_remote_us": lambda: measure.signal_us(True),
        "signal_local_us": lambda: measure.signal_us(False),
        "host_step_us": measure.host_step_us,
    }
    found: dict[Any, float] = {}
    for what, ask in asked.items():
        if measure.elapsed_s() >= budget_s:  # `elapsed_s` is equal on all ranks, so all ranks stop together
            break
        found[what] = ask()
    times = tuple((*shape, found.pop(shape, None)) for shape in sizes.gemms)
    return SelfCalibration(
        measure.machine, measure.world_size, store.today(), versions(), measure.copy_units, gemms=times, **found
    )


_known: dict[tuple[str, int], SelfCalibration] = {}
"""{(machine, number of ranks): the numbers that this process has measured or received from the first rank}"""


def adopt(found: SelfCalibration) -> None:
    """Use these numbers for all later plans of this process."""
    _known[found.machine, found.world_size] = found


def save(found: SelfCalibration) -> None:
    """Save these numbers for other processes, if the cache folder is writable. Call this function on one rank only."""
    store.keep(store.path_of(WHAT, found.machine, found.world_size), asdict(found))


def find(machine: str, world_size: int) -> SelfCalibration | None:
    """Return the numbers that this or another process has measured with `world_size` ranks; None if there are none.

    Raise `ValueError` if the numbers were measured with other versions, and `UnreadableError` if the file is broken or
    belongs to another machine.
    """
    here = _known.get((machine, world_size))
    return here or saved.load(SelfCalibration, WHAT, machine, world_size, _HOLDS, _AGAIN)


_RATE, _TIME = saved.none_or(store.is_positive), saved.none_or(saved.is_time_or_0)
_HOLDS: dict[str, saved.Check] = {
    "machine": saved.is_text,
    "world_size": saved.is_whole,
    "date": saved.is_text,
    "versions": saved.are_versions,
    "copy_units": saved.is_whole,
    "copy_bytes_per_us": _RATE,
    "put_bytes_per_us": _RATE,
    "get_bytes_per_us": _RATE,
    "gemms": saved.rows_of(saved.is_whole, saved.is_whole, saved.is_whole, saved.one_of((_DTYPE,)), _TIME),
    "signal_remote_us": _TIME,
    "signal_local_us": _TIME,
    "host_step_us": _TIME,
}
"""{field of a saved self-calibration: function that returns True for a valid JSON value}"""
