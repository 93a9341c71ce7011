"""TorchRec's `EmbeddingBagCollection` with sharded tables and weft's fused pooling and all-to-all.

    input="local_batch":   features of all tables for this rank's samples -> InputDist -> as for "global_batch"
    input="global_batch":  features of this rank's tables for all samples -> fused pooling and all-to-all

With both, a rank gets the pooled vectors of all tables for its own samples, with columns in table order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, astuple, replace
from typing import Any, ClassVar, Literal, Self, cast

import torch
import torch.distributed as dist
from torch import nn

from weft.arguments import checked_deadline
from weft.embedding.check import DEVICE_TYPES, CheckedInput, blocks_of_slots, check_offsets, check_parts, no_tables_on
from weft.embedding.jagged import JaggedInput, KeyedJaggedTensor, KeyedTensor, as_jagged, keyed_of
from weft.embedding.optimizers import EmbeddingOptimizer
from weft.embedding.options import BoundsCheck, EmbeddingOptions, Order, OutputDtype, Transport
from weft.embedding.partition import TableSharding, is_cut
from weft.embedding.placement import place_tables
from weft.embedding.tables import DTYPES, EmbeddingBagConfig, EmbeddingSharding
from weft.embedding.training import NOT_TRAINED, Training, check_module_options, training_of
from weft.embedding.update import FusedUpdate
from weft.nn import local_batch
from weft.nn.boxed_ids import IdBound
from weft.nn.embedding_memory import BatchesInFlight, EmbeddingMemory, collected_bytes, memory_of, pooled_workspace
from weft.nn.embedding_table import Table, first_values, weights_of
from weft.nn.input_dist import input_dist_of
from weft.nn.making import agree_on_module, check_table_names, checked_input_options, device_for, fill_together
from weft.nn.prefetching import Prefetched
from weft.nn.prefetching_tables import PrefetchingTables
from weft.nn.table_parts import check_full
from weft.nn.trained_tables import TrainedTables
from weft.operator.calls import made
from weft.operator.replay import watching
from weft.operator.steady import SteadyCalls
from weft.operator.together import together
from weft.ops.embedding_all_to_all import OPERATOR, Form, form_of, plan_in
from weft.ops.embedding_release import buffer_bytes, release
from weft.runtime.embedding_backward import collecting, update_collected
from weft.runtime.opaque import opaque


class ShardedEmbeddingBagCollection(PrefetchingTables):
    """Embedding tables that are sharded over `group`. On each rank, a call returns the pooled vectors of that rank's
    samples.

    All ranks of `group` must construct the module with equal arguments, and make every call. The constructor compares
    all arguments except `device` and `deadline_s`, and raises `DisagreementError` if they differ. If a rank is missing
    or dead, the other ranks raise `DeadlineError` or `PeerLostError`.

    All ranks must also run the backward of the same calls, in the same order. Gradients are reduced in a fixed order,
    so equal inputs give equal bits, unless `deterministic=False`. DistributedDataParallel ignores the tables. For FSDP,
    pass `ignored_params=weft.nn.ignore_tables(model)`. Under torch.compile, a call with gradients breaks the graph.

    With an `optimizer`, backward updates the tables and returns no gradients of tables. Set the learning rate in
    `fused_optimizer.param_groups[0]["lr"]`. A second backward of the same call raises `WeftError`. Calls in
    `torch.no_grad()` update nothing. Without an optimizer, the tables require gradients, as in `nn.EmbeddingBag`.

    The parameters are `embedding_bags.<table>.weight`, ordinary tensors [num_embeddings, embedding_dim]. A rank has
    only its own tables, and its `state_dict()` has only these. The table's config sets its initial values with
    `weight_init_min` and `weight_init_max`, or with `init_fn` (default: uniform in +-sqrt(1/num_embeddings)). Each
    table is filled with a seed derived from the first rank's default generator, so its values do not depend on the
    placement. `load_full_weights` copies the weights of an unsharded collection.

    `half()`, `bfloat16()`, `float()` and `to(...)` convert and move the tables, and so change the dtype and the device
    of the output. All ranks need the same dtype at the next call. An unsupported dtype or device raises `ValueError`
    and leaves the module unchanged. `copy.deepcopy` copies the weights without communication. The copy uses the same
    group. The module cannot be pickled (`TypeError`): save its `state_dict()` on every rank, and load it into a new
    module.

    Calls allocate symmetric memory for their results. Destroying the group or calling `close()` frees it.

    tables: a list of `weft.EmbeddingBagConfig` or of TorchRec's configs, all with one dtype. Output columns are in the
        order of this list.
    group: a process group that contains this rank. There is no default: pass `dist.group.WORLD` for all ranks.
    device: the device of this rank's tables and features (default: the current GPU for an NCCL group, otherwise the
        CPU). With device="meta" the tables take no memory. Before the first call, use `to_empty(device=...)`, and then
        load values or call `reset_parameters()`.
    placement: the owner rank of each table, by name or in table order (default: balanced by
        `weft.embedding.place_tables`). `weft.embedding.ColumnWise` and `RowWise` shard a table, and `DataParallel`
        copies it to every rank. The parameters of a sharded table are its parts, with names such as "table[rows,
        columns]". Row-wise and data-parallel tables need input="local_batch".
    rows_read: the mean number of rows that a sample reads from each table, by name or in table order (default: 1 per
        feature). Pass it if pooling factors differ, to balance the ranks.
    input: "local_batch": a rank passes all features of its own samples, as in TorchRec, and weft sends the ids to the
        ranks of their tables. "global_batch": a rank passes the features of its own tables for the samples of all
        ranks, in rank order, and weft distributes no ids.
    is_weighted: True if the features have one float32 weight per id. If False, weights in the features are ignored, as
        in TorchRec.
    optimizer: `weft.SGD`, `weft.RowwiseAdagrad`, `weft.Adagrad`, `weft.Adam` or `weft.PartialRowwiseAdam`, which update
        rows in backward. None: backward leaves gradients for a torch optimizer.
    sparse: True for sparse COO gradients, as `nn.EmbeddingBag(sparse=True)` has. Not supported with an optimizer.
    deterministic: with an optimizer, True for equal bits from equal inputs. False allows an update without this guarantee:
        on GPUs, `weft.SGD` then uses atomics instead of sorting ids, which is faster for some inputs.
    gradients: "mean" divides the sum of gradients over ranks by the number of ranks, as DistributedDataParallel and
        TorchRec do. "sum" does not.
    dedup: True to send each distinct id of a rank once. The rank receives the id's row, pools it, and sends one summed gradient
        for it. This is faster if bags share most of their ids. All tables need the same `embedding_dim` and pooling, and are
        row-wise or on one rank. Sums of gradients are rounded to the tables' dtype before they are sent.
    max_ids: the largest number of ids that a rank may receive in a call, with input="local_batch" (default: no limit).
        If any rank would receive more, every rank raises `RefusedError` with the numbers of all ranks, before ids are
        sent. With a limit, each call first exchanges the numbers of ids.
    batch_size: the number of samples of each rank in every call, with `max_ids` (default: any number). On GPUs of one host, the
        CPU then waits for no device from the second call on. Kernels send the ids through memory of a fixed size, and calls can
        be captured in a CUDA graph. `values` may end with unused ids. The device finds bad lengths and too many ids. The call
        then pools empty bags, a later call raises the error, and the group has failed.
    transport, order, slice_size, bounds_check, hash, outputs, output_dtype, deadline_s: as for
        `weft.embedding_all_to_all`. `output_dtype` is refused if a table is column-wise, row-wise or data-parallel.
        `deadline_s` also limits the input distribution's wait for the numbers of ids: on CPU, and from the second batch on
        between GPUs of one host. Without `deadline_s`, this wait ends on GPUs at the process group's timeout.
    """

    _container, _name = "embedding_bags", "ShardedEmbeddingBagCollection"
    _of_one_module: ClassVar[dict[str, Any]] = {**TrainedTables._of_one_module, "_prefetched": None, "_steady": None}
    embedding_bags: nn.ModuleDict
    _of_parts: ClassVar[type[Any] | None] = None
    """The subclass for column-wise, row-wise and data-parallel tables. `weft.nn.partitioned_embedding` imports this module
    and sets the attribute.
    """
    _of_rows: ClassVar[type[Any] | None] = None
    """The subclass for `dedup=True`, from `weft.nn.deduplicated_embedding` too."""

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        group: dist.ProcessGroup,
        device: torch.device | str | None = None,
        placement: Mapping[str, int | TableSharding] | Sequence[int | TableSharding] | None = None,
        rows_read: Sequence[float] | Mapping[str, float] | None = None,
        input: Literal["local_batch", "global_batch"] = "local_batch",
        is_weighted: bool = False,
        optimizer: EmbeddingOptimizer | None = None,
        sparse: bool = False,
        deterministic: bool = True,
        gradients: Literal["mean", "sum"] = "mean",
        transport: Transport = "auto",
        order: Order = "remote_first",
        slice_size: int | None = None,
        bounds_check: BoundsCheck = "warning",
        hash: bool = False,
        outputs: int = 2,
        output_dtype: OutputDtype = "table",
        dedup: bool = False,
        max_ids: int | None = None,
        batch_size: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        super().__init__(group, optimizer, sparse)
        self.input = input
        self._is_weighted, self._deterministic = is_weighted, deterministic
        self._batches = BatchesInFlight()
        self._prefetched: Prefetched | None = None
        self._steady = SteadyCalls()
        sharding, options, refusal = None, None, None
        try:
            self.deadline_s = checked_deadline(deadline_s)
            max_ids, batch_size = checked_input_options(input, is_weighted, max_ids, batch_size)
            check_module_options(optimizer, sparse, gradients, deterministic, dedup)
            device = device_for(group, device)
            ranks = cast("Mapping[str, int] | Sequence[int] | None", placement)
            sharding = place_tables(tables, group.size(), rows_read=rows_read, placement=ranks)
            check_table_names(sharding.tables)
            # Check options now, on every rank, instead of at the first call.
            options = EmbeddingOptions(transport, order, slice_size, bounds_check, hash, outputs, output_dtype)
        except Exception as error:  # peers wait for this rank, so it must not raise alone
            refusal = error
        said = {**asdict(options or EmbeddingOptions()), "input": input, "is_weighted": is_weighted}
        said |= {"max_ids": max_ids, "batch_size": batch_size, "deterministic": deterministic, "dedup": dedup}
        said |= {"optimizer": repr(optimizer), "sparse": sparse, "gradients": gradients}
        if sharding is not None:
            said["first values"] = [first_values(table) for table in sharding.tables]
        sharding, seed = agree_on_module(group, device, sharding, said, refusal, self.deadline_s, self._name)
        self._options, self._max_ids = cast(EmbeddingOptions, options), max_ids
        self._bound = None if batch_size is None else IdBound(cast(int, max_ids), batch_size)
        self._factor = 1 / group.size() if gradients == "mean" else 1.0
        self._settle(sharding, cast(torch.device, device))
        self._make_tables(seed)
        self._ready()
        self._features = {slot.feature for slot in self.sharding.slots}
        self._own = {slot.feature for slot in self.sharding.local_slots(self.rank)}
        self._keys = [slot.key for slot in self.sharding.slots]
        self._length_per_key = [slot.dim for slot in self.sharding.slots]

    def __new__(cls, *arguments: Any, placement: Any = None, dedup: bool = False, **options: Any) -> Any:
        other = cls._of_rows if dedup is True else cls._of_parts if is_cut(placement) else None
        return super().__new__(other or cls)

    __new__.__signature__ = inspect.signature(__init__)  # type: ignore[attr-defined]  # for documentation

    def forward(self, features: Any, *, batch_sizes: Sequence[int] | None = None) -> KeyedTensor:
        """Return the pooled vectors of all tables for this rank's samples. All ranks must make this call.

        features: a KeyedJaggedTensor, weft's or TorchRec's. Keys without a table are ignored, as in TorchRec, so
            several modules can share one input.
        batch_sizes: with input="global_batch", the number of samples of each rank, in rank order. Default: the global
            batch divided evenly; the first ranks get the remainder. With input="local_batch" ranks exchange their batch
            sizes, and this argument raises an error.

        Returns a KeyedTensor of values [local batch, columns of all tables] in the tables' dtype or `output_dtype`,
        with columns in table order. A key is the feature's name, or "feature@table" if several tables use the feature.

        Raises `RefusedError` (a `ValueError`) on every rank for bad input on any rank, for example if a table's feature
        is missing.
        """
        is_trained = torch.is_grad_enabled() and (self._is_trained or self._optimizer)
        is_opaque = is_trained or self._max_ids is not None or self._prefetched is not None
        if torch.compiler.is_compiling() and is_opaque:
            return self._called(features, batch_sizes)  # opaque: the graph breaks here
        if self.input == "global_batch":
            return self._pooled(features, batch_sizes)
        refusal = None
        if self.device.type == "meta":
            refusal = ValueError(no_tables_on(self.device))
        elif batch_sizes is not None:
            refusal = ValueError(
                f"batch_sizes={batch_sizes} works only with input='global_batch': do not pass it, because ranks exchange the "
                "sizes of local batches"
            )
        if torch.compiler.is_compiling():
            if (
                refusal is not None and batch_sizes is not None
            ):  # the operator itself refuses tables on meta, on every rank
                raise refusal
            call = self._form, self._weights(), features, self.group, self._is_weighted, self.deadline_s
            return KeyedTensor(self._keys, self._length_per_key, local_batch.pooled(*call))
        with together(self._name, self.group, self._exchange_device, self.deadline_s):
            # The call has several collectives, but counts as one call across ranks.
            if self._prefetched is not None:
                if refusal is not None:
                    raise refusal  # peers wait for the prefetched ids, and not for the exchange below
                return self._pooled(*self._taken(features))
            self._require_bound(features)
            return self._pooled(*self._input_dist(features, refusal))

    @opaque
    def _called(self, features: Any, batch_sizes: Sequence[int] | None) -> KeyedTensor:
        return ShardedEmbeddingBagCollection.forward(self, features, batch_sizes=batch_sizes)

    def _pooled(self, features: Any, batch_sizes: Sequence[int] | None) -> KeyedTensor:
        called, gradients = [], torch.is_grad_enabled()

        def form(group: dist.ProcessGroup | str | None) -> Any:
            called.append(self._own_features(features))
            return form_of(self._form, self._weights(), called[0], self.rank, batch_sizes, self._training())

        call = OPERATOR, self.group, self._exchange_device, form
        if torch.compiler.is_compiling():
            (values,) = made(*call, deadline_s=self.deadline_s)
            return KeyedTensor(self._keys, self._length_per_key, values)
        is_trained, tables = gradients and not self._is_frozen, cast(nn.ModuleDict, self._modules["embedding_bags"])
        kind = is_trained and self._update is not None, batch_sizes
        found = self._steady.again(features, kind, tables._modules, gradients)
        if found is None:
            with watching(self.device.type == "cuda") as watched:
                (values,) = made(*call, deadline_s=self.deadline_s)
            found = called[0], values
            self._steady.learn(watched, called[0], kind)
        if is_trained:
            self._batches.note(found[0], len(found[0].keys or self._own))
        return keyed_of(self._keys, self._length_per_key, found[1])

    def _collecting(self) -> AbstractContextManager[list[Any]]:
        return collecting(cast(FusedUpdate, self._update))

    def _update_collected(self, collected: list[Any]) -> None:
        update_collected(
            cast(FusedUpdate, self._update), collected, self.group, self._exchange_device(), self.deadline_s
        )

    def _training(self) -> Training:
        if not torch.is_grad_enabled() or (self._is_frozen and self._update is not None):
            return NOT_TRAINED
        is_trained = self._is_trained and self._update is None
        return training_of(self._update, self._sparse, is_trained, self._exchange_device(), self._factor)

    def memory(self) -> EmbeddingMemory:
        """Return the memory of this module on this rank, in bytes. `print` shows the result as text, with a line for
        each table. Ranks do not communicate.
        """
        weights = dict(zip(self.embedding_bags, self._weights(), strict=True))
        buffers = buffer_bytes(plan_in(*self._form), self.group, self._exchange_device())
        in_flight = self._batches.nbytes + collected_bytes(self._update)
        workspace = pooled_workspace(self._batches, self.sharding, self.rank, self.device)
        return memory_of(weights, self._update, in_flight, buffers, workspace)

    def close(self) -> None:
        """Free the symmetric memory that calls of this module have allocated, but not the tables. All ranks must make
        this call.

        Without `close`, the memory is kept until the group is destroyed, and accumulates in a program that creates many
        modules. A later call of this module, or of a copy, allocates the memory again. Close a module before `half()`
        and similar conversions: a `close` after a conversion does not free the memory of calls before it. On GPUs
        `close` waits for the device. After `close`, do not replay CUDA graphs that have captured calls of the module.

        Raises `RefusedError` on every rank if any rank still keeps a result, or a view of a result, in this memory.
        Raises `DisagreementError` if ranks close different modules, and `DeadlineError`, `PeerLostError` or
        `PoisonedGroupError` as calls do. The memory of a failed group is freed with the group.
        """
        release(plan_in(*self._form), group=self.group, device=self._exchange_device(), deadline_s=self.deadline_s)

    def _weights(self) -> list[torch.Tensor]:
        return weights_of(self.embedding_bags._modules.values())

    def _exchange_device(self) -> torch.device:
        return self._input_dist.device

    def _own_features(self, features: Any) -> JaggedInput:
        """Return the features of the global batch without unused keys, and without per-sample weights if `is_weighted`
        is False.
        """
        jagged = as_jagged(features)
        if not self._is_weighted:
            jagged = jagged if jagged.weights is None else jagged._replace(weights=None)
        elif jagged.weights is None:  # a later check refuses missing weights, unless there are no ids
            jagged = jagged._replace(weights=torch.empty(0, dtype=torch.float32, device=jagged.values.device))
        keys = jagged.keys
        if keys is None or self._features.issuperset(keys) or not self._own.issubset(keys):
            return jagged
        check_parts(jagged, None)
        if jagged.values.device.type == "cpu":  # dropped keys are checked only here
            blocks = blocks_of_slots(keys, self.sharding, self.rank)
            check_offsets(jagged, self.sharding, self.rank, CheckedInput(blocks, (), jagged.stride or 0))
        keyed = KeyedJaggedTensor(keys, jagged.values, jagged.weights, offsets=jagged.offsets, stride=jagged.stride)
        return as_jagged(keyed.permute([block for block, key in enumerate(keys) if key in self._own]))

    def load_full_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's tables from whole tables. Values are converted to the tables' dtype.

        weights: whole tables, by table name; tables of other ranks may be present too. For an unsharded collection pass
            `{name: bag.weight for name, bag in ebc.embedding_bags.items()}`.

        If the collection has data-parallel tables, all ranks must call this method with equal values for these tables.
        Otherwise ranks do not communicate.

        Raises `ValueError` for a missing or unknown table or a wrong shape, and `DisagreementError` on every rank if values
        of a data-parallel table differ between ranks, before anything is copied. A rank that calls this method alone
        raises `DeadlineError`.
        """
        local = dict(zip(self.embedding_bags, self._weights(), strict=True))
        check_full(self.sharding.tables, local, self.rank, weights)
        with torch.no_grad():
            for name, weight in local.items():
                weight.copy_(weights[name])

    def _make_tables(self, seed: int) -> None:
        """Make this rank's tables, and fill them with their initial values. seed: the random seed, equal on all ranks. All
        ranks must make this call.
        """

        def make() -> None:
            for index in self.sharding.local_tables(self.rank):
                table = self.sharding.tables[index]
                # add_module would refuse names of the container's own attributes, but a table may be called "items".
                self.embedding_bags._modules[table.name] = Table(table, self.device, seed + index)

        fill_together(make, self.group, self.device, self.deadline_s)

    def _mark_tables(self) -> None:
        """Mark the tables. Also make the optimizer's states, or move them to the tables' device."""
        super()._mark_tables()
        self._steady = SteadyCalls()
        if self._optimizer is None:
            return
        if self._update is None:
            weights = self._weights()
            self._update = FusedUpdate(
                self._optimizer, weights, factor=self._factor, deterministic=self._deterministic, device=self.device
            )
        elif self._update.step.device != self.device:
            self._update.move(self.device)
            self._fused_optimizer = None

    def _settle(self, sharding: EmbeddingSharding, device: torch.device) -> None:
        """Store the arguments of `weft.embedding_all_to_all` and the input distribution for this dtype and device of
        the tables. `_apply` calls this method again after a conversion such as `half()`.
        """
        self.sharding, self.device = sharding, device
        self._form = cast(Form, (sharding.written, *astuple(self._options)))
        # Ranks whose tables are on meta still communicate, to report that they refuse the call.
        speaks_on = device_for(self.group, None) if device.type == "meta" else device
        of_input = sharding, self.group, speaks_on, self._is_weighted, self.deadline_s
        self._input_dist = input_dist_of(*of_input, self._bound)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Convert and move parameters. `half()`, `to(...)`, `cuda()` and similar methods of `nn.Module` call it."""
        if not recurse:  # only this module's own parameters, and it has none
            return super()._apply(fn, recurse)
        dtype, device = self._after(fn)
        super()._apply(fn)
        sharding = self.sharding
        if dtype != sharding.dtype:
            sharding = replace(sharding, tables=tuple(replace(t, dtype=dtype) for t in sharding.tables))
        self._settle(sharding, device)
        self._mark_tables()
        return self

    def _after(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.dtype, torch.device]:
        """Return the dtype and the device that the tables will have after the conversion `fn`. Raise `ValueError` if tables do
        not support them.
        """
        # An empty tensor shows the dtype and the device, even on a rank that owns no table.
        after = fn(torch.empty(0, 1, dtype=self.sharding.dtype, device=self.device))
        if after.dtype not in DTYPES:
            raise ValueError(
                f"the tables cannot become {after.dtype}: they may be {', '.join(map(str, DTYPES))}. Convert the other "
                f"modules one by one and leave this one out, or convert its output: module(features).values().to(...)"
            )
        if after.device.type not in (*DEVICE_TYPES, "meta"):
            raise ValueError(no_tables_on(after.device))
        return after.dtype, after.device

    def __copy__(self) -> Self:
        copied = self.__new__(type(self))
        copied.__dict__.update(self.__dict__, _prefetched=None, _steady=SteadyCalls())
        return copied

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of all tables on all ranks, in the order of the output's columns."""
        return list(self.sharding.tables)

    def is_weighted(self) -> bool:
        """True if the features have one weight per id."""
        return self._is_weighted

    def extra_repr(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in asdict(self._options).items())
        return (
            f"rank {self.rank} of {self.sharding.world_size} on {self.device}, input={self.input!r}, "
            f"is_weighted={self._is_weighted}, {settings}\n{self.sharding.describe()}"
        )
