"""The numbers of rows of an exchange on the CPU: equal from splits that the CPU has read, and from both tables."""

from __future__ import annotations

import gc

import pytest
import torch

from weft.runtime.unfused import sizes
from weft.runtime.unfused.sizes import Sizes, remember, remember_total, sizes_of, total_of


@pytest.mark.parametrize(("world", "experts"), [(1, 3), (2, 1), (3, 4)])
def test_splits_of_all_ranks_give_the_rows_of_a_rank(world: int, experts: int) -> None:
    counts = torch.randint(9, (world, world, experts), generator=torch.Generator().manual_seed(world))
    for rank in range(world):
        splits, received = counts[rank].flatten(), counts[:, rank].contiguous()
        read = Sizes.of_read(splits, received, counts.flatten().tolist(), rank)
        assert read.host == Sizes(splits, received).host


def test_a_total_is_known_until_its_tensor_changes() -> None:
    splits, other = torch.tensor([3, 4]), torch.tensor([3, 4])
    assert total_of(splits) is None
    remember_total(splits, 7)
    assert total_of(splits) == 7
    assert total_of(other) is None, "another tensor with the same contents"
    splits += 1
    assert total_of(splits) is None
    remember_total(splits, 9)
    assert total_of(splits) == 9


def test_a_total_is_known_while_only_autograd_holds_its_tensor() -> None:
    factor = torch.tensor([3.0, 4.0])
    product = torch.ones(2, requires_grad=True) * factor
    remember_total(factor, 7)
    del factor
    gc.collect()
    assert total_of(product.grad_fn._saved_other) == 7  # type: ignore[union-attr]


def test_values_of_freed_tensors_are_dropped() -> None:
    before = len(sizes._totals.found), len(sizes._known.found)
    for number in range(100):
        splits, received = torch.tensor([number, 4]), torch.tensor([[number], [5]])
        remember_total(splits, number)
        remember(Sizes(splits, received))
        assert total_of(splits) == number
        assert sizes_of(splits, received).host.sent == [number, 4]
    del splits, received
    gc.collect()
    assert (len(sizes._totals.found), len(sizes._known.found)) == before


def test_sizes_are_read_again_for_another_splits_or_changed_tables() -> None:
    splits, received = torch.tensor([2, 4]), torch.tensor([[2], [5]])
    one = Sizes(splits, received)
    assert one.host.sent == [2, 4]
    remember(one)
    assert sizes_of(splits, received).numbers is one.numbers
    assert sizes_of(splits.clone(), received).numbers is not one.numbers
    splits[0] = 1
    again = sizes_of(splits, received)
    assert again.numbers is not one.numbers
    assert again.host.sent == [1, 4]


def test_tables_made_in_inference_mode_are_not_kept() -> None:
    with torch.inference_mode():
        splits, received = torch.tensor([2, 4]), torch.tensor([[2], [5]])
    remember_total(splits, 6)
    remember(Sizes(splits, received))
    assert total_of(splits) is None
    assert sizes_of(splits, received).host.came == [2, 5]
