"""Every public operator, and the embedding module, in a form that tests can call and change: the arguments of a good
call by name, and the places of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.on_ranks import told

import weft
from weft.nn import ShardedEmbeddingBagCollection

FP8 = torch.float8_e4m3fn
Arguments = dict[str, Any]
Change = Callable[[Arguments], None]
TABLES = (weft.EmbeddingBagConfig(10, 4, "users", ("u",)), weft.EmbeddingBagConfig(20, 3, "items", ("i",)))


@dataclass(frozen=True)
class Place:
    """The place of a tensor among the arguments. index: the index, if the argument is a list."""

    name: str
    index: int | None = None

    def given(self, arguments: Arguments) -> torch.Tensor:
        return arguments[self.name] if self.index is None else arguments[self.name][self.index]

    def put(self, arguments: Arguments, value: Any) -> None:
        if self.index is None:
            arguments[self.name] = value
        else:
            arguments[self.name][self.index] = value


def set_to(**options: Any) -> Change:
    """Return a change that sets arguments."""
    return lambda arguments: arguments.update(options)


def mapped(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Return a change that applies `change` to a tensor, or to each tensor of a list."""

    def apply(arguments: Arguments) -> None:
        given = arguments[name]
        arguments[name] = [change(x) for x in given] if isinstance(given, list) else change(given)

    return apply


def places(*names: str) -> dict[str, Place]:
    """Return the places with these names, such as "Bs[1]"."""
    parts = [name.rstrip("]").split("[") for name in names]
    return {name: Place(outer, *map(int, index)) for name, (outer, *index) in zip(names, parts, strict=True)}


@dataclass(frozen=True)
class Operator:
    """A public operator on this rank. arguments: the arguments of a good call. tensors: the places of tensors, by their
    names in errors.
    """

    call: Callable[..., Any]
    arguments: Arguments
    tensors: dict[str, Place] = field(default_factory=dict)

    def __call__(self, change: Callable[[Arguments], None] | None = None, **options: Any) -> Any:
        arguments = {name: list(a) if isinstance(a, list) else a for name, a in self.arguments.items()} | options
        if change is not None:
            change(arguments)
        return self.call(**arguments)


def data(group: dist.ProcessGroup, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(group.rank()))


def all_gather_matmul(group: dist.ProcessGroup) -> Operator:
    Bs = [data(group, 8, 3), data(group, 8, 5)]
    arguments = {"A_shard": data(group, 4, 8), "Bs": Bs, "gather_dim": 0, "group": group}
    return Operator(weft.all_gather_matmul, arguments, places("A_shard", "Bs[0]", "Bs[1]"))


def all_gather_scaled_matmul(group: dist.ProcessGroup) -> Operator:
    arguments = {
        "A_shard": data(group, 4, 32).to(FP8), "Bs": [data(group, 16, 32).to(FP8).t()], "A_scale": torch.ones(4, 1),
        "B_scales": [torch.ones(1, 16)], "gather_dim": 0, "group": group, "biases": [torch.ones(16, dtype=torch.bfloat16)],
    }  # fmt: skip
    names = "A_shard", "Bs[0]", "A_scale", "B_scales[0]", "biases[0]"
    return Operator(weft.all_gather_scaled_matmul, arguments, places(*names))


def matmul_reduce_scatter(group: dist.ProcessGroup) -> Operator:
    arguments = {
        "A": data(group, 4, 8), "B": data(group, 8, 3), "reduce_op": "sum", "scatter_dim": 0, "group": group,
    }  # fmt: skip
    return Operator(weft.matmul_reduce_scatter, arguments, places("A", "B"))


def scaled_matmul_reduce_scatter(group: dist.ProcessGroup) -> Operator:
    arguments = {
        "A": data(group, 4, 32).to(FP8), "B": data(group, 16, 32).to(FP8).t(), "A_scale": torch.ones(4, 1),
        "B_scale": torch.ones(1, 16), "reduce_op": "sum", "orig_scatter_dim": 0, "scatter_dim_after_maybe_reshape": 0,
        "group": group, "bias": torch.ones(16, dtype=torch.bfloat16),
    }  # fmt: skip
    return Operator(weft.scaled_matmul_reduce_scatter, arguments, places("A", "B", "A_scale", "B_scale", "bias"))


def matmul_all_gather(group: dist.ProcessGroup) -> Operator:
    arguments = {"x": data(group, 4, 8), "w": data(group, 8, 3), "gather_dim": 0, "group": group}
    return Operator(weft.matmul_all_gather, arguments, places("x", "w"))


def matmul_all_reduce(group: dist.ProcessGroup) -> Operator:
    following = {"bias": torch.ones(3), "residual": torch.ones(4, 3), "norm": torch.ones(3)}
    arguments = {"x": data(group, 4, 8), "w": data(group, 8, 3), "group": group, **following}
    return Operator(weft.matmul_all_reduce, arguments, places("x", "w", "bias", "residual", "norm"))


def all_to_all_matmul(group: dist.ProcessGroup) -> Operator:
    arguments = {
        "tokens": data(group, 4, 8), "w_experts": data(group, 1, 8, 3), "splits": torch.tensor([1, 3]), "group": group,
    }  # fmt: skip
    return Operator(weft.all_to_all_matmul, arguments, places("tokens", "w_experts", "splits"))


def matmul_all_to_all(group: dist.ProcessGroup) -> Operator:
    arguments = {
        "h": data(group, 4, 8), "w_experts": data(group, 1, 8, 3), "received": torch.full((2, 1), 2),
        "splits": torch.tensor([2, 2]), "group": group,
    }  # fmt: skip
    return Operator(weft.matmul_all_to_all, arguments, places("h", "w_experts", "received", "splits"))


def embedding_all_to_all(group: dist.ProcessGroup) -> Operator:
    sharding = weft.place_tables(TABLES, 2, placement=[0, 1])
    table = TABLES[group.rank()]
    arguments = {
        "weights": [data(group, table.num_embeddings, table.embedding_dim)], "values": torch.arange(4),
        "offsets": torch.tensor([0, 1, 4]), "per_sample_weights": torch.ones(4), "sharding": sharding,
    }  # fmt: skip

    def call(weights: Any, values: Any, offsets: Any, per_sample_weights: Any, sharding: Any, **options: Any) -> Any:
        features = values, offsets, per_sample_weights
        return weft.embedding_all_to_all(weights, features, sharding, group=group, **options)

    # Rank 1 owns the table, and passes the bad argument.
    tensors = {"the weight of table 'items'": Place("weights", 0), **places("values", "offsets", "per_sample_weights")}
    return Operator(call, arguments, tensors)


def module(group: dist.ProcessGroup, input: str) -> Operator:
    ebc = ShardedEmbeddingBagCollection(
        TABLES, group=group, placement=[0, 1], is_weighted=True, input=input  # type: ignore[arg-type]
    )  # fmt: skip
    arguments = {
        "values": torch.arange(6), "lengths": torch.tensor([1, 2, 0, 3]), "weights": torch.ones(6),
    }  # fmt: skip
    ids = "weights" if input == "local_batch" else "per_sample_weights"
    tensors = {ids: Place("weights"), **places("values", "lengths")}
    return Operator(lambda **given: ebc(Features(**given)).values(), arguments, tensors)


class Features:
    """Features in a KeyedJaggedTensor that does not check them."""

    def __init__(self, values: Any, lengths: Any, weights: Any) -> None:
        self.values, self.lengths, self.weights_or_none = (lambda: values), (lambda: lengths), (lambda: weights)
        self.lengths_or_none, self.offsets_or_none = self.lengths, lambda: None

    def keys(self) -> list[str]:
        return ["u", "i"]

    def offsets(self) -> torch.Tensor:
        return torch.nn.functional.pad(self.lengths().cumsum(0), (1, 0))

    def stride(self) -> int:
        return 2


OPERATORS: dict[str, Callable[[dist.ProcessGroup], Operator]] = {
    "all_gather_matmul": all_gather_matmul,
    "all_gather_scaled_matmul": all_gather_scaled_matmul,
    "matmul_all_gather": matmul_all_gather,
    "matmul_all_reduce": matmul_all_reduce,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "scaled_matmul_reduce_scatter": scaled_matmul_reduce_scatter,
    "all_to_all_matmul": all_to_all_matmul,
    "matmul_all_to_all": matmul_all_to_all,
    "embedding_all_to_all": embedding_all_to_all,
    "local_batch": partial(module, input="local_batch"),
    "global_batch": partial(module, input="global_batch"),
}


def leaves(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found.float()]
    return [] if found is None else [leaf for one in found for leaf in leaves(one)]


def refused(group: dist.ProcessGroup, operator: str, bad: list[tuple[str, Any]]) -> list[str]:
    """Return this rank's error for each argument that rank 1 passes, for a known shape. Good calls must work in
    between. End at the first call that is not refused, because the group may have failed.
    """
    call, found = OPERATORS[operator](group), []
    call()
    for name, value in bad:
        found.append(told(partial(call, **({name: value} if group.rank() == 1 else {}))))
        if not found[-1].startswith("RefusedError: "):
            break
        call()
    return found
