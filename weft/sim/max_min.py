"""Speeds of concurrent steps: max-min fair shares by progressive filling.

Each resource gives all its users the same amount, but no more than a user asks for. On a link of 100, a copy that can take 10
gets 10, and a copy that can take 100 gets 90. So a step can gain on a full resource only if a step that uses no more of it
loses. A step has the same speed on all its resources. Amounts are equal on the resource that stops a step, its bottleneck.

Filling goes in rounds, since equal amounts depend on the bottlenecks. In a round all steps grow in proportion to their use of
their expected bottleneck, each up to its speed alone. When a resource is full, its users stop, and the other steps go on. The
bottlenecks that a round finds are the expected ones of the next round. One round is enough if each step takes the same amount
of all its resources.

Source: Bertsekas and Gallager, "Data Networks", 6.5.2. Two effects are not fair sharing. A copying kernel keeps its compute
units to itself ("hold"). Copies slow down concurrent kernels by heat and cache misses, and do not become slower themselves
("disturb"). If all units are held, holders wait for each other: together they never get more units than exist.

The solver is C++ (`csrc/max_min.cpp`): if ranks differ in their links, a plan for dozens of ranks calls it 100,000 times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft._core import MAX_MIN_LEAST, max_min_speeds

LEAST = MAX_MIN_LEAST
"""The share that remains of a resource whose units are all held: kernels that came first keep running on some units."""


class Load(NamedTuple):
    """The resources that one step takes at full speed, as (resource, amount): see `weft.sim.costs.Use`.

    A resource that stands for several, since one rank stands for all, may be listed several times. Each entry is a separate
    resource's part.
    """

    share: tuple[tuple[int, float], ...]
    hold: tuple[tuple[int, float], ...] = ()
    disturb: tuple[tuple[int, float], ...] = ()


def speeds(loads: Sequence[Load], counts: Mapping[int, int]) -> dict[int, float]:
    """Return, for each key, the speed (0 to 1) of each of `counts[key]` steps with the load `loads[key]`."""
    return dict(zip(counts, max_min_speeds([loads[key] for key in counts], list(counts.values())), strict=True))
