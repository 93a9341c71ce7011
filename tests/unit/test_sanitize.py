"""`make sanitize` keeps working: CMake takes its option, its tests exist, and reports of sanitizers are found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sanitize import __main__ as sanitize

ROOT = Path(__file__).parents[2]
pytest.importorskip("cmake", reason="cmake configures the build")
pytest.importorskip("nanobind", reason="CMake looks for nanobind")

RACE = """==================
WARNING: ThreadSanitizer: data race (pid={pid})
  Write of size 8 at 0x7b04{pid} by thread T3:
    #0 work /weft/csrc/threads.hpp:20 (_core.so+0x1{pid})
==================
ThreadSanitizer: reported 1 warnings
"""
OVERFLOW = """/weft/csrc/copy.cpp:5:39: runtime error: signed integer overflow
    #0 0x7fc85{pid} in bad /weft/csrc/copy.cpp:5
"""
LEAKS = """
==19381==ERROR: LeakSanitizer: detected memory leaks

Direct leak of 400 byte(s) in 1 object(s) allocated from:
    #0 0x7faa7eeb9628 in operator new(unsigned long) asan_new_delete.cpp:95
    #1 0x7faa7f4b31f2 in sort /weft/csrc/sort_pairs.cpp:4
    #2 0x7faa7e5af897 in cfunction_call Objects/methodobject.c:542

Indirect leak of 34714 byte(s) in 15 object(s) allocated from:
    #0 0x7faa7eeb89cf in malloc asan_malloc_linux.cpp:69
    #1 0x7faa7e5af897 in _PyObject_Malloc Objects/obmalloc.c:2003
    #2 0x7faa7f4b31f2 in sort /weft/csrc/sort_pairs.cpp:9

SUMMARY: AddressSanitizer: 400 byte(s) leaked in 1 allocation(s).
"""


def configure(folder: Path, option: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cmake", "-S", str(ROOT), "-B", str(folder), f"-DWEFT_SANITIZE={option}"]
    command += [
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("option", sorted(set(sanitize.BUILDS.values())))
def test_every_source_is_compiled_with_the_sanitizer(tmp_path: Path, option: str) -> None:
    done = configure(tmp_path, option)
    assert done.returncode == 0, done.stderr
    sources = [
        entry for entry in json.loads((tmp_path / "compile_commands.json").read_text()) if "/csrc/" in entry["file"]
    ]
    assert {Path(entry["file"]).name for entry in sources} == {file.name for file in (ROOT / "csrc").glob("*.cpp")}
    for entry in sources:
        assert f"-fsanitize={option} " in entry["command"]
        assert "-O3" not in entry["command"]  # GCC takes minutes


@pytest.mark.parametrize("option", ["adress", "thread,address"])
def test_other_sanitizers_are_refused(tmp_path: Path, option: str) -> None:
    done = configure(tmp_path, option)
    assert done.returncode != 0
    assert f"WEFT_SANITIZE={option} must be empty, address, undefined" in done.stderr


def test_the_usual_tests_exist() -> None:
    for kind, names in (("unit", sanitize.UNIT), ("processes", sanitize.PROCESSES)):
        for name in names.split():
            assert (ROOT / "tests" / kind / f"test_{name}.py").exists()


def test_reports_of_all_processes_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    for pid in (17, 23):
        (tmp_path / "reports" / f"thread.{pid}").write_text(RACE.format(pid=pid))
        (tmp_path / "reports" / f"address-undefined.{pid}").write_text(OVERFLOW.format(pid=pid))
    (tmp_path / "reports" / "address.5").write_text(
        "==5==WARNING: AddressSanitizer failed to allocate 0x80000000000000 bytes\n"
    )
    found = sanitize.reports(tmp_path)
    assert sorted(found.values()) == [2, 2]
    assert ["data race" in report for report in sorted(found)] == [False, True]


def test_only_leaks_of_csrc_are_reported(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "leaks.1").write_text(LEAKS)
    (report,) = sanitize.reports(tmp_path)
    assert "sort_pairs.cpp:4" in report
