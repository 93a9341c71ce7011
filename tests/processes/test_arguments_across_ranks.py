"""Ranks that pass different arguments to an operator: every rank gets an error, and no rank gets a result.

The tests try every parameter that an operator's spec declares to be compared (`Operator.across_ranks`), and fail if a
parameter has no test. Each different call would be valid if all ranks made it.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from operators_called import OPERATORS, TABLES, Arguments, Change, leaves, mapped, set_to
from support import across_ranks
from support.on_ranks import assert_error, assert_errors, error_of
from support.slow import in_turn

import weft
from weft.launch import Pool


def several(*changes: Change) -> Change:
    def apply(arguments: Arguments) -> None:
        for change in changes:
            change(arguments)

    return apply


def blocks(*shape: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a change that gives the rows of a matrix several dimensions."""
    return lambda x: x.reshape(*shape, x.shape[-1])


def twice_the_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x))


def half(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16()


def more_columns(w: torch.Tensor) -> torch.Tensor:
    return torch.cat((w, w), dim=-1)


def as_3d(name: str, *others: str) -> Change:
    return several(*(mapped(one, blocks(2, 2)) for one in (name, *others)))


OF_GATHER: dict[str, list[Change]] = {
    "A_shard": [mapped("A_shard", twice_the_rows), as_3d("A_shard"), several(mapped("A_shard", half), mapped("Bs", half))],
    "Bs": [mapped("Bs", more_columns), lambda a: a.update(Bs=a["Bs"][:1])],
    "gather_dim": [several(as_3d("A_shard"), set_to(gather_dim=1))],
    "return_A": [set_to(return_A=False)],
    "schedule": [set_to(schedule="shard[chunks=1,send=in_turn,by=dma]")],
    "rows": [set_to(rows=[6, 4]), set_to(rows=[5, 4])],
}  # fmt: skip
RENAMED = [dataclasses.replace(table, name=f"other {table.name}") for table in TABLES]
DIFFERENT: dict[str, dict[str, list[Change]]] = {
    "all_gather_matmul": OF_GATHER,
    "all_gather_scaled_matmul": {
        "A_shard": [as_3d("A_shard", "A_scale")],
        "Bs": [
            several(
                mapped("Bs", lambda w: torch.cat((w.t(), w.t())).t()), set_to(B_scales=[torch.ones(1, 32)], biases=None)
            )
        ],
        "A_scale": [set_to(A_scale=torch.ones(()), B_scales=[torch.ones(())])],
        "B_scales": [set_to(A_scale=torch.ones(()), B_scales=[torch.ones(())])],
        "gather_dim": [several(as_3d("A_shard", "A_scale"), set_to(gather_dim=1))],
        "biases": [set_to(biases=None)],
        "out_dtypes": [set_to(out_dtypes=[torch.float16], biases=[torch.ones(16, dtype=torch.float16)])],
        "use_fast_accum": [set_to(use_fast_accum=[True])],
        "return_A": [set_to(return_A=False)],
        "schedule": [set_to(schedule="shard[chunks=1,send=in_turn,by=dma]")],
        "rows": [set_to(rows=[6, 4])],
    },
    "matmul_reduce_scatter": {
        "A": [mapped("A", twice_the_rows), as_3d("A"), several(mapped("A", half), mapped("B", half))],
        "B": [mapped("B", more_columns)],
        "reduce_op": [set_to(reduce_op="avg")],
        "scatter_dim": [
            several(as_3d("A"), set_to(scatter_dim=1)),
            several(mapped("B", more_columns), set_to(scatter_dim=-1)),
        ],
        "schedule": [set_to(schedule="scatter")],
    },
    "scaled_matmul_reduce_scatter": {
        "A": [as_3d("A", "A_scale")],
        "B": [
            several(mapped("B", lambda w: torch.cat((w.t(), w.t())).t()), set_to(B_scale=torch.ones(1, 32), bias=None))
        ],
        "A_scale": [set_to(A_scale=torch.ones(()), B_scale=torch.ones(()))],
        "B_scale": [set_to(A_scale=torch.ones(()), B_scale=torch.ones(()))],
        "reduce_op": [set_to(reduce_op="avg")],
        "orig_scatter_dim": [
            several(as_3d("A", "A_scale"), set_to(orig_scatter_dim=1, scatter_dim_after_maybe_reshape=1))
        ],
        "output_shape": [set_to(output_shape=[2, 2, 16])],
        "bias": [set_to(bias=None)],
        "out_dtype": [set_to(out_dtype=torch.float16, bias=torch.ones(16, dtype=torch.float16))],
        "use_fast_accum": [set_to(use_fast_accum=True)],
        "schedule": [set_to(schedule="scatter")],
    },
    "matmul_all_gather": {
        "x": [mapped("x", twice_the_rows), as_3d("x"), several(mapped("x", half), mapped("w", half))],
        "w": [mapped("w", more_columns)],
        "gather_dim": [set_to(gather_dim=1), several(as_3d("x"), set_to(gather_dim=1))],
        "schedule": [set_to(schedule="direct[chunks=2,by=dma]")],
    },
    "matmul_all_reduce": {
        "x": [as_3d("x", "residual"), set_to(x=torch.ones(8, 8), residual=torch.ones(8, 3))],
        "w": [set_to(w=torch.ones(8, 4), bias=torch.ones(4), residual=torch.ones(4, 4), norm=torch.ones(4))],
        "reduce_op": [set_to(reduce_op="avg", bias=None, residual=None, norm=None)],
        "norm": [set_to(norm=None)],
        "eps": [set_to(eps=1e-3)],
        "schedule": [set_to(schedule="one_shot[by=kernel]")],
    },
    "all_to_all_matmul": {
        "w_experts": [mapped("w_experts", more_columns)],
        "max_rows": [set_to(max_rows=8)],
        "capacity": [set_to(capacity=100)],
        "schedule": [set_to(schedule="dispatch[by=dma,rest=each]")],
    },
    "matmul_all_to_all": {
        "w_experts": [mapped("w_experts", more_columns)],
        "rows": [set_to(rows=4)],
        "capacity": [set_to(capacity=100)],
        "schedule": [set_to(schedule="combine[chunks=1,by=dma]")],
    },
    "embedding_all_to_all": {
        "sharding": [set_to(sharding=weft.place_tables(RENAMED, 2, placement=[0, 1]))],
        "batch_sizes": [set_to(batch_sizes=[2, 0])],
        "transport": [set_to(transport="put"), set_to(transport="serial")],
        "order": [set_to(order="natural")],
        "slice_size": [set_to(slice_size=3)],
        "bounds_check": [set_to(bounds_check="fatal")],
        "hash": [set_to(hash=True)],
        "outputs": [set_to(outputs=3)],
        "output_dtype": [set_to(output_dtype="bf16")],
    },
}
AVERAGES: dict[str, Change] = {"matmul_all_reduce": set_to(bias=None, residual=None, norm=None)}
"""Arguments, by operator, that both ranks change before one of them asks for an average."""
GRADIENTS = {
    "all_gather_matmul": "A_shard", "matmul_reduce_scatter": "A", "matmul_all_gather": "x", "matmul_all_reduce": "x",
    "all_to_all_matmul": "tokens", "matmul_all_to_all": "h", "embedding_all_to_all": "weights",
}  # fmt: skip
EQUAL = {("matmul_all_reduce", "bias"), ("matmul_all_reduce", "residual")}


@pytest.mark.parametrize("operator", DIFFERENT)
def test_the_walk_leaves_out_no_parameter(operator: str) -> None:
    assert across_ranks.compared_by(operator) == DIFFERENT[operator].keys()
    assert {name for name, across in across_ranks.declared_by(operator).items() if across == "equal"} == {
        name for one, name in EQUAL if one == operator
    }


def differences(operator: str) -> Iterator[tuple[str, Change, Change]]:
    """Return (name, arguments that both ranks change, arguments that only rank 1 changes) for each difference."""
    for name, changes in DIFFERENT[operator].items():
        both = AVERAGES.get(operator, set_to()) if name == "reduce_op" else set_to()
        for i, change in enumerate(changes):
            yield f"{name}, {i}", both, change


def walked(group: dist.ProcessGroup, operator: str, schedule: str | None, known: bool) -> list[tuple[str, str, str]]:
    """Return (the difference, the type and the text of the error) for each difference. known: True if all ranks have
    made both calls before.
    """
    found = []
    for name, both, change in differences(operator):
        own = dist.new_group([0, 1])
        call = OPERATORS[operator](own)
        options = {} if schedule is None or name.startswith("schedule") else {"schedule": schedule}
        for known_change in (both, several(both, change)) if known else ():
            if not name.startswith("rows"):  # each rank may have its own values
                call(known_change, **options)
        mine = several(both, change) if group.rank() == 1 else both
        kind, text = error_of(lambda call=call, mine=mine, options=options: call(mine, **options, deadline_s=5.0))
        found.append((name, kind, text))
        dist.destroy_process_group(own)
    return found


CALLED = [
    ("all_gather_matmul", "serial"),
    ("all_gather_matmul", "gather[by=kernel]"),
    ("all_gather_scaled_matmul", "serial"),
    ("matmul_all_gather", "serial"),
    ("matmul_all_gather", "direct[chunks=1,by=dma]"),
    ("matmul_all_reduce", "serial"),
    ("matmul_all_reduce", "two_shot[chunks=1,by=dma,add=gemm]"),
    ("matmul_reduce_scatter", "serial"),
    ("matmul_reduce_scatter", "direct[chunks=1,by=dma,add=gemm]"),
    ("scaled_matmul_reduce_scatter", "serial"),
    ("all_to_all_matmul", "serial"),
    ("matmul_all_to_all", "serial"),
    ("embedding_all_to_all", None),
]


@pytest.mark.parametrize(("called", "known"), in_turn(CALLED, [False, True]), ids=str)
def test_ranks_that_differ_get_an_error(pool: Pool, called: tuple[str, str | None], known: bool) -> None:
    operator, schedule = called
    for rank, found in enumerate(pool.run(walked, operator, schedule, known, ranks=2, timeout_s=120)):
        for name, kind, text in found:
            assert kind in ("DisagreementError", "RefusedError"), f"{name}, rank {rank}: {kind or 'a result'} {text}"
            if name.startswith("return_A"):
                assert "return_A=False" in text, "a caller knows the argument, and no field of a problem"
            assert "(world_size=" not in text, f"{name}: the repr of a problem\n{text}"
            for option in ("out_dtype", "use_fast_accum", "bias"):
                assert option in text or not name.startswith(option), f"{name}: {text}"


def hints_at_rows(group: dist.ProcessGroup) -> list[bool]:
    """Return True for each error that advises to pass rows=. In one call rank 1 has other sizes, in the other it has
    another dtype.
    """
    found = []
    for rows, dtype in ((3, torch.float32), (2, torch.float16)):
        own = dist.new_group([0, 1])
        x = torch.ones(rows, 4, dtype=dtype) if group.rank() else torch.ones(2, 4)
        w = torch.ones(4, 4, dtype=x.dtype)
        kind, text = error_of(lambda x=x, w=w, own=own: weft.all_gather_matmul(x, [w], 0, own))
        assert kind == "DisagreementError"
        found.append("pass rows= with the sizes on all ranks" in text)
        dist.destroy_process_group(own)
    return found


def test_the_advice_for_uneven_shards_is_given_where_sizes_differ(pool: Pool) -> None:
    assert pool.run(hints_at_rows, ranks=2) == [[True, False]] * 2


# --- backward ---


def wants_other_gradients(group: dist.ProcessGroup, operator: str) -> tuple[str, str]:
    own = dist.new_group([0, 1])
    call = OPERATORS[operator](own)
    required = mapped(GRADIENTS[operator], lambda x: x.clone().requires_grad_())
    found = error_of(lambda: call(required if group.rank() else set_to(), deadline_s=5.0))
    dist.destroy_process_group(own)
    return found


@pytest.mark.parametrize("operator", GRADIENTS)
def test_ranks_that_want_other_gradients_get_an_error(pool: Pool, operator: str) -> None:
    """The error occurs at the first call of a shape. For later calls see the next test."""
    for kind, text in pool.run(wants_other_gradients, operator, ranks=2):
        assert kind == "DisagreementError", text


def goes_back_alone(group: dist.ProcessGroup, operator: str) -> tuple[str, str]:
    own = dist.new_group([0, 1])
    call = OPERATORS[operator](own)
    required = mapped(GRADIENTS[operator], lambda x: x.clone().requires_grad_())
    for _ in range(2):
        leaves(call(required))[0].sum().backward()
    results = leaves(call(required))
    again = (lambda: results[0].sum().backward()) if group.rank() else (lambda: call(required, deadline_s=5.0))
    found = error_of(again)
    dist.destroy_process_group(own)
    return found


@pytest.mark.parametrize("operator", GRADIENTS)
def test_a_backward_of_one_rank_alone_gets_an_error(pool: Pool, operator: str) -> None:
    """The other rank makes its next call instead."""
    for kind, text in pool.run(goes_back_alone, operator, ranks=2):
        assert kind in ("DisagreementError", "PoisonedGroupError"), text


# --- values, in the mode that compares them ---


def has_other_values(group: dist.ProcessGroup, operator: str, name: str) -> tuple[tuple[str, str], bool]:
    own = dist.new_group([0, 1])
    call = OPERATORS[operator](own)
    os.environ["WEFT_CHECK_CALLS"] = "1"
    try:
        wanted = leaves(call())
        found = error_of(lambda: call(mapped(name, lambda t: t + group.rank())))
        after = leaves(call())
    finally:
        del os.environ["WEFT_CHECK_CALLS"]
    dist.destroy_process_group(own)
    return found, all(torch.equal(one, other) for one, other in zip(after, wanted, strict=True))


@pytest.mark.parametrize(("operator", "name"), sorted(EQUAL))
def test_values_that_must_be_equal_are_compared_on_demand(pool: Pool, operator: str, name: str) -> None:
    for error, after in pool.run(has_other_values, operator, name, ranks=2):
        assert_error(error, "RefusedError", f"{name} must have the same values on all ranks")
        assert after


# --- tables of counts ---


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("by", [1, -2, 0])
@pytest.mark.parametrize("schedule", ["serial", "combine[chunks=1,by=dma]", "combine[chunks=1,by=store]"])
def test_tables_that_do_not_fit_a_peers_are_refused(pool: Pool, schedule: str, by: int, known: bool) -> None:
    for error, after in pool.run(across_ranks.rows_that_nobody_expects, "cpu", schedule, by, known, ranks=2):
        assert_error(error, "RefusedError", across_ranks.said_of_tables(by))
        assert after, "the group must go on"


# --- threads ---


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_two_threads_in_calls_of_one_group_are_refused(pool: Pool, known: bool) -> None:
    for found in pool.run(across_ranks.called_by_two_threads, "cpu", known, ranks=2):
        assert_errors(found, "PoisonedGroupError", "during a call of another thread on the same group")


def called_in_turn(group: dist.ProcessGroup) -> list[torch.Tensor]:
    own, results = dist.new_group([0, 1]), []
    x, w = torch.full((4, 8), 1.0 + group.rank()), torch.ones(8, 6)
    for _ in range(3):
        thread = threading.Thread(target=lambda: results.append(weft.matmul_all_reduce(x, w, own)))
        thread.start()
        thread.join()
    dist.destroy_process_group(own)
    return results


def test_threads_may_call_one_after_the_other(pool: Pool) -> None:
    for results in pool.run(called_in_turn, ranks=2):
        assert [float(y.unique()) for y in results] == [24.0] * 3
