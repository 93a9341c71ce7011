"""A grid of GPUs with two or more dimensions, in which each line along a dimension is a ring.

In a torus of 16 x 8, lines along the first dimension are rows, and lines along the second dimension are columns. Routes use the
links of the first dimension first, then links of the second, and so on (dimension-ordered routing). If two ranks are
half a ring apart, both directions are equally long. Then half of the bytes take each direction, as with adaptive
routing, but the transfer is no faster than one link.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from weft.hw.quantity import Quantity
from weft.hw.topology.links import Link, Route, Topology
from weft.hw.topology.shape import PAIRS, shape


class Torus(Topology):
    """A torus whose links are of the kinds "row", "column", "dimension 3" and so on. A route uses row links first.

    dims: the sizes of the torus. Consecutive ranks lie along the first dimension.
    """

    def _found(self, source: int, target: int) -> tuple[Route, ...]:
        at = source
        routes: list[Route] = [()]
        for name, stride, size in lines(self.dims):
            here, there = at // stride % size, target // stride % size
            first = at - here * stride  # the first rank of the line
            ways = [
                tuple(
                    self.by_place[f"{name} {way.step:+d}", first + (here + i * way.step) % size * stride]
                    for i in range(way.links)
                )
                for way in ways_around(there - here, size)
            ]
            routes = [a + b for a, b in itertools.product(routes, ways)]
            at = first + there * stride
        return tuple(routes)


class Way(NamedTuple):
    """A path along a ring in one direction.

    step: the difference between consecutive ranks of the path, 1 or -1. links: the number of links.
    """

    step: int
    links: int


def ways_around(distance: int, ring: int) -> list[Way]:
    """Return the shortest paths along a ring of `ring` ranks to the rank at `distance`: one path, or two if both directions are
    equally long.
    """
    up, down = distance % ring, -distance % ring
    if up == down and up and ring > 2:
        return [Way(1, up), Way(-1, down)]
    return [Way(1, up)] if up <= down else [Way(-1, down)]


def lines(dims: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    """Yield (kind of its links, difference between neighbouring ranks, size) of each dimension of a torus."""
    for i, size in enumerate(dims):
        yield ("row", "column")[i] if i < 2 else f"dimension {i + 1}", math.prod(dims[:i]), size


def kinds_of_links(dims: tuple[int, ...]) -> list[tuple[str, int, int, int]]:
    """Return (kind, step, difference between neighbouring ranks, size of the ring) of each link that leaves a rank.

    kind: the name of the dimension and the direction, such as "row +1". step: 1 or -1, the direction in which the link goes
    along its ring.
    """
    # In a ring of two, both neighbours are the same rank.
    return [
        (f"{name} {step:+d}", step, stride, size) for name, stride, size in lines(dims) for step in (1, -1)[: size - 1]
    ]


_COLUMNS = Quantity(4, "1", "assumed", "a default: for another number, write torus:COLUMNSxROWS or a file of your own")


@shape((*PAIRS, "torus.columns"), ("torus.columns", "rows"), given={"torus.columns": _COLUMNS}, more=True)
def torus(ranks: int, bytes_per_us: float, latency_us: float, columns: int, *more: int) -> Topology:
    """Return a torus: a ring along each row of `columns` ranks, along each column, and along each line of further dimensions.

    bytes_per_us, latency_us: the bandwidth and the latency of each link.
    more: the sizes of the dimensions between the first, `columns`, and the last, whose size follows from `ranks`.
    """
    dims = dims_of(ranks, columns, *more)
    links = []
    for rank in range(ranks):
        for kind, step, stride, size in kinds_of_links(dims):
            here = rank // stride % size
            target = rank + ((here + step) % size - here) * stride
            links.append(Link(kind, rank, rank, target, bytes_per_us, latency_us))
    return Torus(ranks, tuple(links), dims=dims, rings=True)


def dims_of(ranks: int, columns: float, *more: float) -> tuple[int, ...]:
    """Return the sizes of a torus of `ranks` ranks. columns, more: as for `torus`. Raise `ValueError` if the ranks do not
    form such a torus.
    """
    sizes = tuple(map(int, (columns, *more)))
    if ranks % math.prod(sizes):
        block = f"rows of {sizes[0]}" if not more else f"blocks of {'x'.join(map(str, sizes))}"
        raise ValueError(f"a torus with {block} ranks cannot have {ranks} ranks: use a multiple of {math.prod(sizes)}")
    return (*sizes, ranks // math.prod(sizes))
