"""The choice of a schedule for a group whose ranks are on several hosts.

A rank cannot address the memory of a peer on another host. So only schedules that send data by collectives, or on CPU
by messages, run there. The candidates are the schedules in `Problem.between_hosts`. From the measured rates of the
links, weft predicts which candidates may be clearly faster than the serial schedule (`worth_timing`). The first call
times these candidates. If none of them is clearly faster than serial, calls run unfused. Other sizes of the same
problem use this choice too. The candidates are timed again only for a size that differs from all timed sizes by more than a
factor of two.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from weft import caller, env, plan
from weft.builders import Candidate, NotApplicableError, Problem, named
from weft.builders.registry import cannot_do
from weft.operator import measure
from weft.operator.know_links import know_links
from weft.runtime.executors import Tensors
from weft.runtime.links import network_of
from weft.runtime.own_nccl import uses_nccl
from weft.runtime.rail import ranks_per_host
from weft.runtime.rails import MOST_BYTES, largest_collective_bytes
from weft.runtime.schedule_memory import needs_far
from weft.schedule import ITEM_BYTES, Collective, Schedule, Send, value
from weft.schedule.steps import of_kind
from weft.sim.between_hosts import HostNetwork
from weft.symm import Communicator

_CLEARLY, _CLEARLY_US = 0.15, 300.0  # smallest gain over serial (fraction, us), as on one host
_DOUBT = 1.5  # factor on predicted gains: predictions are up to 40% off on a busy machine
_ALIKE = 2  # sizes within this many size buckets share a choice
_taken: weakref.WeakKeyDictionary[Communicator, dict[Hashable, dict[int, str]]] = weakref.WeakKeyDictionary()
"""{problem family: {size bucket: name of the schedule that was the fastest when measured}}. "" stands for serial."""


def choose_between_hosts(
    p: Problem, comm: Communicator, tensors: Tensors, pinned: str | None, *, deadline_s: float | None,
    serial: Callable[[], object] | None, built: Callable[[Candidate], Schedule],
) -> str:  # fmt: skip
    """Return the name of the schedule for a group on several hosts, or "" if calls run unfused. All ranks must make
    this call, and get the same name.

    A pinned schedule that needs another host's memory is replaced by the unfused implementation, with a warning.

    serial: a function that runs the operator unfused, to be timed for comparison. None: an executor runs the serial
        schedule.
    built: a function that builds and verifies a candidate's schedule.
    """
    if pinned == "serial":
        return ""
    if pinned is not None and plan.names_schedule(pinned):
        try:
            fault = _fault(built(named(p, pinned)), comm)
        except NotApplicableError as error:
            raise cannot_do(pinned, p, error) from error
        if fault and not env.quiet():
            caller.warn_once(
                f"schedule={pinned!r}, {p.title}: serial runs instead, because the ranks of the group are on several hosts: {fault}"
            )
        return "" if fault else pinned
    if not p.has_work:
        return ""
    family, size = p.measured_family
    known, here = _taken.setdefault(comm, {}).setdefault(family, {}), plan.octave_of(size)
    nearest = min(known, key=lambda one: abs(one - here), default=None)
    if nearest is None or abs(nearest - here) > _ALIKE:
        known[here] = _fastest(p, comm, tensors, deadline_s, serial, built)
        return known[here]
    return known[nearest]


def _fastest(
    p: Problem, comm: Communicator, tensors: Tensors, deadline_s: float | None, serial: Callable[[], object] | None,
    built: Callable[[Candidate], Schedule],
) -> str:  # fmt: skip
    usable: dict[str, Any] = {}
    rails = len(set(comm.hosts)) if comm.device.type == "cpu" and ranks_per_host(comm.hosts) else 0
    for name in p.between_hosts(rails):
        with contextlib.suppress(NotApplicableError):
            schedule = built(named(p, name))
            if not _fault(schedule, comm):
                usable[name] = schedule
    if not usable:
        return ""
    know_links(comm, deadline_s)  # CPU ranks already know them
    serial_schedule = built(named(p, "serial"))
    if (network := network_of(comm)) is not None:
        usable = {name: one for name, one in usable.items() if worth_timing(one, serial_schedule, network)}
    if not usable:
        return ""
    schedules = {"serial": serial_schedule, **usable}
    times = measure.measured(p, schedules, comm, tensors, deadline_s, serial, "single", 2)
    best = min(usable, key=lambda name: times[name])
    return best if times["serial"] - times[best] > needed_us(times["serial"]) else ""


def needed_us(serial_us: float) -> float:
    """Return the margin in microseconds by which a schedule must beat the serial schedule to be chosen.

    serial_us: the time of the serial schedule.
    """
    return max(_CLEARLY * serial_us, _CLEARLY_US)


def worth_timing(schedule: Schedule, serial: Schedule, network: HostNetwork) -> bool:
    """True if `schedule` can be clearly faster than `serial`, by the measured rates of the links (`network`).

    The prediction includes only collectives and messages. It assumes the best case: the schedule's GEMMs hide all of
    its transfers except the shortest, while serial hides none. If serial's collectives are small, weft sends their data
    with the messages by which ranks synchronise (`weft.runtime.rails`). A call of the schedule then takes one round trip
    between hosts more than a call of serial, so this time is added to the schedule's time.
    """
    has_rails = network.library == "gloo" and ranks_per_host(network.hosts) > 0
    rides = has_rails and largest_collective_bytes(serial) <= MOST_BYTES
    serial_us = sum(_collectives_us(serial, network, rides))
    transfers_us = [*_collectives_us(schedule, network, False), *_sends_us(schedule, network)]
    exposed_us = min(transfers_us, default=0.0) + rides * network.round_trip_us
    return _DOUBT * (serial_us - exposed_us) > needed_us(serial_us)


def _collectives_us(schedule: Schedule, network: HostNetwork, rides: bool) -> list[float]:
    """Return the predicted time of each collective of rank 0 in microseconds.

    network: the measured rates between hosts.
    rides: True if the messages by which ranks synchronise also carry the data of the collectives (`weft.runtime.rails`).
    """
    item = {buffer.name: ITEM_BYTES[buffer.dtype] for buffer in schedule.buffers}
    steps = [step for lane in schedule.of_rank(0) for step in of_kind(lane.steps, Collective)]
    wholes = [step.dst if step.op == "all_gather" else step.src for step in steps]
    return [
        network.collective_us(step.op, value(whole.rows) * value(whole.cols) * item[whole.buffer], rides)
        for step, whole in zip(steps, wholes, strict=True)
    ]


def _sends_us(schedule: Schedule, network: HostNetwork) -> list[float]:
    """Return the predicted time in microseconds of each message from rank 0 to another host. All ranks of a host are
    assumed to send at the same time, and so to share its network.
    """
    item = {buffer.name: ITEM_BYTES[buffer.dtype] for buffer in schedule.buffers}
    sends = [step for lane in schedule.of_rank(0) for step in of_kind(lane.steps, Send)]
    sizes = [
        value(one.src.rows) * value(one.src.cols) * item[one.src.buffer]
        for one in sends
        if network.hosts[value(one.dst.at)] != network.hosts[0]
    ]
    return [network.per_host * size / network.bytes_per_us + network.round_trip_us / 2 for size in sizes]


def _fault(schedule: Schedule, comm: Communicator) -> str:
    """Return an error text if `schedule` cannot run on ranks of several hosts, else "".

    A step cannot run if it needs the memory of a rank on another host. The text names the first such step. On GPUs, also
    return a text if the group does not use NCCL.
    """
    on_gpus = comm.device.type != "cpu"
    if on_gpus and not uses_nccl(comm):
        return "on GPUs, schedules between hosts need a group that uses NCCL"
    faults = (needs_far(schedule, rank, comm.hosts, on_gpus) for rank in range(comm.world_size))
    return next(filter(None, faults), "")
