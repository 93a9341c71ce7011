"""Code that tests of benchmarks share. Functions with a `group` argument run on the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.bench.core.harness import Ranks
from weft.bench.core.operators import operator
from weft.bench.core.options import BenchOptions
from weft.bench.core.run import ceilings_for

_NAMES = "op config variant mode device ranks dtype p20_ms p50_ms p80_ms skew_ms baseline speedup roofline_ms roofline_ratio error "
_NAMES += "versions commit date host_us first_call_ms source variables harness"
FIELDS = set(_NAMES.split())
"""The fields of every record."""


def cpu_ranks(group: dist.ProcessGroup) -> Ranks:
    return Ranks(group, group, torch.device("cpu"))


def quick(op: str, preset: str | None = None, **given: Any) -> BenchOptions:
    """Return the options of a short run on two CPU processes."""
    return BenchOptions(op, **({"preset": preset, "quick": True, "seconds": 0.01} | given))


def records_of(group: dist.ProcessGroup, options: BenchOptions, preset: Any = None) -> list[dict[str, Any]]:
    """Measure one configuration, by default the preset in the options, and return its records. No variant may be wrong."""
    ranks, op = cpu_ranks(group), operator(options.op)
    (preset,) = [preset] if preset is not None else op.presets(options)
    found = op.measure(preset, ranks, options, ceilings_for(options, ranks), lambda what, share: None)
    assert not found.wrong
    return found.records  # type: ignore[no-any-return]
