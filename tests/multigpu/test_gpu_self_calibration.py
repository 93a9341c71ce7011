"""Test self-calibration on two GPUs whose machine file is hidden. Check its duration, its results, and that ranks
agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gpu_ranks
import pytest
import torch
from support import self_calibration_ranks as ranks

from weft.launch import Pool

pytestmark = [
    *gpu_ranks.MARKS,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="ranks that share a GPU do not calibrate: two are needed"),
]
BOUND_S = 10.0
"""A bound that includes the compilation of kernels. The measurement itself ends after 2 s."""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Return a pool for this test only. Its ranks read WEFT_CACHE_DIR, the folder of measured numbers, when they start."""
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("GPU 0 cannot reach GPU 1's memory: weft doctor says more")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("WEFT_DEADLINE_S", "60")
    monkeypatch.delenv("WEFT_SELF_CALIBRATION", raising=False)
    with Pool(2, backend="nccl") as workers:
        yield workers


def test_two_gpus_measure_themselves(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(ranks.on_gpus, timeout_s=200)
    found = first["found"]
    print(f"self-calibration took {first['took_s']:.2f} s, {first['again_s']:.3f} s from the file: {found}")
    print(f"dropped: {first['dropped']}; {first['note']}")
    assert found is not None
    assert second["found"] == first["later"] == second["later"] == found
    assert second["model"] == first["model"]
    assert len(list(tmp_path.glob("self-calibration-*.json"))) == 1
    numbers = {
        name: getattr(found, name) for name in ("copy_bytes_per_us", "put_bytes_per_us", "get_bytes_per_us",
                                                 "signal_remote_us", "signal_local_us", "host_step_us")
    }  # fmt: skip
    assert None not in numbers.values(), "the budget ended it early"
    assert None not in [us for *_, us in found.gemms]
    assert max(first["took_s"], second["took_s"]) < BOUND_S
    assert max(first["again_s"], second["again_s"]) < 1.0
    for name, of_file in (first["file"] or {}).items():
        large = max(found.gemms)
        measured = numbers[name] if name != "gemm" else large[-1] * (8192 / large[0]) ** 3
        assert of_file / 2 <= measured <= 2 * of_file, (name, measured, of_file)
