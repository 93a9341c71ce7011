"""The `Work` of training steps with TorchRec's sharded module, as `weft.torchrec` makes it.

Campaigns draw it only if it is named (`--operator "training, torchrec"`), because it needs TorchRec and FBGEMM for CPUs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weft.embedding import ColumnWise, RowWise
from weft.embedding.partition import TablePart

from .training_reference import EPS, LR, RULES
from .training_tables import CutTables
from .work import Given, Results

IMPORTS = (
    "torchrec.distributed.sharding_plan", "torchrec.distributed.embeddingbag", "torchrec.datasets.utils",
    "torchrec.distributed.train_pipeline.train_pipelines", "weft.torchrec",
)  # fmt: skip
_NAMES = {
    "SGD": "EXACT_SGD", "RowwiseAdagrad": "EXACT_ROWWISE_ADAGRAD", "Adagrad": "EXACT_ADAGRAD", "Adam": "ADAM",
    "PartialRowwiseAdam": "PARTIAL_ROWWISE_ADAM",
}  # fmt: skip


class Sharder(CutTables):
    """Training of an EmbeddingBagCollection of TorchRec, sharded by weft. Its options are those that TorchRec can pass."""

    PLACEMENTS = ("whole", "columns", "rows")

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        drawn = super().drawn(rng, device)
        for name in ("clip_norm", "clip_value", "weight_decay", "rounding", "gradient_dtype"):
            drawn.pop(name, None)
        return drawn | {
            "optimizer": drawn["optimizer"] or "SGD", "is_weighted": False, "prefetch": None, "max_ids": None,
            "gradients": "mean", "nonfinite": "propagate", "order": "remote_first",
        }  # fmt: skip

    @classmethod
    def other_makings(cls, world: int, options: Given) -> list[Given]:
        rules = [{"optimizer": rule} for rule in RULES if rule != options["optimizer"]]
        return [*rules, *cls.other_options(world, options)]

    @classmethod
    def _other_settings(cls, options: Given) -> list[Given]:
        others = [{"transport": name} for name in ("direct", "put", "serial") if name != options["transport"]]
        other = {"bounds_check": "fatal" if options["bounds_check"] == "warning" else "warning"}
        return [*others, {"outputs": 5 - options["outputs"]}, other]

    @classmethod
    def _other_placements(cls, world: int, options: Given) -> list[Given]:
        return [{"placement": name} for name in cls.PLACEMENTS if name != options["placement"]]

    def _dims(self) -> tuple[int, ...]:
        return 12, 4, 8, 24 + 12 * self.other  # TorchRec divides columns evenly, among 2, 3 or 4 ranks

    def _placement(self) -> list[Any]:
        ranks, last = tuple(range(self.world)), self.world - 1
        whole: dict[str, list[Any]] = {
            "whole": [i % self.world for i in range(4)],
            "columns": [ColumnWise(ranks), 0, ColumnWise((last, 0)), ColumnWise(ranks[::-1])],
            "rows": [RowWise()] * 4,
        }
        return whole[self.options["placement"]]

    def save(self, folder: str) -> Callable[[], tuple[Results, Results]] | None:
        # One rank cannot have several columns of a table in TorchRec's plans.
        return None if self.options["placement"] == "columns" else super().save(folder)

    def _made(self, group: Any, placement: list[Any]) -> Any:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed import sharding_plan
        from torchrec.distributed.types import BoundsCheckMode, ShardingEnv
        from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        import weft.torchrec

        configs = [
            EmbeddingBagConfig(
                num_embeddings=table.num_embeddings, embedding_dim=table.embedding_dim, name=table.name,
                feature_names=list(table.feature_names), pooling=PoolingType[table.pooling.upper()],
                data_type={torch.float32: DataType.FP32, torch.float16: DataType.FP16, torch.bfloat16: DataType.BF16}[self.dtype],
            )
            for table in self.tables
        ]  # fmt: skip
        collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        plan = {}
        for config, one in zip(configs, placement, strict=True):
            if isinstance(one, RowWise):
                plan[config.name] = sharding_plan.row_wise(compute_kernel="fused")
            elif isinstance(one, ColumnWise):
                plan[config.name] = sharding_plan.column_wise(ranks=list(one.ranks), compute_kernel="fused")
            else:
                plan[config.name] = sharding_plan.table_wise(rank=one, compute_kernel="fused")
        world = group.size()
        planned = sharding_plan.construct_module_sharding_plan(
            collection, plan, local_size=world, world_size=world, device_type="cpu"
        )
        sharder = weft.torchrec.EmbeddingBagCollectionSharder(
            {
                "optimizer": EmbOptimType[_NAMES[self.options["optimizer"]]], "learning_rate": LR, "eps": EPS,
                "bounds_check_mode": BoundsCheckMode[self.options["bounds_check"].upper()],
            },
            transport=self.options["transport"], outputs=self.options["outputs"], deadline_s=self.options["deadline_s"],
        )  # fmt: skip
        env = ShardingEnv.from_process_group(group)
        self.sharded = sharder.shard(collection, planned, env, torch.device("cpu"))
        return self.sharded.weft_module

    def _parts(self) -> list[tuple[TablePart, torch.Tensor]]:
        if hasattr(self.module, "partition"):
            return [(self._numbered(part), weight) for part, weight in self.module.parts()]
        tables = self.module.sharding.tables
        own = [self._whole(_number(tables[i])) for i in self.module.sharding.local_tables(self.rank)]
        return list(zip(own, self.module.parameters(), strict=True))

    def _all_parts(self) -> list[TablePart]:
        if hasattr(self.module, "partition"):
            return [self._numbered(part) for part in self.module.partition.parts]
        return [self._whole(i) for i in range(4)]

    def _numbered(self, part: TablePart) -> TablePart:
        """Return the part with the number of its table in `tables`. TorchRec orders tables in another way."""
        return replace(part, table=_number(self.module.partition.tables[part.table]))

    def _called(self, features: Any, given: Given) -> Any:
        return self.sharded(features)

    def _results(self, out: Any) -> Results:
        return [torch.cat([out[f"f{i}"] for i in range(4)], dim=1)]


def _number(table: Any) -> int:
    return int(table.name[1:])
