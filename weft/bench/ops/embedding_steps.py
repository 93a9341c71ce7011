"""The variants of an embedding training step: pooling, all-to-all, the all-to-all of gradients, and a rowwise Adagrad
update.

All variants update the same tables, but each has its own optimizer states.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weft.bench.core.harness import Ranks
from weft.bench.ops.embedding_data import EmbeddingData
from weft.bench.ops.embedding_presets import EmbeddingConfig
from weft.bench.ops.embedding_variants import SerialVariant
from weft.embedding import as_jagged
from weft.embedding.check import check_jagged
from weft.embedding.forward_call import ForwardCall, Tables
from weft.embedding.optimizers import RowwiseAdagrad
from weft.embedding.options import EmbeddingOptions
from weft.embedding.plan import plan_of
from weft.embedding.update import FusedUpdate
from weft.ops.embedding_all_to_all import embedding_all_to_all
from weft.runtime import embedding_backward
from weft.runtime.unfused.turn import STRAIGHT

WEFT, FBGEMM, DETERMINISTIC, TORCH = "weft", "fbgemm", "fbgemm-deterministic", "torch"
LR, EPS = 0.05, 1e-8


class TrainingData(EmbeddingData):
    """Tables and inputs, and for each input set random gradients of this rank's output."""

    fbgemm: Any = None
    """FBGEMM's module, which owns the tables' memory; None without FBGEMM and on ranks without tables."""

    def __init__(self, config: EmbeddingConfig, ranks: Ranks, *, input_sets: int, with_fbgemm: bool) -> None:
        self.with_fbgemm = with_fbgemm
        super().__init__(config, ranks, input_sets=input_sets)
        generator, shape = torch.Generator(ranks.device), (self.local_batch, config.sharding.total_dim)
        self.grads = [
            torch.randn(shape, generator=generator.manual_seed(9973 * i + ranks.rank), device=ranks.device).to(
                self.dtype
            )
            for i in range(input_sets)
        ]

    def new_tables(self, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        if not self.with_fbgemm or not shapes:
            return super().new_tables(shapes)
        self.fbgemm = fbgemm_kernel(shapes, self.dtype, self.ranks.device)
        return list(self.fbgemm.split_embedding_weights())


class TrainingStep(ABC):
    """A variant of the training step. `step(which)` runs one step on input set `which`, and returns the output of forward."""

    def __init__(self, work: TrainingData) -> None:
        self.work = work

    @property
    @abstractmethod
    def states(self) -> Sequence[torch.Tensor]:
        """The rowwise Adagrad state of each table, fp32 [rows]."""

    @abstractmethod
    def __call__(self, which: int) -> torch.Tensor: ...

    def reset(self) -> None:
        """Zero the optimizer states."""
        for state in self.states:
            state.zero_()


class WeftStep(TrainingStep):
    """weft's operator, whose backward also runs the optimizer."""

    def __init__(self, work: TrainingData) -> None:
        super().__init__(work)
        self.update = FusedUpdate(RowwiseAdagrad(lr=LR, eps=EPS), work.weights, device=work.ranks.device)

    @property
    def states(self) -> Sequence[torch.Tensor]:
        return self.update.tensors

    def __call__(self, which: int) -> torch.Tensor:
        out = self._forward(which, self.update)
        out.backward(self.work.grads[which])
        return out.detach()

    def _forward(self, which: int, update: FusedUpdate | None) -> torch.Tensor:
        work = self.work
        return embedding_all_to_all(
            work.weights, work.inputs[which], work.config.sharding, group=work.ranks.group,
            batch_sizes=work.config.batch_sizes, update=update,
        )  # fmt: skip

    # --- the parts of a step, each timed alone ---

    @cached_property
    def _call(self) -> tuple[ForwardCall, Any]:
        work, rank, sharding = self.work, self.work.ranks.rank, self.work.config.sharding
        jagged = as_jagged(work.inputs[0])
        checked = check_jagged(jagged, sharding, rank, work.config.batch_sizes, work.weights)
        of, update = plan_of(sharding, EmbeddingOptions("direct")), self.update
        states = [list(states.values()) for states in update.states]
        tables = Tables(update.optimizer, work.weights, states, update.learning_rate, update.step)
        return ForwardCall(of, rank, checked, tables, 1.0, False), jagged

    @cached_property
    def _sorted(self) -> tuple[Any, torch.Tensor]:
        of, jagged = self._call
        return self._device.sorted_rows(of, jagged), self._exchange(0)

    @cached_property
    def _device(self) -> Any:
        return embedding_backward.device_code(self.work.ranks.device)

    def _exchange(self, which: int) -> torch.Tensor:
        work, (of, _) = self.work, self._call
        call = work.grads[0], work.config.sharding, of.rank, of.checked.batch_sizes, work.ranks.group, STRAIGHT
        with embedding_backward.received(*call) as found:
            return found.gradients

    def parts(self) -> Mapping[str, Callable[[int], object]]:
        """Return a call for each part of a step: {name of the part: a call that runs only this part}. The argument of a
        call is the number of the input set. Only forward reads it; all other parts use input set 0.
        """

        def forward(which: int) -> torch.Tensor:
            with torch.no_grad():
                return self._forward(which, None)

        def sort(which: int) -> object:
            return self._device.sorted_rows(*self._call)

        def update(which: int) -> object:
            rows, received = self._sorted
            of, tables = self._call[0], self._call[0].tables
            return self._device.update(of, tables, rows, received)

        return {"forward": forward, "sort": sort, "exchange": self._exchange, "update": update}


class _ByHand(TrainingStep):
    """A step without overlap: pool, exchange, unpack; then pack the gradients, exchange them, and update the tables."""

    def __init__(self, work: TrainingData) -> None:
        super().__init__(work)
        self._serial = SerialVariant(work, lambda work: lambda which: torch.empty(0))

    def _forward(self, pooled: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self._serial.unpack(self._serial.exchange(pooled))

    def _gradients(self, which: int) -> torch.Tensor:
        """Exchange the gradients of input set `which`. Return the gradients for this rank's tables, [global batch,
        their columns].
        """
        serial, work, grad = self._serial, self.work, self.work.grads[which]
        widths = [end - start for _, start, end in serial.runs]
        of_rank: list[list[torch.Tensor]] = [[] for _ in serial.shapes]
        for (rank, _, _), part in zip(serial.runs, grad.split(widths, dim=1), strict=True):
            of_rank[rank].append(part)
        send = torch.cat([torch.cat(parts, dim=1).view(-1) for parts in of_rank if parts])
        received = send.new_empty(sum(serial.send_splits))
        dist.all_to_all_single(received, send, serial.send_splits, serial.receive_splits, group=work.ranks.group)
        return received.view(work.config.global_batch, work.local_dim)


class FbgemmStep(_ByHand):
    """FBGEMM's table-batched kernels, which update tables in backward as in TorchRec, and NCCL's or gloo's all-to-all."""

    def __init__(self, work: TrainingData, deterministic: bool) -> None:
        super().__init__(work)
        self._deterministic = deterministic

    @property
    def states(self) -> Sequence[torch.Tensor]:
        kernel = self.work.fbgemm
        return [] if kernel is None else [states[0] for states in kernel.split_optimizer_states()]

    def __call__(self, which: int) -> torch.Tensor:
        work, kernel = self.work, self.work.fbgemm
        with _deterministic() if self._deterministic else contextlib.nullcontext():
            if kernel is None:  # a rank without tables
                pooled = torch.empty((work.config.global_batch, 0), dtype=work.dtype, device=work.ranks.device)
            else:
                pooled = kernel(*work.inputs[which])
            out = self._forward(pooled.detach())
            gradients = self._gradients(which)
            if kernel is not None:
                pooled.backward(gradients)
        return out


class TorchStep(_ByHand):
    """torch's embedding_bag with sparse gradients, an all-to-all, and rowwise Adagrad by index_add_, table by table."""

    def __init__(self, work: TrainingData) -> None:
        super().__init__(work)
        self._states = [torch.zeros(len(weight), device=work.ranks.device) for weight in work.weights]
        self._bags = []
        batch = work.config.global_batch
        for values, offsets in work.inputs:
            cuts = enumerate(pairwise(offsets[::batch].tolist()))
            self._bags.append(
                [(values[a:b], offsets[i * batch : (i + 1) * batch + 1] - a) for i, (a, b) in cuts if work.weights]
            )

    @property
    def states(self) -> Sequence[torch.Tensor]:
        return self._states

    def __call__(self, which: int) -> torch.Tensor:
        work = self.work
        leaves = [weight.detach().requires_grad_() for weight in work.weights]
        pooled = [
            F.embedding_bag(ids, leaf, offsets, mode="sum", sparse=True, include_last_offset=True)
            for leaf, (ids, offsets) in zip(leaves, self._bags[which], strict=True)
        ]
        nothing = torch.empty((work.config.global_batch, 0), dtype=work.dtype, device=work.ranks.device)
        out = self._forward(torch.cat([nothing, *(part.detach() for part in pooled)], dim=1))
        widths = [weight.shape[1] for weight in work.weights]
        gradients = self._gradients(which).split(widths, dim=1) if widths else ()
        for leaf, part, gradient, state in zip(leaves, pooled, gradients, self._states, strict=True):
            (found,) = torch.autograd.grad(part, leaf, gradient)
            found = found.float().coalesce()
            rows, values = found.indices()[0], found.values()
            state.index_add_(0, rows, values.square().mean(1))
            step = values / (state[rows].sqrt() + EPS)[:, None]
            leaf.detach().index_add_(0, rows, step.to(leaf.dtype), alpha=-LR)
        return out


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Context manager: torch and FBGEMM sum deterministically."""
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]


def fbgemm_kernel(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> Any:
    """Return FBGEMM's module for tables of these shapes. Its `split_embedding_weights()` returns the tables."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen as Bags

    on_gpu = device.type == "cuda"
    where = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    tables = [(*shape, where, ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU) for shape in shapes]
    precision = SparseType.from_dtype(dtype)
    return Bags(
        tables, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LR, eps=EPS, pooling_mode=PoolingMode.SUM,
        weights_precision=precision, output_dtype=precision, stochastic_rounding=False, device=device,
    )  # fmt: skip


def why_no_fbgemm() -> str | None:
    """Return the reason why FBGEMM cannot run here; None if it can."""
    try:
        import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401
    except Exception as error:  # loading its shared objects can fail in many ways
        return f"fbgemm_gpu does not import ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    return None


def make_step(name: str, work: TrainingData) -> TrainingStep:
    if name == WEFT:
        return WeftStep(work)
    return TorchStep(work) if name == TORCH else FbgemmStep(work, name == DETERMINISTIC)
