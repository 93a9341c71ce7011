"""A link between two network namespaces that delays every packet: a TUN device in each, and this process between them.

    python delayed_link.py PID_0 PID_1 INTERFACE SECONDS

PID_0, PID_1: processes in the two namespaces. Linux's own `tc netem delay` needs a kernel module that many kernels lack.

The process writes "ready" when both devices exist. It ends when its standard input is closed. Then it writes the share of a
core that it has used, because ranks on the same machine miss that share.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import resource
import select
import struct
import sys
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES = 1 << 16


def device(pid: int, name: str) -> int:
    """Create the TUN device `name` in the network namespace of a process. Return its file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(namespace, CLONE_NEWNET):  # os.setns is new in Python 3.12
        raise OSError(ctypes.get_errno(), f"setns to the network namespace of process {pid}")
    os.close(namespace)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def relay(devices: list[int], seconds: float) -> None:
    """Pass each packet from one device to the other after `seconds`, until standard input is closed."""
    under_way: list[collections.deque[tuple[float, bytes]]] = [collections.deque(), collections.deque()]
    poll = select.poll()
    for descriptor in (*devices, sys.stdin.fileno()):
        poll.register(descriptor, select.POLLIN)
    while True:
        dues = [packets[0][0] for packets in under_way if packets]
        left_s = min(dues) - time.monotonic() if dues else 1.0
        ready = [descriptor for descriptor, _ in poll.poll(max(0.0, left_s * 1e3))]
        if sys.stdin.fileno() in ready:
            return
        for tun, packets in zip(devices, under_way, strict=True):
            if tun in ready:
                packets.append((time.monotonic() + seconds, os.read(tun, PACKET_BYTES)))
        for tun, packets in zip(reversed(devices), under_way, strict=True):
            while packets and packets[0][0] <= time.monotonic():
                _write(tun, packets.popleft()[1])


def _write(tun: int, packet: bytes) -> None:
    try:
        os.write(tun, packet)
    except OSError:  # the device is down, or its queue is full: the packet is lost, as on a network
        return


def main() -> None:
    pids, name, seconds = [int(pid) for pid in sys.argv[1:3]], sys.argv[3], float(sys.argv[4])
    devices = [device(pid, name) for pid in pids]
    print("ready", flush=True)
    start = time.monotonic()
    relay(devices, seconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print((used.ru_utime + used.ru_stime) / (time.monotonic() - start), flush=True)


if __name__ == "__main__":
    main()
