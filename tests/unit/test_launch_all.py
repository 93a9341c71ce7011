"""Several kernels in one native call (`weft.runtime.cuda.direct.launch_all`), against a small driver of our own (`fake_cuda`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import COMPILER, Driver, compiled

from weft import _core, env

pytest.importorskip("triton", reason="Triton is not installed here: it compiles the kernels")
if env.triton_interpreted():
    pytest.skip("TRITON_INTERPRET=1: the interpreter has no handles", allow_module_level=True)

from weft.runtime.cuda import direct

TYPES = {0: {"a": "*fp32", "b": "*i64", "n": "i32"}, 1: {"a": "*fp32"}}
"""The parameters of the driver's kernels."""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    if COMPILER is None:
        pytest.skip("no C compiler (cc, gcc, clang) to build the fake driver with")
    driver = compiled(tmp_path)

    def loaded(kernel: int, warps: int, constants: Any, arguments: Any, device: Any) -> Any:
        assert all(isinstance(one, int | torch.Tensor) for one in arguments)
        metadata = SimpleNamespace(num_warps=warps, shared=16)
        return SimpleNamespace(
            function=driver.handle(kernel), metadata=metadata, src=SimpleNamespace(signature=TYPES[kernel])
        )

    native = SimpleNamespace(StreamProgram=partial(_core.StreamProgram, library=driver.path))
    monkeypatch.setattr(direct, "_core", native)
    monkeypatch.setattr(direct, "_compiled", loaded)
    monkeypatch.setattr(direct, "_programs", direct._Programs())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return driver


def test_kernels_are_compiled_once_and_launched_in_order(driver: Driver) -> None:
    asked: list[str] = []

    def kernels() -> list[direct.Kernel]:
        asked.append("kernels")
        return [direct.Kernel(0, 4, {}), direct.Kernel(1, 1, {})]

    def calls(of: int, are_tensors: bool) -> list[direct.Call]:
        asked.append("tensors" if are_tensors else "addresses")
        one, two = [torch.empty(4), torch.empty(4)] if are_tensors else [16 * of, 32 * of]
        return [((of, 2), (one, two, 5 + of)), ((1, 1), (two,))]

    for of in (3, 4):
        direct.launch_all(("key",), kernels, partial(calls, of))
        launches = [found for found in driver.calls() if found[0] == "launch"]
        assert launches == [
            ("launch", 7, driver.handle(0), of + (1 << 32), 128, 16, 16 * of, 32 * of, 5 + of, 0),
            ("launch", 7, driver.handle(1), 1, 32, 16, 32 * of, 0, 0, 0),
        ]
    assert asked == ["kernels", "tensors", "addresses", "addresses"]
    after: Any = SimpleNamespace(cuda_stream=9)
    for key in ("key", "other"):
        direct.launch_all((key,), kernels, partial(calls, 3), after)
        (record, wait, *launches) = [found for found in driver.calls() if found[0] != "create"]
        assert (record[:2], wait[:2], len(launches)) == (("record", 9), ("wait_event", 7), 2)
        assert record[2] == wait[2]  # the event
    assert asked.count("kernels") == 3


def test_kernels_that_only_triton_can_launch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch` launches a kernel if the driver does not know its parameters, and in calls without a key."""
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        direct, "launch", lambda *given, warps, **constants: launched.append((*given, warps, constants))
    )
    monkeypatch.setitem(TYPES, 1, {"a": "i32"})  # 4 bytes, but the driver says 8
    x = torch.empty(4)
    wanted = (1, (3, 1), (x,), 2, {"BLOCK": 8})
    for key in (("key",), ("key",), None):
        direct.launch_all(key, lambda: [direct.Kernel(1, 2, {"BLOCK": 8})], lambda _: [((3, 1), (x,))])
        assert launched.pop() == wanted
    assert not [found for found in driver.calls() if found[0] == "launch"]
