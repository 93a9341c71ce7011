"""Input that no operator can take, by kind: what one rank (or every rank) passes in place of a good argument.

Each form changes the arguments of one call. What is wrong must be told to all ranks, and the group must live on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .work import FP8, Given

Form = Callable[[Given], Given]


def _each(name: str, change: Callable[[Any], Any]) -> Form:
    """The argument changed; of a list the first of it."""

    def form(given: Given) -> Given:
        value = given[name]
        return {**given, name: [change(value[0]), *value[1:]] if isinstance(value, list) else change(value)}

    return form


def _set(name: str, value: Any) -> Form:
    return lambda given: {**given, name: value}


def _wide(x: torch.Tensor) -> torch.Tensor:
    """fp8 as fp32: torch has fewer kinds of tensors of it."""
    x = x.detach()
    return x.float() if x.itemsize == 1 else x


def _sparse(x: torch.Tensor) -> torch.Tensor:
    return _wide(x).to_sparse()


def _nested(x: torch.Tensor) -> torch.Tensor:
    x = _wide(x).reshape(-1, *x.shape[1:])
    return torch.nested.nested_tensor([x, x[:1]])


def _numpy(x: torch.Tensor) -> Any:
    x = x.detach().cpu()
    return (x.float() if x.is_floating_point() else x).numpy()


def _list(x: torch.Tensor) -> Any:
    return x.detach().cpu().float().tolist()


def dtensor(x: torch.Tensor) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x.detach(), mesh(), [Replicate()], run_check=False)


_mesh: Any = None


def mesh() -> Any:
    """Of all ranks, made once. Collective. torch imports hundreds of modules for its first DTensor, so that one is made here: alone
    on the rank that passes it, it would make that rank come too late."""
    global _mesh
    if _mesh is None:
        from torch.distributed.device_mesh import DeviceMesh

        _mesh = DeviceMesh("cpu", list(range(torch.distributed.get_world_size())))
        dtensor(torch.zeros(1))
    return _mesh


PRODUCTS = ("matmul_reduce_scatter", "scaled_matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather")
FORMED = ("sparse", "DTensor", "numpy", "dtype", "value", "size")
TENSORS = {
    "all_gather_matmul": ("A_shard", "Bs"),
    "all_gather_scaled_matmul": ("A_shard", "Bs", "A_scale", "B_scales"),
    "all_to_all_matmul": ("tokens", "w_experts", "splits"),
    "matmul_reduce_scatter": ("A", "B"),
    "scaled_matmul_reduce_scatter": ("A", "B", "A_scale", "B_scale", "bias"),
    "matmul_all_reduce": ("x", "w", "bias", "residual"),
    "matmul_all_gather": ("x", "w"),
    "matmul_all_to_all": ("h", "w_experts", "received", "splits"),
    "embedding_all_to_all": ("values", "offsets"),
    "module, local batch": ("values", "lengths", "offsets"),
    "module, global batch": ("values", "offsets"),
}


def _too_large(values: torch.Tensor) -> torch.Tensor:
    return torch.full_like(values, 10**6)


def _values(operator: str) -> list[Form]:
    """Right types and sizes, wrong numbers."""
    if operator == "all_to_all_matmul":
        return [
            _each("splits", lambda s: s + 1), _each("splits", lambda s: s - 100), _set("max_rows", -1), _set("capacity", 0),
            _set("schedule", "dispach"), _set("deadline_s", -1.0), _set("deadline_s", "soon"), _set("max_rows", "all"),
        ]  # fmt: skip
    if operator == "matmul_all_to_all":
        return [
            _each("splits", lambda s: s + 1), _each("splits", lambda s: s - 100), _each("received", lambda r: r + 1),
            _each("received", lambda r: r - 100), _set("rows", -1), _set("rows", "all"), _set("capacity", 0),
            _set("schedule", "combin"), _set("deadline_s", -1.0), _set("deadline_s", "soon"),
        ]  # fmt: skip
    if operator in PRODUCTS:
        own = {
            "matmul_reduce_scatter": [_set("scatter_dim", "0"), _set("scatter_dim", 7), _set("reduce_op", "mean"), _set("B", None)],
            "scaled_matmul_reduce_scatter": [
                _set("orig_scatter_dim", "0"), _set("orig_scatter_dim", 1), _set("scatter_dim_after_maybe_reshape", 7),
                _set("reduce_op", "max"), _set("B", None), _set("A_scale", 0.5), _set("B_scale", None), _set("bias", 1),
                _set("result_scale", torch.ones(1)), _set("out_dtype", None), _set("out_dtype", FP8), _set("use_fast_accum", 1),
                _set("output_shape", [3, 5]), _set("output_shape", "x"), _each("A_scale", lambda s: s.clone().requires_grad_()),
            ],
            "matmul_all_reduce": [_set("op", "mean"), _set("op", 5), _set("w", None), _set("bias", 1), _set("residual", "x")],
            "matmul_all_gather": [_set("gather_dim", "0"), _set("gather_dim", 7), _set("w", None)],
        }[operator]  # fmt: skip
        return [
            *own,
            _set("schedule", "dierct"),
            _set("schedule", 5),
            _set("deadline_s", -1.0),
            _set("deadline_s", "soon"),
        ]
    if operator.startswith("all_gather"):
        return [
            _set("gather_dim", "0"), _set("gather_dim", 7), _set("rows", [3]), _set("rows", "many"), _set("schedule", "shrad"),
            _set("schedule", 5), _set("deadline_s", -1.0), _set("deadline_s", "soon"), _set("Bs", None),
        ]  # fmt: skip
    forms = [_each("offsets", lambda o: o + 1), _each("offsets", lambda o: o.flip(0) + 1)]
    if operator != "module, local batch":
        forms += [_set("batch_sizes", [1]), _set("batch_sizes", "even"), _set("batch_sizes", [-1, 10**6])]
    if operator == "module, local batch":
        forms += [_each("lengths", lambda n: n + 1), _each("lengths", lambda n: n - 9), _set("batch_sizes", [1, 1])]
    if operator == "embedding_all_to_all":
        forms += [_set("deadline_s", -1.0), _set("deadline_s", "soon")]
    else:
        forms += [_set("keys", ["f0"]), _set("features", {"f0": 1}), _set("features", None), _set("stride", 10**9)]
    return forms


def _sizes(operator: str) -> list[Form]:
    if operator.startswith("all_gather"):
        return [
            _each("Bs", lambda B: B[:-1]), _each("A_shard", lambda x: x[0]), _each("A_shard", lambda x: x[:, :-1]),
            _set("Bs", []), _each("Bs", lambda B: B[None]), _each("A_shard", lambda x: x.flatten()[0]),
        ]  # fmt: skip
    if operator == "all_to_all_matmul":
        return [
            _each("splits", lambda s: s[:-1]), _each("w_experts", lambda w: w[:, :-1]), _each("tokens", lambda t: t.flatten()),
            _each("tokens", lambda t: t[:, :-1]), _each("w_experts", lambda w: w[0]), _each("tokens", lambda t: t[None]),
        ]  # fmt: skip
    if operator == "matmul_all_to_all":
        return [
            _each("splits", lambda s: s[:-1]), _each("received", lambda r: r[:-1]), _each("received", lambda r: r.flatten()),
            _each("w_experts", lambda w: w[:, :-1]), _each("w_experts", lambda w: w[0]), _each("h", lambda h: h.flatten()),
            _each("h", lambda h: h[:, :-1]), _each("h", lambda h: h[None]),
        ]  # fmt: skip
    if operator in PRODUCTS:
        x, w, *_ = TENSORS[operator]
        of_one = [_each(x, lambda x: x[:-1])] if operator.endswith("reduce_scatter") else []
        if operator == "scaled_matmul_reduce_scatter":
            of_one += [_each("A_scale", lambda s: s.new_ones(3, 1)), _each("B_scale", lambda s: s.new_ones(3, 1))]
            of_one += [_each(w, lambda w: w[:, :8]), _set("bias", torch.ones(3).bfloat16())]
        return [
            *of_one, _each(x, lambda x: x[0]), _each(x, lambda x: x[:, :-1]), _each(x, lambda x: x.flatten()[0]),
            _each(w, lambda w: w[:-1]), _each(w, lambda w: w[None]),
        ]  # fmt: skip
    forms = [
        _each("offsets", lambda o: o[:-1]),
        _each("offsets", lambda o: o[None]),
        _each("values", lambda v: v[None]),
    ]
    if operator == "module, local batch":
        forms += [_each("lengths", lambda n: n[:-1]), _each("lengths", lambda n: n[:0])]
    return forms


def _dtypes(operator: str) -> list[Form]:
    if operator.startswith("all_gather"):
        return [
            _each("A_shard", lambda x: x.to(torch.float64)), _each("A_shard", lambda x: x.to(torch.int32)),
            _each("Bs", lambda B: B.to(torch.float64)), _each("Bs", lambda B: B.to(torch.bool)),
        ]  # fmt: skip
    if operator == "all_to_all_matmul":
        return [
            _each("splits", lambda s: s.float()), _each("splits", lambda s: s.bool()), _each("w_experts", lambda w: w.double()),
            _each("tokens", lambda t: t.to(torch.complex64)), _each("tokens", lambda t: t.long()),
        ]  # fmt: skip
    if operator == "matmul_all_to_all":
        return [
            _each("splits", lambda s: s.float()), _each("received", lambda r: r.bool()), _each("w_experts", lambda w: w.double()),
            _each("h", lambda h: h.to(torch.complex64)), _each("h", lambda h: h.long()),
        ]  # fmt: skip
    if operator in PRODUCTS:
        x, w, *_ = TENSORS[operator]
        scales = ("A_scale", "B_scale") if operator == "scaled_matmul_reduce_scatter" else ()
        return [
            _each(x, lambda x: x.to(torch.float64)), _each(x, lambda x: x.to(torch.int32)), _each(w, lambda w: w.double()),
            _each(w, lambda w: w.bool()), *(_each(scale, lambda s: s.half()) for scale in scales),
        ]  # fmt: skip
    forms = [_each("values", lambda v: v.float() + 0.5), _each("values", lambda v: v.bool())]
    forms += [_each("offsets", lambda o: o + 0.5), _each("offsets", lambda o: o.bool())]
    if operator == "module, local batch":
        forms += [_each("lengths", lambda n: n + 0.25), _each("lengths", lambda n: n.bool())]
    return forms


def forms(kind: str, operator: str, options: Given) -> list[tuple[str, Form]]:
    """Named, so that a finding says which it was."""
    if kind == "value":
        found = _values(operator)
        if options.get("bounds_check") == "fatal":  # else they are read as rows of zeros, with a warning
            found.append(_each("values", _too_large))
            found.append(_each("values", lambda v: v - 10**6))
        return [(f"value {i}", form) for i, form in enumerate(found)]
    if kind in ("size", "dtype"):
        made = {"size": _sizes, "dtype": _dtypes}[kind](operator)
        return [(f"{kind} {i}", form) for i, form in enumerate(made)]
    changes = {
        "sparse": [("sparse", _sparse), ("nested", _nested)],
        "numpy": [("numpy", _numpy), ("list", _list)],
        "DTensor": [("DTensor", dtensor)],
    }[kind]
    given = [argument for argument in TENSORS[operator] if options.get(argument, True)]
    return [(f"{name} {argument}", _each(argument, change)) for name, change in changes for argument in given]
