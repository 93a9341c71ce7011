"""`accumulate()`: several backwards make one update of the tables, on all ranks together."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.embedding_modules import KEYS, batch, made, state
from support.on_ranks import error_of

import weft
from weft.embedding import KeyedJaggedTensor
from weft.launch import Pool


def accumulates(group: dist.ProcessGroup, halves: bool) -> dict[str, torch.Tensor]:
    module, rank, world = (
        made(group, optimizer=weft.Adam(lr=0.1), is_weighted=True, outputs=4),
        group.rank(),
        group.size(),
    )
    for seed in range(2):
        features, upstream = batch(seed, rank, world)
        if not halves:
            (module(features).values() * upstream).sum().backward()
            continue
        middle, lengths = len(upstream) // 2, features.lengths().view(3, -1)
        with module.accumulate():
            for part in (slice(0, middle), slice(middle, None)):
                ids, numbers = [], []
                for key, of_key in zip(KEYS, lengths, strict=True):
                    ends = torch.nn.functional.pad(of_key.cumsum(0), (1, 0))[part.start :]
                    at = slice(int(ends[0]), int(ends[middle] if part.stop else ends[-1]))
                    ids.append(features[key].values()[at])
                    numbers.append(features[key].weights_or_none()[at])  # type: ignore[index]
                some = KeyedJaggedTensor(KEYS, torch.cat(ids), torch.cat(numbers), lengths=lengths[:, part].flatten())
                y = module(some).values()
                # two losses from one call
                (y * upstream[part] / 4).sum().backward(retain_graph=True)
                (y * upstream[part] * 3 / 4).sum().backward()
    return state(module)


@pytest.mark.parametrize("world", [1, 3])
def test_two_half_batches_and_several_losses_make_one_step(pool: Pool, world: int) -> None:
    whole, halves = (pool.run(accumulates, how, ranks=world) for how in (False, True))
    for one, other in zip(whole, halves, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


def accumulates_wrongly(group: dist.ProcessGroup) -> list[Any]:
    own = dist.new_group([0, 1])
    module = made(own, optimizer=weft.SGD(lr=0.1))
    before, (features, upstream) = state(module), batch(0, own.rank(), own.size())

    def nested() -> None:
        with module.accumulate(), module.accumulate():
            pass

    def fails() -> None:
        with module.accumulate():
            module(features).values().backward(upstream)
            raise KeyError("a rank's own error")

    errors = [error_of(nested), error_of(fails)]
    same = all(torch.equal(one, two) for one, two in zip(before.values(), state(module).values(), strict=True))

    def alone() -> None:
        with module.accumulate() if own.rank() else contextlib.nullcontext():
            module(features).values().backward(upstream)

    errors.append(error_of(alone))
    dist.destroy_process_group(own)
    return [errors, same]


def test_ranks_accumulate_together(pool: Pool) -> None:
    for errors, same in pool.run(accumulates_wrongly, ranks=2):
        assert [kind for kind, _ in errors] == ["ValueError", "KeyError", "DisagreementError"]
        assert "accumulated" in errors[2][1]
        assert same


def leaves_accumulate(group: dist.ProcessGroup) -> tuple[str, str]:
    """Leave the context by an exception on rank 1, which then makes another call."""
    own = dist.new_group([0, 1])
    module = made(own, optimizer=weft.SGD(lr=0.1))
    features, upstream = batch(0, own.rank(), own.size())

    def steps() -> None:
        with contextlib.suppress(KeyError), module.accumulate():
            module(features).values().backward(upstream)
            if own.rank() == 1:
                raise KeyError("a rank's own error")
        module(features)

    found = error_of(steps)
    dist.destroy_process_group(own)
    return found


def test_a_rank_that_leaves_accumulate_is_told_of_the_block(pool: Pool) -> None:
    for kind, text in pool.run(leaves_accumulate, ranks=2):
        assert kind == "DisagreementError", text
        assert "a rank may have left an accumulate() block by an exception" in text
        assert "prefetched" not in text
