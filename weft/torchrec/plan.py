"""Convert a module's part of a TorchRec plan to weft's placement: the shardings of tables, the kernel, the order of columns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed import embedding, embeddingbag
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingEnv2D

from weft.arguments import checked_deadline
from weft.embedding import ColumnWise, DataParallel, EmbeddingBagConfig, RowWise, TableSharding, TableWise
from weft.embedding.partition import Partition
from weft.nn.making import agree_on_module
from weft.symm.groups import is_not_a_member
from weft.torchrec.options import TableOptions, options_of

KERNELS = ("fused", "dense")
SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")


@dataclass(frozen=True)
class ModulePlan:
    """The tables of a collection in TorchRec's order of output columns, with their shardings.

    is_fused: True if backward updates the tables with `options.optimizer`; False if they get gradients. Data-parallel
        tables always get gradients.
    """

    partition: Partition
    is_fused: bool
    options: TableOptions

    @property
    def placement(self) -> list[TableSharding] | list[int]:
        """The argument `placement` of weft's modules: a rank for each table, or, if any table is sharded, a
        `TableSharding` for each.
        """
        shardings = self.partition.shardings
        ranks = [sharding.rank for sharding in shardings if isinstance(sharding, TableWise)]
        return ranks if len(ranks) == len(shardings) else list(shardings)


def read_plan(
    module: Any, plan: Mapping[str, ParameterSharding], env: ShardingEnv, device: torch.device | None,
    fused_params: dict[str, Any] | None, config_of: Callable[[Any], EmbeddingBagConfig], made: str,
    deadline_s: float | None,
) -> ModulePlan:  # fmt: skip
    """Convert `plan`, TorchRec's plan for the collection `module`. A plan that weft does not support raises an error with
    the table's name. If the plan of one rank is refused, every rank raises `RefusedError`: here, or where it constructs the
    module of weft.

    fused_params: the sharder's options of the tables.
    config_of: a function that converts TorchRec's config of a table to weft's.
    made: the name of the module's class. deadline_s: the module's deadline.
    """
    try:
        check_env(env)
        return _read(module, plan, env, device, fused_params, config_of)
    except Exception as error:
        group = getattr(env, "process_group", None)
        if isinstance(group, dist.ProcessGroup) and not is_not_a_member(group):
            valid_s = None  # if the deadline is refused too
            with contextlib.suppress(ValueError):
                valid_s = checked_deadline(deadline_s)
            agree_on_module(group, device, None, {}, error, valid_s, made)
        raise


def _read(
    module: Any, plan: Mapping[str, ParameterSharding], env: ShardingEnv, device: torch.device | None,
    fused_params: dict[str, Any] | None, config_of: Callable[[Any], EmbeddingBagConfig],
) -> ModulePlan:  # fmt: skip
    is_pooled = hasattr(module, "embedding_bag_configs")
    given = module.embedding_bag_configs() if is_pooled else module.embedding_configs()
    configs = {config.name: config_of(config) for config in given}
    shardings = {name: _sharding(configs[name], plan.get(name), env.world_size) for name in configs}
    copied = {name for name, sharding in shardings.items() if isinstance(sharding, DataParallel)}
    kernels = {plan[name].compute_kernel: name for name in configs if name not in copied}
    if len(kernels) > 1:
        said = ", ".join(f"{kernel!r} of table {name!r}" for kernel, name in kernels.items())
        raise ValueError(f"compute kernels {said}: plan the same kernel for all tables of a collection")
    if is_pooled:
        infos = embeddingbag.ShardedEmbeddingBagCollection.create_grouped_sharding_infos(
            module, dict(plan), "embedding_bags.", fused_params
        )
        names = _in_order_of_columns(infos, env, device)
    else:
        infos = embedding.ShardedEmbeddingCollection.create_grouped_sharding_infos(module, dict(plan), fused_params)
        names = list(configs)
    of_table = {info.embedding_config.name: info.fused_params or {} for group in infos.values() for info in group}
    options = {name: options_of(name, configs[name].dtype, of_table[name]) for name in names}
    first = next((name for name in names if name not in copied), names[0])
    for name, other in options.items():
        if name in copied:  # a torch optimizer trains it
            other = replace(other, optimizer=options[first].optimizer)
        if other != options[first]:
            raise ValueError(
                f"tables {first!r} and {name!r} differ: {options[first]} and {other}. Put tables with different optimizers "
                "or outputs into separate collections"
            )
    partition = Partition(
        tuple(configs[name] for name in names), tuple(shardings[name] for name in names), env.world_size
    )
    return ModulePlan(partition, "fused" in kernels, options[first])


def _in_order_of_columns(infos: Mapping[Any, Any], env: ShardingEnv, device: torch.device | None) -> list[str]:
    """Return the table names in TorchRec's order of columns: by kind of sharding, then by rank, then by pooling and
    other options.
    """
    found: dict[str, None] = {}
    for group in infos.values():
        sharding: Any = embeddingbag.ShardedEmbeddingBagCollection.create_embedding_bag_sharding(
            group, env, device, permute_embeddings=True
        )
        table_of = {
            name: info.embedding_config.name for info in group for name in info.embedding_config.embedding_names
        }
        found |= dict.fromkeys(table_of[name] for name in sharding.embedding_names())
    return list(found)


def check_env(env: ShardingEnv) -> None:
    """Raise `ValueError` unless the environment has one process group whose ranks share the tables."""
    if env.process_group is None:
        raise ValueError("the ShardingEnv has no process group: use ShardingEnv.from_process_group(group)")
    if isinstance(env, ShardingEnv2D):
        raise ValueError("two-dimensional sharding (ShardingEnv2D) is not supported: use DistributedModelParallel")
    if env.output_dtensor:
        raise ValueError(
            "output_dtensor=True is not supported, because the state dict has ShardedTensors: do not set it"
        )


def _sharding(table: EmbeddingBagConfig, sharding: ParameterSharding | None, world_size: int) -> TableSharding:
    """Return the sharding that the plan gives to a table. Raise `ValueError` if weft does not support it."""
    at = f"table {table.name!r}"
    if sharding is None:
        raise ValueError(f"{at} is not in the plan: plan all tables of the collection")
    if sharding.sharding_type not in SHARDINGS:
        raise ValueError(
            f"{at}: sharding_type={sharding.sharding_type!r} is not supported: plan {', '.join(SHARDINGS[:-1])} or "
            f"{SHARDINGS[-1]}"
        )
    if sharding.compute_kernel not in KERNELS:
        raise ValueError(
            f"{at}: compute_kernel={sharding.compute_kernel!r} is not supported, because tables are in device "
            f"memory: plan {' or '.join(KERNELS)}"
        )
    if sharding.sharding_type == "data_parallel" and sharding.compute_kernel != "dense":
        raise ValueError(
            f"{at}: compute_kernel={sharding.compute_kernel!r} is not supported for data_parallel, whose tables get "
            "gradients for a torch optimizer, as in TorchRec: plan 'dense'"
        )
    if sharding.key_value_params is not None:
        raise ValueError(f"{at}: key_value_params is not supported, because tables are in device memory: do not set it")
    ranks, shards = sharding.ranks or [], getattr(sharding.sharding_spec, "shards", None) or []
    if bad := [rank for rank in ranks if not 0 <= rank < world_size]:
        raise ValueError(f"{at}: ranks={ranks} names rank {bad[0]}: ranks are 0 to {world_size - 1}")
    if sharding.sharding_type == "data_parallel":
        if sorted(ranks) != list(range(world_size)):
            raise ValueError(f"{at}: ranks={ranks} of a data_parallel table must be all ranks, 0 to {world_size - 1}")
        return DataParallel(fused=False)
    if sharding.sharding_type == "row_wise":
        each = -(-table.num_embeddings // world_size)
        begins = [shard.shard_offsets[0] for shard in shards if shard.shard_sizes[0]]
        if begins != list(range(0, table.num_embeddings, each)):
            raise ValueError(f"{at}: parts begin at rows {begins}: plan {each} rows on each of {world_size} ranks")
        return RowWise()
    if sharding.sharding_type == "column_wise":
        if len(set(ranks)) != len(ranks) or len(ranks) != len(shards):
            raise ValueError(
                f"{at}: ranks={ranks} for {len(shards)} column shards: plan each shard on a different rank"
            )
        placed = sorted(
            zip((shard.shard_offsets[1] for shard in shards), ranks, shards, strict=True), key=lambda p: p[0]
        )
        return ColumnWise(tuple(rank for _, rank, _ in placed), tuple(shard.shard_sizes[1] for _, _, shard in placed))
    if len(ranks) != 1:
        raise ValueError(f"{at}: ranks={sharding.ranks} must contain exactly one rank from 0 to {world_size - 1}")
    return TableWise(ranks[0])
