"""Calls of embedding_all_to_all on CPU processes: waits between ranks, results that callers hold, and counts.

First single calls (sent slices, the timeline, indices out of range, the dispatcher's checks). Then results that are
held across calls, waits, and several executors and groups at once.
"""

from __future__ import annotations

import gc
import re
import time
import warnings
from dataclasses import astuple, replace
from typing import Any

import embedding_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from embedding_ranks import DTYPES, FUSED, ORDERS, TRANSPORTS, assert_same_bits, pooled_here
from support.on_ranks import error_of
from support.reference import Problem, assert_close, problem, tables_of
from support.slow import in_turn, mostly

import weft
from weft import symm
from weft.embedding.options import EmbeddingOptions
from weft.launch import Pool
from weft.ops.embedding_all_to_all import form_of
from weft.runtime.cpu import embedding as cpu

# --- sent slices, and their times ---


def counted(group, p, options):
    """Return the copies and flags of one call, and of a second call."""
    operator = ranks.operator_of(group, p, **options)
    counts = []
    for _ in range(2):
        before = operator.copies, operator.flags_raised
        ranks.call(group, p, **options)
        counts.append((operator.copies - before[0], operator.flags_raised - before[1]))
    return counts


# Adjacent tables in the output: rank 0 owns three in a row and a separate table, rank 1 owns two separate tables, rank
# 2 two in a row.
SLICED = ((8, 3, 16, 1, 5, 4, 2, 9), (0, 0, 0, 1, 2, 2, 0, 1))


@pytest.mark.parametrize(
    ("slice_size", "slices_of_rank"), [(1, (4, 2, 2)), (2, (3, 2, 1)), (3, (2, 2, 1)), (32, (2, 2, 1))]
)
@pytest.mark.parametrize("order", ORDERS)
def test_put_sends_one_copy_and_one_flag_per_slice(
    pool: Pool, slice_size: int, slices_of_rank: tuple[int, ...], order: str
) -> None:
    p = Problem(tables_of(SLICED[0]), SLICED[1], (4, 0, 7))
    options = {"transport": "put", "slice_size": slice_size, "order": order}
    for rank, (counts, slices) in enumerate(zip(pool.run(counted, p, options, ranks=3), slices_of_rank, strict=True)):
        remote = 11 - p.batch_sizes[rank]
        assert counts == [(remote * slices, 11 * slices)] * 2, f"rank {rank}"


def test_direct_sends_no_slices(pool: Pool) -> None:
    p = Problem(tables_of(SLICED[0]), SLICED[1], (4, 0, 7))
    assert pool.run(counted, p, {"transport": "direct"}, ranks=3) == [[(0, 0)] * 2] * 3


def recorded(group, p, options):
    timeline = weft.Timeline()
    before = time.monotonic_ns() / 1e3
    output = ranks.call(group, p, timeline=timeline, **options).clone()
    return output, timeline, before, time.monotonic_ns() / 1e3


@pytest.mark.parametrize("transport", FUSED)
def test_timeline(pool: Pool, transport: str) -> None:
    """Spans lie within the call, have exactly the bytes that the rank sends, and end with a wait."""
    p = problem(3, batch=20, dtype=torch.float16)
    answers = pool.run(recorded, p, {"transport": transport, "slice_size": 2}, ranks=3)
    assert_same_bits([answer[0] for answer in answers], p)
    for rank, (_, timeline, before, after) in enumerate(answers):
        assert timeline.ranks() == [rank]
        assert all(before <= span.start_us <= span.end_us <= after for span in timeline)
        width = sum(slot.dim for slot in p.sharding.local_slots(rank))
        remote = 20 - p.batch_sizes[rank]
        assert sum(span.bytes for span in timeline) == remote * width * 2
        assert all(span.bytes == 0 for span in timeline if span.lane in ("pool", "wait"))
        waits = [span for span in timeline if span.lane == "wait"]
        assert len(waits) == 1
        assert waits[0].end_us == max(span.end_us for span in timeline)


def test_timeline_of_serial(pool: Pool) -> None:
    """The steps follow each other. The exchange has the bytes that the rank sends."""
    p = problem(3, batch=20, dtype=torch.float16)
    answers = pool.run(recorded, p, {"transport": "serial"}, ranks=3)
    assert_same_bits([answer[0] for answer in answers], p)
    for rank, (_, timeline, before, after) in enumerate(answers):
        spans = list(timeline)
        assert [(span.rank, span.lane, span.name) for span in spans] == [
            (rank, "compute", name) for name in ("pool", "all_to_all", "unpack")
        ]
        times = [before, *(time for span in spans for time in (span.start_us, span.end_us)), after]
        assert times == sorted(times)
        width = sum(slot.dim for slot in p.sharding.local_slots(rank))
        assert [span.bytes for span in spans] == [0, (20 - p.batch_sizes[rank]) * width * 2, 0]


def caught(group, p, options, spoil):
    """Return the output and the warnings of a call in which rank 0 has changed some indices."""
    values, *rest = p.tupled(group.rank())
    if group.rank() == 0:
        for at, value in spoil.items():
            values[at] = value
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        output = ranks.call(group, p, (values, *rest), **options).clone()
    return output, [str(w.message) for w in seen]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_indices_out_of_range_read_as_zero_rows_and_warn(pool: Pool, transport: str, dtype: torch.dtype) -> None:
    p = Problem(tables_of((4, 6, 3), dtype=dtype), (1, 0, 1), (2, 3), longest=3, weighted=True)
    # Rank 0 owns only table t1. With a weight of zero, an index contributes a row of zeros.
    spoil = {0: -1, 2: 31, 4: 2**62}
    answers = pool.run(caught, p, {"transport": transport}, spoil, ranks=2)
    for at in spoil:
        p.bags["f1"].weights[at] = 0
    assert_same_bits([output for output, _ in answers], p)
    lengths = p.bags["f1"].lengths.tolist()
    first = next(sample for sample, length in enumerate(lengths) if length)
    ((text,), quiet) = answers[0][1], answers[1][1]
    assert quiet == []
    assert text.startswith("3 indices out of range, read as zero rows")
    for word in ("'t1'", "'f1'", f"sample {first} ", "position 0", "index -1", "[0, 31)", "hash=True"):
        assert word in text, word


def beside_the_table(group, options):
    """Pass ids before and after each rank's table, in a tensor that has rows there too. Return these rows, the result
    and the warnings.
    """
    rows, tables = 5, tables_of((4, 6))
    sharding = weft.EmbeddingSharding(tuple(replace(table, num_embeddings=rows) for table in tables), (0, 1), 2)
    memory = torch.randn(rows + 2, tables[group.rank()].embedding_dim)
    features = torch.tensor([0, -1, rows, rows - 1]), torch.arange(5)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        output = weft.embedding_all_to_all(
            [memory[1:-1]], features, sharding, group=group, batch_sizes=(1, 3), **options
        )
    return memory, output.clone(), [str(w.message) for w in seen]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_trusted_indices_are_neither_checked_nor_counted(pool: Pool, transport: str) -> None:
    """Unchecked indices read memory beside the table without a warning. Checked and ignored indices read zeros."""
    answers = pool.run(beside_the_table, {"bounds_check": "none", "transport": transport}, ranks=2)
    wanted = torch.cat([memory[[1, 0, 6, 5]] for memory, _, _ in answers], dim=1)
    assert torch.equal(torch.cat([output for _, output, _ in answers]), wanted)
    assert [seen for _, _, seen in answers] == [[], []]
    for check in ("warning", "ignore"):
        answers = pool.run(beside_the_table, {"bounds_check": check, "transport": transport}, ranks=2)
        wanted = torch.cat([memory[[1, 0, 6, 5]] for memory, _, _ in answers], dim=1)
        wanted[1:3] = 0
        assert torch.equal(torch.cat([output for _, output, _ in answers]), wanted)
        for _, _, seen in answers:
            assert [text[:22] for text in seen] == ["2 indices out of range"] * (check == "warning")


def test_fatal_bounds_check_lets_good_input_pass(pool: Pool) -> None:
    p = problem(2)
    answers = pool.run(caught, p, {"bounds_check": "fatal"}, {}, ranks=2)
    assert_same_bits([output for output, _ in answers], p)


def test_a_pool_warns_and_refuses_too() -> None:
    p = problem(1, (4, 6))
    values, offsets = p.whole()
    values[3] = 30
    with pytest.warns(UserWarning, match=r"1 index out of range.*'t0'.*'f0'.*index 30 is not in \[0, 30\)"):
        weft.embedding_pool(p.weights, (values, offsets), p.tables)
    with pytest.raises(ValueError, match=r"'t0'.*'f0'.*index 30 is not in \[0, 30\)"):
        weft.embedding_pool(p.weights, (values, offsets), p.tables, bounds_check="fatal")
    with pytest.raises(ValueError, match="offsets must ascend"):
        weft.embedding_pool(p.weights, (values, offsets.flip(0)), p.tables)
    learning = [weight.clone().requires_grad_() for weight in p.weights]
    with pytest.raises(ValueError, match=r"no backward yet.*torch.no_grad\(\)"):
        weft.embedding_pool(learning, p.whole(), p.tables)
    with torch.no_grad():
        assert torch.equal(weft.embedding_pool(learning, p.whole(), p.tables), pooled_here(p))


def checked_by_the_dispatcher(group, p, options):
    rank, plan = group.rank(), (p.sharding.written, *astuple(EmbeddingOptions(**options)))
    call = form_of(plan, p.local_weights(rank), p.tupled(rank), rank, p.batch_sizes)
    done = torch.library.opcheck(torch.ops.weft.embedding_all_to_all.default, (*call, group.group_name, "", 0.0))
    gc.collect()
    return done


@pytest.mark.parametrize(("transport", "size"), in_turn(TRANSPORTS, [2, 1]))
def test_opcheck(pool: Pool, size: int, transport: str) -> None:
    p = problem(size, weighted=True)
    for done in pool.run(checked_by_the_dispatcher, p, {"transport": transport}, ranks=size):
        assert len(done) >= 4
        assert set(done.values()) == {"SUCCESS"}


# --- results that callers hold ---


def hold(group, problems, options):
    """Hold every result, make further calls with poisoned free buffers, and compare all results at the end. Return the
    number of copied results.
    """
    operator = ranks.operator_of(group, problems[0], **options)
    held = []
    for p in problems:
        ranks.poison(operator)
        held.append(ranks.call(group, p, **options))
    copied, lent = operator.outputs.copied, operator.outputs.lent
    ranks.poison(operator)
    values = [output.clone() for output in held]
    held.clear()
    return values, copied, lent, operator.outputs.lent


@pytest.mark.parametrize("outputs", [2, 3])
@pytest.mark.parametrize("transport", FUSED)
def test_held_results_stay_as_they_are(pool: Pool, outputs: int, transport: str) -> None:
    problems = [Problem(tables_of((8, 3, 16)), (0, 1, 0), (6, 5), seed=seed) for seed in range(5)]
    options = {"outputs": outputs, "transport": transport, "slice_size": 7}
    answers = pool.run(hold, problems, options, ranks=2)
    for number, p in enumerate(problems):
        assert_same_bits([values[number] for values, *_ in answers], p, f"result {number}")
    for _, copied, lent, lent_after in answers:
        assert copied == len(problems) - (outputs - 1)
        assert lent == outputs - 1
        assert lent_after == 0


def hold_views(group, p, later):
    """A view, a numpy array and a reshaped view each keep their buffer. The buffer becomes free when they are dropped."""
    operator = ranks.operator_of(group, p, outputs=4)
    output = ranks.call(group, p, outputs=4)
    view, array, flat = output[1:, 2:5], output.numpy(), output.view(-1)
    del output
    kept = []
    for name in ("view", "array", "flat"):
        kept.append(operator.outputs.lent)
        ranks.poison(operator)
        ranks.call(group, later, outputs=4)
        if name == "view":
            value = view.clone()
            del view
        elif name == "array":
            assert torch.equal(torch.from_numpy(array.copy()), flat.view(array.shape))
            del array
        else:
            assert torch.equal(flat.view(-1, p.sharding.total_dim)[1:, 2:5], value)
            del flat
    return value, kept, operator.outputs.lent


def test_views_keep_their_buffer(pool: Pool) -> None:
    p, later = (Problem(tables_of((8, 3)), (0, 1), (6, 5), seed=seed) for seed in (1, 2))
    for rank, (value, kept, lent) in enumerate(pool.run(hold_views, p, later, ranks=2)):
        assert torch.equal(value, pooled_here(p)[p.rows_of(rank)][1:, 2:5])
        assert kept == [1, 1, 1]
        assert lent == 0


def hold_while_it_grows(group, small, large):
    held = ranks.call(group, small)
    larger = ranks.call(group, large)
    again = ranks.call(group, small)
    return held.clone(), larger.clone(), again.clone()


def test_results_outlive_the_growth_of_buffers(pool: Pool) -> None:
    small = Problem(tables_of((8, 30)), (0, 1), (2, 3))
    large = Problem(tables_of((8, 30)), (0, 1), (700, 900), seed=3)
    answers = pool.run(hold_while_it_grows, small, large, ranks=2)
    for number, p in enumerate((small, large, small)):
        assert_same_bits([answer[number] for answer in answers], p)


def hold_beyond_the_end(group, p, transport):
    """Close a communicator. It must unmap only memory that nobody holds. The group's next call makes a new
    communicator.
    """
    mine = dist.new_group([0, 1])
    held = ranks.call(mine, p, transport=transport)
    symm.communicator(mine, "cpu").close()
    gc.collect()
    again = ranks.call(mine, p, transport=transport)
    dist.destroy_process_group(mine)
    gc.collect()
    return held.clone(), again.clone()


@pytest.mark.parametrize("transport", mostly(TRANSPORTS, "put"))
def test_results_outlive_their_group(pool: Pool, transport: str) -> None:
    p = problem(2)
    answers = pool.run(hold_beyond_the_end, p, transport, ranks=2)
    for number in range(2):
        assert_same_bits([held[number] for held in answers], p)


def hold_with_one_buffer(group, p, holders):
    """Let the ranks `holders` keep their result with outputs=1. Every rank must refuse the next call. When the results
    are dropped, the group continues.
    """
    options = {"outputs": 1, "deadline_s": 20.0}
    held = ranks.call(group, p, **options)
    if group.rank() not in holders:
        held = None
    error = error_of(lambda: ranks.call(group, p, **options))
    kept = None if held is None else held.clone()
    held = None
    return error, kept, ranks.call(group, p, **options).clone()


@pytest.mark.parametrize("holders", [(0, 1, 2), (1,)])
def test_one_buffer_cannot_be_held(pool: Pool, holders: tuple[int, ...]) -> None:
    p = problem(3)
    answers = pool.run(hold_with_one_buffer, p, holders, ranks=3)
    for rank, ((_, text), kept, _) in enumerate(answers):
        assert "outputs=1" in text
        assert "outputs=2" in text
        assert re.search(rf"\branks? (\d+, )*({holders[0]}|{rank})\b", text), text
        assert kept is None or torch.equal(kept, pooled_here(p)[p.rows_of(rank)])
    assert_same_bits([again for *_, again in answers], p)


# --- waits ---


def straggle(group, p, options, straggler, where):
    """Let rank `straggler` sleep before its call, or inside it before it stores. Return the times at which the
    straggler continued and this rank returned.
    """
    ranks.call(group, p, **options)
    ranks.poison(ranks.operator_of(group, p, **options))
    went_on: list[float] = []

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        went_on.append(time.monotonic())
        return native(*args, **kwargs)

    native = cpu.run_native
    if group.rank() == straggler and where == "before":
        time.sleep(0.5)
        went_on.append(time.monotonic())
    elif group.rank() == straggler:
        cpu.run_native = late
    try:
        output = ranks.call(group, p, **options)
        returned = time.monotonic()
    finally:
        cpu.run_native = native
    return output.clone(), went_on, returned


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("where", ["before", "inside"])
def test_nobody_returns_before_a_straggler_has_stored(pool: Pool, transport: str, where: str) -> None:
    """All processes use the same clock. A rank that returns before the straggler continues has not waited for it."""
    p = problem(4)
    straggler = 2
    answers = pool.run(straggle, p, {"transport": transport}, straggler, where, ranks=4)
    assert_same_bits([output for output, *_ in answers], p)
    (went_on,) = answers[straggler][1]
    for rank, (_, _, returned) in enumerate(answers):
        assert returned > went_on, f"rank {rank} returned {went_on - returned:.3f} s before rank {straggler} stored"


# --- several executors and groups ---


def interleave(group, problems, options):
    """Call several executors of one group in turn. Compare every result after the last call."""
    outputs = []
    for _ in range(3):
        for p, some in zip(problems, options, strict=True):
            ranks.poison(ranks.operator_of(group, p, **some))
            outputs.append(ranks.call(group, p, **some))
    return [output.clone() for output in outputs]


def test_two_plans_on_one_group_interleaved(pool: Pool) -> None:
    problems = [Problem(tables_of((8, 3)), (0, 1), (6, 5)), Problem(tables_of((2, 7, 4)), (1, 1, 0), (3, 9))]
    options = [{"transport": "direct"}, {"transport": "put", "slice_size": 1}]
    answers = pool.run(interleave, problems, options, ranks=2)
    for number in range(6):
        assert_same_bits([outputs[number] for outputs in answers], problems[number % 2], f"call {number}")


def on_two_groups(group, whole, pair, options):
    """Alternate calls on all four ranks with calls on each pair of ranks."""
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][group.rank() // 2]
    outputs = []
    for _ in range(2):
        outputs.append(ranks.call(group, whole, **options))
        outputs.append(ranks.call(mine, pair[group.rank() // 2], **options))
    values = [output.clone() for output in outputs]
    outputs.clear()
    dist.destroy_process_group(mine)
    return values


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_groups_at_once(pool: Pool, transport: str) -> None:
    whole = problem(4)
    pair = [problem(2, (4, 9, 2), seed=seed) for seed in (5, 6)]
    answers = pool.run(on_two_groups, whole, pair, {"transport": transport}, ranks=4)
    for number in (0, 2):
        assert_same_bits([values[number] for values in answers], whole)
        assert_same_bits([values[number + 1] for values in answers[:2]], pair[0])
        assert_same_bits([values[number + 1] for values in answers[2:]], pair[1])


def many_tables(group, p):
    return ranks.call(group, p).clone()


def test_a_thousand_tables_with_long_names(pool: Pool) -> None:
    """Before the first call, ranks compare more bytes than a message can contain."""
    tables = tuple(
        weft.EmbeddingBagConfig(5, 2, f"a_table_with_quite_a_long_name_{i}", (f"its_only_feature_{i}",))
        for i in range(1000)
    )
    p = Problem(tables, tuple(i % 2 for i in range(1000)), (2, 1), longest=2)
    outputs = pool.run(many_tables, p, ranks=2)
    assert_same_bits(outputs, p)
    assert_close(torch.cat(outputs), p)
