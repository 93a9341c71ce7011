"""A module's part of TorchRec's plan, as weft's placement: which rank owns a table, by which kernel, in which order of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed import embeddingbag
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingEnv2D

from weft.embedding import EmbeddingBagConfig
from weft.torchrec.options import TableOptions, options_of

KERNELS = ("fused", "dense")
SHARDINGS = ("table_wise",)


@dataclass(frozen=True)
class ModulePlan:
    """The tables of a collection in TorchRec's order of output columns, with the rank that owns each.

    is_fused: backward updates the tables by `options.optimizer`; otherwise they have gradients.
    """

    tables: tuple[EmbeddingBagConfig, ...]
    placement: tuple[int, ...]
    is_fused: bool
    options: TableOptions


def read_plan(
    module: Any, plan: Mapping[str, ParameterSharding], env: ShardingEnv, device: torch.device | None,
    fused_params: dict[str, Any] | None,
) -> ModulePlan:  # fmt: skip
    """Return the plan of `module`, an EmbeddingBagCollection. Raise `ValueError` for what weft lacks, by the table's name."""
    check_env(env)
    configs = {config.name: config for config in module.embedding_bag_configs()}
    for name in configs:
        _check(name, plan.get(name), env.world_size)
    kernels = {plan[name].compute_kernel: name for name in configs}
    if len(kernels) > 1:
        said = ", ".join(f"{kernel!r} of table {name!r}" for kernel, name in kernels.items())
        raise ValueError(f"compute kernels {said}: plan one kernel for all tables of a collection")
    # TorchRec groups tables by rank, then by pooling and others: its own code determines the order of columns.
    infos = embeddingbag.create_sharding_infos_by_sharding_device_group(
        module, dict(plan), "embedding_bags.", fused_params
    )
    names: list[str] = []
    for group in infos.values():
        sharding = embeddingbag.ShardedEmbeddingBagCollection.create_embedding_bag_sharding(
            group, env, device, permute_embeddings=True
        )
        grouped: Any = sharding
        for of_rank in grouped._grouped_embedding_configs_per_rank:
            names += [table.name for config in of_rank for table in config.embedding_tables]
    tables = tuple(EmbeddingBagConfig.of(configs[name]) for name in names)
    given = {info.embedding_config.name: info.fused_params or {} for group in infos.values() for info in group}
    options = {table.name: options_of(table.name, table.dtype, given[table.name]) for table in tables}
    first = names[0]
    for name, other in options.items():
        if other != options[first]:
            raise ValueError(
                f"tables {first!r} and {name!r} differ: {options[first]} and {other}. Put tables of another optimizer or "
                "output into a collection of their own"
            )
    ranks = tuple((plan[name].ranks or [0])[0] for name in names)
    return ModulePlan(tables, ranks, next(iter(kernels)) == "fused", options[first])


def check_env(env: ShardingEnv) -> None:
    """Raise `ValueError` unless the environment is one process group whose ranks share the tables."""
    if env.process_group is None:
        raise ValueError("the ShardingEnv has no process group: use ShardingEnv.from_process_group(group)")
    if isinstance(env, ShardingEnv2D):
        raise ValueError("two-dimensional sharding (ShardingEnv2D) is not supported: use DistributedModelParallel")
    if env.output_dtensor:
        raise ValueError("output_dtensor=True is not supported: the state dict has ShardedTensors, leave it out")


def _check(name: str, sharding: ParameterSharding | None, world_size: int) -> None:
    at = f"table {name!r}"
    if sharding is None:
        raise ValueError(f"{at} is not in the plan: plan all tables of the collection")
    if sharding.sharding_type not in SHARDINGS:
        raise ValueError(
            f"{at}: sharding_type={sharding.sharding_type!r} is not supported: plan {' or '.join(SHARDINGS)}"
        )
    if sharding.compute_kernel not in KERNELS:
        raise ValueError(
            f"{at}: compute_kernel={sharding.compute_kernel!r} is not supported, tables are in device memory: plan "
            f"{' or '.join(KERNELS)}"
        )
    ranks = sharding.ranks or []
    if len(ranks) != 1 or not 0 <= ranks[0] < world_size:
        raise ValueError(f"{at}: ranks={sharding.ranks} must be one rank of 0 to {world_size - 1}")
    if sharding.key_value_params is not None:
        raise ValueError(f"{at}: key_value_params is not supported, tables are in device memory: leave it out")
