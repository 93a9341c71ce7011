"""The options of a benchmark run: a frozen dataclass that the command line fills and every rank receives."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from weft.bench.core.harness import Mode
from weft.bench.core.operators import operator
from weft.builders.options import name_and_value
from weft.builders.problem import option_from_text

MOST_SHRUNK = 1 << 16
"""The largest number by which a scale divides a configuration."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class BenchOptions:
    """The options of a run.

    op: the operator's name. ranks: the number of processes. variants: names; empty for the operator's default variants.
    preset: names separated by commas; None: all presets that suit the device.
    modes: the timing modes (`weft.bench.core.harness`).
    scale: for embeddings, the factor by which batch sizes and table rows are multiplied, above 0 and at most 1. None:
        the largest factors 1/2^k with which tables and outputs fit into memory (`fitting_scale`).
    read_mib: a further limit on the batch, for embeddings on CPU without `scale`. A thread reads at most this many MiB
        of table rows in a call. The default keeps a variant's time near a second.
    json: the file to which records are appended.
    seconds: the time to measure the slowest variant in each mode; None: 1 s, or 0.1 s with `quick`.
    quick: small inputs and few repetitions.
    pictures: a folder, for operators that draw pictures.
    option: the values of options that only this operator has, as pairs (name, value) (`weft.builders.Problem.sized`).
    counters: True to read the driver's counters while each variant runs (`weft.bench.core.counted`).
    """

    op: str
    preset: str | None = None
    ranks: int = 2
    device: str = "cpu"
    variants: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = ("single", "queued")
    scale: float | None = None
    dtype: str = "fp32"
    json: Path | None = None
    quick: bool = False
    seconds: float | None = None
    pictures: Path | None = None
    option: tuple[tuple[str, Any], ...] = ()
    counters: bool = False
    read_mib: int = 512

    def __post_init__(self) -> None:
        op = operator(self.op)
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks} must be at least 1")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} must be 'cpu' or 'cuda'")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.dtype == "fp8" and not op.fp8:
            others = "use all_gather_matmul or scaled_matmul_reduce_scatter"
            raise ValueError(f"dtype='fp8' is not supported by {self.op}, which has no scaled GEMMs: {others}")
        known = op.modes(self.device)
        if not self.modes or set(self.modes) - set(known):
            raise ValueError(
                f"modes={self.modes}: {self.op} on {self.device} supports only {', '.join(known)}: use one of these"
            )
        if self.seconds is not None and not 0 < self.seconds <= 3600:
            raise ValueError(
                f"seconds={self.seconds} must be above 0 and at most 3600: it is the time to measure the slowest variant in a mode"
            )
        for field, why in op.refuses.items():
            if (value := getattr(self, field)) is not False and value not in (None, ()):
                raise ValueError(f"{field}={value}: {self.op} {why}")
        if self.counters and self.device != "cuda":
            raise ValueError(
                f"counters with device={self.device!r}: only GPUs have these counters, so do not pass --counters"
            )
        if self.scale is not None and not 1 / MOST_SHRUNK <= self.scale <= 1:
            raise ValueError(
                f"scale={self.scale} must be at least 1/{MOST_SHRUNK} and at most 1: it shrinks the configuration"
            )
        if self.preset is not None and not self.presets:
            raise ValueError(f"preset={self.preset!r} names no preset: pass a name, or omit it for all presets")
        op.check_options(self)

    @property
    def presets(self) -> tuple[str, ...]:
        """The names in `preset`; empty for all presets that suit the device."""
        return tuple(name for part in (self.preset or "").split(",") if (name := part.strip()))

    @property
    def time_s(self) -> float:
        """The time in seconds to measure the slowest variant in each mode."""
        return self.seconds or (0.1 if self.quick else 1.0)

    @property
    def repetitions(self) -> tuple[int, int]:
        """The smallest and the largest number of times that each variant is measured."""
        return (3, 5) if self.quick else (9, 25) if self.time_s >= 0.5 else (5, 25)


def parse_option(op: str, text: str) -> tuple[str, Any]:
    """Return (name, value) of an option of operator `op`, from text such as "dst=2" (`weft.builders.options`).

    Raise `ValueError` for a missing name or an invalid value. If `op` has no options, return the value as text:
    `BenchOptions` then refuses the option.
    """
    return name_and_value(text) if "option" in operator(op).refuses else option_from_text(op, text)


def parse_scale(text: str) -> float:
    """Return the number that a text such as "1/32" or "0.03" stands for. Raise ValueError for other text."""
    try:
        return float(Fraction(text) if "/" in text else text)  # Fraction("1e999999999") would compute for hours
    except (ValueError, ArithmeticError):
        raise ValueError(f"scale {text!r} is not a number: write it as 1/32 or 0.03") from None
