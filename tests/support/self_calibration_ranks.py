"""Self-calibration on CPU processes and on GPUs. These functions run on the ranks.

weft calibrates itself on GPUs that have no machine file. So CPU processes pretend to be GPUs of an unknown kind, and on
GPUs the machine file is hidden.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from support.measuring_ranks import again, instead, multiply
from support.on_ranks import device

from weft import symm
from weft.hw import file_of, here, load_machine, machine_of
from weft.operator import self_calibrate, this_machine
from weft.plan import calibrated, self_calibration
from weft.sim import Model, model_of

NOBODYS = "NVIDIA Nobody's 2"


class Measured:
    """Pretended measurements: derived numbers times 1 + rank / 10, so that each rank measures different numbers."""

    copy_units = 64

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        self.machine, self.world_size, self.factor = name, world_size, 1 + rank / 10
        machine = machine_of(name)
        assert machine is not None
        self.base = model_of(machine, world_size)

    def elapsed_s(self) -> float:
        return 0.0

    def copy_us(self, count: int) -> float:
        return count / self.base.copy_bytes_per_us * self.factor

    def kernel_copy_us(self, count: int, put: bool) -> float:
        return count / self.base.kernel_copy_bytes_per_us(put) * self.factor

    def gemm_us(self, m: int, n: int, k: int, dtype: str) -> float:
        return self.base.matmul_us(m, n, k, dtype) * self.factor

    def signal_us(self, remote: bool) -> float:
        return (self.base.signal_remote_us if remote else self.base.signal_local_us) * self.factor

    def host_step_us(self) -> float:
        return self.base.host_step_us * self.factor


def _forget() -> None:
    self_calibration._known.clear()
    this_machine.model_by_name.cache_clear()


def at_first_calls(group: dist.ProcessGroup) -> dict[str, Any]:
    """Call with two shapes, then in another group, as a later process would. Return the number of measurements, the
    schedules, and the known numbers.
    """
    rank, world, measured = group.rank(), group.size(), list[str]()
    name = f"{NOBODYS} of {world}"

    def measures(comm: symm.Communicator, sizes: Any) -> AbstractContextManager[Any]:
        measured.append(name)
        return nullcontext(Measured(name, comm.rank, world))

    def model(of: Any, world_size: int) -> Model | None:
        return this_machine.model_by_name(name, world_size)

    self_calibrate.MEASURES["cpu"] = measures
    again(group)
    try:
        with instead(this_machine, calibrated_model=model, device_name=lambda of: name):
            taken = [multiply(group, 22), multiply(group, 23)]
            first = len(measured)
            again(group)
            _forget()
            taken.append(multiply(group, 22))
        known = self_calibration.find(name, world)
        assert known is not None
        return {"rank": rank, "measured": [first, len(measured)], "taken": taken, "known": asdict(known)}
    finally:
        del self_calibrate.MEASURES["cpu"]
        _forget()
        again(group)


@contextmanager
def _without_file() -> Iterator[None]:
    """Hide the machine file, so that only the driver describes this machine's GPUs."""
    with instead(here, file_of=lambda name: None):
        machine_of.cache_clear()
        _forget()
        try:
            yield
        finally:
            machine_of.cache_clear()
            _forget()


def on_gpus(group: dist.ProcessGroup) -> dict[str, Any]:
    """Self-calibrate twice, the second time from saved numbers. Return the times in seconds, the numbers and the
    models.
    """
    name, world = this_machine.device_name(device()), group.size()
    with _without_file():
        derived = machine_of(name)
        assert derived is not None
        assert derived.about
        comm = symm.communicator(group, device())
        start = time.monotonic()
        this_machine.know_machine(comm, 60.0)
        took_s = time.monotonic() - start
        found = self_calibration._known.get((name, world))
        model = this_machine.machine_model(device(), world)
        applied = None if found is None else found.apply(model_of(derived, world))
        again(group)
        _forget()
        start = time.monotonic()
        this_machine.know_machine(symm.communicator(group, device()), 60.0)
        again_s = time.monotonic() - start
        later = self_calibration._known.get((name, world))
        note = calibrated(derived, world).note
    file = file_of(name)
    return {
        "took_s": took_s, "again_s": again_s, "found": found, "later": later, "note": note,
        "model": None if model is None else asdict(model), "dropped": None if applied is None else applied.dropped,
        "file": None if file is None else _of_file(file, world, 64 if found is None else found.copy_units),
    }  # fmt: skip


def _of_file(name: str, world: int, units: int) -> dict[str, float]:
    """Return the numbers of a machine file that self-calibration measures."""
    machine = load_machine(name)
    model = model_of(machine, world, kernel_copy_units=units)
    numbers = {
        "copy_engine.bandwidth": ("copy_bytes_per_us", model.copy_bytes_per_us),
        "link.stores_64_programs": ("put_bytes_per_us", model.kernel_copy_bytes_per_us(True)),
        "link.loads_64_programs": ("get_bytes_per_us", model.kernel_copy_bytes_per_us(False)),
        "signal.remote": ("signal_remote_us", model.signal_remote_us),
    }
    found = {number: value for key, (number, value) in numbers.items() if _is_measured(machine, key)}
    if _is_measured(machine, "compute.bf16_matmul_8192"):
        found["gemm"] = model.matmul_us(8192, 8192, 8192, "bf16")
    return found


def _is_measured(machine: Any, key: str) -> bool:
    return key in machine.quantities and machine[key].source == "measured"
