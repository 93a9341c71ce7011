"""TorchRec's sharded EmbeddingBagCollection, with weft's input distribution, its fused pooling and all-to-all, and its
updates.

    input_dist                     starts the exchange of headers (batch size, number of ids per feature)
    first wait                     reads the numbers of ids on the CPU; starts the exchange of ids
    second wait                    returns the features of this rank's tables for the samples of all ranks
    compute (and output_dist)      calls weft.embedding_all_to_all; returns the pooled vectors of this rank's samples

TorchRec's pipelines call these stages themselves, and run stages of the next batch between stages of the current batch.
Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionAwaitable, EmbeddingBagCollectionContext
from torchrec.distributed.types import Awaitable, EmbeddingModuleShardingPlan, LazyAwaitable, NoWait, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

import weft.nn
from weft.embedding import EmbeddingBagConfig, JaggedInput
from weft.embedding.check import CheckedInput, no_tables_on
from weft.embedding.options import OutputDtype
from weft.embedding.partition import TableWise
from weft.nn.id_batches import BegunBatch, SentBatch
from weft.nn.partitioned_input import Arranged
from weft.operator.together import together
from weft.torchrec.parts import is_cut
from weft.torchrec.plan import read_plan
from weft.torchrec.tables import ShardedTables

_NARROW: dict[torch.dtype, OutputDtype] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_Arranged: TypeAlias = tuple[Arranged, CheckedInput | None]


class _Batch(Multistreamable):
    """The input of a call after its exchange between ranks: the features of this rank's tables for all samples, and the number
    of samples of each rank.

    jagged: the received features; None if all tables are data-parallel.
    arranged: this rank's own input, separated by kind of table (`weft.nn.partitioned_input.Arranged`); None if no table is
        sharded.
    """

    def __init__(self, jagged: JaggedInput | None, batch_sizes: tuple[int, ...], arranged: _Arranged | None) -> None:
        self.jagged, self.batch_sizes, self.arranged = jagged, batch_sizes, arranged

    def record_stream(self, stream: torch.Stream) -> None:
        given = None if self.arranged is None else self.arranged[0]
        tensors: list[torch.Tensor | None] = [] if given is None else [*given.lengths.values()]
        for jagged in (self.jagged, None if given is None else given.replicated):
            tensors += [] if jagged is None else [jagged.values, jagged.offsets, jagged.weights]
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)


class _Sent(Awaitable[Any]):
    def __init__(self, module: ShardedEmbeddingBagCollection, sent: SentBatch, arranged: _Arranged | None) -> None:
        super().__init__()
        self._module, self._sent, self._arranged = module, sent, arranged

    def _wait_impl(self) -> Any:
        with self._module._distribution() as distribution:
            jagged, batch_sizes = distribution.arrive(self._sent)
        return _Batch(jagged, batch_sizes, self._arranged)


class _Begun(Awaitable[Awaitable[Any]]):
    def __init__(self, module: ShardedEmbeddingBagCollection, begun: BegunBatch, arranged: _Arranged | None) -> None:
        super().__init__()
        self._module, self._begun, self._arranged = module, begun, arranged

    def _wait_impl(self) -> Awaitable[Any]:
        with self._module._distribution() as distribution:
            sent = distribution.send(self._begun)
        self._module._parts._batches.keep(sent.tensors)
        return _Sent(self._module, sent, self._arranged)


class ShardedEmbeddingBagCollection(
    ShardedTables,
    ShardedEmbeddingModule[KJTList, list[torch.Tensor], KeyedTensor, EmbeddingBagCollectionContext],
):
    """TorchRec's `ShardedModule` of an EmbeddingBagCollection. `weft.torchrec.EmbeddingBagCollectionSharder` makes it.

    Inputs and outputs are TorchRec's objects. Parameters, state dict and order of columns are the same as in TorchRec's
    own module: the state dict has all tables on every rank, as ShardedTensors. The module wraps a
    `weft.nn.ShardedEmbeddingBagCollection`, `weft_module`.

    For an id out of range, weft reads a zero row and updates no row. (FBGEMM reads row 0.)

    Pooled vectors of 16-bit tables are rounded to 16 bits, and then converted to the plan's `output_dtype` (default
    float32). If `output_dtype` has 16 bits and all tables of the collection are table-wise, weft sends vectors and
    gradients in that dtype.

    All ranks must construct the module and make every call. Calls raise the errors of
    `weft.nn.ShardedEmbeddingBagCollection`. `weft_module.memory()` returns the bytes that are in use.
    """

    def __init__(
        self, module: EmbeddingBagCollection, plan: EmbeddingModuleShardingPlan, env: ShardingEnv, *,
        fused_params: dict[str, Any] | None = None, device: torch.device | None = None, gradient_division: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        """Convert `module` and its `plan` to weft's module. All ranks must make this call.

        gradient_division: True to divide gradients by the number of ranks, as
            `torchrec.distributed.comm_ops.set_gradient_division` does.
        options: further arguments of weft's module.
        """
        super().__init__()
        self.module_sharding_plan, self._env = plan, env
        name, deadline_s = type(self).__name__, options.get("deadline_s")
        read = read_plan(module, plan, env, device, fused_params, EmbeddingBagConfig.of, name, deadline_s)
        self._configs, self._output_dtype = module.embedding_bag_configs(), read.options.output_dtype
        # Send vectors in 16 bits if the plan requests 16 bits. Vectors of parts keep the tables' dtype until they are
        # assembled.
        is_whole = all(isinstance(sharding, TableWise) for sharding in read.partition.shardings)
        output_dtype = _NARROW.get(self._output_dtype, "table") if is_whole else "table"
        made = weft.nn.ShardedEmbeddingBagCollection(
            read.partition.tables, group=env.process_group, device=device, placement=read.placement,
            optimizer=read.options.optimizer if read.is_fused else None, bounds_check=read.options.bounds_check,
            gradients="mean" if gradient_division else "sum", is_weighted=module.is_weighted(),
            output_dtype=output_dtype, **options,
        )  # fmt: skip
        self._adopt(made, read, "embedding_bags")
        self._keys = [slot.key for slot in read.partition.slots]
        self._dims = [slot.dim for slot in read.partition.slots]
        if module.device.type not in ("meta", "cpu"):  # like TorchRec, copy values only from a module on a GPU
            self.load_state_dict(module.state_dict(), strict=False)

    # --- a call, in parts ---

    def create_context(self) -> EmbeddingBagCollectionContext:
        return EmbeddingBagCollectionContext()

    def input_dist(  # type: ignore[override]
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin to exchange the ids of this rank's samples. Return an awaitable that returns an awaitable, as in TorchRec. All
        ranks must make this call, and wait for both.
        """
        made, given, arranged = self.weft_module, cast(Any, features), cast("_Arranged | None", None)
        refusal: Exception | None = None
        if made.device.type == "meta":
            refusal = ValueError(no_tables_on(made.device))
        with self._distribution() as distribution:
            if refusal is None and is_cut(made):  # parts of row-wise tables read separate features
                try:
                    arranged = made._arranged(features)
                    given = arranged[0].parts
                except Exception as error:  # `send` raises the error on every rank
                    refusal = error
            if distribution is not None:
                return KJTListSplitsAwaitable([_Begun(self, distribution.begin(given, refusal), arranged)], ctx)
            if refusal is not None:
                raise refusal
            return KJTListSplitsAwaitable([NoWait(NoWait(cast(Any, _Batch(None, (), arranged))))], ctx)

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList) -> list[torch.Tensor]:
        """Pool the ids, and exchange the pooled vectors. Return the vectors of this rank's samples, [local batch, columns of
        all tables]. All ranks must make this call.
        """
        made, batch = self.weft_module, cast(Any, dist_input)[0]
        values: Any = None
        if batch.jagged is not None:
            values = self._parts._pooled(batch.jagged, batch.batch_sizes).values()
        if batch.arranged is not None:
            values = made._joined(values, *batch.arranged).values()
        return [values if values.dtype == self._output_dtype else values.to(self._output_dtype)]

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Return the result of `compute` as a KeyedTensor with the names of features. This call does not communicate."""
        return EmbeddingBagCollectionAwaitable([NoWait(output[0])], list(self._dims), list(self._keys))

    @contextlib.contextmanager
    def _distribution(self) -> Any:
        """Return a context manager for one stage of the input distribution, without gradients, as in TorchRec. If a
        rank raises in the stage, its peers raise too.

        The context manager yields weft's input distribution, or None if all tables are data-parallel.
        """
        made, parts = self.weft_module, self._parts
        with together(type(self).__name__, made.group, made._exchange_device, made.deadline_s), torch.no_grad():
            yield None if parts is None else parts._input_dist

    @property
    def _parts(self) -> Any:
        """The weft module with this rank's parts of tables, whose forward communicates; None if all tables are
        data-parallel.
        """
        return self.weft_module._parts if is_cut(self.weft_module) else self.weft_module

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return EmbeddingBagCollection

    def embedding_bag_configs(self) -> list[Any]:
        """Return the configs of all tables, as they were passed to TorchRec's module."""
        return list(self._configs)

    def is_weighted(self) -> bool:
        return self.weft_module.is_weighted()  # type: ignore[no-any-return]
