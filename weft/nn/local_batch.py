"""The operator that torch.compile puts into the graph for a call of an embedding module with input="local_batch" and
without gradients.

The number of received ids and the batch sizes of other ranks are known only at run time. The shape of the result
depends on neither, so torch.compile can trace the call. With gradients, the module makes an eager call, which breaks
the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from weft.embedding.check import no_tables_on
from weft.embedding.jagged import KeyedJaggedTensor
from weft.embedding.tables import sharding_of
from weft.nn.input_dist import input_dist_of
from weft.operator.calls import made
from weft.operator.derivatives import require_no_tangents
from weft.operator.registration import implement
from weft.operator.together import together
from weft.ops.embedding_all_to_all import OPERATOR, Form, form_of, plan_in
from weft.runtime.opaque import opaque
from weft.symm.groups import group_of

NAME = "ShardedEmbeddingBagCollection"


def pooled(
    plan: Form, weights: list[torch.Tensor], features: Any, group: dist.ProcessGroup, is_weighted: bool,
    deadline_s: float | None,
) -> torch.Tensor:  # fmt: skip
    """Call the operator: return the pooled vectors of this rank's samples. features: a KeyedJaggedTensor of these samples."""
    tensors = features.values(), features.lengths_or_none(), features.offsets_or_none(), features.weights_or_none()
    name = group_of(group).group_name
    call = weights, *tensors, list(features.keys()), features.stride(), is_weighted, *plan, name, deadline_s or 0.0
    return torch.ops.weft.pooled_local_batch(*call)  # type: ignore[no-any-return]


@opaque
def _run(
    weights: list[torch.Tensor], values: torch.Tensor, lengths: torch.Tensor | None, offsets: torch.Tensor | None,
    of_values: torch.Tensor | None, keys: Sequence[str], stride: int, is_weighted: bool, *rest: Any,
) -> torch.Tensor:  # fmt: skip
    *plan, name, deadline_s = rest
    group, on_meta = group_of(name), next((w.device for w in weights if w.is_meta), None)
    refusal = None if on_meta is None else ValueError(no_tables_on(on_meta))
    device = next((t.device for t in (*weights, values) if not t.is_meta), torch.device("cpu"))
    with together(NAME, group, lambda: device, deadline_s or None):
        require_no_tangents(NAME)
        features = KeyedJaggedTensor(keys, values, of_values, lengths, offsets, stride)
        distributed = input_dist_of(sharding_of(plan[0]), group, device, is_weighted, deadline_s or None)
        jagged, sizes = distributed(features, refusal)

        def form(_: dist.ProcessGroup | str | None) -> Any:
            return form_of(cast(Form, tuple(plan)), weights, jagged, group.rank(), sizes)

        (output,) = made(OPERATOR, group, lambda: device, form, deadline_s=deadline_s or None)
    return output


def _fake(
    weights: list[torch.Tensor], values: torch.Tensor, lengths: torch.Tensor | None, offsets: torch.Tensor | None,
    of_values: torch.Tensor | None, keys: Sequence[str], stride: int, is_weighted: bool, *rest: Any,
) -> torch.Tensor:  # fmt: skip
    plan = plan_in(*rest[:-2])
    return values.new_empty((stride, plan.sharding.total_dim), dtype=plan.output_dtype)


_library = torch.library.Library("weft", "FRAGMENT")
_library.define(
    "pooled_local_batch(Tensor[] weights, Tensor values, Tensor? lengths, Tensor? offsets, Tensor? of_values, str[] keys, "
    "SymInt stride, bool is_weighted, str sharding, str transport, str order, SymInt? slice_size, str bounds_check, bool hash, "
    "SymInt outputs, str output_dtype, str group, float deadline_s) -> Tensor",
    tags=OPERATOR.tags,
)
implement("pooled_local_batch", _run, _fake)
