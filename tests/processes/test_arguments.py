"""What operators and the module take and refuse, whatever they compute.

Tensors of other kinds, dimensions, rows, deadlines: refused on every rank, by the argument's name and with what to pass, when
one rank alone passes them, at a shape that is known (where checks are few) and at a new one; and the next call goes on.
Arguments that mean the same make one call, however each rank writes them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from matmul_ranks import told
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.nn.input_dist import InputDist

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


def as_dtensor(x: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate  # half a second, and this file is imported by every rank

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
MAY_BE_NONE = {"biases[0]", "bias", "residual", "per_sample_weights", "weights", "lengths"}


@dataclass(frozen=True)
class Place:
    """Of a tensor among the arguments. index: in a list."""

    name: str
    index: int | None = None

    def given(self, arguments: Arguments) -> torch.Tensor:
        return arguments[self.name] if self.index is None else arguments[self.name][self.index]

    def put(self, arguments: Arguments, value: Any) -> None:
        if self.index is None:
            arguments[self.name] = value
        else:
            arguments[self.name][self.index] = value


def places(*names: str) -> dict[str, Place]:
    """Of names such as "Bs[1]"."""
    parts = [name.rstrip("]").split("[") for name in names]
    return {name: Place(outer, *map(int, index)) for name, (outer, *index) in zip(names, parts, strict=True)}


@dataclass(frozen=True)
class Operator:
    """A public operator on this rank. arguments: of a good call. tensors: where they are, by the names that errors call them."""

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
    following = {"bias": torch.ones(3), "residual": torch.ones(4, 3)}
    arguments = {"x": data(group, 4, 8), "w": data(group, 8, 3), "group": group, **following}
    return Operator(weft.matmul_all_reduce, arguments, places("x", "w", "bias", "residual"))


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
        "offsets": torch.tensor([0, 1, 4]), "per_sample_weights": torch.ones(4),
    }  # fmt: skip

    def call(weights: Any, values: Any, offsets: Any, per_sample_weights: Any, **options: Any) -> Any:
        features = values, offsets, per_sample_weights
        return weft.embedding_all_to_all(weights, features, sharding, group=group, **options)

    # The table is rank 1's, which passes what is bad.
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
GATHERS = ["all_gather_matmul", "all_gather_scaled_matmul"]


# --- tensors ---


def other_kinds(group: dist.ProcessGroup, operator: str, known: bool) -> dict[tuple[str, str], str]:
    """What each rank is told of each kind of tensor in each place, which rank 1 passes. known: after a good call."""
    call, found = OPERATORS[operator](group), {}
    wanted = call() if known else None
    for name, place in call.tensors.items():
        given = place.given(call.arguments)
        for kind, (make, _) in KINDS.items():
            if (kind == "nothing" and name in MAY_BE_NONE) or (kind in NOT_OF_FP8 and given.dtype == FP8):
                continue
            bad = make(given)
            change = partial(place.put, value=bad) if group.rank() == 1 else None
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
            assert f"rank 1: {name} {KINDS[kind][1]}" in text, (name, kind, text)


# --- other arguments ---

NO_DIMENSION = "pass the number of a dimension, an int"
NO_NUMBER = "pass a whole number for each rank"
NO_DEADLINE = "must be positive, and at most 1000000: it is how many seconds a wait may take"
# For operators that gather: (argument, what rank 1 passes, words of the error).
GATHERS_REFUSE: list[tuple[str, Any, str]] = [
    ("gather_dim", "0", f"gather_dim='0' is a str: {NO_DIMENSION}"),
    ("gather_dim", True, f"gather_dim=True is a bool: {NO_DIMENSION}"),
    ("gather_dim", False, f"gather_dim=False is a bool: {NO_DIMENSION}"),
    ("gather_dim", 0.0, f"gather_dim=0.0 is a float: {NO_DIMENSION}"),
    ("gather_dim", None, f"gather_dim=None is a NoneType: {NO_DIMENSION}"),
    ("gather_dim", -1, "gather_dim=-1 must name a dimension of A_shard (4, "),
    ("gather_dim", 2, "gather_dim=2 must name a dimension of A_shard (4, "),
    ("gather_dim", -3, "gather_dim=-3 must name a dimension of A_shard (4, "),
    ("rows", 4, "rows=4 is an int: pass a list with a number for each rank"),
    ("rows", "44", "rows='44' is a str: pass a list with a number for each rank"),
    ("rows", [4, 4.0], f"rows[1]=4.0 is a float: {NO_NUMBER}"),
    ("rows", [4, True], f"rows[1]=True is a bool: {NO_NUMBER}"),
    ("rows", [4, None], f"rows[1]=None is a NoneType: {NO_NUMBER}"),
    ("rows", [4], "rows=(4,) must have one entry, 0 or more, for each of 2 ranks"),
    ("rows", [3, 5], "rows=(3, 5) must have one entry, 0 or more, for each of 2 ranks, and here, on rank 1, be 4"),
    ("rows", [-4, 4], "rows=(-4, 4) must have one entry, 0 or more"),
    ("Bs", None, "Bs is a NoneType: pass a list"),
    ("Bs", torch.ones(8, 3), "Bs is one tensor of shape (8, 3): pass a list of tensors, [B]"),
    ("Bs", {"w": torch.ones(8, 3)}, "Bs is a dict: pass a list"),
    ("Bs", {torch.ones(8, 3)}, "Bs is a set: pass a list"),
    ("Bs", [], "Bs"),
    ("return_A", "no", "return_A='no' is a str: pass True or False"),
    ("timeline", 3, "timeline=3 is no timeline: pass weft.Timeline(), or None"),
]
SCATTERS_REFUSE: list[tuple[str, Any, str]] = [
    ("scatter_dim", "0", f"scatter_dim='0' is a str: {NO_DIMENSION}"),
    ("scatter_dim", 1, "scatter_dim=1 must name a dimension of A (4, 8) before the last"),
    ("scatter_dim", -3, "scatter_dim=-3 must name a dimension of A (4, 8) before the last"),
    ("A", torch.ones(8), "A has shape (8,): pass at least two dimensions"),
    ("A", torch.ones(5, 8), "A has shape (5, 8), and the 5 of scatter_dim=0 must be divisible by world_size=2, as"),
    ("A", torch.ones(3, 2, 8), "A has shape (3, 2, 8), and the 3 of scatter_dim=0 must be divisible by world_size=2"),
    ("B", [torch.ones(8, 3)], "B is a list: pass a torch.Tensor"),
    ("reduce_op", "max", 'reduce_op=\'max\': use "sum" or "avg"'),
    ("reduce_op", None, 'reduce_op=None: use "sum" or "avg"'),
    ("timeline", 3, "timeline=3 is no timeline: pass weft.Timeline(), or None"),
]
PRODUCTS_REFUSE: list[tuple[str, Any, str]] = [
    ("x", torch.ones(8), "x has shape (8,): pass at least two dimensions"),
    ("w", [torch.ones(8, 3)], "w is a list: pass a torch.Tensor"),
    ("timeline", 3, "timeline=3 is no timeline: pass weft.Timeline(), or None"),
]
ARGUMENTS_REFUSED = dict.fromkeys(GATHERS, GATHERS_REFUSE) | {
    "matmul_reduce_scatter": SCATTERS_REFUSE,
    "scaled_matmul_reduce_scatter": [
        ("orig_scatter_dim", "0", f"orig_scatter_dim='0' is a str: {NO_DIMENSION}"),
        ("orig_scatter_dim", None, f"orig_scatter_dim=None is a NoneType: {NO_DIMENSION}"),
        ("scatter_dim_after_maybe_reshape", True, f"scatter_dim_after_maybe_reshape=True is a bool: {NO_DIMENSION}"),
        ("output_shape", 4, "output_shape is an int: pass a list"),
        ("output_shape", [], "output_shape=() is none of A (4, 32) @ B (32, 16): pass (4, 16), or, with A as (4, 32)"),
        ("output_shape", [-2, -2, 16], "output_shape=(-2, -2, 16) is none of A (4, 32) @ B (32, 16)"),
        ("output_shape", [4.0, 16], "output_shape[0]=4.0 is a float: pass a whole number"),
        ("B", [torch.ones(32, 16)], "B is a list: pass a torch.Tensor"),
        ("reduce_op", None, 'reduce_op=None: use "sum" or "avg"'),
        ("out_dtype", "bf16", "out_dtype=bf16: use one of torch.bfloat16"),
        ("out_dtype", [torch.bfloat16], "out_dtype=[torch.bfloat16]: use one of torch.bfloat16"),
        ("use_fast_accum", "no", "use_fast_accum='no' is a str: pass True or False"),
        ("timeline", 3, "timeline=3 is no timeline: pass weft.Timeline(), or None"),
    ],
    "matmul_all_gather": [
        ("gather_dim", "0", f"gather_dim='0' is a str: {NO_DIMENSION}"),
        ("gather_dim", True, f"gather_dim=True is a bool: {NO_DIMENSION}"),
        ("gather_dim", 2, "gather_dim=2 must name a dimension of x (4, 8): pass one from -2 to 1"),
        ("gather_dim", -3, "gather_dim=-3 must name a dimension of x (4, 8): pass one from -2 to 1"),
        *PRODUCTS_REFUSE,
    ],
    "matmul_all_reduce": [
        ("op", "max", 'op=\'max\': use "sum" or "avg"'),
        ("op", None, 'op=None: use "sum" or "avg"'),
        ("op", "avg", 'op="avg" is of sums alone'),
        *PRODUCTS_REFUSE,
    ],
}
DEADLINES: list[Any] = [math.inf, math.nan, 0, -1, 1e7, 10**400, True, "5", [5], 5j, torch.tensor(5.0)]
# Deadlines are taken by all, and by the module when it is made.
DIRECT = [*ARGUMENTS_REFUSED, "all_to_all_matmul", "matmul_all_to_all", "embedding_all_to_all"]


def refused(group: dist.ProcessGroup, operator: str, bad: list[tuple[str, Any]]) -> list[str]:
    """What each rank is told of each argument that rank 1 passes, at a known shape; good calls in between."""
    call, found = OPERATORS[operator](group), []
    call()
    for name, value in bad:
        found.append(told(partial(call, **({name: value} if group.rank() == 1 else {}))))
        call()
    return found


@pytest.mark.parametrize("operator", ARGUMENTS_REFUSED)
def test_arguments_of_other_kinds_are_refused_on_every_rank(pool: Pool, operator: str) -> None:
    refuses = ARGUMENTS_REFUSED[operator]
    bad = [(name, value) for name, value, _ in refuses]
    for found in pool.run(refused, operator, bad, ranks=2, timeout_s=60):
        for text, (name, value, words) in zip(found, refuses, strict=True):
            assert text.startswith("RefusedError: rank 1: "), (name, value, text)
            assert words in text, (name, value, text)


@pytest.mark.parametrize("operator", DIRECT)
def test_deadlines_that_no_wait_can_have_are_refused_on_every_rank(pool: Pool, operator: str) -> None:
    bad = [("deadline_s", value) for value in DEADLINES]
    for found in pool.run(refused, operator, bad, ranks=2, timeout_s=60):
        for text, value in zip(found, DEADLINES, strict=True):
            assert text.startswith(f"RefusedError: rank 1: deadline_s={value!r} {NO_DEADLINE}"), text


def made_with_deadlines(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """What becomes of a module, and of an input distribution, with each deadline; in the first case on rank 1 alone."""
    found = []
    for value in DEADLINES:
        of_rank = value if group.rank() == 1 else 5.0
        module = partial(ShardedEmbeddingBagCollection, TABLES, group=group, deadline_s=of_rank)
        sharding = weft.place_tables(TABLES, 2)
        distribution = partial(InputDist, sharding, group, torch.device("cpu"), is_weighted=False, deadline_s=value)
        found.append((told(module), told(distribution)))
    return found


def test_deadlines_are_looked_at_when_a_module_is_made(pool: Pool) -> None:
    for found in pool.run(made_with_deadlines, ranks=2, timeout_s=60):
        for (module, distribution), value in zip(found, DEADLINES, strict=True):
            assert module.startswith("RefusedError"), module
            assert f"rank 1: deadline_s={value!r} {NO_DEADLINE}" in module
            assert distribution == f"ValueError: deadline_s={value!r} {NO_DEADLINE}"


def deadlines_taken(group: dist.ProcessGroup) -> None:
    """By every wait: in set-up, in calls of a new and of a known shape, in an all-to-all of gloo's, in `close`."""
    for seconds in (1e6, 5, 0.9e6, np.float32(7), np.int64(7), Fraction(7, 2)):
        own = dist.new_group([0, 1])
        for make in map(OPERATORS.__getitem__, DIRECT):
            for _ in range(2):
                make(own)(deadline_s=seconds)
        for input in ("local_batch", "global_batch"):
            ebc = ShardedEmbeddingBagCollection(TABLES, group=own, input=input, deadline_s=seconds)  # type: ignore[arg-type]
            for _ in range(2):
                ebc(Features(torch.arange(6), torch.tensor([1, 2, 0, 3]), None))
            ebc.close()
        dist.destroy_process_group(own)


def test_long_deadlines_are_taken(pool: Pool) -> None:
    pool.run(deadlines_taken, ranks=2, timeout_s=100)


def test_weights_that_are_no_tensors_are_refused_before_any_is_copied(pool: Pool) -> None:
    for found in pool.run(full_weights_of_other_kinds, ranks=2, timeout_s=60):
        for kind, (text, copied) in found.items():
            assert text.startswith(f"ValueError: weights['items'] {KINDS[kind][1]}"), kind
            assert not copied


def full_weights_of_other_kinds(group: dist.ProcessGroup) -> dict[str, tuple[str, bool]]:
    # A table beside it, which comes first.
    ebc = ShardedEmbeddingBagCollection(TABLES, group=group, placement=[group.size() - 1] * 2)
    if group.rank() != group.size() - 1:
        return {}
    before, found = ebc.embedding_bags["users"].weight.clone(), {}
    for kind, (make, _) in KINDS.items():
        if kind != "DTensor":  # making one is collective
            full = {"users": torch.ones(10, 4), "items": make(torch.ones(20, 3))}
            text = told(partial(ebc.load_full_weights, full))
            found[kind] = text, not torch.equal(ebc.embedding_bags["users"].weight, before)
    return found


def test_a_name_of_no_group_is_told_where_it_is_given(pool: Pool) -> None:
    (text,) = pool.run(no_group, ranks=1, timeout_s=60)
    assert text == "ValueError: group='none' names no process group of this rank: pass the group, or its group_name"


def no_group(group: dist.ProcessGroup) -> str:
    return told(lambda: weft.all_gather_matmul(torch.ones(4, 8), [torch.ones(8, 3)], 0, "none"))


# --- arguments that mean the same ---


def scattered(w: torch.Tensor) -> torch.Tensor:
    """The same, of which neither rows nor columns are in one piece."""
    wide = torch.zeros(*w.shape[:-2], 2 * w.shape[-2], 2 * w.shape[-1], dtype=w.dtype)
    wide[..., ::2, ::2] = w
    return wide[..., ::2, ::2]


def of_each(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        given = arguments[name]
        arguments[name] = [change(x) for x in given] if isinstance(given, list) else change(given)

    return apply


def option(**options: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update(options)


OF_GATHERS: dict[str, Callable[[Arguments], None]] = {
    "gather_dim from the end": option(gather_dim=-2),
    "gather_dim of numpy": option(gather_dim=np.int64(0)),
    "rows, all alike": option(rows=[4, 4]),
    "rows in a tensor": option(rows=torch.tensor([4, 4])),
    "a tuple of weights": lambda a: a.update(Bs=tuple(a["Bs"])),
    "weights one by one": lambda a: a.update(Bs=iter(a["Bs"])),
    "weights by rows": of_each("Bs", torch.Tensor.contiguous),
    "weights by columns": of_each("Bs", lambda w: w.t().contiguous().t()),
    "scattered weights": of_each("Bs", scattered),
    "a wide weight's columns": of_each("Bs", lambda w: torch.cat((w.t(), w.t())).contiguous().t()[:, : w.shape[1]]),
    "a scattered shard": of_each("A_shard", scattered),
    "another type": of_each("A_shard", lambda x: x.as_subclass(Named)),
    "a deadline": option(deadline_s=30),
}
OF_PRODUCTS: dict[str, Callable[[Arguments], None]] = {
    "a name": lambda a: a.update(group=a["group"].group_name),
    "scattered rows": of_each("x", scattered),
    "weights by columns": of_each("w", lambda w: w.t().contiguous().t()),
    "scattered weights": of_each("w", scattered),
    "another type": of_each("x", lambda x: x.as_subclass(Named)),
    "a deadline": option(deadline_s=30),
}
SAME: dict[str, dict[str, Callable[[Arguments], None]]] = {
    "matmul_all_gather": {
        **OF_PRODUCTS,
        "from behind": option(gather_dim=-2),
        "of numpy": option(gather_dim=np.int64(0)),
    },
    "matmul_all_reduce": {
        **OF_PRODUCTS,
        "blocks of rows": lambda a: a.update(x=a["x"].view(2, 2, -1), residual=a["residual"].view(2, 2, -1)),
        "a scattered residual": of_each("residual", scattered),
        "a bias with gaps": of_each("bias", lambda bias: bias.repeat_interleave(2)[::2]),
    },
    "all_gather_matmul": {
        **OF_GATHERS,
        "a shard of blocks": of_each("A_shard", lambda x: x.view(2, 2, -1)),
        "parameters": of_each("Bs", lambda w: torch.nn.Parameter(w, requires_grad=False)),
    },
    "all_gather_scaled_matmul": {
        **OF_GATHERS,
        "a shard of blocks": lambda a: a.update(
            A_shard=a["A_shard"].view(2, 2, -1), A_scale=a["A_scale"].view(2, 2, 1)
        ),
        "scales of all rows": of_each("A_scale", lambda scale: torch.cat((scale, scale))),
        "one scale for all columns": of_each("B_scales", lambda scale: scale[0, :1]),
        "no dimensions": of_each("B_scales", lambda scale: scale[0, 0]),
        "dtypes": option(out_dtypes=[torch.bfloat16]),
        "slow": option(use_fast_accum=[False]),
        "no result scales": option(result_scales=(None,)),
    },
    "matmul_reduce_scatter": {
        "a name": lambda a: a.update(group=a["group"].group_name),
        "from behind": option(scatter_dim=-2),
        "blocks of rows": of_each("A", lambda x: x.view(2, 2, -1)),
        "scattered rows": of_each("A", scattered),
        "weights by columns": of_each("B", lambda w: w.t().contiguous().t()),
        "scattered weights": of_each("B", scattered),
        "another type": of_each("A", lambda x: x.as_subclass(Named)),
        "a deadline": option(deadline_s=30),
    },
    "scaled_matmul_reduce_scatter": {
        "a name": lambda a: a.update(group=a["group"].group_name),
        "from behind": option(orig_scatter_dim=-2, scatter_dim_after_maybe_reshape=-2),
        "of numpy": option(orig_scatter_dim=np.int64(0), output_shape=np.array([4, 16])),
        "blocks of rows": lambda a: a.update(A=a["A"].view(2, 2, -1), A_scale=a["A_scale"].view(2, 2, 1)),
        "flattened": option(scatter_dim_after_maybe_reshape=None, output_shape=[2, 2, 16]),
        "weights by rows": of_each("B", lambda w: w.contiguous()),
        "one scale for all columns": of_each("B_scale", lambda scale: scale[0, :1]),
        "no dimensions": of_each("B_scale", lambda scale: scale[0, 0]),
        "scattered scales": of_each("A_scale", scattered),
        "slow": option(use_fast_accum=False),
        "the usual dtype": option(out_dtype=torch.bfloat16),
        "a deadline": option(deadline_s=30),
    },
    "all_to_all_matmul": {
        "int32": of_each("splits", torch.Tensor.int),
        "strided splits": of_each("splits", lambda splits: splits.repeat_interleave(2)[::2]),
        "scattered tokens": of_each("tokens", scattered),
        "scattered weights": of_each("w_experts", scattered),
        "transposed weights": of_each("w_experts", lambda w: w.mT.contiguous().mT),
        "another type": of_each("w_experts", lambda w: w.as_subclass(Named)),
        "a deadline": option(deadline_s=30),
    },
    "matmul_all_to_all": {
        "int32": of_each("received", torch.Tensor.int),
        "int32 splits": of_each("splits", torch.Tensor.int),
        "strided splits": of_each("splits", lambda splits: splits.repeat_interleave(2)[::2]),
        "scattered rows": of_each("h", scattered),
        "transposed weights": of_each("w_experts", lambda w: w.mT.contiguous().mT),
        "another type": of_each("w_experts", lambda w: w.as_subclass(Named)),
        "a deadline": option(deadline_s=30),
    },
    "embedding_all_to_all": {
        "int32": of_each("offsets", torch.Tensor.int),
        "batch sizes": option(batch_sizes=[1, 1]),
        "batch sizes of numpy": option(batch_sizes=np.array([1, 1])),
        "the usual transport": option(transport="direct"),
        "a deadline": option(deadline_s=30),
    },
}
SCHEDULES: dict[str, list[str | None]] = {
    "all_gather_matmul": ["serial", "gather[by=kernel]"],
    "all_gather_scaled_matmul": ["serial", "gather[by=kernel]"],
    "matmul_all_gather": ["serial", "direct[chunks=2,by=dma]"],
    "matmul_all_reduce": ["serial", "one_shot[by=kernel]", "two_shot[chunks=2,by=dma,add=gemm]"],
    "matmul_reduce_scatter": ["serial", "scatter", "direct[chunks=2,by=dma,add=gemm]"],
    "scaled_matmul_reduce_scatter": ["serial", "scatter", "direct[chunks=2,by=dma,add=reduce]"],
    "all_to_all_matmul": ["serial", "dispatch[by=dma,rest=each]"],
    "matmul_all_to_all": ["serial", "combine[chunks=1,by=dma]"],
    "embedding_all_to_all": [None],
}


def written_otherwise(group: dist.ProcessGroup, operator: str) -> None:
    """Rank 1 writes each call otherwise than rank 0, at a new shape and at a known one: by nobody's or everybody's calls before."""
    for schedule in SCHEDULES[operator]:
        options = {} if schedule is None else {"schedule": schedule}
        make = OPERATORS[operator]
        wanted = leaves(make(group)(**options))
        for name, same in SAME[operator].items():
            for known in (False, True):
                own = dist.new_group([0, 1])
                call = make(own)
                if known:
                    call(**options)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of copies
                    for change in (same if group.rank() == 1 else None, None):
                        found = leaves(call(change, **options))
                        for one, other in zip(found, wanted, strict=True):
                            torch.testing.assert_close(
                                one.reshape(other.shape), other, msg=lambda text, name=name: f"{name}: {text}"
                            )
                dist.destroy_process_group(own)


@pytest.mark.parametrize("operator", SAME)
def test_what_means_the_same_makes_one_call(pool: Pool, operator: str) -> None:
    pool.run(written_otherwise, operator, ranks=2, timeout_s=120)
