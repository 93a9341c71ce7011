"""Unfused calls of experts on GPUs as steps of native code. `weft.runtime.unfused.experts` has the same steps in Python.

Python only reads numbers of rows that the CPU does not know, computes permutations of rows, and launches the kernel that moves
rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from weft import _core
from weft.runtime.unfused.grouped_matmul import GROUPED_MM
from weft.runtime.unfused.permutation import Orders, in_expert_order, in_order_of_arrival, orders_of, selected
from weft.runtime.unfused.serial import TORCH
from weft.runtime.unfused.sizes import KNOWN, Numbers, Sizes, remember, sizes_of

_TABLES = ("received", "splits", "numbers")
_stream = getattr(torch._C, "_cuda_getCurrentStream", None)


def dispatch_steps(experts: int, world: int) -> _core.PlainSteps | None:
    """Return the steps of a dispatch (`weft.runtime.unfused.experts.dispatched`) without `max_rows`. Return None if native code
    does not support this version of torch.

    Their inputs are tokens, w and splits, and their results are y and received. The CPU waits for the numbers of rows, and
    remembers them (`weft.runtime.unfused.sizes.remember`). A call must not be captured.

    experts: the number of local experts. world: the number of ranks, at least 2.
    """
    return _steps("dispatch", experts, world)


def combine_steps(experts: int, world: int) -> _core.PlainSteps | None:
    """Return the steps of a combine (`weft.runtime.unfused.experts.matmul_all_to_all`). Their inputs are h, w, received, splits,
    and the number of rows of the result, `y`. Otherwise as `dispatch_steps`.
    """
    return _steps("combine", experts, world)


@functools.cache
def _steps(call: str, experts: int, world: int) -> _core.PlainSteps | None:
    if TORCH is None:
        return None
    orders = _core.ExpertOrders(TORCH, _stream, _orders)
    gemms = _core.ExpertGemms(TORCH, orders, GROUPED_MM)
    steps: list[tuple[str, str, tuple[str, ...], Any]]
    if call == "dispatch":
        inputs, x = ["tokens", "w", "splits"], "arrived"
        steps = [
            ("exchange_counts", "received", ("splits",), None),
            ("called", "numbers", ("received", "splits"), _read_and_remember),
            ("exchange_there", x, ("tokens", "numbers", *_TABLES), None if experts == 1 else orders),
        ]
        if experts > 1:
            by_expert = _core.OrderedRows(orders, "by_expert", selected, _by_expert)
            steps.append(("called", "x", (x, *_TABLES), by_expert))
            x = "x"
        steps.append(("called", "y", (x, "w", *_TABLES), gemms))
    else:
        inputs, made = ["h", "w", "received", "splits", "rows"], "made"
        steps = [
            ("called", "numbers", ("received", "splits"), _core.KnownNumbers(KNOWN, _read)),
            ("called", made, ("h", "w", *_TABLES), gemms),
        ]
        if experts > 1:
            by_arrival = _core.OrderedRows(orders, "by_arrival", selected, _by_arrival)
            steps.append(("called", "ordered", (made, *_TABLES), by_arrival))
            made = "ordered"
        steps.append(("exchange_back", "y", (made, "numbers", "rows"), None))
    return _core.PlainSteps(TORCH, [*inputs, *(step[1] for step in steps)], steps, world)


def _read(received: torch.Tensor, splits: torch.Tensor) -> Numbers:
    sizes = sizes_of(splits, received)
    assert sizes.host is not None  # read here, for the steps that follow
    return sizes.numbers


def _read_and_remember(received: torch.Tensor, splits: torch.Tensor) -> Numbers:
    sizes = Sizes(splits, received)
    assert sizes.host is not None
    remember(sizes)
    return sizes.numbers


def _orders(received: torch.Tensor, splits: torch.Tensor, numbers: Numbers) -> Orders:
    return orders_of(Sizes(splits, received, numbers))


def _by_expert(rows: torch.Tensor, received: torch.Tensor, splits: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    return in_expert_order(rows, Sizes(splits, received, numbers))


def _by_arrival(rows: torch.Tensor, received: torch.Tensor, splits: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    return in_order_of_arrival(rows, Sizes(splits, received, numbers))
