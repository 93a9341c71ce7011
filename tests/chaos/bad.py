"""Invalid arguments that one rank, or every rank, passes in place of a valid argument.

A form is a function that replaces arguments of one call. Every rank must be notified of the error, and the group must
stay usable. The `Work` of an operator lists its forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .work import Given, Work

Form = Callable[["Given"], "Given"]


def each(name: str, change: Callable[[Any], Any]) -> Form:
    """Return a form that changes the argument `name`. If the argument is a list, the form changes the first item."""

    def form(given: Given) -> Given:
        value = given[name]
        return {**given, name: [change(value[0]), *value[1:]] if isinstance(value, list) else change(value)}

    return form


def put(name: str, value: Any) -> Form:
    return lambda given: {**given, name: value}


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Convert fp8 to fp32, because torch supports fewer kinds of tensors for fp8."""
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


def _freed(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    x.untyped_storage().resize_(0)
    return x


def _view_of_freed(x: torch.Tensor) -> torch.Tensor:
    """Return a view of freed storage, with an offset other than zero."""
    view = x.detach().new_empty(64 + x.numel())[64:].view(x.shape)
    view.untyped_storage().resize_(0)
    return view


def _cut(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
    return x


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to("meta")


def dtensor(x: torch.Tensor) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x.detach(), mesh(), [Replicate()], run_check=False)


_mesh: Any = None


def mesh() -> Any:
    """Return a mesh of all ranks. The first call makes it, on all ranks together.

    The first call also makes a DTensor, for which torch imports hundreds of modules. Otherwise the rank that passes a
    DTensor would be late.
    """
    global _mesh
    if _mesh is None:
        from torch.distributed.device_mesh import DeviceMesh

        _mesh = DeviceMesh("cpu", list(range(torch.distributed.get_world_size())))
        dtensor(torch.zeros(1))
    return _mesh


FORMED = ("sparse", "DTensor", "numpy", "memory", "dtype", "value", "size")
DEADLINES = [put("deadline_s", -1.0), put("deadline_s", "soon")]


def forms(kind: str, of: type[Work], options: Given) -> list[tuple[str, Form]]:
    """Return the forms of a kind of fault, as (name for reports, form)."""
    if kind == "other tables":
        return [(f"{kind} {i}", form) for i, form in enumerate(of.other_tables())]
    if kind in ("value", "size", "dtype"):
        made = {"value": of.bad_values, "size": of.bad_sizes, "dtype": of.bad_dtypes}[kind](options)
        return [(f"{kind} {i}", form) for i, form in enumerate(made)]
    changes = {
        "sparse": [("sparse", _sparse), ("nested", _nested)],
        "numpy": [("numpy", _numpy), ("list", _list)],
        "DTensor": [("DTensor", dtensor)],
        "memory": [("freed", _freed), ("view of freed", _view_of_freed), ("cut", _cut), ("meta", _on_meta)],
    }[kind]
    given = [argument for argument in of.arguments if options.get(argument, True)]
    return [(f"{name} {argument}", each(argument, change)) for name, change in changes for argument in given]
