"""benchmarks/trips.py: a call runs through few files, and the compilation of a schedule for GPUs never calls back into
a higher layer.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "trips.py"


def test_trips_are_short() -> None:
    """The limits are a few files above the numbers in docs/architecture.md."""
    pytest.importorskip("triton", reason="Triton is not installed here: modelled GPUs need it")
    shown = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert shown.returncode == 0, shown.stderr
    found = re.findall(r"(.+): \d+ functions in (\d+) files of (\d+) folders, (\d+) calls back", shown.stdout)
    trips = {name: tuple(map(int, numbers)) for name, *numbers in found}
    assert len(trips) == 6, shown.stdout
    assert all(files <= 36 and folders <= 9 and back <= 12 for files, folders, back in trips.values()), trips
    assert trips["a schedule of all_gather_matmul, from its builder to GPUs"][2] == 0
