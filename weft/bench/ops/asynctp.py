"""The base of benchmarks that compare weft with torch's AsyncTP (`torch.ops.symm_mem`).

It adds AsyncTP as a variant. It also times the copies between peers alone, because the ideal time depends on them.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from weft.bench.core import remarks
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call
from weft.bench.core.options import BenchOptions
from weft.bench.core.tables import Record, geomean, times
from weft.bench.ops.any_operator import COLLECTIVE, COMMUNICATION, GEMM, AnyOperator, Variant
from weft.bench.ops.by_hand import HandVariants
from weft.bench.ops.gemms import BASELINE, WEFT
from weft.symm import SymmetricBuffer, communicator

ASYNCTP = "asynctp"


def enable_symmetric_memory(group_name: Any) -> None:
    """Enable torch's operators on symmetric memory for a process group. Newer versions of torch, from 2.13 on, do not
    need this.
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group_name)


class TorchVariants(HandVariants):
    """The variants of an operator for which torch has an AsyncTP operator. The copies to peers are also timed alone."""

    baselines: ClassVar[tuple[str, ...]] = (BASELINE, ASYNCTP)
    compared: ClassVar = {WEFT: baselines}
    beside = (GEMM, COMMUNICATION, COLLECTIVE)

    @abstractmethod
    def torchs(self) -> Variant:
        """Return torch's AsyncTP operator as a variant."""

    def others(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        variants, beside, notes = super().others(wanted)
        if self.ranks.device.type == "cuda" and ASYNCTP in (wanted or (ASYNCTP,)):
            enable_symmetric_memory(self.ranks.group.group_name)
            variants[ASYNCTP] = self.torchs()
        if self.ranks.world_size > 1 and not communicator(self.ranks.group, self.ranks.device).all_mapped:
            del beside[COMMUNICATION]
            notes = [
                *notes,
                f"{COMMUNICATION} and the ideal time not measured: peers on other hosts cannot be copied to",
            ]
        return variants, beside, notes

    def roofline_ms(self, ceilings: Sequence[Ceilings]) -> float:
        """Return a lower bound in ms: the longest of the memory time, the GEMM time and the link time at peak rates.

        In memory, operands are read once and results are written once. The link carries the bytes that leave a rank.
        """
        memory, wire, flops = self.moved()
        return max(c.ms(memory, wire, flops) for c in ceilings)

    @abstractmethod
    def moved(self) -> tuple[float, float, float]:
        """Return (bytes of operands and result, bytes that leave a rank, FLOPs) of a call."""

    def places(self, rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Allocate symmetric memory. Return, for each peer, a [rows, columns] block in the peer's memory that only this
        rank writes. The peers are in the order rank + 1, rank + 2, ..., modulo the world size.
        """
        rank, world = self.ranks.rank, self.ranks.world_size
        self._box = SymmetricBuffer((world, rows, columns), dtype, group=self.ranks.group, device=self.ranks.device)
        return [self._box.peer((rank + i) % world)[rank] for i in range(1, world)]

    def copy_to_peers(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Run the copies (source, target) concurrently: on GPUs by copy engines, each on its own stream."""
        if self.ranks.device.type != "cuda":
            for source, target in copies:
                target.copy_(source)
            return
        here = torch.cuda.current_stream()
        for stream, (source, target) in zip(self._streams, copies, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                target.copy_(source)
            here.wait_stream(stream)

    @cached_property
    def _streams(self) -> list[torch.cuda.Stream]:
        return [torch.cuda.Stream(self.ranks.device) for _ in range(self.ranks.world_size - 1)]


class TorchOperator(AnyOperator):
    """The benchmark of an operator that torch's AsyncTP has too."""

    def check_options(self, options: BenchOptions) -> None:
        if ASYNCTP in options.variants and options.device != "cuda":
            raise ValueError(f"variant {ASYNCTP!r} runs only on GPUs: use device='cuda', or leave the variant out")
        super().check_options(options)

    def summary_of_peers(self, mine: Sequence[Record]) -> list[str]:
        over = geomean([r["speedup_over"][ASYNCTP] for r in mine if ASYNCTP in r["speedup_over"]])
        return [f"Relative to {ASYNCTP} the mean is {times(over)}"] if over else []

    def remarks(self, rows: Sequence[Record]) -> list[str]:
        peers = self.remarks_of_asynctp(rows) if any(r["variant"] == ASYNCTP for r in rows) else []
        return [*peers, *remarks.of_nccl(rows)]

    def remarks_of_asynctp(self, rows: Sequence[Record]) -> list[str]:
        return ["asynctp ran without NVLink multicast. This makes no difference: torch uses none for this operator."]
