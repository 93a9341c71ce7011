"""Files and messages from others: pipes, sizes, nesting and numbers beyond the limits are refused by name, at once.

Slow tests generate such files, at random and by changing valid files. Only the named errors may be raised.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sim_toys import applicable

from weft import reading
from weft.bench.core import records
from weft.builders import AllGatherMatmul, candidates
from weft.errors import UnreadableError
from weft.hw import load_machine, machine_of
from weft.hw.topology import load_topology
from weft.plan import Calibration, autotune, calibrated, known_times, self_calibration
from weft.plan.machine import versions
from weft.plan.self_calibration import SelfCalibration
from weft.schedule import Expr
from weft.schedule.text import from_json, to_json
from weft.schedule.verify import verify
from weft.sim import model_of


def test_what_is_valid_is_read(tmp_path: Path) -> None:
    value = {"a": [1, -2.5, True, None, 'a "quoted" [[[ bracket'], "b": {"c": 2**63 - 1}}
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert reading.read_json(tmp_path / "a.json") == value
    many = "[" * 100  # brackets in strings and comments do not nest
    text = f"""
        a.b.c = [1.5, 2.5] # {many}
        "quoted.key" = 'literal {many} "'
        s = "escaped \\" {many}"
        l = '''{many} ' '' {many}'''
        [table.x]
        y = {{z = 0x10}}
        m = \"\"\"{many} "" " {many}\"\"\"
    """
    found = reading.parse_toml(text, "here")
    assert found["table"]["x"]["y"] == {"z": 16}
    assert found["s"] == f'escaped " {many}'
    assert reading.parse_json(json.dumps({"a": many}), "here") == {"a": many}


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableError, match=r"pipe cannot be read: it is a pipe, not a regular file; delete it"):
        reading.read_json(tmp_path / "pipe", fix="delete it")


@pytest.mark.parametrize(
    ("path", "message"), [(".", "it is a folder"), ("/dev/zero", "it is a device"), ("a" * 5000, "File name too long")]
)
def test_what_is_no_regular_file_is_refused(path: str, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        reading.read_toml(Path(path))


def test_a_missing_file_is_the_usual_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        reading.read_json(tmp_path / "nothing")


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)  # a hole
    with pytest.raises(UnreadableError, match="more than 262144 bytes"):
        reading.read_toml(tmp_path / "large")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested 100000 deep, and at most 64"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested 65 deep, and at most 64"),
        ("[" + "1," * (1 << 21) + "1]", r"2097153 values, and at most 2097152"),
        ("[1e999]", r"\[0\] is inf: numbers must be finite"),
        ('{"a": [NaN]}', r"a\[0\] is nan"),
        ("9" * 400, "it is an integer of 1329 bits"),
        ("9" * 5000, "here cannot be read: Exceeds the limit"),
        (b"\xff", "it is not valid UTF-8"),
        ("", "Expecting value"),
        ('"' + '\\"' * 1000, "Unterminated string"),
    ],
)
def test_json_beyond_the_limits_is_refused_by_name(text: str | bytes, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        reading.parse_json(text, "here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 1000, "nested 1000 deep"),
        (f"{'a.' * 100}a = 1", "nested 100 deep"),
        (f"[{'.'.join(['a'] * 40)}]\n{'.'.join(['b'] * 40)} = 1", r"nested \d+ deep"),
        (f"{'a . ' * 20_000}a = 1", "nested 20000 deep"),
        ("a = inf", "a is inf"),
        ("a = 0x" + "f" * 1000, "a is an integer of 4000 bits"),
        ('a = "', "it is not valid TOML"),
        ("a = '''" + "''" * 1000, "it is not valid TOML"),
        ('a = """' + '\\"' * 100_000, "it is not valid TOML"),
    ],
)
def test_toml_beyond_the_limits_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        reading.parse_toml(text, "here")


def test_what_does_not_end_is_scanned_in_linear_time() -> None:
    for text in ('"\\' * (1 << 20), '"' * (1 << 20) + "\\", "'''" * (1 << 16), "#" * (1 << 18), '"""' * 80_000):
        for parse in (reading.parse_json, reading.parse_toml):
            start = time.monotonic()
            with contextlib.suppress(UnreadableError):
                parse(text, "here")
            assert time.monotonic() - start < 30  # quadratic work would take minutes


# -- generated files


TOPOLOGY = b"""
name = "hosts of eight, a NIC for each GPU"
shape = "hosts"

[hosts.gpus]
value = 8
unit = "1"
source = "datasheet"

[nic.usable]
value = 48
unit = "GB/s"
source = "assumed"
note = "400 Gb/s"
"""


class Places:
    """All readers of such files, each with a valid file and the errors that it may raise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        p = AllGatherMatmul.even(4096, 4096, 8192, 2)
        h200 = load_machine("h200")
        known = autotune.__globals__["_known"]
        known.clear()
        autotune(p, candidates(p, ("serial", "gather")), lambda _: 100.5, lambda mine: mine, machine="toy")
        (times,) = folder.glob("autotune-*.json")
        curve = ((1 << 16, 10.5), (1 << 20, 20.5), (1 << 24, 100.5))
        calibration = Calibration(
            "NVIDIA H200", 2, "today", versions(), ((1024, 1024, 1024, "bf16", 90.5),), 3.5, 1.5, 24, curve, ((8, 4096, 5.5),),
            curve, curve, curve, 1.5, 2.5, (("dma", 1.25, 1e5),),
        )  # fmt: skip
        calibration_path = calibration.save()

        def remembers(text: bytes) -> None:
            known.clear()
            times.write_bytes(text)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                known_times(p, "toy", "queued")

        def calibrates(text: bytes) -> None:
            calibration_path.write_bytes(text)
            calibrated(h200, 2).model.matmul_us(512, 512, 512, "bf16")

        nobodys = machine_of("NVIDIA Nobody's 3")
        assert nobodys is not None
        base = model_of(nobodys, 2)
        gemms = ((4096, 4096, 4096, "bf16", base.matmul_us(4096, 4096, 4096, "bf16")),)
        own = SelfCalibration(nobodys.name, 2, "2026-01-02", versions(), 64, 3e5, 2e5, None, gemms, 1.5, 0.0, 5.5)
        self_calibration.save(own)
        (own_path,) = folder.glob("self-calibration-*.json")

        def calibrates_itself(text: bytes) -> None:
            own_path.write_bytes(text)
            calibrated(nobodys, 2).model.matmul_us(512, 512, 512, "bf16")

        def machine(text: bytes) -> None:
            model_of(load_machine(self.file("a.toml", text)), 4)

        def topology(text: bytes) -> None:
            load_topology(self.file("b.toml", text), h200).of(4)

        schedules = [
            to_json(schedule).encode() for schedule in applicable(AllGatherMatmul.even(64, 8, 16, 4)).values()
        ][::7]
        record = {"op": "all_gather_matmul", "config": "a", "run": "b", "p50_ms": 1.5}
        shipped = resources.files("weft.hw")
        self.all: dict[str, tuple[Callable[[bytes], object], list[bytes], tuple[type[Exception], ...]]] = {
            "JSON": (lambda text: reading.parse_json(text, "here"), schedules, (UnreadableError,)),
            "TOML": (
                lambda text: reading.parse_toml(text, "here"),
                [b"a.b = [{c = 1.5}]\n[d.e]\nf = '''g'''\n[[h]]\ni = 0x1 # j"],
                (UnreadableError,),
            ),
            "schedule": (lambda text: verify(from_json(text.decode(errors="replace"))), schedules, (ValueError,)),
            "expression": (
                lambda text: Expr(text.decode(errors="replace")).evaluated_over({"rank": 1, "x": [1, 2, 3]}),
                [b"(1, 5, 7)[rank % 3] * 2 + sum(x[0:rank:2])"],
                (ValueError, KeyError, IndexError, ZeroDivisionError),  # of a value that there is not
            ),
            "times": (remembers, [times.read_bytes()], ()),
            "calibration": (calibrates, [json.dumps(asdict(calibration)).encode()], ()),
            "self-calibration": (calibrates_itself, [json.dumps(asdict(own)).encode()], ()),
            "machine": (
                machine,
                [shipped.joinpath(f"{name}.toml").read_bytes() for name in ("h200", "mi300x")],
                (ValueError, KeyError),
            ),
            "topology": (topology, [TOPOLOGY], (ValueError, KeyError)),
            "records": (
                lambda text: records.read([self.file("c.jsonl", text)]),
                [json.dumps(record).encode() + b"\n" + json.dumps(record).encode()],
                (ValueError,),
            ),
        }

    def file(self, name: str, text: bytes) -> Path:
        (self.folder / name).write_bytes(text)
        return self.folder / name


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    yield Places(tmp_path)
    autotune.__globals__["_known"].clear()


NUMBERS = [
    b"NaN", b"-Infinity", b"inf", b"1e999", b"1e308", b"1e-308", b"1e15", b"1e-6", b"0", b"0.0", b"-1", b"2.5", b"9" * 18,
    b"9" * 30, b"9" * 400, b"9" * 5000, b"0x" + b"f" * 5000,
]  # fmt: skip
PIECES = [
    *NUMBERS, b"[", b"]", b"{", b"}", b'"', b"'", b"'''", b'"""', b"\\", b",", b":", b"=", b".", b"#", b"\n", b"\0", b"\xff",
    b"null", b"true", b"rank", b"sum", b"sum(x[0:1:0])", b"[" * 1000, b'{"a":' * 1000, b"a." * 1000, b"1+" * 1000, b"{" * 70,
    b'{"step":"for","index":"i","extent":1099511627776,"body":[', b"1099511627776", b"rank * 1099511627776",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**40, 2**63, 10**400, 0.5, 1e-6, 1e12, 1e308, 5e-324, float("inf"), float("nan"), "", "sum", "rank",
    "rank // 0", "i - i", "1 + " * 500 + "1", "x" * 100_000, [], {}, [[]], [1] * 1000, {"a": {}}, "for", "\ud800",
]  # fmt: skip


def mutated(text: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 4))):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        match rng.randrange(6):
            case 0:
                text = text[:a] + rng.choice(PIECES) * rng.choice((1, 1, 3)) + text[a:]
            case 1:
                text = text[:a] + text[min(b, a + rng.choice((1, 10, 1000))) :]
            case 2:
                text = text[:a] + text[a : min(b, a + 2000)] * 2 + text[a:]
            case 3:
                if numbers := list(re.finditer(rb"\d[\d.]*", text)):
                    one = rng.choice(numbers)
                    text = text[: one.start()] + rng.choice(NUMBERS) + text[one.end() :]
            case _:
                with contextlib.suppress(ValueError, RecursionError):
                    text = json.dumps(replaced(json.loads(text), rng)).encode()
    return text


def replaced(value: Any, rng: random.Random) -> Any:
    """Replace `value`, or a random value inside it, by another value."""
    if not value or not isinstance(value, dict | list) or rng.random() < 0.1:
        return rng.choice(VALUES)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    value[key] = replaced(value[key], rng)
    return value


def read_all(places: Places, text: Callable[[list[bytes]], bytes]) -> None:
    for name, (read, valid, errors) in places.all.items():
        one, start = text(valid), time.monotonic()
        try:
            read(one)
        except errors:
            pass
        except Exception as error:
            raise AssertionError(f"{name}: {error!r} of {one[:2000]!r}") from error
        assert time.monotonic() - start < 60, (name, one[:2000])


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_what_became_of_valid_files_is_read_or_refused_by_name(places: Places, seed: int) -> None:
    rng = random.Random(seed)
    read_all(places, lambda valid: mutated(rng.choice(valid), rng))


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(text=st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join)))
def test_what_was_never_valid_is_refused_by_name(places: Places, text: bytes) -> None:
    read_all(places, lambda valid: text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece", [b"[", b'{"a":', b"[[", b"a.", b"a={b=", b"(", b"-", b"1+", b"'", b'"', b'\\"', b"[1],", b"\n"]
)
def test_what_is_long_or_deep_is_read_or_refused_by_name(places: Places, piece: bytes) -> None:
    for count in (100, 10_000, 300_000):
        for before in (b"", b"a = ", b'"'):
            read_all(places, lambda valid, text=before + piece * count: text)
