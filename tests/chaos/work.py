"""Define what a rank calls under injected faults: for each operator, the calls, their right results, and invalid
arguments.

`operators` lists the classes. A fault may pair step n of one rank with step n + 1 of another rank. So the data of a
step are random whole numbers, a function of (seed, rank, step), and mixed results differ from right ones. Sums of
products are exact in fp32. A result is right if it has the bits that torch's operators compute from the data of all
ranks for that step.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import weft
import weft.ops.all_gather_matmul
import weft.ops.all_gather_scaled_matmul
import weft.ops.all_to_all_matmul  # imported now, so that no interrupted call imports it

from .bad import DEADLINES, Form, each, put

Given = dict[str, Any]
Results = list[torch.Tensor]
Tolerance = float | tuple[float, float]
FP8 = torch.float8_e4m3fn


def folded(x: torch.Tensor, outer: int | None) -> torch.Tensor:
    """Return x with its rows as two dimensions. Ranks divide dimension `outer` of the two. With None, return x itself."""
    return x if outer is None else x.reshape(-1, 2, x.shape[-1]).movedim(0, outer)


class Work(ABC):
    """Calls of one operator.

    turn: the step from which on calls have another shape. options: the options of every call. devices: the devices on
    which the operator is tested. differentiable: whether steps may have a backward. is_module: whether a module is made
    first. other_dtype: another dtype that the operator supports. arguments: the names of arguments that are tensors or
    lists of tensors; an optional argument may be None.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    differentiable: ClassVar[bool] = True
    is_module: ClassVar[bool] = False
    other_dtype: ClassVar[str | None] = "bfloat16"
    arguments: ClassVar[tuple[str, ...]]
    kinds: ClassVar[tuple[str, ...]] = ()
    """The kinds of faults that are injected. If empty, all."""
    plain: ClassVar[Given] = {}
    """Options with which all other options can be combined."""

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        """Draw options for the calls."""
        return {}

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        """Return overlapped schedules that support these calls. The list is empty if the operator takes no schedule."""
        return []

    @classmethod
    @abstractmethod
    def bad_values(cls, options: Given) -> list[Form]:
        """Return forms with arguments of the right types and sizes, but with wrong values."""

    @classmethod
    @abstractmethod
    def bad_sizes(cls, options: Given) -> list[Form]: ...

    @classmethod
    @abstractmethod
    def bad_dtypes(cls, options: Given) -> list[Form]: ...

    @classmethod
    @abstractmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        """Return changes of `options` that are valid if all ranks make them. A pinned schedule may not support them."""

    @classmethod
    def other_makings(cls, world: int, options: Given) -> list[Given]:
        """Return the changes of `options` that a module notices when it is made."""
        return []

    @classmethod
    def other_tables(cls) -> list[Form]:
        """Return forms that change one rank's tables of counts, and its rows with them."""
        return []

    backward = False  # whether steps have a backward
    padded = False  # whether results may have more rows than expected
    tolerance: Tolerance = 0.0
    """The allowed difference of a result, relative to the larger of 1 and the right value; or (relative, absolute)."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, seed: int, size: int, turn: int, options: Given
    ) -> None:
        self.group, self.device, self.seed, self.size, self.turn = group, device, seed, size, turn
        self.rank, self.world = group.rank(), group.size()
        self.options = dict(options)
        self.other = self.options.pop("other_size", False)  # other sizes in everything that distinguishes calls
        self.backward = self.options.pop("backward", False)
        self.dtype = getattr(torch, self.options.pop("dtype", "float32"))

    def make(self) -> None:  # noqa: B027 - most have nothing to make
        """Make what the calls need, such as a module. All ranks call this together."""

    def begin(self, n: int) -> None:  # noqa: B027
        """Prepare step n, without communication."""

    def failed(self) -> None:  # noqa: B027
        """Clean up after a step that raised an error, without communication."""

    def succeeded(self) -> None:  # noqa: B027
        """Note that backward of the step has returned results."""

    def more(self, n: int) -> list[tuple[str, Callable[[], Results], Callable[[], Results]]]:
        """Return further calls of step n, after backward, as (name, call, function that returns the right results)."""
        return []

    @abstractmethod
    def inputs(self, n: int) -> Given:
        """Return {argument: value} of this rank's call in step n."""

    @abstractmethod
    def forward(self, given: Given) -> Results:
        """Call the operator with these arguments."""

    @abstractmethod
    def expected(self, n: int) -> Results: ...

    def numbers(self, what: int, rank: int, n: int, shape: tuple[int, ...], most: int = 3) -> torch.Tensor:
        """Return random whole numbers from -most to most."""
        generator = torch.Generator().manual_seed(hash((self.seed, what, rank, n)) % 2**63)
        return torch.randint(-most, most + 1, shape, generator=generator).to(torch.float32)

    def counts(self, what: int, rank: int, n: int, shape: tuple[int, ...], most: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, what, rank, n)) % 2**63)
        return torch.randint(0, most + 1, shape, generator=generator)

    def here(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device, self.dtype)

    @property
    def outer(self) -> int | None:
        """The dimension that ranks divide, 0 or 1, if rows are given as two dimensions. None if rows are one dimension."""
        return self.options.get("outer")

    def call_options(self) -> Given:
        return {"deadline_s": self.options["deadline_s"], "schedule": self.options.get("schedule")}


class Differentiable(Work):
    """Work whose steps may have a backward."""

    @abstractmethod
    def grads(self, n: int) -> tuple[Results, Results]:
        """Return (the gradients of this rank's results, the expected gradients of its inputs)."""

    @abstractmethod
    def wanted(self, given: Given) -> Results:
        """Return the inputs whose gradients are computed."""

    def gradients(self, n: int, given: Given, results: Results, grads: Results) -> Results:
        """Run backward of step n. Return what `grads` expects."""
        torch.autograd.backward([y for y in results if y.requires_grad], grads)
        return [x.grad for x in self.wanted(given)]  # type: ignore[misc]


class AllGatherMatmul(Differentiable):
    K = 16
    arguments = ("A_shard", "Bs")

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        return {"return_A": rng.random() < 0.5}

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        shard = ["shard[chunks=1,send=in_turn,by=dma]", "shard[chunks=2,send=in_turn,by=kernel]"]
        ficco = [] if options["return_A"] else ["ficco_1d[start=uniform,gemms=fused,steps=0,by=dma]"]
        return [*shard, "gather[by=kernel]", *ficco, *["shard[chunks=2,send=at_once,by=dma]"] * (world > 2)]

    @classmethod
    def bad_values(cls, options: Given) -> list[Form]:
        return [
            put("gather_dim", "0"), put("gather_dim", 7), put("rows", [3]), put("rows", "many"), put("schedule", "shrad"),
            put("schedule", 5), *DEADLINES, put("Bs", None),
        ]  # fmt: skip

    @classmethod
    def bad_sizes(cls, options: Given) -> list[Form]:
        return [
            each("Bs", lambda B: B[:-1]), each("A_shard", lambda x: x[0]), each("A_shard", lambda x: x[:, :-1]),
            put("Bs", []), each("Bs", lambda B: B[None]), each("A_shard", lambda x: x.flatten()[0]),
        ]  # fmt: skip

    @classmethod
    def bad_dtypes(cls, options: Given) -> list[Form]:
        return [
            each("A_shard", lambda x: x.to(torch.float64)), each("A_shard", lambda x: x.to(torch.int32)),
            each("Bs", lambda B: B.to(torch.float64)), each("Bs", lambda B: B.to(torch.bool)),
        ]  # fmt: skip

    @classmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        uneven = [{"rows": True}] * (options.get("schedule") in (None, "serial"))
        return [{"return_A": not options["return_A"]}, *uneven]

    def _shape(self, n: int) -> tuple[int, int]:
        rows = (4, 24)[self.size] + 4 * (n >= self.turn)
        return rows, (8, 48)[self.size] + 4 * self.other

    def _rows(self, rank: int, n: int) -> int:
        return self._shape(n)[0] + rank * bool(self.options.get("rows"))

    def _shard(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(1, rank, n, (self._rows(rank, n), self.K))

    def _layout(self, n: int) -> Given:
        rows = [self._rows(rank, n) for rank in range(self.world)] if self.options.get("rows") else None
        return {"gather_dim": self.outer or 0, "rows": rows}

    def _weights(self, rank: int, n: int) -> list[torch.Tensor]:
        width = self._shape(n)[1]
        return [self.numbers(2 + i, rank, n, (self.K, width + 4 * i)) for i in range(2)]

    def inputs(self, n: int) -> Given:
        x = folded(self.here(self._shard(self.rank, n)), self.outer)
        Bs = [self.here(B) for B in self._weights(self.rank, n)]
        if self.backward:
            x.requires_grad_()
            Bs = [B.requires_grad_() for B in Bs]
        return {"A_shard": x, "Bs": Bs, **self._layout(n), **self.call_options()}

    def forward(self, given: Given) -> Results:
        A, ys = weft.all_gather_matmul(group=self.group, return_A=self.options["return_A"], **given)
        return ys if A is None else [A, *ys]

    def expected(self, n: int) -> Results:
        whole = torch.cat([self._shard(r, n) for r in range(self.world)])
        ys = [whole @ B for B in self._weights(self.rank, n)]
        return [folded(y, self.outer) for y in ([whole, *ys] if self.options["return_A"] else ys)]

    def wanted(self, given: Given) -> Results:
        return [given["A_shard"], *given["Bs"]]

    def _weighing(self, rank: int, n: int) -> Results:
        m, width = self._shape(n)
        shapes = [
            (self.world * m, size) for size in ([self.K] if self.options["return_A"] else []) + [width, width + 4]
        ]
        return [self.numbers(10 + i, rank, n, shape, 2) for i, shape in enumerate(shapes)]

    def grads(self, n: int) -> tuple[Results, Results]:
        m, whole = self._shape(n)[0], torch.cat([self._shard(r, n) for r in range(self.world)])
        of_whole = torch.zeros_like(whole)
        for rank in range(self.world):
            weighing = self._weighing(rank, n)
            if self.options["return_A"]:
                of_whole += weighing[0]
            for g, B in zip(weighing[-2:], self._weights(rank, n), strict=True):
                of_whole += g @ B.t()
        mine = self._weighing(self.rank, n)
        of_Bs = [whole.t() @ g for g in mine[-2:]]
        return [self.here(g) for g in mine], [of_whole[self.rank * m : (self.rank + 1) * m], *of_Bs]


class AllGatherScaledMatmul(AllGatherMatmul):
    """Work of all_gather_scaled_matmul. Its elements are small whole numbers, which are exact in fp8. Scales are powers
    of two.
    """

    K = 32
    differentiable, other_dtype = False, None
    arguments = ("A_shard", "Bs", "A_scale", "B_scales")

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        return {**super().drawn(rng, device), "by_row": rng.random() < 0.5}

    @classmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        own = [{"by_row": not options["by_row"]}, {"out_dtypes": "float16"}, {"use_fast_accum": True}, {"biases": True}]
        return [*super().other_options(world, options), *own]

    def _shape(self, n: int) -> tuple[int, int]:
        return (16, 32)[self.size] + 16 * (n >= self.turn), (16, 48)[self.size] + 16 * self.other

    def _shard(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(1, rank, n, (self._rows(rank, n), self.K), 1)

    def _weights(self, rank: int, n: int) -> list[torch.Tensor]:
        width = self._shape(n)[1]
        return [self.numbers(2 + i, rank, n, (width + 16 * i, self.K), 1).t() for i in range(2)]

    def inputs(self, n: int) -> Given:
        x, Bs = self._shard(self.rank, n), self._weights(self.rank, n)
        rows = len(x)
        by_row = self.options["by_row"]
        scale = folded(torch.full((rows, 1), 0.5), self.outer) if by_row else torch.tensor(0.5)
        of_Bs = [torch.full((1, B.shape[1]), 2.0) if by_row else torch.tensor([2.0]) for B in Bs]
        dtype = getattr(torch, self.options.get("out_dtypes", "bfloat16"))
        biases = (
            [bias.to(self.device, dtype) for bias in self._biases(self.rank, n)] if self.options.get("biases") else None
        )
        return {
            "A_shard": folded(x, self.outer).to(self.device, FP8),
            "Bs": [B.t().contiguous().to(self.device, FP8).t() for B in Bs],
            "A_scale": scale.to(self.device), "B_scales": [scale.to(self.device) for scale in of_Bs],
            "out_dtypes": [dtype] * 2, "biases": biases,
            "use_fast_accum": [True] * 2 if self.options.get("use_fast_accum") else None,
            **self._layout(n), **self.call_options(),
        }  # fmt: skip

    def _biases(self, rank: int, n: int) -> list[torch.Tensor]:
        return [self.numbers(6 + i, rank, n, (self._shape(n)[1] + 16 * i,)) for i in range(2)]

    def expected(self, n: int) -> Results:
        found = super().expected(n)
        if self.options.get("biases"):
            found[-2:] = [y + bias for y, bias in zip(found[-2:], self._biases(self.rank, n), strict=True)]
        return found

    def forward(self, given: Given) -> Results:
        A, ys = weft.all_gather_scaled_matmul(group=self.group, return_A=self.options["return_A"], **given)
        return ys if A is None else [A.float(), *ys]


class AllToAllMatmul(Differentiable):
    EXPERTS, K, N = 2, 8, 12
    arguments = ("tokens", "w_experts", "splits")

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        return {"max_rows": device == "cuda" or rng.random() < 0.3}

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        by = "kernel" if options["max_rows"] else "dma"  # copy engines need sizes on the CPU
        dispatch = [f"dispatch[by={by},rest=each]", f"dispatch_by_expert[by={by},chunks=2]"]
        return [*dispatch, "dispatch_sorted[chunks=1]", *["dispatch[by=kernel,rest=together]"] * (world > 2)]

    @classmethod
    def bad_values(cls, options: Given) -> list[Form]:
        return [
            each("splits", lambda s: s + 1), each("splits", lambda s: s - 100), put("max_rows", -1), put("capacity", 0),
            put("schedule", "dispach"), *DEADLINES, put("max_rows", "all"),
        ]  # fmt: skip

    @classmethod
    def bad_sizes(cls, options: Given) -> list[Form]:
        return [
            each("splits", lambda s: s[:-1]), each("w_experts", lambda w: w[:, :-1]), each("tokens", lambda t: t.flatten()),
            each("tokens", lambda t: t[:, :-1]), each("w_experts", lambda w: w[0]), each("tokens", lambda t: t[None]),
        ]  # fmt: skip

    @classmethod
    def bad_dtypes(cls, options: Given) -> list[Form]:
        return [
            each("splits", lambda s: s.float()), each("splits", lambda s: s.bool()), each("w_experts", lambda w: w.double()),
            each("tokens", lambda t: t.to(torch.complex64)), each("tokens", lambda t: t.long()),
        ]  # fmt: skip

    @classmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        return [{"max_rows": not options["max_rows"]}, {"capacity": 3}]

    def _splits(self, rank: int, n: int) -> torch.Tensor:
        most = (3, 12)[self.size]
        return self.counts(1, rank, n, (self.world * self.EXPERTS,), most)

    def _tokens(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(2, rank, n, (int(self._splits(rank, n).sum()), self._k(n)))

    def _weights(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(3, rank, n, (self.EXPERTS, self._k(n), self.N))

    def _k(self, n: int) -> int:
        return self.K + 4 * (n >= self.turn) + 8 * self.other

    @property
    def padded(self) -> bool:  # type: ignore[override]
        return self._room() is not None

    def _room(self) -> int | None:
        most = (3, 12)[self.size] * self.EXPERTS * self.world
        return most if self.options.get("max_rows") else None

    def inputs(self, n: int) -> Given:
        tokens, w = self.here(self._tokens(self.rank, n)), self.here(self._weights(self.rank, n))
        if self.backward:
            tokens.requires_grad_()
            w.requires_grad_()
        capacity = self._room() or (3, 12)[self.size] * self.EXPERTS * self.world
        return {
            "tokens": tokens, "w_experts": w, "splits": self._splits(self.rank, n).to(self.device), "max_rows": self._room(),
            "capacity": capacity * self.options.get("capacity", 2), **self.call_options(),
        }  # fmt: skip

    def forward(self, given: Given) -> Results:
        y, received = weft.all_to_all_matmul(group=self.group, return_received=True, **given)
        return [y, received]

    def _routed(self, rank: int, n: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return (the rows of each expert of `rank`, the counts `received` [ranks, experts])."""
        parts = [self._tokens(r, n).split(self._splits(r, n).tolist()) for r in range(self.world)]
        mine = range(rank * self.EXPERTS, (rank + 1) * self.EXPERTS)
        rows = [torch.cat([parts[source][expert] for source in range(self.world)]) for expert in mine]
        return rows, torch.stack([self._splits(r, n)[mine.start : mine.stop] for r in range(self.world)])

    def expected(self, n: int) -> Results:
        rows, received = self._routed(self.rank, n)
        y = torch.cat([x @ w for x, w in zip(rows, self._weights(self.rank, n), strict=True)])
        return [y, received]

    def wanted(self, given: Given) -> Results:
        return [given["tokens"], given["w_experts"]]

    def _weighing(self, rank: int, n: int) -> torch.Tensor:
        """Return the random gradient of the loss with respect to the result of `rank`."""
        rows = sum(len(x) for x in self._routed(rank, n)[0])
        return self.numbers(4, rank, n, (rows, self.N), 2)

    def grads(self, n: int) -> tuple[Results, Results]:
        of_parts: dict[tuple[int, int], torch.Tensor] = {}  # {(source, expert): gradient of its rows}
        for rank in range(self.world):
            g = self._weighing(rank, n)
            for e, w in enumerate(self._weights(rank, n)):
                for source in range(self.world):
                    expert = rank * self.EXPERTS + e
                    count = int(self._splits(source, n)[expert])
                    of_parts[source, expert], g = g[:count] @ w.t(), g[count:]
        of_tokens = torch.cat([of_parts[self.rank, expert] for expert in range(self.world * self.EXPERTS)])
        rows, _ = self._routed(self.rank, n)
        g = self._weighing(self.rank, n)
        of_w = torch.stack([x.t() @ part for x, part in zip(rows, g.split([len(x) for x in rows]), strict=True)])
        room = self._room()
        padded = g if room is None else torch.cat([g, g.new_zeros(room - len(g), self.N)])
        return [self.here(padded)], [of_tokens, of_w]
