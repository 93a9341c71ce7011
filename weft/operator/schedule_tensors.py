"""Checks of the tensors that a caller passes to `weft.run_schedule`.

The checks cover names, shapes, dtypes, devices, the results of functions, and overlaps of outputs with other tensors. A
schedule orders its steps by buffers, so two buffers in the same memory would be read and written in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.arguments import check_tensor
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import Buffer, Schedule
from weft.words import kind


def checked_tensors(schedule: Schedule, tensors: Any, rank: int) -> tuple[dict[str, Any], torch.device]:
    """Return the caller's tensors as a dict (name to tensor or function), and their device. Raise `ValueError` if they do not
    match the schedule.

    A function that allocates an output is wrapped, so that its result is checked too.
    """
    buffers = {b.name: b for b in schedule.buffers_of_rank(rank, expected=False) if b.role in ("input", "output")}
    names = ", ".join(buffers)
    if not names:
        raise ValueError(
            f"schedule {schedule.name} has neither inputs nor outputs: declare at least one with Draft.buffer"
        )
    if not isinstance(tensors, Mapping):
        raise ValueError(f"tensors is {kind(tensors)}: pass a dict with a tensor for each of {names}")
    given = dict(tensors)
    if missing := [name for name in buffers if name not in given]:
        raise ValueError(
            f"tensors lacks {', '.join(missing)}: pass a tensor for each input and output of schedule {schedule.name}: {names}"
        )
    if unknown := [str(name) for name in given if name not in buffers]:
        own = [b.name for b in schedule.buffers if b.name in unknown]
        why = f"; weft allocates {', '.join(own)}" if own else ""
        raise ValueError(
            f"tensors has {', '.join(unknown)}, but the inputs and outputs of schedule {schedule.name} are {names}{why}"
        )
    plain = {name: t for name, t in given.items() if not _is_function(buffers[name], t)}
    for name, t in plain.items():
        check_tensor(f"tensors[{name!r}]", t)
    device = next((t.device for t in plain.values()), None)
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensors are on {device}: pass at least one tensor on a GPU or on the CPU")
    for name, t in plain.items():
        _check(buffers[name], t, device)
    memory = {name: _memory_of(buffers[name], t) for name, t in plain.items() if t.numel()}
    _check_apart(memory.values())
    for name in given.keys() - plain.keys():
        given[name] = _Making(buffers[name], given[name], device, memory)
    return given, device


class _Making:
    """A wrapper of a function that the caller passes. The function allocates an output with a dynamic number of rows. The
    wrapper checks this output.

    memory: the memory of the other tensors of the run, which the returned tensor must not overlap.
    """

    def __init__(
        self, buffer: Buffer, make: Callable[[int], Any], device: torch.device, memory: dict[str, _Memory]
    ) -> None:
        self._buffer, self._make, self._device, self._memory = buffer, make, device, memory
        self._grad = torch.is_grad_enabled()  # grad mode is per thread, and lanes run on other threads

    def __call__(self, rows: int) -> torch.Tensor:
        name = self._buffer.name
        if rows < 0:
            raise ValueError(f"{name} would have {rows} rows in this run: pass row counts of at least 0 on every rank")
        t = self._make(rows)
        buffer = Buffer(name, rows, self._buffer.cols, self._buffer.dtype, self._buffer.role)
        try:
            check_tensor("its result", t)
            with torch.set_grad_enabled(self._grad):
                _check(buffer, t, self._device)
            if t.numel():
                self._memory[name] = _memory_of(buffer, t)
                _check_apart(self._memory.values())
        except ValueError as error:
            raise ValueError(f"the function that allocates {name} was called with {rows} rows: {error}") from error
        return t  # type: ignore[no-any-return]


def _is_function(buffer: Buffer, t: Any) -> bool:
    return (
        buffer.role == "output" and not isinstance(buffer.rows, int) and callable(t) and not isinstance(t, torch.Tensor)
    )


def _check(buffer: Buffer, t: torch.Tensor, device: torch.device) -> None:
    name, dtype = buffer.name, TORCH_DTYPE[buffer.dtype]
    # A dynamic number of rows is checked when the schedule runs.
    rows = buffer.rows if isinstance(buffer.rows, int) else t.shape[0] if t.dim() else 0
    if tuple(t.shape) != (rows, buffer.cols) or t.dtype != dtype or t.device != device:
        wanted = f"({buffer.rows}, {buffer.cols}) {dtype} on {device}"
        raise ValueError(f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}: pass {wanted}")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient, but schedules have no backward: call under torch.no_grad(), or pass {name}.detach()"
        )
    if isinstance(t, FakeTensor):
        raise ValueError(f"{name} is a FakeTensor, which has no memory: pass a tensor with values")
    if t.is_neg():
        raise ValueError(f"{name} is a view whose memory holds the negated values: pass {name}.resolve_neg()")


class _Memory(NamedTuple):
    """The memory of a matrix. A row is a piece of `width` bytes, there are `pieces` pieces, and their starts are `pitch` bytes
    apart.

    begin, end: the addresses of its first byte and after its last byte.
    name: the buffer's name.
    written: True if the run writes it.
    """

    begin: int
    end: int
    pieces: int
    pitch: int
    width: int
    name: str
    written: bool


def _memory_of(buffer: Buffer, t: torch.Tensor) -> _Memory:
    (outer, count), (inner, length) = sorted(zip(t.stride(), t.shape, strict=True), reverse=True)
    pitch, width, begin = outer * t.itemsize, ((length - 1) * inner + 1) * t.itemsize, t.data_ptr()
    end = begin + (count - 1) * pitch + width
    if count == 1 or pitch <= width:  # one row, or rows without gaps
        count, pitch, width = 1, 0, end - begin
    return _Memory(begin, end, count, pitch, width, buffer.name, buffer.role == "output")


def _check_apart(memory: Iterable[_Memory]) -> None:
    """Raise `ValueError` if the memory of an output, which the run writes, overlaps the memory of another tensor."""
    before: list[_Memory] = []
    for one in sorted(memory):
        before = [other for other in before if other.end > one.begin]
        for other in before:
            if (one.written or other.written) and _overlap(other, one):
                output = one.name if one.written else other.name
                raise ValueError(
                    f"{other.name} and {one.name} overlap in memory, and the run writes {output}: pass a separate output, "
                    f"torch.empty_like({output})"
                )
        before.append(one)


def _overlap(a: _Memory, b: _Memory) -> bool:
    """True if a piece of `a` shares a byte with a piece of `b`.

    Pieces i of a and j of b overlap if -width_a < a.begin - b.begin + (i - j) * pitch < width_b. If both have several
    pieces with different pitches, return True if their address ranges overlap.
    """
    if a.end <= b.begin or b.end <= a.begin:
        return False
    if min(a.pieces, b.pieces) > 1 and a.pitch != b.pitch:
        return True
    pitch, between = max(a.pitch, b.pitch), b.begin - a.begin
    if not pitch:
        return True
    least = (between - a.width) // pitch + 1
    most = -(-(between + b.width) // pitch) - 1
    return max(least, 1 - b.pieces) <= min(most, a.pieces - 1)
