"""Two pretended hosts on this machine: network namespaces with different host names, and a link between them.

Both have this machine's boot id, memory and clock. weft tells them apart by their namespaces. This needs root or user
namespaces; `missing` gives the reason if it is impossible.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HOSTS = ("alpha", "beta")
INTERFACE = "weft0"
ADDRESSES = ("10.29.0.1", "10.29.0.2")
ADDRESSES_6 = ("fd29::1", "fd29::2")
MTU = 60_000  # of a delayed link: a process passes each packet
ROOT = Path(__file__).parents[2]


class TwoHosts:
    """The two namespaces, each kept alive by a sleeping process. Use it as a context manager.

    delay_s: the time that each packet takes from one host to the other, in seconds, beside the time for its bytes. A process
        delays the packets, and uses a part of a core (`delayed_link.py`).
    ipv6: True to give the hosts IPv6 addresses only.
    """

    relay_share = 0.0
    """The part of a core that delaying packets has used, when the context has ended."""

    def __init__(self, delay_s: float = 0.0, ipv6: bool = False) -> None:
        self._delay_s = delay_s
        self.addresses = ADDRESSES_6 if ipv6 else ADDRESSES
        self._relay: subprocess.Popen[str] | None = None
        self._keepers: list[subprocess.Popen[bytes]] = []
        self._is_root = os.geteuid() == 0

    def __enter__(self) -> TwoHosts:
        try:
            user = [] if self._is_root else ["--user", "--map-root-user"]
            self._keep(["unshare", *user, "--net", "--uts"])
            self._keep([*self._inside(0), "unshare", "--net", "--uts"])
            self._connect()
            for host, (name, address) in enumerate(zip(HOSTS, self.addresses, strict=True)):
                self._do(host, "hostname", name)
                self._do(host, "ip", "link", "set", "lo", "up")
                subnet = ["/64", "nodad"] if ":" in address else ["/24"]  # the kernel need not look for duplicates
                self._do(host, "ip", "address", "add", f"{address}{subnet[0]}", "dev", INTERFACE, *subnet[1:])
                self.link(host, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._relay is not None:
            said, _ = self._relay.communicate(timeout=10)
            with contextlib.suppress(ValueError):  # it has failed before it relayed
                self.relay_share = float(said)
        for keeper in self._keepers:
            keeper.kill()
            keeper.wait()

    def _connect(self) -> None:
        pids = [str(keeper.pid) for keeper in self._keepers]
        if not self._delay_s:
            self._do(0, "ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", pids[1])
            return
        user = [] if self._is_root else ["nsenter", "--target", pids[0], "--user", "--preserve-credentials"]
        relay = [sys.executable, Path(__file__).with_name("delayed_link.py"), *pids, INTERFACE, str(self._delay_s)]
        self._relay = subprocess.Popen(
            [*user, *relay], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._relay.stdout is not None
        if (said := self._relay.stdout.readline()) != "ready\n":
            raise OSError(f"{said}{self._relay.stdout.read()}".strip().splitlines()[-1])
        for host in range(len(HOSTS)):
            self._do(host, "ip", "link", "set", INTERFACE, "mtu", str(MTU))

    def link(self, host: int, state: str) -> None:
        """Set a host's end of the link "up" or "down"."""
        self._do(host, "ip", "link", "set", INTERFACE, state)

    def limit(self, rate: str) -> None:
        """Limit the rate of both directions of the link, such as "1gbit". Raises OSError if the kernel has no `tbf`."""
        for host in range(len(HOSTS)):
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            self._do(host, "tc", "qdisc", "replace", "dev", INTERFACE, "root", *shape)

    def lose_packets(self) -> None:
        """Limit the rate to 200 Mbit/s, with a short queue. The link drops packets when the queue is full."""
        for host in range(len(HOSTS)):
            shape = ["tbf", "rate", "200mbit", "burst", "32kb", "limit", "64kb"]
            self._do(host, "tc", "qdisc", "replace", "dev", INTERFACE, "root", *shape)

    def lost_packets(self) -> int:
        """Return the number of packets that both ends of the link have dropped, as `tc` counts them."""
        texts = (self._do(host, "tc", "-s", "qdisc", "show", "dev", INTERFACE) for host in range(len(HOSTS)))
        return sum(int(dropped) for text in texts for dropped in re.findall(r"dropped (\d+)", text))

    def start(self, host: int, command: Sequence[str | Path], **environment: str) -> subprocess.Popen[str]:
        """Start a command on a host. Its output and errors are read as one text stream."""
        known = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", **environment}
        known["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), known.get("PYTHONPATH")]))
        return subprocess.Popen(
            [*self._inside(host), *command], cwd=ROOT, env=known, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def torchrun(
        self, ranks: int | Sequence[int], command: Sequence[str | Path], each: Sequence[dict[str, str]] = ({}, {}),
        **environment: str,
    ) -> list[subprocess.Popen[str]]:  # fmt: skip
        """Start `torchrun` on both hosts.

        ranks: the number of ranks on each host, as one number or two. each: more environment variables of each host.
        """
        port = str(free_port())
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        meet = ["--master-addr", self.addresses[0], "--master-port", port]
        started = []
        for host, more in enumerate(each):
            count = str(ranks if isinstance(ranks, int) else ranks[host])
            given = [*launch, "--nproc-per-node", count, "--node-rank", str(host), *meet, *command]
            started.append(self.start(host, given, **environment, **more))
        return started

    def shorten_packets(self, host: int, mtu: int) -> None:
        """Limit the packets of one end of the link to `mtu` bytes."""
        self._do(host, "ip", "link", "set", INTERFACE, "mtu", str(mtu))

    def _keep(self, command: list[str]) -> None:
        self._keepers.append(subprocess.Popen([*command, "sleep", "600"], stderr=subprocess.PIPE))
        keeper, known = self._keepers[-1], ["self", *(other.pid for other in self._keepers[:-1])]
        others = [os.readlink(f"/proc/{pid}/ns/net") for pid in known]
        until = time.monotonic() + 5
        while keeper.poll() is None and time.monotonic() < until:
            name = Path(f"/proc/{keeper.pid}/comm").read_text().strip()
            if name == "sleep" and os.readlink(f"/proc/{keeper.pid}/ns/net") not in others:
                return
            time.sleep(0.005)
        keeper.kill()
        assert keeper.stderr is not None
        raise OSError(keeper.stderr.read().decode().strip() or "no namespace was made")

    def _inside(self, host: int) -> list[str]:
        user = [] if self._is_root else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._keepers[host].pid), *user, "--net", "--uts"]

    def _do(self, host: int, *command: str) -> str:
        """Run a command on a host. Return its output."""
        found = subprocess.run([*self._inside(host), *command], capture_output=True, text=True)
        if found.returncode:
            raise OSError(f"{' '.join(command)}: {found.stderr.strip()}")
        return found.stdout


def free_port() -> int:
    # In this process's namespace; the namespaces of a test are new, so the port is free there too.
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@functools.cache
def missing() -> str:
    """Return the reason why this machine cannot pretend to be two hosts; "" if it can."""
    if absent := [name for name in ("unshare", "nsenter", "ip", "hostname") if shutil.which(name) is None]:
        return f"no {', '.join(absent)} on this machine"
    try:
        with TwoHosts():
            return ""
    except OSError as error:
        return f"network namespaces are not allowed here: {error}"
