"""Hashing of 64-bit ids to rows, without a dictionary. With `hash=True`, kernels compute the same function.

    row(id) = mix(uint64(id)) mod rows,   mix = the finalizer of splitmix64:
    z ^= z >> 30;  z *= 0xbf58476d1ce4e5b9;  z ^= z >> 27;  z *= 0x94d049bb133111eb;  z ^= z >> 31

The function `mix` is a bijection of 64-bit words, so only the modulus can map two ids to the same row. int32 ids are
sign-extended to int64, whose bits are read as uint64.
"""

from __future__ import annotations

import torch

from weft.arguments import check_tensor, checked_within

_MULTIPLIERS = (
    0xBF58476D1CE4E5B9 - 2**64,
    0x94D049BB133111EB - 2**64,
)  # as signed words: their products have the same bits


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the logical right shift of an int64 tensor that is read as uint64: torch's >> would copy the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def hash_ids(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the row of each id, in [0, rows), as int64. ids: int32 or int64, of any shape, on any device."""
    rows = checked_within("rows", rows, 1, 2**62 - 1, "between 1 and 2**62 - 1")
    check_tensor("ids", ids)
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids are {ids.dtype}: pass int32 or int64")
    return rows_of_hashes(ids, rows)


def rows_of_hashes(ids: torch.Tensor, rows: int | torch.Tensor) -> torch.Tensor:
    """Return the table row of each id, as `hash_ids` does, but without checks. rows: one number, or a tensor with a number for
    each id.
    """
    z = ids.to(torch.int64)
    z = (z ^ _shift_right(z, 30)) * _MULTIPLIERS[0]
    z = (z ^ _shift_right(z, 27)) * _MULTIPLIERS[1]
    z = z ^ _shift_right(z, 31)
    # Compute the unsigned remainder with signed operations: z = 2 * (z >> 1) + (z & 1), and both terms below have at
    # most 63 bits.
    return (_shift_right(z, 1) % rows * 2 + (z & 1)) % rows
