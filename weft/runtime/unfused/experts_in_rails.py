"""Expert parallelism on CPU ranks of several hosts, for small messages: tokens travel with the messages by which the ranks
    synchronise.

    dispatch   The numbers of tokens, and the tokens, travel with the rendezvous. While tokens for other hosts are in transit,
               each rank multiplies the tokens from ranks of its host

A call needs no other collective (`weft.runtime.rails_all_to_all`). GEMMs are split by rows, so results may differ by
rounding from those of a single GEMM per expert.
"""

from __future__ import annotations

import os

import torch

from weft.runtime.rails_all_to_all import AllToAll
from weft.runtime.unfused.cells import Cells, by_expert, by_rank, multiply, put, run, runs
from weft.runtime.unfused.turn import Turn
from weft.schedule.kernels import LibraryGroupedMatmul


def dispatch_in_rails(
    tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, max_rows: int | None, turn: Turn, name: str, return_x: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor | None] | None, torch.Tensor]:  # fmt: skip
    """Exchange the numbers of tokens in the rendezvous of CPU ranks and, if the tokens fit into its messages, run
    `experts.all_to_all_matmul`. Return its results, and the number of tokens from each rank for each expert of this rank, int64
    [ranks, experts].

    Return None for the results if a rank has too many tokens. Every host must have the same number of ranks, at least two
    (`weft.runtime.rails`).

    splits: the number of this rank's tokens for each expert of all ranks, int64, of up to `TABLE_BYTES`.
    name: the name of the exchange, for error texts. Other arguments: as for `experts.all_to_all_matmul`.
    """
    rails = turn.rails
    assert rails is not None
    levels, n, room = rails.levels, w.shape[2], rails.rows_bytes
    made: list[torch.Tensor] = []

    def multiply_near(rows: list[torch.Tensor], counts: Cells) -> None:
        x = torch.cat(rows)
        y = x.new_empty(len(x), n)
        os.sched_yield()  # let gloo's threads, which share this core, send and receive
        for _ in multiply(x, by_rank(counts), counts, w, y, by_expert(counts)):
            os.sched_yield()
        made.extend((x, y))

    exchange = AllToAll(rails, tokens, splits.view(rails.comm.world_size, -1).numpy(), multiply_near)
    nbytes = turn.ride(name, exchange, tokens.nbytes)
    came = exchange.counts
    received = torch.from_numpy(came)
    if nbytes > room:
        rails.reserve_rows(nbytes)
        return None, received
    here, y_here = made
    arriving = {host: here if host == levels.host else exchange.rows_from(host) for host in range(levels.n_hosts)}
    turn.done(name, here, sum(x.nbytes for x in arriving.values() if x is not here))
    total, y_at = int(came.sum()), by_expert(came)
    rows = total if max_rows is None else max_rows
    y = tokens.new_empty(max(total, rows), n)
    for host, x in arriving.items():
        ranks = slice(host * levels.per_host, (host + 1) * levels.per_host)
        if x is here:
            put(y, y_here, runs(y_at[ranks].T, came[ranks].T))
        else:
            run(multiply(x, by_rank(came[ranks]), came[ranks], w, y, y_at[ranks]))
    turn.done(LibraryGroupedMatmul.kind, y)
    return (y[:rows], torch.cat(list(arriving.values())) if return_x else None), received
