"""The `Work` of training steps by TorchRec's `TrainPipelineSparseDist`, with weft's sharder.

The pipeline runs forward, backward and update of a step in one call, and distributes the ids of the next step's batch in
the same call. So a step's only call is forward, and the check after it compares tables. After an error, the program makes
a new pipeline, and goes on with the next step. Faults between forward and backward cannot be injected.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .pooled import Collection
from .sharder import Sharder
from .work import Given, Results


class Pipeline(Sharder):
    """Training of an EmbeddingBagCollection of TorchRec, sharded by weft, in a pipeline of TorchRec."""

    kinds = (
        "none", "kill", "short stop", "long stop", "terminate", "exit", "leave", "short straggler", "long straggler", "never call",
        "fewer batches", "exception after calls", "other module",
    )  # fmt: skip

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        return super().drawn(rng, device) | {"batches": 1, "restores": False}

    def make(self) -> None:
        super().make()
        self.model_in_pipeline = _Model(self.sharded, len(self.dims))
        self.pipeline: Any = None

    def begin(self, n: int) -> None:
        super().begin(n)
        if self.pipeline is None:
            from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist

            optimizer = torch.optim.SGD(self.model_in_pipeline.over.parameters(), 0.0)
            self.pipeline = TrainPipelineSparseDist(self.model_in_pipeline, optimizer, self.device)
            self.batches_ahead = self._batches_from_now(n)

    def _batches_from_now(self, n: int) -> Iterator[Any]:
        from torchrec.datasets.utils import Batch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        for number in range(n, self.last):
            given = Collection.inputs(self, number)
            features = KeyedJaggedTensor(
                given["keys"], given["values"], lengths=given["lengths"], stride=given["stride"]
            )
            yield Batch(self._weighing(self.rank, number), features, torch.zeros(given["stride"]))

    def forward(self, given: Given) -> Results:
        if self.pipeline is None:  # a call of a second work, which has no steps
            return super().forward(given)
        return [self.pipeline.progress(self.batches_ahead)]

    def gradients(self, n: int, given: Given, results: Results, grads: Results) -> Results:
        return self._tables()

    def failed(self) -> None:
        if self.pipeline is not None:
            self.pipeline.detach()
        self.pipeline = None


class _Model(nn.Module):
    """A model whose loss has the gradient `dense_features` with respect to the pooled vectors."""

    def __init__(self, sharded: nn.Module, features: int) -> None:
        super().__init__()
        self.sharded, self.features, self.over = sharded, features, nn.Linear(1, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.sharded(batch.sparse_features)
        pooled = torch.cat([out[f"f{i}"] for i in range(self.features)], dim=1)
        return (pooled * batch.dense_features).sum() + 0 * self.over.weight.sum(), pooled.detach()
