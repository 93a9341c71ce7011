"""The input distribution's kernels on a GPU (`weft.kernels.input_dist`), without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from weft.kernels import input_dist as device_code
from weft.runtime.cuda.direct import launch

_BLOCK = 1024
_PROGRAMS = 1024  # of a grid: enough to fill a GPU


@dataclass(frozen=True)
class Pieces:
    """The pieces that a rank sends, sorted by destination: the key and the destination rank of each, int64 [pieces], on
    the device.
    """

    key: torch.Tensor
    rank: torch.Tensor


def header(
    lengths: torch.Tensor, offsets: torch.Tensor | None, keys: int, batch: int, values: torch.Tensor,
    header_index: torch.Tensor, own: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Write this rank's own header `[HEAD + keys + 1]`. Return the headers for all destinations, one after the other."""
    counts, send = own.new_empty(keys), own.new_empty(header_index.numel())
    most, bits = values.numel(), 8 * values.itemsize
    launch(device_code.count_ids_kernel, (keys, 1), (lengths, counts, batch, most), BLOCK=_BLOCK)
    given = (
        counts,
        counts if offsets is None else offsets,
        header_index,
        own,
        send,
        keys,
        send.numel(),
        bits,
        batch,
        most,
    )
    power = triton.next_power_of_2(keys)
    launch(device_code.header_kernel, (1, 1), given, KEYS=power, GIVEN=offsets is not None, BLOCK=_BLOCK)
    return send


def pack(
    values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, own: torch.Tensor, pieces: Pieces,
    batch: int, words: int,
) -> torch.Tensor:  # fmt: skip
    """Return the messages for all destinations, int32 [words]."""
    count, keys = pieces.key.numel(), own.numel() - device_code.HEAD - 1
    messages = torch.empty(words, dtype=torch.int32, device=values.device)
    given = (
        values, lengths, values if weights is None else weights, own, pieces.key, pieces.rank, messages, count, keys, batch,
    )  # fmt: skip
    launch(
        device_code.pack_kernel, (count, max(1, _PROGRAMS // count)), given, PIECES=triton.next_power_of_2(count),
        KEYS=triton.next_power_of_2(keys), ID_WORDS=values.itemsize // 4, WEIGHTED=weights is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return messages


def unpack(
    messages: torch.Tensor, headers: torch.Tensor, sources: int, features: int, ids: int, bags: int, dtype: torch.dtype,
    is_weighted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return (ids `[ids]`, int64 offsets `[bags + 1]`, weights `[ids]` or None), ordered by feature. Within a feature,
    samples are in rank order.
    """
    device, count = messages.device, sources * features
    values = torch.empty(ids, dtype=dtype, device=device)
    lengths = torch.empty(bags, dtype=torch.int32, device=device)
    weights = torch.empty(ids, dtype=torch.float32, device=device) if is_weighted else None
    offsets = torch.empty(bags + 1, dtype=torch.int64, device=device)
    given = messages, headers, values, lengths, values if weights is None else weights, offsets, sources, features
    launch(
        device_code.unpack_kernel, (count, max(1, _PROGRAMS // count)), given, PIECES=triton.next_power_of_2(count),
        ID_WORDS=dtype.itemsize // 4, WEIGHTED=is_weighted, BLOCK=_BLOCK,
    )  # fmt: skip
    torch.cumsum(lengths, 0, out=offsets[1:])
    return values, offsets, weights
