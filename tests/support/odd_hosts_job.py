"""A job that torchrun starts on two hosts: experts, GEMMs and embeddings, forward and backward, compared with one process.

The environment variable THREADS sets the number of torch's threads. Rank 0 prints "all right" at the end.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import weft

K, N, EXPERTS = 16, 24, 2


def main() -> None:
    torch.set_num_threads(int(os.environ["THREADS"]))
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    for seed in range(4):
        torch.manual_seed(seed)
        _gemms(group, 8 * (1 + seed))
        _experts(group, 4 << 3 * seed)
        _embeddings(group, 4 << 3 * seed)
    if group.rank() == 0:
        print("all right", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _gemms(group: dist.ProcessGroup, rows: int) -> None:
    world, rank = group.size(), group.rank()
    x, w = torch.randn(world, rows * world, K), torch.randn(world, K, N)
    wanted = torch.einsum("rmk,rkn->mn", x, w)
    torch.testing.assert_close(weft.matmul_all_reduce(x[rank], w[rank], group), wanted, rtol=1e-4, atol=1e-4)
    mine = weft.matmul_reduce_scatter(x[rank], w[rank], "sum", 0, group)
    torch.testing.assert_close(mine, wanted.chunk(world)[rank], rtol=1e-4, atol=1e-4)


def _experts(group: dist.ProcessGroup, most: int) -> None:
    world, rank = group.size(), group.rank()
    splits = torch.randint(most, (world, world * EXPERTS))
    tokens = [torch.randn(int(of_rank.sum()), K) for of_rank in splits]
    w, back = torch.randn(world * EXPERTS, K, N), torch.randn(world * EXPERTS, N, K)
    own = slice(rank * EXPERTS, (rank + 1) * EXPERTS)
    h, received = weft.all_to_all_matmul(tokens[rank], w[own], splits[rank], group=group, return_received=True)
    y = weft.matmul_all_to_all(h, back[own], received, splits[rank], group=group)
    wanted = torch.cat([x @ w[e] @ back[e] for e, x in enumerate(tokens[rank].split(splits[rank].tolist()))])
    torch.testing.assert_close(y, wanted, rtol=1e-3, atol=1e-3)


def _embeddings(group: dist.ProcessGroup, samples: int) -> None:
    world, rank = group.size(), group.rank()
    tables = [weft.EmbeddingBagConfig(50, 8, f"t{t}", [f"f{t}"]) for t in range(world)]
    sharding = weft.place_tables(tables, world, placement=list(range(world)))
    every, ids = torch.randn(world, 50, 8), torch.randint(50, (world, world * samples, 3))
    mine, bags = every[rank].clone().requires_grad_(), torch.arange(0, 3 * world * samples + 1, 3)
    out = weft.embedding_all_to_all([mine], (ids[rank].flatten(), bags), sharding, group=group, requires_grad=True)
    wanted = torch.cat([every[t][ids[t]].sum(1) for t in range(world)], 1).chunk(world)[rank]
    torch.testing.assert_close(out.detach(), wanted, rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad[:, 0], torch.bincount(ids[rank].flatten(), minlength=50).float())


if __name__ == "__main__":
    main()
