"""weft.matmul_all_to_all on CPU processes: results, gradients, torch.compile, layouts, bad input, a rank that does not come."""

from __future__ import annotations

import pytest
import torch
from support import combine_call_ranks as calls
from support import combine_ranks as ranks
from support.slow import slow

from weft.builders import MatmulAllToAll
from weft.launch import Pool

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DMA, STORE = "combine[chunks=1,by=dma]", "combine[chunks=1,by=store]"
BY_EXPERT = "combine_by_expert[chunks=1,by=kernel]"
# experts of a rank, dtype, traffic, whether the host reads how many tokens there are, schedule, weights transposed. Without a
# schedule all candidates are compiled and timed before one is taken. One rank has no candidates but serial.
FORWARD = {
    "chosen": (3, F32, "uneven", True, None, False),
    "told": (2, F32, "uneven", False, None, False),
    "bf16": (2, BF16, "uneven", True, DMA, True),
    "fp16, told": (2, F16, "uneven", False, STORE, False),
    "all from one": (2, F32, "all to one", True, DMA, False),
    "one has nothing": (1, F32, "one has nothing", True, STORE, False),
    "nothing at all": (2, F32, "nothing", True, BY_EXPERT, False),
    "serial": (3, BF16, "uneven", True, "serial", True),
    "serial, told": (2, F32, "all to one", False, "serial", False),
    "serial, one expert": (1, F32, "uneven", False, "serial", False),
    "serial, nothing at all": (2, F32, "nothing", True, "serial", False),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("world", [1, 2, 3, 4])  # the one that changes last: each change makes a new group
def test_results(pool: Pool, world: int, name: str) -> None:
    experts, dtype, traffic, exact, schedule, transposed = FORWARD[name]
    pinned = schedule if world > 1 or schedule == "serial" else None
    pool.run(ranks.forward, experts, dtype, traffic, exact, pinned, transposed, 6, ranks=world, timeout_s=60)


@pytest.mark.parametrize("schedule", [DMA, slow("serial"), slow(BY_EXPERT)])
def test_eight_ranks(pool: Pool, schedule: str) -> None:
    pool.run(ranks.forward, 2, F32, "uneven", schedule != BY_EXPERT, schedule, False, 4, ranks=8, timeout_s=60)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "told"])
def test_every_schedule(pool: Pool, exact: bool) -> None:
    names = ranks.every(MatmulAllToAll(3, 2, (60,) * 3, 8, 16, "fp32", most=60, exact=exact))
    for name in names:
        pool.run(ranks.forward, 2, F32, "uneven", exact, name, False, 4, ranks=3, timeout_s=60)
    assert {"serial", STORE, BY_EXPERT} < set(names)
    assert (DMA in names) == exact


def test_many_calls_in_a_row(pool: Pool) -> None:
    pool.run(ranks.forward, 2, F32, "uneven", True, DMA, False, 40, ranks=3, timeout_s=60)


def test_what_is_expected_is_what_the_library_makes(pool: Pool) -> None:
    pool.run(ranks.own_segments, ranks=3, timeout_s=60)


@pytest.mark.parametrize("schedule", [None, "serial", STORE], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_a_gemm_before_an_all_to_all(pool: Pool, world: int, schedule: str | None) -> None:
    pool.run(ranks.dense, schedule, ranks=world, timeout_s=60)


@pytest.mark.parametrize("schedule", [None, "serial", STORE], ids=str)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "told"])
@pytest.mark.parametrize("world", [1, 3])
def test_gradients(pool: Pool, world: int, exact: bool, schedule: str | None) -> None:
    pinned = schedule if world > 1 or schedule == "serial" else None
    pool.run(ranks.backward, 1 if world == 3 and exact else 2, exact, pinned, False, ranks=world, timeout_s=60)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["h", "weights"])
def test_of_two_gradients_one(pool: Pool, wanted: tuple[bool, bool]) -> None:
    pool.run(ranks.backward, 2, True, DMA, False, wanted, ranks=2, timeout_s=60)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_travel_once_backward_and_the_order_of_sums_is_one(pool: Pool, world: int) -> None:
    duals = ["serial", "dispatch[by=kernel,rest=each]", "dispatch_by_expert[by=kernel,chunks=2]"]
    by_dual = [
        pool.run(ranks.gradients_by_dual, dual, ranks=world, timeout_s=60) for dual in duals[: 3 if world > 1 else 1]
    ]
    for of_rank in zip(*by_dual, strict=True):
        for grads in zip(*of_rank, strict=True):
            assert all(torch.equal(grad, grads[0]) for grad in grads)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=["both", "h", "weights"])
def test_compiled_gradients_by_the_dual(pool: Pool, wanted: tuple[bool, bool]) -> None:
    dual = "dispatch[by=kernel,rest=each]"
    pool.run(ranks.compiled_by_dual, dual, wanted, ranks=2, timeout_s=120)


def test_gradients_weigh_small_steps(pool: Pool) -> None:
    pool.run(ranks.gradients_weigh_steps, ranks=3, timeout_s=60)


@pytest.mark.parametrize(
    "schedules",
    [(None, None), ("serial", "serial"), ("dispatch[by=dma,rest=each]", STORE)],
    ids=["chosen", "serial", "pinned"],
)
def test_there_and_back(pool: Pool, schedules: tuple[str | None, str | None]) -> None:
    pool.run(ranks.round_trip, schedules, ranks=2, timeout_s=60)


@pytest.mark.parametrize("schedule", ["serial", "dispatch[by=kernel,rest=each]"])
def test_what_the_dispatch_has_brought_to_the_host_is_known(pool: Pool, schedule: str) -> None:
    for known in pool.run(calls.sizes_are_known, schedule, ranks=2, timeout_s=60):
        assert known == {
            "the same": True, "a copy": False, "other splits": False, "changed": False, "splits changed": False
        }  # fmt: skip


@pytest.mark.parametrize("world", [1, 3])
def test_the_librarys_way_as_on_gpus(pool: Pool, world: int) -> None:
    pool.run(ranks.torchs_grouped_gemm, ranks=world, timeout_s=60)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "told"])
def test_compiled_gradients(pool: Pool, exact: bool) -> None:
    pool.run(ranks.backward, 2, exact, None, True, ranks=2, timeout_s=120)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "told"])
def test_compiled(pool: Pool, exact: bool) -> None:
    pool.run(ranks.compiled_forward, exact, ranks=2, timeout_s=120)


def test_opcheck(pool: Pool) -> None:
    pool.run(ranks.checked_as_op, ranks=1, timeout_s=120)


def test_bad_arguments_name_the_values_and_the_fix(pool: Pool) -> None:
    expected = {
        "one dimension": "h has shape (8,): pass [R, K]",
        "no tensor": "h is a list: pass a torch.Tensor",
        "no table": "received is a NoneType: pass a torch.Tensor",
        "strange dtype": "h is torch.complex64: use one of",
        "other K": "w_experts has shape (2, 5, 3): it must be [E, K=8, N]",
        "one expert, no dimension": "w_experts has shape (8, 3): it must be [E, K=8, N]",
        "other dtype": "w_experts is torch.float16 and h torch.float32",
        "splits of floats": "splits is torch.float32: use torch.int64",
        "splits of a rank": "splits has shape (2,): it must be [4], for 2 experts of each of 2 ranks",
        "splits elsewhere": "splits is on meta and h on cpu",
        "received of floats": "received is torch.float32: use torch.int64",
        "received of one": "received has shape (2,): it must be [2, 2], for 2 experts of each of 2 ranks",
        "received elsewhere": "received is on meta and h on cpu",
        "rows": "rows=-1 must be a whole number from 0 to 2**40",
        "capacity": "capacity=3 must be at least 1, and at least the 8 tokens of splits",
        "schedule": "no schedule 'combin'",
        "cannot": "copy engines take sizes from the host",
        "deadline": "deadline_s=-1 must be positive",
        "timeline": "timeline=3 is no timeline: pass weft.Timeline()",
    }
    for told in pool.run(calls.errors, ranks=2, timeout_s=60):
        assert told.keys() == expected.keys()
        for name, text in expected.items():
            assert text in told[name], name


@pytest.mark.parametrize("schedule", ["serial", STORE])
def test_tables_that_one_rank_gets_wrong_are_named_on_every_rank(pool: Pool, schedule: str) -> None:
    for told in pool.run(calls.wrong_values, schedule, ranks=3, timeout_s=60):
        for when in ("first", "later"):
            for name, text in {
                "too many": "rank 1: received adds up to 7 and h has 6 rows: pass what all_to_all_matmul returned",
                "negative": "rank 1: received has -1 at (0, 1): numbers must not be negative",
                "given": "rank 1: splits has -2 at 0: numbers must not be negative",
                "own": "rank 1: received says that [1, 0] rows for its experts came from rank 1 itself, and splits say [2, 0]",
                "rows": "rank 1: rows=7 and splits add up to 6: pass this rank's number of tokens",
            }.items():
                assert told[f"{name}, {when}"].startswith(f"RefusedError: {text}"), (name, told[f"{name}, {when}"])
        if schedule == "serial":  # which makes memory for what comes
            assert told["capacity"] == "nothing"
        else:
            assert told["capacity"].startswith(
                "RefusedError: ranks 0, 1, 2: this rank has 65 tokens, and calls of this shape were prepared for capacity=64"
            )


@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
@pytest.mark.parametrize("schedule", ["serial", STORE])
@pytest.mark.parametrize("dual", ["serial", "dispatch[by=kernel,rest=each]"])
def test_backward_of_what_forward_takes(pool: Pool, schedule: str, dual: str, known: bool) -> None:
    """One rank has as many tokens as there is room for, and then one more, which is refused before anything is done."""
    for told, again in pool.run(calls.more_tokens, schedule, dual, known, ranks=2, timeout_s=60):
        assert told.startswith(
            "RefusedError: rank 1: this rank has 65 tokens, and calls of this shape were prepared for capacity=64"
        )
        assert again == "nothing"


def test_one_rank_that_differs_is_named_on_every_rank(pool: Pool) -> None:
    with Pool(2) as alone:
        found = alone.run(calls.one_rank_differs, timeout_s=60)
    for told in found:
        assert told.pop("refuses").startswith(
            "RefusedError: rank 0: capacity=3 must be at least 1, and at least the 4 tokens"
        )
        for name, text in told.items():
            assert text.startswith("DisagreementError: ranks make different calls"), (name, text)
        assert "schedule serial" in told["schedule"]
        assert "rows given, capacity None" in told["rows"]
        assert "rows not given" in told["rows"]


@pytest.mark.parametrize("schedule", ["serial", DMA])
def test_a_rank_that_does_not_come(pool: Pool, schedule: str) -> None:
    with Pool(2) as alone:
        told, _ = alone.run(calls.never_comes, schedule, timeout_s=60)
    assert told.startswith("DeadlineError")
    assert "rank 0 waited 1 s for" in told
    assert "of matmul_all_to_all" in told


def test_a_rank_that_does_not_come_backward(pool: Pool) -> None:
    with Pool(2) as alone:
        told, _ = alone.run(calls.never_comes_backward, timeout_s=60)
    assert told.startswith("DeadlineError"), told


def test_a_schedule_for_a_block_runs_there(pool: Pool) -> None:
    for ran in pool.run(calls.what_ran, "combine[chunks=2,by=kernel]", ranks=3, timeout_s=60):
        assert {"read counts", "returning_matmul", "copy inbox -> y"} <= ran
    for ran in pool.run(calls.what_ran, "serial", ranks=3, timeout_s=60):
        assert ran == {"library_grouped_matmul", "permute", "exchange ordered -> y"}


def test_timeline_of_the_librarys_calls(pool: Pool) -> None:
    steps = ["library_grouped_matmul", "permute", "exchange ordered -> y"]
    assert pool.run(calls.serial_steps, ranks=2, timeout_s=60) == [steps * 2, []]


def test_layouts_that_cost_a_copy_are_warned_about_once(pool: Pool) -> None:
    with Pool(2) as alone:
        for told in alone.run(calls.copies, timeout_s=60):
            assert sum("h is copied at every call" in text for text in told) == 1
            assert sum("w_experts is copied at every call" in text for text in told) == 1


def test_odd_uses_work_or_say_why_not(pool: Pool) -> None:
    with Pool(2) as alone:
        for told in alone.run(calls.odd_uses, timeout_s=100):
            assert told["autocast serial"] == told["autocast combine[chunks=2,by=dma]"] == "torch.float32 torch.float32"
            assert told["twice"].startswith("NotImplementedError: matmul_all_to_all can be differentiated once")
            assert told["inference"] == "True"
