"""`weft.on_failure`, and continuing with the surviving ranks: each of them gets the callback once, and results on a new
group are right.

Functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import error_of

import weft
from weft import symm
from weft.errors import PeerLostError, PoisonedGroupError
from weft.launch import Pool, RankDiedError, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTICE_S = 10.0
TABLES = [weft.EmbeddingBagConfig(10, 4, f"t{i}", [f"f{i}"]) for i in range(2)]


class Heard:
    """A callback that records its arguments and its thread."""

    def __init__(self) -> None:
        self.said: list[tuple[weft.errors.WeftError, str]] = []
        self.event = threading.Event()

    def __call__(self, error: weft.errors.WeftError) -> None:
        self.said.append((error, threading.current_thread().name))
        self.event.set()


def product(group: dist.ProcessGroup) -> None:
    """Run forward and backward on whole numbers, and check that results are exact."""
    world = group.size()
    x, w = torch.full((4, 8), float(group.rank()), requires_grad=True), torch.ones(8, 3, requires_grad=True)
    _, (y,) = weft.all_gather_matmul(x, [w], 0, group)
    assert torch.equal(y, torch.arange(world).repeat_interleave(4)[:, None].expand(-1, 3) * 8.0)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 8), 3.0 * world))
    assert torch.equal(w.grad, torch.full((8, 3), 4.0 * sum(range(world))))


def experts(group: dist.ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    y = weft.all_to_all_matmul(
        torch.ones(2 * world, 8), torch.full((1, 8, 3), rank + 1.0), torch.full((world,), 2), group=group
    )
    assert torch.equal(y, torch.full((2 * world, 3), 8.0 * (rank + 1)))


def embeddings(group: dist.ProcessGroup) -> None:
    module = weft.nn.ShardedEmbeddingBagCollection(TABLES, group=group)
    module.load_full_weights({f"t{i}": torch.full((10, 4), i + 1.0) for i in range(2)})
    features = weft.KeyedJaggedTensor(
        ["f0", "f1"], torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4, dtype=torch.int64)
    )
    assert torch.equal(module(features).values(), torch.tensor([[1.0] * 4 + [2.0] * 4]).expand(2, -1))


def lose_one(group, how, folder):
    """Kill rank 1 while the others are busy. They are notified, make a new group, and call weft's operators on it."""
    heard = Heard()
    weft.on_failure(group, heard)  # registered before weft knows the group
    for use in (product, experts, embeddings):
        use(group)
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert heard.event.wait(NOTICE_S)  # the rank is not in a call
    for _ in range(2):
        assert error_of(lambda: product(group))[0] in ("PeerLostError", "PoisonedGroupError")
    rank = group.rank()
    again = Heard()
    weft.on_failure(group, again)
    if how == "new_group":
        survivors = dist.new_group([0, 2], use_local_synchronization=True)
    else:
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group("gloo", store=store, rank=(0, None, 1)[rank], world_size=2)
        survivors = dist.group.WORLD
    for use in (product, experts, embeddings):
        use(survivors)
    (error, thread), *others = heard.said
    return type(error), error.rank, str(error), thread, others, [(type(e), t) for e, t in again.said]


@pytest.mark.parametrize("how", ["new_group", "init_process_group"])
def test_the_living_are_told_and_a_group_of_theirs_works(tmp_path: Path, how: str) -> None:
    with Pool(3) as mortals:
        pid = mortals.pids()[1]
        found = mortals.run(lose_one, how, str(tmp_path), return_exceptions=True, timeout_s=60)
    assert isinstance(found[1], RankDiedError)
    for rank in (0, 2):
        assert not isinstance(found[rank], Exception), found[rank]
        kind, lost, text, thread, others, again = found[rank]
        assert (kind, lost, others) == (PeerLostError, 1, [])
        assert f"rank 1 (pid {pid}) died" in text
        assert thread == f"weft-watchdog-{rank}"
        assert again == [(PeerLostError, "MainThread")]  # the callback runs at once, because the group has failed


def tell_some(group, taken_back):
    own = dist.new_group(list(range(group.size())))
    heard, other, logged = Heard(), Heard(), []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("weft").addHandler(handler)
    weft.on_failure(own, lambda error: 1 / 0)
    (weft.on_failure(own, other))()  # registered and removed again
    weft.on_failure(own, heard)
    comm = symm.communicator(own, "cpu")
    dist.barrier(group)
    if group.rank() == 0:
        comm.poison("the table is on fire")
    assert heard.event.wait(NOTICE_S)
    logging.getLogger("weft").removeHandler(handler)
    (error, _), *more = heard.said
    return type(error), str(error), more, other.said, logged


def test_every_callback_is_told_but_those_taken_back(pool: Pool) -> None:
    for kind, text, more, of_taken_back, logged in pool.run(tell_some, None, ranks=2):
        assert kind is PoisonedGroupError
        assert text == "rank 0: the table is on fire"
        assert more == of_taken_back == []
        assert ["a callback that was registered with weft.on_failure raised an error" in line for line in logged] == [
            True
        ]


def end_in_order(group, how):
    own = dist.new_group(list(range(group.size())))
    heard = Heard()
    weft.on_failure(own, heard)
    comm = symm.communicator(own, "cpu")
    comm.all_gather(None, what="all are here")
    if how == "close":
        comm.close()
    else:
        dist.destroy_process_group(own)
        del own
    dist.barrier(group)
    time.sleep(0.2)
    return heard.said


@pytest.mark.parametrize("how", ["close", "destroy"])
def test_an_end_in_order_is_no_failure(pool: Pool, how: str) -> None:
    assert pool.run(end_in_order, how, ranks=3) == [[], [], []]


def fail_in_set_up(group):
    """Let set-up fail before a watchdog exists: rank 1 has no thread for it."""
    own, heard, start = dist.new_group(list(range(group.size()))), Heard(), threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    weft.on_failure(own, heard)
    if group.rank() == 1:
        threading.Thread.start = fail
    try:
        error_of(lambda: symm.communicator(own, "cpu").all_gather(None))
    finally:
        threading.Thread.start = start
    assert heard.event.wait(NOTICE_S)
    return [str(error) for error, _ in heard.said]


def test_a_group_that_fails_while_it_is_set_up_has_failed(pool: Pool) -> None:
    for said in pool.run(fail_in_set_up, ranks=2):
        assert len(said) == 1
        assert "rank 1 cannot start its watchdog thread: RuntimeError" in said[0]


def no_group(group):
    return [error_of(lambda one=one: weft.on_failure(one, print)) for one in (None, "world")]


def test_it_is_for_groups(pool: Pool) -> None:
    for none, text in pool.run(no_group, ranks=1):
        assert none[0] == text[0] == "ValueError"
        assert "pass dist.group.WORLD" in none[1]
        assert "group='world' is a str: pass a torch.distributed.ProcessGroup" in text[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_the_example_trains_on_as_if_the_lost_rank_had_left(monkeypatch: pytest.MonkeyPatch, victim: int) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import survivors

    steps = 8
    results = run_ranks(3, survivors.on_a_rank, steps, victim, return_exceptions=True, timeout_s=60)
    sys.modules.pop("survivors")
    assert isinstance(results.pop(victim), RankDiedError)
    living = [rank for rank in range(3) if rank != victim]
    shards = []
    for rank in range(3):
        torch.manual_seed(rank)
        shards.append(torch.randn(survivors.ROWS, survivors.WIDTH).double())
    for ranks, found, story in results:
        assert ranks == living
        said = re.match(rf"rank {victim} was lost in step (\d+), and ranks \[\d, \d\] went on; loss", story)
        assert said, story
        assert int(said[1]) in (steps // 2 - 1, steps // 2)  # a surviving rank may not have finished the previous step
        w = torch.ones(survivors.WIDTH, survivors.OUT, dtype=torch.float64)
        for step in range(1, steps + 1):
            x = torch.cat(shards if step < int(said[1]) else [shards[rank] for rank in living])
            w = w - survivors.RATE * 2 * x.T @ (x @ w) / (len(x) * survivors.OUT)
        torch.testing.assert_close(found.double(), w, rtol=1e-5, atol=1e-5)
