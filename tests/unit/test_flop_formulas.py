"""FLOP formulas are registered with torch's FLOP counter whenever it is imported. weft does not import the counter."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from support.slow import slow

IMPORTED = """
    import sys
    {before}
    import torch, weft
    weft.all_gather_matmul
    assert "torch.utils.flop_counter" in sys.modules or not {before!r}
    from torch.utils.flop_counter import flop_registry
    assert torch.ops.weft.all_gather_matmul_backward in flop_registry
    weft.matmul_reduce_scatter
    assert torch.ops.weft.matmul_reduce_scatter in flop_registry
"""


@pytest.mark.parametrize(
    "before", [slow(""), slow("import torch.utils.flop_counter")], ids=["after weft", "before weft"]
)
def test_formulas_are_registered(before: str) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(IMPORTED.format(before=before))], check=True, timeout=300)
