"""This rank's parts of tables, and how to copy them from whole tables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from weft.arguments import check_tensor
from weft.embedding.partition import Partition, TablePart
from weft.embedding.tables import EmbeddingBagConfig
from weft.errors import DisagreementError
from weft.nn.making import on_all_ranks


def parts_of_rank(partition: Partition, rank: int) -> list[TablePart]:
    """Return the parts of sharded tables on `rank`, followed by the data-parallel tables as whole parts."""
    found = [part for part in partition.parts if part.rank == rank]
    for number in partition.replicated_tables:
        table = partition.tables[number]
        found.append(TablePart(number, rank, 0, table.num_embeddings, 0, table.embedding_dim))
    return found


def load_full(
    partition: Partition, parts: Sequence[tuple[TablePart, torch.Tensor]], weights: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup, device: torch.device, deadline_s: float | None,
) -> None:  # fmt: skip
    """Copy this rank's parts from whole tables. If the partition has data-parallel tables, all ranks must make this call,
    so that the copies of these tables cannot become different.

    Raise `ValueError` for missing, unknown or misshapen tables, and `DisagreementError` on every rank if ranks have
    different values for a data-parallel table, before anything is copied.

    parts: (part, its weight) for each part of this rank. weights: whole tables, by table name.
    """
    dtypes = {partition.tables[part.table].name: weight.dtype for part, weight in parts}
    replicated = sorted(partition.tables[number].name for number in partition.replicated_tables)

    def digests() -> dict[str, bytes]:
        check_full(partition.tables, dtypes, dist.get_rank(group), weights)
        return {name: _digest(weights[name].to(dtypes[name])) for name in replicated}

    if not replicated:
        digests()
    else:
        what, failure = "loading weights of data-parallel tables", "weights could not be loaded"
        first, *others = on_all_ranks(digests, what, failure, group, device, deadline_s)
        for other_rank, other in enumerate(others, 1):
            for name, digest in first.items():
                if other[name] != digest:
                    raise DisagreementError(
                        f"ranks 0 and {other_rank} load different values into data-parallel table {name!r}: pass the same "
                        "weights on all ranks"
                    )
    with torch.no_grad():
        for part, weight in parts:
            whole = weights[partition.tables[part.table].name]
            weight.copy_(whole[part.row : part.row + part.rows, part.column : part.column + part.columns])


def check_full(
    tables: Sequence[EmbeddingBagConfig], own: Iterable[str], rank: int, weights: Mapping[str, torch.Tensor]
) -> None:
    """Raise `ValueError` if `weights` has an unknown table, or lacks the whole table for a name in `own`.

    tables: all tables. own: the names of this rank's tables.
    """
    shapes = {table.name: [table.num_embeddings, table.embedding_dim] for table in tables}
    if unknown := [name for name in weights if name not in shapes]:
        raise ValueError(f"weights has {unknown[0]!r}, which is not a table: the tables are {', '.join(shapes)}")
    for name in own:
        if name not in weights:
            given = ", ".join(weights) or "no tables"
            raise ValueError(
                f"weights has {given}, but not table {name!r} of rank {rank}: pass all tables of this rank"
            )
        check_tensor(f"weights[{name!r}]", weights[name])
        if (shape := list(weights[name].shape)) != shapes[name]:
            raise ValueError(f"weights[{name!r}] has shape {shape}: pass the whole table, {shapes[name]}")


def _digest(values: torch.Tensor) -> bytes:
    """Return a hash of the bits of a tensor, by which ranks compare their copies. The CPU waits for the device."""
    return hashlib.blake2b(values.detach().cpu().contiguous().view(torch.uint8).numpy().data, digest_size=16).digest()
