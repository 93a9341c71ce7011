"""Helpers for functions that run on the ranks, on CPU processes and on GPUs: data, tolerances, poisoned results,
delays.

Random data depend only on seeds, so every rank knows the data of all ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from weft.builders import Candidate, NotApplicableError, Problem, candidates
from weft.operator.spec import Operator
from weft.symm import Communicator

F32, F16, BF16, F64, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn
NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16", F64: "fp64", FP8: "fp8"}


def device() -> torch.device:
    """Return this rank's device: its GPU if the default group uses NCCL, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(device(), dtype)


def resized(x: torch.Tensor, *, keep: float = 0, before: int = 0) -> torch.Tensor:
    """Return a copy of `x` after shrinking the copy's storage to the fraction `keep`. With 0, its memory is freed.

    before: the number of elements of the storage that precede the copy.
    """
    flat = torch.empty(before + x.numel(), dtype=x.dtype, device=x.device)
    copy = flat.as_strided(x.shape, x.stride(), before).copy_(x)
    storage = copy.untyped_storage()
    storage.resize_(int(keep * storage.nbytes()))
    return copy


def close(found: torch.Tensor, exact: torch.Tensor, usual: torch.Tensor) -> None:
    """Check that the error against float64 is at most twice that of torch's own op in the same dtype."""
    if not exact.numel():
        return
    scale = exact.abs().max().clamp_min(1e-30)
    error = ((found.double() - exact).abs().max() / scale).item()
    bound = 2 * max(((usual.double() - exact).abs().max() / scale).item(), 1e-6)
    assert error <= bound, f"error {error:.3g}, torch's own is {bound / 2:.3g}"


def told(call: Callable[[], Any]) -> str:
    """Return the type and text of the error that `call` raises, or "nothing"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and text of the error that `call` must raise."""
    kind, _, text = told(call).partition(": ")
    assert kind != "nothing", "nothing was raised"
    return kind, text


def assert_error(error: tuple[str, str], kind: str | Collection[str], *said: str, match: str = "") -> None:
    """Assert that an error (its type and its text) is of this kind, or of one of these kinds. Its text must contain each of
    `said`, and a match of the regular expression `match`.
    """
    assert error[0] in ([kind] if isinstance(kind, str) else kind), f"{error} is no {kind}"
    for words in said:
        assert words in error[1], f"{words!r} is not in {error[1]!r}"
    assert re.search(match, error[1]), f"{match!r} is not in {error[1]!r}"


def assert_errors(errors: Iterable[tuple[str, str]], kind: str | Collection[str], *said: str, match: str = "") -> None:
    """Assert the same of all `errors`."""
    for error in errors:
        assert_error(error, kind, *said, match=match)


def descriptors() -> set[tuple[str, str]]:
    """Return each open descriptor of this process and what it is open on."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.add((entry, os.readlink(f"/proc/self/fd/{entry}")))
    return found


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group of the same ranks, for tests that make a group fail."""
    return dist.new_group(list(range(group.size())))


@contextlib.contextmanager
def waits_end_after(seconds: float) -> Iterator[None]:
    """Return a context in which waits for peers miss their deadline after `seconds`.

    Open it around a wait in vain, and let calls that must succeed have the usual deadline: a busy machine may be slow.
    """
    # A communicator reads the variable only when it is made.
    of_group = property(lambda comm: seconds, lambda comm, value: comm.__dict__.update(deadline_s=value))
    of_groups = mock.patch.object(Communicator, "deadline_s", of_group, create=True)
    with mock.patch.dict(os.environ, WEFT_DEADLINE_S=str(seconds)), of_groups:
        yield


def late(seconds: float) -> None:
    """Delay this rank's next call, on the CPU or on its GPU."""
    if device().type == "cuda":
        torch.cuda._sleep(int(seconds * 1e9))  # a GPU has about 1e9 cycles per second
    else:
        time.sleep(seconds)


def same_everywhere(group: dist.ProcessGroup, *ys: torch.Tensor) -> bool:
    """True if the tensors have equal bits on all ranks."""
    flat = torch.cat([y.contiguous().view(-1).view(torch.uint8) for y in ys])
    others = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(others, flat, group=group)
    return all(torch.equal(flat, other) for other in others)


@contextlib.contextmanager
def poisoned_outputs(operator: Operator[Any]) -> Iterator[None]:
    """Fill new results of `operator` with NaN while the context is open."""
    native = operator.outputs

    def outputs(call: Any, world: int) -> dict[str, Any]:
        return {name: t.fill_(torch.nan) for name, t in native(call, world).items()}

    operator.outputs = outputs  # type: ignore[method-assign]
    try:
        yield
    finally:
        operator.outputs = native  # type: ignore[method-assign]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let torch fill new memory with NaN while the context is open."""
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import torch's compiler
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def applicable(p: Problem) -> list[Candidate]:
    """Return the candidates that support `p`."""
    found = []
    for candidate in candidates(p):
        with contextlib.suppress(NotApplicableError):
            candidate.build()
            found.append(candidate)
    return found


def each_option(found: Iterable[Candidate]) -> list[Candidate]:
    """Return a subset of the candidates that contains each value of each parameter of each builder. Candidates that add
    the most values come first.
    """
    rest, kept, seen = list(found), list[Candidate](), set[Any]()

    def new(candidate: Candidate) -> int:
        return len({(candidate.builder, option) for option in candidate.parameters or [()]} - seen)

    while rest and new(best := max(rest, key=new)):
        seen |= {(best.builder, option) for option in best.parameters or [()]}
        kept.append(best)
    return kept
