"""Expert parallelism on the CPU ranks of one host: rows travel with the rendezvous before the call, through shared memory.

    dispatch   The numbers of tokens, and the tokens, travel with one rendezvous. Tokens are copied to the order of experts
    combine    Each rank multiplies its rows. Then the products travel with the rendezvous in which ranks compare their tables of
               counts. They are copied to the order of this rank's tokens

So a call waits for its peers once, and copies each row twice (`weft.runtime.shared_collectives`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft import _core
from weft.runtime.rails import Cargo
from weft.runtime.unfused.grouped_matmul import grouped_matmul
from weft.runtime.unfused.permutation import expert_order, reorder
from weft.runtime.unfused.sizes import Sizes
from weft.runtime.unfused.turn import Turn
from weft.schedule.kernels import LibraryGroupedMatmul, Permute


def has_room(turn: Turn, splits: torch.Tensor) -> bool:
    """True if rows can travel with the rendezvous: on CPU ranks of one host, with a usual number of experts. Equal on all
    ranks.
    """
    native = turn.native
    return native is not None and _core.SharedCollective.has_room(native, splits.numel())


def dispatch(
    tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, max_rows: int | None, turn: Turn, names: tuple[str, str],
    return_x: bool, rank: int,
) -> tuple[torch.Tensor, Sizes, torch.Tensor | None]:  # fmt: skip
    """Run `experts.dispatched`, if `has_room`. The arguments and results are as for `experts.dispatched`.

    names: the names of the exchanges of splits and of tokens, for errors and timelines. rank: this rank.
    """
    assert turn.native is not None
    experts, row_bytes = w.shape[0], tokens.shape[1] * tokens.itemsize
    is_sorted = not return_x or experts == 1  # copies put tokens into the order of experts
    shared = _core.SharedCollective.exchange_rows(
        turn.native, tokens.data_ptr(), splits.tolist(), row_bytes, from_by_expert=False, to_by_expert=is_sorted
    )
    received, arrived, came, rows = splits, tokens, 0, 0

    def ready() -> None:
        nonlocal received, arrived, came, rows
        received = torch.tensor(shared.counts(), device="cpu").view(-1, experts)
        turn.done(names[0], received, splits.nbytes // len(received) * (len(received) - 1))
        came = int(received.sum())
        rows = came if max_rows is None else max_rows
        arrived = tokens.new_empty(max(came, rows) if is_sorted else came, tokens.shape[1])
        shared.place(arrived.data_ptr(), came * row_bytes)

    turn.carry(names[0], shared, ready)
    sizes = Sizes(splits, received)
    turn.done(names[1], arrived, (len(tokens) - sizes.host.sent[rank]) * row_bytes)
    x = arrived[:rows] if is_sorted else turn.done(Permute.kind, _by_expert(arrived, received, rows))
    y = grouped_matmul(x, w, sizes, cut=rows < came)
    return turn.done(LibraryGroupedMatmul.kind, y), sizes, arrived[:came] if return_x else None


def _by_expert(arrived: torch.Tensor, received: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows, K]: the rows `arrived`, which are in the order of arrival, sorted by expert. If they are more than `rows`,
    the last rows are missing.
    """
    x = arrived.new_empty(rows, arrived.shape[1])
    if rows < len(arrived):
        return torch.index_select(arrived, 0, expert_order(received, len(arrived))[:rows], out=x)
    return reorder(arrived, received, x, to_ranks=False)


class Combined:
    """A call of `experts.matmul_all_to_all`, with the same arguments, whose products travel with the rendezvous: a
    `weft.runtime.unfused.begun.Begun`. Requires `has_room`.

    name: the name of the exchange, for timelines. rank: this rank.
    """

    number = 0
    cargo: Cargo | None = None
    collective: _core.SharedCollective | None

    def __init__(
        self, h: torch.Tensor, w: torch.Tensor, sizes: Sizes, rows: int, turn: Turn, name: str, rank: int
    ) -> None:
        assert turn.native is not None
        self._turn, self._name, came = turn, name, sum(sizes.host.came)
        self._sent_bytes = (came - sizes.host.came[rank]) * w.shape[2] * h.itemsize
        self._made = turn.done(LibraryGroupedMatmul.kind, grouped_matmul(h[:came], w, sizes))
        self._y = h.new_empty(rows, w.shape[2])
        counts = sizes.tables[1].ravel().tolist()
        self._shared = self.collective = _core.SharedCollective.exchange_rows(
            turn.native, self._made.data_ptr(), counts, w.shape[2] * h.itemsize, from_by_expert=True, to_by_expert=False
        )
        self._shared.place(self._y.data_ptr(), self._y.nbytes)

    def alone(self) -> Iterator[None]:
        yield from ()

    def end(self, numbers: list[int] | None) -> list[torch.Tensor]:
        assert numbers is not None, "the data have not travelled"
        return [self._turn.done(self._name, self._y, self._sent_bytes)]

    def run(self) -> torch.Tensor:
        """Run the whole call with a rendezvous of its own. Return y [rows, N], the results for this rank's tokens."""
        self._turn.carry(self._name, self._shared, lambda: None)
        return self.end([])[0]
