"""The `Work` of matmul_all_to_all, and wrong tables of counts for it."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

import weft
import weft.ops.matmul_all_to_all  # imported now, so that no interrupted call imports it

from .bad import DEADLINES, Form, each, put
from .work import AllToAllMatmul, Given, Results


def _received(change: Callable[[torch.Tensor], torch.Tensor]) -> Form:
    """Return a form that changes the counts of rows to send. h gets as many rows as the new counts need."""

    def form(given: Given) -> Given:
        received, h = _counts(given["received"], change), given["h"].detach()
        rows = int(received.sum())
        h = torch.cat([h, h.new_ones(max(rows - len(h), 0), h.shape[1])])[:rows]
        return {**given, "received": received, "h": h.requires_grad_(given["h"].requires_grad)}

    return form


def _splits(change: Callable[[torch.Tensor], torch.Tensor]) -> Form:
    """Return a form that changes the counts of rows to receive. `rows` becomes their new total."""

    def form(given: Given) -> Given:
        splits = _counts(given["splits"], change)
        return {**given, "splits": splits, "rows": None if given["rows"] is None else int(splits.sum())}

    return form


def _counts(table: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    changed = change(table.clone().flatten()).reshape(table.shape)
    if torch.equal(changed, table):
        raise ValueError("it leaves these counts as they are")
    return changed


def _moved(by: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a change of counts: the largest count becomes lower by 1, and the count `by` places later higher by 1.

    With by=0, no count becomes higher.
    """

    def change(counts: torch.Tensor) -> torch.Tensor:
        at = int(counts.argmax())
        if counts[at] > 0:
            counts[at] -= 1
            counts[(at + by) % len(counts)] += bool(by)
        return counts

    return change


def _more(counts: torch.Tensor) -> torch.Tensor:
    counts[-1] += 1
    return counts


class MatmulAllToAll(AllToAllMatmul):
    """The work of matmul_all_to_all, which sends the rows of `AllToAllMatmul` back.

    rows: whether the CPU is given the number of tokens.
    """

    padded = False
    arguments = ("h", "w_experts", "received", "splits")

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        return {"rows": device == "cuda" or rng.random() < 0.3}

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        by = "kernel" if options["rows"] else "dma"
        return [f"combine[chunks=2,by={by}]", "combine[chunks=1,by=store]", f"combine_by_expert[chunks=2,by={by}]"]

    @classmethod
    def bad_values(cls, options: Given) -> list[Form]:
        return [
            each("splits", lambda s: s + 1), each("splits", lambda s: s - 100), each("received", lambda r: r + 1),
            each("received", lambda r: r - 100), put("rows", -1), put("rows", "all"), put("capacity", 0),
            put("schedule", "combin"), *DEADLINES,
        ]  # fmt: skip

    @classmethod
    def bad_sizes(cls, options: Given) -> list[Form]:
        return [
            each("splits", lambda s: s[:-1]), each("received", lambda r: r[:-1]), each("received", lambda r: r.flatten()),
            each("w_experts", lambda w: w[:, :-1]), each("w_experts", lambda w: w[0]), each("h", lambda h: h.flatten()),
            each("h", lambda h: h[:, :-1]), each("h", lambda h: h[None]),
        ]  # fmt: skip

    @classmethod
    def bad_dtypes(cls, options: Given) -> list[Form]:
        return [
            each("splits", lambda s: s.float()), each("received", lambda r: r.bool()), each("w_experts", lambda w: w.double()),
            each("h", lambda h: h.to(torch.complex64)), each("h", lambda h: h.long()),
        ]  # fmt: skip

    @classmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        return [{"rows": not options["rows"]}, {"capacity": 3}]

    @classmethod
    def other_tables(cls) -> list[Form]:
        """Return forms that change one rank's table of counts.

        They add a row, remove a row, move a row to the next expert or to the next rank, move all rows to the next rank,
        or remove all rows.
        """
        next_expert, next_rank = _moved(1), _moved(cls.EXPERTS)
        changes = [_more, _moved(0), next_expert, next_rank, lambda counts: counts.roll(cls.EXPERTS), torch.zeros_like]
        return [form(change) for form in (_received, _splits) for change in changes]

    def _received(self, rank: int, n: int) -> torch.Tensor:
        mine = slice(rank * self.EXPERTS, (rank + 1) * self.EXPERTS)
        return torch.stack([self._splits(source, n)[mine] for source in range(self.world)])

    def _h(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(2, rank, n, (int(self._received(rank, n).sum()), self._k(n)))

    def _segments(self, rows: torch.Tensor, rank: int, n: int) -> dict[tuple[int, int], torch.Tensor]:
        """Split rows in the order of the h of `rank`. Return {(source, local expert): rows}."""
        parts = iter(rows.split(self._received(rank, n).t().flatten().tolist()))
        return {(source, e): next(parts) for e in range(self.EXPERTS) for source in range(self.world)}

    def inputs(self, n: int) -> Given:
        splits = self._splits(self.rank, n)
        return {
            "h": self.here(self._h(self.rank, n)).requires_grad_(self.backward),
            "w_experts": self.here(self._weights(self.rank, n)).requires_grad_(self.backward),
            "received": self._received(self.rank, n).to(self.device), "splits": splits.to(self.device),
            "rows": int(splits.sum()) if self.options["rows"] else None,
            "capacity": self.options.get("capacity", 2) * (3, 12)[self.size] * self.EXPERTS * self.world, **self.call_options(),
        }  # fmt: skip

    def forward(self, given: Given) -> Results:
        return [weft.matmul_all_to_all(group=self.group, **given)]

    def expected(self, n: int) -> Results:
        parts = []
        for rank in range(self.world):
            segments, weights = self._segments(self._h(rank, n), rank, n), self._weights(rank, n)
            parts += [segments[self.rank, e] @ w for e, w in enumerate(weights)]
        return [torch.cat(parts)]

    def wanted(self, given: Given) -> Results:
        return [given["h"], given["w_experts"]]

    def grads(self, n: int) -> tuple[Results, Results]:
        weighing = [self.numbers(4, r, n, (int(self._splits(r, n).sum()), self.N), 2) for r in range(self.world)]
        came = [g.split(self._splits(r, n).tolist()) for r, g in enumerate(weighing)]
        h, experts = self._segments(self._h(self.rank, n), self.rank, n), range(self.EXPERTS)
        g = {(source, e): came[source][self.rank * self.EXPERTS + e] for source, e in h}
        weights, sources = self._weights(self.rank, n), range(self.world)
        of_h = torch.cat([g[source, e] @ weights[e].t() for e in experts for source in sources])
        of_w = [torch.stack([h[source, e].t() @ g[source, e] for source in sources]).sum(0) for e in experts]
        return [self.here(weighing[self.rank])], [of_h, torch.stack(of_w)]
