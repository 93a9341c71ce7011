"""First calls of operators inside torch.compile, on ranks that have not used the operators before, or of which only one
has. Every rank must get one graph.

The two processes do not come from a pool, because a pool's workers have imported all operators.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import sys
    import torch, torch.distributed as dist
    import weft

    rank, directory = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", store=dist.FileStore(directory + "/store", 2), rank=rank, world_size=2)
    group, splits = dist.group.WORLD, torch.tensor([2, 2])

    def sequence(x, w):
        _, (y,) = weft.all_gather_matmul(x, [w], 0, group, return_A=False)
        return weft.matmul_reduce_scatter(y.relu(), w.t(), "sum", 0, group)

    def whole(x, w):
        y = weft.matmul_all_gather(x, w[:, :4].contiguous(), -1, group)
        return weft.matmul_all_reduce(y.relu(), w.t(), group)

    def experts(x, w):
        y = weft.all_to_all_matmul(x, w[None], splits, max_rows=8)
        return weft.matmul_all_to_all(y[:4].relu(), w.t()[None], torch.tensor([[2], [2]]), splits, rows=4)

    def fp8(x, w):
        f8, one = torch.float8_e4m3fn, torch.ones(())
        a, b = torch.ones(4, 16).to(f8), torch.ones(16, 16).to(f8).t()
        _, (y,) = weft.all_gather_scaled_matmul(a, [b], one, [one], 0, group, return_A=False)
        z = weft.scaled_matmul_reduce_scatter(y.to(f8), b, one, one, "sum", 0, None, group)
        return z.sum() + (x @ w).sum()

    x, w = (torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)), torch.randn(8, 8))
    for call, on_one_rank in [
        (sequence, []), (whole, ["matmul_all_reduce"]), (experts, ["matmul_all_to_all"]), (fp8, []),
    ]:
        for name in on_one_rank:
            assert f"weft.ops.{name}" not in sys.modules, name
            if rank == 0:
                getattr(weft, name)
        grads = []
        for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
            leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
            y = function(*leaves)
            grads.append([y, *torch.autograd.grad(y.sum(), leaves)])
        torch.testing.assert_close(*grads)
    print("compiled")
"""


@pytest.mark.slow
def test_operators_compile_when_they_are_first_used(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "WEFT_DEADLINE_S": "100", "WEFT_QUIET": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(rank), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [text.splitlines()[-1:] for text in said] == [["compiled"]] * 2, "\n".join(said)
