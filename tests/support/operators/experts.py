"""Calls of MoE operators: all_to_all_matmul sends tokens to experts, and matmul_all_to_all sends rows back."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from support import all_to_all_matmul_reference as dispatch
from support import matmul_all_to_all_reference as combine
from support.all_to_all_matmul_reference import Splits, random_splits
from support.on_ranks import F32, NAMES, device, poisoned_memory
from support.operators.call import Call, Case, Tensors

import weft
from weft.builders import AllToAllMatmul, MatmulAllToAll, Problem
from weft.ops import all_to_all_matmul, matmul_all_to_all

Traffic = Literal["uneven", "all to one", "one has nothing", "nothing", "two each"]
MOST = 60
"""The largest number of tokens of a rank."""


@dataclass(frozen=True)
class Experts(Case):
    """The parameters of a call with experts.

    experts: the number of experts of each rank. exact: True if the CPU reads the number of rows of the result.
    transposed: True if weights are stored by columns.
    """

    experts: int = 2
    dtype: torch.dtype = F32
    traffic: Traffic = "uneven"
    exact: bool = True
    transposed: bool = False
    k: int = 16
    n: int = 8


def traffic(kind: Traffic, world: int, experts: int, seed: int) -> Splits:
    """Return the number of tokens that each rank sends to each expert. The numbers differ for each seed."""
    numbers = random.Random(seed)
    rows = [0 if kind == "nothing" else numbers.randrange(MOST) for _ in range(world)]
    if kind == "one has nothing":
        rows[seed % world] = 0
    if kind == "two each":
        return ((2,) * world * experts,) * world
    if kind == "all to one":
        return tuple(tuple(count * (e == seed % (world * experts)) for e in range(world * experts)) for count in rows)
    return random_splits(world, experts, rows, seed)


class ExpertsCall(Call):
    """A call of a MoE operator. inputs: rows and weights. Splits differ for each seed."""

    atol = 2e-4
    case: Experts

    def __init__(self, case: Experts, group: dist.ProcessGroup, seed: int, splits: Splits | None = None) -> None:
        self.splits = splits or traffic(case.traffic, group.size(), case.experts, seed)
        world, rank = group.size(), group.rank()
        self.splits_here = torch.tensor(self.splits[rank], device=device())
        self.received = combine.received_of(rank, self.splits).to(device())
        self.rows, weights = self.all_rows(case, seed)
        self.weights = weights.to(device()).chunk(world)
        super().__init__(case, group, seed)

    def all_rows(self, case: Experts, seed: int) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Return the rows of all ranks, and the weights of all experts."""
        raise NotImplementedError

    def drawn(self, rank: int) -> Tensors:
        w = self.weights[rank]
        return [self.rows[rank].to(device()), w.mT.contiguous().mT if self.case.transposed else w]

    @property
    def spare(self) -> int:
        """The number of spare rows, which a buffer has in addition to the rows in use."""
        return 0 if self.case.exact else (self.seed + 2) % 3

    @contextlib.contextmanager
    def poisoned(self) -> Iterator[None]:
        with poisoned_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    def impossible(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return invalid arguments, for two ranks with two experts each, K = 8 and N = 3, and two rows for each expert."""
        (x, w), (X, W), splits = self.operands, self.mine, self.splits_here
        size, layout = "must be a number of rows: pass an integer from 0 to 2**40", "pass [E, K=8, N]"
        return {
            "one dimension": ({x: X[0]}, f"{x} has shape (8,): pass ["),
            "three dimensions": ({x: X[None]}, f"{x} has shape (1, 8, 8): pass ["),
            "no tensor": ({x: [1.0]}, f"{x} is a list: pass a torch.Tensor"),
            "strange dtype": ({x: X * 1j, w: W * 1j}, f"{x} is torch.complex64: use one of"),
            "other K": ({w: W[:, :5]}, f"{w} has shape (2, 5, 3): {layout}"),
            "one expert, no dimension": ({w: W[0]}, f"{w} has shape (8, 3): {layout}"),
            "list of experts": ({w: list(W)}, f"{w} is a list: pass a torch.Tensor"),
            "other dtype": ({w: W.half()}, f"{w} is torch.float16 and {x} torch.float32"),
            "splits of floats": ({"splits": splits.float()}, "splits is torch.float32: use torch.int64"),
            "splits of a rank": ({"splits": splits[:2]}, "splits has shape (2,): pass [4], "),
            "splits elsewhere": (
                {"splits": splits.to("meta")},
                f"splits is on meta, but {x} is on cpu: move splits to cpu",
            ),
            "capacity of 64 bits": ({"capacity": 1 << 63}, f"capacity={1 << 63} {size}"),
            "capacity of many bits": ({"capacity": 10**5000}, f"capacity=a number of 16610 bits {size}"),
            "capacity": ({"capacity": 3}, "capacity=3 must be at least the number of "),
            "schedule": ({"schedule": "dispach"}, "no schedule 'dispach'"),
            "deadline": ({"deadline_s": -1}, "deadline_s=-1 must be positive"),
            "timeline": ({"timeline": 3}, "timeline=3 is not a Timeline: pass weft.Timeline()"),
        }

    def different(self) -> dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]]:
        (x, w), (X, W) = self.operands, self.mine
        more = torch.cat((X, X[:, :1]), 1), torch.cat((W, W[:, :1]), 1)
        return {
            "K": ({}, {x: more[0], w: more[1]}, ()),
            "gradients": ({x: X.clone().requires_grad_()}, {}, ()),
            "schedule": ({"schedule": "serial"}, {"schedule": self.case.schedule}, ("schedule serial",)),
        }


class AllToAllMatmulCall(ExpertsCall):
    spec, public = all_to_all_matmul.OPERATOR, staticmethod(weft.all_to_all_matmul)
    operands = ("tokens", "w_experts")

    def all_rows(self, case: Experts, seed: int) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        rows = tuple(map(sum, self.splits))
        p = AllToAllMatmul(
            len(rows), case.experts, rows, case.n, case.k, NAMES[case.dtype], max(rows), splits=self.splits
        )
        return dispatch.inputs(p, seed)

    def arguments(self, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | str) -> dict[str, Any]:
        room = None if self.case.exact else self.come + self.spare
        names = {"group": group, "max_rows": room, "return_received": True, "capacity": MOST}
        return {"tokens": inputs[0], "w_experts": inputs[1], "splits": self.splits_here, **names}

    def results(self, returned: Any) -> Tensors:
        return list(returned)

    def kept(self, results: Tensors) -> Tensors:
        """Return the rows of y that arrived."""
        return [results[0][: self.come]]

    @property
    def come(self) -> int:
        """The number of rows that arrive on this rank."""
        return sum(sum(of[self.rank * self.case.experts : (self.rank + 1) * self.case.experts]) for of in self.splits)

    def check(self, group: dist.ProcessGroup, found: Tensors, expected: tuple[Tensors, Tensors] | None = None) -> None:
        y, received = found
        assert torch.equal(received, self.received)
        assert received.dtype == torch.int64
        assert y.shape[0] == self.come + self.spare
        assert y[self.come :].isnan().all()
        super().check(group, found, expected)

    def reference(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        parts = [x.split(list(of_rank)) for (x, _), of_rank in zip(inputs, self.splits, strict=True)]
        experts, found = self.case.experts, list[Tensors]()
        for rank, (_, ws) in enumerate(inputs):
            found.append([torch.cat([of[rank * experts + e] @ w for e, w in enumerate(ws) for of in parts])])
        return found

    def problem(self) -> Problem:
        case = self.case
        rows = (MOST,) * self.world
        return AllToAllMatmul(self.world, case.experts, rows, case.n, case.k, NAMES[case.dtype], MOST, exact=case.exact)

    def impossible(self) -> dict[str, tuple[dict[str, Any], str]]:
        size = "must be a number of rows: pass an integer from 0 to 2**40"
        return {
            **super().impossible(),
            "max_rows": ({"max_rows": -1}, f"max_rows=-1 {size}"),
            "max_rows of 64 bits": ({"max_rows": 1 << 63}, f"max_rows={1 << 63} {size}"),
            "cannot": (
                {"max_rows": 9, "schedule": "dispatch[by=dma,rest=each]"},
                "the CPU must not wait for sizes",
            ),
        }

    def different(self) -> dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]]:
        (tokens, w), none = self.mine, {"capacity": None}
        three = {
            "w_experts": torch.cat((w, w[:1])),
            "splits": torch.cat((self.splits_here, tokens.new_zeros(2).long())),
        }
        max_rows = ("max_rows given, capacity None", "max_rows not given")
        return {
            **super().different(),
            "max_rows": ({"max_rows": 20, **none}, {"max_rows": None, **none}, max_rows),
            "experts": ({}, three, ()),
        }

    def operations(self, group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
        inputs = [t.clone().requires_grad_() for t in self.mine]
        rest = None, False, group.group_name, "", 0.0
        return [(*inputs, self.splits_here, max_rows, *rest) for max_rows in (self.come, None)]


class MatmulAllToAllCall(ExpertsCall):
    spec, public = matmul_all_to_all.OPERATOR, staticmethod(weft.matmul_all_to_all)
    operands = ("h", "w_experts")

    def all_rows(self, case: Experts, seed: int) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        return combine.inputs(self.splits, case.k, case.n, NAMES[case.dtype], seed)

    def drawn(self, rank: int) -> Tensors:
        """Return h and w of `rank`. After the arrived rows, h has spare rows of NaN."""
        h, w = super().drawn(rank)
        return [torch.cat((h, torch.full((self.spare, self.case.k), torch.nan, dtype=h.dtype, device=h.device))), w]

    def arguments(self, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | str) -> dict[str, Any]:
        rows = None if self.case.exact else sum(self.splits[self.rank])
        tables = {"received": self.received, "splits": self.splits_here}
        return {"h": inputs[0], "w_experts": inputs[1], **tables, "group": group, "rows": rows, "capacity": MOST}

    def reference(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        hs, weights = [h for h, _ in inputs], torch.cat([w for _, w in inputs])
        return [[combine.expected(rank, self.splits, hs, weights)] for rank in range(self.world)]

    def problem(self) -> Problem:
        case = self.case
        rows = (MOST,) * self.world
        return MatmulAllToAll(self.world, case.experts, rows, case.n, case.k, NAMES[case.dtype], MOST, exact=case.exact)

    def impossible(self) -> dict[str, tuple[dict[str, Any], str]]:
        received, size = self.received, "must be a number of rows: pass an integer from 0 to 2**40"
        return {
            **super().impossible(),
            "no table": ({"received": None}, "received is a NoneType: pass a torch.Tensor"),
            "received of floats": ({"received": received.float()}, "received is torch.float32: use torch.int64"),
            "received of one": ({"received": received[0]}, "received has shape (2,): pass [2, 2], for 2 experts"),
            "received elsewhere": (
                {"received": received.to("meta")},
                "received is on meta, but h is on cpu: move received to cpu",
            ),
            "rows": ({"rows": -1}, f"rows=-1 {size}"),
            "cannot": (
                {"rows": 8, "schedule": "combine[chunks=1,by=dma]"},
                "the CPU must not wait for sizes",
            ),
        }

    def different(self) -> dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]]:
        (_, w), none = self.mine, {"capacity": None}
        h, ones = self.mine[0], self.received.new_ones
        tables = {"h": h[:6], "received": ones(2, 3), "splits": ones(6)}
        return {
            **super().different(),
            "rows": ({"rows": 8, **none}, {"rows": None, **none}, ("rows given, capacity None", "rows not given")),
            "experts": ({}, {"w_experts": torch.cat((w, w[:1])), **tables}, ()),
        }

    def operations(self, group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
        inputs, tables = [t.clone().requires_grad_() for t in self.mine], (self.received, self.splits_here)
        tokens = sum(self.splits[self.rank])
        return [(*inputs, *tables, rows, None, None, group.group_name, "", 0.0) for rows in (tokens, None)]
