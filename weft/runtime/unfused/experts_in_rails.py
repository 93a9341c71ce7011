"""Expert parallelism on CPU ranks of several hosts, for small messages: tokens are sent with the messages of the rendezvous,
in which ranks compare their calls.

    dispatch   The messages of the rendezvous contain the tokens and their numbers. While tokens for other hosts are in
               transit, each rank multiplies the tokens from ranks of its host, if they are many
    combine    Each rank multiplies its rows. The messages of the rendezvous contain the products

A call needs no other collective (`weft.runtime.rails_all_to_all`). GEMMs may be split by rows, so results may differ by
rounding from the results of a single GEMM per expert.
"""

from __future__ import annotations

import os

import torch

from weft.runtime.rails import Rails
from weft.runtime.rails_all_to_all import AllToAll, AllToAllInto
from weft.runtime.unfused import grouped_matmul
from weft.runtime.unfused.cells import Cells, by_expert, by_rank, multiply, put, run, runs
from weft.runtime.unfused.permutation import in_expert_order
from weft.runtime.unfused.sizes import Sizes
from weft.runtime.unfused.turn import Turn
from weft.schedule.kernels import LibraryGroupedMatmul

_MANY_ROWS = 32
"""The rows from this host get their own GEMM, while other rows are in transit, if an expert has at least this many of
them on average. With fewer rows, reading the weights a second time costs more than the overlap saves.
"""


def dispatch_in_rails(
    tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, max_rows: int | None, turn: Turn, name: str, return_x: bool,
    most_bytes: int,
) -> tuple[tuple[torch.Tensor, torch.Tensor | None] | None, torch.Tensor, int]:  # fmt: skip
    """Exchange the numbers of tokens in the rendezvous of CPU ranks and, if the tokens fit into its messages, run
    `experts.all_to_all_matmul`. Return three values:

    - Its results, or None if a rank has too many tokens.
    - The number of tokens from each rank for each expert of this rank, int64 [ranks, experts].
    - The bytes of the tokens of the rank with the most tokens.

    Every host must have the same number of ranks, at least two (`weft.runtime.rails`).

    splits: the number of this rank's tokens for each expert of all ranks, int64, of up to `TABLE_BYTES`.
    name: the name of the exchange, for error texts.
    most_bytes: the largest number of bytes of tokens that a rank may send with the messages of the rendezvous, equal on all
        ranks. The limit is lower if less memory is reserved.
    Other arguments: as for `experts.all_to_all_matmul`.
    """
    rails = turn.rails
    assert rails is not None
    levels, n, room = rails.levels, w.shape[2], min(most_bytes, rails.rows_bytes)
    here: torch.Tensor
    y_here: torch.Tensor | None = None

    def place(rows: int, counts: Cells) -> torch.Tensor:
        nonlocal here
        here = tokens.new_empty(rows, tokens.shape[1])
        return here

    def multiply_near(here: torch.Tensor, counts: Cells) -> None:
        nonlocal y_here
        if len(here) >= _MANY_ROWS * w.shape[0]:
            y_here = here.new_empty(len(here), n)
            os.sched_yield()  # let gloo's threads, which share this core, send and receive
            for _ in multiply(here, by_rank(counts), counts, w, y_here, by_expert(counts)):
                os.sched_yield()

    table = splits.view(rails.comm.world_size, -1)
    exchange = AllToAll(rails, tokens, table, lambda memory: memory.copy_(tokens), place, multiply_near, room)
    nbytes = turn.ride(name, exchange, exchange.nbytes)
    came, received = exchange.counts, exchange.received
    if nbytes > room:
        if nbytes <= most_bytes:
            rails.reserve_rows(nbytes)
        return None, received, nbytes
    arriving = [here if host == levels.host else exchange.rows_from(host) for host in range(levels.n_hosts)]
    turn.done(name, here, sum(x.nbytes for x in arriving if x is not here))
    total = int(came.sum())
    rows = total if max_rows is None else max_rows
    y = tokens.new_empty(max(total, rows), n)
    arrived = torch.cat(arriving) if return_x or y_here is None else None
    if y_here is None:
        assert arrived is not None
        run(grouped_matmul.multiply(in_expert_order(arrived, Sizes(splits, received)), w, came.sum(0).tolist(), y))
    else:
        y_at = by_expert(came)
        for host, x in enumerate(arriving):
            ranks = slice(host * levels.per_host, (host + 1) * levels.per_host)
            if x is here:
                put(y, y_here, runs(y_at[ranks].T, came[ranks].T))
            else:
                run(multiply(x, by_rank(came[ranks]), came[ranks], w, y, y_at[ranks]))
    turn.done(LibraryGroupedMatmul.kind, y)
    return (y[:rows], arrived if return_x else None), received, nbytes


class CombineInRails:
    """A call of `experts.matmul_all_to_all`, with the same arguments, whose products are sent with the messages of the
    rendezvous.

    name: the name of the exchange, for timelines.
    """

    def __init__(
        self, rails: Rails, h: torch.Tensor, w: torch.Tensor, sizes: Sizes, rows: int, turn: Turn, name: str
    ) -> None:  # fmt: skip
        self._rails, self._h, self._w, self._turn, self._name = rails, h, w, turn, name
        self._y, self._room = h.new_empty(rows, w.shape[2]), rails.rows_bytes
        expected = sizes.splits.view(sizes.received.shape)
        self.cargo = AllToAllInto(rails, sizes.received, self._multiply, expected, self._y, by_expert=True)

    @property
    def sends(self) -> int:
        """The number of rows that this rank sends, including rows for itself."""
        return self.cargo.rows

    def _multiply(self, made: torch.Tensor) -> None:
        """Write the products to `made`, in the order of experts."""
        run(grouped_matmul.multiply(self._h[: len(made)], self._w, self.cargo.of_experts, made))
        self._turn.done(LibraryGroupedMatmul.kind, made)

    def end(self, nbytes: int) -> torch.Tensor | None:
        """Return the result [rows, N], after the rendezvous has shown that all ranks make the same call. Return None if a rank
        has too many rows, which then have not been sent.

        nbytes: the largest `cargo.nbytes` of all ranks.
        """
        if nbytes > self._room:
            self._rails.reserve_rows(nbytes)
            return None
        return self._turn.done(self._name, self._y, self.cargo.end())
