"""`ShardedEmbeddingBagCollection.close`: it frees memory on every rank, a later call works, and results that callers
hold stay valid.
"""

from __future__ import annotations

import copy

import pytest
import torch
from pool import traces
from support.on_ranks import assert_errors, error_of

from weft.embedding import EmbeddingBagConfig, KeyedJaggedTensor
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

BATCH, WIDTH = 64, 256  # fp32 columns, which give results of 64 KiB
IDS = torch.arange(2 * BATCH) % 20


def made(group, name: str = "t", **options) -> ShardedEmbeddingBagCollection:
    return ShardedEmbeddingBagCollection(
        [EmbeddingBagConfig(20, WIDTH, name, ("f",)), EmbeddingBagConfig(20, WIDTH, "other", ("f",))], group=group, **options
    )  # fmt: skip


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], IDS, lengths=torch.full((BATCH,), 2))


def wanted(group, module: ShardedEmbeddingBagCollection) -> torch.Tensor:
    """Return the expected columns of this rank's own table. Both tables get the same ids, and both ranks the same
    batch.
    """
    (bag,) = module.embedding_bags.values()
    return bag.weight[IDS].view(BATCH, 2, WIDTH).sum(1)


def agrees(group, module: ShardedEmbeddingBagCollection, output: torch.Tensor) -> bool:
    (index,) = module.sharding.local_tables(group.rank())
    return torch.equal(output[:, index * WIDTH : (index + 1) * WIDTH], wanted(group, module))


def mapped_bytes(before: dict[str, list[str]]) -> int:
    """Return the bytes of symmetric memory, of all ranks, that this process has mapped since `before`."""
    ranges = [line.split()[0].split("-") for line in traces(before)["memfd mappings"]]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def many(group, transport: str) -> tuple[list[int], list[int], bool]:
    """Make and close one module after the other. Return the bytes in use while a module is open and after it is closed,
    and True if all results are right.
    """
    during, after, right, before = [], [], True, traces()
    for number in range(4):
        module = made(group, name=f"t{number}", transport=transport)
        for _ in range(2):
            right &= agrees(group, module, module(features()).values().clone())
            during.append(mapped_bytes(before))
            module.close()
            module.close()
            after.append(mapped_bytes(before))
    return during, after, right


@pytest.mark.parametrize("transport", ["direct", "put"])
def test_memory_is_given_back_and_made_again_by_the_next_call(pool: Pool, transport: str) -> None:
    for during, after, right in pool.run(many, transport, ranks=2):
        assert right
        assert len(set(after)) == 1, "what is left is the group's, and does not grow"
        assert all(bytes_ - after[0] >= 2 * 2 * BATCH * 2 * WIDTH * 4 for bytes_ in during), "two results of two ranks"


def held(group) -> tuple[tuple[str, str], bool, bool]:
    module, rank = made(group), group.rank()
    output = module(features()).values()
    view = output[:1] if rank == 1 else None
    del output
    error = error_of(module.close)
    kept = view is None or torch.equal(view[:, WIDTH:], wanted(group, module)[:1])
    right = agrees(group, module, module(features()).values())
    del view
    module.close()
    return error, kept, right


def test_a_result_that_a_rank_holds_is_refused_on_all_and_stays(pool: Pool) -> None:
    for (kind, text), kept, right in pool.run(held, ranks=2):
        assert kind == "RefusedError"
        assert text.startswith("this module cannot be closed while rank 1 holds 1 result: ")
        assert kept
        assert right


def copies(group) -> list[bool]:
    """Close one of several modules that share memory. The others must continue. Closing a module that was never called
    frees nothing.
    """
    module = made(group)
    other, half = copy.deepcopy(module), made(group, name="h")
    made(group, device="meta").close()
    half.close()
    found = [agrees(group, one, one(features()).values().clone()) for one in (module, other)]
    module.close()
    found.append(agrees(group, other, other(features()).values().clone()))
    half(features())
    half.half()
    half(features())
    half.close()
    other.close()
    return found


def test_copies_share_memory_and_go_on(pool: Pool) -> None:
    assert pool.run(copies, ranks=2) == [[True] * 3] * 2


def refused_after(group) -> list[tuple[str, str]]:
    """Pass bad input on one rank, in the first call after `close`, and after another module that shares memory was
    closed.
    """
    module, direct = made(group, input="global_batch"), made(group, input="global_batch", transport="direct")
    good, bad = (KeyedJaggedTensor(["f"], ids, lengths=torch.full((BATCH,), 2)) for ids in (IDS, IDS.float()))
    errors = []
    for closed in (module, direct, module):
        module(good)
        direct(good)
        closed.close()
        for one in (module, direct):
            errors.append(error_of(lambda one=one: one(bad if one.rank else good)))
    return errors


def test_the_first_call_after_it_may_be_refused(pool: Pool) -> None:
    for errors in pool.run(refused_after, ranks=2, timeout_s=60):
        assert [kind for kind, _ in errors] == ["RefusedError"] * 6
        assert all("rank 1: values is torch.float32" in text for _, text in errors)


def different(group) -> tuple[str, str]:
    modules = made(group), made(group, name="u")
    for module in modules:
        module(features())
    error = error_of(modules[group.rank()].close)
    for module in modules:
        module.close()
    return error


def test_ranks_that_close_different_modules_learn_it(pool: Pool) -> None:
    assert_errors(pool.run(different, ranks=2), "DisagreementError", "close the same modules in the same order")
