"""This rank's parts of tables, and how to copy them from whole tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.arguments import check_tensor
from weft.embedding.partition import Partition, TablePart


def parts_of_rank(partition: Partition, rank: int) -> list[TablePart]:
    """Return the parts of sharded tables on `rank`, followed by the data-parallel tables as whole parts."""
    found = [part for part in partition.parts if part.rank == rank]
    for number in partition.replicated_tables:
        table = partition.tables[number]
        found.append(TablePart(number, rank, 0, table.num_embeddings, 0, table.embedding_dim))
    return found


def load_full(
    partition: Partition, rank: int, parts: Sequence[tuple[TablePart, torch.Tensor]], weights: Mapping[str, torch.Tensor]
) -> None:  # fmt: skip
    """Copy this rank's parts from whole tables.

    Raise `ValueError` for missing, unknown or misshapen tables, before anything is copied.

    parts: (part, its weight) for each part of this rank. weights: whole tables, by table name.
    """
    names = [table.name for table in partition.tables]
    if unknown := [name for name in weights if name not in set(names)]:
        raise ValueError(f"weights has {unknown[0]!r}, which is not a table: the tables are {', '.join(names)}")
    for part, _ in parts:
        table = partition.tables[part.table]
        if table.name not in weights:
            raise ValueError(
                f"weights has {', '.join(weights)}, but not table {table.name!r} of rank {rank}: pass all tables of "
                "this rank"
            )
        check_tensor(f"weights[{table.name!r}]", weights[table.name])
        given, wanted = list(weights[table.name].shape), [table.num_embeddings, table.embedding_dim]
        if given != wanted:
            raise ValueError(f"weights[{table.name!r}] has shape {given}: pass the whole table, {wanted}")
    with torch.no_grad():
        for part, weight in parts:
            whole = weights[partition.tables[part.table].name]
            weight.copy_(whole[part.row : part.row + part.rows, part.column : part.column + part.columns])
