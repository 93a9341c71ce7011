"""The baseline of operators with a GEMM: the calls that a user would write, torch.mm and the library's collective in turn."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from weft.bench.core.harness import Call
from weft.bench.ops.any_operator import COLLECTIVE, GEMM, Arm, MatmulVariants
from weft.bench.ops.gemms import BASELINE


class HandVariants(MatmulVariants):
    """Variants whose baseline is written by hand, and weft's public function. The GEMM alone and the library's collective alone run
    beside them."""

    beside: ClassVar[tuple[str, ...]] = (GEMM, COLLECTIVE)

    @abstractmethod
    def serial(self, which: int) -> torch.Tensor:
        """Collective and GEMM as a user would write them, with memory made beforehand but for the result."""

    @abstractmethod
    def alone(self) -> tuple[Call, ...]:
        """Return what runs beside the variants."""

    @abstractmethod
    def public(self, which: int, schedule: str | None) -> torch.Tensor:
        """Call weft's function on an input set."""

    def weft(self, variant: str, schedule: str | None) -> Arm:
        return lambda which: self.public(which, schedule)

    def others(self, wanted: Sequence[str]) -> tuple[dict[str, Arm], dict[str, Call], list[str]]:
        return {BASELINE: self.serial}, dict(zip(self.beside, self.alone(), strict=True)), []
