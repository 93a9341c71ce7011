"""The numbers of rows to and from each rank and expert: tables on the device, and their copy on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


class OnCpu(NamedTuple):
    """The numbers of rows of an exchange as Python numbers: sent to each rank, received from each rank, and for each local
    expert.
    """

    sent: list[int]
    came: list[int]
    of_experts: list[int]


class Sizes:
    """The numbers of rows of an exchange on the device, and their copy on the CPU.

    splits: the number of rows that this rank sends to each expert, [ranks * experts].
    received: the number of rows from each rank for each local expert, [ranks, experts].
    """

    def __init__(self, splits: torch.Tensor, received: torch.Tensor, numbers: _Numbers | None = None) -> None:
        self.splits, self.received = splits, received
        self.numbers = numbers or _Numbers()

    @classmethod
    def of_read(cls, splits: torch.Tensor, received: torch.Tensor, counts: Sequence[int], rank: int) -> Sizes:
        """Return the sizes of `rank`, from numbers that the CPU has already read from the device.

        counts: the splits of all ranks, one rank after the other.
        """
        return cls(splits, received, _Numbers(counts=counts, rank=rank))

    @property
    def is_fetched(self) -> bool:
        """True if the numbers are on the CPU, or on their way to the CPU. Then `fetch` does nothing."""
        return self.numbers.copy is not None or self.numbers.counts is not None

    def fetch(self) -> None:
        """Enqueue a copy of `splits` and `received` to the CPU on the current stream. Repeated calls do nothing."""
        if self.is_fetched:
            return
        both, copied = torch.cat((self.splits, self.received.flatten())), None
        if both.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "the CPU reads sizes here, which a captured CUDA graph cannot do: pass max_rows (all_to_all_matmul) or "
                    "rows (matmul_all_to_all), use a schedule other than 'serial', and capture without gradients"
                )
            copied = torch.cuda.Event()
        self.numbers.copy = both.to("cpu", non_blocking=True)
        if copied is not None:
            copied.record()
            self.numbers.copied = copied

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return the cached result of an earlier call with this name on the current stream of the GPU, otherwise
        `make()`. `Sizes` of the same tables share the results.
        """
        device = self.received.device
        key = name, torch._C._cuda_getCurrentStream(device.index) if device.type == "cuda" else None
        found = self.numbers.made.get(key)
        if found is None:
            found = self.numbers.made[key] = make()
        return cast(T, found)

    @property
    def host(self) -> OnCpu:
        """The row counts as Python numbers. Reading this property calls `fetch`, and waits for the copy."""
        numbers = self.numbers
        if numbers.host is None:
            if numbers.counts is not None:  # sums of Python numbers take less time than NumPy's for usual tables
                numbers.host = _on_cpu(numbers.counts, numbers.rank, self.received.shape[0])
            else:
                splits, received = self.tables
                numbers.host = OnCpu(splits.sum(1).tolist(), received.sum(1).tolist(), received.sum(0).tolist())
        return numbers.host

    @property
    def tables(self) -> np.ndarray[Any, Any]:
        """`splits` and `received` on the CPU, [2, ranks, experts]. Reading this property calls `fetch`, and waits for the copy."""
        self.fetch()
        numbers, (world, experts) = self.numbers, self.received.shape
        if numbers.counts is not None:
            of_ranks = np.array(numbers.counts).reshape(world, world, experts)
            return np.stack((of_ranks[numbers.rank], of_ranks[:, numbers.rank]))
        if numbers.copied is not None:
            numbers.copied.synchronize()
        assert numbers.copy is not None
        tables: np.ndarray[Any, Any] = numbers.copy.view(2, world, experts).numpy()
        return tables


def _on_cpu(counts: Sequence[int], rank: int, world: int) -> OnCpu:
    """Return the row counts of `rank`. counts: the splits of all ranks, one rank after the other."""
    of_rank = len(counts) // world
    experts, mine = of_rank // world, counts[rank * of_rank : (rank + 1) * of_rank]
    received = [counts[begin : begin + experts] for begin in range(rank * experts, len(counts), of_rank)]
    sent = [sum(mine[begin : begin + experts]) for begin in range(0, of_rank, experts)]
    return OnCpu(sent, [sum(row) for row in received], [sum(column) for column in zip(*received, strict=True)])


@dataclass(slots=True)
class _Numbers:
    """`splits` and `received` on the CPU. Several `Sizes` of the same tables share this object.

    copy, copied: both tables in one tensor, and the event after which the tensor is valid.
    counts, rank: the splits of all ranks, and the number of this rank. They replace `copy` if the CPU has already read the
        splits.
    host: the result of `Sizes.host`, once it is computed. made: the results of `Sizes.once`.
    """

    copy: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None
    counts: Sequence[int] | None = None
    rank: int = 0
    host: OnCpu | None = None
    made: dict[Hashable, Any] = field(default_factory=dict)


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""For each tensor `received` of a dispatch: its version counter, the tensor of splits with its version
counter, and the CPU's copy of these two tensors.
"""


def remember(sizes: Sizes) -> None:
    """Keep the copy of `splits` and `received` (the numbers of rows of an exchange) on the CPU. The combine after a dispatch,
    and backward, then need not wait for another copy from the device (`sizes_of`).
    """
    splits, received = sizes.splits, sizes.received
    if not (splits.is_inference() or received.is_inference()):
        _known[received] = received._version, weakref.ref(splits), splits._version, sizes.numbers


def sizes_of(splits: torch.Tensor, received: torch.Tensor) -> Sizes:
    """Return the `Sizes` of these tables. If the CPU has a copy (`remember`), and neither table has changed since, use this
    copy. Never reuse it while a graph is being captured.

    Version counters miss changes by collectives and by NumPy, so tensors on the CPU are compared with the copy.
    """
    version, of_splits, splits_version, numbers = _known.get(received, (0, lambda: None, 0, None))
    if (
        of_splits() is not splits
        or (received._version, splits._version) != (version, splits_version)
        or (received.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        numbers = None
    made = Sizes(splits, received, numbers)
    if numbers is None or received.is_cuda:
        return made
    tables = np.stack((splits.view(received.shape).numpy(), received.numpy()))
    return made if np.array_equal(made.tables, tables) else Sizes(splits, received)


_totals: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""For the tensor `splits` of each dispatch: its version counter, and its sum."""


def remember_total(splits: torch.Tensor, tokens: int) -> None:
    """Remember the number of tokens of a dispatch (`all_to_all_matmul`), so that the combine that follows
    (`matmul_all_to_all`) need not read it from the device.

    splits: the dispatch's argument. tokens: the sum of `splits`.
    """
    if not splits.is_inference():
        _totals[splits] = splits._version, tokens


def total_of(splits: torch.Tensor) -> int | None:
    """Return the sum of `splits` that a dispatch has remembered. Return None if no dispatch has remembered this sum, or if
    `splits` has changed since.
    """
    version, tokens = _totals.get(splits, (None, 0))
    return tokens if version is not None and version == splits._version else None
