"""The base of benchmarks whose baseline is hand-written: torch.mm and an NCCL collective, one after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from weft.bench.core.harness import Call
from weft.bench.ops.any_operator import COLLECTIVE, GEMM, MatmulVariants, Variant
from weft.bench.ops.gemms import BASELINE


class HandVariants(MatmulVariants):
    """The hand-written baseline, and weft's public function. The GEMM and NCCL's collective are also timed alone."""

    beside: ClassVar[tuple[str, ...]] = (GEMM, COLLECTIVE)

    @abstractmethod
    def serial(self, which: int) -> torch.Tensor:
        """Run the collective and the GEMM one after the other. All memory except the result is preallocated."""

    @abstractmethod
    def alone(self) -> tuple[Call, ...]:
        """Return the calls named in the attribute `beside`, such as the GEMM alone. They are timed, but they are not variants
        of the operator.
        """

    @abstractmethod
    def public(self, which: int, schedule: str | None) -> torch.Tensor:
        """Call weft's public function on input set `which`. schedule: the schedule to pin, or None."""

    def weft(self, variant: str, schedule: str | None) -> Variant:
        return lambda which: self.public(which, schedule)

    def others(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        return {BASELINE: self.serial}, dict(zip(self.beside, self.alone(), strict=True)), []
