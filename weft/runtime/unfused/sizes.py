"""The numbers of rows to and from each rank and expert: tables on the device, and their copy on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch

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

    def __init__(self, splits: torch.Tensor, received: torch.Tensor, numbers: Numbers | None = None) -> None:
        self.splits, self.received = splits, received
        self.numbers = numbers or Numbers()

    @classmethod
    def of_read(cls, splits: torch.Tensor, received: torch.Tensor, counts: Sequence[int], rank: int) -> Sizes:
        """Return the sizes of `rank`, from numbers that the CPU has already read from the device.

        counts: the splits of all ranks, one rank after the other.
        """
        return cls(splits, received, Numbers(counts=counts, rank=rank))

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
class Numbers:
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


class _OfTensors(Generic[T]):
    """Values for tensors. A tensor loses its value when it is freed, or changed in place.

    A lookup calls one Python function. torch's `WeakTensorKeyDictionary` calls eight.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[weakref.ref[torch.Tensor], int, T]] = {}
        """Each value by the id of its tensor, with a reference to the tensor, and the tensor's version."""

    def get(self, tensor: torch.Tensor) -> T | None:
        found = self.found.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != tensor._version:
            return None
        return found[2]

    def keep(self, tensor: torch.Tensor, value: T) -> None:
        """Keep `value` for `tensor`, which must not be an inference tensor, because these have no version."""
        key = id(tensor)

        def forget(freed: weakref.ref[torch.Tensor]) -> None:
            found = self.found.get(key)
            if found is not None and found[0] is freed:  # not the value of a later tensor with the same id
                del self.found[key]

        self.found[key] = weakref.ref(tensor, forget), tensor._version, value


_known: _OfTensors[tuple[weakref.ref[torch.Tensor], int, Numbers]] = _OfTensors()
"""For each tensor `received` of a dispatch: the tensor of splits with its version counter, and the CPU's copy of both tensors."""
KNOWN = _known.found
"""The same as a dict that native code reads (`_core.KnownNumbers`)."""


def remember(sizes: Sizes) -> None:
    """Keep the copy of `splits` and `received` (the numbers of rows of an exchange) on the CPU. The combine after a dispatch,
    and backward, then need not wait for another copy from the device (`sizes_of`).
    """
    splits, received = sizes.splits, sizes.received
    if not (splits.is_inference() or received.is_inference()):
        _known.keep(received, (weakref.ref(splits), splits._version, sizes.numbers))


def sizes_of(splits: torch.Tensor, received: torch.Tensor) -> Sizes:
    """Return the `Sizes` of these tables. If the CPU has a copy (`remember`), and neither table has changed since, use this
    copy. Never reuse it while a graph is being captured.

    Version counters miss changes by collectives and by NumPy, so tensors on the CPU are compared with the copy.
    """
    known, numbers = _known.get(received), None
    if (
        known is not None
        and known[0]() is splits
        and known[1] == splits._version
        and not (received.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        numbers = known[2]
    made = Sizes(splits, received, numbers)
    if numbers is None or received.is_cuda:
        return made
    tables = np.stack((splits.view(received.shape).numpy(), received.numpy()))
    return made if np.array_equal(made.tables, tables) else Sizes(splits, received)


_totals: _OfTensors[int] = _OfTensors()
"""For the tensor `splits` of each dispatch: its sum."""


def remember_total(splits: torch.Tensor, tokens: int) -> None:
    """Remember the number of tokens of a dispatch (`all_to_all_matmul`), so that the combine that follows
    (`matmul_all_to_all`) need not read it from the device.

    splits: the dispatch's argument. tokens: the sum of `splits`.
    """
    if not splits.is_inference():
        _totals.keep(splits, tokens)


def total_of(splits: torch.Tensor) -> int | None:
    """Return the sum of `splits` that a dispatch has remembered. Return None if no dispatch has remembered this sum, or if
    `splits` has changed since.
    """
    return _totals.get(splits)
