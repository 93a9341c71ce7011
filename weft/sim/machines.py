"""The simulator's models of machines, built from machine files (`weft.hw`), and `NULL`, a model on which nothing takes
time.

The simulator reads these keys of a machine file. For keys in the last rows, see the fields of `weft.sim.model.Model`
with similar names, such as `signal_local_us` for signal.local.

    compute.multiprocessors                 number of compute units
    compute.tile_rows, .tile_cols           size of the largest tile of a matmul
    compute.tile_half, .tile_ramp           constants of the formula for matmuls (`weft.sim.model`)
    compute.tile_step (if known)            tiles of the library's matmuls have widths of any multiple of this number
    compute.library_tile_half (if known)    the same as .tile_half, for the library's matmuls
    compute.fp8_tile_ramp (if known)        the same as .tile_ramp, for fp8
    compute.launch                          gap between two kernels of a lane
    compute.fp32_vector                     rate of elementwise kernels in fp32
    compute.DTYPE_matmul_8192               rate of a matmul of 8192 x 8192 x 8192, for each dtype that is to be simulated; or
    compute.DTYPE_matmul_best               rate of a matmul of the best size: whole tiles in whole waves, and a long k
    compute.matmul_start (if known)         time of a GEMM besides its launch, in which it neither computes nor waits for memory
    compute.first_bag (if known)            time from the start of a pooling kernel until its first rows arrive from memory
    compute.matmul_keeps (if known)         share of a cuBLAS GEMM's units that later kernels do not get until it ends
    compute.sustained                       time of a long matmul in sustained work, divided by its time in a short measurement
    compute.grouped_matmul                  share of the matmul rate that a kernel for the segments of many experts reaches
    compute.library_grouped_matmul          share of the matmul rate that torch's grouped kernel reaches
    memory.library_grouped_matmul           share of memory.copy_bandwidth that torch's grouped kernel reaches
    memory.matmul (if known)                share of memory.copy_bandwidth that a memory-bound matmul reaches
    memory.grouped_loads (if known)         rate at which all units together load operands of a grouped GEMM from the cache
    memory.operand_loads (if known)         rate at which all units together load operands of matmuls from the cache
    memory.copy_bandwidth                   bandwidth of a copy within the memory: bytes read plus bytes written
    memory.l2                               size of the L2 cache
    memory.l2_copies (if known)             number of parts of the L2 that each keep a copy of data that all units read
    memory.capacity (if known)              schedules that need more are refused
    link.port_usable                        bandwidth of a GPU's port of a switch, in one direction (topologies with a switch)
    link.pair_usable                        bandwidth of each link between two GPUs, in one direction (other topologies)
    link.stores_N_programs, .loads_N_programs   rate of a kernel of N programs that stores to a peer, or loads from a peer
    copy_engine.latency, .bandwidth         latency and bandwidth of a copy to a peer by a copy engine
    copy_engine.count, .row                 number of copy engines, and additional time for each row of a two-dimensional copy
    copy_engine.gets (if known)             rate of a copy from a peer, divided by the rate of a copy to a peer
    kernel_copy.units                       programs of a copy kernel
    collective.all_gather, .all_gather_latency  rate (bytes that a rank receives) and latency of an all-gather of NCCL or RCCL
    collective.all_to_all (if known)        rate of an all-to-all, if it differs from the rate of an all-gather
    collective.reduce_scatter (if known)    rate of a reduce-scatter, if it differs from the rate of an all-gather
    collective.units                        compute units that a collective holds
    collective.small                        rate of a second algorithm of NCCL or RCCL for small collectives, if there is one
    collective.large_latency                additional start time of the algorithm for large collectives
    collective.all_to_all_large_latency, .reduce_scatter_large_latency (if known)  the same for these collectives
    contention.copy_engine_slowdown         slowdown of a large matmul while engines copy at contention.copy_engine_bandwidth
    contention.kernel_copy_slowdown         the same, while .kernel_copy_units programs copy at .kernel_copy_bandwidth
    signal.tile (if known)                  additional time of a kernel for each signal of a tile
    graph.run, .collective                  additional time of runs with several lanes, and of collectives, in captured graphs
    signal.local, .remote, .kernel       see `Model`
    host.step, .call, .read, .late, .dynamic (if known)  see `Model`
    compute.tile_part, link.stored_late, .stored_end, .loaded_start (if known)  see `Model`
    collective.all_reduce, lanes.run, graph.remote, .signal (if known)  see `Model`
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from weft.hw import Machine
from weft.hw.derived import GIVEN
from weft.hw.topology import Wiring, known_topologies, load_topology, unlimited
from weft.integers import integer
from weft.schedule import ITEM_BYTES
from weft.sim.model import Model

_LARGE = 8192


def model_of(machine: Machine, world_size: int, *, kernel_copy_units: int | None = None) -> Model:
    """Return the model of `world_size` GPUs of this machine.

    kernel_copy_units: the number of programs of a copy kernel. Default: the machine file's `kernel_copy.units`.

    Raise `KeyError` with all keys that the machine file lacks, and `ValueError` with a key whose unit is wrong.
    """
    world_size = integer("world_size", world_size, "pass the number of GPUs, an integer")
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    if not machine.topology:
        raise KeyError(
            f'{machine.name}: add topology = "switch" to its machine file, above the first number. The topology is how its GPUs '
            f"are linked: one of {', '.join(known_topologies())}, or the path of a TOML file"
        )
    if gaps := _gaps(machine):
        raise KeyError(
            f"{machine.name}: add {', '.join(gaps)} to its machine file: the simulator needs them (see weft/sim/machines.py). "
            f'With derived_from = "h200" below its name, a file needs only {", ".join(GIVEN)}; the rest is derived'
        )
    number, per_us, us, units = machine.number, machine.per_us, machine.us, machine.count

    def known(read: Callable[[str], float], key: str, otherwise: float = 0.0) -> float:
        return read(key) if key in machine.quantities else otherwise

    model = Model(
        name=machine.name,
        world_size=world_size,
        compute_units=units("compute.multiprocessors"),
        matmul_flops_per_us={},
        tile=(units("compute.tile_rows"), units("compute.tile_cols")),
        tile_half=number("compute.tile_half"),
        tile_ramp=number("compute.tile_ramp"),
        tile_step=int(known(number, "compute.tile_step")),
        library_tile_half=known(number, "compute.library_tile_half") or None,
        fp8_tile_ramp=known(number, "compute.fp8_tile_ramp") or None,
        tile_part_us=us("compute.tile_part") if "compute.tile_part" in machine.quantities else None,
        vector_flops_per_us=per_us("compute.fp32_vector"),
        first_bag_us=known(us, "compute.first_bag"),
        matmul_start_us=known(us, "compute.matmul_start"),
        matmul_keeps=known(number, "compute.matmul_keeps"),
        sustained=number("compute.sustained"),
        grouped_efficiency=number("compute.grouped_matmul"),
        library_grouped=(number("compute.library_grouped_matmul"), number("memory.library_grouped_matmul")),
        launch_us=us("compute.launch"),
        memory_bytes=known(machine.bytes, "memory.capacity", math.inf),
        hbm_bytes_per_us=per_us("memory.copy_bandwidth"),
        matmul_memory=known(number, "memory.matmul", 1.0),
        l2_bytes=machine.bytes("memory.l2"),
        l2_copies=known(number, "memory.l2_copies", 1.0),
        wiring=load_topology(machine.topology, machine),
        stored_late_bytes=known(machine.bytes, "link.stored_late"),
        stored_end_us=known(us, "link.stored_end"),
        loaded_start_us=known(us, "link.loaded_start"),
        copy_latency_us=us("copy_engine.latency"),
        copy_bytes_per_us=per_us("copy_engine.bandwidth"),
        copy_gets=known(number, "copy_engine.gets", 1.0),
        copy_engines=units("copy_engine.count"),
        copy_row_us=us("copy_engine.row"),
        kernel_copy_units=kernel_copy_units or units("kernel_copy.units"),
        put_bytes_per_us=_curve(machine, "stores"),
        get_bytes_per_us=_curve(machine, "loads"),
        collective_latency_us=us("collective.all_gather_latency"),
        collective_bytes_per_us=per_us("collective.all_gather"),
        collective_units=units("collective.units"),
        small_collective_bytes_per_us=known(per_us, "collective.small") or None,
        large_collective_us=known(us, "collective.large_latency"),
        own_collectives={
            how: (
                known(per_us, f"collective.{how}", per_us("collective.all_gather")),
                known(us, f"collective.{how}_large_latency", known(us, "collective.large_latency")),
            )
            for how in ("all_to_all", "reduce_scatter")
            if {f"collective.{how}", f"collective.{how}_large_latency"} & machine.quantities.keys()
        },
        all_reduce=known(number, "collective.all_reduce", 1.0),
        copy_disturbance=disturbance(
            number("contention.copy_engine_slowdown"), 0.0, per_us("contention.copy_engine_bandwidth")
        ),
        kernel_copy_disturbance=0.0,  # see below
        signal_local_us=us("signal.local"),
        signal_remote_us=us("signal.remote"),
        signal_kernel_us=us("signal.kernel"),
        tile_signal_us=known(us, "signal.tile"),
        grouped_loads_bytes_per_us=known(per_us, "memory.grouped_loads") or None,
        unit_loads_bytes_per_us=known(per_us, "memory.operand_loads") or None,
        host_step_us=us("host.step"),
        host_read_us=us("host.read"),
        host_call_us=us("host.call"),
        host_late_us=us("host.late"),
        host_dynamic_us=known(us, "host.dynamic"),
        lanes_run_us=known(us, "lanes.run"),
        graph_run_us=us("graph.run"),
        graph_collective_us=us("graph.collective"),
        graph_remote_us=known(us, "graph.remote"),
        graph_signal_us=known(us, "graph.signal"),
    )
    measured = replace(model, kernel_copy_units=units("contention.kernel_copy_units"))
    rate = per_us("contention.kernel_copy_bandwidth")
    lost = disturbance(number("contention.kernel_copy_slowdown"), share_held(measured, rate), rate)
    model = replace(model, kernel_copy_disturbance=lost)
    best = {d: per_us(key) for d in ITEM_BYTES if (key := f"compute.{d}_matmul_best") in machine.quantities}
    large = {d: per_us(key) for d in ITEM_BYTES if (key := f"compute.{d}_matmul_8192") in machine.quantities}
    return replace(model, matmul_flops_per_us=best | {d: _peak(model, d, rate) for d, rate in large.items()})


_NEEDED = (
    "compute.multiprocessors", "compute.tile_rows", "compute.tile_cols", "compute.tile_half", "compute.tile_ramp",
    "compute.fp32_vector", "compute.sustained", "compute.grouped_matmul", "compute.library_grouped_matmul", "compute.launch",
    "memory.copy_bandwidth", "memory.l2", "memory.library_grouped_matmul", "copy_engine.latency", "copy_engine.bandwidth",
    "copy_engine.count", "copy_engine.row", "kernel_copy.units", "collective.all_gather", "collective.all_gather_latency",
    "collective.units", "contention.copy_engine_slowdown", "contention.copy_engine_bandwidth", "contention.kernel_copy_slowdown",
    "contention.kernel_copy_bandwidth", "contention.kernel_copy_units", "signal.local", "signal.remote", "signal.kernel",
    "host.step", "host.read", "host.call", "host.late", "graph.run", "graph.collective",
)  # fmt: skip


def _gaps(machine: Machine) -> list[str]:
    """Return the keys that a model needs and `machine` lacks. If one of several keys is enough, list only one of them."""
    gaps = [key for key in _NEEDED if key not in machine.quantities]
    for what in ("stores", "loads"):
        if not any(_programs(what, key) for key in machine):
            gaps.append(f"link.{what}_8_programs (or of another number)")
    if not any(re.fullmatch(r"compute\.\w+_matmul_(8192|best)", key) for key in machine):
        gaps.append("compute.bf16_matmul_8192 (or of another dtype)")
    return gaps


@lru_cache(maxsize=256)  # the same few machines, again and again
def _peak(model: Model, dtype: str, flops_per_us: float) -> float:
    """Return the compute rate of full tiles, in FLOP/us, with which the model's formula gives the measured time of an 8192 x
    8192 x 8192 matmul.

    flops_per_us: the measured rate of this matmul.
    """
    wanted_us, peak = 2.0 * _LARGE**3 / flops_per_us, flops_per_us
    for _ in range(20):  # fixed-point iteration; the time is nearly inversely proportional to the rate
        at_peak = replace(model, matmul_flops_per_us={dtype: peak})
        peak *= at_peak.matmul_us(_LARGE, _LARGE, _LARGE, dtype) / wanted_us
    return peak


def _curve(machine: Machine, what: str) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(found[1]), machine.per_us(key)) for key in machine if (found := _programs(what, key))))


def _programs(what: str, key: str) -> re.Match[str] | None:
    return re.fullmatch(rf"link\.{what}_(\d+)_programs", key)


def disturbance(slowdown: float, share_held: float, bytes_per_us: float) -> float:
    """Return the fraction of a GEMM's compute rate that each byte/us of concurrent copies costs. Bytes are the sum of
    reads and writes. The compute units that copy kernels hold are a separate cost.

    slowdown: the measured slowdown of a GEMM while each GPU read and wrote `bytes_per_us`.
    share_held: the fraction of units that copy kernels held.
    """
    return max(0.0, 1 - 1 / slowdown - share_held) / (2 * bytes_per_us)


def share_held(model: Model, bytes_per_us: float) -> float:
    """Return the mean fraction of compute units that copy kernels held while they wrote `bytes_per_us` during GEMMs.

    If copy kernels write faster without GEMMs, they waited for units during a part of the measurement. They held no
    units while they waited.
    """
    alone = model.kernel_copy_bytes_per_us(put=True)
    if not alone > 0:
        raise ValueError(
            f"{model.name}: the rate at which copy kernels write is {alone:g} bytes/us, not above 0. Set "
            "contention.kernel_copy_units and link.stores_N_programs above 0 in its machine file"
        )
    copying = min(1.0, bytes_per_us / alone)
    return copying * model.kernel_copy_units / model.compute_units


NULL = Model(
    name="null", world_size=0, compute_units=1, matmul_flops_per_us=dict.fromkeys(ITEM_BYTES, math.inf), tile=(128, 128),
    tile_half=0.0, tile_ramp=0.0, vector_flops_per_us=math.inf, launch_us=0.0, hbm_bytes_per_us=math.inf,
    l2_bytes=math.inf, wiring=Wiring(unlimited), copy_latency_us=0.0,
    copy_bytes_per_us=math.inf, copy_engines=1, copy_row_us=0.0, kernel_copy_units=1, put_bytes_per_us=((1, math.inf),),
    get_bytes_per_us=((1, math.inf),), collective_latency_us=0.0, collective_bytes_per_us=math.inf, collective_units=1,
    copy_disturbance=0.0, kernel_copy_disturbance=0.0, signal_local_us=0.0, signal_remote_us=0.0,
    signal_kernel_us=0.0, host_step_us=0.0,
)  # fmt: skip
"""A model on which nothing takes time, for any number of ranks."""
