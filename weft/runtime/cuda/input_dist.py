"""Launchers of the kernels that distribute embedding ids between GPUs (`weft.kernels.input_dist`). The CPU does not wait
for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from weft.kernels import input_dist as device_code
from weft.runtime.cuda.direct import Call, Kernel, alignments, launch_all

_BLOCK = 1024
_PROGRAMS = 1024  # the most programs of a grid: enough to fill a GPU
_BAGS, _SUM, _COUNT = 1024, 8192, 4096  # lengths that a program scans, reduces and counts at once


@dataclass(frozen=True)
class Pieces:
    """The parts of its ids that a rank sends to other ranks, sorted by destination. A piece is the ids of one key. Two device
    tensors, int64 [pieces], give the key and the destination rank of each piece.
    """

    key: torch.Tensor
    rank: torch.Tensor


def header(
    lengths: torch.Tensor, offsets: torch.Tensor | None, keys: int, batch: int, values: torch.Tensor,
    header_index: torch.Tensor, own: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Write this rank's header to `own`, and return the headers of its messages to all destinations, one after the other. A
    header has the number of ids of each piece (`weft.kernels.input_dist`).

    own: the tensor for this rank's header, int64 `[HEAD + keys + 1]`. header_index: for each word of the returned headers, the
        index of its value in `own`.
    keys, batch: this rank's numbers of keys and of samples.
    """
    counts, send = own.new_empty(keys), own.new_empty(header_index.numel())
    most, bits = values.numel(), 8 * values.itemsize
    given = [lengths, counts, counts if offsets is None else offsets, header_index, own, send]
    addresses, power, words = [tensor.data_ptr() for tensor in given], triton.next_power_of_2(keys), send.numel()

    def kernels() -> list[Kernel]:
        of_header = {"KEYS": power, "GIVEN": offsets is not None, "BLOCK": _BLOCK}
        counting = Kernel(device_code.count_ids_kernel, 8, {"BLOCK": _COUNT})
        return [counting, Kernel(device_code.header_kernel, 4, of_header)]

    def calls(are_tensors: bool) -> list[Call]:
        of_ids, to, bounds, index, mine, out = given if are_tensors else addresses
        of_header = to, bounds, index, mine, out, keys, words, bits, batch, most
        return [((keys, 1), (of_ids, to, batch, most)), ((1, 1), of_header)]

    key = "header", lengths.dtype, None if offsets is None else offsets.dtype, power, alignments(addresses)
    launch_all(key if max(batch, most) >> 31 == 0 else None, kernels, calls)
    return send


def pack(
    values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, own: torch.Tensor, pieces: Pieces,
    batch: int, words: int,
) -> torch.Tensor:  # fmt: skip
    """Return the messages for all destinations, int32 [words].

    own: this rank's header (see `header`). words: the number of 4-byte words of all messages together.
    """
    count, keys = pieces.key.numel(), own.numel() - device_code.HEAD - 1
    messages = torch.empty(words, dtype=torch.int32, device=values.device)
    given = [values, lengths, values if weights is None else weights, own, pieces.key, pieces.rank, messages]
    addresses, grid = [tensor.data_ptr() for tensor in given], (count, max(1, _PROGRAMS // count))

    def kernels() -> list[Kernel]:
        powers = {"PIECES": triton.next_power_of_2(count), "KEYS": triton.next_power_of_2(keys)}
        of_ids = {"ID_WORDS": values.itemsize // 4, "WEIGHTED": weights is not None, "BLOCK": _BLOCK}
        return [Kernel(device_code.pack_kernel, 4, powers | of_ids)]

    def calls(are_tensors: bool) -> list[Call]:
        return [(grid, (*(given if are_tensors else addresses), count, keys, batch))]

    key = "pack", values.dtype, lengths.dtype, weights is None, count, keys, alignments(addresses)
    launch_all(key if batch >> 31 == 0 else None, kernels, calls)
    return messages


def unpack(
    messages: torch.Tensor, headers: torch.Tensor, sources: int, features: int, ids: int, bags: int, dtype: torch.dtype,
    is_weighted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Unpack the received messages. Return (ids `[ids]`, int64 offsets `[bags + 1]`, weights `[ids]` or None), ordered by
    feature, and within a feature by source rank and sample.
    """
    device, count = messages.device, sources * features
    values = torch.empty(ids, dtype=dtype, device=device)
    weights = torch.empty(ids, dtype=torch.float32, device=device) if is_weighted else None
    offsets = torch.empty(bags + 1, dtype=torch.int64, device=device)
    given = [messages, headers, values, values if weights is None else weights, offsets]
    addresses, grid = [tensor.data_ptr() for tensor in given], (count, max(1, _PROGRAMS // count))

    def kernels() -> list[Kernel]:
        constants = {"PIECES": triton.next_power_of_2(count), "ID_WORDS": dtype.itemsize // 4, "WEIGHTED": is_weighted}
        return [Kernel(device_code.unpack_kernel, 4, constants | {"BLOCK": _BLOCK, "BAGS": _BAGS, "SUM": _SUM})]

    def calls(are_tensors: bool) -> list[Call]:
        return [(grid, (*(given if are_tensors else addresses), sources, features))]

    launch_all(("unpack", dtype, is_weighted, count, alignments(addresses)), kernels, calls)
    return values, offsets, weights
