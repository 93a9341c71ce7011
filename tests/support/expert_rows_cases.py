"""Cases of the kernels of an MoE layer, against torch's functions: on CPU under Triton's interpreter, and on a GPU."""

from __future__ import annotations

import torch


def rows(tokens: int, top_k: int, experts: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    from weft.runtime.cuda import expert_order, expert_rows

    torch.manual_seed(tokens + width)
    chosen = torch.randint(experts, (tokens, top_k), device=device) // 2 * 2  # odd experts have no rows
    order, place, splits = expert_order.chosen_order(chosen, experts)
    assert torch.equal(order, chosen.flatten().sort(stable=True).indices)
    assert torch.equal(place[order], torch.arange(len(order), device=device))
    assert torch.equal(splits, torch.bincount(chosen.flatten(), minlength=experts))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    x, h, rows, weights = drawn(tokens, width), drawn(9, 2 * width), drawn(tokens * top_k, width), drawn(tokens, top_k)
    assert torch.equal(expert_rows.gathered(x, order, top_k), x[order // top_k])
    _close(expert_rows.summed(rows, place, None, top_k), rows[place].view(tokens, top_k, width).sum(1), dtype)

    gate, up = h.chunk(2, dim=1)
    wanted, grad = torch.nn.functional.silu(gate) * up, torch.randn(9, width, device=device).to(dtype)
    _close(expert_rows.gate(h), wanted, dtype)
    wanted.backward(grad)
    _close(expert_rows.gate_grad(h, grad), h.grad, dtype)

    wanted, grad = (
        (rows[place].view(tokens, top_k, width) * weights.unsqueeze(2)).sum(1),
        torch.randn(tokens, width, device=device).to(dtype),
    )
    _close(expert_rows.summed(rows, place, weights, top_k), wanted, dtype)
    wanted.backward(grad)
    of_rows, of_weights = expert_rows.summed_grads(grad, rows, place, weights)
    _close(of_rows, rows.grad, dtype)
    exact = (rows.double()[place].view(tokens, top_k, width) * grad.double().unsqueeze(1)).sum(2)
    _close(of_weights, exact, dtype)


def arrival(world: int, experts: int, most: int, device: str = "cpu") -> None:
    from weft.runtime.cuda.expert_order import arrival_order

    received = torch.randint(most, (world, experts), device=device) * (torch.rand(world, experts, device=device) < 0.8)
    came = int(received.sum())
    made = arrival_order(received, came)
    assert made is not None
    by_expert, by_arrival, ends = made
    of_cells = torch.arange(experts, device=device).repeat(world)
    expert = of_cells.repeat_interleave(received.flatten())  # of each row in the order of arrival
    assert torch.equal(by_expert, expert.sort(stable=True).indices)
    assert torch.equal(by_arrival[by_expert], torch.arange(came, device=device))
    assert ends.tolist() == received.sum(0).cumsum(0).tolist()


def _close(found: torch.Tensor, wanted: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Compare with one rounding more, because torch sums in another order."""
    assert wanted is not None
    assert found.dtype == dtype
    largest = float(wanted.detach().abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=2 * torch.finfo(dtype).eps * largest)
