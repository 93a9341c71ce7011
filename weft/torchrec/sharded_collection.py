"""TorchRec's sharded EmbeddingCollection (a row for each id), with weft's lookup and updates."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    LazyNoWait,
    NoWait,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import weft.nn
from weft.nn.embedding_collection import config_of
from weft.torchrec.plan import read_plan
from weft.torchrec.tables import ShardedTables


class ShardedEmbeddingCollection(
    ShardedTables,
    ShardedEmbeddingModule[KJTList, list[torch.Tensor], dict[str, JaggedTensor], EmbeddingCollectionContext],
):
    """TorchRec's `ShardedModule` of an EmbeddingCollection. `weft.torchrec.EmbeddingCollectionSharder` makes it.

    Inputs and outputs are TorchRec's objects. Parameters and the state dict have the names of TorchRec's own module.
    The module wraps a `weft.nn.ShardedEmbeddingCollection`, `weft_module`. `input_dist` only stores the features, and
    `compute` exchanges the ids. So TorchRec's pipelines work, but do not overlap the exchange. All ranks must construct
    the module and make every call. Calls raise the errors of `weft.nn.ShardedEmbeddingCollection`.
    `weft_module.memory()` returns the bytes that are in use.
    """

    def __init__(
        self, module: EmbeddingCollection, plan: EmbeddingModuleShardingPlan, env: ShardingEnv, *,
        fused_params: dict[str, Any] | None = None, device: torch.device | None = None, gradient_division: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        """Convert `module` and its `plan` to weft's module. All ranks must make this call.

        gradient_division: True to divide gradients by the number of ranks, as
            `torchrec.distributed.comm_ops.set_gradient_division` does.
        options: further arguments of weft's module.
        """
        super().__init__()
        self.module_sharding_plan, self._env, self._configs = plan, env, module.embedding_configs()
        read = read_plan(
            module, plan, env, device, fused_params, config_of, type(self).__name__, options.get("deadline_s")
        )
        self._output_dtype = read.options.output_dtype
        made = weft.nn.ShardedEmbeddingCollection(
            read.partition.tables, group=env.process_group, device=device, placement=read.placement,
            optimizer=read.options.optimizer if read.is_fused else None, bounds_check=read.options.bounds_check,
            gradients="mean" if gradient_division else "sum", **options,
        )  # fmt: skip
        self._adopt(made, read, "embeddings")
        if module.device.type not in ("meta", "cpu"):  # like TorchRec, copy values only from a module on a GPU
            self.load_state_dict(module.state_dict(), strict=False)

    def create_context(self) -> EmbeddingCollectionContext:
        return EmbeddingCollectionContext()

    def input_dist(  # type: ignore[override]
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Return the features unchanged, as an awaitable for `compute`."""
        return KJTListSplitsAwaitable([NoWait(NoWait(cast(Any, features)))], ctx)

    def compute(self, ctx: EmbeddingCollectionContext, dist_input: KJTList) -> Any:
        """Return the rows of all ids, by feature. All ranks must make this call."""
        return self.weft_module(cast(Any, dist_input)[0])

    def output_dist(self, ctx: EmbeddingCollectionContext, output: Any) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Convert the result of `compute` to TorchRec's JaggedTensors."""
        found = {}
        for key, one in output.items():
            values = one.values().to(self._output_dtype)
            found[key] = JaggedTensor(values, lengths=one.lengths(), weights=one.weights_or_none())
        return LazyNoWait(found)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return EmbeddingCollection

    def embedding_configs(self) -> list[Any]:
        """Return the configs of all tables, as they were passed to TorchRec's module."""
        return list(self._configs)
