"""Calls that repeat an earlier call with other tensors take the fast path. Calls with another meaning do not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from operators_called import OPERATORS, Arguments, Operator, leaves
from test_equivalent_arguments import SCHEDULES
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft import _core
from weft.errors import RefusedError
from weft.launch import Pool
from weft.operator import calls
from weft.operator import recorded as recorded_calls
from weft.symm import control

_PACKAGE = f"{Path(weft.__file__).parent}/"  # the folder of a checkout may be called weft too

patient = mock.patch.object(control, "_STALE_S", 1e9)
"""Decorate functions that make groups. On a busy machine the watchdog may be late, and then calls take the slow path."""

GEMMS = [name for name in OPERATORS if name in SCHEDULES and name != "embedding_all_to_all"]


@contextlib.contextmanager
def long_ways() -> Iterator[list[str]]:
    """Yield a list of the operators whose calls take the slow path."""
    found, before = [], calls._called

    def called(op: Any, *rest: Any) -> Any:
        found.append(op.name)
        return before(op, *rest)

    calls._called = called
    try:
        yield found
    finally:
        calls._called = before


def anew(operator: Operator) -> Arguments:
    """Return the arguments with new values at new addresses. Counts stay the same."""

    def other(value: Any) -> Any:
        if isinstance(value, list):
            return [other(one) for one in value]
        if not isinstance(value, torch.Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return made.copy_(value if value.dtype == torch.int64 else (torch.rand(value.shape) - 0.5).to(value.dtype))

    return {name: other(value) for name, value in operator.arguments.items()}


@patient
def repeated(group: dist.ProcessGroup, operator: str) -> None:
    for schedule in SCHEDULES[operator]:
        own = dist.new_group([0, 1])
        call = OPERATORS[operator](own)
        if operator == "matmul_all_to_all":  # otherwise the number of rows would be read from a tensor
            call.arguments["rows"], schedule = 4, str(schedule).replace("dma", "kernel")
        call.arguments["schedule"] = schedule
        call()
        for _ in range(4):
            given = anew(call)
            with long_ways() as ways:
                found = leaves(call.call(**given))
            assert not ways, (schedule, ways)
            wanted = leaves(call.call(**given, timeline=weft.Timeline()))  # the slow path
            assert len(found) == len(wanted) > 0
            for one, other in zip(found, wanted, strict=True):
                assert one.shape == other.shape
                assert torch.equal(one, other), schedule
        dist.destroy_process_group(own)
        with pytest.raises(ValueError, match="group"):
            call()


@pytest.mark.parametrize("operator", GEMMS)
def test_a_call_that_repeats_another_takes_the_short_way(pool: Pool, operator: str) -> None:
    pool.run(repeated, operator, ranks=2, timeout_s=120)


def gather(group: Any, x: torch.Tensor, w: list[torch.Tensor], dim: int = 0, **options: Any) -> list[torch.Tensor]:
    return leaves(weft.all_gather_matmul(x, w, dim, group, **options))


@patient
def forms(group: dist.ProcessGroup) -> None:
    """Call with several shapes, and with arguments by name or by position. Return the calls that take the fast path the
    second time. All results must be right.
    """
    own = dist.new_group([0, 1])
    generator = torch.Generator().manual_seed(group.rank())

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def product(*_: Any) -> list[torch.Tensor]:
        return leaves(weft.matmul_reduce_scatter(drawn(2, 3, 8), drawn(8, 5), "sum", 0, own))

    cases: dict[str, tuple[Callable[[], Any], bool]] = {
        "rows": (lambda: gather(own, drawn(3, 8), [drawn(8, 5)]), True),
        "two weights": (lambda: gather(own, drawn(3, 8), [drawn(8, 5), drawn(8, 2)]), True),
        "a tuple": (lambda: gather(own, drawn(3, 8), (drawn(8, 5),)), True),
        "by name": (lambda: gather(own.group_name, drawn(3, 8), [drawn(8, 5)]), True),
        "no shard": (lambda: gather(own, drawn(3, 8), [drawn(8, 5)], return_A=False), True),
        "dimensions": (lambda: gather(own, drawn(2, 3, 8), [drawn(8, 5)]), True),
        "a scatter of dimensions": (product, True),
        "an average of dimensions": (
            lambda: leaves(weft.matmul_reduce_scatter(drawn(2, 3, 8), drawn(8, 5), "avg", 0, own)), True,
        ),
        "another dimension": (lambda: gather(own, drawn(2, 3, 8), [drawn(8, 5)], 1), False),
        "a weight twice": (lambda: gather(own, drawn(3, 8), [drawn(8, 5)] * 2), False),
        "columns": (lambda: gather(own, drawn(3, 8), [drawn(5, 8).t()]), True),
        "rows of ranks": (lambda: gather(own, drawn(2 + group.rank(), 8), [drawn(8, 5)], rows=[2, 3]), True),
        "an average": (
            lambda: leaves(weft.matmul_reduce_scatter(drawn(4, 8), drawn(8, 5), "avg", 0, own)), True,
        ),
        "nothing": (lambda: gather(own, drawn(0, 8), [drawn(8, 5)]), True),
    }  # fmt: skip
    for name, (call, short) in cases.items():
        for turn in range(3):
            state = generator.get_state()
            with long_ways() as ways:
                found = call()
            assert bool(ways) == (turn == 0 or not short), (name, turn)
            generator.set_state(state)
            kept, weft.all_gather_matmul = weft.all_gather_matmul, weft.all_gather_matmul.__wrapped__
            scatter, weft.matmul_reduce_scatter = weft.matmul_reduce_scatter, weft.matmul_reduce_scatter.__wrapped__
            try:
                wanted = call()
            finally:
                weft.all_gather_matmul, weft.matmul_reduce_scatter = kept, scatter
            for one, other in zip(found, wanted, strict=True):
                assert one.stride() == other.stride(), name
                assert torch.equal(one, other), name
    dist.destroy_process_group(own)


def test_calls_of_many_forms_are_right_again(pool: Pool) -> None:
    pool.run(forms, ranks=2, timeout_s=60)


@patient
def others(group: dist.ProcessGroup) -> None:
    """Make calls with equal arguments in different contexts. Only a call in the same context is replayed."""
    own = dist.new_group([0, 1])
    x, w = torch.randn(3, 8), torch.randn(8, 5)
    for _ in range(2):
        gather(own, x, [w])

    def is_long(call: Callable[[], Any]) -> bool:
        with long_ways() as ways:
            call()
        return bool(ways)

    assert not is_long(lambda: gather(own, x, [w]))
    assert is_long(lambda: gather(own, x, [w], timeline=weft.Timeline()))
    with weft.plan.use("serial"):
        assert is_long(lambda: gather(own, x, [w]))
    with torch.autocast("cpu", torch.bfloat16):
        assert is_long(lambda: gather(own, x, [w]))
    parameter = torch.nn.Parameter(w)
    assert is_long(lambda: gather(own, x, [parameter]))
    with torch.no_grad():
        assert not is_long(lambda: gather(own, x, [parameter]))
    with FlopCounterMode(display=False) as counter:
        gather(own, x, [w])
    assert counter.get_total_flops() == 2 * 6 * 8 * 5
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.vmap(lambda one: gather(own, one, [w])[1])(torch.stack([x, x]))
    y = torch.compile(lambda one: weft.all_gather_matmul(one, [w], 0, own)[1][0], backend="eager")(x)
    assert torch.equal(y, gather(own, x, [w])[1])
    counts = [torch.tensor([3, 3]), torch.tensor([3 - group.rank(), 3 - group.rank()])]
    sizes = torch.tensor([3, 2])
    for rows in (counts[0], sizes):
        shard = x[: int(rows[group.rank()])].clone()
        found = gather(own, shard, [w], rows=rows)
        assert len(found[0]) == int(rows.sum())
    dist.destroy_process_group(own)


def test_what_means_another_call_goes_the_long_way(pool: Pool) -> None:
    pool.run(others, ranks=2, timeout_s=120)


@patient
def with_gradients(group: dist.ProcessGroup) -> None:
    """Make calls of several forms twice. Gradients must equal those of the slow path."""
    own, rank = dist.new_group([0, 1]), group.rank()
    generator = torch.Generator().manual_seed(rank)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    cases: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor], bool]] = {}
    for turn in range(3):
        cases = {
            "rows": (lambda f, x, w: f.all_gather_matmul(x, [w], 0, own)[1][0], [drawn(3, 8), drawn(8, 5)], True),
            "dimensions": (lambda f, x, w: f.all_gather_matmul(x, [w], 0, own)[1][0], [drawn(2, 3, 8), drawn(8, 5)], True),
            "columns": (lambda f, x, w: f.all_gather_matmul(x, [w.t()], 0, own)[1][0], [drawn(3, 8), drawn(5, 8)], True),
            "scatter": (lambda f, x, w: f.matmul_reduce_scatter(x, w, "sum", 0, own), [drawn(2, 3, 8), drawn(8, 5)], True),
            "average": (lambda f, x, w: f.matmul_all_reduce(x, w, own, reduce_op="avg"), [drawn(2, 3, 8), drawn(8, 5)], True),
            "along the sequence": (
                lambda f, x, w: f.matmul_reduce_scatter(x, w, "sum", 1, own), [drawn(3, 2, 8), drawn(8, 5)], False,
            ),
        }  # fmt: skip
        for name, (call, tensors, short) in cases.items():
            with long_ways() as ways:
                y = call(weft, *tensors)
            assert bool(ways) == (turn == 0 or not short), (name, turn)
            grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(rank))
            found = torch.autograd.grad(y, tensors, grad)
            wanted = torch.autograd.grad(call(Long(), *tensors), tensors, grad)
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other), name
    dist.destroy_process_group(own)


class Long:
    """A context in which weft has no fast path."""

    def __getattr__(self, name: str) -> Any:
        return getattr(weft, name).__wrapped__


def test_gradients_of_the_short_way(pool: Pool) -> None:
    pool.run(with_gradients, ranks=2, timeout_s=60)


def refused(group: dist.ProcessGroup) -> None:
    """Raise an error on one rank, in a call that peers repeat. All ranks get the error, and the group stays usable."""
    own = dist.new_group([0, 1])
    x, w = torch.randn(3, 8), torch.randn(8, 5)
    for _ in range(2):
        gather(own, x, [w])
    wrong = torch.randn(7, 5) if group.rank() == 1 else w
    with pytest.raises(RefusedError, match="rank 1"):
        gather(own, x, [wrong])
    gather(own, x, [w])
    dist.destroy_process_group(own)


def test_an_error_of_a_peer_is_heard_on_the_short_way(pool: Pool) -> None:
    pool.run(refused, ranks=2, timeout_s=60)


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Let calls that are recorded inside the context repeat as on GPUs, where ranks do not synchronise."""
    init, around = recorded_calls.Recorded.__init__, recorded_calls.SURROUNDINGS

    def recorded(self: Any, *what: Any) -> None:
        init(self, *what)
        # On a busy machine the watchdog may be late, which would send only this rank to a rendezvous.
        self.kind, self.health = "cuda", _core.Health(1e9)

    recorded_calls.Recorded.__init__ = recorded
    recorded_calls.SURROUNDINGS = _core.Surroundings(
        groups=recorded_calls._pg_map, coalescing=recorded_calls.COALESCING, is_any_autocast_enabled=bool, is_autocast_enabled=bool,
        is_capturing=bool, looks_at_frames=bool,
    )  # fmt: skip
    try:
        yield
    finally:
        recorded_calls.Recorded.__init__, recorded_calls.SURROUNDINGS = init, around


def entered(call: Callable[[], Any]) -> tuple[list[str], Any]:
    """Return weft's Python functions that a call enters, and the result of the call."""
    names: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return names, result


def on_gpus(group: dist.ProcessGroup) -> None:
    own, fp8, rank = dist.new_group([0, 1]), torch.float8_e4m3fn, group.rank()
    generator = torch.Generator().manual_seed(rank)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def scaled(scale: torch.Tensor, *of_w: int, **more: Any) -> list[torch.Tensor]:
        x, w, w_scale = drawn(4, 16, dtype=fp8), drawn(32, 16, dtype=fp8).t(), torch.full(of_w, 2.0)
        return leaves(weft.all_gather_scaled_matmul(x, [w], scale, [w_scale], 0, own, schedule="serial", **more))

    cases: dict[str, Callable[[], list[torch.Tensor]]] = {
        "gathered": lambda: gather(own, drawn(3, 8), [drawn(8, 5), drawn(5, 8).t()], schedule="serial"),
        "gathered, of more dimensions": lambda: gather(own, drawn(3, 2, 8), (drawn(8, 5),), return_A=False, schedule="serial"),
        "all reduced": lambda: leaves(weft.matmul_all_reduce(drawn(4, 8), drawn(8, 5), own, schedule="serial")),
        "averaged": lambda: leaves(weft.matmul_all_reduce(drawn(2, 2, 8), drawn(8, 5), own, reduce_op="avg", schedule="serial")),
        "product gathered": lambda: leaves(weft.matmul_all_gather(drawn(4, 8), drawn(8, 5), 0, own, schedule="serial")),
        "columns": lambda: leaves(weft.matmul_all_gather(drawn(4, 8), drawn(8, 5), -1, own, schedule="serial")),
        "one scale": lambda: scaled(torch.tensor(0.5)),
        "scales of rows": lambda: scaled(torch.full((4, 1), 0.5), 1, 32),
        "biased": lambda: scaled(torch.tensor(0.5), biases=[drawn(32, dtype=torch.bfloat16)]),
    }  # fmt: skip
    with as_on_gpus():
        for name, call in cases.items():
            for turn in range(4):
                state = generator.get_state()
                names, found = entered(call) if turn > 1 else ([], call())
                inside = set(names) - {"call", "side_by_side", "scaled_matmul"}  # replaces torch's function for GPUs
                assert not inside, (name, inside)
                generator.set_state(state)
                with as_slow():
                    wanted = call()
                for one, other in zip(found, wanted, strict=True):
                    assert one.shape == other.shape
                    assert torch.equal(one.float(), other.float()), name
        dist.destroy_process_group(own)
        with pytest.raises(ValueError, match="group"):
            cases["gathered"]()


@contextlib.contextmanager
def as_slow() -> Iterator[None]:
    """Return the operators without the fast path."""
    names = ("all_gather_matmul", "matmul_all_reduce", "matmul_all_gather", "all_gather_scaled_matmul")
    kept = {name: getattr(weft, name) for name in names}
    for name, one in kept.items():
        setattr(weft, name, one.__wrapped__)
    try:
        yield
    finally:
        for name, one in kept.items():
            setattr(weft, name, one)


def test_unfused_calls_on_gpus_enter_no_function_of_weft(pool: Pool) -> None:
    pool.run(on_gpus, ranks=2, timeout_s=60)


@patient
def any_tokens(group: dist.ProcessGroup, wanted: bool) -> None:
    """Make dispatches and combines of different numbers of tokens. Each call takes the fast path, except the first."""
    own, rank = dist.new_group([0, 1]), group.rank()
    w, back = (torch.randn(2, *shape, requires_grad=wanted) for shape in ((4, 3), (3, 4)))

    def layer(count: int, wrong: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        splits = torch.tensor([1, count, 0, 2 + rank])
        x = torch.randn(int(splits.sum()), 4)
        y, received = weft.all_to_all_matmul(
            x, w, splits + torch.tensor([wrong, 0, 0, 0]), group=own, capacity=64, return_received=True
        )
        found = weft.matmul_all_to_all(y, back, received, splits, group=own, capacity=64)
        every = [torch.empty_like(w) for _ in range(2)], [torch.empty_like(back) for _ in range(2)]
        for made, of_rank in zip(every, (w, back), strict=True):
            dist.all_gather(made, of_rank.detach(), group=own)
        first, second = (torch.cat(made).double() for made in every)
        parts = [t.double() @ first[e] @ second[e] for e, t in enumerate(x.split(splits.tolist()))]
        return found, torch.cat(parts)

    for number, count in enumerate((5, 7, 2, 5, 1, 11)):
        with long_ways() as ways:
            found, right = layer(count)
        if wanted:
            found.sum().backward()
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)
        assert len(ways) == (2 if number == 0 else 0), (count, ways)
    with long_ways() as ways, pytest.raises(RefusedError, match="rank 1: splits add up to 14 but tokens has 13 rows"):
        layer(9, wrong=rank)
    assert not ways
    found, right = layer(9)
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)
    dist.destroy_process_group(own)


@pytest.mark.parametrize("wanted", [False, True], ids=["forward", "gradients"])
def test_experts_of_any_number_of_tokens_take_the_fast_path(pool: Pool, wanted: bool) -> None:
    pool.run(any_tokens, wanted, ranks=2, timeout_s=60)
