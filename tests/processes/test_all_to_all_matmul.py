"""weft.all_to_all_matmul on CPU processes: results, gradients, torch.compile, layouts, bad input, a rank that does not come."""

from __future__ import annotations

import pytest
import torch
from support import expert_ranks as ranks

from weft.builders import AllToAllMatmul, NotApplicableError, candidates
from weft.launch import Pool

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EACH = "dispatch[by=kernel,rest=each]"
# experts of a rank, dtype, traffic, whether y has exactly the rows that come, schedule, weights transposed. Without a schedule
# all candidates are compiled and timed before one is taken, which costs seconds. One rank has no candidates but serial.
FORWARD = {
    "chosen": (3, F32, "uneven", True, None, False),
    "room to spare": (2, F32, "uneven", False, "dispatch_by_expert[by=kernel,chunks=2]", False),
    "bf16": (2, BF16, "uneven", True, EACH, True),
    "fp16, room to spare": (2, F16, "uneven", False, EACH, False),
    "all to one": (2, F32, "all to one", True, EACH, False),
    "one has nothing": (1, F32, "one has nothing", True, EACH, False),
    "nothing at all": (2, F32, "nothing", True, EACH, False),
    "ficco": (4, BF16, "uneven", True, "ficco_1d[start=hetero,gemms=unfused,steps=0,by=dma]", False),
    "ficco by columns": (2, F32, "uneven", True, "ficco_2d[start=hetero,gemms=fused,steps=2,by=dma]", False),
    "the heuristic's, room to spare": (4, F32, "all to one", False, "heuristic", False),
    "serial": (3, BF16, "uneven", True, "serial", True),
    "serial, room to spare": (2, F32, "all to one", False, "serial", False),
    "serial, one expert": (1, F32, "uneven", False, "serial", False),
    "serial, nothing at all": (2, F32, "nothing", True, "serial", False),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("world", [1, 2, 4])  # the one that changes last: each change makes a new group
def test_results(pool: Pool, world: int, name: str) -> None:
    experts, dtype, traffic, exact, schedule, transposed = FORWARD[name]
    pinned = schedule if world > 1 or schedule == "serial" else None
    pool.run(ranks.forward, experts, dtype, traffic, exact, pinned, transposed, 8, ranks=world, timeout_s=60)


@pytest.mark.parametrize("schedule", [EACH, "serial", "dispatch[by=kernel,rest=together]"])
def test_eight_ranks(pool: Pool, schedule: str) -> None:
    pool.run(ranks.forward, 2, F32, "uneven", schedule != EACH, schedule, False, 6, ranks=8, timeout_s=60)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "room to spare"])
def test_every_schedule(pool: Pool, exact: bool) -> None:
    names = []
    for candidate in candidates(AllToAllMatmul(3, 2, (60,) * 3, 8, 16, "fp32", most=60, exact=exact)):
        try:
            candidate.build()
        except NotApplicableError:
            continue
        names.append(candidate.name)
        pool.run(ranks.forward, 2, F32, "uneven", exact, candidate.name, False, 5, ranks=3, timeout_s=60)
    assert {"serial", "dispatch[by=kernel,rest=each]"} < set(names)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "room to spare"])
def test_the_heuristic_takes_columns_where_tokens_are_few_and_long(pool: Pool, exact: bool) -> None:
    by = "dma" if exact else "kernel"
    found = pool.run(ranks.by_columns, exact, ranks=3, timeout_s=60)
    assert set(found) == {f"ficco_2d[start=uniform,gemms=fused,steps=0,by={by}]"}


def test_many_calls_in_a_row(pool: Pool) -> None:
    pool.run(ranks.forward, 2, F32, "uneven", True, EACH, False, 60, ranks=3, timeout_s=60)


@pytest.mark.parametrize("schedule", [None, "serial"], ids=["chosen", "serial"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "room to spare"])
@pytest.mark.parametrize("world", [1, 3])
def test_gradients(pool: Pool, world: int, exact: bool, schedule: str | None) -> None:
    pool.run(ranks.backward, 1 if world == 3 and exact else 2, exact, schedule, False, ranks=world, timeout_s=60)


@pytest.mark.parametrize("world", [1, 3])
def test_the_librarys_way_as_on_gpus(pool: Pool, world: int) -> None:
    pool.run(ranks.torchs_grouped_gemm, ranks=world, timeout_s=60)


@pytest.mark.parametrize("world", [1, 3])
def test_rows_left_out_have_no_gradients(pool: Pool, world: int) -> None:
    pool.run(ranks.left_out, ranks=world, timeout_s=60)


def test_of_two_gradients_one(pool: Pool) -> None:
    pool.run(ranks.one_gradient, ranks=2, timeout_s=60)


@pytest.mark.parametrize("max_rows", [False, True], ids=["exact", "room to spare"])
@pytest.mark.parametrize("world", [1, 3])
def test_the_gradient_of_tokens_alone_is_a_combine(pool: Pool, world: int, max_rows: bool) -> None:
    with Pool(world) as alone:
        assert set(alone.run(ranks.tokens_gradient_alone, max_rows, timeout_s=60)) == {int(world > 1)}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "room to spare"])
def test_compiled_gradients(pool: Pool, exact: bool) -> None:
    pool.run(ranks.backward, 2, exact, None, True, ranks=2, timeout_s=120)


def test_compiled(pool: Pool) -> None:
    pool.run(ranks.compiled_forward, ranks=2, timeout_s=120)


@pytest.mark.slow
def test_compiled_in_pieces_warns_of_nothing(pool: Pool) -> None:
    assert pool.run(ranks.compiled_in_pieces, ranks=2, timeout_s=120) == [[], []]


def test_opcheck(pool: Pool) -> None:
    pool.run(ranks.checked_as_op, ranks=1, timeout_s=120)


def test_bad_arguments_name_the_values_and_the_fix(pool: Pool) -> None:
    expected = {
        "one dimension": "tokens has shape (8,): pass [T, K]",
        "three dimensions": "tokens has shape (1, 4, 8): pass [T, K]",
        "no tensor": "tokens is a list: pass a torch.Tensor",
        "strange dtype": "tokens is torch.complex64: use one of",
        "other K": "w_experts has shape (2, 5, 3): it must be [E, K=8, N]",
        "one expert, no dimension": "w_experts has shape (8, 3): it must be [E, K=8, N]",
        "list of experts": "w_experts is a list: pass a torch.Tensor",
        "other dtype": "w_experts is torch.float16 and tokens torch.float32",
        "splits of floats": "splits is torch.float32: use torch.int64",
        "splits of a rank": "splits has shape (2,): it must be [4], a number for each of 2 experts of 2 ranks",
        "splits elsewhere": "splits is on meta and tokens on cpu",
        "max_rows": "max_rows=-1 must be a whole number from 0 to 2**40",
        "max_rows of 64 bits": f"max_rows={1 << 63} must be a whole number from 0 to 2**40",
        "capacity of 64 bits": f"capacity={1 << 63} must be a whole number from 0 to 2**40",
        "capacity of many bits": "capacity=a number of 16610 bits must be a whole number from 0 to 2**40",
        "capacity": "capacity=3 must be at least 1, and at least the 4 rows of tokens",
        "schedule": "no schedule 'dispach'",
        "cannot": "copy engines take sizes from the host",
        "deadline": "deadline_s=-1 must be positive",
        "timeline": "timeline=3 is no timeline: pass weft.Timeline()",
    }
    for told in pool.run(ranks.errors, ranks=2, timeout_s=60):
        assert told.keys() == expected.keys()
        for name, text in expected.items():
            assert text in told[name], name


@pytest.mark.parametrize("schedule", ["serial", "dispatch[by=dma,rest=each]"])
def test_splits_that_one_rank_gets_wrong_are_named_on_every_rank(pool: Pool, schedule: str) -> None:
    for told in pool.run(ranks.wrong_values, schedule, ranks=3, timeout_s=60):
        for when in ("first", "later"):
            for name, total in (("sum", 5), ("few", 3)):
                assert told[f"{name}, {when}"].startswith(
                    f"RefusedError: rank 1: splits add up to {total} and tokens has 4 rows: pass the number"
                )
            assert told[f"negative, {when}"].startswith("RefusedError: rank 1: splits has -1 at 1")
        if schedule == "serial":  # which makes memory for what comes
            assert told["capacity"] == "nothing"
        else:
            assert told["capacity"].startswith(
                "RefusedError: rank 1: tokens has 65 rows, and calls of this shape were prepared for capacity=64: pass the largest"
            )


@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
@pytest.mark.parametrize("schedule", ["serial", "dispatch[by=kernel,rest=each]"])
@pytest.mark.parametrize("dual", ["serial", "combine[chunks=1,by=store]"])
def test_backward_of_what_forward_takes(pool: Pool, schedule: str, dual: str, known: bool) -> None:
    """One rank has as many tokens as there is room for, and then one more, which is refused before anything is done."""
    for told, again in pool.run(ranks.more_tokens, schedule, dual, known, ranks=2, timeout_s=60):
        assert told.startswith(
            "RefusedError: rank 1: tokens has 65 rows, and calls of this shape were prepared for capacity=64"
        )
        assert again == "nothing"


@pytest.mark.parametrize("schedule", ["serial", "dispatch[by=kernel,rest=each]"])
def test_more_rows_than_there_is_room_for(pool: Pool, schedule: str) -> None:
    (told, total), *others = pool.run(ranks.too_many_rows, schedule, ranks=2, timeout_s=60)
    assert told.startswith(
        "TooManyRowsError: 8 rows came to rank 0, from the ranks [4, 4], and max_rows=7: pass at least 8"
    )
    assert total == 8 * 8 * 3
    assert others == [("nothing", 0.0)]


def test_one_rank_that_differs_is_named_on_every_rank(pool: Pool) -> None:
    with Pool(2) as alone:
        found = alone.run(ranks.one_rank_differs, timeout_s=60)
    for told in found:
        assert told.pop("refuses").startswith(
            "RefusedError: rank 0: capacity=3 must be at least 1, and at least the 4 rows"
        )
        for name, text in told.items():
            assert text.startswith("DisagreementError: ranks make different calls"), name
        assert "schedule serial" in told["schedule"]
        assert "max_rows given, capacity None" in told["max_rows"]
        assert "max_rows not given" in told["max_rows"]


def test_a_rank_that_does_not_come(pool: Pool) -> None:
    with Pool(2) as alone:
        told, _ = alone.run(ranks.never_comes, timeout_s=60)
    assert told.startswith("DeadlineError")
    assert "rank 0 waited 1 s for schedule 'dispatch of all_to_all_matmul' of" in told


def test_a_schedule_for_a_block_runs_there(pool: Pool) -> None:
    for ran in pool.run(ranks.pinned_by_a_block, ranks=3, timeout_s=60):
        assert ran["serial"] == {
            "exchange splits -> received",
            "exchange tokens -> unordered",
            "permute",
            "library_grouped_matmul",
        }
        for name in ("dispatch[by=dma,rest=each]", "dispatch[by=kernel,rest=together]"):
            assert {"read counts", "grouped_matmul"} <= ran[name]


def test_timeline_of_the_librarys_calls(pool: Pool) -> None:
    steps = ["exchange splits -> received", "exchange tokens -> unordered", "permute", "library_grouped_matmul"]
    assert pool.run(ranks.serial_steps, ranks=2, timeout_s=60) == [steps * 2, []]


def test_layouts_that_cost_a_copy_are_warned_about_once(pool: Pool) -> None:
    for told in pool.run(ranks.copies, ranks=2, timeout_s=60):
        assert sum("tokens is copied at every call" in text for text in told) == 1
        assert sum("w_experts is copied at every call" in text for text in told) == 1


def test_odd_uses_work_or_say_why_not(pool: Pool) -> None:
    with Pool(2) as alone:
        for told in alone.run(ranks.odd_uses, timeout_s=100):
            assert (
                told["autocast serial"] == told["autocast dispatch[by=dma,rest=each]"] == "torch.float32 torch.float32"
            )
            assert told["twice"].startswith("NotImplementedError: all_to_all_matmul can be differentiated once")
            assert "modified by an inplace operation" in told["received changed"]
            assert told["inference"] in ("(8, 3)", "(0, 3)")
            assert "a compiled call cannot fill it" in told["compiled timeline"]
