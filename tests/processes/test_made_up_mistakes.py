"""Mistakes in a user's own operator: errors give the mistake and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist

from weft.builders import Problem, builder
from weft.errors import WeftError
from weft.launch import Pool
from weft.operator.calls import made
from weft.operator.registration import registered
from weft.operator.spec import Operator
from weft.schedule import Draft, Schedule
from weft.symm.groups import group_of, rank_of, size_of


@dataclass(frozen=True, slots=True)
class MadeUp(Problem):
    name: ClassVar[str] = "made_up_mistake"
    m: int


@builder(MadeUp)
def serial(p: MadeUp) -> Schedule:
    d = Draft("serial", p.world_size)
    x, y = d.buffer("x", p.m, 2, "fp32", "input"), d.buffer("y", p.m, 2, "fp32", "output")
    d.lane("compute").compute("relu", y.part(), x.part())
    return d.schedule()


class Call(NamedTuple):
    x: torch.Tensor
    mistake: str


class Scaled(NamedTuple):
    x: torch.Tensor
    scale: bytes | None


class Spec(Operator[Call]):
    name, form = "made_up_mistake", Call
    gradients_of: ClassVar[Mapping[str, str]] = {"x": "x"}

    def problem(self, call: Call, world: int, most: int) -> Any:
        @dataclass(frozen=True, slots=True)
        class Other(Problem):
            m: int

        if call.mistake == "name":
            Other.name = "made_up_otherwise"
            return Other(world, call.x.shape[0])
        return None if call.mistake == "problem" else MadeUp(world, call.x.shape[0])

    def inputs(self, p: Any, call: Call) -> dict[str, Any]:
        x = call.x[:1] if call.mistake == "shape" else call.x
        return {} if call.mistake == "inputs" else {"x": x, "z": x} if call.mistake == "too many" else {"x": x}

    def outputs(self, call: Call, world: int) -> dict[str, Any]:
        return {"z" if call.mistake == "outputs" else "y": torch.empty_like(call.x)}

    def gradients(self, p: Any, group: Any, saved: Any, grads: Any, wanted: Any, *_: Any) -> list[torch.Tensor | None]:
        return []


OPERATOR = registered(Spec())
SAID = {
    "problem": "problem\\(\\) of made_up_mistake returns a NoneType: return a Problem",
    "name": "made_up_mistake.problem\\(\\) returns a Problem with the name 'made_up_otherwise': give Other the",
    "inputs": "inputs.. of the operator made_up_mistake returns nothing, but the input buffers of its schedules are x: return",
    "too many": "inputs.. of the operator made_up_mistake returns x, z, but the input buffers of its schedules are x",
    "outputs": "outputs.. of the operator made_up_mistake returns z, but the output buffers of its schedules are y",
    "shape": r"inputs\(\) of made_up_mistake returns x of shape \[1, 2\]: return \[3, 2\], the shape of the buffer in MadeUp",
    "gradients": "made_up_mistake.gradients returns 0 gradients, but a call has 1 tensors: return a gradient for each tensor, or",
}


def run(group: dist.ProcessGroup, mistake: str) -> None:
    x = torch.ones(3, 2, requires_grad=mistake == "gradients")
    with pytest.raises((TypeError, WeftError), match=SAID[mistake]):
        made(OPERATOR, group, x, lambda _: Call(x, mistake))[0].sum().backward()


@pytest.mark.parametrize("mistake", SAID)
def test_a_mistake_in_a_spec_is_named(mistake: str, pool: Pool) -> None:
    pool.run(run, mistake, ranks=1)


def test_a_mistake_in_a_form_is_named() -> None:
    class Misspelt(Spec):
        gradients_of: ClassVar[Mapping[str, str]] = {"y": "y"}

    class Unknown(Spec):
        form = Scaled

    with pytest.raises(
        TypeError, match=r"made_up_mistake: gradients_of has y: use only fields of 'form' \(x, mistake\)"
    ):
        Misspelt()
    with pytest.raises(TypeError, match=r"made_up_mistake: form.scale has type bytes \| None: use one of Tensor, "):
        Unknown()


def asked(group: dist.ProcessGroup, by_name: bool) -> None:
    of: Any = group.group_name if by_name else group
    x = torch.zeros(3)
    wanted = torch.full((3,), 10.0 * group.rank() + group.size())
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(lambda x: x + 10 * rank_of(of) + size_of(of), fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(x), wanted)
    assert (rank_of(of), size_of(of)) == (group.rank(), group.size())


@pytest.mark.parametrize("by_name", [False, True])
def test_a_group_tells_rank_and_size_where_a_call_is_traced(by_name: bool, pool: Pool) -> None:
    pool.run(asked, by_name, ranks=2)


def looked_up(group: dist.ProcessGroup) -> None:
    name = group.group_name
    with pytest.raises(Exception, match=r"call weft.symm.groups.size_of\(group\) or rank_of\(group\)"):
        torch.compile(lambda x: x + group_of(name).size(), fullgraph=True, backend="eager")(torch.zeros(3))


def test_a_group_that_a_traced_call_looks_up_says_what_to_ask(pool: Pool) -> None:
    pool.run(looked_up, ranks=1)
