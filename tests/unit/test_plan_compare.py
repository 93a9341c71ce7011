"""Comparisons: bad arguments are refused by name before any work, and no time is printed as 0."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weft import plan
from weft.builders import EmbeddingAllToAll
from weft.plan import compare
from weft.words import decimal_us, in_us

explain = importlib.import_module("weft.plan.explain")  # in its package, the name refers to the function
GIVEN: Mapping[str, Any] = {"M": 1024, "N": 64, "K": 64, "ranks": 2, "hw": "h200", "dtype": "bf16"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))


def _compare(op: Any = "all_gather_matmul", **options: Any) -> plan.Comparison:
    return plan.comparison(op, **{**GIVEN, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": ["all_gather_matmul"]}, "['all_gather_matmul'] is not an operator"),
        ({"ranks": 0}, "ranks=0: pass the number of GPUs, an integer of at least 1"),
        ({"ranks": None}, "ranks=None is a NoneType: pass the number of GPUs"),
        ({"ranks": "2"}, "ranks='2' is a str: pass the number of GPUs"),
        ({"ranks": True}, "ranks=True is a bool: pass the number of GPUs"),
        (
            {"ranks": 512},
            "ranks=512: at most 256 can be simulated, because schedules have a step for each",
        ),
        ({"op": "embedding_all_to_all", "ranks": 1 << 20}, "ranks=1048576: at most 65536 can be simulated"),
        ({"hw": 3}, "hw=3 is an int: pass one of a100, b200, h100"),
        ({"hw": ["h200"]}, "hw=['h200'] is a list: pass one of"),
        ({"topology": {}}, "topology={} is a dict: pass one of hosts, mesh, ring, switch, torus"),
        ({"topology": "ring:3"}, "NVIDIA H200 has no link.pair_usable"),
        ({"dtype": None}, "dtype=None: NVIDIA H200 has matmul rates only for"),
        ({"dtype": ["bf16"]}, "dtype=['bf16']: NVIDIA H200 has matmul rates only for"),
        ({"mode": ["queued"]}, "mode=['queued'] is unknown: use one of queued"),
        ({"M": 1 << 60}, "m=1152921504606846976 is too large: sizes are at most"),
        ({"schedules": "serial"}, "schedules='serial' must be a list of names"),
        ({"schedules": [3]}, "schedules=[3] must be a list of names"),
        ({"written": None}, "written=None must be a list of names"),
    ],
)
def test_bad_arguments_are_named_before_any_work(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "predicted_rows", lambda *_: pytest.fail("built schedules"))
    with pytest.raises(ValueError, match=re.escape(message)):
        _compare(**options)


def test_uneven_ranks_beyond_the_limit_are_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "predicted_rows", lambda *_: pytest.fail("built schedules"))
    given = {"hw": "mi300x", "topology": "torus", "dtype": "fp32", "ranks": 1 << 14, "M": 1 << 15}
    with pytest.raises(ValueError, match="ranks have different tables, and the simulation of more than 256 different"):
        _compare("embedding_all_to_all", tables=3, **given)


@pytest.mark.parametrize("op", ["all_to_all_matmul", "matmul_all_to_all"])
def test_nearly_even_experts_take_as_long_as_even_ones(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"M": 1003, "N": 512, "K": 256, "ranks": 12, "hw": "mi300x", "topology": "ring", "experts": 24}
    schedules = ["serial", "dispatch[by=dma,rest=each]" if op.startswith("all") else "combine[chunks=1,by=dma]"]
    even = _compare(op, **given, schedules=schedules)
    assert even.problem.uneven == ""
    assert "simulated with 0.50% more rows: every rank gets the slowest rank's number of rows" in "; ".join(even.notes)
    monkeypatch.setattr(explain, "_EXACT_RANKS", 12)
    exact = {row.name: row.us for row in _compare(op, **given, schedules=schedules).rows}
    assert exact.keys() == set(schedules)
    for row in even.rows:
        assert exact[row.name] is not None
        assert row.us == pytest.approx(exact[row.name], rel=0.02)


def test_far_from_even_experts_take_as_long_as_the_ranks_with_the_most_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"M": 25, "N": 512, "K": 4096, "ranks": 12, "hw": "mi300x", "experts": 12, "schedules": ["serial"]}
    (even,) = _compare("matmul_all_to_all", **given).rows
    monkeypatch.setattr(explain, "_EXACT_RANKS", 12)
    (exact,) = _compare("matmul_all_to_all", **given).rows
    assert even.us == pytest.approx(exact.us, rel=0.02)
    many = _compare("all_to_all_matmul", **{**given, "ranks": 96, "experts": 96})
    assert many.problem.rows == (96,) * 96


def test_sums_and_samples_are_made_even_only_if_they_nearly_are() -> None:
    given = {"N": 512, "K": 512, "ranks": 12, "hw": "mi300x", "schedules": ["serial"]}
    assert _compare("matmul_all_reduce", M=1199, **given).problem.m == 1200
    assert _compare("matmul_all_reduce", M=16, **given).problem.m == 16
    given = {"N": 64, "K": 4, "dtype": "fp32", "ranks": 12, "hw": "mi300x", "schedules": ["serial"], "tables": 25}
    assert _compare("embedding_all_to_all", M=1199, **given).problem.batch_sizes == (100,) * 12
    assert _compare("embedding_all_to_all", M=16, **given).problem.batch_sizes == (2,) * 4 + (1,) * 8


def test_sizes_of_many_ranks_take_work_in_proportion_to_them() -> None:
    """An earlier version summed over all earlier ranks for each rank, which took 13 seconds."""
    problem = EmbeddingAllToAll.sized(1 << 18, 64, 4, 1 << 16, tables=3 << 15)
    assert [problem.slots[rank][0][0] for rank in (0, 1, (1 << 15) + 1)] == [0, 128, 64 * ((1 << 16) + 1)]
    assert problem.columns == 64 * (3 << 15)


def test_a_comparison_says_how_far_it_is() -> None:
    said: list[tuple[str, float]] = []
    _compare(progress=lambda what, share: said.append((what, share)))
    assert sum(share for _, share in said) == pytest.approx(1.0)
    assert {"building 1 of 83: serial", "simulating serial once"} <= {what for what, _ in said}
    said.clear()
    given = {"hw": "mi300x", "topology": "torus:18x16", "dtype": "fp32", "ranks": 288, "M": 288, "tables": 288}
    _compare("embedding_all_to_all", **given, progress=lambda what, share: said.append((what, share)))
    assert sum(share for _, share in said) == pytest.approx(1.0)
    assert said[0][0] == "simulating serial"


@pytest.mark.parametrize(
    ("op", "ranks", "options"),
    [
        ("all_gather_matmul", 1, {}),
        ("all_gather_matmul", 2, {}),
        ("embedding_all_to_all", 2, {"tables": 2, "dtype": "fp32"}),
    ],
)
def test_tiny_work_prints_no_time_of_0(op: str, ranks: int, options: dict[str, Any]) -> None:
    found = _compare(op, M=2, N=1, K=1, ranks=ranks, **options)
    text = plan.explain(op, **{**GIVEN, "M": 2, "N": 1, "K": 1, "ranks": ranks, **options})
    printed = [*dict(found.facts()).values(), *(cell for row in found.cells() for cell in row), text]
    assert not [one for one in printed if re.search(r"(?<![\d.])0\.?0*( us|\s|$)", one)]
    assert found.bound.us > 0
    assert in_us(found.bound.us) in dict(found.facts())["bound"]


@pytest.mark.parametrize(
    ("us", "cell", "text"),
    [
        (0.0, "none", "no time"),
        (1e-13, "none", "no time"),
        (2.04e-5, "0.000020", "0.000020 us"),
        (0.0472, "0.047", "0.047 us"),
        (0.0999, "0.100", "0.100 us"),
        (0.26, "0.3", "0.3 us"),
        (12.34, "12.3", "12.3 us"),
    ],
)
def test_times_are_never_0(us: float, cell: str, text: str) -> None:
    assert (decimal_us(us), in_us(us)) == (cell, text)


def test_the_scaled_operator_is_called_by_its_name() -> None:
    given = {**GIVEN, "dtype": "fp8"}
    found = _compare(dtype="fp8", schedules=["serial"])
    assert dict(found.facts())["operator"].startswith("all_gather_scaled_matmul: ")
    assert found.as_json()["op"] == "all_gather_scaled_matmul"
    assert re.search(r"^operator +all_gather_scaled_matmul: ", plan.explain("all_gather_matmul", **given), re.MULTILINE)
    assert dict(_compare(schedules=["serial"]).facts())["operator"].startswith("all_gather_matmul: ")
