"""An MoE layer whose experts are distributed over the ranks of a group. Communication overlaps with the experts' GEMMs.

    x               this rank's tokens
    routing         for each token its top_k experts and their weights, from the caller's router
    sort            repeat each token for each of its experts, and sort the copies by global expert
    h               weft.all_to_all_matmul: send tokens to their experts' ranks, multiply by gate_up_proj as they arrive
    a               activation(gate) * up, where gate and up are the halves of h
    y               weft.matmul_all_to_all: multiply by down_proj, send rows back as they are computed
    sum             the weighted sum of each token's rows

Source: "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 3.2 (dispatch and combine).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weft.arguments import check_flag, checked_count, not_dense
from weft.nn.expert_rows import Routing, can_fuse
from weft.nn.fused_experts import fused_experts
from weft.nn.layer_arguments import check_activation, check_device, check_dtype, checked_size
from weft.operator.derivatives import require_kept
from weft.operator.layers import (
    activated,
    compare_options,
    ends_group,
    fill,
    require_alike,
    require_plain_by,
    tells_peers,
    wrong_device,
)
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.ops.matmul_all_to_all import matmul_all_to_all
from weft.symm.groups import member_group

_ONE_BY_ONE = re.compile(r"(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_WHICH = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class ExpertParallelMLP(nn.Module):
    """MoE experts down_proj(activation(gate_proj(x)) * up_proj(x)), distributed over ranks. Returns the weighted sum of
    each token's expert outputs.

        x [..., hidden], top_k_index [tokens, top_k], top_k_weights [tokens, top_k]  ->  [..., hidden]

    Each rank passes its own tokens, and owns E = num_experts / W of the experts, from expert rank * E on. W is the
    number of ranks. The router is not part of this module. If every rank has a copy of the router, reduce the gradients
    of the router's parameters over ranks, as in data parallelism. Tokens are neither padded nor dropped, unless they
    exceed `max_rows`. All ranks of `group` must run every forward and every backward. They must enable gradients for
    the same tensors; only top_k_weights may differ. Gradients of experts are already summed over the tokens of all
    ranks: do not reduce them again.

    hidden, intermediate: the sizes of an expert.
    num_experts: the number of experts of all ranks, divisible by the number of ranks.
    group: a process group, or its name.
    activation: the activation function of the gate.
    gated: False for experts down_proj(activation(up_proj(x))) with two GEMMs.
    max_rows: an upper bound on the rows that the experts of a rank process in a call, or None. A token is a row for
        each of its experts. With a bound, the CPU never waits for GPUs, and a CUDA graph can capture forward unless a
        schedule is "serial". Rows above the bound are dropped on GPUs, and raise an error on CPU.
    capacity: the number of rows (tokens x top_k) that a rank can send in a call, for which buffers are allocated. Pass
        the largest number of any rank in any call, equal on all ranks. Default: slightly more than in the first call.
    schedules: the names of the schedules to use for `all_to_all_matmul` and for `matmul_all_to_all`. None: weft
        chooses.
    device, dtype: as for `nn.Linear`. dtype is fp32, fp16 or bf16, or fp64 on CPU; x must have the same dtype. Autocast has no
        effect.

    The parameters are `gate_up_proj` [E, 2 * intermediate, hidden], with the gate's rows first, and `down_proj` [E,
    hidden, intermediate]. With gated=False, `up_proj` [E, intermediate, hidden] replaces `gate_up_proj`. The parameters
    are slices of the parameters of Hugging Face's `MixtralExperts`, whose forward has the same signature. `local_part`
    makes the slices from the state dict of all experts, and `weft.nn.local_state_dict` from the state dict of a whole
    model. Copies by `deepcopy` and pickle use the group with the same name.

    Expert outputs are weighted in x's dtype and summed in fp32, in the order of top_k, so equal calls give equal bits.
    Calls raise the errors of `weft.all_to_all_matmul` and `weft.matmul_all_to_all`. If any rank's routing is invalid,
    every rank raises `RefusedError`.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        *,
        group: dist.ProcessGroup | str,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        gated: bool = True,
        max_rows: int | None = None,
        capacity: int | None = None,
        schedules: tuple[str | None, str | None] = (None, None),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = member_group(group)
        self.group_name, self.rank, self.world_size = group.group_name, group.rank(), group.size()
        self.num_experts = checked_size("num_experts", num_experts, self.world_size)
        self.hidden, self.intermediate = checked_size("hidden", hidden), checked_size("intermediate", intermediate)
        check_flag("gated", gated)
        check_activation(activation)
        check_device(device)
        check_dtype(dtype)
        self.activation, self.gated = activation, gated
        self.max_rows, self.capacity = checked_count("max_rows", max_rows), checked_count("capacity", capacity)
        self.schedules = _checked_schedules(schedules)
        local = self.num_experts // self.world_size
        rows = 2 * self.intermediate if gated else self.intermediate
        first = nn.Parameter(torch.empty(local, rows, self.hidden, device=device, dtype=dtype))
        self.register_parameter(self.first_name, first)
        self.down_proj = nn.Parameter(torch.empty(local, self.hidden, self.intermediate, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def first_name(self) -> str:
        """The name of the parameter that the first GEMM multiplies by: `gate_up_proj`, or `up_proj` with gated=False."""
        return "gate_up_proj" if self.gated else "up_proj"

    def reset_parameters(self) -> None:
        """Initialise all experts as `nn.Linear` does, one after the other. Ranks with equal seeds get parts of the same
        model.
        """
        parameters = self.get_parameter(self.first_name), self.down_proj
        if parameters[0].is_meta:
            return
        local = self.num_experts // self.world_size
        # FSDP2 may have sharded the parameters further.
        divided = [hasattr(w, "placements") for w in parameters]
        parts = [
            torch.empty(w.shape, device=w.device, dtype=w.dtype) if of_fsdp else w.detach()
            for w, of_fsdp in zip(parameters, divided, strict=True)
        ]
        for expert in range(self.num_experts):
            here = expert - self.rank * local
            for part in parts:
                drawn = torch.empty_like(part[0]).uniform_(-(part.shape[2] ** -0.5), part.shape[2] ** -0.5)
                if 0 <= here < local:
                    part[here] = drawn
        for parameter, part, of_fsdp in zip(parameters, parts, divided, strict=True):
            if of_fsdp:
                fill(parameter, part)

    def local_part(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's slice of the full expert state dict.

        whole: weights in one of two forms. Stacked weights [num_experts, ...] have this module's names; the result then
            has views. Separate weights of each expert i are `i.gate_proj.weight`, `i.up_proj.weight` and
            `i.down_proj.weight`; the result then has copies. Mixtral's names `i.w1.weight`, `i.w3.weight` and
            `i.w2.weight` are also allowed.
        """
        local = self.num_experts // self.world_size
        mine = range(self.rank * local, (self.rank + 1) * local)
        if self.first_name in whole:
            parameters = {name: whole.get(name) for name in (self.first_name, "down_proj")}
            for name, w in parameters.items():
                if w is None or w.shape[:1] != (self.num_experts,):
                    shape = "is missing" if w is None else f"has shape {tuple(w.shape)}"
                    raise ValueError(f"{name} {shape}: pass the weights of all num_experts={self.num_experts} experts")
            return {name: w[mine.start : mine.stop] for name, w in parameters.items() if w is not None}
        found = {
            (int(match[1]), _WHICH.get(match[2], match[2])): weight
            for name, weight in whole.items()
            if (match := _ONE_BY_ONE.fullmatch(name))
        }
        if (last := max((i for i, _ in found), default=0)) >= self.num_experts:
            raise ValueError(
                f"the state dict has expert {last}, but the module has num_experts={self.num_experts}: pass the parameters of the "
                "module's experts, or construct the module with the number of experts of the state dict"
            )
        parts = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        missing = [f"{i}.{name}.weight" for i in mine for name in (*parts, "down_proj") if (i, name) not in found]
        if missing:
            raise ValueError(
                f"the state dict has {', '.join(list(whole)[:4])}, ..., but needs {self.first_name} for all experts, "
                f"or {missing[0]}, ... for each expert: remove the prefix before these names"
            )
        first = [torch.cat([found[i, name] for name in parts]) for i in mine]
        return {self.first_name: torch.stack(first), "down_proj": torch.stack([found[i, "down_proj"] for i in mine])}

    def is_of_experts(self, name: str) -> bool:
        """True if `local_part` reads the entry `name` of a state dict."""
        return name in (self.first_name, "down_proj") or _ONE_BY_ONE.fullmatch(name) is not None

    @tells_peers
    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's expert outputs.

        x: [..., hidden], in the dtype of the parameters.
        top_k_index: [tokens, top_k], integers: the global numbers of each token's experts. On CPU their values are
            checked.
        top_k_weights: [tokens, top_k]: the weight of each of these experts, in any floating dtype.
        """
        if wrong := self._wrong_input(x, top_k_index, top_k_weights):
            raise ValueError(f"{type(self).__name__}: {wrong}")
        first = self.get_parameter(self.first_name)
        require_alike(self, x, first, self.down_proj)
        require_plain_by(type(self).__name__, self.group_name, x, top_k_weights)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            require_kept(type(self).__name__, [top_k_weights])
        tokens = x.reshape(-1, x.shape[-1])
        fuses = self.gated and self.activation is F.silu and self.world_size > 1 and can_fuse(tokens, top_k_weights)
        routing = Routing.of(top_k_index, self.num_experts, fuses)
        compare_options(
            type(self).__name__, self.group_name, x, hidden=self.hidden, intermediate=self.intermediate,
            num_experts=self.num_experts, gated=self.gated, activation=self.activation,
            by_kernels=routing.kernels is not None, gradients=self._gradients_of(x, first),
        )  # fmt: skip
        if routing.kernels is not None:
            return fused_experts(self, tokens, top_k_weights, first, self.down_proj, routing).view(x.shape)
        h, received = self._dispatched(routing.rows_of(tokens), routing)
        y = self._combined(self._activated(h), received, routing)
        return self._summed(y, routing, top_k_weights).view(x.shape)

    def _gradients_of(self, x: torch.Tensor, first: torch.Tensor) -> str:
        """Return the names of the tensors whose gradients need communication in backward. first: the first weights."""
        of = {"x": x, self.first_name: first, "down_proj": self.down_proj} if torch.is_grad_enabled() else {}
        return " and ".join([name for name, t in of.items() if t.requires_grad]) or "none"

    def _dispatched(self, rows: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of the activation, and the number of rows from each rank for each of this rank's experts."""
        return all_to_all_matmul(  # type: ignore[return-value]
            rows, _columns(self.get_parameter(self.first_name)), routing.splits, group=self.group_name,
            max_rows=self.max_rows, return_received=True, capacity=self.capacity, schedule=self.schedules[0],
        )  # fmt: skip

    def _combined(self, a: torch.Tensor, received: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the experts' outputs for this rank's rows."""
        return matmul_all_to_all(
            a, _columns(self.down_proj), received, routing.splits, group=self.group_name, rows=len(routing.order),
            capacity=self.capacity, schedule=self.schedules[1],
        )  # fmt: skip

    def _activated(self, h: torch.Tensor) -> torch.Tensor:
        """Return the input of down_proj."""
        if not self.gated:
            return activated(self, h)
        gate, up = h.chunk(2, dim=1)
        return activated(self, gate) * up

    @ends_group
    def _summed(self, y: torch.Tensor, routing: Routing, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's rows. y: a row for each of a token's experts, in the order of `routing`."""
        return routing.summed(y, top_k_weights)

    def _wrong_input(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> str:
        for name, given in (("x", x), ("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
            if wrong := not_dense(name, given):
                return wrong
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            return f"x has shape {tuple(x.shape)}: pass [..., {self.hidden}]"
        if wrong := wrong_device(x, self.down_proj):
            return wrong
        for name, given in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
            if given.device != x.device:
                return f"{name} is on {given.device} and x on {x.device}: use one device"
        tokens = x.shape[:-1].numel()
        if top_k_index.dim() != 2 or top_k_index.shape != top_k_weights.shape or len(top_k_index) != tokens:
            return (
                f"top_k_index {tuple(top_k_index.shape)} and top_k_weights {tuple(top_k_weights.shape)} must both be "
                f"[{tokens}, top_k], as x has {tokens} tokens"
            )
        if not top_k_index.shape[1]:
            return f"top_k_index has shape {tuple(top_k_index.shape)}: choose at least one expert for each token"
        if top_k_index.dtype not in _INTEGERS:
            return f"top_k_index is {top_k_index.dtype}: use torch.int64"
        if not top_k_weights.is_floating_point():
            return f"top_k_weights is {top_k_weights.dtype}: use a floating dtype, such as {x.dtype}"
        if not (torch.compiler.is_compiling() or is_in_torch_dispatch_mode()) and top_k_index.device.type == "cpu":
            for expert in (top_k_index.min(), top_k_index.max()) if top_k_index.numel() else ():
                if not 0 <= expert < self.num_experts:
                    return f"top_k_index contains {int(expert)}: pass expert numbers from 0 to {self.num_experts - 1}"
        return ""

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden}, intermediate={self.intermediate}, num_experts={self.num_experts}, gated={self.gated}, "
            f"rank={self.rank} of {self.world_size}"
        )


def _checked_schedules(given: Any) -> tuple[str | None, str | None]:
    """Return the argument `schedules` as a pair. Raise `ValueError` unless it is a pair of names or None."""
    if (
        not isinstance(given, tuple | list)
        or len(given) != 2
        or not all(one is None or isinstance(one, str) for one in given)
    ):
        raise ValueError(
            f"schedules={given!r}: pass a pair, the names of the schedules for all_to_all_matmul and for matmul_all_to_all; None "
            "lets weft choose"
        )
    return given[0], given[1]


def _columns(weight: torch.Tensor) -> torch.Tensor:
    """Return a view [E, in, out] of a weight [E, out, in]."""
    return weight.mT
