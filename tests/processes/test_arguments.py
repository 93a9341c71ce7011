"""What operators and the module take and refuse, whatever they compute.

Tensors of other kinds, dimensions, rows, deadlines: refused on every rank, by the argument's name and with what to pass, when
one rank alone passes them, at a shape that is known (where checks are few) and at a new one; and the next call goes on.
Arguments that mean the same make one call, however each rank writes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from matmul_ranks import told
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import weft
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

FP8 = torch.float8_e4m3fn
Arguments = dict[str, Any]
TABLES = (weft.EmbeddingBagConfig(10, 4, "users", ("u",)), weft.EmbeddingBagConfig(20, 3, "items", ("i",)))


class Elsewhere(torch.Tensor):
    """A subclass whose values are in another tensor, as libraries for quantization make them."""

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Elsewhere:
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise RuntimeError("nobody may look inside")


class Named(torch.Tensor):
    """A subclass that is a tensor like any other."""


def as_dtensor(x: torch.Tensor) -> DTensor:
    return DTensor.from_local(x, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()], run_check=False)


def nested(x: torch.Tensor, layout: torch.layout = torch.strided) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([x, x], layout=layout)


# What a tensor is made into, and words of the error, which begins with the argument's name.
KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "DTensor": (as_dtensor, "is a DTensor: pass .to_local()"),
    "collective": (AsyncCollectiveTensor, "is an AsyncCollectiveTensor: pass .wait()"),
    "elsewhere": (Elsewhere, "is an Elsewhere, which keeps its values elsewhere: pass the torch.Tensor that has them"),
    "array": (lambda x: np.zeros(x.shape), "is a ndarray: pass torch.from_numpy("),
    "list": (lambda x: [[0.0]], "is a list: pass a torch.Tensor"),
    "nothing": (lambda x: None, "is a NoneType: pass a torch.Tensor"),
    "sparse": (lambda x: x.to_sparse(), "is torch.sparse_coo: pass a dense one (to_dense())"),
    "nested": (nested, "is a nested tensor: pass a dense one"),
    "jagged": (partial(nested, layout=torch.jagged), "is a nested tensor: pass a dense one"),
}
NOT_OF_FP8 = {"sparse", "nested"}
MAY_BE_NONE = {"biases[0]", "per_sample_weights", "weights", "lengths"}


class Operator:
    """A public operator on this rank. arguments: a good call's. tensors: how each tensor argument is put in, by the name that
    errors call it by."""

    def __init__(
        self, call: Callable[..., Any], arguments: Arguments, tensors: dict[str, Callable[[Arguments, Any], None]]
    ) -> None:
        self.call, self.arguments, self.tensors = call, arguments, tensors

    def __call__(self, change: Callable[[Arguments], None] | None = None, **options: Any) -> Any:
        arguments = {name: list(a) if isinstance(a, list) else a for name, a in self.arguments.items()} | options
        if change is not None:
            change(arguments)
        return self.call(**arguments)

    def given(self, name: str) -> torch.Tensor:
        """The good call's tensor."""
        found: Any = self.arguments
        outer, _, index = name.partition("[")
        found = found[outer]
        return found[int(index[:-1])] if index else found


def at(name: str) -> tuple[str, Callable[[Arguments, Any], None]]:
    outer, _, index = name.partition("[")

    def put(arguments: Arguments, value: Any) -> None:
        if index:
            arguments[outer][int(index[:-1])] = value
        else:
            arguments[outer] = value

    return name, put


def all_gather_matmul(group: dist.ProcessGroup) -> Operator:
    arguments = {
        "A_shard": torch.ones(4, 8),
        "Bs": [torch.ones(8, 3), torch.ones(8, 5)],
        "gather_dim": 0,
        "group": group,
    }
    return Operator(weft.all_gather_matmul, arguments, dict(map(at, ("A_shard", "Bs[0]", "Bs[1]"))))


def all_gather_scaled_matmul(group: dist.ProcessGroup) -> Operator:
    arguments = {
        "A_shard": torch.ones(4, 32).to(FP8), "Bs": [torch.ones(16, 32).to(FP8).t()], "A_scale": torch.ones(4, 1),
        "B_scales": [torch.ones(1, 16)], "gather_dim": 0, "group": group, "biases": [torch.ones(16, dtype=torch.bfloat16)],
    }  # fmt: skip
    names = "A_shard", "Bs[0]", "A_scale", "B_scales[0]", "biases[0]"
    return Operator(weft.all_gather_scaled_matmul, arguments, dict(map(at, names)))


def all_to_all_matmul(group: dist.ProcessGroup) -> Operator:
    arguments = {
        "tokens": torch.ones(4, 8), "w_experts": torch.ones(1, 8, 3), "splits": torch.tensor([1, 3]), "group": group,
    }  # fmt: skip
    return Operator(weft.all_to_all_matmul, arguments, dict(map(at, ("tokens", "w_experts", "splits"))))


def embedding_all_to_all(group: dist.ProcessGroup) -> Operator:
    sharding = weft.place_tables(TABLES, 2, placement=[0, 1])
    table = TABLES[group.rank()]
    arguments = {
        "weights": [torch.ones(table.num_embeddings, table.embedding_dim)], "values": torch.arange(4),
        "offsets": torch.tensor([0, 1, 4]), "per_sample_weights": torch.ones(4),
    }  # fmt: skip

    def call(weights: Any, values: Any, offsets: Any, per_sample_weights: Any, **options: Any) -> Any:
        features = values, offsets, per_sample_weights
        return weft.embedding_all_to_all(weights, features, sharding, group=group, **options)

    tensors = dict(map(at, ("values", "offsets", "per_sample_weights")))
    name = f"the weight of table {TABLES[1].name!r}"  # of rank 1, which passes what is bad
    return Operator(call, arguments, {**tensors, name: at("weights[0]")[1]})


def module(group: dist.ProcessGroup, input: str) -> Operator:
    ebc = ShardedEmbeddingBagCollection(
        TABLES, group=group, placement=[0, 1], is_weighted=True, input=input  # type: ignore[arg-type]
    )  # fmt: skip
    arguments = {
        "values": torch.arange(6), "lengths": torch.tensor([1, 2, 0, 3]), "weights": torch.ones(6),
    }  # fmt: skip
    ids = "weights" if input == "local_batch" else "per_sample_weights"
    tensors = {**dict(map(at, ("values", "lengths"))), ids: at("weights")[1]}
    return Operator(lambda **given: ebc(Features(**given)).values(), arguments, tensors)


class Features:
    """As a KeyedJaggedTensor that checks nothing."""

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
    "all_to_all_matmul": all_to_all_matmul,
    "embedding_all_to_all": embedding_all_to_all,
    "local_batch": partial(module, input="local_batch"),
    "global_batch": partial(module, input="global_batch"),
}
MATMULS = ["all_gather_matmul", "all_gather_scaled_matmul"]


# --- tensors ---


def other_kinds(group: dist.ProcessGroup, operator: str, known: bool) -> dict[tuple[str, str], str]:
    """What each rank is told of each kind of tensor in each place, which rank 1 passes. known: after a good call."""
    call, found = OPERATORS[operator](group), {}
    wanted = call() if known else None
    for name, put in call.tensors.items():
        given = call.given({"per_sample_weights": "weights"}.get(name, name) if "lengths" in call.arguments else name.replace(
            "the weight of table 'items'", "weights[0]"))  # fmt: skip
        for kind, (make, _) in KINDS.items():
            if (kind == "nothing" and name in MAY_BE_NONE) or (kind in NOT_OF_FP8 and given.dtype == FP8):
                continue
            bad = make(given)
            change = partial(put, value=bad) if group.rank() == 1 else None
            found[name, kind] = told(partial(call, change))
    again = call()
    assert not known or all(torch.equal(a, b) for a, b in zip(leaves(again), leaves(wanted), strict=True))
    return found


def leaves(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found.float()]
    return [] if found is None else [leaf for one in found for leaf in leaves(one)]


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_tensors_of_other_kinds_are_refused_on_every_rank(pool: Pool, operator: str, known: bool) -> None:
    for found in pool.run(other_kinds, operator, known, ranks=2, timeout_s=60):
        assert {kind for _, kind in found} == KINDS.keys()
        for (name, kind), text in found.items():
            assert text.startswith("RefusedError: "), (name, kind, text)
            assert f"rank 1: {name} {KINDS[kind][1]}" in text.replace(f"{operator}: ", ""), (name, kind, text)
