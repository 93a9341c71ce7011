"""Pooling overlapped with the all-to-all, for CPU ranks on several hosts: samples of other hosts are pooled and sent first.

The samples of each rank on another host are divided into 2 or 4 pieces. Each piece is sent while the next piece is being
pooled. The samples of this host's ranks are pooled and exchanged while the last pieces are being sent. Ranks synchronise only
in the call's rendezvous, and then run the same exchanges in the same order. The pooled vectors are bitwise equal to the
vectors of a call without pieces.

More pieces hide more of the pooling, but each piece is an exchange of all ranks. Assume that it takes a time L to pool the
samples of other hosts, and as long to send their vectors, and that each exchange has a latency of t. Then p pieces take L + L /
p + p t, which is least for p = sqrt(L / t). So there are 4 pieces if the measured links give an L / t of at least 16, else 2.

Source: "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 3.2 (remote slices first).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch

from weft.embedding.check import CheckedInput
from weft.embedding.jagged import JaggedInput
from weft.embedding.plan import EmbeddingPlan
from weft.embedding.tables import column_runs
from weft.runtime.cpu import embedding as cpu
from weft.runtime.links import network_of
from weft.runtime.unfused.far_first import PIECES, begin_piece, ending_the_group, ranks_far, ranks_near
from weft.runtime.unfused.turn import Pending, Turn
from weft.symm import Communicator

_NAME = "all_to_all of pooled vectors"
_MANY = 4  # pieces of large transfers


class FarFirst:
    """embedding_all_to_all for CPU ranks on several hosts. It pools and sends the samples of other hosts first.

    plan: the plan of the calls.
    alone: the plan by which this rank pools: it has only this rank's tables, as in a group of one rank. None if this
        rank has no tables.

    Benchmarks set two attributes. pinned_pieces: the number of pieces; None to choose 2 or 4. far_last: True to pool the
    samples of this host first.
    """

    pinned_pieces: int | None = None
    far_last = False

    def __init__(self, plan: EmbeddingPlan, alone: EmbeddingPlan | None, comm: Communicator) -> None:
        self.plan, self._alone, self.comm = plan, alone, comm
        self._columns, self._runs = plan.sharding.columns_of_ranks, column_runs(plan.sharding)
        self._ranks = range(comm.world_size)
        self._hosts = [[rank for rank in self._ranks if comm.hosts[rank] == host] for host in dict.fromkeys(comm.hosts)]
        self._shares = len(set(comm.hosts)) < comm.world_size  # True if some ranks share a host

    def most_gain_s(self, sizes: tuple[int, ...]) -> float:
        """Return an upper bound, in seconds, on the time that a call saves if it sends the samples of other hosts first. It is
        the predicted time of the transfer between hosts, minus the latency of the pieces. Return infinity if the links have not
        been measured.

        sizes: the number of samples of each rank.
        """
        if (network := network_of(self.comm)) is None:
            return math.inf
        return (network.exchange_us(self._far_bytes(sizes)) - self._pieces(sizes) * network.round_trip_us / 2) / 1e6

    def _pieces(self, sizes: tuple[int, ...]) -> int:
        if self.pinned_pieces is not None or (network := network_of(self.comm)) is None:
            return self.pinned_pieces or PIECES
        many = network.exchange_us(self._far_bytes(sizes)) >= _MANY**2 * network.round_trip_us
        return _MANY if many else PIECES

    def _far_bytes(self, sizes: tuple[int, ...]) -> int:
        """Return the bytes that the busiest host sends to other hosts."""
        columns, item = self._columns, self.plan.output_dtype.itemsize
        far = (sum(columns[r] for r in host) * (sum(sizes) - sum(sizes[r] for r in host)) for host in self._hosts)
        return max(far) * item

    def run(
        self, weights: list[torch.Tensor], jagged: JaggedInput, checked: CheckedInput, turn: Turn
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """Run one call, after its rendezvous. Return the output [batch_sizes[rank], total_dim], and a function that warns of
        bad indices, or None if no index is bad.

        turn: runs the exchanges, with the call's deadline.
        """
        with ending_the_group(self.comm, _NAME):
            return self._run(weights, jagged, checked, turn)

    def _run(
        self, weights: list[torch.Tensor], jagged: JaggedInput, checked: CheckedInput, turn: Turn
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        plan, alone, sizes = self.plan, self._alone, checked.batch_sizes
        out = jagged.values.new_empty((sizes[self.comm.rank], plan.sharding.total_dim), dtype=plan.output_dtype)
        table = None if alone is None else cpu.slot_table(alone.sharding, 0, weights, checked.key_of_slot)
        count = self._pieces(sizes)
        cuts = [[size * piece // count for piece in range(count + 1)] for size in sizes]
        begun, found = [], []
        far: tuple[int | None, ...] = tuple(range(count))
        for phase in (None, *far) if self.far_last else (*far, None):
            sent, counts = self._pool(table, jagged, cuts, phase)
            turn.done("pool for this host" if phase is None else "pool for other hosts", sent)
            begun.append((phase, *self._exchange(sent, cuts, phase, turn)))
            found.append(counts)
        for phase, work, received, came in begun:
            if work is not None:
                work.wait()
            turn.done("all_to_all", received)
            self._unpack(received, came, out[_rows(cuts[self.comm.rank], phase)])
        turn.done("unpack", out)
        bad = sum(counts[0] for counts in found)
        if alone is None or not bad:
            return out, None
        first = min((counts for counts in found if counts[0]), key=lambda counts: counts[1:4])
        return out, partial(cpu.warn_of_bad_indices, alone, 0, (bad, *first[1:]))

    def _of(self, phase: int | None) -> list[int]:
        """Return the ranks whose samples are pooled in a phase of the call.

        phase: the number of a piece, which has samples of ranks on other hosts; None for the samples of this host's ranks.
        """
        return ranks_near(self.comm) if phase is None else ranks_far(self.comm)

    def _pool(
        self, table: np.ndarray | None, jagged: JaggedInput, cuts: list[list[int]], phase: int | None
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Pool the samples of one piece. Return the vectors, [samples, columns], in the order of ranks, and the eight numbers
        that `run_native` returns.

        table: the result of `slot_table`; None if this rank has no tables.
        cuts: for each rank r, how its samples are divided into pieces: piece i has the samples cuts[r][i] to cuts[r][i + 1].
        phase: the number of the piece to pool; None for the samples of this host's ranks.
        """
        plan, columns = self.plan, self._columns[self.comm.rank]
        pieces = [end - begin for cut in cuts for begin, end in pairwise(cut)]
        count = len(cuts[0]) - 1
        of_rank = range(count) if phase is None else [phase]
        taken = [r * count + piece for r in self._of(phase) for piece in of_rank]
        starts = list(accumulate((pieces[i] for i in taken), initial=0))
        pooled = jagged.values.new_empty((starts[-1], columns), dtype=plan.sharding.dtype)
        counts: tuple[int, ...] = (0,)
        if self._alone is not None and table is not None and pooled.numel():
            outputs, row_bytes = [0] * len(pieces), columns * pooled.itemsize
            for i, start in zip(taken, starts, strict=False):
                outputs[i] = pooled.data_ptr() + start * row_bytes
            counts = cpu.run_native(self._alone, 0, table, jagged, tuple(pieces), outputs, [0] * len(pieces), 0)
        return pooled.to(plan.output_dtype), counts

    def _exchange(
        self, sent: torch.Tensor, cuts: list[list[int]], phase: int | None, turn: Turn
    ) -> tuple[Pending | None, torch.Tensor, list[int]]:
        """Begin to exchange pooled vectors. Return the work handle (None if there is nothing to wait for), the receive
        buffer, and the number of elements from each rank.

        sent: this rank's vectors, from `_pool`.
        cuts: for each rank r, how its samples are divided into pieces: piece i has the samples cuts[r][i] to cuts[r][i +
            1].
        phase: the number of the piece to exchange; None for the samples of this host's ranks.
        """
        rank, taken = self.comm.rank, self._of(phase)
        rows = [len(range(*_rows(cut, phase).indices(cut[-1]))) for cut in cuts]
        came = [rows[rank] * self._columns[r] * (r in taken) for r in self._ranks]
        leaving = [rows[r] * self._columns[rank] * (r in taken) for r in self._ranks]
        if phase is None and not self._shares:
            return None, sent.view(-1), came
        received = sent.new_empty(sum(came))
        work = begin_piece(self.comm, turn, _NAME, received, sent.view(-1), came, leaving, phase is not None)
        return work, received, came

    def _unpack(self, received: torch.Tensor, came: list[int], out: torch.Tensor) -> None:
        """Copy received vectors into their columns of the output `out`, [samples, total_dim].

        received: the vectors from all ranks, flat. came: the number of elements from each rank.
        """
        parts, column = received.split(came), 0
        for rank, first, end in self._runs:
            if came[rank]:
                part = parts[rank].view(len(out), self._columns[rank])
                out[:, column : column + end - first].copy_(part[:, first:end])
            column += end - first


def _rows(cut: list[int], phase: int | None) -> slice:
    """Return the range of a rank's samples that belong to piece number `phase`. With None, return the range of all its samples.

    cut: how the rank's samples are divided into pieces: piece i has the samples cut[i] to cut[i + 1].
    """
    return slice(0, cut[-1]) if phase is None else slice(cut[phase], cut[phase + 1])
