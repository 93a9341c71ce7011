"""Rows and columns of GPUs; each row and each column is a ring.

Routes go along the row first (dimension-ordered routing). If two ranks are half a ring apart, both directions are equally long.
Then half of the bytes take each direction, as with adaptive routing, but the transfer is no faster than one link.
"""

import itertools

from weft.hw.quantity import Quantity
from weft.hw.topology.links import Link, Route, Topology
from weft.hw.topology.shape import PAIRS, shape


class Torus(Topology):
    """A torus whose links are of the kinds "row" and "column". A route uses row links first.

    dims: the numbers of columns and rows of the torus.
    """

    def _found(self, source: int, target: int) -> tuple[Route, ...]:
        columns, rows = self.dims
        row, along = divmod(source, columns)
        to_row, to_along = divmod(target, columns)
        first = [
            [("row " + sign, row * columns + (along + i * step) % columns) for i in range(count)]
            for sign, step, count in _ways(to_along - along, columns)
        ]
        then = [
            [("column " + sign, (row + i * step) % rows * columns + to_along) for i in range(count)]
            for sign, step, count in _ways(to_row - row, rows)
        ]
        return tuple(tuple(self.by_place[place] for place in a + b) for a, b in itertools.product(first, then))


def _ways(distance: int, ring: int) -> list[tuple[str, int, int]]:
    """Return each shortest way along a ring of `ring` ranks to the rank at `distance`, as (sign, step, number of
    links).

    sign, step: "+1" and 1 in the direction of ascending ranks, "-1" and -1 in the other direction.
    """
    up, down = distance % ring, -distance % ring
    if up == down and up and ring > 2:
        return [("+1", 1, up), ("-1", -1, down)]
    return [("+1", 1, up)] if up <= down else [("-1", -1, down)]


_COLUMNS = Quantity(4, "1", "assumed", "a default: for another number, write torus:COLUMNSxROWS or a file of your own")


@shape((*PAIRS, "torus.columns"), ("torus.columns", "rows"), given={"torus.columns": _COLUMNS})
def torus(ranks: int, bytes_per_us: float, latency_us: float, columns: int) -> Topology:
    """Return a torus: a ring along each row of `columns` ranks, and along each column. Routes go along the row first.

    bytes_per_us, latency_us: the bandwidth and the latency of each link.
    """
    if ranks % columns:
        raise ValueError(f"a torus with rows of {columns} ranks cannot have {ranks} ranks: use a multiple of {columns}")
    links = []
    for rank in range(ranks):
        row = rank - rank % columns
        # In a ring of two, both neighbours are the same rank.
        along = [(f"row {step:+d}", row + (rank + step) % columns) for step in (1, -1)[: columns - 1]]
        along += [(f"column {n:+d}", (rank + n * columns) % ranks) for n in (1, -1)[: ranks // columns - 1]]
        links += [Link(kind, rank, rank, target, bytes_per_us, latency_us) for kind, target in along]
    return Torus(ranks, tuple(links), dims=(columns, ranks // columns))
