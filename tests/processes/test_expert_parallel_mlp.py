"""weft.nn.ExpertParallelMLP on CPU processes, against a dense layer in float64 that one process computes for all ranks' tokens."""

from __future__ import annotations

from itertools import product

import pytest
from support import expert_module_ranks as ranks
from support.slow import slow

from weft.launch import Pool

EVERY = product([1, 2, 3, 4], [True, False], [False, True])
SOME = (1, True, False), (1, False, True), (2, False, True), (3, True, False)


@pytest.mark.parametrize(("world", "gated", "bounded"), [one if one in SOME else slow(*one) for one in EVERY])
def test_results_and_gradients(pool: Pool, world: int, gated: bool, bounded: bool) -> None:
    pool.run(ranks.agrees, 2 * world, gated, bounded, False, ranks=world, timeout_s=60)


@pytest.mark.parametrize(("world", "bounded"), [(2, False), slow(2, True), slow(3, False), (3, True)])
def test_fused(pool: Pool, world: int, bounded: bool) -> None:
    pool.run(ranks.agrees_fused, 2 * world, bounded, ranks=world, timeout_s=60)


FROZEN = [
    ("gate_up_proj", "down_proj"), ("x", "by", "down_proj"), ("x", "gate_up_proj"), ("x", "gate_up_proj", "down_proj"), ("by",)
]  # fmt: skip


@pytest.mark.parametrize("frozen", FROZEN, ids=" ".join)
def test_frozen(pool: Pool, frozen: tuple[str, ...]) -> None:
    for of_fused in (True, False):
        pool.run(ranks.freezes, of_fused, frozen, ranks=2, timeout_s=60)


@pytest.mark.parametrize(
    ("bounded", "frozen", "wanted"), [(False, False, [0] * 3), (True, False, [1] * 3), (False, True, [0] * 3)]
)
def test_fused_sends_tokens_once(pool: Pool, bounded: bool, frozen: bool, wanted: list[int]) -> None:
    """Without max_rows, forward keeps the received tokens."""
    assert pool.run(ranks.exchanges_of_tokens, bounded, frozen, ranks=2, timeout_s=60) == [wanted] * 2


def test_flops_of_fused(pool: Pool) -> None:
    assert pool.run(ranks.flops, True, ranks=2, timeout_s=60) == pool.run(ranks.flops, False, ranks=2, timeout_s=60)


@pytest.mark.parametrize("bounded", [slow(False), True], ids=["as many as come", "max_rows"])
def test_compiled(pool: Pool, bounded: bool) -> None:
    pool.run(ranks.agrees, 4, True, bounded, True, ranks=2, timeout_s=120)


def test_it_learns_as_a_dense_layer_does(pool: Pool) -> None:
    for ours, dense in pool.run(ranks.trains, 20, ranks=2, timeout_s=60):
        assert ours == pytest.approx(dense, rel=1e-5)
        assert ours[-1] < 0.7 * ours[0]


def test_copies_state_dicts_and_bad_arguments(pool: Pool) -> None:
    for rank, told in enumerate(pool.run(ranks.handled, ranks=2, timeout_s=60)):
        assert told["missing"].startswith("ValueError: the state dict has ")
        assert (
            f"needs gate_up_proj for all experts, or {2 * rank}.up_proj.weight, ... for each expert" in told["missing"]
        )
        assert "num_experts=5 must be positive and divisible by world_size=2" in told["experts"]
        assert "pass 6, or use another number of ranks" in told["experts"]
        assert "top_k_index (3, 2) and top_k_weights (6, 2) must both be [6, top_k], as x has 6 tokens" in told["index"]
        assert "top_k_index (6, 2) and top_k_weights (6, 1) must both be [6, top_k]" in told["weights"]
        assert f"num_experts=4, gated=True, rank={rank} of 2" in told["shown"]


def test_what_one_rank_cannot_route_is_refused_on_every_rank(pool: Pool) -> None:
    for told in pool.run(ranks.misrouted, ranks=2, timeout_s=60):
        for name, words in {
            "too large": "top_k_index contains 4: pass expert numbers from 0 to 3",
            "negative": "top_k_index contains -4: pass expert numbers from 0 to 3",
            "of floats": "top_k_index is torch.float32: use torch.int64",
            "fewer": "top_k_index (3, 2) and top_k_weights (6, 2) must both be [6, top_k], as x has 6 tokens",
            "none": "top_k_index has shape (6, 0): choose at least one expert for each token",
            "wide": "x has shape (6, 5): pass [..., 8]",
            "nothing": "x is a NoneType: pass a torch.Tensor",
        }.items():
            assert told[name] == f"RefusedError: rank 1: ExpertParallelMLP: {words}"


def test_rows_for_which_there_is_no_room_are_an_error(pool: Pool) -> None:
    with Pool(2) as alone:
        told = alone.run(ranks.rows_lost, timeout_s=60)
    assert any(one.startswith("TooManyRowsError") for one in told)
