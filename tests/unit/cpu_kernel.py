"""Calls of the native CPU kernel of embedding_all_to_all, with several ranks inside one process.

Every rank's output is an ordinary tensor. The kernel is called once per rank, with the addresses of all outputs.
Results must be bit-exact: rows are widened to fp32 and added one after another in the bag's order, starting with +0.
The product with a weight is rounded before it is added (no fused multiply-add). For a mean, the sum is divided by the
length. Half types are rounded to nearest, ties to even.

`reference` does exactly this in numpy. So results must have the same bits for all transports, orders, numbers of ranks,
slice sizes, numbers of threads and instruction sets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from weft import _core
from weft.embedding.hashing import hash_ids

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIRECT, PUT = 0, 1
IGNORE, WARNING, FATAL = 0, 1, 2


@dataclass
class Slot:
    table: int
    feature: int
    mean: bool
    owner: int
    column: int = 0


@dataclass
class Problem:
    """Tables, slots and the sparse input of every feature for the global batch."""

    tables: list[torch.Tensor]
    slots: list[Slot]
    lengths: list[np.ndarray]  # per feature, [batch]
    values: list[np.ndarray]  # per feature, [sum of lengths]
    weights: list[np.ndarray] | None
    batch_sizes: tuple[int, ...]
    index_dtype: type = np.int64
    offset_dtype: type = np.int64
    total_dim: int = field(init=False)

    def __post_init__(self) -> None:
        column = 0
        for slot in self.slots:
            slot.column = column
            column += self.tables[slot.table].shape[1]
        self.total_dim = column

    @property
    def world(self) -> int:
        return len(self.batch_sizes)

    def rows(self, feature: int, sample: int) -> slice:
        ends = np.cumsum(self.lengths[feature])
        return slice(int(ends[sample] - self.lengths[feature][sample]), int(ends[sample]))


def problem(
    seed: int = 0,
    *,
    dims: tuple[int, ...] = (16, 5, 64),
    rows: int = 37,
    batch_sizes: tuple[int, ...] = (6, 3),
    longest: int = 4,
    dtype: torch.dtype = torch.float32,
    weighted: bool = False,
    means: bool = True,
    shared_feature: bool = False,
    two_features_on_first: bool = False,
    index_dtype: type = np.int64,
    offset_dtype: type = np.int64,
    owners: tuple[int, ...] | None = None,
) -> Problem:
    rng = np.random.default_rng(seed)
    world, batch = len(batch_sizes), sum(batch_sizes)
    tables = [
        torch.from_numpy(rng.standard_normal((rows + t, d)).astype(np.float32)).to(dtype) for t, d in enumerate(dims)
    ]
    pairs = [(0, len(dims))] if two_features_on_first else []
    pairs += [(t, 0 if shared_feature else t) for t in range(len(dims))]
    slots = [
        Slot(
            table, feature, bool(means and i % 2), (owners or (lambda: tuple(rng.integers(0, world, len(pairs))))())[i]
        )
        for i, (table, feature) in enumerate(pairs)
    ]
    features = len(dims) + 1
    lengths = [rng.integers(0, longest + 1, batch) for _ in range(features)]
    values = [rng.integers(0, rows, int(n.sum())) for n in lengths]
    weights = [rng.standard_normal(len(v)).astype(np.float32) for v in values] if weighted else None
    return Problem(tables, slots, lengths, values, weights, batch_sizes, index_dtype, offset_dtype)


@dataclass
class Result:
    outputs: list[torch.Tensor]
    counts: list[tuple[int, ...]]  # for each rank, the counts that the kernel returned
    flags: list[list[np.ndarray]]  # [destination][source]
    slices: list[int]  # for each rank, its number of slices per sample


def run(
    p: Problem,
    *,
    transport: int = DIRECT,
    remote_first: bool = True,
    slice_size: int = 32,
    hash: bool = False,
    bounds: int = WARNING,
    threads: int = 1,
    epoch: int = 1,
    isa: str = "",
    timelines: list[np.ndarray] | None = None,
) -> Result:
    """Make the calls of all ranks one after another. Outputs are full of NaN, with guard rows around them. The values
    of each rank are surrounded by indices that would count as bad.
    """
    dtype = p.tables[0].dtype
    guarded = [torch.full((n + 2, p.total_dim), torch.nan, dtype=dtype) for n in p.batch_sizes]
    outputs = [g[1:-1] for g in guarded]
    slots_of = [[s for s in p.slots if s.owner == rank] for rank in range(p.world)]
    arrays, slices = [], []
    for own in slots_of:
        keys = list(dict.fromkeys(s.feature for s in own))
        lines = [
            (p.tables[s.table].data_ptr(), *p.tables[s.table].shape, keys.index(s.feature), s.column, s.mean)
            for s in own
        ]
        arrays.append((keys, np.array(lines, dtype=np.int64).reshape(-1, 6)))
        slices.append(len(_core.slice_runs(arrays[-1][1], slice_size)))
    flags = [[np.zeros(max(n * slices[src], 1), dtype=np.int64) for src in range(p.world)] for n in p.batch_sizes]
    counts = []
    for rank, (keys, lines) in enumerate(arrays):
        outside = np.full(8, -(2**30))
        values = np.concatenate([outside, *(p.values[k] for k in keys), outside]).astype(p.index_dtype)
        lengths = np.concatenate([p.lengths[k] for k in keys] or [np.zeros(0)])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(p.offset_dtype)
        weights = (
            np.concatenate([p.weights[k] for k in keys] or [np.zeros(0)]).astype(np.float32) if p.weights else None
        )
        counts.append(
            _core.embedding_all_to_all(
                slots=lines,
                values=values[8:].ctypes.data,
                values_bits=values.itemsize * 8,
                n_values=len(values) - 16,
                offsets=offsets.ctypes.data,
                offsets_bits=offsets.itemsize * 8,
                per_sample_weights=0 if weights is None else weights.ctypes.data,
                batch_starts=np.concatenate([[0], np.cumsum(p.batch_sizes)]).astype(np.int64),
                rank=rank,
                outputs=np.array([o.data_ptr() for o in outputs], dtype=np.int64),
                output_stride=p.total_dim,
                dtype=DTYPES.index(dtype),
                transport=transport,
                remote_first=remote_first,
                slice_size=slice_size,
                hash=hash,
                bounds=bounds,
                n_threads=threads,
                flags=np.array([flags[dest][rank].ctypes.data for dest in range(p.world)], dtype=np.int64),
                epoch=epoch,
                timeline=None if timelines is None else timelines[rank],
                isa=isa,
            )
        )
    for g in guarded:
        assert g[0].isnan().all(), "the row before an output was written"
        assert g[-1].isnan().all(), "the row after an output was written"
    return Result(outputs, counts, flags, slices)


def reference(p: Problem, *, hash: bool = False) -> torch.Tensor:
    """Compute the expected output by a loop in bag order: [global batch, total_dim] in the tables' dtype."""
    out = torch.zeros(sum(p.batch_sizes), p.total_dim, dtype=p.tables[0].dtype)
    for slot in p.slots:
        table = p.tables[slot.table].float().numpy()
        for sample in range(len(out)):
            bag = p.rows(slot.feature, sample)
            ids = p.values[slot.feature][bag]
            picked = hash_ids(torch.from_numpy(ids), len(table)).numpy() if hash else ids
            total = np.zeros(table.shape[1], dtype=np.float32)
            for i, row in enumerate(picked):
                x = table[row] if 0 <= row < len(table) else np.zeros_like(total)
                total += x if p.weights is None else x * p.weights[slot.feature][bag][i]
            if slot.mean and len(ids) > 0:
                total /= np.float32(len(ids))
            out[sample, slot.column : slot.column + len(total)] = torch.from_numpy(total).to(out.dtype)
    return out


def assert_same_bits(result: Result, wanted: torch.Tensor) -> None:
    got = torch.cat(result.outputs)
    as_bits = torch.int32 if got.element_size() == 4 else torch.int16
    different = (got.view(as_bits) != wanted.view(as_bits)).nonzero()
    assert len(different) == 0, (
        f"first of {len(different)} differences at {different[0].tolist()}: {got[tuple(different[0])]}"
    )
