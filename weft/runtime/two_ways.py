"""A measured choice between two implementations of a call, for CPU ranks on several hosts.

The second implementation sends the data of other hosts first, and works on this host's data while they are in transit
(`weft.runtime.unfused.far_first`). But it cuts messages and GEMMs into smaller pieces, which costs time. So weft measures
both. The first calls of each size (numbers of rows, or of samples and ids) use the two implementations alternately, in blocks of
calls. The first call of a block does not count, because it allocates memory.

To compare the implementations, weft sorts the times of each. Later calls use the second implementation if one of these
conditions holds:

- Its fastest call was clearly faster than the fastest call of the first implementation. In addition, its second fastest call was
  clearly faster than the second fastest call of the first, or its median time was less.
- Each of its sorted times is less than the corresponding time of the first implementation, and its median is clearly less.

The first condition relies on the fastest calls: other work slows some calls, and on a busy machine most calls. The
second condition finds a gain even if the fastest calls are almost equal. gloo's all-to-all may send in one direction
after the other, and then takes up to twice as long. If the measured links show that the second implementation cannot be
clearly faster, no call uses it.
"""

from __future__ import annotations

import statistics
import struct
from collections import defaultdict
from typing import TypeAlias

from weft.symm import Communicator

_BLOCK, _BLOCKS = 3, 4  # the number of calls in a block; the number of blocks for each size
_MEASURED = _BLOCK * _BLOCKS
_CLEARLY, _CLEARLY_S = 0.1, 100e-6  # the smallest gain that counts (fraction, seconds)
_DOUBT = 1.5  # a predicted gain may be too small by this factor
_TIMES = struct.Struct(f"<{_MEASURED}d")

Size: TypeAlias = int | tuple[int, ...]
_Bits: TypeAlias = tuple[int, ...]


class TwoWays:
    """The choice between two implementations of a call, for each size of the call, by the times of the first calls. All
    ranks make the same choice.

    The size is the number of rows of a call, or its numbers of samples and ids. Sizes whose binary numbers have the
    same number of bits share a choice.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        # The times of the first calls, in order, by the number of bits of the size.
        self._times: defaultdict[_Bits, list[float]] = defaultdict(list)
        self._taken: dict[_Bits, bool] = {}
        self._ruled_out: set[_Bits] = set()

    def rule_out(self, size: Size, most_gain_s: float) -> None:
        """Never use the second implementation for `size` if the links are too fast for a clear gain. After the first call of
        this size, this method has no effect.

        most_gain_s: the largest time, in seconds, that the second implementation is predicted to save. Equal on all ranks.
        """
        bucket = _bits(size)
        if bucket not in self._taken and not self._times[bucket] and _DOUBT * most_gain_s <= _CLEARLY_S:
            self._taken[bucket] = False
            self._ruled_out.add(bucket)

    def takes_other(self, size: Size, is_faster: bool = False) -> bool:
        """True if the next call of this size must use the second of the two implementations.

        is_faster: True if the second implementation is known to be faster. It is then used without a measurement, unless
            `rule_out` has excluded it. Equal on all ranks.
        """
        bucket = _bits(size)
        if is_faster:
            return bucket not in self._ruled_out
        return self._taken.get(bucket, _is_other(len(self._times[bucket])))

    def took(self, size: Size, seconds: float, deadline_s: float) -> None:
        """Record the time that a call took on this rank, in seconds. After the last measured call of a size, ranks exchange
        their times and choose. The time of a call is the time of its slowest rank.
        """
        bucket = _bits(size)
        if bucket in self._taken:
            return
        times = self._times[bucket]
        times.append(seconds)
        if len(times) < _MEASURED:
            return
        found = self._comm.meet(_TIMES.pack(*times), name="times of calls", deadline_s=deadline_s)
        slowest = [max(of_ranks) for of_ranks in zip(*map(_TIMES.unpack, found), strict=True)]
        first, other = (
            sorted(slowest[i] for i in range(_MEASURED) if i % _BLOCK and _is_other(i) == way) for way in (False, True)
        )
        self._taken[bucket] = _is_faster(first, other)


def _bits(size: Size) -> _Bits:
    return tuple(number.bit_length() for number in (size if isinstance(size, tuple) else (size,)))


def _is_faster(first: list[float], other: list[float]) -> bool:
    """True if the measured times show that the second implementation is faster (see the top of this file).

    first, other: the sorted times of the first and of the second implementation.
    """
    medians, pairs = (statistics.median(first), statistics.median(other)), list(zip(first, other, strict=True))
    fastest, second = (_is_clear(*pair) for pair in pairs[:2])
    if fastest and (second or medians[1] < medians[0]):
        return True
    return _is_clear(*medians) and all(b < a for a, b in pairs)


def _is_clear(first_s: float, other_s: float) -> bool:
    """True if `other_s`, a time of the second implementation, is clearly less than `first_s`, a time of the first. Both are in
    seconds.
    """
    return first_s - other_s > max(_CLEARLY * first_s, _CLEARLY_S)


def _is_other(call: int) -> bool:
    """True if call number `call`, counted from 0, of the calls that are measured uses the second implementation."""
    return call // _BLOCK % 2 == 1
