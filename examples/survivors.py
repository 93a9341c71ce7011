"""Recovery from a lost rank: one rank is killed, and the others form a new group and continue training.


    python examples/survivors.py                    # 3 CPU processes; rank 1 is killed in the middle
    python examples/survivors.py --ranks 4 --victim 0

To recover, a program does three things. It registers a callback (`weft.on_failure`), makes a new group of the living
ranks, and returns to the last step that all living ranks have finished. (When a rank dies, one survivor may have
received all of its data for a step, and another survivor not. So survivors may be a step apart.) Modules belong to a
group, so the program makes new modules. The first call on the new group allocates its memory.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal

import torch
import torch.distributed as dist

import weft
from weft.errors import PeerLostError, WeftError
from weft.launch import run_ranks

ROWS, WIDTH, OUT, RATE = 64, 32, 16, 0.05


def train_step(group: dist.ProcessGroup, x_shard: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Train w by one step towards x @ w = 0, where x has the rows of all ranks of `group`. Return the new weights, and the loss
    before the step.
    """
    w = w.clone().requires_grad_()
    _, (y,) = weft.all_gather_matmul(x_shard, [w], 0, group, return_A=False)
    loss = y.square().mean()
    loss.backward()
    assert w.grad is not None
    return (w - RATE * w.grad).detach(), loss.item()


def on_a_rank(rank: int, world: int, steps: int, victim: int) -> tuple[list[int], torch.Tensor, str]:
    """Return (the ranks that are left at the end, the weights, a description)."""
    group, living = dist.group.WORLD, list(range(world))
    assert group is not None
    failures: queue.SimpleQueue[WeftError] = queue.SimpleQueue()
    weft.on_failure(group, failures.put)  # runs on weft's own thread: it only stores the failure

    torch.manual_seed(rank)
    x_shard = torch.randn(ROWS, WIDTH)
    weights = [torch.ones(WIDTH, OUT)]  # the weights after each step; a real program saves checkpoints
    losses: list[float] = []
    story = "nobody was lost"
    while len(weights) <= steps:
        if rank == victim and len(weights) == steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            w, loss = train_step(group, x_shard, weights[-1])
        except WeftError:
            failure = failures.get(timeout=10)
            if not isinstance(failure, PeerLostError) or failure.rank is None:
                raise  # no rank is lost, so a new group would meet the same error
            lost = living.pop(failure.rank)  # failure.rank is a rank of the group
            group = dist.new_group(living, use_local_synchronization=True)
            weft.on_failure(group, failures.put)
            done = torch.tensor(len(weights))
            dist.all_reduce(done, dist.ReduceOp.MIN, group=group)  # a survivor may be a step ahead
            del weights[int(done) :], losses[int(done) - 1 :]
            story = f"rank {lost} was lost in step {int(done)}, and ranks {living} went on"
            continue
        weights.append(w)
        losses.append(loss)
    return living, weights[-1], f"{story}; loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def main() -> None:
    about, _, why = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=why, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=3, help="processes on this machine (default: %(default)s)")
    parser.add_argument("--victim", type=int, default=1, help="the rank that is killed (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps of training (default: %(default)s)")
    given = parser.parse_args()
    if not 0 <= given.victim < given.ranks or given.ranks < 2:
        parser.error(f"--victim {given.victim} must be one of at least two ranks: --ranks is {given.ranks}")
    if given.steps < 1:
        parser.error(f"--steps {given.steps} must be at least 1")
    results = run_ranks(given.ranks, on_a_rank, given.steps, given.victim, return_exceptions=True)
    for rank, result in enumerate(results):
        print(f"rank {rank}: {result if isinstance(result, Exception) else result[2]}")


if __name__ == "__main__":
    main()
