"""Memory-order faults that x86 hides: the signals and fences of csrc/ on a modelled machine with all reorderings that
C++ allows.

x86 always orders stores as with a release, cache-bypassing stores become visible in time, and a thread that nobody woke
checks again after 20 ms. So tests on x86 cannot find a missing fence. `memory_order/model.hpp` replaces atomics,
fences, futexes and threads. The programs beside it run the unchanged sources of csrc/ on this model.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

MODEL = Path(__file__).with_name("memory_order")


def run(program: str, folder: Path) -> list[str]:
    """Return the lines that the program prints, one per scene. The program ends with an error at the first scene that
    fails.
    """
    compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-Og", "-w", "-pthread"]
    built = subprocess.run(
        [*compiler, "-I", MODEL, "-include", MODEL / "model.hpp", MODEL / f"{program}.cpp", "-o", folder / program],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([folder / program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()


def test_waits_end_as_they_should_in_every_order(tmp_path: Path) -> None:
    orders = {
        name: int(count)
        for name, count in (re.fullmatch(r"(.*): (\d+) orders", s).groups() for s in run("signals", tmp_path))
    }
    assert len(orders) == 9
    assert orders["the counter is reached, then the group fails"] > 1000


def test_ranks_read_payloads_of_their_exchange_in_every_order(tmp_path: Path) -> None:
    orders = [int(line.partition(": ")[2].split()[0]) for line in run("exchange", tmp_path)]
    assert len(orders) == 3
    assert min(orders) > 10


def test_what_is_stored_for_a_peer_is_ordered_before_its_reads(tmp_path: Path) -> None:
    assert run("copies", tmp_path) == [
        "direct", "direct, streamed", "put", "put, rows not aligned", "put, streamed", "copies of rows",
    ]  # fmt: skip
