"""What a benchmark run is asked to do: one frozen value that the command line fills and every rank receives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from weft.bench.arms import why_not
from weft.bench.harness import MODES, Mode
from weft.bench.presets import find_presets

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class BenchOptions:
    """What to run. `preset=None`: all. `scale=None`: the largest 1/2^k that fits (GPU: memory; CPU: memory and a second
    or so per variant). `quick`: small inputs and few repetitions, to try things out."""

    preset: str | None = None
    ranks: int = 2
    device: str = "cpu"
    variants: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = MODES
    scale: float | None = None
    dtype: str = "fp32"
    json: Path | None = None
    quick: bool = False

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
