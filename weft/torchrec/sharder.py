"""Sharders for TorchRec's `DistributedModelParallel`. To use them, change the import of the sharders in a training script."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torchrec.distributed import embedding, embeddingbag
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv

from weft.embedding.options import Transport
from weft.torchrec.plan import KERNELS, SHARDINGS
from weft.torchrec.sharded import ShardedEmbeddingBagCollection
from weft.torchrec.sharded_collection import ShardedEmbeddingCollection


class _Sharder(BaseEmbeddingSharder):
    """The base class of both sharders: the methods that are the same for collections with and without pooling.

    _sharded: the class of the sharded module. _shardings: the sharding types that it supports. _options: its further
    arguments.
    """

    _sharded: ClassVar[Any]
    _shardings: ClassVar[Collection[str]]
    _options: dict[str, Any]

    def shard(
        self,
        module: Any,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Return the sharded module. All ranks must make this call. If `module` is on a GPU, its values are copied;
        otherwise the tables are newly initialised on `device`.
        """
        return self._sharded(
            module, params, env, fused_params=self.fused_params, device=device, gradient_division=get_gradient_division(),
            **self._options,
        )  # fmt: skip

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [one for one in super().sharding_types(compute_device_type) if one in self._shardings]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [one for one in super().compute_kernels(sharding_type, compute_device_type) if one in KERNELS]

    @property
    def sharded_module_type(self) -> Any:
        return self._sharded


class EmbeddingBagCollectionSharder(_Sharder, embeddingbag.EmbeddingBagCollectionSharder):
    """A sharder of `EmbeddingBagCollection` for `DistributedModelParallel(sharders=[...])`, in place of TorchRec's.

    | sharding of a table | kernels |
    |---|---|
    | table-wise, row-wise, column-wise | "fused", "dense" |
    | data-parallel | "dense" |

    Other combinations raise a `ValueError` that names the table. TorchRec's planner proposes only these combinations
    for this sharder.

    With "fused", backward updates the tables with the optimizer of `apply_optimizer_in_backward` or of `fused_params`.
    All tables of a collection must have the same optimizer: SGD, rowwise Adagrad, Adagrad, Adam or partial rowwise
    Adam. The default is FBGEMM's: SGD with learning rate 0.01. With "dense", the tables get gradients for a torch
    optimizer. Gradients of data-parallel tables are means over ranks, as in TorchRec.

    fused_params: FBGEMM's options by name, as in TorchRec. An option that weft does not support raises `ValueError`.
    transport, outputs, deterministic, deadline_s: as for `weft.nn.ShardedEmbeddingBagCollection`.
    """

    _sharded, _shardings = ShardedEmbeddingBagCollection, SHARDINGS

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        *,
        transport: Transport = "auto",
        outputs: int = 2,
        deterministic: bool = True,
        deadline_s: float | None = None,
    ) -> None:
        super().__init__(fused_params=fused_params)
        self._options = {
            "transport": transport, "outputs": outputs, "deterministic": deterministic, "deadline_s": deadline_s,
        }  # fmt: skip

    def reshard(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `NotImplementedError`: to change a plan, save a checkpoint, and load it into a module with another plan."""
        raise NotImplementedError(
            "resharding in place is not supported: save a checkpoint, and load it into a model with another plan"
        )


class EmbeddingCollectionSharder(_Sharder, embedding.EmbeddingCollectionSharder):
    """A sharder of `EmbeddingCollection` for `DistributedModelParallel(sharders=[...])`, in place of TorchRec's.

    It supports the plans and optimizers of `EmbeddingBagCollectionSharder`. All parts of a collection's tables must
    have the same number of columns. To ensure this, TorchRec's planner proposes no column-wise tables for this sharder.

    fused_params, use_index_dedup: as in TorchRec. An option that weft does not support raises `ValueError`.
    deadline_s: as for `weft.nn.ShardedEmbeddingCollection`.
    """

    _sharded, _shardings = ShardedEmbeddingCollection, tuple(one for one in SHARDINGS if one != "column_wise")

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        *,
        use_index_dedup: bool = False,
        deadline_s: float | None = None,
    ) -> None:
        super().__init__(fused_params=fused_params, use_index_dedup=use_index_dedup)
        self._options = {"dedup": use_index_dedup, "deadline_s": deadline_s}
