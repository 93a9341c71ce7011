"""Launchers of the kernels that distribute embedding ids between GPUs (`weft.kernels.input_dist`). The CPU does not wait
for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from weft.kernels import input_dist as device_code
from weft.runtime.cuda.direct import Call, Kernel, alignments, launch_all

_BLOCK = 1024
_PROGRAMS = 1024  # the most programs of a grid: enough to fill a GPU
_BAGS, _SUM, _COUNT = 1024, 8192, 4096  # lengths that a program scans, reduces and counts at the same time


@dataclass(frozen=True)
class Pieces:
    """The parts of its ids that a rank sends to other ranks, sorted by destination. A piece is the ids of one key. Two device
    tensors, int64 [pieces], give the key and the destination rank of each piece.
    """

    key: torch.Tensor
    rank: torch.Tensor


def header(
    lengths: torch.Tensor, offsets: torch.Tensor | None, keys: int, batch: int, values: torch.Tensor,
    header_index: torch.Tensor, own: torch.Tensor, is_padded: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Write this rank's header to `own`, and return the headers of its messages to all destinations, one after the other. A
    header has the number of ids of each piece (`weft.kernels.input_dist`).

    own: the tensor for this rank's header, int64 `[HEAD + keys + 1]`.
    header_index: for each word of the returned headers, the index of its value in `own`.
    keys, batch: this rank's numbers of keys and of samples. is_padded: True if `values` may have unused ids at its end.
    """
    counts, send = own.new_empty(keys), own.new_empty(header_index.numel())
    most, bits = values.numel(), 8 * values.itemsize
    given = [lengths, counts, counts if offsets is None else offsets, header_index, own, send]
    addresses, power, words = [tensor.data_ptr() for tensor in given], triton.next_power_of_2(keys), send.numel()

    def kernels() -> list[Kernel]:
        of_header = {"KEYS": power, "GIVEN": offsets is not None, "PADDED": is_padded, "BLOCK": _BLOCK}
        counting = Kernel(device_code.count_ids_kernel, 8, {"BLOCK": _COUNT})
        return [counting, Kernel(device_code.header_kernel, 4, of_header)]

    def calls(are_tensors: bool) -> list[Call]:
        of_ids, to, bounds, index, mine, out = given if are_tensors else addresses
        of_header = to, bounds, index, mine, out, keys, words, bits, batch, most
        return [((keys, 1), (of_ids, to, batch, most)), ((1, 1), of_header)]

    key = "header", lengths.dtype, None if offsets is None else offsets.dtype, power, is_padded, alignments(addresses)
    launch_all(key if max(batch, most) >> 31 == 0 else None, kernels, calls)
    return send


class Boxes(NamedTuple):
    """Symmetric memory through which ranks exchange messages without the CPU (`weft.kernels.input_dist`).

    own: this rank's boxes, int32. of_ranks: the addresses of every rank's boxes, as mapped here, int64 [world size].
    state: the number of exchanges so far, int64 [1]. record: pinned memory for the reason why a batch was dropped.
    box: the size of a box in 4-byte words. rank: this rank.
    """

    own: torch.Tensor
    of_ranks: torch.Tensor
    state: torch.Tensor
    record: torch.Tensor
    box: int
    rank: int


def pack(
    values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, own: torch.Tensor, pieces: Pieces,
    batch: int, words: int, boxes: Boxes | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the messages for all destinations, int32 [words].

    own: this rank's header (see `header`).
    words: the number of 4-byte words of all messages together.
    boxes: where to write the messages; None for new memory.
    """
    count, keys = pieces.key.numel(), own.numel() - device_code.HEAD - 1
    messages = torch.empty(words, dtype=torch.int32, device=values.device) if boxes is None else boxes.own
    state, world, box = (own, 0, 0) if boxes is None else (boxes.state, boxes.of_ranks.numel(), boxes.box)
    given = [values, lengths, values if weights is None else weights, own, pieces.key, pieces.rank, messages, state]
    addresses, grid = [tensor.data_ptr() for tensor in given], (count, max(1, _PROGRAMS // count))

    def kernels() -> list[Kernel]:
        powers = {"PIECES": triton.next_power_of_2(count), "KEYS": triton.next_power_of_2(keys)}
        of_ids = {"ID_WORDS": values.itemsize // 4, "WEIGHTED": weights is not None, "BOXED": boxes is not None}
        return [Kernel(device_code.pack_kernel, 4, powers | of_ids | {"BLOCK": _BLOCK})]

    def calls(are_tensors: bool) -> list[Call]:
        return [(grid, (*(given if are_tensors else addresses), count, keys, batch, world, box))]

    key = "pack", values.dtype, lengths.dtype, weights is None, boxes is None, count, keys, alignments(addresses)
    launch_all(key if max(batch, box) >> 31 == 0 else None, kernels, calls)
    return messages


def unpack(
    messages: torch.Tensor, headers: torch.Tensor, sources: int, features: int, ids: int, bags: int, dtype: torch.dtype,
    is_weighted: bool, boxes: Boxes | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Unpack the received messages. Return (ids `[ids]`, int64 offsets `[bags + 1]`, weights `[ids]` or None), ordered by
    feature, and within a feature by source rank and sample.

    boxes: the memory of all ranks, from which to read the messages; None to read `messages`. With boxes, all ranks must
        have the same number of samples, and there may be fewer ids than `ids`.
    """
    device, count = headers.device, sources * features
    values = torch.empty(ids, dtype=dtype, device=device)
    weights = torch.empty(ids, dtype=torch.float32, device=device) if is_weighted else None
    offsets = torch.empty(bags + 1, dtype=torch.int64, device=device)
    into = [values, values if weights is None else weights, offsets]
    rank, box, samples = (0, 0, 0) if boxes is None else (boxes.rank, boxes.box, bags // count)
    if boxes is None:
        given = [messages, headers, *into, headers, headers]
    else:
        given = [boxes.of_ranks, headers, *into, boxes.state, boxes.record]
    addresses, grid = [tensor.data_ptr() for tensor in given], (count, max(1, _PROGRAMS // count))

    def kernels() -> list[Kernel]:
        constants = {"PIECES": triton.next_power_of_2(count), "ID_WORDS": dtype.itemsize // 4, "WEIGHTED": is_weighted}
        constants |= {"BLOCK": _BLOCK, "BAGS": _BAGS, "SUM": _SUM, "BOXED": boxes is not None, "RANK": rank}
        return [Kernel(device_code.unpack_kernel, 4, constants)]

    def calls(are_tensors: bool) -> list[Call]:
        return [(grid, (*(given if are_tensors else addresses), sources, features, box, samples, ids))]

    key = "unpack", dtype, is_weighted, count, boxes is None, rank, alignments(addresses)
    launch_all(key if max(box, ids) >> 31 == 0 else None, kernels, calls)
    return values, offsets, weights
