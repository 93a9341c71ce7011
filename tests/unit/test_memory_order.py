"""Memory-order faults that x86 hides: signals and fences of csrc/ on a modelled machine with all reorderings that C++ allows.

On x86 a release costs nothing and is always there, stores that bypass the caches are seen in time, and a sleeper that nobody
woke looks again after 20 ms. So no run here shows a fence that is missing. `memory_order/model.hpp` takes the place of
atomics, fences, futexes and threads; the programs beside it run the sources of csrc/ on it, unchanged.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

MODEL = Path(__file__).with_name("memory_order")


def run(program: str, folder: Path) -> list[str]:
    """The lines that the program prints, one a scene; it ends with an error at the first in which something goes wrong."""
    compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-w", "-pthread"]
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


def test_what_is_stored_for_a_peer_is_ordered_before_its_reads(tmp_path: Path) -> None:
    assert run("copies", tmp_path) == [
        "direct", "direct, streamed", "put", "put, rows not aligned", "put, streamed", "copies of rows",
    ]  # fmt: skip
