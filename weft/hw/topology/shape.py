"""The registry of topologies. A topology is one file in `weft/hw/topology/shapes/`, which is imported automatically.

This example registers cliques: groups of directly linked GPUs. Users can then write `--topology clique`, with 4 GPUs in
each clique, or `--topology clique:8x4`, with 8 cliques of 4 GPUs:

    @shape((*PAIRS, "clique.gpus"), ("cliques", "clique.gpus"), {"clique.gpus": Quantity(4, ...)})
    def clique(ranks: int, bytes_per_us: float, latency_us: float, gpus: int) -> Topology: ...

`PAIRS` are the keys of the bandwidth and the latency of a direct link.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from weft.hw import keys
from weft.hw.quantity import Quantity
from weft.hw.topology.links import Topology

PORTS, PAIRS = ("link.port_usable", "link.port_latency"), ("link.pair_usable", "link.pair_latency")
"""The keys of the links of GPUs on a switch, and of GPUs that are linked directly. Missing latencies are 0."""
SHAPES: dict[str, Shape] = {}
_Builder = TypeVar("_Builder", bound=Callable[..., Topology])


@dataclass(frozen=True)
class Shape:
    """A registered topology, with the name of its builder.

    keys: the keys, in machine and topology files, of the numbers that the builder takes after `ranks`.
    sizes: a word for each size in the topology's name. In `clique:8x4` they are "cliques" and "clique.gpus". If a word
        is in `keys`, the size is the value of this key for the builder. The product of the sizes is the number of
        ranks.
    given: {key: default number}, for users who pass the topology's name without sizes.
    more: True if a name may have more sizes than `sizes`, such as `torus:8x8x8`. Then the sizes between the first and the last
        are further arguments of the builder.
    """

    builder: Callable[..., Topology]
    keys: tuple[str, ...]
    sizes: tuple[str, ...]
    given: Mapping[str, Quantity]
    more: bool = False

    @cached_property
    def form(self) -> str:
        return f"{self.builder.__name__}:{'x'.join(size.rpartition('.')[2].upper() for size in self.sizes)}"

    def sizes_of(self, name: str) -> tuple[int, ...]:
        """Return the sizes in a name such as `torus:16x8`. Raise `ValueError` if the number of sizes is wrong."""
        shape, _, text = name.partition(":")
        numbers = tuple(map(int, text.split("x"))) if re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})*", text) else ()
        if len(numbers) < len(self.sizes) or (len(numbers) > len(self.sizes) and not self.more):
            example = f"{shape}:{'x'.join(['2', '16', '8'][-len(self.sizes) :])}"
            further = f", or more sizes, such as {shape}:8x8x8" if self.more else ""
            raise ValueError(
                f"topology {name!r}: write {self.form}, such as {example}{further}; sizes are from 1 to 999999"
            )
        return numbers


def shape(
    numbers: tuple[str, ...],
    sizes: tuple[str, ...] = ("ranks",),
    given: Mapping[str, Quantity] | None = None,
    more: bool = False,
) -> Callable[[_Builder], _Builder]:
    """Register the decorated function as a topology under the function's name.

    numbers: the keys of the numbers that the function takes after `ranks` (`Shape.keys`). A key that is not yet legal
        in machine files becomes legal for integers.
    sizes, given, more: as for `Shape`.
    """

    def register(builder: _Builder) -> _Builder:
        SHAPES[builder.__name__] = Shape(builder, numbers, sizes, given or {}, more)
        for key in numbers:
            keys.add_count(key)
        return builder

    return register
