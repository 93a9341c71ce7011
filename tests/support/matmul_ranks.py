"""all_gather_matmul in tests, on CPU processes and on GPUs: what runs on the ranks.

Data are made from seeds, so every rank knows every other's."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import weft


def device() -> torch.device:
    """This rank's: a GPU where the group is of GPUs."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(device(), dtype)


def shards_of(
    world: int, shape: tuple[int, ...], gather_dim: int, rows: list[int] | None, dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    sizes = rows or [shape[gather_dim]] * world
    return [data(r, (*shape[:gather_dim], n, *shape[gather_dim + 1 :]), dtype, seed) for r, n in enumerate(sizes)]


def close(found: torch.Tensor, exact: torch.Tensor, usual: torch.Tensor) -> None:
    """At most twice the error of torch's own op in the same dtype."""
    if not exact.numel():
        return
    scale = exact.abs().max().clamp_min(1e-30)
    error = ((found.double() - exact).abs().max() / scale).item()
    bound = 2 * max(((usual.double() - exact).abs().max() / scale).item(), 1e-6)
    assert error <= bound, f"error {error:.3g}, torch's own is {bound / 2:.3g}"


def forward(
    group: dist.ProcessGroup, shape: tuple[int, ...], gather_dim: int, widths: list[int], rows: list[int] | None,
    dtype: torch.dtype, return_A: bool, schedule: str | None, calls: int,
) -> None:  # fmt: skip
    rank, world, k = group.rank(), group.size(), shape[-1]
    for call in range(calls):
        shards = shards_of(world, shape, gather_dim, rows, dtype, call)
        assert rows is None or len(rows) == world
        Bs = [data(rank, (n, k), dtype, 50 + call + i).t() for i, n in enumerate(widths)]
        A, ys = weft.all_gather_matmul(
            shards[rank], Bs, gather_dim, group, return_A=return_A, schedule=schedule, rows=rows
        )
        whole = torch.cat(shards, gather_dim)
        if return_A:
            assert A is not None
            assert torch.equal(A, whole)
        else:
            assert A is None
        assert len(ys) == len(Bs)
        for y, B in zip(ys, Bs, strict=True):
            assert y.shape == (*whole.shape[:-1], B.shape[1])
            assert y.dtype == dtype
            close(y, whole.double() @ B.double(), whole @ B)


def backward(
    group: dist.ProcessGroup, rows: list[int], widths: list[int], return_A: bool, compiled: bool, dtype: torch.dtype
) -> None:
    """Gradients of a random weighing of all results, against autograd on the whole in float64."""
    rank, world, k = group.rank(), group.size(), 12
    shards = shards_of(world, (rows[rank], k), 0, rows, dtype, 1)
    Bs_of = [[data(r, (k, n), dtype, 60 + i) for i, n in enumerate(widths)] for r in range(world)]
    weights_of = [[data(r, (sum(rows), n), dtype, 70 + i) for i, n in enumerate([k, *widths])] for r in range(world)]

    def loss(x: torch.Tensor, Bs: list[torch.Tensor]) -> torch.Tensor:
        A, ys = weft.all_gather_matmul(x, Bs, 0, group.group_name, return_A=return_A, rows=rows)
        total = sum((y * w).sum() for y, w in zip(ys, weights_of[rank][1:], strict=True))
        return total + (A * weights_of[rank][0]).sum() if A is not None else total

    x = shards[rank].clone().requires_grad_()
    Bs = [B.clone().requires_grad_() for B in Bs_of[rank]]
    (torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss)(x, Bs).backward()

    exact_x = torch.cat(shards).double().requires_grad_()
    exact_Bs = [[B.double().requires_grad_() for B in of_rank] for of_rank in Bs_of]
    total = torch.zeros((), dtype=torch.float64, device=device())
    for r in range(world):
        for B, w in zip(exact_Bs[r], weights_of[r][1:], strict=True):
            total = total + ((exact_x @ B) * w.double()).sum()
        if return_A:
            total = total + (exact_x * weights_of[r][0].double()).sum()
    total.backward()
    first = sum(rows[:rank])
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact_x.grad[first : first + rows[rank]], rtol=2e-4, atol=2e-3)
    for B, exact in zip(Bs, exact_Bs[rank], strict=True):
        assert B.grad is not None
        torch.testing.assert_close(B.grad.double(), exact.grad, rtol=2e-4, atol=2e-3)


def many_sizes(group: dist.ProcessGroup, count: int, most: int = 40, kept: int = 64) -> int:
    """Random M, back to back, two operators of a group taking turns; compared only afterwards. How many threads there are."""
    from weft.operator import cache

    cache.KEPT = kept
    rank, world = group.rank(), group.size()
    random = torch.Generator().manual_seed(5)
    results = []
    for call in range(count):
        m = int(torch.randint(1, most, (1,), generator=random))
        shards = shards_of(world, (m, 16), 0, None, torch.float32, call)
        B = data(rank, (16, 8 + 8 * (call % 2)), torch.float32, call)
        name = "shard[chunks=1,send=in_turn,by=dma]" if world > 1 else "serial"
        results.append((weft.all_gather_matmul(shards[rank], [B], 0, group, schedule=name)[1][0], torch.cat(shards), B))
    for y, whole, B in results:
        close(y, whole.double() @ B.double(), whole @ B)
    return threading.active_count()


def remembers_times(group: dist.ProcessGroup) -> list[str]:
    """The schedules that were timed at the first call of a shape, which others of its description, in another process or after
    the domain has gone, do not time again."""
    from weft import env, symm
    from weft.operator import measure
    from weft.plan import store

    symm.domain(group, "cpu").close()  # for which sizes near this one may have been timed
    x, B = data(group.rank(), (6, 16), torch.float32, 1), data(0, (16, 10), torch.float32, 2)
    _, (first,) = weft.all_gather_matmul(x, [B], 0, group)
    symm.domain(group, "cpu").close()
    original = measure._time_us
    measure._time_us = None  # type: ignore[assignment]
    try:
        _, (again,) = weft.all_gather_matmul(x, [B], 0, group)
    finally:
        measure._time_us = original
        symm.domain(group, "cpu").close()
    assert torch.equal(first, again)
    kept = [store.read(path) or {} for path in env.cache_dir().glob("autotune-*.json")]
    (found,) = (content for content in kept if "'rows': (6, 6), 'n': (10,), 'k': 16" in content["key"]["problem"])
    assert found["key"]["mode"] == "single"
    return sorted(found["times_us"])


def measures_gemms(group: dist.ProcessGroup) -> dict[str, Any]:
    """Choose as on a GPU with a model, whose GEMMs take made-up times: twice as long on rank 1."""
    from weft import symm
    from weft.hw import load_machine
    from weft.operator import measure, this_machine
    from weft.plan import gemms
    from weft.sim import model_of

    rank = group.rank()
    timed: list[tuple[int, int, int, str]] = []
    # Launches and copies cost next to nothing, so that small GEMMs are worth cutting up.
    model = replace(model_of(load_machine("h200"), group.size()), launch_us=0.01, copy_latency_us=0.01, sustained=1.0)

    def timer(p: Any, tensors: dict[str, torch.Tensor]) -> Any:
        def time_us(shape: tuple[int, int, int, str], warm: int, calls: int) -> float:
            assert tensors["y0"].shape == (p.m, p.n[0])
            timed.append(shape)
            return (1 + rank) * 1e-3 * shape[0]

        return time_us

    def call(m: int, **options: Any) -> list[tuple[int, int, int, str]]:
        before = len(timed)
        shards = shards_of(group.size(), (m, 16), 0, None, torch.float32, 1)
        B = data(0, (16, 10), torch.float32, 2)
        _, (y,) = weft.all_gather_matmul(shards[rank], [B], 0, group, **options)
        whole = torch.cat(shards)
        close(y, whole.double() @ B.double(), whole @ B)
        return timed[before:]

    original = this_machine.calibrated_model
    this_machine.calibrated_model = lambda device, world_size: model  # type: ignore[assignment]
    measure.TIMERS["cpu"] = timer
    try:
        found = {"pinned": call(48, schedule="serial"), "first": call(48), "again": call(48), "half": call(24)}
        informed = this_machine.machine_model(device(), group.size())
        assert informed is not None
        known = gemms.measured_here(this_machine.device_name(device()))
        return {**found, "known": dict(known), "model": informed.measured_us}
    finally:
        this_machine.calibrated_model = original
        del measure.TIMERS["cpu"]
        gemms._times.clear()
        symm.domain(group, "cpu").close()  # and with it what was chosen


def errors(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of bad arguments, each raised on every rank before anything is sent."""
    x, B, world = torch.randn(4, 8, device=device()), torch.randn(8, 3, device=device()), group.size()
    calls: dict[str, Any] = {
        "one dimension": lambda: weft.all_gather_matmul(x[0], [B], 0, group),
        "last dimension": lambda: weft.all_gather_matmul(x, [B], 1, group),
        "no matrix": lambda: weft.all_gather_matmul(x, [], 0, group),
        "other K": lambda: weft.all_gather_matmul(x, [B[:5]], 0, group),
        "other dtype": lambda: weft.all_gather_matmul(x, [B.double()], 0, group),
        "strange dtype": lambda: weft.all_gather_matmul(x.int(), [B.int()], 0, group),
        "rows": lambda: weft.all_gather_matmul(x, [B], 0, group, rows=[5] * world),
        "schedule": lambda: weft.all_gather_matmul(x, [B], 0, group, schedule="shrad"),
        "no name": lambda: weft.all_gather_matmul(x, [B], 0, group, schedule=["serial"] if group.rank() else None),  # type: ignore[arg-type]
        "cannot": lambda: weft.all_gather_matmul(
            x[: 3 + (group.rank() == 0)], [B], 0, group, rows=[4] + [3] * (world - 1),
            schedule="shard[chunks=2,send=in_turn,by=dma]",
        ),
        "deadline": lambda: weft.all_gather_matmul(x, [B], 0, group, deadline_s=-1),
        "timeline": lambda: weft.all_gather_matmul(x, [B], 0, group, timeline=3),
    }  # fmt: skip
    told = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            told[name] = str(error)
    return told


def layouts(group: dist.ProcessGroup, schedule: str | None, calls: int = 10) -> None:
    """Calls of one shape with weights by columns on rank 0 and of other strides on the others, in turn."""
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.Tensor.contiguous,  # by rows
        lambda w: w,
        lambda w: torch.cat((w.t(), w.t())).t()[:, : w.shape[1]],  # by columns, of a wider one
        lambda w: w.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],  # which has to be copied
    ]
    rank, world = group.rank(), group.size()
    for call in range(calls):
        shards = shards_of(world, (64, 128), 0, None, torch.bfloat16, call)
        w = data(rank, (96, 128), torch.bfloat16, 50 + call).t()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = ways[call % len(ways)](w) if rank else w
            _, (y,) = weft.all_gather_matmul(shards[rank], [given], 0, group, return_A=False, schedule=schedule)
        whole = torch.cat(shards)
        close(y, whole.double() @ w.double(), whole @ w)


def copies(group: dist.ProcessGroup) -> list[str]:
    """The warnings of calls whose layouts cost a copy, made twice each."""
    x, B = torch.randn(8, 6, device=device()).t()[:, ::2], torch.randn(8, 12, device=device())[::2, ::2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            _, (y,) = weft.all_gather_matmul(x, [B], 0, group, return_A=False)
    rank = group.rank()
    torch.testing.assert_close(y[rank * 6 : (rank + 1) * 6], x @ B)
    return [str(w.message) for w in caught]


def serial_after_a_failure(group: dist.ProcessGroup) -> list[str]:
    """Return the errors of unfused calls of a known shape after the group has failed in another call."""
    x, ws = torch.randn(4, 8), {n: torch.randn(8, n) for n in (3, 5)}

    def call(n: int, schedule: str, **options: Any) -> str:
        try:
            weft.all_gather_matmul(x, [ws[n]], 0, group, schedule=schedule, **options)
        except weft.errors.WeftError as error:
            return type(error).__name__
        return "done"

    found = [call(3, "serial"), call(5, "gather[by=kernel]")]
    if group.rank() == 0:
        found.append(call(5, "gather[by=kernel]", deadline_s=0.5))
    else:
        time.sleep(1.5)
    return [*found, call(3, "serial")]


def by_heuristic(group: dist.ProcessGroup) -> tuple[list[tuple[str, str]], list[str]]:
    """(schedules that calls ran: pinned so, and inside `use`), and what was warned of: M > K, M < K, and what it cannot do."""
    from weft.operator import calls, select

    rank, world, found = group.rank(), group.size(), []
    quiet = os.environ.pop("WEFT_QUIET", "0")
    select._said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for m, k, options in (
            (24, 16, {}),
            (4, 96, {}),
            (4, 96, {"return_A": True}),
            (3, 12, {"rows": range(3, 3 + world)}),
        ):
            sizes, names = options.get("rows"), []
            for call, given in enumerate(("heuristic", None)):
                shards = shards_of(world, (m, k), 0, sizes and list(sizes), torch.float32, call)
                B = data(rank, (k, 5 + call), torch.float32, 50 + call)
                with weft.plan.use("heuristic" if given is None else "serial"):
                    _, (y,) = weft.all_gather_matmul(
                        shards[rank], [B], 0, group, **{"return_A": False, **options}, schedule=given
                    )
                whole = torch.cat(shards)
                close(y, whole.double() @ B.double(), whole @ B)
                names.append(calls.TABLES["all_gather_matmul"].known(group)[-1].taken[0])
            found.append(tuple(names))
    os.environ["WEFT_QUIET"] = quiet
    return found, [text for w in caught if "heuristic" in (text := str(w.message))]


def serial_steps(group: dist.ProcessGroup) -> list[str]:
    """A timeline of the library's calls on rank 0 alone."""
    x, Bs = data(group.rank(), (6, 16), torch.float32, 1), [data(0, (16, n), torch.float32, n) for n in (8, 4)]
    timeline = weft.Timeline() if group.rank() == 0 else None
    for _ in range(2):
        weft.all_gather_matmul(x, Bs, 0, group, schedule="serial", timeline=timeline)
    spans = [] if timeline is None else list(timeline)
    assert all(span.duration_us > 0 and span.lane == "compute" for span in spans)
    return [f"{span.name}: {span.bytes}" for span in spans]


def never_comes(group: dist.ProcessGroup) -> str:
    """Rank 0 calls twice and the others once."""
    x, B = torch.randn(4, 8), torch.randn(8, 3)
    name = "shard[chunks=1,send=in_turn,by=dma]"
    weft.all_gather_matmul(x, [B], 0, group, schedule=name)
    if group.rank() == 0:
        try:
            weft.all_gather_matmul(x, [B], 0, group, schedule=name, deadline_s=1)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"
    time.sleep(3)
    return ""


def checked_as_op(group: dist.ProcessGroup) -> None:
    x, B = torch.randn(4, 8, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    weft.all_gather_matmul(x, [B], 0, group)
    arguments = (x, [B], True, None, None, group.group_name, "", 0.0)
    torch.library.opcheck(torch.ops.weft.all_gather_matmul.default, arguments)


def captured(group: dist.ProcessGroup, m: int, n: int, k: int, replays: int) -> str:
    """A CUDA graph with two calls in it, replayed with fresh data; how a first call inside a capture fails."""
    rank, world, dtype = group.rank(), group.size(), torch.bfloat16
    x, B = data(rank, (m, k), dtype, 1), data(rank, (n, k), dtype, 2).t()
    stream = torch.cuda.Stream()
    told = ""
    with torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                weft.all_gather_matmul(x, [B], 0, group, return_A=False)
        except ValueError as error:
            told = str(error)
        weft.all_gather_matmul(x, [B], 0, group, return_A=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _, (y,) = weft.all_gather_matmul(x, [B], 0, group, return_A=False)
        _, (z,) = weft.all_gather_matmul(x * 2, [B], 0, group, return_A=False)
    for replay in range(replays):
        shards = [data(r, (m, k), dtype, 10 + replay) for r in range(world)]
        x.copy_(shards[rank])
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        whole = torch.cat(shards)
        close(y, whole.double() @ B.double(), whole @ B)
        close(z, 2 * whole.double() @ B.double(), (2 * whole) @ B)
    return told


def told(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """One that may fail."""
    return dist.new_group(list(range(group.size())))


def one_rank_differs(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank if rank 0 does something else: each time in a group of its own, which ends. A refusal ends
    none."""
    first = group.rank() == 0
    x, B = torch.randn(4, 8, device=device()), torch.randn(8, 3, device=device())
    wide = torch.randn(8, 5 if first else 6, device=device(), requires_grad=first)
    calls = {
        "dtype": lambda g: weft.all_gather_matmul(x.half() if first else x, [B.half() if first else B], 0, g, schedule="serial"),
        "schedule": lambda g: weft.all_gather_matmul(x, [B], 0, g, schedule="serial" if first else "gather[by=kernel]"),
        "rows": lambda g: weft.all_gather_matmul(x, [B], 0, g, rows=[4, 4] if first else [6, 4], schedule="serial"),
        "gradients": lambda g: weft.all_gather_matmul(x, [wide], 0, g),
        "columns": lambda g: weft.all_gather_matmul(x, [wide.detach()], 0, g),
    }  # fmt: skip
    found = {name: told(lambda call=call: call(own_group(group))) for name, call in calls.items()}
    found["refuses"] = told(lambda: weft.all_gather_matmul(x, [B[:5] if first else B], 0, group))
    _, (y,) = weft.all_gather_matmul(x, [B], 0, group, return_A=False)
    rank = group.rank()
    torch.testing.assert_close(y[4 * rank : 4 * rank + 4], x @ B)
    return found


def odd_uses(group: dist.ProcessGroup) -> dict[str, str]:
    """Uses that work, or say why not."""
    x, B = torch.randn(4, 8, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    found = {}
    for schedule in ("serial", "gather[by=kernel]"):
        with torch.autocast("cpu", torch.bfloat16):
            _, (y,) = weft.all_gather_matmul(x, [B], 0, group, schedule=schedule)
            y.sum().backward()
        found[f"autocast {schedule}"] = str(y.dtype)
    (grad,) = torch.autograd.grad((weft.all_gather_matmul(x, [B], 0, group)[1][0] ** 2).sum(), [x], create_graph=True)
    found["twice"] = told(lambda: torch.autograd.grad((grad**2).sum(), [x]))
    compiled = torch.compile(lambda a, b: weft.all_gather_matmul(a, [b], 1, group)[1][0], backend="eager")
    found["compiled"] = told(lambda: compiled(torch.randn(4, 4), torch.randn(4, 4)))
    expanded = torch.randn(1, 3).expand(8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, (y,) = weft.all_gather_matmul(x, [expanded], 0, group)
    rank = group.rank()
    torch.testing.assert_close(y[4 * rank : 4 * rank + 4], x @ expanded)
    weft.all_gather_matmul(x, [B], 0, group)
    found["deadline"] = told(lambda: weft.all_gather_matmul(x, [B], 0, group, deadline_s=float("nan")))
    found["one tensor"] = told(lambda: weft.all_gather_matmul(x, B, 0, group))  # type: ignore[arg-type]
    found["no extent"] = str(list(weft.all_gather_matmul(torch.randn(4, 0, 8), [B.detach()], 0, group)[1][0].shape))
    return found


def groups_come_and_go(group: dist.ProcessGroup, rounds: int) -> list[int]:
    """How many file descriptors are open after each round of a group of its own, used and destroyed."""
    counts = []
    for _ in range(rounds):
        own = dist.new_group(list(range(group.size())))
        weft.all_gather_matmul(torch.randn(4, 8), [torch.randn(8, 3)], 0, own)
        dist.destroy_process_group(own)
        del own
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def backward_by_other_operators(
    group: dist.ProcessGroup, rows: list[int], widths: list[int], return_A: bool, wanted: str
) -> tuple[set[str], bool]:
    """(which operators backward calls, whether the gradients of equal calls have equal bits). The first call chooses. wanted:
    "x", or "all"."""
    from weft.operator.calls import OPERATORS, prepared_calls

    own = own_group(group)
    x = data(group.rank(), (rows[group.rank()], 16), torch.float32, 1).requires_grad_()
    Bs = [data(group.rank(), (16, n), torch.float32, 2).requires_grad_(wanted == "all") for n in widths]
    found = []
    for _ in range(4):
        _, ys = weft.all_gather_matmul(x, Bs, 0, own, return_A=return_A, rows=rows)
        loss = sum((y * data(0, tuple(y.shape), torch.float32, 3)).sum() for y in ys)
        assert isinstance(loss, torch.Tensor)
        found.append(torch.autograd.grad(loss, [x, *Bs] if wanted == "all" else [x]))
    equal = all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one, strict=True))
    return {name for name in OPERATORS if prepared_calls(OPERATORS[name], own)} - {"all_gather_matmul"}, equal
