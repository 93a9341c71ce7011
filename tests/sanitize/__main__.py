"""Tests of the native module under sanitizers: `make sanitize` finds memory errors, leaks and data races in csrc/.

The script builds csrc/ with a sanitizer into build/sanitize-NAME, and never touches the installed module. A `sitecustomize.py` in
that folder makes Python load the module from there, also in child processes. Each process writes what its sanitizer reports to
a file of its own; the script prints the different reports. The exit status is 1 if there is one, or if a test fails.

| sanitizer | finds | does not see |
|---|---|---|
| `address` | wrong accesses to memory, undefined behaviour | accesses to memory that another process shares |
| `leaks` | memory that csrc/ allocated and lost in unit tests | memory that Python or torch allocated |
| `thread` | data races between threads of one process | races between processes: see `tests/unit/memory_order` |
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BUILDS = {"address": "address,undefined", "leaks": "address,undefined", "thread": "thread"}
LIBRARIES = {"address": ("asan", "stdc++"), "leaks": ("asan", "stdc++"), "thread": ("tsan", "stdc++")}
UNIT = """
    copy cpu_kernel cpu_kernel_slices embedding_update hashing integers layouts mapped_memory native_calls permutation rail
    sim_engine sim_max_min sim_memory_controller slot_tables steady_calls stream_program symm_calls
"""
PROCESSES = """
    embedding_accumulate embedding_all_to_all embedding_backward embedding_dedup embedding_failure embedding_far_first
    embedding_fused_optimizer embedding_module embedding_rounding experts_far_first failure forks hosts many_sizes native_combine
    native_cpu_calls operators operators_of_experts rails replay run_schedule schedule_cpu schedule_cpu_failure sends
    shared_collectives survivors symm_ends two_hosts updates
"""
REPORT = re.compile(r"ERROR: \w+Sanitizer|WARNING: ThreadSanitizer: |: runtime error: ")
SITE = """import importlib.util, sys


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, {module!r}) if name == "weft._core" else None


sys.meta_path.insert(0, _Finder)
"""


def build(name: str, jobs: int) -> Path:
    """Compile csrc/ with the sanitizers of `name`, and return the folder."""
    folder = ROOT / "build" / f"sanitize-{BUILDS[name].partition(',')[0]}"
    tool = [sys.executable, "-m", "cmake"]
    options = [
        f"-DWEFT_SANITIZE={BUILDS[name]}",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    ]
    ninja = f"-DCMAKE_MAKE_PROGRAM={Path(sys.executable).with_name('ninja')}"
    subprocess.run([*tool, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", ninja, *options], check=True)
    subprocess.run([*tool, "--build", str(folder), "-j", str(jobs)], check=True)
    (module,) = folder.glob("_core*.so")
    (folder / "sitecustomize.py").write_text(SITE.format(module=str(module)))
    return folder


def library(name: str) -> str:
    """Return the path of a shared library of the compiler."""
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run(
        [compiler, f"-print-file-name=lib{name}.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"{compiler} has no lib{name}.so: install GCC's sanitizers")
    return found


def environment(name: str, folder: Path) -> dict[str, str]:
    """Return the environment of the tests: the sanitizer is loaded first, and writes its reports into `folder`/reports."""
    shutil.rmtree(folder / "reports", ignore_errors=True)
    (folder / "reports").mkdir()
    log = f"log_path={folder / 'reports' / name}"
    # Tests check exit statuses, so a report must not change them. Tests ask for more memory than there is.
    common = f"{log}:allocator_may_return_null=1:handle_segv=1:exitcode=0"
    leaks = f"detect_leaks={int(name == 'leaks')}"
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])),
        "LD_PRELOAD": " ".join(map(library, LIBRARIES[name])),
        "OMP_NUM_THREADS": "1",
        "ASAN_OPTIONS": f"{common}:{leaks}:abort_on_error=1:detect_odr_violation=0:malloc_context_size=40",
        "LSAN_OPTIONS": f"suppressions={HERE / 'leaks.supp'}:print_suppressions=0",
        "UBSAN_OPTIONS": f"{log}-undefined:print_stacktrace=1",
        "TSAN_OPTIONS": f"{common}:die_after_fork=0:history_size=4:suppressions={HERE / 'thread.supp'}",
    }


def start(folder: Path, variables: Mapping[str, str]) -> list[str]:
    """Return the beginning of a command that runs Python under the sanitizer. Addresses are not randomised where
    ThreadSanitizer of the compiler cannot live with random ones.
    """
    python = [sys.executable]
    probe = "import weft._core; print(weft._core.__file__)"
    for before in ([], ["setarch", "-R"]):
        done = subprocess.run(
            [*before, *python, "-c", probe], env=variables, capture_output=True, text=True, check=False, cwd=ROOT
        )
        if done.returncode == 0 and str(folder) in done.stdout:
            return [*before, *python]
    raise SystemExit(f"Python does not load the module of {folder}:\n{done.stdout}{done.stderr}")


def leaks_of_csrc(text: str) -> Iterator[str]:
    """Yield the leaks of a report that csrc/ allocated: one of its frames is nearer than Python's."""
    for leak in re.split(r"\n(?=(?:Direct|Indirect) leak of)", text)[1:]:
        frames = re.findall(r"#\d+ .*", leak.split("\n\n")[0])
        ours = [i for i, frame in enumerate(frames) if "/csrc/" in frame and "/site-packages/" not in frame]
        python = [
            i
            for i, frame in enumerate(frames)
            if re.search(r" (Objects|Python|Modules)/|/python|nb_func|nb_type", frame)
        ]
        if ours and (not python or ours[0] < python[0]):
            yield leak.split("\n\n")[0]


def reports(folder: Path) -> dict[str, int]:
    """Return the different reports of all processes, with the number of processes that made each."""
    found: dict[str, int] = {}
    for file in sorted((folder / "reports").iterdir()):
        text = file.read_text(errors="replace")
        if "LeakSanitizer: detected" in text:
            texts = list(leaks_of_csrc(text))
        else:
            texts = [
                part for part in re.split(r"(?m)^=+$|\n(?=\S*:\d+:\d+: runtime error)", text) if REPORT.search(part)
            ]
        for part in texts:
            same = re.sub(r"0x[0-9a-f]+|==\d+==|\(?pid=\d+\)?|tid=\d+|T\d+", "", part.strip())
            found[same] = found.get(same, 0) + 1
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, run the tests and print the reports. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitize", description="Run tests of csrc/ under a sanitizer."
    )
    parser.add_argument(
        "sanitizer", choices=BUILDS, help="address also means undefined behaviour; leaks runs unit tests only"
    )
    parser.add_argument("-n", "--jobs", type=int, default=2, help="number of compilers, and of tests at a time")
    parser.add_argument("tests", nargs="*", help="files of tests and options of pytest, instead of the usual choice")
    args, more = parser.parse_known_args(arguments)
    folder = build(args.sanitizer, args.jobs)
    variables = environment(args.sanitizer, folder)
    unit, processes = ([f"tests/{kind}/test_{name}.py" for name in names.split()] for kind, names in
                       (("unit", UNIT), ("processes", PROCESSES)))  # fmt: skip
    tests = [*args.tests, *more] or (unit if args.sanitizer == "leaks" else unit + processes)
    # Leaks are searched when a process exits, and workers of xdist do not exit as others.
    several = [] if args.sanitizer == "leaks" else ["-n", str(args.jobs), "--dist", "worksteal"]
    command = [
        *start(folder, variables),
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow and not gpu and not multigpu",
        *several,
        *tests,
    ]
    status = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
    found = reports(folder)
    for report, processes_with_it in found.items():
        print(f"== {processes_with_it} times:\n{report}\n")
    print(
        f"== {args.sanitizer}: {len(found)} different reports in {folder / 'reports'}; pytest's exit status is {status}"
    )
    return int(bool(found) or status != 0)


if __name__ == "__main__":
    sys.exit(main())
