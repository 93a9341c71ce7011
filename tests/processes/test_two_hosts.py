"""Two hosts on one machine: network namespaces with a link between them, and ranks in both.

The machine must allow namespaces, as root or in user namespaces. `test_hosts.py` only pretends hosts, and needs no
namespaces.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import examples_job, two_hosts
from support.two_hosts import ADDRESSES, TwoHosts

from weft import plan
from weft.launch import Pool

RANKS = 2  # ranks on each host
END_S = 120.0
MOST_S = 60.0

pytestmark = pytest.mark.skipif(bool(two_hosts.missing()), reason=two_hosts.missing())


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as made:
        yield made


# -- links


@pytest.mark.slow
def test_a_delayed_link_has_the_round_trip_and_the_rate_that_are_set(tmp_path: Path) -> None:
    delay_s = 0.005
    with TwoHosts(delay_s) as hosts:
        hosts.limit("400mbit")
        launchers = hosts.torchrun(1, ["-m", "weft.cli", "doctor", "--group"], WEFT_CACHE_DIR=str(tmp_path))
        said = [launcher.communicate(timeout=END_S)[0] for launcher in launchers]
    match = re.search(r"\n  alpha - beta  (\d+) MB/s, round trip (\d+) us\n", said[0])
    assert match, said
    rate, trip_us = map(int, match.groups())
    assert trip_us >= 2e6 * delay_s
    assert 0 < rate <= 60
    assert hosts.relay_share > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "ipv6", "mtus", "threads"),
    [((2, 2), True, (1500, 1500), (1, 3)), ((1, 3), False, (576, 9000), (2, 1))],
    ids=["IPv6 only", "unequal hosts"],
)
def test_hosts_that_differ_give_right_results(
    tmp_path: Path, ranks: tuple[int, int], ipv6: bool, mtus: tuple[int, int], threads: tuple[int, int]
) -> None:
    each = [{"THREADS": str(count)} for count in threads]
    with TwoHosts(ipv6=ipv6) as hosts:
        for host, mtu in enumerate(mtus):
            hosts.shorten_packets(host, mtu)
        hosts.lose_packets()  # from the first call on
        job = [Path(two_hosts.__file__).with_name("odd_hosts_job.py")]
        launchers = hosts.torchrun(ranks, job, each, WEFT_CACHE_DIR=str(tmp_path))
        said = [launcher.communicate(timeout=END_S)[0] for launcher in launchers]
        assert "all right" in said[0], "\n".join(said)
        assert not any(launcher.returncode for launcher in launchers)
        assert hosts.lost_packets() > 0


# -- jobs


def on_one_host(group):
    with plan.use("serial"):
        return examples_job.losses()


@pytest.mark.slow
def test_examples_have_the_losses_of_one_host(pool: Pool, hosts: TwoHosts, tmp_path: Path) -> None:
    launchers = hosts.torchrun(RANKS, ["tests/support/examples_job.py", tmp_path / "found.json"])
    wanted = pool.run(on_one_host, ranks=2 * RANKS, timeout_s=END_S)[0]
    for launcher in launchers:
        said, _ = launcher.communicate(timeout=END_S)
        assert launcher.returncode == 0, said
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: len(losses) for name, losses in wanted.items()} == {"tp_transformer": 4, "moe": 2, "dlrm": 4}
    for name, losses in wanted.items():
        assert found["losses"][name] == pytest.approx(losses, rel=1e-4), name
    alpha, beta = [True, True, False, False], [False, False, True, True]
    assert [rank[:2] for rank in found["ranks"]] == [["alpha", alpha]] * 2 + [["beta", beta]] * 2
    assert [warnings for *_, warnings in found["ranks"]] == [[]] * 4
    once = RANKS * 4096 // (2 * RANKS) * 512 * 4  # bytes of the rows that the other host owns
    for schedule, sent in found["sent"].items():
        times = 3 if schedule == "serial" else 1  # gloo's reduce-scatter is an all-reduce in a ring
        assert times * once < sent < 1.1 * times * once, (schedule, sent)
    doctor = found["doctor"]
    assert doctor.startswith("4 ranks on 2 hosts\n\nalpha:\n  rank 0  pid ")
    assert "\nbeta:\n  rank 2  pid " in doctor
    assert "\nshared memory: pairs 0-1, 2-3\n" in doctor
    assert "\ngloo: pairs 0-2, 1-2, 0-3, 1-3\n" in doctor
    assert re.search(r"\n  alpha - beta  [1-9]\d* MB/s, round trip [1-9]\d* us\n", doctor)
    assert re.search(
        r"\nA rendezvous of all ranks takes \d+ us \(median of 20, through shared memory and gloo\)", doctor
    )
    assert "\nData cross between hosts along the rails 0-2; 1-3 " in doctor


# -- faults


class Ranks:
    """A group whose first ranks are on host alpha, and the others on host beta."""

    def __init__(self, hosts: TwoHosts, at: tuple[int, ...]) -> None:
        world, port = len(at), str(two_hosts.free_port())
        script = [sys.executable, "tests/support/rank_on_host.py"]
        self._ranks = [
            hosts.start(host, [*script, str(rank), str(world), ADDRESSES[0], port]) for rank, host in enumerate(at)
        ]
        self._timer = threading.Timer(MOST_S, self.__exit__)  # the test fails if a rank hangs
        self._timer.start()
        self.pids = [int(self.said(rank, "pid ").split()[1]) for rank in range(world)]

    def ask(self, line: str, *ranks: int) -> None:
        for rank in ranks:
            stdin = self._ranks[rank].stdin
            assert stdin is not None
            stdin.write(f"{line}\n")
            stdin.flush()

    def said(self, rank: int, *starts: str) -> str:
        """Return the next line of a rank that begins with one of `starts`. Other lines are torch's warnings."""
        stdout, before = self._ranks[rank].stdout, []
        assert stdout is not None
        while line := stdout.readline():
            if line.startswith(starts):
                return line.strip()
            before.append(line)
        raise AssertionError(f"rank {rank} ended: {''.join(before)}")

    def answers(self, *ranks: int) -> list[str]:
        return [self.said(rank, "sum ", "DeadlineError", "PeerLost", "Poisoned", "Weft") for rank in ranks]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        for rank in self._ranks:
            rank.kill()


def test_lost_packets_a_cut_link_a_dead_rank_and_a_link_cut_for_ever(hosts: TwoHosts) -> None:
    """The same three ranks meet one fault after the other: rank 0 on alpha, ranks 1 and 2 on beta."""
    with Ranks(hosts, (0, 1, 1)) as ranks:
        ranks.ask("all 60", 0, 1, 2)
        ranks.ask("two 60", 0, 1)
        assert ranks.answers(0, 1, 2) == ["sum [6.0]"] * 3
        assert ranks.answers(0, 1) == ["sum [3.0]"] * 2

        try:
            hosts.lose_packets()
        except OSError:  # this kernel cannot limit rates
            lost = None
        else:
            before = hosts.lost_packets()
            for _ in range(3):
                ranks.ask("all 60 50000", 0, 1, 2)  # 0.8 MB
                assert ranks.answers(0, 1, 2) == ["sum [6.0]"] * 3
            lost = hosts.lost_packets() - before
        assert lost != 0

        hosts.link(1, "down")  # a link that is cut for some seconds: the call goes on
        ranks.ask("all 60", 0, 1, 2)
        time.sleep(3.0)
        hosts.link(1, "up")
        assert ranks.answers(0, 1, 2) == ["sum [6.0]"] * 3

        os.kill(ranks.pids[2], signal.SIGKILL)  # a rank that dies on another host
        ranks.ask("all 60", 0, 1)
        for said in ranks.answers(0, 1):
            died = rf"PeerLostError: rank 2 \(pid {ranks.pids[2]} on host beta\) died: its connection ended without a goodbye"
            assert re.match(died, said), said

        hosts.link(0, "down")  # a link that stays cut
        start = time.monotonic()
        ranks.ask("two 2", 0, 1)
        here, there = ranks.answers(0, 1)
        assert re.match(
            rf"DeadlineError: rank 0 waited 2 s for .* from rank 1 \(pid {ranks.pids[1]} on host beta\)", here
        )
        assert re.match(
            rf"DeadlineError: rank 1 waited 2 s for .* from rank 0 \(pid {ranks.pids[0]} on host alpha\)", there
        )
        assert time.monotonic() - start < 30
