"""The choice between two implementations of a call by measurement, for CPU ranks on several hosts.

The second implementation sends the data of other hosts first, and computes this host's data meanwhile
(`weft.runtime.unfused.far_first`). It has more and smaller messages and GEMMs, which costs time too. So the first calls
of each size use both implementations alternately, and later calls use the faster implementation.
"""

from __future__ import annotations

import struct
from collections import defaultdict

from weft.symm import Communicator

_MEASURED = 6  # calls of each size to measure
_CLEARLY, _CLEARLY_S = 0.05, 100e-6  # the smallest gain that counts (fraction, seconds)


class TwoWays:
    """The choice between two implementations, by times of the first calls of each size. All ranks choose alike."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._times: defaultdict[int, list[float]] = defaultdict(
            list
        )  # by size bucket, alternating between both implementations
        self._taken: dict[int, bool] = {}

    def takes_other(self, size: int) -> bool:
        """True if the next call of this size must use the second implementation."""
        bucket = size.bit_length()
        return self._taken.get(bucket, len(self._times[bucket]) % 2 == 1)

    def took(self, size: int, seconds: float, deadline_s: float) -> None:
        """Record the time of a call. After the last measured call, ranks compare the slowest rank's times and choose."""
        bucket = size.bit_length()
        if bucket in self._taken:
            return
        times = self._times[bucket]
        times.append(seconds)
        if len(times) < _MEASURED:
            return
        mine = struct.pack("<2d", min(times[2::2]), min(times[3::2]))  # the first two calls may have set up connections
        every = [
            struct.unpack("<2d", one) for one in self._comm.meet(mine, name="times of calls", deadline_s=deadline_s)
        ]
        first, other = (max(times) for times in zip(*every, strict=True))
        self._taken[bucket] = first - other > max(_CLEARLY * first, _CLEARLY_S)
