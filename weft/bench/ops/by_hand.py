"""The baseline of operators with a GEMM: torch.mm and the NCCL collective, called in sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from weft.bench.core.harness import Call
from weft.bench.ops.any_operator import COLLECTIVE, GEMM, MatmulVariants, Variant
from weft.bench.ops.gemms import BASELINE


class HandVariants(MatmulVariants):
    """Variants: a baseline by hand, and weft's public function. The GEMM alone and NCCL's collective alone are also timed."""

    beside: ClassVar[tuple[str, ...]] = (GEMM, COLLECTIVE)

    @abstractmethod
    def serial(self, which: int) -> torch.Tensor:
        """Call the collective and the GEMM in sequence. All memory except the result is preallocated."""

    @abstractmethod
    def alone(self) -> tuple[Call, ...]:
        """Return the calls that are timed but are not variants."""

    @abstractmethod
    def public(self, which: int, schedule: str | None) -> torch.Tensor:
        """Call weft's function on an input set."""

    def weft(self, variant: str, schedule: str | None) -> Variant:
        return lambda which: self.public(which, schedule)

    def others(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        return {BASELINE: self.serial}, dict(zip(self.beside, self.alone(), strict=True)), []
