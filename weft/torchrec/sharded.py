"""TorchRec's sharded EmbeddingBagCollection, with weft's distribution of ids, fused pooling + all-to-all, and update.

    input_dist                     begins the exchange of headers
      first wait                   host reads the counts; begins the exchange of ids
      second wait                  this rank's features of all samples
    compute (and output_dist)      one call of weft.embedding_all_to_all: pooled vectors of this rank's samples

TorchRec's pipelines call these parts themselves, those of the next batch among those of the current one. Every rank makes the
same calls in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionAwaitable, EmbeddingBagCollectionContext
from torchrec.distributed.types import Awaitable, EmbeddingModuleShardingPlan, LazyAwaitable, NoWait, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

import weft.nn
from weft.embedding import JaggedInput
from weft.embedding.check import no_tables_on
from weft.nn.input_dist import BegunBatch, SentBatch
from weft.nn.sharded_tensors import Part, sharded_tensor
from weft.operator.together import together
from weft.torchrec.fused_optimizer import FusedOptimizer
from weft.torchrec.plan import read_plan
from weft.words import kind


class _Batch(Multistreamable):
    """This rank's features of all samples, and the number of samples of each rank."""

    def __init__(self, jagged: JaggedInput, batch_sizes: tuple[int, ...]) -> None:
        self.jagged, self.batch_sizes = jagged, batch_sizes

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (self.jagged.values, self.jagged.offsets, self.jagged.weights):
            if tensor is not None:
                tensor.record_stream(stream)


class _Sent(Awaitable[Any]):
    def __init__(self, module: ShardedEmbeddingBagCollection, sent: SentBatch) -> None:
        super().__init__()
        self._module, self._sent = module, sent

    def _wait_impl(self) -> Any:
        with self._module._distribution() as distribution:
            return _Batch(*distribution.arrive(self._sent))


class _Begun(Awaitable[Awaitable[Any]]):
    def __init__(self, module: ShardedEmbeddingBagCollection, begun: BegunBatch) -> None:
        super().__init__()
        self._module, self._begun = module, begun

    def _wait_impl(self) -> Awaitable[Any]:
        with self._module._distribution() as distribution:
            sent = distribution.send(self._begun)
        self._module.weft_module._batches.keep(sent.features.received)
        return _Sent(self._module, sent)


class ShardedEmbeddingBagCollection(
    ShardedEmbeddingModule[KJTList, list[torch.Tensor], KeyedTensor, EmbeddingBagCollectionContext],
    FusedOptimizerModule,
):
    """TorchRec's `ShardedModule` of an EmbeddingBagCollection, made by `weft.torchrec.EmbeddingBagCollectionSharder`.

    It takes and returns TorchRec's objects. Parameters, state dict and order of columns are those of TorchRec's own module: the
    state dict has all tables on every rank, as ShardedTensors. `weft_module` is the `weft.nn.ShardedEmbeddingBagCollection` inside.

    Ids out of range have no row; FBGEMM reads row 0. Tables of 16 bits are pooled into 16 bits, and then converted to the plan's
    `output_dtype`, float32 by default. The constructor and calls are collective.
    """

    def __init__(
        self, module: EmbeddingBagCollection, plan: EmbeddingModuleShardingPlan, env: ShardingEnv, *,
        fused_params: dict[str, Any] | None = None, device: torch.device | None = None, gradient_division: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        """gradient_division: as `torchrec.distributed.comm_ops.set_gradient_division`. options: of weft's module."""
        super().__init__()
        self.module_sharding_plan, self._env = plan, env
        read = read_plan(module, plan, env, device, fused_params)
        self._configs, self._output_dtype = module.embedding_bag_configs(), read.options.output_dtype
        made = weft.nn.ShardedEmbeddingBagCollection(
            read.tables, group=env.process_group, device=device, placement=read.placement, is_weighted=module.is_weighted(),
            optimizer=read.options.optimizer if read.is_fused else None, bounds_check=read.options.bounds_check,
            gradients="mean" if gradient_division else "sum", **options,
        )  # fmt: skip
        self.__dict__["weft_module"] = made  # not a submodule: its parameters have TorchRec's places
        self._is_fused = read.is_fused
        self._optim: KeyedOptimizer = CombinedOptimizer([])
        self.embedding_bags = nn.ModuleDict({config.name: nn.Module() for config in self._configs})
        self._register()
        self.register_state_dict_post_hook(_as_sharded_tensors)
        self.register_load_state_dict_pre_hook(_as_local_tensors)
        if module.device.type not in ("meta", "cpu"):  # TorchRec, too, takes the values of a module on a GPU alone
            self.load_state_dict(module.state_dict(), strict=False)

    # --- a call, in parts ---

    def create_context(self) -> EmbeddingBagCollectionContext:
        return EmbeddingBagCollectionContext()

    def input_dist(  # type: ignore[override]
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin the distribution of this rank's samples. Collective, and so are both waits."""
        refusal = ValueError(no_tables_on(self.weft_module.device)) if self.weft_module.device.type == "meta" else None
        with self._distribution() as distribution:
            return KJTListSplitsAwaitable([_Begun(self, distribution.begin(features, refusal))], ctx)

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList) -> list[torch.Tensor]:
        """Return the pooled vectors of this rank's samples, [local batch, sum(D)]. Collective: it includes the all-to-all."""
        batch = cast(Any, dist_input)[0]
        pooled = self.weft_module._pooled(batch.jagged, batch.batch_sizes).values()
        return [pooled if pooled.dtype == self._output_dtype else pooled.to(self._output_dtype)]

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Name the columns of `compute`'s result."""
        made = self.weft_module
        return EmbeddingBagCollectionAwaitable([NoWait(output[0])], list(made._length_per_key), list(made._keys))

    @contextlib.contextmanager
    def _distribution(self) -> Any:
        """Enter one part of the distribution of ids: one call for the ranks. Like TorchRec's, it has no gradients."""
        made = self.weft_module
        with together(type(self).__name__, made.group, made._speaks_on, made.deadline_s), torch.no_grad():
            yield made._input_dist

    # --- tables ---

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The tables' optimizer (`weft.torchrec.FusedOptimizer`); with kernel "dense" one without parameters."""
        return self._optim

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return EmbeddingBagCollection

    def embedding_bag_configs(self) -> list[Any]:
        """Return the configs of all tables, as TorchRec's module was given them."""
        return list(self._configs)

    def is_weighted(self) -> bool:
        return self.weft_module.is_weighted()

    def reset_parameters(self) -> None:
        """Fill this rank's tables with their initial values. Not collective."""
        self.weft_module.reset_parameters()

    def _register(self) -> None:
        """Give this rank's tables, and empty parameters for the others, their names. Make the optimizer."""
        made = self.weft_module
        own = {name: cast(nn.Parameter, bag.weight) for name, bag in made.embedding_bags.items()}
        for name, place in self.embedding_bags.items():
            parameter: Any = own.get(name)
            if parameter is None:
                parameter = nn.Parameter(torch.empty(0, device=made.device), requires_grad=not self._is_fused)
            place.register_parameter("weight", parameter)
        if not self._is_fused:
            return
        params = {f"embedding_bags.{name}.weight": parameter for name, parameter in own.items()}
        states = {
            f"embedding_bags.{name}.weight": {
                key: self._sharded(name, state) for key, state in made.fused_optimizer.state.get(parameter, {}).items()
            }
            for name, parameter in own.items()
        }
        self._optim = FusedOptimizer(made.fused_optimizer, params, states)
        for name, place in self.embedding_bags.items():
            weight: Any = place.weight
            weight._in_backward_optimizers = [self._optim if name in own else EmptyFusedOptimizer()]

    def _sharded(self, name: str, own: torch.Tensor | None) -> ShardedTensor:
        """Return a table, or a state that has its rows. own: this rank's part."""
        made = self.weft_module
        index = self._index[name]
        table = made.sharding.tables[index]
        size: tuple[int, ...] = (table.num_embeddings, table.embedding_dim) if own is None else tuple(own.shape)
        part = Part(made.sharding.rank_of_table[index], (0,) * len(size), size)
        dtype = table.dtype if own is None else own.dtype
        return sharded_tensor(size, [part], [] if own is None else [own], dtype, made.device, made.group)

    @property
    def _index(self) -> dict[str, int]:
        return {table.name: index for index, table in enumerate(self.weft_module.sharding.tables)}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Convert and move the tables: `to(...)`, `half()` and others of `nn.Module` end here."""
        before = self.weft_module.device, self.weft_module.sharding.dtype
        self.weft_module._apply(fn, recurse)
        if before != (self.weft_module.device, self.weft_module.sharding.dtype):
            self._register()
        return self

    def extra_repr(self) -> str:
        return self.weft_module.extra_repr()


def _as_sharded_tensors(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    own = module.weft_module.embedding_bags
    for config in module._configs:
        weight = own[config.name].weight if config.name in own else None
        state_dict[f"{prefix}embedding_bags.{config.name}.weight"] = module._sharded(config.name, weight)


def _as_local_tensors(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace each table by this rank's part: of a ShardedTensor, or of the whole table.

    Raise `ValueError` for another shape or plan before any table is copied."""
    made = module.weft_module
    local: dict[str, torch.Tensor] = {}
    for table in made.sharding.tables:
        key = f"{prefix}embedding_bags.{table.name}.weight"
        value = state_dict.get(key)
        if value is None:
            continue
        if not isinstance(value, ShardedTensor) and type(value) not in (torch.Tensor, nn.Parameter):
            raise ValueError(f"{key} is {kind(value)}: pass a ShardedTensor, or the whole table")
        wanted = [table.num_embeddings, table.embedding_dim]
        if list(value.size()) != wanted:
            raise ValueError(f"{key} has shape {list(value.size())} and must have {wanted}, the whole table's")
        shards = [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        if table.name not in made.embedding_bags:
            local[key] = torch.empty(0)
        elif len(shards) == 1 and list(shards[0].shape) == wanted:
            local[key] = shards[0]
        else:
            raise ValueError(
                f"{key} is sharded otherwise than this module's plan: load it by torch.distributed.checkpoint into this "
                "module's state_dict()"
            )
    state_dict.update(local)
