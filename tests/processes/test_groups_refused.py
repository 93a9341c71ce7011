"""Process groups that every operator refuses: destroyed groups, None where no default exists, and unknown names."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from operators_called import OPERATORS, leaves
from support.on_ranks import told

import weft
from weft.launch import Pool


def on_a_destroyed_group(group: dist.ProcessGroup, operator: str) -> list[str]:
    """Destroy the group. Return the errors of a call whose shape is known, and of the backward of an earlier call."""
    own = dist.new_group(list(range(group.size())))
    call = OPERATORS[operator](own)
    given = [place.given(call.arguments) for place in call.tensors.values()]
    wanting = [t.requires_grad_() for t in given if t.dtype == torch.float32]
    try:
        results = leaves(call())
    except ValueError:  # without gradients
        for t in wanting:
            t.requires_grad_(False)
        results = leaves(call())
    name = own.group_name
    dist.destroy_process_group(own)
    backward = [results[-1].nan_to_num().sum().backward] if results[-1].requires_grad else []
    return [told(one).replace(repr(name), "NAME") for one in (call, *backward)]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_destroyed_group_is_refused(pool: Pool, operator: str) -> None:
    for found in pool.run(on_a_destroyed_group, operator, ranks=2, timeout_s=60):
        assert set(found) == {"ValueError: the process group NAME was destroyed: make a new one"}


def without_group(group: dist.ProcessGroup, operator: str) -> tuple[bool, str]:
    """Return True if the signature has a default for `group`, and the error for None."""
    call = OPERATORS[operator](group)
    default = inspect.signature(call.call).parameters["group"].default
    return default is None, told(lambda: call(group=None))


@pytest.mark.parametrize("operator", [name for name in OPERATORS if "matmul" in name])
def test_no_group_is_the_world_where_the_signature_says_so(pool: Pool, operator: str) -> None:
    for is_default, text in pool.run(without_group, operator, ranks=2, timeout_s=60):
        assert text == "nothing" if is_default else text.startswith("ValueError: group=None: pass dist.group.WORLD"), (
            operator
        )


def test_a_name_of_no_group_is_told_where_it_is_given(pool: Pool) -> None:
    (text,) = pool.run(no_group, ranks=1, timeout_s=60)
    assert text.startswith(
        "ValueError: group='none' is not the name of a process group of this rank, or the group was destroyed: pass the"
    )


def no_group(group: dist.ProcessGroup) -> str:
    return told(lambda: weft.all_gather_matmul(torch.ones(4, 8), [torch.ones(8, 3)], 0, "none"))


def test_a_pool_with_nccl_needs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="backend='nccl' needs GPUs, but torch sees none: pass backend='gloo'"):
        Pool(2, backend="nccl")
