"""When ranks measure their GPUs, which rank's numbers count, and what measures them. The group is simulated in one
process; `tests/processes` has a real group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from nobodys_gpus import BASE, NAME, SIZES, SLOW, SLOW_US, Measured, Ranks, machine, made, nothing_known

from weft.errors import RefusedError
from weft.hw import machine_of
from weft.operator import self_calibrate, this_machine
from weft.operator.self_calibrate import _Stand
from weft.plan import calibrated, self_calibration
from weft.plan.calibration import Calibration
from weft.plan.machine import versions
from weft.plan.self_calibration import ProbeSizes, find, save


@pytest.fixture(autouse=True)
def _nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from nothing_known(tmp_path, monkeypatch)


def test_without_a_cache_it_is_kept_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "file"))
    ranks = Ranks()
    with pytest.warns(UserWarning, match="measured times cannot be saved in .*set WEFT_CACHE_DIR"):
        assert ranks.call(monkeypatch)
    assert calibrated(machine(), 2).source == "self-calibration"
    assert not ranks.again().call(monkeypatch).measured  # known from another group of this process


def test_it_measures_once_saves_and_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks()
    assert ranks.call(monkeypatch)
    assert not ranks.call(monkeypatch)  # the group has chosen a schedule before
    assert ranks.measured == 1
    (path,) = tmp_path.iterdir()
    assert path.name == "self-calibration-nvidia-nobody-s-1-2.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(asdict(made())))
    self_calibration._known.clear()  # as in another process
    later = Ranks()
    assert later.call(monkeypatch)
    assert later.measured == 0
    assert calibrated(machine(), 2).model == made().apply(BASE).model


def test_the_first_ranks_numbers_are_everybodys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(rank=1)
    ranks.of_first = made(1.3)
    assert ranks.call(monkeypatch)
    assert find(NAME, 2) == made(1.3)
    assert list(tmp_path.iterdir()) == []  # the first rank saves
    save(made(1.2))  # this rank knows other numbers than the first rank
    ranks = Ranks(rank=1, other=lambda mine: mine._replace(known=made(0.9), sizes=None))
    assert ranks.call(monkeypatch)
    assert ranks.measured == 0
    assert find(NAME, 2) == made(0.9)


def test_what_the_first_rank_knows_decides_whether_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    better = Ranks(rank=1, other=lambda mine: mine._replace(sizes=None))
    assert not better.call(monkeypatch)
    assert better.measured == 0
    ranks = Ranks(rank=1, other=lambda mine: mine._replace(known=None, sizes=SIZES))
    ranks.of_first = made(1.3)
    Calibration(NAME, 2, "2020-01-01", versions(), (), 3.5, 1.5).save()
    assert ranks.call(monkeypatch)  # although this rank has a calibration
    assert ranks.measured == 1


def test_nothing_is_measured_with_something_better_or_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVIDIA H200", "AMD Radeon", "Xeon, 2 cores"):
        assert not Ranks().call(monkeypatch, name).measured
    alone = Ranks(world_size=1)
    assert not alone.call(monkeypatch).said
    assert not Ranks(device=torch.device("meta")).call(monkeypatch).said
    Calibration(NAME, 2, "2020-01-01", versions(), (), 3.5, 1.5).save()
    assert not Ranks().call(monkeypatch).measured


def test_a_calibration_that_is_refused_is_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    Calibration(NAME, 2, "2020-01-01", versions(), (), 3.5, 1.5).save().write_text("{")
    assert Ranks().call(monkeypatch).measured


def test_a_broken_file_is_said_once_and_measured_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save(made(1.4))
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    with pytest.warns(UserWarning, match="the saved self-calibration is ignored: .*cannot be read") as warned:
        assert Ranks().call(monkeypatch).measured
    assert len(warned) == 1
    assert find(NAME, 2) == made()


def _unable(why: str) -> Callable[[_Stand], _Stand]:
    return lambda mine: mine._replace(unable=why)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (_unable("WEFT_SELF_CALIBRATION=0"), "rank 1: WEFT_SELF_CALIBRATION=0"),
        (_unable("memory of other ranks cannot be mapped"), "rank 1: memory of other ranks cannot be mapped"),
        (lambda mine: mine._replace(name="NVIDIA L4"), f"the GPUs differ .*rank 0: {NAME}; rank 1: NVIDIA L4"),
        (lambda mine: mine._replace(gpu=str(1 - int(mine.gpu))), "ranks share a GPU"),
    ],
)
def test_if_one_rank_cannot_measure_none_does_and_the_first_says_why(
    other: Callable[[_Stand], _Stand], message: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    ranks = Ranks(other=other)
    with pytest.warns(UserWarning, match=f"{NAME} was not self-calibrated, so weft plans with .*: {message}") as warned:
        assert not ranks.call(monkeypatch)
    assert len(warned) == 1
    assert ranks.measured == 0
    assert calibrated(machine(), 2).source == "derived"
    assert not Ranks(rank=1, other=other).call(monkeypatch)
    assert not [one for one in recwarn if one not in warned.list]  # the other ranks do not warn


def test_parts_of_gpus_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    with pytest.warns(UserWarning, match=r"ranks 0, 1: a part of a GPU \(MIG\) has no peer access"):
        assert not Ranks(other=lambda mine: mine).call(monkeypatch, name).measured
    found = machine_of(name)
    assert found is not None
    assert "its numbers are derived" in found.about


def test_off_by_the_variable_nothing_is_measured_and_nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SELF_CALIBRATION", "0")
    save(made())
    ranks = Ranks()
    assert not ranks.call(monkeypatch)
    assert ranks.measured == 0


def test_never_in_a_capture_but_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = True
    monkeypatch.setattr(self_calibrate, "is_captured", lambda device: captured)
    ranks = Ranks()
    with pytest.warns(UserWarning, match="ranks 0, 1: a CUDA graph is being captured"):
        assert not ranks.call(monkeypatch)
    assert ranks.measured == 0
    captured = False
    assert ranks.call(monkeypatch).measured


def test_ranks_without_memory_plan_by_derived_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()

    def refuses(comm: Any, sizes: ProbeSizes) -> Any:
        raise RefusedError("rank 1: OutOfMemoryError: CUDA out of memory")

    monkeypatch.setattr(ranks, "measures", refuses)
    with pytest.warns(UserWarning, match="with numbers derived from the driver: rank 1: OutOfMemoryError"):
        assert not ranks.call(monkeypatch)
    assert calibrated(machine(), 2).source == "derived"


def test_what_is_dropped_is_said_once_by_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def busy(comm: Any, sizes: ProbeSizes) -> AbstractContextManager[Any]:
        measured = Measured()
        measured.truth = made(host_step_us=SLOW_US)
        return nullcontext(measured)

    ranks, other = Ranks(), Ranks(rank=1)
    other.of_first = made(host_step_us=SLOW_US)
    for one in (other, ranks):
        self_calibration._known.clear()
        monkeypatch.setattr(one, "measures", busy)
        assert one.call(monkeypatch)
    (said,) = [str(one.message) for one in recwarn]
    assert said.startswith(f"self-calibration of {NAME} is incomplete: {SLOW}.")


def test_models_of_calls_change_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "device_name", lambda device: NAME)
    gpu = torch.device("cuda")
    assert this_machine.machine_model(gpu, 2) == BASE
    monkeypatch.setitem(self_calibrate.MEASURES, "cpu", lambda comm, sizes: nullcontext(Measured()))
    this_machine.know_machine(Ranks(), None)  # type: ignore[arg-type]
    model = this_machine.machine_model(gpu, 2)
    assert model == made().apply(BASE).model
    assert this_machine.machine_model(gpu, 2) is model


# -- measurements on GPUs


class _Event:
    """A CUDA event on a simulated clock: each GEMM takes 7 us."""

    now_us = 0.0

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = _Event.now_us

    def elapsed_time(self, later: _Event) -> float:
        return (later.at - self.at) / 1e3


class _Properties:
    multi_processor_count = 48


def _on_no_gpu(monkeypatch: pytest.MonkeyPatch, whys: tuple[str, ...] = ()) -> Any:
    """Replace GPUs by torch's CPU in `weft.runtime.cuda.measure`, with this rank's part of a group of two. Record
    allocations.
    """
    pytest.importorskip("triton", reason="what times GPUs launches Triton's kernels, and there is no Triton here")
    from weft.runtime.cuda import measure as gpu_measure

    class Communicator(Ranks):
        def all_gather(self, mine: Any, *, what: str) -> list[Any]:
            self.said.append(what)
            return [mine, whys[0] if whys and what == "setting up a calibration" else mine]

        def allocate(self, nbytes: int, *, what: str) -> Any:
            self.said.append(f"{what}: {nbytes}")
            return type("Region", (), {"close": lambda self: None})()

    for name in ("synchronize", "_sleep", "Stream"):
        monkeypatch.setattr(gpu_measure.torch.cuda, name, lambda *arguments, **options: None)
    monkeypatch.setattr(gpu_measure.torch.cuda, "Event", _Event)
    monkeypatch.setattr(gpu_measure.torch.cuda, "get_device_name", lambda device: NAME)
    monkeypatch.setattr(gpu_measure.torch.cuda, "get_device_properties", lambda device: _Properties)
    monkeypatch.setattr(gpu_measure, "prepare", lambda device: None)
    return gpu_measure, Communicator()


def test_gemms_are_made_before_anything_is_timed_and_leave_random_numbers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu_measure, comm = _on_no_gpu(monkeypatch)
    shape, real, made_here = (64, 32, 16, "bf16"), torch.randn, list[Any]()

    def randn(*sizes: int, **options: Any) -> torch.Tensor:
        made_here.append(sizes)
        return real(*sizes, **options)

    def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        assert (a.shape, b.shape, out.shape) == ((64, 16), (16, 32), (64, 32))
        _Event.now_us += 7.0

    monkeypatch.setattr(gpu_measure.torch, "randn", randn)
    monkeypatch.setattr(gpu_measure.torch, "mm", mm)
    before = torch.get_rng_state()
    measure = gpu_measure.GpuMeasure(comm, gpu_measure.QUICK, (shape,))
    assert (measure.machine, measure.world_size, measure.copy_units) == (NAME, 2, 48)
    assert comm.said[:3] == ["setting up a calibration", f"calibration: {64 << 20}", "signals of the calibration: 64"]
    assert made_here == [(64, 16), (32, 16)]
    assert measure.gemm_us(*shape) == pytest.approx(7.0)
    assert made_here == [(64, 16), (32, 16)]
    assert torch.equal(before, torch.get_rng_state())
    assert 0 <= measure.elapsed_s() < 60
    measure.close()


def test_without_memory_on_one_rank_every_rank_refuses_before_it_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_measure, comm = _on_no_gpu(monkeypatch, whys=("OutOfMemoryError: CUDA out of memory",))
    with pytest.raises(RefusedError, match="rank 1: OutOfMemoryError: CUDA out of memory"):
        gpu_measure.GpuMeasure(comm, gpu_measure.QUICK)
    gpu_measure, comm = _on_no_gpu(monkeypatch)

    def fails(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(gpu_measure.torch, "zeros", fails)
    with pytest.raises(RefusedError, match="ranks 0, 1: OutOfMemoryError: no memory"):
        gpu_measure.GpuMeasure(comm, gpu_measure.QUICK)
    assert comm.said == ["setting up a calibration"]
