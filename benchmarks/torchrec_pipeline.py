"""A pipelined training step with weft's sharder, compared with TorchRec's: the time that the exchange of ids leaves exposed.

    torchrun --nproc-per-node 2 benchmarks/torchrec_pipeline.py [--json FILE] [--quick]

A model of table-wise embeddings and a dense layer trains in TorchRec's DistributedModelParallel, with fused SGD for the
tables. Variants of both sharders alternate:

    plain        the model distributes a batch's ids in its forward
    pipeline     TorchRec's TrainPipelineSparseDist distributes ids one batch ahead
    prefetch     weft only: `weft.nn.prefetched` distributes ids one batch ahead
    distributed  the lower bound: the ids of all batches have been distributed before the timing
    CPU          the pipeline, or `prefetched`, with batches of a few samples, so that the GPU has almost nothing to do

exposed = plain - distributed, or pipeline - distributed; hidden = (plain - pipeline) / (plain - distributed). A step
never takes less time than its launches take on the CPU. So a pipeline can hide at most plain - max(distributed, CPU).
Times are milliseconds per step, the slowest rank's median over rounds. All variants must have the same losses.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from embedding_prefetch import BATCHES, CASES, batches_of, run, timed
from torchrec.streamable import Pipelineable
from torchrec_modules import LR, WAYS, releases
from torchrec_sharders import copy_tables, sharded

import weft

CHECKED, LIMIT = 4, 1e-4  # steps of each variant whose losses are compared; the largest relative difference
FEW = 8  # samples of a rank that the GPU processes faster than the CPU launches the step
FEWER_ROWS = {name: case for name, case in CASES.items() if not name.startswith("small")} | {
    "small 64 x 250k x 128, B 256, L 20": (64, 250_000, 128, 256, 20)  # four models fit into 80 GB
}


@dataclass
class Batch(Pipelineable):
    """A batch, as TorchRec's pipelines need it. number: the number of the batch among all batches."""

    features: Any
    number: int

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)

    def pin_memory(self) -> Batch:
        return self


class Model(torch.nn.Module):
    def __init__(self, ebc: Any, columns: int, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ebc = ebc
        self.over = torch.nn.Sequential(torch.nn.Linear(columns, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
        self.over.to(device)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (self.over(self.ebc(batch.features).values()) - 1).square().mean()
        return loss, loss.detach()


class Variants:
    """The variants of a training step with one sharder. They use two models with the same initial tables: one for TorchRec's
    pipeline, and one for the other variants.
    """

    def __init__(self, by: str, case: tuple[int, ...], device: torch.device) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        from torchrec.distributed import TrainPipelineSparseDist
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        self.by = by
        tables, rows, dim, _, mean = case
        names = [f"f{i}" for i in range(tables)]
        configs = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=rows, feature_names=[names[i]])
            for i in range(tables)
        ]
        self.inputs = batches_of(case, dist.get_rank(), device)
        self.keyed = lambda ids, lengths: KeyedJaggedTensor(names, ids, lengths=lengths)
        self.models, self.optimizers = [], []
        for _ in range(2):
            ebc = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
            apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": LR})
            model = sharded(Model(ebc, tables * dim, device), "ebc", "table_wise", by, device)
            dense = [p for name, p in model.named_parameters() if ".over." in f".{name}"]
            self.models.append(model)
            self.optimizers.append(torch.optim.SGD(dense, lr=LR))
        self.pipelined = TrainPipelineSparseDist(self.models[1], self.optimizers[1], device)
        self.ebc = self.models[0].module.ebc
        self.ready = [self._distributed(self.keyed(*one)) for one in self.inputs]
        self.few = batches_of((tables, rows, dim, FEW, mean), dist.get_rank(), device)

    def _distributed(self, features: Any) -> tuple[Any, Any]:
        context = self.ebc.create_context()
        return context, self.ebc.input_dist(context, features).wait().wait()

    def batches(self, first: int, count: int) -> Iterator[Batch]:
        for number in range(first, first + count):
            yield Batch(self.keyed(*self.inputs[number % BATCHES]), number % BATCHES)

    def _train(self, batches: Iterator[Batch]) -> list[torch.Tensor]:
        model, optimizer, losses = self.models[0], self.optimizers[0], []
        for batch in batches:
            optimizer.zero_grad()
            loss, out = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(out)
        return losses

    def plain(self, count: int, first: int = 0) -> list[torch.Tensor]:
        return self._train(self.batches(first, count))

    def pipeline(self, count: int, first: int = 0) -> list[torch.Tensor]:
        batches, losses = self.batches(first, count), []
        for _ in range(count):
            losses.append(self.pipelined.progress(batches))
        return losses

    def distributed(self, count: int, first: int = 0) -> list[torch.Tensor]:
        numbers = itertools.count(first)
        return self._replaced(
            lambda _: self.ebc.compute_and_output_dist(*self.ready[next(numbers) % BATCHES]), self.batches(first, count)
        )

    def prefetch(self, count: int, first: int = 0) -> list[torch.Tensor]:
        module = self.ebc.weft_module
        batches = weft.nn.prefetched(self.batches(first, count), {module: lambda batch: batch.features})
        return self._replaced(module, batches)

    def with_few_samples(self, way: Callable[[int], object]) -> Callable[[int], None]:
        def call(count: int) -> None:
            usual, self.inputs = self.inputs, self.few
            try:
                way(count)
            finally:
                self.inputs = usual

        return call

    def _replaced(self, forward: Callable[[Any], Any], batches: Iterator[Batch]) -> list[torch.Tensor]:
        """Train on `batches` with `forward` in place of the collection's forward; return the losses."""
        self.ebc.forward = forward
        try:
            return self._train(batches)
        finally:
            del self.ebc.forward


def measured(case: tuple[int, ...], device: torch.device, control: Any, calls: int) -> dict[str, float]:
    of = {by: Variants(by, case, device) for by in WAYS}
    first = of["torchrec"].models[0]
    for variants in of.values():
        for model in variants.models:
            if model is not first:
                copy_tables(first, model)
    steps = [of["weft"].plain, of["weft"].distributed, of["weft"].prefetch]
    trained = {
        "weft": [loss for i, step in enumerate(steps) for loss in step(CHECKED, i * CHECKED)],
        "torchrec": [
            *of["torchrec"].plain(CHECKED, 0),
            *of["torchrec"].distributed(CHECKED, CHECKED),
            *of["torchrec"].plain(CHECKED, 2 * CHECKED),
        ],
        **{f"{by}, pipelined": of[by].pipeline(len(steps) * CHECKED) for by in WAYS},
    }
    losses = {name: torch.stack(found).tolist() for name, found in trained.items()}
    for name, found in losses.items():
        for one, other in zip(losses["torchrec, pipelined"], found, strict=True):
            if abs(one - other) > LIMIT * abs(one):
                raise RuntimeError(f"{name}: losses {found} differ from {losses['torchrec, pipelined']}")
    ways: dict[str, Callable[[int], None]] = {}
    for by in WAYS:
        parts = ["plain", "pipeline", *(["prefetch"] if by == "weft" else []), "distributed"]
        ways |= {f"{by}, {part}": functools.partial(_run, getattr(of[by], part)) for part in parts}
        ways |= {f"{by}, CPU of {part}": of[by].with_few_samples(getattr(of[by], part)) for part in parts[1:-1]}
    ms = timed(ways, device, control, calls)
    for by in WAYS:
        plain, bound = (ms[f"{by}, {part}"] for part in ("plain", "distributed"))
        ms[f"{by}, exposed"] = plain - bound
        ms[f"{by}, exposed by the pipeline"] = ms[f"{by}, pipeline"] - bound
        for part in ("pipeline", "prefetch"):
            if f"{by}, {part}" in ms:
                hidden, most = plain - ms[f"{by}, {part}"], plain - max(bound, ms[f"{by}, CPU of {part}"])
                ms[f"{by}, hidden by {part}"] = hidden / (plain - bound) if plain > bound else 0.0
                ms[f"{by}, hidden by {part} of what the CPU allows"] = hidden / most if most > 0 else 0.0
    return ms | {"speedup": ms["torchrec, pipeline"] / ms["weft, pipeline"]}


def _run(way: Callable[[int], object], count: int) -> None:
    way(count)


if __name__ == "__main__":
    run(
        __doc__, f"milliseconds of a step; {releases()}", measured, 2 * BATCHES, {"peers": releases()}, cases=FEWER_ROWS
    )  # fmt: skip
