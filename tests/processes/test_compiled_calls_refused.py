"""Refusals of compiled calls: tensors without values, and arguments that one rank refuses in a trace or in a run.

`test_arguments_refused.py` has the refusals of eager calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operators_called import OPERATORS
from support.on_ranks import resized, told
from support.slow import mostly

import weft
from weft.launch import Pool

# Tensors that a graph reads or views before the operator: that is torch's own error.
READ_BY_TORCH = {("global_batch", "lengths"), ("matmul_all_reduce", "bias"), ("matmul_all_reduce", "norm")}


def compiled(group: dist.ProcessGroup, operator: str) -> dict[tuple[str, str], str]:
    """Return this rank's errors of compiled calls in which a tensor of rank 1 is on meta, or its memory was freed.

    Each tensor is tried. Good calls are made in between.
    """
    call, found = OPERATORS[operator](group), {}
    run = torch.compile(lambda given: call.call(**given), fullgraph=True, backend="aot_eager")
    kinds = {"meta": lambda x: x.to("meta"), "freed": resized}

    def compiled_call(change: Callable[[dict[str, Any]], None] | None = None) -> Any:
        given = {name: list(one) if isinstance(one, list) else one for name, one in call.arguments.items()}
        if change is not None:
            change(given)
        # Without gradients: a module that trains breaks the graph.
        with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, recompile_limit=64):
            return run(given)

    for name, place in call.tensors.items():
        for kind, make in kinds.items():
            if kind == "freed" and (operator, name) in READ_BY_TORCH:
                continue
            change = partial(place.put, value=make(place.given(call.arguments))) if group.rank() == 1 else None
            found[name, kind] = told(partial(compiled_call, change))
        compiled_call()
    return found


@pytest.mark.parametrize("operator", mostly(OPERATORS, "matmul_all_gather", "embedding_all_to_all", "local_batch"))
def test_compiled_calls_refuse_tensors_without_values_on_every_rank(pool: Pool, operator: str) -> None:
    """If one tensor of a call is on meta, torch takes the kernel for traces, which makes results without values."""
    for found in pool.run(compiled, operator, ranks=2, timeout_s=200):
        for (name, kind), text in found.items():
            assert text.startswith("RefusedError: "), (name, kind, text)
            assert "rank 1: " in text, (name, kind, text)
            words = {"meta": "on meta", "freed": "has no memory: its storage holds 0 of "}
            assert words[kind] in text, (name, kind, text)


def compiled_alone(group: dist.ProcessGroup) -> list[str]:
    x, w = torch.ones(4, 8), torch.ones(8, 3)
    run = torch.compile(lambda x, w: weft.matmul_all_reduce(x, w, group), fullgraph=True, backend="aot_eager")
    shape_only = run(x.to("meta"), w.to("meta"))
    assert shape_only.is_meta
    assert shape_only.shape == (4, 3)
    return [told(lambda: run(x, w.to("meta"))), told(lambda: run(x.to("meta"), w))]


def test_one_rank_refuses_a_tensor_on_meta_in_a_compiled_call(pool: Pool) -> None:
    """A call all of whose tensors are on meta returns results on meta, as operators of torch do."""
    (found,) = pool.run(compiled_alone, ranks=1, timeout_s=60)
    assert found[0].startswith("ValueError: w is torch.float32 on meta and x is torch.float32 on cpu: use one dtype")
    assert found[1].startswith(
        "ValueError: matmul_all_reduce does not run on meta: pass tensors on a GPU or on the CPU"
    )


# Bad arguments that `form` refuses, so in a trace, and that the spec refuses, so in a run.
IN_A_TRACE = {"gather_dim": "0"}, "gather_dim='0' is a str: pass the number of a dimension, an int"
IN_A_RUN = {"w": torch.ones(5, 3)}, "w has shape (5, 3): it must be [K=8, N] to match x [..., 8]"


def refused_compiled(
    group: dist.ProcessGroup, bad: list[dict[str, Any]], fullgraph: bool, deadline_s: float
) -> list[str]:
    """Return each rank's error of compiled calls with bad arguments on rank 1, in their own group."""
    own, found = dist.new_group([0, 1]), []
    good = {"x": torch.ones(4, 8), "w": torch.ones(8, 3), "gather_dim": 0, "group": own, "deadline_s": deadline_s}
    weft.matmul_all_gather(**good)
    torch._dynamo.reset()
    for change in bad:
        given = good | (change if group.rank() == 1 else {})
        run = torch.compile(lambda: weft.matmul_all_gather(**given), fullgraph=fullgraph, backend="aot_eager")  # noqa: B023
        found.append(told(run))
    return found


def test_what_one_rank_refuses_in_a_trace_is_not_told_to_peers(pool: Pool) -> None:
    """docs/failures.md says so. torch may trace a call several times, and may run it after a failed trace."""
    (peer,), (own,) = pool.run(refused_compiled, [IN_A_TRACE[0]], True, 2.0, ranks=2, timeout_s=100)
    assert own.startswith("Unsupported: ")
    assert IN_A_TRACE[1] in own
    assert peer.startswith("DeadlineError: rank 0 waited 2 s for "), peer
    assert "matmul_all_gather" in peer


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_one_rank_refuses_in_a_compiled_run_is_told_to_peers(pool: Pool, fullgraph: bool) -> None:
    """Without fullgraph=True, a call whose trace fails runs eagerly."""
    refused = [IN_A_RUN] if fullgraph else [IN_A_TRACE, IN_A_RUN, IN_A_TRACE]
    bad = [*(change for change, _ in refused), {}]
    for *errors, good in pool.run(refused_compiled, bad, fullgraph, 60.0, ranks=2, timeout_s=150):
        for error, (_, text) in zip(errors, refused, strict=True):
            assert error.startswith("RefusedError: rank 1: "), error
            assert text in error
        assert good == "nothing"
