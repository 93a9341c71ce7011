"""The examples run as their headers say, on CPU processes."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_dlrm_agrees_with_the_unsharded_model() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--device", "cpu", "--check", "--batch", "128", "--steps", "3"]
    found = subprocess.run(
        [*launcher, str(EXAMPLES / "dlrm_inference.py"), *arguments], capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 0, found.stderr
    for rank in range(2):
        assert f"rank {rank}: 4 batches agree with the unsharded model" in found.stdout
    assert "samples/s on 2 ranks" in found.stdout
