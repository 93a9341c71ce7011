"""Dispatch and combine in turn, with another number of tokens in each call. The ranks run `many_sizes`."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import weft
from weft.operator import calls

K, N, EXPERTS = 16, 24, 2


def many_sizes(group: dist.ProcessGroup, kind: str, wanted: bool, sizes: list[int]) -> list[int]:
    """Dispatch and combine batches of `sizes` tokens, and check results and gradients against float64.

    Ranks have different numbers of tokens, and each call has fresh data. kind: "cpu" or "cuda". wanted: True if gradients are
    wanted. Return, for each batch, the number of forward calls that took the slow path.
    """
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    rank, world = group.rank(), group.size()
    own, draw, slow = dist.new_group(list(range(world))), random.Random(rank), []
    shared = torch.Generator().manual_seed(7)
    first, last = (torch.randn(world * EXPERTS, *size, generator=shared) for size in ((K, N), (N, K)))
    mine = slice(rank * EXPERTS, (rank + 1) * EXPERTS)
    weights = [w[mine].to(device).requires_grad_(wanted) for w in (first, last)]
    made: Any = calls._made_now
    for size in sizes:
        experts = torch.randint(world * EXPERTS, (size + draw.randrange(3) * rank,)).sort().values
        splits = torch.bincount(experts, minlength=world * EXPERTS)
        x = torch.randn(len(experts), K)
        tokens, on_device = x.to(device).requires_grad_(wanted), splits.to(device)
        with mock.patch.object(calls, "_made_now", mock.Mock(side_effect=made)) as slowly:
            h, received = weft.all_to_all_matmul(
                tokens, weights[0], on_device, group=own, return_received=True, capacity=max(sizes) + 2 * world
            )
            y = weft.matmul_all_to_all(h, weights[1], received, on_device, group=own, capacity=max(sizes) + 2 * world)
            slow.append(slowly.call_count)
        exact = x.detach().double().requires_grad_(wanted)
        expected = torch.einsum("tk,tkn,tnj->tj", exact, first.double()[experts], last.double()[experts])
        torch.testing.assert_close(y.double().cpu(), expected, rtol=1e-2, atol=1e-2)
        if wanted:
            grad = torch.randn(y.shape)
            y.backward(grad.to(device))
            expected.backward(grad.double())
            assert tokens.grad is not None
            assert exact.grad is not None
            torch.testing.assert_close(tokens.grad.double().cpu(), exact.grad, rtol=1e-2, atol=1e-1)
    return slow
