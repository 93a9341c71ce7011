"""The choice between two ways of a call by measurement, for CPU ranks on several hosts.

A call may send the data of other hosts first, while this host's data are computed (`weft.runtime.unfused.far_first`). More and
smaller messages and GEMMs cost time too. So the first calls of each size take both ways in turn, and later calls take the faster.
This is the only rule that declines to send the data of other hosts first.
"""

from __future__ import annotations

import struct
from collections import defaultdict

from weft.symm import Communicator

_MEASURED = 6  # calls of each size
_CLEARLY, _CLEARLY_S = 0.05, 100e-6  # the smallest gain that counts


class TwoWays:
    """The faster of two ways of a call, by measurement in the first calls of each size. All ranks take the same."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._times: defaultdict[int, list[float]] = defaultdict(list)  # by size bucket; the ways take turns
        self._taken: dict[int, bool] = {}

    def takes_other(self, size: int) -> bool:
        """True if the next call of this size goes the other way."""
        bucket = size.bit_length()
        return self._taken.get(bucket, len(self._times[bucket]) % 2 == 1)

    def took(self, size: int, seconds: float, deadline_s: float) -> None:
        """Note the time of a call. After the last one that is measured ranks compare, and take the slowest rank's times."""
        bucket = size.bit_length()
        if bucket in self._taken:
            return
        times = self._times[bucket]
        times.append(seconds)
        if len(times) < _MEASURED:
            return
        mine = struct.pack("<2d", min(times[2::2]), min(times[3::2]))  # the first two may have set up connections
        every = [
            struct.unpack("<2d", one) for one in self._comm.meet(mine, name="times of calls", deadline_s=deadline_s)
        ]
        first, other = (max(times) for times in zip(*every, strict=True))
        self._taken[bucket] = first - other > max(_CLEARLY * first, _CLEARLY_S)
