"""One rank of the grouped matmul kernel under Triton's interpreter: its rows after the exchange, launches, and their check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    world_size: int
    experts: int  # local ones
    k: int = 32
    n: int = 48
    dtype: torch.dtype = torch.float16
    rows: str = "uneven"  # how many per source and expert: see `splits_of`
    transposed: bool = False
    parts: int = 1  # of a tile, when it is stored
    block_n: int = 32
    tokens: str = "contiguous"  # or "strided", "misaligned"
    splits: int = 1  # the most programs that share a tile of the last round, of 2 * per_sm programs
    per_sm: int = 1
    rounds: int = 1  # of their parts
    swap: bool = False

    @property
    def config(self) -> Any:
        from weft.runtime.cuda import grouped_matmul

        shared = self.splits, self.rounds
        return grouped_matmul.Config(16, self.block_n, 16, 2, 4, 2, self.parts, self.per_sm, *shared, self.swap)


class Rank:
    """The rows of one rank after the exchange, and its expected products, in float64."""

    def __init__(self, case: Case, rank: int, seed: int) -> None:
        self.case, self.rank = case, rank
        w, e, k = case.world_size, case.experts, case.k
        self.g = torch.Generator().manual_seed(seed)
        splits = torch.stack([self.splits_of(source) for source in range(w)])  # [W, W * E]
        self.splits = splits[rank].clone()
        self.counts = splits[:, rank * e : (rank + 1) * e].clone()
        self.tokens = self.rows_like(self.random(int(self.splits.sum()), k))
        received = self.counts.sum(1)
        self.slot_rows = int(received.max()) + 3
        self.inbox = torch.full((w * self.slot_rows, k), NAN, dtype=case.dtype)
        own_first = int(self.splits[: rank * e].sum())
        self.blocks = []
        for source in range(w):
            block = self.random(int(received[source]), k)
            if source == rank:
                block = self.tokens[own_first : own_first + int(received[source])]
            else:
                self.inbox[(source - rank - 1) % w * self.slot_rows :][: len(block)] = block
            self.blocks.append(block)
        weights = self.random(e * k, case.n).view(e, k, case.n)
        self.w = weights.mT.contiguous().mT if case.transposed else weights

    def splits_of(self, source: int) -> torch.Tensor:
        """Return the number of tokens that `source` sends to each expert of all ranks, int64 [W * E]."""
        experts = self.case.world_size * self.case.experts
        splits = torch.randint(0, 20, (experts,), generator=self.g)
        if self.case.rows == "uneven":
            splits *= torch.rand(experts, generator=self.g) < 0.6
            splits[torch.randint(0, experts, (), generator=self.g)] = 40
        elif self.case.rows == "one takes all":
            splits = torch.where(torch.arange(experts) == experts - 1, splits.sum(), 0)
        elif self.case.rows == "four tiles":
            splits = torch.full((experts,), 64)
        elif self.case.rows == "whole tiles":
            splits = splits // 16 * 16
        elif self.case.rows == "only peers send":
            splits *= torch.arange(experts) // self.case.experts != source
        elif self.case.rows == "none":
            splits *= 0
        return splits

    def random(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self.g).to(self.case.dtype)

    def rows_like(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows in memory of the case's kind: contiguous, strided or misaligned."""
        first, wider = {"contiguous": (0, 0), "strided": (8, 24), "misaligned": (1, 1)}[self.case.tokens]
        place = torch.full((len(rows), rows.shape[1] + wider), NAN, dtype=rows.dtype)
        view = place[:, first : first + rows.shape[1]]
        view.copy_(rows)
        return view

    def segments(self) -> list[tuple[int, int, torch.Tensor]]:
        """Return (source, expert, rows) of each segment, in the order of y."""
        cuts = [block.split(self.counts[source].tolist()) for source, block in enumerate(self.blocks)]
        return [(s, e, cuts[s][e]) for e in range(self.case.experts) for s in range(self.case.world_size)]

    def launch(self, *parts: dict[str, Any], y_rows: int | None = None) -> torch.Tensor:
        """Launch the kernel once for each of `parts`, and return y. Check that memory around y is unchanged.

        parts: options of the launch; "k" is (first column, number of columns) of a piece of K. y_rows: the number of
        rows of y (default: five more than are needed).
        """
        from weft.runtime.cuda import grouped_matmul

        case = self.case
        y_rows = int(self.counts.sum()) + 5 if y_rows is None else y_rows
        around = torch.full((y_rows + 40, case.n), NAN, dtype=case.dtype)
        y = around[16 : 16 + y_rows]
        for part in parts:
            operands, how = (self.tokens, self.inbox, self.w), {**part}
            if how.get("merged"):  # rows sorted by expert, and a few rows after them
                sorted_rows = torch.cat([rows for _, _, rows in self.segments()])
                more = torch.full((4, case.k), NAN, dtype=case.dtype)
                operands = self.rows_like(torch.cat([sorted_rows, more])), self.inbox.clone().fill_(NAN), self.w
            if columns := how.pop("k", None):
                operands = tuple(t.narrow(1, *columns) for t in operands)
            grouped_matmul.launch(
                *operands,
                y,
                self.counts,
                self.splits,
                rank=self.rank,
                slot_rows=self.slot_rows,
                config=case.config,
                **how,
            )
        assert around[:16].isnan().all(), "written before y"
        assert around[16 + y_rows :].isnan().all(), "written beyond y"
        return y

    def check(
        self, y: torch.Tensor, launched: Callable[[int, int], bool] = lambda source, expert: True, added: int = 0
    ) -> None:
        """Compare the launched segments with float64. All other rows must be unchanged.

        added: how often products were added to y, each time with a rounding.
        """
        at = 0
        for source, expert, rows in self.segments():
            place = y[at : at + len(rows)]
            at += len(rows)
            self._check_segment(place, source, expert, rows, launched, added)
        assert y[at:].isnan().all(), "rows that belong to nobody were written"

    def _check_segment(
        self, place: torch.Tensor, source: int, expert: int, rows: torch.Tensor, launched: Callable[[int, int], bool],
        added: int = 0,
    ) -> None:  # fmt: skip
        if not launched(source, expert):
            assert place.isnan().all(), f"source {source}, expert {expert}: written and not launched"
            return
        # The rounding of the result is half a unit in the last place. In bf16 the interpreter truncates, which is a
        # whole unit.
        ulp = torch.finfo(place.dtype).eps * (1.0 if place.dtype == torch.bfloat16 else 0.5)
        x, w = rows[: len(place)].double(), self.w[expert].double()
        wanted = x @ w
        allowed = ulp * wanted.abs() + (2**-20 + added * ulp) * (x.abs() @ w.abs())
        wrong = ~((place.double() - wanted).abs() <= allowed)
        assert not wrong.any(), f"source {source}, expert {expert}: {int(wrong.sum())} of {wrong.numel()} wrong"

    def launch_back(
        self, *parts: dict[str, int], y_rows: int | None = None, outbox_rows: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the kernel with `back` once for each of `parts`, on rows sorted by expert. Return (y, outbox).

        y has a row for each token of this rank. Check that memory around y and the outbox is unchanged.
        """
        from weft.runtime.cuda import grouped_matmul

        case, parts = self.case, parts or ({},)
        segments = [rows for _, _, rows in self.segments()]
        h = self.rows_like(torch.cat([*segments, torch.full((4, case.k), NAN, dtype=case.dtype)]))
        rows = int(self.splits.sum()) if y_rows is None else y_rows, outbox_rows or max(1, self.inbox.shape[0])
        around = [torch.full((count + 40, case.n), NAN, dtype=case.dtype) for count in rows]
        y, outbox = (memory[16 : 16 + count] for memory, count in zip(around, rows, strict=True))
        for part in parts:
            grouped_matmul.launch(
                h, outbox, self.w, y, self.counts, self.splits,
                rank=self.rank, slot_rows=self.slot_rows, config=case.config, back=True, **part,
            )  # fmt: skip
        for memory, count in zip(around, rows, strict=True):
            assert memory[:16].isnan().all(), "written before y or the outbox"
            assert memory[16 + count :].isnan().all(), "written beyond y or the outbox"
        return y, outbox

    def check_back(
        self, y: torch.Tensor, outbox: torch.Tensor, launched: Callable[[int, int], bool] = lambda source, expert: True
    ) -> None:
        """Compare the launched segments with float64. All other rows must be unchanged.

        Rows of a peer are in its slot of the outbox, sorted by expert. Rows of this rank are in y, at the places of the
        tokens for its experts.
        """
        left = [y.clone(), outbox.clone()]
        for source, expert, rows in self.segments():
            inside = int(self.counts[source, :expert].sum())
            if source == self.rank:
                memory, begin, end = left[0], int(self.splits[: self.rank * self.case.experts].sum()), len(left[0])
            else:
                slot = (source - self.rank - 1) % self.case.world_size
                memory, begin, end = left[1], slot * self.slot_rows, min((slot + 1) * self.slot_rows, len(left[1]))
            place = memory[begin + inside : max(begin + inside, min(begin + inside + len(rows), end))]
            self._check_segment(place, source, expert, rows, launched)
            place.fill_(NAN)
        assert all(memory.isnan().all() for memory in left), "rows that belong to nobody were written"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))
