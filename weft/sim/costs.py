"""The cost of one step on a model: its time alone, and how much of each resource it uses.

A step first takes `latency_us` without using resources. Then it works, for `work_us` if nothing else runs. At full
speed a step uses a fraction of each resource (`weft.sim.uses`). At half speed it uses half of this fraction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from functools import singledispatch

from weft.schedule import ITEM_BYTES, OPS, Agree, Collective, Compute, Copy, Read, Send, Step
from weft.sim.collectives import Op, algorithm, least_us
from weft.sim.model import Model
from weft.sim.uses import COMPUTE, Cost, Links, Operand, Use, What, fraction, merged_cost, shared


def cost(model: Model, world: int, step: Step, operands: tuple[Operand, ...], rank: int = 0) -> Cost:
    """Return the cost of a step of `rank`.

    operands: the regions that the step accesses. For a copy or a collective: its source and destination. An exchange
        (an all-to-all with parts of different sizes) also has one operand for each part that is sent, ordered by the
        receiver's distance.
    """
    return price(step, model, Links(model.wiring.of(world), rank), operands)


_MOST_KEPT = 1 << 16


def kept_cost(model: Model, world: int, step: Step, operands: tuple[Operand, ...], rank: int = 0) -> Cost:
    """Return the result of `cost`, from a cache in the model."""
    kept, key = model.costs, (world, type(step), step.settings, operands, rank)
    found: Cost | None = kept.get(key)
    if found is None:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        found = kept[key] = cost(model, world, step, operands, rank)
    return found


@singledispatch
def price(step: Step, model: Model, links: Links, operands: tuple[Operand, ...]) -> Cost:
    """Return the cost of a step. To define the cost of another kind of step, register a function with `price.register`;
    the default is the cost of a memory-bound kernel.
    """
    return _through_memory(model, links, step, operands, len(operands) - 1)


@price.register
def _read(step: Read, model: Model, links: Links, operands: tuple[Operand, ...]) -> Cost:
    """Return the cost of reading numbers. Numbers that the CPU knows from an earlier call are not read again."""
    read_us = 0.0 if step.by == "known" else model.launch_us
    return merged_cost("compute", read_us + (model.host_read_us if step.by == "host" else 0.0), 0.0, [])


@price.register
def _agree(step: Agree, model: Model, links: Links, operands: tuple[Operand, ...]) -> Cost:
    """Return the cost of comparing the numbers of rows that peers sent with the expected numbers. If the numbers differ,
    the kernel also fills rows with NaN. This time is not included.
    """
    return merged_cost("compute", model.launch_us, 0.0, [])


@price.register
def _copy(step: Copy, model: Model, links: Links, operands: tuple[Operand, ...]) -> Cost:
    source, target = operands
    if source.at == target.at == 0:
        return _local_copy(model, source.bytes, step.by, step.accumulate)
    return _peer_copy(model, links, source, target, step.by, step.accumulate)


@price.register
def _send(step: Send, model: Model, links: Links, operands: tuple[Operand, ...]) -> Cost:
    """Return the cost of a message, which NCCL sends with a kernel: it holds compute units and uses the route's links."""
    source, target = operands
    us = source.bytes / links.bytes_per_us(source.at, target.at)
    held = Use("hold", COMPUTE, model.collective_units / model.compute_units)
    uses = [shared("hbm", at, fraction(source.bytes, us, model.hbm_bytes_per_us)) for at in (source.at, target.at)]
    uses += [held, *links.uses(source.at, target.at, source.bytes, us)]
    return merged_cost("peer", model.collective_latency_us, us, uses, sent_bytes=source.bytes)


@price.register
def _collective_step(step: Collective, model: Model, links: Links, operands: tuple[Operand, ...]) -> Cost:
    if links.topology.ranks == 1:
        return _local_copy(model, operands[0].bytes, "kernel")
    if step.op == "exchange":
        return _exchange(model, links, step.known, *operands)
    return _COLLECTIVES[step.op](model, links, *operands)


@price.register
def _compute(step: Compute, model: Model, links: Links, operands: tuple[Operand, ...]) -> Cost:
    if step.op == "addmm":
        *factors, added, out = operands
        return _copied_first(model, links, added, out, _matmul(model, links, True, *factors, out))
    if step.multiplies:
        return _matmul(model, links, step.accumulate, *operands)
    if step.op == "embedding_bag":
        return pooling_cost(model, links, *operands)
    return _through_memory(model, links, step, operands, OPS[step.op].flops_per_element)


_BLEND = 3.0
"""The exponent p in the time of matmul tiles and of pooling: (memory_us^p + compute_us^p)^(1/p). Memory traffic and
computation overlap only partly. On an H200, 128 experts of 128 rows took 2.24 ms, with a memory time of 1.9 ms and a
compute time of 2.0 ms.
"""

_BLOCK_BYTES = 64
"""The bytes of a random access to the memory of a GPU. Rows lie one after the other, so on average a row of b bytes touches
(b - g) / 64 + 1 such blocks. Here g is the greatest common divisor of b and 64."""

_SAMPLE_UNIT_US, _BAG_UNIT_US, _ELEMENT_UNIT_US = 0.08, 0.066, 5e-5
"""The times that a compute unit needs in a pooling kernel besides reading rows.

    per sample    a program takes the next sample from a counter that all programs share, and reads its table of features
    per bag       offsets, then ids, then the store
    per element   the addition of an element of a row

The first two are fitted to h100-never-slower.jsonl (84 embeddings), h200-never-slower-older.jsonl (24) and the benchmark presets
(tests/unit/test_plan_embedding.py). With 0 and 0.076, which suit the presets pgas-weak and pgas-strong in fp16, mean errors are
10.5% and 10.4%, now 9.1% and 7.9%. For a seed that was not used (12 in h200-never-slower.jsonl) they are 20% and 13%.
"""

_WARP_BYTES = 512
"""The bytes that a warp reads of a row at a time: 32 threads read 16 bytes each. If fewer bytes remain, the next power of two
counts, because threads without an element wait for the others."""


def _local_copy(model: Model, count: int, by: str, update: bool = False) -> Cost:
    us = (3 if update else 2) * count / model.hbm_bytes_per_us
    if by == "kernel":
        return merged_cost("compute", model.launch_us, us, [shared("hbm", 0, 1.0), shared("compute", 0, 1.0)])
    uses = [shared("hbm", 0, 1.0), shared("engine", 0, 1 / model.copy_engines)]
    return merged_cost("engine", model.copy_latency_us, us, uses)


def _peer_copy(model: Model, links: Links, source: Operand, target: Operand, by: str, update: bool) -> Cost:
    count, put = source.bytes, source.at == 0
    wire = min(links.bytes_per_us(source.at, target.at), model.hbm_bytes_per_us)
    if by == "kernel":
        us = max(count / wire, model.transfer_us("put" if put else "get", count))
        held = model.kernel_copy_units / model.compute_units
        latency, disturbance, uses = (
            model.launch_us + (0.0 if put else model.loaded_start_us),
            model.kernel_copy_disturbance,
            [Use("hold", COMPUTE, held)],
        )
    else:
        us = max(count / wire, model.transfer_us("copy", count) / (1.0 if put else model.copy_gets))
        if not (source.whole_rows and target.whole_rows) and source.rows > 1:
            us += source.rows * model.copy_row_us
        latency, disturbance, uses = (
            model.copy_latency_us,
            model.copy_disturbance,
            [shared("engine", 0, 1 / model.copy_engines)],
        )
    for at in (source.at, target.at, *[target.at] * update):  # an update also reads the target
        uses.append(shared("hbm", at, fraction(count, us, model.hbm_bytes_per_us)))
        if us > 0:
            uses.append(Use("disturb", ("compute", at), disturbance * count / us))
    uses += links.uses(source.at, target.at, count, us)
    return merged_cost("peer", latency + _fetching_us(links, (source,)), us, uses, sent_bytes=count)


def _fetching_us(links: Links, inputs: Iterable[Operand]) -> float:
    """Return the round-trip latency in us of reading operands from peers; 0 if all operands are local.

    The latency of stores to a peer belongs to the wait for the signal after them (`weft.sim.lower`).
    """
    return max((links.latency_us(0, o.at) + links.latency_us(o.at, 0) for o in inputs if o.at), default=0.0)


def _all_gather(model: Model, links: Links, source: Operand, target: Operand) -> Cost:
    """Return the cost of an all-gather: each rank receives all shards except its own."""
    us = model.transfer_us("all_gather", target.bytes - source.bytes)
    return _collective(model, links, "all_gather", us, 2 * target.bytes, target.bytes)


def _all_to_all(model: Model, links: Links, source: Operand, target: Operand) -> Cost:
    kept = target.rows * source.cols * ITEM_BYTES[source.dtype]
    us = model.transfer_us("all_to_all", max(source.bytes, target.bytes) - kept)
    return _collective(model, links, "all_to_all", us, source.bytes + target.bytes, source.bytes)


def _exchange(model: Model, links: Links, known: bool, source: Operand, target: Operand, *parts: Operand) -> Cost:
    """Return the cost of an exchange: an all-to-all with parts of different sizes.

    known: True if the CPU knows the sizes. False if it must first read them from the device, and so cannot launch the exchange
        ahead of time.
    parts: the part that is sent to the rank at distance 0, 1, ...; empty if all parts have equal sizes.
    """
    if not parts:
        return _all_to_all(model, links, source, target)
    own, *others = parts
    sent, received = source.bytes - own.bytes, target.bytes - own.bytes
    us = model.transfer_us("all_to_all", max(sent, received))
    uses = itertools.chain(*(links.uses(0, distance, part.bytes, us) for distance, part in enumerate(others, 1)))
    latency_us = max(links.latency_us(0, distance) for distance in range(1, 1 + len(others)))
    latency_us += 0.0 if known else model.host_read_us
    return _library_call(model, latency_us, us, source.bytes + target.bytes, uses, sent)._replace(algorithm="direct")


def _reduce_scatter(model: Model, links: Links, source: Operand, target: Operand) -> Cost:
    """Return the cost of a reduce-scatter, which also reads and writes memory to reduce."""
    sent = source.bytes - target.bytes
    us = model.transfer_us("reduce_scatter", sent)
    return _collective(model, links, "reduce_scatter", us, source.bytes + 2 * sent, source.bytes)


def _all_reduce(model: Model, links: Links, source: Operand, target: Operand) -> Cost:
    """Return the cost of an all-reduce: a reduce-scatter, then an all-gather of its result."""
    sent = 2 * (source.bytes * (links.topology.ranks - 1) // links.topology.ranks)
    us = model.all_reduce * (model.transfer_us("all_gather", sent) + model.collective_latency_us)
    us = max(0.0, us - model.collective_latency_us)
    return _collective(model, links, "all_reduce", us, 2 * source.bytes + 2 * sent, source.bytes)


def _collective(model: Model, links: Links, op: Op, us: float, memory: int, count: int) -> Cost:
    """Return the cost of a collective. Its time is the time of the fastest algorithm, but at least `us`.

    us: the time at the measured rate of NCCL or RCCL.
    memory: the bytes that the collective reads and writes.
    count: for an all-gather, the bytes of all shards; for other collectives, the bytes of one rank's input.
    """
    found = algorithm(links.topology, op, count)
    us = max(us, count * found.us_per_byte)
    of_rank = found.links[links.rank % len(found.links)]
    uses = (shared(kind, at, fraction(count * link_us, us, 1.0)) for kind, at, link_us in of_rank)
    call = _library_call(model, found.latency_us, us, memory, uses, round(found.sent * count))
    return call._replace(least_us=least_us(links.topology, op, count), algorithm=found.name)


def _library_call(
    model: Model, latency_us: float, us: float, memory: int, uses: Iterable[Use], sent_bytes: int
) -> Cost:
    """Return the cost of a call of NCCL or RCCL.

    latency_us: the latency in addition to the model's `collective_latency_us`.
    us: the time of the call after its latency, if nothing else runs.
    memory: the bytes read and written.
    uses: the links that the call uses.
    """
    own = [
        shared("hbm", 0, fraction(memory, us, model.hbm_bytes_per_us)),
        Use("hold", COMPUTE, model.collective_units / model.compute_units),
    ]
    return merged_cost("peer", model.collective_latency_us + latency_us, us, [*own, *uses], sent_bytes, joins=True)


_COLLECTIVES: dict[str, Callable[..., Cost]] = {
    "all_gather": _all_gather, "all_to_all": _all_to_all, "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}  # fmt: skip


def pooling_cost(
    model: Model, links: Links, bags: Operand, tables: Operand, out: Operand, *, found: float = 0.0
) -> Cost:
    """Return the cost of pooling: reading table rows, ids and offsets. Memory is read in whole blocks, so a row that
    begins or ends inside a block costs more.

    found: the share of row reads that the cache supplies.
    """
    count = tables.rows * bags.cols  # rows that a sample reads
    row = max(1, tables.bytes // max(1, count))  # in bytes
    beyond = _BLOCK_BYTES - math.gcd(row, _BLOCK_BYTES)
    rows = round((1 - found) * out.rows * (tables.bytes + count * beyond))
    ids = bags.bytes * (tables.rows + 1)
    traffic = rows + ids + (0 if out.at else out.bytes)
    part = min(_WARP_BYTES, 1 << (row - 1).bit_length())
    elements = tables.rows * tables.cols * (-(-row // part) * part / row)  # per sample, with one for each idle thread
    units_us = bags.rows * (_SAMPLE_UNIT_US + bags.cols * _BAG_UNIT_US) + out.rows * elements * _ELEMENT_UNIT_US
    busy_us = units_us / model.compute_units
    us = blended(traffic / model.hbm_bytes_per_us, busy_us)
    return kernel_cost(model, links, "compute", (bags, tables), out, us, busy_us, traffic)


def _matmul(model: Model, links: Links, accumulate: bool, a: Operand, b: Operand, *more: Operand) -> Cost:
    """Return the cost of a matmul. more: scales and bias, which are ignored because they are small; then the output."""
    out = more[-1]
    found = model.matmul(out.rows, out.cols, a.cols, a.dtype)
    wider = out.bytes - out.rows * out.cols * ITEM_BYTES[a.dtype]
    traffic = found.hbm_bytes + wider + (out.bytes if accumulate else 0)
    alone_us = max(found.time_us, traffic / model.hbm_bytes_per_us)
    if accumulate:
        # A unit reads the old tile after it has computed the product, and waits for the read. (On H100s, in 9 runs with
        # K of 1024 to 2048, matmul_reduce_scatter with add=gemm took 5 to 66 us longer than predicted without this
        # term. That is 0.5 to 2.7 times this term.)
        alone_us += out.bytes / model.hbm_bytes_per_us
    busy_us = found.units_busy * found.time_us
    if out.at:
        alone_us = with_late_stores(model, alone_us, out.bytes, stored_per_us(model, links, out))
    matmul = kernel_cost(model, links, "matmul", (a, b), out, alone_us, busy_us, traffic)
    return matmul._replace(fills=model.matmul_keeps * found.units_busy)


def _copied_first(model: Model, links: Links, added: Operand, out: Operand, matmul: Cost) -> Cost:
    """Return the cost of cuBLAS's addmm, which copies `added` into the output and then accumulates.

    matmul: the cost of the GEMM alone.
    """
    far = added.at != 0 or out.at != 0
    copy = _peer_copy(model, links, added, out, "dma", False) if far else _local_copy(model, added.bytes, "kernel")
    us = copy.work_us + matmul.work_us
    uses = [
        use._replace(
            amount=fraction(use.amount * one.work_us, us, 1.0), whole=fraction(use.whole * one.work_us, us, 1.0)
        )
        for one in (copy, matmul)
        for use in one.uses
    ]
    both = merged_cost("matmul", copy.latency_us + matmul.latency_us, us, uses, copy.sent_bytes + matmul.sent_bytes)
    return both._replace(fills=matmul.fills)


def with_late_stores(model: Model, us: float, count: int, rate: float) -> float:
    """Return the time of a GEMM that stores `count` bytes of its result in peers' memory, at `rate` bytes/us.

    us: the GEMM's time with a local result. It hides the stores, except for the last ones (`Model.stored_late_bytes`).
    """
    late_us = min(count, model.stored_late_bytes) / rate + model.stored_end_us
    return max(us + late_us, count / rate)


def stored_per_us(model: Model, links: Links, out: Operand) -> float:
    """Return the rate in bytes/us at which all compute units together store into `out`, a region in a peer's memory."""
    return min(model.put_bytes_per_us[-1][1], links.bytes_per_us(0, out.at))


def _through_memory(
    model: Model, links: Links, step: Step, operands: tuple[Operand, ...], flops_per_element: float
) -> Cost:
    """Return the cost of a memory-bound kernel, which reads or writes each operand once.

    flops_per_element: the floating-point operations for each element that the kernel writes.
    """
    accesses = step.accesses()
    traffic = sum((a.reads + a.writes) * o.bytes for a, o in zip(accesses, operands, strict=True))
    elements = sum(o.rows * o.cols for a, o in zip(accesses, operands, strict=True) if a.writes)
    flops = elements * flops_per_element
    us = max(traffic / model.hbm_bytes_per_us, flops / model.vector_flops_per_us)
    *inputs, out = [o for _, o in sorted(zip(accesses, operands, strict=True), key=lambda pair: pair[0].writes)]
    busy_us, far = us, [o for o in inputs if o.at and o.bytes]
    if far:
        us = max(us, sum(o.bytes for o in far) / model.get_bytes_per_us[-1][1]) + model.loaded_start_us
    return kernel_cost(model, links, "compute", tuple(inputs), out, us, busy_us, traffic)


def kernel_cost(
    model: Model, links: Links, what: What, inputs: tuple[Operand, ...], out: Operand, us: float, busy_us: float, traffic: float
) -> Cost:  # fmt: skip
    """Return the cost of a kernel. Accesses to operands in peers' memory use links, which may make the kernel slower.

    us: the kernel's time with local operands.
    busy_us: the time that the computation would take if it kept all compute units busy. The kernel uses the fraction
        `busy_us` / `us` of the compute units.
    traffic: the bytes read and written.
    """
    flows = [(o.at, 0, o.bytes) for o in inputs if o.at] + [(0, out.at, out.bytes)] * (out.at != 0)
    us = max(us, *(count / links.bytes_per_us(source, target) for source, target, count in flows), 0.0)
    uses = [
        shared("hbm", 0, fraction(traffic, us, model.hbm_bytes_per_us)),
        shared("compute", 0, fraction(busy_us, us, 1.0)),
    ]
    for source, target, count in flows:
        uses.append(shared("hbm", source or target, fraction(count, us, model.hbm_bytes_per_us)))
        uses += links.uses(source, target, count, us)
    crossing = sum(count for _, _, count in flows)
    return merged_cost(what, model.launch_us + _fetching_us(links, inputs), us, uses, sent_bytes=crossing)


def blended(memory_us: float, compute_us: float) -> float:
    """Return the time of a kernel that needs `memory_us` for its memory traffic and `compute_us` for its computation.
    Memory traffic and computation overlap only partly, so the result is between the longer time and the sum (`_BLEND`).
    """
    if not memory_us or not compute_us:
        return memory_us or compute_us
    longer = max(memory_us, compute_us)  # the powers of large times may overflow
    return longer * ((memory_us / longer) ** _BLEND + (compute_us / longer) ** _BLEND) ** (1 / _BLEND)
