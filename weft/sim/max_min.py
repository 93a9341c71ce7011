"""Speeds of concurrent steps: max-min fair shares.

Each resource gives all its users the same amount, but no more than a user asks for. On a link of 100, a copy that can take 10
gets 10, and a copy that can take 100 gets 90. A step has the same speed on all its resources. So every step below full speed has
a bottleneck: a full resource of which no other step takes more.

Each resource has a limit, the most that a step may take of it. The solver adapts one limit after another to the speeds that the
others allow, until none changes. Flows over links settle after as many rounds as there are different limits; links may differ in
bandwidth. Steps that use their resources in different proportions settle too, with one exception in thousands of random loads.
The exceptions get shares that use up a resource of each step, and are nearly fair.

Sources: Bertsekas and Gallager, "Data Networks", 6.5.2, for flows. Bonald and Roberts, "Multi-resource fairness: objectives,
algorithms and performance", 2015, for steps with different proportions (bottleneck max fairness). Two effects are not fair
sharing. A copying kernel keeps its compute units to itself ("hold"). Copies slow down concurrent kernels by heat and cache
misses, and do not become slower themselves ("disturb"). If all units are held, holders wait for each other: together they never
get more units than exist.

If hundreds of steps run at once, limits continue from their last values when a step begins or ends. They settle at the same shares,
and only resources that the change reaches are solved again.

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

    A resource may be listed several times: if one rank represents all, it also represents resources of other ranks. Each entry is a
    separate resource's part.
    """

    share: tuple[tuple[int, float], ...]
    hold: tuple[tuple[int, float], ...] = ()
    disturb: tuple[tuple[int, float], ...] = ()


def speeds(loads: Sequence[Load], counts: Mapping[int, int]) -> dict[int, float]:
    """Return, for each key, the speed (0 to 1) of each of `counts[key]` steps with the load `loads[key]`."""
    return dict(zip(counts, max_min_speeds([loads[key] for key in counts], list(counts.values())), strict=True))
