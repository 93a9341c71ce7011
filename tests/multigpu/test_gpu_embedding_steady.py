"""Test the fast path of embedding modules on GPUs (`weft.operator.steady`): bits must be those of the slow path, whatever comes
between two steady calls.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import gpu_ranks as ranks
import pytest
import torch
import torch.distributed as dist

import weft
from weft.embedding import EmbeddingBagConfig, KeyedJaggedTensor
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.operator.steady import SteadyCall

pytestmark = ranks.MARKS
NAMES = [f"f{i}" for i in range(6)]
STEPS = 14


def batch(step: int, rank: int, samples: int, is_weighted: bool) -> KeyedJaggedTensor:
    generator, device = torch.Generator().manual_seed(100 * step + rank), ranks.device()
    lengths = torch.randint(0, 5, (len(NAMES) * samples,), generator=generator)
    ids = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator).to(device) if is_weighted else None
    return KeyedJaggedTensor(NAMES, ids.to(device), weights, lengths=lengths.to(device))


def trained(group: dist.ProcessGroup, is_steady: bool, options: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Train, with larger batches, calls without gradients, accumulation, autocast and a graph in between. Return the results and
    the tables, and the number of calls on the fast path.
    """
    count, usual = [0], SteadyCall.again

    def again(self: SteadyCall, *given: Any) -> Any:
        found = usual(self, *given) if is_steady else None
        count[0] += found is not None
        return found

    SteadyCall.again = again  # type: ignore[method-assign]
    try:
        torch.manual_seed(5)
        tables = [EmbeddingBagConfig(40, 8 * (1 + i % 3), f"t{i}", (name,)) for i, name in enumerate(NAMES)]
        given = {"optimizer": weft.RowwiseAdagrad(lr=0.1), "input": "local_batch", "is_weighted": False} | options
        module = ShardedEmbeddingBagCollection(tables, group=group, device=ranks.device(), **given)
        of_all, found = given["input"] == "global_batch", list[torch.Tensor]()
        for step in range(STEPS):
            samples = (30 if step != 9 else 44) * (2 if of_all else 1)
            one = batch(step, 0 if of_all else group.rank(), samples, given["is_weighted"])
            if step % 4 == 3:
                with torch.no_grad():
                    found.append(module(one).values().clone())
            with torch.autocast("cuda", torch.bfloat16, enabled=step == 6):
                pooled = module(one)
                assert pooled.keys() == NAMES
                if step == 5:
                    with module.accumulate():
                        pooled.values().square().sum().backward()
                        module(one).values().sum().backward()
                else:
                    pooled.values().square().sum().backward()
            found.append(pooled.values().detach().clone())
            del pooled
            if step == 8:
                module.half()
                module.float()
        found += [weight.detach().clone() for weight in module.state_dict().values()]
        module.close()
        return [one.cpu() for one in found], count[0]
    finally:
        SteadyCall.again = usual  # type: ignore[method-assign]


def both(group: dist.ProcessGroup, options: dict[str, Any]) -> tuple[bool, int, int]:
    (slow, none), (fast, some) = trained(group, False, options), trained(group, True, options)
    return all(torch.equal(one, two) for one, two in zip(slow, fast, strict=True)), none, some


@pytest.mark.parametrize(
    "options",
    [{}, {"input": "global_batch"}, {"is_weighted": True}, {"transport": "put", "slice_size": 2}, {"outputs": 3}],
    ids=str,
)
def test_steady_calls_give_the_bits_of_the_slow_path(pair: Pool, options: dict[str, Any]) -> None:
    for is_equal, none, some in pair.run(both, options, timeout_s=120):
        assert is_equal
        assert none == 0
        assert some > STEPS // 2


def kept(group: dist.ProcessGroup) -> bool:
    """Keep many results, so that buffers run out on one rank earlier than on the other."""
    tables = [EmbeddingBagConfig(40, 8, f"t{i}", (name,)) for i, name in enumerate(NAMES)]
    module = ShardedEmbeddingBagCollection(tables, group=group, device=ranks.device(), outputs=3).requires_grad_(False)
    given = [batch(step, group.rank(), 20, False) for step in range(12)]
    results: list[torch.Tensor] = []
    for step, one in enumerate(given):
        results.append(module(one).values())
        if group.rank() == 1 and step % 3 == 0:
            results[step] = results[step].clone()
    again = [module(one).values().clone() for one in given]
    return all(torch.equal(one, two) for one, two in zip(results, again, strict=True))


def test_results_that_are_kept(pair: Pool) -> None:
    assert pair.run(kept, timeout_s=60) == [True, True]


def bad(group: dist.ProcessGroup) -> list[str]:
    """Call with an id out of range after steady calls. Return the warnings."""
    tables = [EmbeddingBagConfig(40, 8, f"t{i}", (name,)) for i, name in enumerate(NAMES)]
    module = ShardedEmbeddingBagCollection(tables, group=group, device=ranks.device()).requires_grad_(False)
    one = batch(1, group.rank(), 20, False)
    for _ in range(5):
        module(one)
    one.values()[3] = 77
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            module(one)
            torch.cuda.synchronize()
        module(one)
    return [str(warning.message) for warning in caught]


def test_bad_ids_of_steady_calls_are_reported(pair: Pool) -> None:
    found = pair.run(bad, timeout_s=60)
    assert any("index 77 is not in [0, 40)" in text for texts in found for text in texts)


def frames(group: dist.ProcessGroup) -> list[str]:
    """Return the functions of weft that a steady call of a global batch enters."""
    tables = [EmbeddingBagConfig(40, 8, f"t{i}", (name,)) for i, name in enumerate(NAMES)]
    module = ShardedEmbeddingBagCollection(
        tables, group=group, device=ranks.device(), input="global_batch"
    ).requires_grad_(False)
    one, entered = batch(1, 0, 40, False), list[str]()
    for _ in range(5):
        module(one)

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "weft" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    module(one)
    sys.setprofile(None)
    return entered


def test_a_steady_call_enters_few_functions(pair: Pool) -> None:
    for entered in pair.run(frames, timeout_s=60):
        looks = [name for name in entered if name.endswith("look") or name == "_Look.has_begun"]
        assert len(entered) - len(looks) <= 12, entered
