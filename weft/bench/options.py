"""What a benchmark run is asked to do: one frozen value that the command line fills and every rank receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch

from weft import env
from weft.bench.arms import why_not
from weft.bench.harness import MODES, Mode
from weft.bench.presets import find_presets

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class BenchOptions:
    """What to run. `preset=None`: all. `scale=None`: the largest 1/2^k that fits (GPU: memory; CPU: memory and a second
    or so per variant: a call may read `read_mib` MiB of rows with each thread). `quick`: small inputs and few
    repetitions, to try things out."""

    preset: str | None = None
    ranks: int = 2
    device: str = "cpu"
    variants: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = MODES
    scale: float | None = None
    dtype: str = "fp32"
    json: Path | None = None
    quick: bool = False
    read_mib: int = 512

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks} must be at least 1")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} must be 'cpu' or 'cuda'")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if not self.modes or set(self.modes) - set(MODES):
            raise ValueError(f"modes={self.modes} must be of {', '.join(MODES)}")
        if self.scale is not None and not 0 < self.scale <= 1:
            raise ValueError(f"scale={self.scale} must be above 0 and at most 1: it shrinks batch and tables")
        find_presets(self.preset)
        for name in self.variants:
            reason = why_not(name, torch.device(self.device))
            if reason is not None:
                raise ValueError(f"variant {name!r} cannot run here: {reason}")

    @classmethod
    def from_text(
        cls,
        *,
        preset: str | None,
        ranks: int | None,
        device: str | None,
        variants: str | None,
        modes: Sequence[str],
        scale: str | None,
        dtype: str,
        json: Path | None,
        quick: bool,
    ) -> BenchOptions:
        """Options as typed: commas between `variants`, `scale` as 1/32 or 0.03; None, or no mode, means the default.

        Default device: cuda where there is a GPU. Default ranks: every GPU, or 2 on CPU; torchrun's own number there.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if env.under_torchrun():
            if ranks is not None:
                raise ValueError(f"ranks={ranks} under torchrun, which has chosen the number of ranks: leave it out")
            ranks = env.world_size()
        elif ranks is None:
            ranks = max(1, torch.cuda.device_count()) if device == "cuda" else 2
        return cls(
            preset=preset,
            ranks=ranks,
            device=device,
            variants=tuple(name.strip() for name in variants.split(",") if name.strip()) if variants else (),
            modes=tuple(mode for mode in MODES if mode in modes or not modes),
            scale=None if scale is None else parse_scale(scale),
            dtype=dtype,
            json=json,
            quick=quick,
        )


def parse_scale(text: str) -> float:
    """ "1/32" or "0.03" as a number. Raises ValueError that says how to write it."""
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"scale {text!r} is no number: write it as 1/32 or 0.03") from None
