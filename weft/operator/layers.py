"""Support for layers that call operators: modules of `weft.nn`, and linear layers that a style of `weft.parallel` has
sharded.

If a model shards activations along the sequence, some parameters are replicated on all ranks: a norm's weight, an
embedding, the bias of a row-parallel layer. Each rank's gradient covers only its own positions in the sequence, so the
true gradient is the sum over ranks. If each rank updated its copy with its own gradient, the copies would silently
diverge.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from weft.operator.derivatives import is_transformed, refuse_transforms, refused, require_kept, require_plain
from weft.operator.together import tell, together
from weft.runtime.opaque import never_left_out, opaque
from weft.runtime.unfused.collectives import all_reduce
from weft.runtime.unfused.turn import turn_on
from weft.symm.calls import calls_of
from weft.symm.groups import group_of, member_group, size_of
from weft.words import kind

F = TypeVar("F", bound=Callable[..., Any])

_WHAT = "the gradient of a replicated parameter"


def replicated(parameter: torch.Tensor, group: dist.ProcessGroup | str) -> torch.Tensor:
    """Return `parameter`, with a backward that sums its gradient over the ranks of `group`.

        F.rms_norm(x_shard, (hidden,), weft.nn.replicated(self.weight, group))

    The parameter must have the same value on all ranks. Each use costs an all-reduce in backward, which all ranks must
    run.
    """
    if size_of(group) == 1:
        return parameter
    require_plain_by("weft.nn.replicated", group, parameter)
    if isinstance(group, str):
        return _Replicated.apply(parameter, group)
    # A destroyed group still knows its size. Without this check, only backward would raise.
    found = group_of(group) if torch.compiler.is_compiling() else member_group(group)
    return _Replicated.apply(parameter, found.group_name)


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in the dtype to which autocast would convert them for `nn.functional.linear`. Autocast has no
    effect on weft's operators.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def activated(of: Any, x: torch.Tensor) -> torch.Tensor:
    """Return `of.activation(x)`, the activation function of the layer `of` applied to x. Raise `ValueError` if the activation
    returns no tensor, or changes the shape or, outside of autocast, the dtype.
    """
    y: torch.Tensor = of.activation(x)
    if not isinstance(y, torch.Tensor):
        raise ValueError(
            f"{type(of).__name__}: activation returns {kind(y)}: pass a function that returns a tensor, such as "
            "torch.nn.functional.silu"
        )
    if y.shape != x.shape:
        raise ValueError(
            f"{type(of).__name__}: activation changes the shape {tuple(x.shape)} to {tuple(y.shape)}: pass a "
            "function that keeps the shape, such as torch.nn.functional.silu"
        )
    if y.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"{type(of).__name__}: activation changes {x.dtype} to {y.dtype}: pass a function that keeps the dtype, "
            "or converts back"
        )
    return y


def fill(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value` into `parameter`. If FSDP2 has sharded the parameter, the first rank of its mesh broadcasts the value."""
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor  # this import takes half a second

        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    with torch.no_grad():
        parameter.copy_(value)


def tells_peers(forward: F) -> F:
    """Decorate a module's `forward`, so that errors that only this rank raises reach its peers. The module must have
    the attribute `group_name`.

    Examples are bad input before the first collective, and an error in an activation between two collectives. The
    peers' next call raises `RefusedError` (`weft.operator.together.tell`). Under torch.compile the decorator does
    nothing.
    """
    return _telling(forward, last=False)


def ends_group(method: F) -> F:
    """Decorate a method that runs after a module's last collective, so that an error in the method makes the group fail."""
    return _telling(method, last=True)


def _telling(method: F, last: bool) -> F:
    @functools.wraps(method)
    def told(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, x, *args, **kwargs)
        try:
            return method(self, x, *args, **kwargs)
        except BaseException as error:
            if not _is_fake(x):
                tell(error, type(self).__name__, group_of(self.group_name), x, last=last)
            raise

    # torch.compile limits recompilations per code object, so each module needs its own code object.
    function = cast(Any, told)
    function.__code__ = function.__code__.replace(co_name=method.__qualname__)
    return cast(F, told)


def _is_fake(x: Any) -> bool:
    """True if `x`, or the local tensor of a DTensor, is a FakeTensor. Then the call is being traced, and peers do not
    run it.
    """
    return isinstance(getattr(x, "_local_tensor", x), FakeTensor)


def compare_options(
    layer: str, group_name: str, x: torch.Tensor, *, is_collective: bool = True, **options: object
) -> None:
    """Record the options of a layer's call. Ranks compare them at the group's next call (`weft.symm.layers`).

    The operators that a layer calls compare only their own arguments. Each layer calls this function after its input
    checks and before its first operator.

    is_collective: True if the layer's forward needs all ranks.
    options: numbers, flags, functions and modules. A function is compared by name, a module by type and eps. Omit
        options that may differ between ranks.
    """
    if torch.compiler.is_compiling() or _is_fake(x):
        return
    group = group_of(group_name)
    if group.size() > 1:
        said = tuple([(name, _named(one) if callable(one) else one) for name, one in options.items()])
        calls_of(group).layers.note(*_text(layer, said), is_collective)


def given(value: object) -> Literal["given"] | None:
    """Return an option for `compare_options`: "given" if `value` is not None, else None. With this option, ranks may
    pass different values, but not a value on one rank and None on another.
    """
    return None if value is None else "given"


@functools.lru_cache(maxsize=4096)
def _text(layer: str, options: tuple[tuple[str, object], ...]) -> tuple[str, int]:
    """Return the text of a layer's options, for messages, and the hash of the text."""
    text = f"{layer}({', '.join(f'{name}={value}' for name, value in options)})"
    return text, int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _named(function: Any) -> str:
    """Return a name for a function or a module that is equal on all ranks: without addresses and devices."""
    if isinstance(function, functools.partial):
        options = [
            f"{name}={value}" for name, value in function.keywords.items() if isinstance(value, int | float | str)
        ]
        return ", ".join([f"partial({_named(function.func)}", *options]) + ")"
    if isinstance(function, nn.Module):
        kind, own = type(function), vars(function)
        name, eps = f"{kind.__module__}.{kind.__qualname__}", own.get("eps", own.get("variance_epsilon"))
        if eps is not None:
            return f"{name}(eps={eps}, weight={given(own['_parameters'].get('weight'))})"
        return f"{name}({function.extra_repr()})" if name.startswith("torch.nn.modules.") else name
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def wrong_device(x: torch.Tensor, weight: torch.Tensor) -> str:
    """Return an error text with its fix if `x` is not on the device of `weight`, or not on a CPU or GPU; otherwise ""."""
    if x.device == weight.device and x.device.type in ("cpu", "cuda"):
        return ""
    if weight.is_meta:
        memory = "give the layer memory by to_empty(device=...), then values by reset_parameters() or load_state_dict()"
        return f"the weight is on meta, but x is on {x.device}: {memory}"
    if x.device.type not in ("cpu", "cuda"):
        return f"x is on {x.device}: pass a tensor on a GPU or on the CPU"
    return f"x is on {x.device}, but the weight is on {weight.device}: use one device"


def require_alike(of: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> None:
    """Raise `ValueError` if x and a weight differ in dtype or device. The error names the layer `of`."""
    for weight in weights:
        if weight.dtype != x.dtype or weight.device != x.device:
            given = f"x is {x.dtype} on {x.device}, but the weight is {weight.dtype} on {weight.device}"
            raise ValueError(f"{type(of).__name__}: {given}: use one dtype and device")


def require_plain_by(layer: str, group: dist.ProcessGroup | str, *tensors: torch.Tensor | None) -> None:
    """Raise `ValueError` inside a torch.func transform or a forward-mode derivative, and notify peers. The error names
    `layer`. In a traced call this function does nothing, because the operators raise.
    """
    if not torch.compiler.is_compiling() and is_transformed():
        with together(layer, group_of(group), tensors[0], None):
            require_plain(layer, lambda: tensors)


def require_kept_by(ctx: Any, layer: str, group_name: str, *tensors: torch.Tensor | None) -> None:
    """Raise `ValueError` if autograd cannot save a tensor for backward, and notify peers.

    Call this at the start of an autograd Function's forward. Autograd itself would raise only after forward.
    """
    if (
        not torch.compiler.is_compiling()
        and ctx.next_functions  # empty in torch.no_grad(), where needs_input_grad is still True
        and any(t is not None and t.is_inference() for t in tensors)
    ):
        with together(layer, group_of(group_name), tensors[0], None):
            require_kept(layer, tensors)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group_name: str) -> torch.Tensor:  # type: ignore[override]
        ctx.group_name = group_name
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return torch.ops.weft.summed_over_ranks(grad, ctx.group_name), None


@opaque
def _summed(x: torch.Tensor, group_name: str) -> torch.Tensor:
    group = group_of(group_name)
    with together(_WHAT, group, x, None):
        turn = turn_on(group, x.device, f"{_WHAT} {tuple(x.shape)} {x.dtype}", None)
        return all_reduce(x.contiguous(), [1] * group.size(), group.rank(), group, turn, "all-reduce")


# An opaque op: torch.compile does not trace into it.
_library = torch.library.Library("weft", "FRAGMENT")
_library.define("summed_over_ranks(Tensor x, str group) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("summed_over_ranks", _summed, _key)
_refuse = functools.partial(refuse_transforms, "weft.nn.replicated")
_library.impl("summed_over_ranks", _refuse, "FuncTorchDynamicLayerFrontMode")
torch.library.register_autograd("weft::summed_over_ranks", refused("weft.nn.replicated"), lib=_library)
torch.library.register_fake("weft::summed_over_ranks", lambda x, group: torch.empty_like(x), lib=_library)
never_left_out("summed_over_ranks")
