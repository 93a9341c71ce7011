"""The exchange of rows: ids are sent to the owners of their rows, the owners return the rows, and backward sends
gradients to the owners.

    ids       for each id of this rank's samples: its part of a table, and the row in the part
    sent      the same ids sorted by (rank of the part, part); with `dedup` each distinct id once
    arrived   ids from all ranks, by [part of this rank][source rank]
    rows      the rows of `arrived`, returned in the order of `sent`

The CPU waits once, for the numbers of ids. Each rank tells every peer how many ids it has for each part of the peer,
and also how many ids it has for every rank. So all ranks know how many ids each rank would receive, and all raise if
any rank would receive more than `max_ids`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist

from weft.embedding.partition import Partition
from weft.embedding.tables import EmbeddingSharding
from weft.nn.id_bound import require_bound
from weft.nn.number_exchange import NumberExchange
from weft.nn.partitioned_input import occurrences
from weft.runtime.collectives import all_to_all_single
from weft.runtime.embedding_rows import sums_of_equal
from weft.runtime.unfused.turn import turn_on
from weft.words import counted

_MARKS_PER_KEY = 8  # a longer array of marks takes more time than a sort


@dataclass(frozen=True)
class RowRoute:
    """The routing of one batch's ids to the ranks that own their rows.

    to_sent: for each id of this rank's samples, its index among the ids that were sent.
    order: for each sent id, its index among the ids of this rank's samples; None with `dedup`.
    out, into: the number of ids sent to each rank, and received from each rank.
    counts: the number of received ids for each [source rank][part of this rank], as one list.
    """

    to_sent: torch.Tensor
    order: torch.Tensor | None
    out: list[int]
    into: list[int]
    counts: list[int]

    def of_ids(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the row of each id of this rank's samples. rows: the row of each sent id."""
        return rows.index_select(0, self.to_sent)

    def of_sent(self, grads: torch.Tensor) -> torch.Tensor:
        """Return the gradient of each sent id. With `dedup` it is the sum of the gradients of equal ids.

        grads: the gradient of each id's row, [number of ids, columns].
        """
        if self.order is None:
            return sums_of_equal(self.to_sent, sum(self.out), grads.contiguous())
        return grads.index_select(0, self.order)


class RowDist:
    """The exchange of ids, rows and gradients of rows between ranks, for the parts of tables in `partition`. All ranks must
    call every public method. Before each exchange, CPU ranks compare the tables and the options of the module (`said`).
    """

    def __init__(
        self, partition: Partition, group: dist.ProcessGroup, dedup: bool, max_ids: int | None, deadline_s: float | None,
        said: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.group, self.dedup, self.max_ids, self.deadline_s = group, dedup, max_ids, deadline_s
        self.rank, self.world = group.rank(), group.size()
        self.partition = partition
        order = sorted(range(len(partition.parts)), key=lambda number: partition.parts[number].rank)
        self.place_of_part = {number: place for place, number in enumerate(order)}
        """The *place* of each part of `partition`: its index after parts are sorted by rank."""
        self.parts_of_rank = [[n for n in order if partition.parts[n].rank == rank] for rank in range(self.world)]
        self._most_rows = max(part.rows for part in partition.parts)
        self._words = [len(parts) + self.world for parts in self.parts_of_rank]  # of the numbers sent to each rank
        self._by_kernel: NumberExchange | None = None
        self._what = f"rows of {counted(len(partition.tables), 'table')}"
        # Without this text, modules with the same number of tables would make equal calls, and exchange rows of other tables.
        named = {
            "tables": cast(EmbeddingSharding, partition.sharding).written,
            "placement": partition.shardings,
            **said,
        }
        self._described = "\n".join(f"{name}: {value}" for name, value in named.items())
        self._digest = hashlib.blake2b(self._described.encode(), digest_size=16).hexdigest()

    def send(
        self, places: torch.Tensor, rows: torch.Tensor, bad: Sequence[torch.Tensor] = ()
    ) -> tuple[RowRoute, list[torch.Tensor], list[int]]:
        """Send ids to their owners. Return (the routing, the row numbers that peers request from each part of this
        rank, `bad` as integers).

        places: for each id, the index of its part among all parts sorted by rank (`place_of_part`).
        rows: for each id, its row number in the part. A row number out of range is sent too, and stays out of range.
        bad: integer tensors of one element that the caller needs on the CPU, such as the number of ids out of range.
            They are copied together with the numbers of ids, so that the CPU waits only once.
        """
        if self.dedup:
            # Rows out of range are clamped, so each part has one extra key at both ends. Keys of different parts stay
            # distinct.
            width = self._most_rows + 2
            all_keys = places * width + rows.clamp(-1, self._most_rows) + 1
            keys, to_sent = distinct(all_keys, width * len(self.place_of_part))
            sent_places, sent, order = keys // width, keys % width - 1, None
        else:
            order = places.argsort(stable=True)
            to_sent = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
            sent_places, sent = places[order], rows[order]
        counts = occurrences(sent_places, len(self.place_of_part))
        out, received, numbers = self._numbers(counts, bad)
        own = self.parts_of_rank[self.rank]
        into = [sum(received[r * len(own) : (r + 1) * len(own)]) for r in range(self.world)]
        route = RowRoute(to_sent, order, out, into, received)
        arrived = self._exchanged("ids", sent, out, into)
        return route, self._by_part(arrived, route), numbers

    def _numbers(self, counts: torch.Tensor, bad: Sequence[torch.Tensor]) -> tuple[list[int], list[int], list[int]]:
        """Exchange the numbers of ids. Return (the number of ids to send to each rank, the number of ids that arrive
        from each source rank for each part of this rank, `bad` as integers).

        Raise `RefusedError` on every rank if a rank would receive more than `max_ids` ids.

        counts: the number of this rank's ids for each part, with parts sorted by rank.
        bad: integer tensors of one element, which are copied to the CPU together with the numbers of ids.
        """
        sizes = [len(parts) for parts in self.parts_of_rank]
        of_rank = torch.stack([part.sum() for part in counts.split(sizes)])
        send = torch.cat([torch.cat([part, of_rank]) for part in counts.split(sizes)])
        mine, device = self._words[self.rank], counts.device
        if self._by_kernel is None or self._by_kernel.device != device:
            self._by_kernel = NumberExchange(self.group, device, self._words, self.deadline_s)
        if self._by_kernel.is_ready:
            received = send.new_empty(self.world * mine)
            self._by_kernel.run(send, received)
        else:
            received = self._exchanged("numbers", send, self._words, [mine] * self.world)
        host = torch.cat([received, of_rank, *(one.view(1) for one in bad)]).tolist()
        self._by_kernel.arrived()
        lines = [host[source * mine : (source + 1) * mine] for source in range(self.world)]
        totals = [sum(line[sizes[self.rank] + rank] for line in lines) for rank in range(self.world)]
        if self.max_ids is not None:
            require_bound(totals, self.max_ids, "" if self.dedup else "dedup=True, ")
        end = self.world * mine
        of_parts = [count for line in lines for count in line[: sizes[self.rank]]]
        return host[end : end + self.world], of_parts, host[end + self.world :]

    def back(self, rows: Sequence[torch.Tensor], route: RowRoute) -> torch.Tensor:
        """Return the rows of all sent ids, in the order in which the ids were sent.

        rows: for each part of this rank, the requested rows in the order of arrival.
        """
        return self._exchanged("rows", self._by_source(rows, route), route.into, route.out)

    def to_owners(self, grads: torch.Tensor, route: RowRoute) -> list[torch.Tensor]:
        """Send gradients to the owners of the rows. Return the gradients that arrive for each part of this rank.

        grads: the gradient of each sent id, [number of sent ids, columns].
        """
        return self._by_part(self._exchanged("gradients of rows", grads, route.out, route.into), route)

    def _by_part(self, arrived: torch.Tensor, route: RowRoute) -> list[torch.Tensor]:
        """Regroup rows that arrived from all ranks. Return, for each part of this rank, its rows, concatenated in the order of
        source ranks.
        """
        parts = len(self.parts_of_rank[self.rank])
        blocks = arrived.split(route.counts) if parts else ()
        return [torch.cat([blocks[source * parts + part] for source in range(self.world)]) for part in range(parts)]

    def _by_source(self, of_parts: Sequence[torch.Tensor], route: RowRoute) -> torch.Tensor:
        parts = len(of_parts)
        blocks = [one.split(route.counts[part::parts]) for part, one in enumerate(of_parts)]
        return torch.cat([blocks[part][source] for source in range(self.world) for part in range(parts)])

    def _exchanged(self, what: str, send: torch.Tensor, out: list[int], into: list[int]) -> torch.Tensor:
        if self.world == 1:
            return send
        received = send.new_empty(sum(into), *send.shape[1:])
        exchanged = f"{send.dtype}, {tuple(send.shape[1:])} each" if send.device.type == "cpu" else ""
        turn = turn_on(
            self.group, send.device, self._what, self.deadline_s, f"{self._digest}, {exchanged}",
            lambda: f"{self._described}\nexchanged: {exchanged}",
        )  # fmt: skip
        turn.run(f"all_to_all of {what}", all_to_all_single, received, send.contiguous(), into, out, group=self.group)
        return received


def distinct(keys: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct keys in ascending order, and for each key its index among them. The CPU waits for the device.

    end: a number above all keys. If it is small, the CPU marks the keys in an array, which is faster than a sort.
    """
    if keys.device.type != "cpu" or end > _MARKS_PER_KEY * len(keys):
        return torch.unique(keys, return_inverse=True)
    found = torch.zeros(end, dtype=torch.bool).index_fill_(0, keys, True).nonzero()[:, 0]
    index = torch.empty(end, dtype=torch.int64)
    index[found] = torch.arange(len(found))
    return found, index[keys]


def starts(sizes: Sequence[int]) -> list[int]:
    """Return the positions at which blocks begin if they are concatenated, and the end of the last block.

    sizes: the sizes of the blocks.
    """
    return list(accumulate(sizes, initial=0))
