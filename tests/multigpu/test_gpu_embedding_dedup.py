"""The memory from which `dedup=True` pools distinct rows, if calls run on several streams."""

from __future__ import annotations

import gpu_ranks as ranks
import torch
import torch.distributed as dist

import weft
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

pytestmark = ranks.MARKS
ROWS, SAMPLES, LENGTH = 5000, 512, 40


def batch(seed: int) -> weft.KeyedJaggedTensor:
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS, (SAMPLES * LENGTH,), generator=made).to(ranks.device())
    return weft.KeyedJaggedTensor(["f"], ids, lengths=torch.full((SAMPLES,), LENGTH, device=ranks.device()))


def on_streams(group: dist.ProcessGroup) -> tuple[int, int]:
    """Call a module on streams in turn, without waiting for them. Return its buffers, and the largest size of one table."""
    tables = [weft.EmbeddingBagConfig(ROWS, 128, "t", ["f"])]
    module = ShardedEmbeddingBagCollection(tables, group=group, dedup=True)
    batches = [batch(seed) for seed in range(8)]
    with torch.no_grad():
        wanted = [module(one).values().clone() for one in batches]
        torch.cuda.synchronize()
        streams, found = [torch.cuda.Stream() for _ in range(4)], []
        for number, one in enumerate(batches):
            with torch.cuda.stream(streams[number % len(streams)]):
                found.append(module(one).values())
    torch.cuda.synchronize()
    for one, right in zip(found, wanted, strict=True):
        assert torch.equal(one, right)
    return module.memory().buffers, 2 * ROWS * 128 * 4


def test_streams_share_the_memory_for_distinct_rows(pair: Pool) -> None:
    for buffers, most in pair.run(on_streams, timeout_s=60):
        assert 0 < buffers <= most
