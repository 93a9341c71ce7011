"""Operators whose schedules `test_schedule_gemms.py` checks: problems, random inputs and expected results.

Inputs are small whole numbers, whose sums are exact in any order, so results are compared for equality.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from schedule_checks import OfRun, Small
from schedule_interpreter import Tensors

from weft.builders import (
    AllGatherMatmul,
    AllGatherMatmulGradients,
    MatmulAllGather,
    MatmulAllGatherGradients,
    MatmulAllReduce,
    MatmulReduceScatter,
    Scaled,
    ScaledMatmulReduceScatter,
)

Run = tuple[list[Tensors], list[Tensors]]


class Case(NamedTuple):
    """A kind of problem.

    problems: the problems to check. `usual`: the problems that `make test` checks.
    of_run: a function that draws the inputs of a run, and returns (inputs, results), each for every rank.
    overlapping: a function that returns the builders of a problem on several ranks, besides serial.
    small: a function that draws a small problem; its arguments draw a whole number up to a limit, and a bool.
    """

    problems: tuple[Any, ...]
    usual: tuple[Any, ...]
    of_run: OfRun
    overlapping: Callable[[Any], set[str]]
    small: Callable[[Callable[[int], int], Callable[[], bool]], Any] | None = None


GATHER = (
    AllGatherMatmul.even(6, 3, 4, 1),
    AllGatherMatmul.even(16, 3, 8, 2),
    AllGatherMatmul(2, (8, 8), (3, 5, 1), 9, "fp32", return_gathered=True),
    AllGatherMatmul(2, (5, 0), (3,), 4, "fp16"),
    AllGatherMatmul(3, (7, 7, 7), (2, 3), 8, "bf16"),
    AllGatherMatmul(3, (2, 5, 1), (2, 3), 4, "fp32", return_gathered=True),
    AllGatherMatmul.even(20, 2, 6, 4),
    AllGatherMatmul(4, (4, 4, 4, 4), (2, 2), 5, "fp32", return_gathered=True),
    AllGatherMatmul.even(64, 2, 8, 8),
)
BY_ROW = Scaled("row", ("bf16", "fp32"), (True, False), (False, True))
BY_TENSOR = Scaled("tensor", ("bf16",), (False,), (False,))
SCALED_GATHER = (
    AllGatherMatmul(1, (5,), (16, 32), 16, "fp8", scaled=BY_ROW),
    AllGatherMatmul(2, (6, 6), (16, 32), 16, "fp8", scaled=BY_ROW),
    AllGatherMatmul(3, (2, 5, 1), (16, 32), 16, "fp8", return_gathered=True, scaled=BY_ROW),
    AllGatherMatmul(4, (4, 4, 4, 4), (16,), 32, "fp8", scaled=BY_TENSOR),
)


def of_gather(p: AllGatherMatmul, small: Small) -> Run:
    def of_rank(rows: int) -> Tensors:
        found = {"x_shard": small(rows, p.k)} | {f"w{i}": small(p.k, n) for i, n in enumerate(p.n)}
        if p.scaled is not None:
            by_row = p.scaled.by == "row"
            found["x_scale"] = small(rows if by_row else 1, 1)
            found |= {f"w_scale{i}": small(1, n if by_row else 1) for i, n in enumerate(p.n)}
            found |= {f"bias{i}": small(1, n) for i, n in enumerate(p.n) if p.scaled.biased[i]}
        return found

    inputs = [of_rank(rows) for rows in p.rows]
    x = np.concatenate([tensors["x_shard"] for tensors in inputs])
    scale = np.concatenate([t["x_scale"] for t in inputs]) if p.scaled and p.scaled.by == "row" else None

    def product(t: Tensors, i: int) -> np.ndarray:  # with a scale per tensor, each rank applies its own scale
        of_x = t.get("x_scale", np.ones(())) if scale is None else scale
        return np.asarray((x * of_x) @ (t[f"w{i}"] * t.get(f"w_scale{i}", 1.0)) + t.get(f"bias{i}", 0.0))

    gathered = {"x": x} if p.return_gathered else {}
    return inputs, [{f"y{i}": product(t, i) for i in range(len(p.n))} | gathered for t in inputs]


def builders_of_gather(p: AllGatherMatmul) -> set[str]:
    ficco = {"ficco_1d", "ficco_1d_collective"} | (set() if p.scaled else {"ficco_2d", "ficco_2d_collective"})
    return {"gather", "shard"} | (ficco if len(set(p.rows)) == 1 and not p.return_gathered else set())


def small_gather(upto: Callable[[int], int], either: Callable[[], bool]) -> AllGatherMatmul:
    world = 1 + upto(3)
    rows = [upto(9)] * world if either() else [upto(9) for _ in range(world)]
    return AllGatherMatmul(world, tuple(rows), tuple(upto(4) for _ in range(1 + upto(2))), upto(9), "fp32", either())


SCATTER = (
    MatmulReduceScatter(1, 5, 3, 4, "fp32"),
    MatmulReduceScatter(2, 14, 3, 4, "bf16"),
    MatmulReduceScatter(2, 600, 270, 2, "fp16"),  # several chunks of whole tiles, the last of which is smaller
    MatmulReduceScatter(3, 15, 2, 3, "bf16"),
    MatmulReduceScatter(4, 36, 17, 3, "fp32"),
    MatmulReduceScatter(8, 32, 3, 2, "bf16"),
)
SCALED_SCATTER = (
    ScaledMatmulReduceScatter(1, 5, 32, 16, "fp32", "row", False, True),
    ScaledMatmulReduceScatter(2, 14, 16, 16, "bf16", "row", True, False),
    ScaledMatmulReduceScatter(2, 14, 16, 32, "fp32", "tensor", False, True),
    ScaledMatmulReduceScatter(4, 36, 16, 16, "fp16", "row", False, False),
)


def of_scatter(p: MatmulReduceScatter, small: Small) -> Run:
    def of_rank() -> Tensors:
        found = {"x": small(p.m, p.k), "w": small(p.k, p.n)}
        if isinstance(p, ScaledMatmulReduceScatter):
            rows, columns = (p.m, p.n) if p.by == "row" else (1, 1)
            found |= {"x_scale": small(rows, 1), "w_scale": small(1, columns)}
            found |= {"bias": small(1, p.n)} if p.biased else {}
        return found

    def product(t: Tensors) -> np.ndarray:
        scaled = (t["x"] * t.get("x_scale", 1.0)) @ (t["w"] * t.get("w_scale", 1.0))
        return np.asarray(scaled + t.get("bias", 0.0))

    inputs = [of_rank() for _ in range(p.world_size)]
    return inputs, [{"y": part} for part in np.split(np.asarray(sum(map(product, inputs))), p.world_size)]


def builders_of_scatter(p: MatmulReduceScatter) -> set[str]:
    ring = {"ring"} if p.world_size > 2 else set()
    return {"scatter", "direct", "tracked", "pulled", "collective"} | ring


def small_scatter(upto: Callable[[int], int], either: Callable[[], bool]) -> MatmulReduceScatter:
    world = 1 + upto(3)
    return MatmulReduceScatter(world, upto(40) * world, upto(40), upto(3), "fp32")


REDUCE = (
    MatmulAllReduce(1, 5, 3, 4, "fp32"),
    MatmulAllReduce(2, 14, 3, 4, "bf16"),
    MatmulAllReduce(2, 601, 270, 2, "fp16"),
    MatmulAllReduce(3, 15, 2, 3, "bf16"),
    MatmulAllReduce(4, 5, 17, 3, "fp32"),  # the third rank has one row, and the last none
    MatmulAllReduce(2, 13, 3, 4, "bf16", bias=True, residual=True),
    MatmulAllReduce(3, 18, 2, 3, "fp32", residual=True),
    MatmulAllReduce(4, 1, 2, 3, "fp32", bias=True),
    MatmulAllReduce(1, 5, 3, 4, "fp32", eps=1e-6),
    MatmulAllReduce(2, 13, 3, 4, "bf16", bias=True, residual=True, eps=0.5),
    MatmulAllReduce(3, 19, 5, 3, "fp32", residual=True, eps=1e-6),
    MatmulAllReduce(4, 20, 17, 3, "fp16", eps=2.0),
    MatmulAllReduce(8, 30, 3, 2, "bf16"),
)


def of_reduce(p: MatmulAllReduce, small: Small) -> Run:
    following = {"bias": small(1, p.n)} if p.bias else {}
    following |= {"residual": small(p.m, p.n)} if p.residual else {}
    norm = {"norm": small(1, p.n)} if p.eps is not None else {}
    inputs = [{"x": small(p.m, p.k), "w": small(p.k, p.n), **following, **norm} for _ in range(p.world_size)]
    y = np.asarray(sum(t["x"] @ t["w"] for t in inputs) + sum(following.values()))
    return inputs, [{**normed(y, t, p.eps), "y": y} for t in inputs]


def normed(y: np.ndarray, given: Tensors, eps: float | None) -> Tensors:
    if eps is None:
        return {}
    return {"normed": y * (1 / np.sqrt((y * y).sum(1, keepdims=True) / max(1, y.shape[1]) + eps)) * given["norm"]}


def builders_of_reduce(p: MatmulAllReduce) -> set[str]:
    chunked, tracked = {"chunked"} if p.m > 1 else set(), {"tracked"} if p.m % p.world_size == 0 else set()
    return {"one_shot", "two_shot", "collective"} | chunked | tracked


def small_reduce(upto: Callable[[int], int], either: Callable[[], bool]) -> MatmulAllReduce:
    return MatmulAllReduce(1 + upto(4), upto(40), upto(40), upto(3), "fp32", eps=0.25 if either() else None)


SIZES = ((1, 5, 3, 4, "fp32"), (2, 14, 3, 4, "bf16"), (2, 601, 270, 2, "fp16"), (3, 1, 2, 3, "bf16"), (4, 5, 17, 3, "fp32"),
         (8, 15, 3, 2, "bf16"))  # fmt: skip
JOIN = tuple(MatmulAllGather(*sizes, columns) for sizes in SIZES for columns in (False, True))


def of_join(p: MatmulAllGather, small: Small) -> Run:
    inputs = [{"x": small(p.m, p.k), "w": small(p.k, p.n)} for _ in range(p.world_size)]
    whole = np.concatenate([t["x"] @ t["w"] for t in inputs], axis=int(p.columns))
    return inputs, [{"y": whole} for _ in inputs]


def small_join(upto: Callable[[int], int], either: Callable[[], bool]) -> MatmulAllGather:
    return MatmulAllGather(1 + upto(4), upto(40), upto(40), upto(3), "fp32", either())


GATHER_GRADIENTS = (
    AllGatherMatmulGradients(1, 5, (3,), 4, "fp32"),
    AllGatherMatmulGradients(2, 14, (3, 2), 4, "bf16"),
    AllGatherMatmulGradients(3, 15, (2, 5, 1), 3, "fp16"),
    AllGatherMatmulGradients(4, 36, (7,), 3, "fp32"),
    AllGatherMatmulGradients(8, 16, (3, 1), 2, "bf16"),
)


def of_gather_gradients(p: AllGatherMatmulGradients, small: Small) -> Run:
    ranks = range(p.world_size)
    xs, gs = [small(p.rows, p.k) for _ in ranks], [[small(p.m, n) for n in p.n] for _ in ranks]
    ws = [[small(n, p.k) for n in p.n] for _ in ranks]
    total = sum(g @ w for of_g, of_w in zip(gs, ws, strict=True) for g, w in zip(of_g, of_w, strict=True))
    inputs = [
        {"x_shard": xs[r]}
        | {f"g{i}": g for i, g in enumerate(gs[r])}
        | {f"gt{i}": g.T for i, g in enumerate(gs[r])}
        | {f"wt{i}": w for i, w in enumerate(ws[r])}
        for r in ranks
    ]
    parts = np.split(np.asarray(total), p.world_size)
    return inputs, [
        {"grad_x": parts[r]} | {f"grad_wt{i}": g.T @ np.concatenate(xs) for i, g in enumerate(gs[r])} for r in ranks
    ]


SIZES_OF_GRADIENTS = ((1, 5, 3, 4, "fp32"), (2, 14, 9, 4, "bf16"), (3, 11, 8, 3, "fp16"), (4, 1, 2, 3, "fp32"),
                      (8, 9, 10, 2, "bf16"))  # fmt: skip
JOIN_GRADIENTS = tuple(
    MatmulAllGatherGradients(*sizes, columns) for sizes in SIZES_OF_GRADIENTS for columns in (False, True)
)


def of_join_gradients(p: MatmulAllGatherGradients, small: Small) -> Run:
    inputs = [{"g": small(*p.shape), "xt": small(p.k, p.m), "wt": small(p.n, p.k)} for _ in range(p.world_size)]
    parts = np.split(np.sum([one["g"] for one in inputs], axis=0), p.world_size, axis=int(p.columns))
    return inputs, [
        {"grad_x": own @ one["wt"], "grad_w": one["xt"] @ own} for own, one in zip(parts, inputs, strict=True)
    ]


def small_join_gradients(upto: Callable[[int], int], either: Callable[[], bool]) -> MatmulAllGatherGradients:
    return MatmulAllGatherGradients(1 + upto(4), upto(12), upto(12), upto(3), "fp32", either())


CASES = {
    "all_gather_matmul": Case(GATHER, (*GATHER[:4], GATHER[5]), of_gather, builders_of_gather, small_gather),
    "all_gather_scaled_matmul": Case(SCALED_GATHER, SCALED_GATHER[:3], of_gather, builders_of_gather),
    "matmul_reduce_scatter": Case(SCATTER, SCATTER[:3], of_scatter, builders_of_scatter, small_scatter),
    "scaled_matmul_reduce_scatter": Case(SCALED_SCATTER, SCALED_SCATTER[:3], of_scatter, lambda _: {"direct", "scatter"}),
    "matmul_all_reduce": Case(
        REDUCE, (*REDUCE[:3:2], *REDUCE[8:-1:2]), of_reduce, builders_of_reduce, small_reduce
    ),
    "matmul_all_gather": Case(JOIN, JOIN[:8], of_join, lambda _: {"direct", "tracked"}, small_join),
    "all_gather_matmul_gradients": Case(
        GATHER_GRADIENTS, GATHER_GRADIENTS, of_gather_gradients, lambda _: {"direct"}
    ),
    "matmul_all_gather_gradients": Case(
        JOIN_GRADIENTS, JOIN_GRADIENTS[:-2], of_join_gradients, lambda _: {"direct"}, small_join_gradients
    ),
}  # fmt: skip
