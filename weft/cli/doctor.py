"""The report of `weft doctor`: what works on this machine, what weft will use, and how to get missing parts.

Imports of a broken installation may raise any error. So the report catches all errors of a check, and goes on with the next.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import weft
from weft import env
from weft.hw import available_memory_bytes
from weft.words import counted

State = Literal["ok", "missing", "broken"]
_ENOUGH_SHARED_BYTES = 256 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the report of `weft doctor`. Its state is "missing" if weft works without the item, and "broken" if weft does
    not work until the item is fixed.
    """

    what: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]
    uses: tuple[str, ...]

    @property
    def works(self) -> bool:
        return bool(self.uses)

    def state(self, what: str) -> State:
        return next(f.state for f in self.findings if f.what == what)


def examine() -> Report:
    """Run all checks and return the report. Never raise."""
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("Python", _python),
        ("torch", _torch),
        ("native module", _native),
        ("compiler", _compiler),
        ("CPU", _cpu),
        ("shared memory", _shared_memory),
        ("sockets", _sockets),
        ("GPUs", _gpus),
        ("peer access", _peer_access),
        ("symmetric memory", _symmetric_memory),
        ("NCCL", _nccl),
        ("NVSHMEM", _nvshmem),
        ("Triton", partial(_package, "Triton", "triton", "comes with CUDA builds of torch; not needed on CPU")),
        ("planning", _planning),
        ("FBGEMM", partial(_package, "FBGEMM", "fbgemm_gpu", _FBGEMM)),
        ("environment", _environment),
    )
    findings = tuple(_safely(what, check) for what, check in checks)
    return Report(findings, _what_weft_uses(findings))


def print_report(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "missing": "yellow", "broken": "red"}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in report.findings:
        text = escape(finding.found) + (f"\n[dim]fix: {escape(finding.fix)}[/dim]" if finding.fix else "")
        colour = colours[finding.state]
        table.add_row(finding.what, f"[{colour}]{finding.state}[/{colour}]", text)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(f"weft {weft.__version__} on {platform.node() or 'this machine'}\n")
    console.print(table)
    if any(finding.state != "ok" for finding in report.findings):
        console.print("\nmissing: weft works without this. broken: weft does not work until you fix this.")
    console.print(
        "\nweft will use:" if report.works else "\n[red]Nothing works here yet[/red]: fix what is broken above."
    )
    for line in report.uses:
        console.print(f"  - {line}")


def _safely(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        return Finding(
            what, "broken", f"{type(error).__name__}: {error}", "the check itself failed: report this line as a bug"
        )


def _what_weft_uses(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    state = {finding.what: finding.state for finding in findings}
    found = {finding.what: finding.found for finding in findings}
    uses: list[str] = []
    if state["environment"] == "broken":  # every call would raise
        return ()
    if all(state[what] == "ok" for what in ("torch", "native module", "shared memory", "sockets")):
        uses.append(
            f"CPU processes: the native {found['native module'].split()[0]} kernel stores into the peers' shared memory"
        )
    if all(state[what] == "ok" for what in ("torch", "native module", "sockets", "GPUs", "Triton")):
        if state["peer access"] == state["symmetric memory"] == "ok":
            uses.append(
                "GPUs: one Triton kernel per call, stores into peers' memory (direct) or slices and flags (put)"
            )
        else:
            uses.append(
                "one GPU: ranks that share it (weft.launch.run_ranks), to try things out: all features work, but slowly"
            )
    return tuple(uses)


def _python() -> Finding:
    return Finding("Python", "ok", platform.python_version())


def _torch() -> Finding:
    try:
        torch: Any = _import("torch")
    except Exception as error:
        return Finding("torch", "broken", f"does not import ({error})", "pip install 'torch>=2.11'")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        return Finding("torch", "broken", torch.__version__, "pip install 'torch>=2.11'")
    return Finding("torch", "ok", torch.__version__)


def _native() -> Finding:
    try:
        core: Any = _import("weft._core")
    except Exception as error:
        return Finding(
            "native module",
            "broken",
            f"does not import ({error})",
            "install a wheel, or a C++ compiler and pip install .",
        )
    return Finding("native module", "ok", f"{core.isa()} (this machine runs {', '.join(core.isas())})")


def _compiler() -> Finding:
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        fix = "only needed to build from source: apt install g++ (or your system's C++20 compiler)"
        return Finding("compiler", "missing", "no C++ compiler", fix)
    return Finding("compiler", "ok", str(shutil.which(found)))


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0))
    return Finding("CPU", "ok", f"{cores} core{'s' if cores > 1 else ''}, {platform.machine()}")


def _shared_memory() -> Finding:
    if not hasattr(os, "memfd_create"):
        return Finding("shared memory", "broken", "no memfd on this system", "run on Linux")
    limit = available_memory_bytes()
    file = os.memfd_create("weft-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, 1 << 20)
    finally:
        os.close(file)
    found = f"anonymous (memfd), {limit / 2**30:.1f} GiB available"
    if limit < _ENOUGH_SHARED_BYTES:
        return Finding("shared memory", "missing", found, "free some memory, or raise the container's memory limit")
    return Finding("shared memory", "ok", found)


def _sockets() -> Finding:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.close()
    right.close()
    return Finding(
        "sockets", "ok", "Unix domain sockets between the ranks of one host; TCP between hosts (weft doctor --group)"
    )


def _gpus() -> Finding:
    torch: Any = _import("torch")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        fix = "not needed on a machine without GPUs" if built else "for GPUs: install a CUDA build of torch"
        why = f"torch is built for CUDA {built} but sees no GPU" if built else "torch is built without CUDA"
        return Finding("GPUs", "missing", why, fix)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding(
        "GPUs",
        "ok",
        ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)) + f", CUDA {torch.version.cuda}",
    )


def _peer_access() -> Finding:
    torch: Any = _import("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        fix = "not needed to try weft: ranks can share a GPU" if count else ""
        return Finding("peer access", "missing", f"{counted(count, 'GPU')}: there is no other GPU to access", fix)
    cut = [(i, j) for i in range(count) for j in range(count) if i != j and not torch.cuda.can_device_access_peer(i, j)]
    if cut:
        pairs = ", ".join(f"{i} to {j}" for i, j in cut)
        fix = (
            "nvidia-smi topo -p2p r gives the reason (virtualisation, ACS, different root complexes); run weft "
            "on GPUs with peer access"
        )
        return Finding("peer access", "missing", f"not from {pairs}", fix)
    return Finding("peer access", "ok", f"between all {count} GPUs")


def _symmetric_memory() -> Finding:
    symm_mem: Any = _import("torch.distributed._symmetric_memory")
    torch: Any = _import("torch")
    if not torch.cuda.is_available():
        return Finding("symmetric memory", "missing", "only on GPUs; CPU ranks use shared memory")
    backend = symm_mem.get_backend(torch.device("cuda")) if hasattr(symm_mem, "get_backend") else "CUDA"
    return Finding("symmetric memory", "ok", f"torch's, backend {backend}")


def _nvshmem() -> Finding:
    symm_mem: Any = _import("torch.distributed._symmetric_memory")
    available = getattr(symm_mem, "is_nvshmem_available", None)
    if available is not None and available():
        versions = [of for one in _NVSHMEM_PACKAGES if (of := _version_of(one))]
        which = f", version {versions[0]}" if versions else ""
        return Finding("NVSHMEM", "ok", f"comes with this torch{which}; weft does not use it")
    return Finding("NVSHMEM", "missing", "not in this torch", "none needed: weft does not use NVSHMEM")


def _nccl() -> Finding:
    """Report the version of NCCL, and which parts of NCCL's device API this version has."""
    torch: Any = _import("torch")
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return Finding("NCCL", "missing", "only on GPUs; CPU ranks use gloo")
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return Finding("NCCL", "ok", f"{'.'.join(map(str, version))}; {device_api(version)}")


def device_api(version: tuple[int, ...]) -> str:
    """Return a description of the sends that a GPU kernel can start itself with this version of NCCL."""
    if version < (2, 28):
        return "without a device API, which 2.28 has"
    sends = "and to other hosts (GIN)" if version >= (2, 28, 7) else "but not to other hosts, for which 2.28.7 has GIN"
    return f"its device API sends from kernels within a host (LSA) {sends}; weft does not use it"


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


_NVSHMEM_PACKAGES = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
_FBGEMM = "only for a baseline of GPU benchmarks: pip install fbgemm-gpu, in the version for your torch"


def _package(title: str, name: str, fix: str) -> Finding:
    """Report the version of the optional package `name`, under `title`.

    fix: the advice if it cannot be imported.
    """
    try:
        package: Any = _import(name)
    except Exception as error:
        return Finding(title, "missing", f"does not import ({type(error).__name__})", fix)
    return Finding(title, "ok", str(getattr(package, "__version__", "installed")))


def _planning() -> Finding:
    """Report, for each number of ranks, from where the planner takes the machine's numbers: a calibration, a file, or
    the driver.
    """
    from weft.hw import machine_of
    from weft.plan import calibrated
    from weft.plan.self_calibration import WHAT
    from weft.plan.store import ranks_of

    torch: Any = _import("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return Finding("planning", "missing", "no GPU: on CPU schedules are measured at the first call of each shape")
    names = list(dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count)))
    machine = machine_of(names[0])
    if machine is None:
        found = f"no numbers for {names[0]}: schedules are measured at the first call of each shape"
        return Finding("planning", "missing", found)
    saved = {ranks for what in ("calibration", WHAT) for ranks in ranks_of(what, machine.name)}
    sources = {ranks: calibrated(machine, ranks) for ranks in sorted({max(2, count), *saved})}
    lines = [f"{counted(ranks, 'rank')}: {found.source}; {found.note}" for ranks, found in sources.items()]
    lines += [machine.about] if machine.about else []
    lines += [f"GPUs differ ({', '.join(names)}): all ranks take the slowest GPU's schedules"] if names[1:] else []
    of_all = sources[max(2, count)]
    if of_all.refused or of_all.source == "derived":
        fix = "weft plan calibrate" if count > 1 else "not needed to try weft"
        return Finding("planning", "missing", "\n".join(lines), fix)
    return Finding("planning", "ok", "\n".join(lines))


def _environment() -> Finding:
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("WEFT_")}
    if faults := env.faults():
        them = "correct the variables, or unset them" if faults[1:] else "correct the variable, or unset it"
        return Finding("environment", "broken", "\n".join(faults), f"{them}: calls raise this error")
    if unknown := [name for name in given if name not in env.OWN]:
        fix = f"weft reads {', '.join(env.OWN)}: docs/environment.md"
        return Finding("environment", "missing", f"weft does not read {', '.join(unknown)}", fix)
    set_here = ", ".join(f"{name}={value}" for name, value in given.items())
    return Finding("environment", "ok", set_here or "no variable of weft is set")


def _import(name: str) -> Any:
    import importlib

    return importlib.import_module(name)
