"""Remarks on numbers in tables: noise, parentheses around gains within the noise, and variants that ran without NVLink
multicast.
"""

from typing import Any

import numpy as np
import pytest

from weft.bench.core import harness, remarks
from weft.bench.core.harness import Timing, is_clear, noise, summarise, time_variants
from weft.bench.demo import LEGEND, headline

QUIET = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


def test_noise_is_how_far_medians_of_new_repetitions_would_lie_apart() -> None:
    drawn = np.random.default_rng(5).normal(10.0, 0.5, (4000, 25))
    apart = np.median(drawn, axis=1).std() / 10.0
    said = np.mean([noise(*np.percentile(of, (20, 50, 80)), 25) for of in drawn])
    assert said == pytest.approx(apart, rel=0.1)
    assert summarise([[9.0], [10.0], [11.0], [12.0]]).noise == pytest.approx(noise(9.6, 10.5, 11.4, 4))


def test_a_difference_is_clear_beyond_twice_its_noise() -> None:
    assert is_clear(1.10, 0.03, 0.03)
    assert not is_clear(1.08, 0.03, 0.03)
    assert is_clear(1 / 1.10, 0.03, 0.03), "slower counts as faster does"


def _record(ms: float, **more: Any) -> dict[str, Any]:
    return {
        "p20_ms": 0.95 * ms, "p50_ms": ms, "p80_ms": 1.05 * ms, "repetitions": 9, "config": "a shape", "dtype": "bf16",
        "device": "cuda", "ranks": 2, "variables": QUIET,
    } | more  # fmt: skip


def test_gains_within_their_noise_are_in_parentheses_and_counted() -> None:
    base = _record(1.0)
    cells = [remarks.gain(_record(ms), base) for ms in (0.5, 0.97, 1.5)] + [remarks.gain(None, base)]
    assert cells == ["2.00x", "(1.03x)", "0.67x", ""]
    assert remarks.unclear(cells) == [
        "Factors in parentheses (1 of 3) differ from 1 by less than twice their noise, or are gains of a schedule over itself."
    ]
    assert remarks.unclear(["2.00x"]) == []
    assert remarks.gain(_record(0.5), base, same=True) == "(2.00x)", "nothing is faster than itself"
    assert remarks.gain(_record(1.5), base, same=True) == "0.67x", "weft's own code may cost time"


def _records(**ms: float) -> list[dict[str, Any]]:
    """Return records of queued calls, and of single calls in the reverse order of speed."""
    return [
        _record(of**power, variant=name, mode=mode)
        for mode, power in (("queued", 1), ("single", -1))
        for name, of in ms.items()
    ]


def test_the_demos_headline_is_what_a_call_does_by_default() -> None:
    assert headline(_records(embedding_bag=4.0, batched=3.0, direct=2.0, put=1.0)) == "2.00x", "not of the fastest"
    assert headline(_records(embedding_bag=4.0, direct=4.01, put=1.0)) == "(1.00x)"


def test_one_schedule_under_two_names_shows_the_noise() -> None:
    (said,) = remarks.twins([(_record(ms), _record(1.0)) for ms in (1.01, 0.99, 1.08)])
    assert "3 pairs" in said
    assert "1.0% in the median, and by 8.0% at most" in said
    assert remarks.twins([]) == []


def test_what_asynctp_ran_without_comes_from_the_records() -> None:
    (said,) = remarks.of_asynctp([_record(1.0), _record(2.0)])
    assert "without NVLink multicast (TORCH_SYMM_MEM_DISABLE_MULTICAST=1)" in said
    assert "M <= 2048" in said
    (said,) = remarks.of_asynctp([_record(1.0, variables=None, variables_by_hand=QUIET)])
    assert "(TORCH_SYMM_MEM_DISABLE_MULTICAST=1, noted by hand)" in said
    (said,) = remarks.of_asynctp([_record(1.0, variables=None)])
    assert "do not say" in said
    assert remarks.of_asynctp([_record(1.0, variables={"NCCL_DEBUG": "WARN"})]) == [], "it was allowed"
    both = remarks.of_asynctp([_record(1.0, config="one"), _record(1.0, config="two", variables=None)])
    assert len(both) == 2
    assert "(one)" in both[0]
    assert "(two)" in both[1]


def test_nccl_is_told_of_beyond_two_gpus() -> None:
    assert remarks.of_nccl([_record(1.0)]) == []
    (said,) = remarks.of_nccl([_record(1.0, ranks=4)])
    assert "NCCL_NVLS_ENABLE=0" in said
    assert remarks.of_nccl([_record(1.0, ranks=4, variables={"NCCL_NVLS_ENABLE": "2"})]) == []
    assert remarks.of_nccl([_record(1.0, ranks=4, device="cpu")]) == []


class _Alone:
    """A group of one rank, without a process group."""

    class device:
        type = "cpu"

    def gather(self, values: list[float]) -> list[list[float]]:
        return [list(values)]

    def most(self, value: float) -> float:
        return value

    def start_together(self) -> None: ...

    def synchronize(self) -> None: ...


def _times(monkeypatch: pytest.MonkeyPatch, spread: float, **how: Any) -> tuple[dict[str, Timing], list[str]]:
    """Time three variants with a fake clock, which gives each variant a time and a spread. Return the timings, and the
    order of measurements.
    """
    base_ms, measured = {"serial": 100.0, "weft": 99.0, "other": 50.0}, []

    def measure(clock: Any, repetition: int) -> tuple[float, float]:
        name = clock.call.__name__
        measured.append(name)
        clock.last = (0, name)
        return base_ms[name] * (1 + spread * np.random.default_rng(len(measured)).uniform(-1, 1)), 0.0

    monkeypatch.setattr(harness.HostClock, "measure", measure)

    def serial(which: int) -> None: ...
    def weft(which: int) -> None: ...
    def other(which: int) -> None: ...

    variants = {call.__name__: call for call in (serial, weft, other)}
    timings = time_variants(variants, _Alone(), "queued", input_sets=2, repetitions=(9, 9), **how)  # type: ignore[arg-type]
    return timings, measured


def test_an_unclear_claim_is_measured_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [("weft", "serial"), ("other", "serial"), ("weft", "not measured here")]
    clear, _ = _times(monkeypatch, 0.0001, claims=claims)
    assert {name: of.repetitions for name, of in clear.items()} == {"serial": 9, "weft": 9, "other": 9}
    unclear, _ = _times(monkeypatch, 0.3, claims=claims)
    assert {name: of.repetitions for name, of in unclear.items()} == {"serial": 36, "weft": 36, "other": 9}, (
        "up to a limit"
    )
    nobody, _ = _times(monkeypatch, 0.3)
    assert {of.repetitions for of in nobody.values()} == {9}, "where nothing is claimed"


def test_what_the_last_rows_made_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, object, int]] = []
    began: list[int] = []
    _, measured = _times(
        monkeypatch,
        0.0,
        before_last=lambda: began.append(1),
        inspect=lambda n, which, out: shown.append((n, out, len(began))),
    )
    assert sorted(shown) == [(name, name, 1) for name in ("other", "serial", "weft")]
    assert [name for name, _, _ in shown] == measured[-3:], "right after the row"


def test_the_demo_says_what_its_columns_are() -> None:
    for column in ("skew", "extra MB", "first ms", "in parentheses"):
        assert f"{column}: " in LEGEND
