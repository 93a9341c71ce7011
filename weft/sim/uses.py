"""The use of resources by a step, as costs state it: operands, links, uses, and the cost that contains them.

The resources are each rank's "hbm", "compute" and "engine" (all its copy engines), and links (`weft.hw.topology`). A
transfer uses a fraction of each link on its route. Resources are named by their distance from the step's rank, so that
ranks with the same steps have the same costs. `weft.sim.costs` and `weft.sim.tile_costs` compute the costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from weft.hw.topology import Paths, Topology
from weft.schedule import ITEM_BYTES

ResourcePlace: TypeAlias = tuple[str, int]
"""A resource, as a step sees it: (kind of resource, distance from the step's rank to the rank that owns the resource).
A link belongs to the rank `Link.at`.
"""
HBM, COMPUTE = ("hbm", 0), ("compute", 0)
How: TypeAlias = Literal["share", "hold", "disturb"]


class Use(NamedTuple):
    """The use of one resource by a step.

    amount: the fraction of the resource that the step uses at full speed.
    how: how steps share the resource:

        share    concurrent steps divide the resource max-min fairly
        hold     the step occupies this fraction until it ends, even if other resources slow it down
        disturb  the other steps on this resource share only the rest of the resource, but do not slow this step down
    """

    how: How
    place: ResourcePlace
    amount: float
    whole: float = 0.0
    """For a link that carries only a part of a transfer, because the transfer is divided over several routes: the
    fraction of the link that the whole transfer would use.
    """


What: TypeAlias = Literal["matmul", "compute", "peer", "engine"]
"""The kind of a step: "matmul", "compute" (another kernel), "peer" (communication), "engine" (a copy engine's local copy)."""


class Cost(NamedTuple):
    what: What
    latency_us: float
    work_us: float
    uses: tuple[Use, ...]
    sent_bytes: int = 0  # the bytes that the step sends to peers or gets from a peer
    joins: bool = False  # True if the step begins when all ranks have reached it
    fills: float = 0.0  # the fraction of the rank's compute units that the step keeps until it ends
    least_us: float = 0.0  # for a collective: a lower bound for any algorithm, from the links' bandwidth
    algorithm: str = ""  # for a collective: the name of its algorithm (`weft.sim.collectives`)

    @property
    def holds(self) -> float:
        """The fraction of the rank's compute units that must be free before the step can begin."""
        return sum(use.amount for use in self.uses if use.how == "hold" and use.place == COMPUTE)


class Operand(NamedTuple):
    rows: int
    cols: int
    dtype: str
    at: int  # distance from the step's rank to the rank in whose memory the operand is
    whole_rows: bool

    @property
    def bytes(self) -> int:
        return self.rows * self.cols * ITEM_BYTES[self.dtype]


class Links(NamedTuple):
    """The links of a topology as seen from `rank`. In its methods, `source` and `target`, the two ends of a transfer,
    are distances from `rank`.
    """

    topology: Topology
    rank: int

    def paths(self, source: int, target: int) -> Paths:
        ranks = self.topology.ranks
        return self.topology.paths((self.rank + source) % ranks, (self.rank + target) % ranks)

    def latency_us(self, source: int, target: int) -> float:
        return self.paths(source, target).latency_us

    def bytes_per_us(self, source: int, target: int) -> float:
        """Return the bandwidth of a transfer from `source` to `target` that runs alone."""
        return self.paths(source, target).bytes_per_us

    def uses(self, source: int, target: int, count: float, us: float) -> Iterator[Use]:
        """Yield the use of each link by a transfer of `count` bytes that takes `us` microseconds."""
        routes, links = self._links(source, target)
        for place, per_us in links:
            whole = fraction(count, us, per_us)
            yield Use("share", place, whole / routes, whole if routes > 1 else 0.0)

    def _links(self, source: int, target: int) -> tuple[int, list[tuple[ResourcePlace, float]]]:
        """Return two values: the number of routes from `source` to `target`, and the links of all these routes, as pairs (link
        as a resource, bytes per us). The topology caches the result.
        """
        key = "links", self.rank, source, target
        found = self.topology.known.get(key)
        if found is None:
            routes, ranks = self.paths(source, target).routes, self.topology.ranks
            links = [
                ((link.kind, (link.at - self.rank) % ranks), link.bytes_per_us) for link in itertools.chain(*routes)
            ]
            found = self.topology.known[key] = len(routes), links
        return found


def shared(kind: str, at: int, amount: float) -> Use:
    """Return a use of a resource that concurrent steps share. at: the distance to the rank that owns the resource."""
    return Use("share", (kind, at), amount)


def fraction(amount: float, us: float, per_us: float) -> float:
    """Return the fraction of a resource that a step uses if it moves `amount` bytes in `us`.

    per_us: the rate of the whole resource, in bytes/us.
    """
    return amount / us / per_us if us > 0 else 0.0


def merged_cost(
    what: What, latency_us: float, work_us: float, uses: list[Use], sent_bytes: int = 0, joins: bool = False
) -> Cost:
    """Return a `Cost`, in which entries of `uses` for the same resource and kind of use (`Use.how`) are added up.

    sent_bytes: the bytes that the step sends to peers or gets from a peer.
    joins: True for a collective, which begins when all ranks have reached it.
    """
    merged: dict[tuple[How, ResourcePlace], Use] = {}
    for use in uses:
        key = use.how, use.place
        same = merged.get(key)
        merged[key] = (
            use if same is None else use._replace(amount=same.amount + use.amount, whole=max(same.whole, use.whole))
        )
    kept = tuple(use for use in merged.values() if use.amount > 0)
    return Cost(what, latency_us, work_us, kept, sent_bytes, joins)
