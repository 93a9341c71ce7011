"""Calls of GEMMs with a collective: matmul_reduce_scatter, matmul_all_reduce, matmul_all_gather and all_gather_matmul."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from support.on_ranks import F32, NAMES, close, data
from support.operators.call import Call, Case, Tensors
from torch.nn.functional import rms_norm

import weft
from weft.builders import (
    AllGatherMatmul,
    MatmulAllGather,
    MatmulAllGatherGradients,
    MatmulAllReduce,
    MatmulReduceScatter,
    Problem,
)
from weft.operator import calls
from weft.ops import (
    all_gather_matmul,
    matmul_all_gather,
    matmul_all_gather_gradients,
    matmul_all_reduce,
    matmul_reduce_scatter,
)


@dataclass(frozen=True)
class Gemm(Case):
    """The parameters of a call with a GEMM. shape: the shape of x on each rank. n: the number of columns of w. dim: the
    dimension that is gathered or scattered.
    """

    shape: tuple[int, ...] = (24, 16)
    n: int = 7
    dtype: torch.dtype = F32
    dim: int = 0
    op: str = "sum"


@dataclass(frozen=True)
class Gathered(Gemm):
    """The parameters of a call of all_gather_matmul. n, more: the numbers of columns of the first weight and of the other
    weights.

    rows: for each rank, the size of its shard in dimension `dim`, if sizes differ. A smaller group uses the first
    entries.
    """

    more: tuple[int, ...] = ()
    rows: tuple[int, ...] | None = None
    return_A: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.n, *self.more)

    def rows_of(self, world: int) -> tuple[int, ...]:
        return self.rows[:world] if self.rows else (self.shape[self.dim],) * world


class Product(Call):
    """A call that computes x @ w on each rank, followed by a collective."""

    operands = ("x", "w")
    case: Gemm

    def drawn(self, rank: int) -> Tensors:
        shape, n, dtype = self.case.shape, self.case.n, self.case.dtype
        return [data(rank, shape, dtype, self.seed), data(rank, (n, shape[-1]), dtype, 50 + self.seed).t()]

    def arguments(self, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | str) -> dict[str, Any]:
        return {"x": inputs[0], "w": inputs[1], "group": group}

    @classmethod
    def sized(cls, case: Gemm, rows: int, world: int) -> Gemm:
        return replace(case, shape=(rows, 128), n=96)

    def impossible(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return invalid arguments for a call with K = 8 and N = 3."""
        (x, w), (X, W) = self.operands, self.mine
        whole, of_8 = torch.int64, torch.float8_e4m3fn
        usable = "use one of torch.float32, torch.float16, torch.bfloat16, torch.float64"
        return {
            "integers": (
                {x: X.to(whole), w: W.to(whole)},
                f"{x} is torch.int64: {usable}" + (", because the ranks' products" if self.reduces else ""),
            ),
            "fp8": ({x: X.to(of_8), w: W.to(of_8)}, f"{x} is torch.float8_e4m3fn: use one of"),
            "complex": ({x: X * 1j, w: W * 1j}, f"{x} is torch.complex64: use one of"),
            "other K": ({w: W[:5]}, f"{w} has shape (5, 3): it must be [K=8, N] to match {x} [..., 8]"),
            "other dtype": ({w: W.half()}, f"{w} is torch.float16 on cpu and {x} is torch.float32 on cpu"),
            "three dimensions": ({w: W[None]}, f"{w} has shape (1, 8, 3): it must be [K=8, N]"),
        }

    def different(self) -> dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]]:
        (x, w), (X, W), name = self.operands, self.mine, self.case.schedule
        return {
            "rows": ({x: X[:4]}, {}, ("[4, 8] @ [8, 3] on each of 2 ranks",)),
            "schedule": ({"schedule": "serial"}, {"schedule": name}, (f"schedule {name}",)),
            "gradients": ({w: W.clone().requires_grad_()}, {}, (f"gradients wanted of ({x}, {w}", "): (False, True")),
        }

    def sizes(self) -> tuple[int, int, int, int, str]:
        m, k = self.case.shape
        return self.world, m, self.case.n, k, NAMES[self.case.dtype]


class Reduced(Product):
    """A call that computes x @ w on each rank, followed by a sum over the ranks."""

    reduces = True

    def reference(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        return self.shared(torch.stack([x @ w for x, w in inputs]).sum(0))

    def usual(self, group: dist.ProcessGroup) -> Tensors:
        total = self.mine[0] @ self.mine[1]
        dist.all_reduce(total, group=group)
        return self.shared(total)[self.rank]

    def shared(self, total: torch.Tensor) -> list[Tensors]:
        """Return each rank's part of the sum, or of the mean."""
        raise NotImplementedError

    @property
    def parts(self) -> int:
        return self.world if self.case.op == "avg" else 1


class MatmulReduceScatterCall(Reduced):
    spec, public = matmul_reduce_scatter.OPERATOR, staticmethod(weft.matmul_reduce_scatter)
    operands = ("A", "B")

    def arguments(self, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | str) -> dict[str, Any]:
        names = {"reduce_op": self.case.op, "scatter_dim": self.case.dim, "group": group}
        return {"A": inputs[0], "B": inputs[1], **names}

    def shared(self, total: torch.Tensor) -> list[Tensors]:
        return [[part / self.parts] for part in total.chunk(self.world, self.case.dim)]

    def operations(self, group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
        inputs = [t.clone().requires_grad_() for t in self.mine]
        return [(*inputs, False, None, group.group_name, "", 0.0)]

    def problem(self) -> Problem:
        return MatmulReduceScatter(*self.sizes())

    @classmethod
    def sized(cls, case: Gemm, rows: int, world: int) -> Gemm:
        return replace(case, shape=(max(8, rows // 8 * 8) * world, 128), n=96)


@dataclass(frozen=True)
class Following(Gemm):
    """The parameters of a call of matmul_all_reduce. A bias and a residual may be added to the sum. A norm follows if
    `eps` is given.
    """

    bias: bool = False
    residual: bool = False
    eps: float | None = None


class MatmulAllReduceCall(Reduced):
    """A call of matmul_all_reduce. inputs: x, w, and the bias, the residual and the norm's weight, if the case has them.

    Bias and residual are equal on all ranks. With a residual, the norm's weight is equal too, so that all ranks have
    the same bits.
    """

    spec, public = matmul_all_reduce.OPERATOR, staticmethod(weft.matmul_all_reduce)

    def drawn(self, rank: int) -> Tensors:
        case, of_all = self.case, 7
        inputs, n, dtype = super().drawn(rank), case.n, case.dtype
        if isinstance(case, Following):
            if case.bias:
                inputs.append(data(of_all, (n,), dtype, 80 + self.seed))
            if case.residual:
                inputs.append(data(of_all, (*case.shape[:-1], n), dtype, 90 + self.seed))
            if case.eps is not None:
                inputs.append(data(of_all if case.residual else rank, (n,), dtype, 100 + self.seed))
        return inputs

    def following(self, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        case = self.case
        if not isinstance(case, Following):
            return {}
        given = {"bias": case.bias, "residual": case.residual, "norm": case.eps is not None}
        return dict(zip([name for name, is_given in given.items() if is_given], inputs[2:], strict=True))

    def arguments(self, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | str) -> dict[str, Any]:
        following = self.following(inputs)
        eps = {"eps": self.eps} if "norm" in following else {}
        return {**super().arguments(inputs, group), "reduce_op": self.case.op, **following, **eps}

    @property
    def eps(self) -> float | None:
        return getattr(self.case, "eps", None)

    def results(self, returned: Any) -> Tensors:
        return [returned] if self.eps is None else list(returned)

    def reference(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        total = torch.stack([x @ w for x, w, *_ in inputs]).sum(0) / self.parts
        return [self.followed(total, of_rank) for of_rank in inputs]

    def usual(self, group: dist.ProcessGroup) -> Tensors:
        total = self.mine[0] @ self.mine[1]
        dist.all_reduce(total, group=group)
        return self.followed(total / self.parts, self.mine)

    def followed(self, total: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Add bias and residual to the sum, and compute its norm. Return [normed sum, sum], or [sum] without a norm."""
        following = self.following(inputs)
        norm = following.pop("norm", None)
        for added in following.values():
            total = total + added
        return [total] if norm is None else [rms_norm(total, norm.shape, norm, self.eps), total]

    def check(self, group: dist.ProcessGroup, found: Tensors, expected: tuple[Tensors, Tensors] | None = None) -> None:
        """Check the results, and that the norm is the norm of the rounded sum. In 16 bits, the norm of the exact sum
        differs more.
        """
        super().check(group, found, expected)
        if self.eps is not None:
            (y, total), norm = found, self.mine[-1]
            exact = rms_norm(total.double(), norm.shape, norm.double(), self.eps)
            close(y, exact, rms_norm(total, norm.shape, norm, self.eps))

    def alike(self, results: Tensors) -> Tensors:
        return results if getattr(self.case, "residual", False) else results[-1:]

    def impossible(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return invalid arguments for [8, 8] @ [8, 3] on each rank."""
        bias, residual = torch.ones(3), torch.ones(8, 3)
        mean = 'op="avg" does not support bias, residual and norm'
        return {
            **super().impossible(),
            "bias of two dimensions": ({"bias": bias[None]}, "bias has shape (1, 3): pass a one-dimensional tensor, [N]"),
            "bias of other length": ({"bias": torch.ones(4)}, "bias has 4 columns: pass 3, as many as w has"),
            "bias of another dtype": ({"bias": bias.half()}, "bias is torch.float16 on cpu and x is torch.float32 on cpu"),
            "residual of fewer rows": (
                {"residual": residual[1:]}, "residual has shape (7, 3), but x has (8, 8): pass a residual of shape (8, 3)"
            ),
            "residual of fewer columns": (
                {"residual": residual[:, 1:]}, "residual has 2 columns: pass 3, as many as w has"
            ),
            "mean": ({"bias": bias, "reduce_op": "avg"}, mean),
            "no tensor": ({"residual": [residual]}, "residual is a list: pass a torch.Tensor"),
            "a norm of two dimensions": ({"norm": bias[None]}, "norm has shape (1, 3): pass a one-dimensional tensor, [N]"),
            "a norm of other length": ({"norm": torch.ones(2)}, "norm has 2 columns: pass 3, as many as w has"),
            "a norm of another dtype": ({"norm": bias.double()}, "norm is torch.float64 on cpu and x is torch.float32 on cpu"),
            "a norm elsewhere": (
                {"norm": torch.ones(3, device="meta")}, "norm is torch.float32 on meta and x is torch.float32 on cpu"
            ),
            "the mean's norm": ({"norm": bias, "reduce_op": "avg"}, mean),
            "no number": ({"norm": bias, "eps": "0"}, "eps='0' must be a finite number of at least 0"),
            "a negative number": ({"norm": bias, "eps": -1e-9}, "eps=-1e-09 must be a finite number of at least 0"),
            "a number for nothing": ({"eps": 0.5}, "eps=0.5 without norm"),
        }  # fmt: skip

    def different(self) -> dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]]:
        norm, new = {"norm": self.mine[1][0]}, "rank 1: matmul_all_reduce of a shape that is new here"
        little = ({**norm, "eps": 1.0000001e-6}, {**norm, "eps": 1e-6})
        return {
            **super().different(),
            "norm": (norm, {}, (f"{new}: [8, 8] @ [8, 3] on each of 2 ranks, reduced, the whole",)),
            "eps": ({**norm, "eps": 0.5}, norm, ("reduced and normed (eps 0.5), the whole sum to each rank",)),
            "eps by little": (*little, ("eps=1.0000001e-06); rank 1: MatmulAllReduce(",)),
        }

    def operations(self, group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
        x, w = (t.clone().requires_grad_() for t in self.mine)
        options = (False, None, group.group_name, "", 0.0)
        bias, residual, norm = (torch.randn(m, w.shape[1], requires_grad=True) for m in (1, x.shape[0], 1))
        following = [(None, None, None, None), (bias, residual, None, None), (bias, residual, norm, 1e-6)]
        return [(x, w, *one, *options) for one in following]

    def problem(self) -> Problem:
        case = self.case
        m = prod(case.shape[:-1])
        following = (case.bias, case.residual, case.eps) if isinstance(case, Following) else ()
        return MatmulAllReduce(self.world, m, case.n, case.shape[-1], NAMES[case.dtype], *following)


class MatmulAllGatherCall(Product):
    spec, public = matmul_all_gather.OPERATOR, staticmethod(weft.matmul_all_gather)

    def arguments(self, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | str) -> dict[str, Any]:
        return {**super().arguments(inputs, group), "gather_dim": self.case.dim}

    def reference(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        return [[torch.cat([x @ w for x, w in inputs], self.case.dim)]] * self.world

    def alike(self, results: Tensors) -> Tensors:
        return results

    def different(self) -> dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]]:
        return {**super().different(), "dimension": ({"gather_dim": -1}, {}, ("all columns to each rank",))}

    def operations(self, group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
        inputs = [t.clone().requires_grad_() for t in self.mine]
        return [(*inputs, columns, None, group.group_name, "", 0.0) for columns in (False, True)]

    def problem(self) -> Problem:
        return MatmulAllGather(*self.sizes(), self.case.dim == -1)


def gradients_of_matmul_all_gather(
    x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, columns: bool, group: dist.ProcessGroup, **options: Any
) -> Tensors:
    """Call the operator that backward of matmul_all_gather uses, as if it were a public function."""
    form = matmul_all_gather_gradients.OPERATOR.form(x, g, w, columns)
    return calls.made(matmul_all_gather_gradients.OPERATOR, group, x, lambda _: form, **options)


class MatmulAllGatherGradientsCall(Product):
    """A call of the operator for both gradients of matmul_all_gather. inputs: x, w, and the gradient of the gathered
    result. An unfused run reduces this rank's part of the gradient in fp32 and rounds it once.
    """

    spec, public = matmul_all_gather_gradients.OPERATOR, staticmethod(gradients_of_matmul_all_gather)
    reduces = True

    @property
    def columns(self) -> bool:
        return self.case.dim == -1

    def drawn(self, rank: int) -> Tensors:
        m, n = self.case.shape[0], self.case.n
        shape = (m, self.world * n) if self.columns else (self.world * m, n)
        return [*super().drawn(rank), data(rank, shape, self.case.dtype, 30 + self.seed)]

    def arguments(self, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | str) -> dict[str, Any]:
        return {**super().arguments(inputs, group), "g": inputs[2], "columns": self.columns}

    def results(self, returned: Any) -> Tensors:
        return list(returned)

    def reference(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        x, total = inputs[0][0], torch.stack([g for *_, g in inputs]).sum(0)
        parts = [part.to(x.dtype) for part in total.chunk(self.world, self.case.dim)]
        return [[own @ w.t(), x.t() @ own] for own, (x, w, _) in zip(parts, inputs, strict=True)]

    def usual(self, group: dist.ProcessGroup) -> Tensors:
        return self.reference([[x, w, g.float()] for x, w, g in self.inputs])[self.rank]

    def problem(self) -> Problem:
        return MatmulAllGatherGradients(*self.sizes(), self.columns)

    def different(self) -> dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]]:
        """Return arguments in which rank 0 differs, for gradients of concatenated rows."""
        (x, _, g), name = self.mine, {"schedule": self.case.schedule}
        fewer, wide = {"x": x[:4], "g": g[: 4 * self.world]}, {"g": g.view(x.shape[0], -1), "columns": True}
        return {
            "rows": (name | fewer, name, ("gradients of [4, ",)),
            "dimension": (name | wide, name, ("all columns to each rank",)),
            "schedule": ({"schedule": "serial"}, name, (f"schedule {self.case.schedule}",)),
        }


class AllGatherMatmulCall(Call):
    """A call of all_gather_matmul. inputs: x_shard and each weight."""

    spec, public = all_gather_matmul.OPERATOR, staticmethod(weft.all_gather_matmul)
    operands = ("A_shard", "Bs[0]")
    case: Gathered

    def drawn(self, rank: int) -> Tensors:
        shape, dim, dtype = self.case.shape, self.case.dim, self.case.dtype
        own = (*shape[:dim], self.case.rows_of(self.world)[rank], *shape[dim + 1 :])
        weights = [data(rank, (n, shape[-1]), dtype, 50 + self.seed + i).t() for i, n in enumerate(self.case.widths)]
        return [data(rank, own, dtype, self.seed), *weights]

    def arguments(self, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | str) -> dict[str, Any]:
        rows = self.case.rows and self.case.rows_of(self.world)
        names = {"gather_dim": self.case.dim, "group": group, "return_A": self.case.return_A, "rows": rows}
        return {"A_shard": inputs[0], "Bs": list(inputs[1:]), **names}

    def results(self, returned: Any) -> Tensors:
        A, ys = returned
        assert (A is not None) == self.case.return_A
        return ys if A is None else [A, *ys]

    def reference(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        whole = torch.cat([x for x, *_ in inputs], self.case.dim)
        return [[whole] * self.copied + [whole @ w for w in ws] for _, *ws in inputs]

    @property
    def copied(self) -> int:
        return int(self.case.return_A)

    def problem(self) -> Problem:
        rows, k, dtype = self.case.rows_of(self.world), self.case.shape[-1], NAMES[self.case.dtype]
        return AllGatherMatmul(self.world, rows, self.case.widths, k, dtype, self.case.return_A)

    def impossible(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return invalid arguments for x_shard [8, 8] and w [8, 3] on each of two ranks."""
        (x, B), rank = self.mine, self.rank
        shard = "shard[chunks=2,send=in_turn,by=dma]"
        return {
            "one dimension": ({"A_shard": x[0]}, "at least two dimensions"),
            "last dimension": (
                {"gather_dim": 1},
                "gather_dim=1 is not allowed for A_shard (8, 8): pass 0 or -2. The last dimension is excluded",
            ),
            "no matrix": ({"Bs": []}, "Bs is empty"),
            "one tensor": ({"Bs": B}, "pass a list of tensors, [B]"),
            "other K": ({"Bs": [B[:5]]}, "Bs[0] has shape (5, 3): it must be [K=8, N]"),
            "other dtype": ({"Bs": [B.double()]}, "Bs[0] is torch.float64"),
            "strange dtype": ({"A_shard": x.int(), "Bs": [B.int()]}, "A_shard is torch.int32: use one of"),
            "rows": ({"rows": [5, 5]}, "rows=(5, 5)"),
            "schedule": ({"schedule": "shrad"}, "no schedule 'shrad'"),
            "no name": ({"schedule": ["serial"]}, "schedule=['serial'] is a list: pass the name of a schedule"),
            "cannot": ({"A_shard": x[: 4 - rank], "rows": [4, 3], "schedule": shard}, "needs equal shards"),
            "deadline": ({"deadline_s": -1}, "deadline_s=-1 must be positive"),
            "no deadline": ({"deadline_s": float("nan")}, "deadline_s=nan must be positive"),
            "timeline": ({"timeline": 3}, "timeline=3 is not a Timeline: pass weft.Timeline()"),
        }

    def different(self) -> dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]]:
        (x, B), name = self.mine, self.case.schedule
        known = "rank 1: all_gather_matmul of a shape that is new here: [10, 8] gathered from 2 ranks (6, 4 rows)"
        wide = torch.cat((B, B[:, :1]), 1)
        return {
            "dtype": ({"A_shard": x.half(), "Bs": [B.half()]}, {}, ("@ [8, 3] on each, fp16",)),
            "schedule": ({"schedule": "serial"}, {"schedule": name}, ("schedule serial",)),
            "rows": ({"A_shard": x[:4], "rows": [4, 4]}, {"A_shard": x[:4], "rows": [6, 4]}, (known,)),
            "gradients": ({"Bs": [B.clone().requires_grad_()]}, {}, ()),
            "columns": ({}, {"Bs": [wide]}, ("@ [8, 4] on each", "pad a vocabulary")),
        }

    def operations(self, group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
        x, *Bs = (t.clone().requires_grad_() for t in self.mine)
        return [(x, Bs, True, None, None, group.group_name, "", 0.0)]

    @classmethod
    def sized(cls, case: Gathered, rows: int, world: int) -> Gathered:
        return replace(case, shape=(rows, 128), n=96)
