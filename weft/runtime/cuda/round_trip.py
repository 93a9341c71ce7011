"""The launcher of `weft.kernels.round_trip`, an all-to-all of rows in one launch. The launcher compiles all variants before any
stream waits for a peer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft import _core
from weft.kernels import round_trip as device_code
from weft.runtime.cuda.kernel_call import Base, Count, kernel_call, loaded_kernel, record_one_of
from weft.symm.lasting import lasting

_ITEMS = {8: tl.int64, 4: tl.int32, 2: tl.int16}
_ALIGNMENTS = (16, 4, 2)  # the widths of an access, in bytes
_BLOCK_BYTES = 16384  # bytes in flight per program: 64 per thread
WARPS = 8
_WORDS = 128  # counts that a program reads at the same time
_LEAST_PROGRAMS = 8
MOST_PROGRAMS = 128
_MANY = 1 << 31
_OF_CALLER = {(False, False): 0, (False, True): 1, (True, False): 2}
"""The flag of a range, by (the source is the caller's tensor, the target is it)."""


class RowRange(NamedTuple):
    """A range of rows to copy. The first row and the number of rows are known only on the device.

    source, source_rows: the address and the number of rows of the buffer that is read.
    target, target_rows: the address and the number of rows of the buffer that is written.

    An address of 0 means the caller's tensor.
    """

    source: int
    source_rows: int
    target: int
    target_rows: int


class Compared(NamedTuple):
    """Tables of counts that a launch compares: `expected`, `sent` and `row` of `weft.kernels.agree`."""

    expected: torch.Tensor
    sent: torch.Tensor
    row: int


class RoundTripLaunch:
    """A launch of one kernel that sends rows to peers, and places the rows that peers send. W is the world size.

    sends: the ranges to send. own: the ranges that need no peer. places: the ranges that peers have sent.
    sizes: the device address of three numbers for each range, in this order: first row of the source, first row of the target,
        and number of rows.
    row_bytes: the number of bytes of a row. All buffers are contiguous.
    table: the counts to send, int64, contiguous. targets: the address to which they are copied, for each rank.
    compared: the tables of counts to compare. None: compare nothing.
    lost: counts of this rank, int64, contiguous, that become -1 if the group has failed; None for no counts.
    differs_at, item_bytes: as in `weft.runtime.cuda.agree.Agreeing`.
    waits, sets, waits_after, sets_after, begins, passes, ends: see `weft.kernels.round_trip`.
    expected_rows: the expected number of rows of `sends`, `own` or `places`, whichever has most.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        sends: Sequence[RowRange],
        own: Sequence[RowRange],
        places: Sequence[RowRange],
        sizes: int,
        row_bytes: int,
        table: torch.Tensor,
        targets: Sequence[int],
        compared: Compared | None,
        lost: torch.Tensor | None,
        differs_at: int,
        item_bytes: int,
        waits: Sequence[int],
        sets: Sequence[int],
        waits_after: Sequence[int],
        sets_after: Sequence[int],
        begins: Sequence[tuple[int, int]] = (),
        passes: Sequence[tuple[int, int]] = (),
        ends: Sequence[tuple[int, int]] = (),
        expected_rows: int = _MANY,
    ) -> None:
        ranges = [*sends, *own, *places]
        flat = [[*one, _OF_CALLER[one.source == 0, one.target == 0]] for one in ranges]
        tables: list[Sequence[int]] = [list(itertools.chain(*flat)), targets, waits, sets, waits_after, sets_after]
        tables += [[number for pair in pairs for number in pair] for pairs in (begins, passes, ends)]
        listed = [*itertools.chain(*tables), 0, 0]
        words = lasting(device, lambda: torch.tensor(listed, dtype=torch.int64, device=device))
        first = itertools.accumulate((len(one) for one in tables), initial=0)
        listed_ranges, listed_targets, *flags, arrivals = [words[at:] for at in first]
        counts = [len(one) for one in (waits, sets, waits_after, sets_after, begins, passes, ends)]
        expected, sent, row = compared or (table, table, 0)
        lost = table[:0] if lost is None else lost
        self._kept = table, expected, sent, lost
        self._row_bytes, self._item, self._ranks = row_bytes, item_bytes, len(targets)
        self._before = (listed_ranges, len(ranges), len(sends), len(own), sizes)
        self._behind = (
            listed_targets, table, table.numel(), *itertools.chain(*zip(flags, counts, strict=True)), arrivals,
            lost if lost.numel() else table, lost.numel(), expected, sent, differs_at,
        )  # fmt: skip
        self._last = (expected.shape[1] if compared else 0, row, self._ranks)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        blocks = 2 * expected_rows * row_bytes // _BLOCK_BYTES  # with few programs, flags and arrivals take less time
        self._programs = 1 + min(max(blocks, len(targets), _LEAST_PROGRAMS), MOST_PROGRAMS, multiprocessors)
        addresses = [row_bytes, *(address for one in ranges for address in (one.source, one.target))]
        fixed = next(step for step in _ALIGNMENTS if all(n % step == 0 for n in addresses))
        ranges_p2 = max(2, triton.next_power_of_2(len(ranges)))
        flags_p2 = max(2, *(triton.next_power_of_2(len(one)) for one in (waits, sets, waits_after, sets_after)))
        # The caller's tensor may begin at any address.
        self._variants = {
            step: _compiled(device, step, ranges_p2, flags_p2, item_bytes)
            for step in _ALIGNMENTS
            if item_bytes <= step <= fixed
        }

    def launch(self, out: int, out_rows: int) -> None:
        """Launch the kernel on the current stream. out: the address of the caller's tensor, which has `out_rows` rows."""
        step = next(step for step in self._variants if out % step == 0)
        compiled, constants = self._variants[step]
        compiled[self._programs, 1, 1](*self._arguments(step, out, out_rows), *constants)

    def record(self, program: _core.StreamProgram, stream: int, out: Base, out_rows: int | Count) -> bool:
        """Record the launch of the kernel into `program`, on the program's stream number `stream`. Return False if only Triton
        can launch the kernel.
        """
        calls = [
            (step, kernel_call(program, compiled, self._programs, self._arguments(step, out, out_rows)))
            for step, (compiled, _) in self._variants.items()
        ]
        return record_one_of(program, stream, calls)

    def _arguments(self, step: int, out: Any, out_rows: Any) -> tuple[Any, ...]:
        width = self._row_bytes // min(8, step)
        return (*self._before, width, *self._behind, out, out_rows, *self._last)


@lru_cache(maxsize=64)
def _compiled(
    device: torch.device, step: int, ranges_p2: int, flags_p2: int, item_bytes: int
) -> tuple[Any, tuple[Any, ...]]:
    """Compile and load the kernel for addresses that are multiples of `step` bytes. Return the kernel and its constants."""
    constants = constants_of(step, ranges_p2, flags_p2, item_bytes)
    kernel = loaded_kernel(device, device_code.round_trip_kernel, arguments_of(constants), WARPS, constants)
    return kernel, tuple(constants.values())


def arguments_of(constants: dict[str, Any]) -> list[Any]:
    """Return an example of the kernel's arguments, for ahead-of-time compilation."""
    types = {"differs": torch.int32} | dict.fromkeys(device_code.TABLES, torch.int64)
    names = device_code.round_trip_kernel.arg_names
    return [types.get(name, 1) for name in names[: len(names) - len(constants)]]


def constants_of(step: int, ranges_p2: int, flags_p2: int, item_bytes: int) -> dict[str, Any]:
    item = min(8, step)
    return {
        "RANGES_P2": ranges_p2, "FLAGS_P2": flags_p2, "ITEM": _ITEMS[item], "BLOCK": _BLOCK_BYTES // item, "ALIGN": step // item,
        "WORDS": _WORDS, "WIDE": item // item_bytes, "COUNTED": _ITEMS[item_bytes], "PTX": torch.version.hip is None,
    }  # fmt: skip
