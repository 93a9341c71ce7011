"""Power and memory traffic of each variant, from counters of the GPU's driver, for `weft bench OP --counters`.

A counter is read while one variant is called repeatedly for about a second. The value is a mean over these calls, so it
does not show the power of a phase within a call. The counter of memory traffic does not separate reads from writes.

To check this counter, the same run measures a copy, a read and a write of 1 GiB. For each of the three, `counted_known`
is the counted bytes divided by the actual bytes. Records contain the driver's numbers, not corrected by this ratio.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import torch

from weft.bench.core.harness import Call, Ranks
from weft.bench.core.tables import Record
from weft.hw.counters import LONGEST_UPDATE_S, Counters, Rates, open_counters
from weft.hw.nvml import facts_of
from weft.words import counted

_WARM_S, _WINDOW_S, _SPARE_S = 0.1, 0.4, 0.1
_ATTEMPTS = 3
_KNOWN_BYTES = 1 << 30


def count(
    calls: Mapping[str, Call], ranks: Ranks, input_sets: int, ms: Callable[[str], float | None]
) -> dict[str, Record]:
    """Call each of `calls` repeatedly, and return {its name: record fields} from the driver's counters. Values are
    means over ranks. All ranks must make this call.

    input_sets: the number of input sets, which consecutive calls take in turn.
    ms: a function from a call's name to its time in ms, or None to skip the call.

    Fields per call: call_ms, watts (mean power), joules, memory_bytes, sent_bytes, received_bytes. Further fields:
    idle_watts and `counted_known` (see the module). A field is None if the driver does not provide the counter, or if
    the counter could not be read in time; field `missing` then gives the reason.
    """
    shared, found = _known_loads(ranks), dict[str, Record]()
    with open_counters(_uuid(ranks.device)) as counters:
        for name, call in calls.items():
            if (call_ms := ms(name)) is not None:
                found[name] = _fields(*_rates(call, counters, ranks, input_sets, call_ms / 1e3), ranks) | shared
    return found


def _uuid(device: torch.device) -> str:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


@lru_cache(maxsize=1)  # once per process
def _known_loads(ranks: Ranks) -> Record:
    """Measure an idle GPU, and a copy, a read and a write of known size. Return two record fields: idle_watts, the mean power
    of the idle GPU; and counted_known, the counted bytes divided by the actual bytes, for "copy", "read" and "write". All ranks
    must make this call.
    """
    with open_counters(_uuid(ranks.device)) as counters:
        ranks.meet()
        idle = _mean(ranks, counters.rates(_WINDOW_S).watts)
        return {"idle_watts": idle, "counted_known": _counted_known(counters, ranks)}


def _counted_known(counters: Counters, ranks: Ranks) -> dict[str, float | None]:
    a = torch.ones(_KNOWN_BYTES // 4, device=ranks.device)
    b = torch.empty_like(a)
    loads: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (partial(b.copy_, a), 2 * _KNOWN_BYTES), "read": (a.sum, _KNOWN_BYTES), "write": (b.zero_, _KNOWN_BYTES),
    }  # fmt: skip
    found: dict[str, float | None] = {}
    for name, (load, nbytes) in loads.items():
        call = _without_number(load)
        call(0)
        ranks.synchronize()
        begin = time.perf_counter()
        for which in range(10):
            call(which)
        ranks.synchronize()
        fields = _fields(*_rates(call, counters, ranks, 1, (time.perf_counter() - begin) / 10), ranks)
        memory_bytes = fields["memory_bytes"]
        found[name] = None if memory_bytes is None else memory_bytes / nbytes
    return found


def _without_number(load: Callable[[], Any]) -> Call:
    return lambda which: load()


def _rates(call: Call, counters: Counters, ranks: Ranks, input_sets: int, seconds: float) -> tuple[Rates | None, float]:
    """Make calls one after the other, and read the GPU driver's counters meanwhile. Return (the counters' rates, seconds per
    call). All ranks must make this call.

    On every rank, the calls must take longer than reading the counters. If they are too short in `_ATTEMPTS` attempts,
    the rates are None.
    """
    lasting = _WARM_S + _WINDOW_S + 2 * LONGEST_UPDATE_S + _SPARE_S
    calls = max(3, math.ceil(lasting / ranks.most(seconds)))

    def read() -> tuple[Rates, float]:
        time.sleep(_WARM_S)
        return counters.rates(_WINDOW_S), time.perf_counter()

    for attempt in range(_ATTEMPTS):
        calls *= 2 if attempt else 1
        ranks.meet()
        ranks.start_together()
        with ThreadPoolExecutor(1) as thread:
            begin, reading = time.perf_counter(), thread.submit(read)
            for which in range(calls):
                call(which % input_sets)
            ranks.synchronize()
            end = time.perf_counter()
            rates, read_at = reading.result()
        if not ranks.most(float(read_at > end)):
            return rates, (end - begin) / calls
    return None, (end - begin) / calls


def _fields(rates: Rates | None, seconds: float, ranks: Ranks) -> Record:
    missing: Record = {}
    if rates is None:
        missing["missing"] = f"the calls ended before the counters were read, in {counted(_ATTEMPTS, 'attempt')}"
        rates = Rates(0.0, None, None, None, None)
    facts = facts_of(torch.cuda.get_device_name(ranks.device))
    peak = facts.memory_bytes_per_s if facts is not None else 0.0
    return {
        "call_ms": 1e3 * ranks.most(seconds),
        "watts": _mean(ranks, rates.watts),
        "joules": _mean(ranks, rates.watts, seconds),
        "memory_bytes": _mean(ranks, rates.memory if peak else None, peak * seconds),
        "sent_bytes": _mean(ranks, rates.sent, seconds),
        "received_bytes": _mean(ranks, rates.received, seconds),
        **missing,
    }


def _mean(ranks: Ranks, value: float | None, factor: float = 1.0) -> float | None:
    """Return the mean of `value * factor` over ranks. Return None if the value of any rank is None."""
    each = [of[0] for of in ranks.gather([math.nan if value is None else value * factor])]
    mean = sum(each) / len(each)
    return None if math.isnan(mean) else mean
