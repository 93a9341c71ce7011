"""How fast steps go that run at once: max-min fair shares by progressive filling.

Each resource gives all who want it the same amount, but no one more than it asks for: of a link of 100, a copy that can take 10
gets 10, and one that can take 100 gets 90. So no step can use more of a full resource without another one, that uses no more of
it, using less. Amounts are equal where a step is stopped: a step that takes parts of several resources has the same speed on all.

Filling goes in rounds, as it depends on where steps are stopped what is equal. All grow by what they take of the resource that
is expected to stop them, each up to its speed when alone. When a resource is used up, the steps that use it stop; the others go
on. If steps were stopped elsewhere than expected, that is expected in the next round. With one amount for each step, however many
resources it takes it of, the first round is the last.

Source: Bertsekas and Gallager, "Data Networks", 6.5.2. Beside it, two things that hardware does not share fairly: a copying
kernel keeps its compute units to itself ("hold"), and copies slow down the kernels beside them by heat and cache misses,
without themselves becoming slower ("disturb"). Holders wait for each other where all units are held: together they get no more
than there are.

It is worked out in C++ (`csrc/fair.cpp`): where ranks differ in their links, a plan for dozens of them needs it 100,000 times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft._core import FAIR_LEAST, fair_speeds

LEAST = FAIR_LEAST
"""Of a resource whose units are all held: kernels that came first keep running on some."""


class Load(NamedTuple):
    """What one step takes at full speed, by resource: see `weft.sim.costs.Use`. A resource that stands for several, as where one
    rank stands for all, may be there several times: each of these gives its own part."""

    share: tuple[tuple[int, float], ...]
    hold: tuple[tuple[int, float], ...] = ()
    disturb: tuple[tuple[int, float], ...] = ()


def speeds(loads: Sequence[Load], counts: Mapping[int, int]) -> dict[int, float]:
    """The speed, from 0 to 1, of each of `counts[key]` steps with the load `loads[key]`, for each key."""
    return dict(zip(counts, fair_speeds([loads[key] for key in counts], list(counts.values())), strict=True))
