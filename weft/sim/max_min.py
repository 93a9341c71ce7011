"""The speeds of concurrent steps: max-min fair shares of the resources.

Each resource is divided equally among its users, but no user gets more than it needs. For example, if a link has
bandwidth 100, a copy that can use 10 gets 10, and a copy that can use 100 gets 90. A step has the same relative speed
on all its resources. So every step below full speed has a bottleneck: a fully used resource of which no other step
takes more than this step.

Each resource has a limit, the most that one step may take of it. The solver adjusts one limit after another to the
speeds that the other limits allow, until no limit changes. For flows over links this converges in as many rounds as
there are different limits. For steps that use resources in different proportions, the solver fails to converge for
about one of several thousand random loads. Then the shares are only nearly fair.

Sources: Bertsekas and Gallager, "Data Networks", 6.5.2, for flows. Bonald and Roberts, "Multi-resource fairness:
    objectives, algorithms and performance", 2015, for steps with different proportions (bottleneck max fairness).

Two effects are not fair sharing. A copy kernel holds its compute units exclusively ("hold"); if copy kernels need more
units than exist, they take turns. A copy slows down concurrent kernels, through heat and cache misses, without becoming
slower itself ("disturb").

Transfers on a link get equal rates. A transfer with several routes sends only a part of its bytes over each link, but
gets the same rate on the link as a transfer with one route. With a rate in proportion to the part, the solver might fail
to converge, and shares would depend on the order of events.

If hundreds of steps run at the same time, the solver continues from its last limits when a step begins or ends. This
saves time, and gives the same speeds as a new start. The solver is C++ (`csrc/max_min.cpp`), because a plan for dozens
of ranks with different links calls it 100,000 times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft._core import MAX_MIN_LEAST, max_min_speeds

LEAST = MAX_MIN_LEAST
"""The fraction of a resource that steps still get if other steps hold all of its units. In reality, kernels that
started earlier keep some units.
"""


class Load(NamedTuple):
    """The resources that one step uses at full speed. Each kind of use (`weft.sim.uses.Use`) has a field, which lists
    (index of a resource, fraction that the step uses).

    A simulated rank may represent several ranks. If the step uses the links of several of these ranks, the list has an
    entry for each of them, although all entries name the same resource.
    """

    share: tuple[tuple[int, float], ...]
    hold: tuple[tuple[int, float], ...] = ()
    disturb: tuple[tuple[int, float], ...] = ()
    whole: tuple[tuple[int, float], ...] = ()
    """For each shared link that carries only a part of a transfer (`Use.whole`): the amount of the whole transfer."""


def speeds(loads: Sequence[Load], counts: Mapping[int, int]) -> dict[int, float]:
    """Return the speeds of concurrent steps, from 0 to 1: {index of a load in `loads`: speed of the steps with this load}.

    counts: the concurrent steps, as {index of a load in `loads`: number of steps with this load}.
    """
    return dict(zip(counts, max_min_speeds([loads[key] for key in counts], list(counts.values())), strict=True))
