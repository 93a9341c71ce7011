"""Realistic configurations of embedding + all-to-all, and their scaling to fit a machine.

`embedding_all_to_all.toml` has the configurations and their sources. A `Scale` shrinks the batch, and the rows of
tables that have more than `SMALL_TABLE` rows. It keeps columns, bag lengths and the number of tables, which determine
the access pattern.

If ids are uniform, the batch and the rows have separate factors. The batch shrinks until a call is short enough, and
the rows shrink until the tables fit into memory. If ids follow Zipf's law, batch and rows have the same factor, so that
ids repeat as often as in the original.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F

from weft.embedding import EmbeddingBagConfig, EmbeddingSharding, place_tables
from weft.reading import parse_toml
from weft.words import counted


@dataclass(frozen=True)
class Bag:
    """The distribution of the number of ids in a bag: uniform from `least` to `most`."""

    least: int
    most: int

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    def draw(self, samples: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(self.least, self.most + 1, (samples,), generator=generator, device=generator.device)


@dataclass(frozen=True)
class Zipf:
    """The distribution of row ids: Zipf's law with this exponent; 0 is uniform."""

    exponent: float

    def draw(self, rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
        u = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
        power = (1 - self.exponent) or 1e-8  # exponent 1: approximates the limit, an exponential, to 1e-7
        rank = (u * ((rows + 1) ** power - 1) + 1) ** (1 / power)
        rank = (rank.long() - 1).clamp_(0, rows - 1)  # rounding may reach rows + 1
        return (rank * _coprime(rows)) % rows


def jagged_input(
    bags: list[Bag], rows: list[int], distribution: Zipf, samples: int, tables: list[int], seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Draw the ids that `samples` samples look up in each of several tables. Return (values, offsets), as for
    `nn.EmbeddingBag`.

    values: the ids, int64 [n]. offsets: the index in values at which each bag begins, and n at the end, int64
    [len(tables) * samples + 1]. All bags of the first table come first.

    bags, rows: the distribution of bag lengths and the number of rows of each table. tables: the number of each table
    in the whole model. It is part of the random seed, so that a table's input does not depend on the number of ranks.
    """
    nothing = torch.zeros(0, dtype=torch.int64, device=device)  # for a rank without tables
    lengths, values = [nothing], [nothing]
    for bag, table_rows, table in zip(bags, rows, tables, strict=True):
        generator = torch.Generator(device).manual_seed(1_000_003 * seed + table)
        lengths.append(bag.draw(samples, generator))
        values.append(distribution.draw(table_rows, int(lengths[-1].sum()), generator))
    return torch.cat(values), F.pad(torch.cat(lengths).cumsum(0), (1, 0))


def _coprime(rows: int) -> int:
    factor = 2_654_435_761 % rows or 1
    while math.gcd(factor, rows) != 1:
        factor += 1
    return factor


SMALL_TABLE = 500  # rows; tables this small fit any cache, and shrinking them would only change how often a row repeats


@dataclass(frozen=True)
class TableShape:
    rows: int
    dim: int
    bags: Bag


@dataclass(frozen=True)
class Scale:
    """The factors by which the batch and the rows of tables are multiplied, above 0 and at most 1."""

    batch: Fraction = Fraction(1)
    rows: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        for what in (self.batch, self.rows):
            if not 0 < what <= 1:
                raise ValueError(f"scale={float(what):g} must be above 0 and at most 1: it shrinks batch and tables")

    def __str__(self) -> str:
        if self.batch == self.rows:
            return f"scaled by {self.batch}" if self.batch != 1 else "not scaled"
        return f"batch scaled by {self.batch}, rows of tables by {self.rows}"


FULL = Scale()


@dataclass(frozen=True)
class EmbeddingPreset:
    name: str
    about: str
    tables: tuple[TableShape, ...]  # all tables; with tables_per_rank, the tables of each rank
    tables_per_rank: bool
    global_batch: int
    indices: Zipf = Zipf(0)
    slice_size: int | None = None  # None: the operator's default

    def config(self, world_size: int, scale: Scale = FULL, dtype: torch.dtype = torch.float32) -> EmbeddingConfig:
        """Return the configuration of this preset on `world_size` ranks. Tables are distributed over ranks by their cost."""
        shapes = self.tables * (world_size if self.tables_per_rank else 1)
        tables = tuple(
            EmbeddingBagConfig(_scaled(shape.rows, scale.rows), shape.dim, f"table{i}", (f"feature{i}",), "sum", dtype)
            for i, shape in enumerate(shapes)
        )
        sharding = place_tables(tables, world_size, rows_read=[shape.bags.mean for shape in shapes])
        batch_sizes = shared_out(max(world_size, round(self.global_batch * scale.batch)), world_size)
        return EmbeddingConfig(self, sharding, tuple(shape.bags for shape in shapes), batch_sizes, scale)


def shared_out(batch: int, world_size: int) -> tuple[int, ...]:
    """Divide the samples of a global batch among ranks. Return the number of samples of each rank. The first ranks get the
    remainder of the division.
    """
    return tuple(batch // world_size + (r < batch % world_size) for r in range(world_size))


@dataclass(frozen=True)
class EmbeddingConfig:
    """A preset for a given number of ranks and scale: the rank of each table, the tables' bags, and the batch size of each
    rank.
    """

    preset: EmbeddingPreset
    sharding: EmbeddingSharding
    bags: tuple[Bag, ...]
    batch_sizes: tuple[int, ...]
    scale: Scale

    @property
    def global_batch(self) -> int:
        return sum(self.batch_sizes)

    @property
    def itemsize(self) -> int:
        return self.sharding.dtype.itemsize

    def table_bytes(self, rank: int) -> int:
        """Return the bytes of the tables that `rank` owns."""
        return sum(self.sharding.tables[t].nbytes for t in self.sharding.local_tables(rank))

    def expected_rows_bytes(self, rank: int) -> float:
        """Return the mean bytes of table rows that `rank` reads in a call."""
        return self.global_batch * sum(
            self.bags[t].mean * self.sharding.tables[t].embedding_dim * self.itemsize
            for t in self.sharding.local_tables(rank)
        )

    def describe(self) -> str:
        tables = self.sharding.tables
        rows = [t.num_embeddings for t in tables]
        dims = sorted({t.embedding_dim for t in tables})
        mean = sum(b.mean for b in self.bags) / len(self.bags)
        return (
            f"{counted(len(tables), 'table')} of {_span(min(rows), max(rows))} rows x D {_span(dims[0], dims[-1])}, "
            f"global batch {self.global_batch}, {mean:.3g} {'index' if mean == 1 else 'indices'} a bag, "
            f"{counted(len(self.batch_sizes), 'rank')}"
        )


def fitting_scale(
    preset: EmbeddingPreset, world_size: int, dtype: torch.dtype, *, table_bytes: float, rows_bytes: float = math.inf,
    output_bytes: float = math.inf,
) -> Scale:  # fmt: skip
    """Return two factors 1/2^k, for the batch and for the table rows: the largest factors with which no rank exceeds
    the arguments' limits. If the preset draws ids by Zipf's law, both factors are equal.

    table_bytes: the most bytes of a rank's tables. rows_bytes: the most bytes of rows that a rank reads in a call.
        output_bytes: the most bytes of a rank's output.
    """
    full = preset.config(world_size, FULL, dtype)  # place once, since the scale hardly changes the placement
    owned = [[full.sharding.tables[t] for t in full.sharding.local_tables(r)] for r in range(world_size)]

    def held(tables: list[EmbeddingBagConfig], scale: Fraction) -> int:
        return sum(_scaled(t.num_embeddings, scale) * t.embedding_dim for t in tables) * full.itemsize

    halves = [Fraction(1, 2**k) for k in range(17)]
    rows = next((s for s in halves if all(held(tables, s) <= table_bytes for tables in owned)), halves[-1])
    reads = max(full.expected_rows_bytes(r) for r in range(world_size))
    output = max(full.batch_sizes) * full.sharding.total_dim * full.itemsize
    batch = next((s for s in halves if reads * s <= rows_bytes and output * s <= output_bytes), halves[-1])
    return Scale(min(batch, rows), min(batch, rows)) if preset.indices.exponent else Scale(batch, rows)


def _scaled(rows: int, scale: Fraction) -> int:
    return rows if rows <= SMALL_TABLE else max(SMALL_TABLE, round(rows * scale))


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _tables(of: dict[str, Any]) -> tuple[TableShape, ...]:
    if law := of.get("exponential"):
        count, dims = law["tables"], law["dims"]
        mean = law["indices"] / count / of["global_batch"]
        lengths = [-mean * math.log(1 - (i + 0.5) / count) for i in range(count)]
        # Neighbouring tables must differ in both length and width, so take the sorted lengths in large coprime steps.
        bags: list[Bag] = [Bag(0, max(1, round(2 * lengths[(i * 331) % count]))) for i in range(count)]
        return tuple(TableShape(law["rows"], dims[i % len(dims)], bag) for i, bag in enumerate(bags))
    bags = [Bag(n, n) for n in of.get("fixed", ())] + [Bag(0, n) for n in of.get("uniform", ())]
    return tuple(TableShape(r, of["dim"], bag) for r, bag in zip(of["rows"], bags, strict=True)) * of.get("count", 1)


def _presets() -> Iterator[EmbeddingPreset]:
    text = files("weft.bench.ops").joinpath("embedding_all_to_all.toml").read_text()
    for name, of in parse_toml(text, "embedding_all_to_all.toml").items():
        sizes = of["tables_per_rank"], of["global_batch"], Zipf(of.get("zipf", 0)), of.get("slice_size")
        yield EmbeddingPreset(name, of["about"], _tables(of), *sizes)


PRESETS: dict[str, EmbeddingPreset] = {preset.name: preset for preset in _presets()}


def find_presets(name: str | None) -> tuple[EmbeddingPreset, ...]:
    """Return the presets with these names, separated by commas; all presets if `name` is None.

    A name without a slash selects all presets whose names begin with this name and a slash: "fused-inter" selects five.
    Raise `ValueError` for an unknown name.
    """
    family = {preset: preset.split("/")[0] for preset in PRESETS}
    names = list(PRESETS) if name is None else [part.strip() for part in name.split(",")]
    if unknown := [part for part in names if part not in {*family, *family.values()}]:
        raise ValueError(
            f"no preset {unknown[0]!r}: give one of {', '.join(dict.fromkeys(family.values()))}. (Only GEMMs have shapes M,N,K)"
        )
    return tuple(preset for label, preset in PRESETS.items() if label in names or family[label] in names)
