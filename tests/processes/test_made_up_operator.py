"""A new operator is a problem, builders and a spec. All other features follow from these, and nothing in weft refers to
this operator.

This file defines `matmul_scatter`, which sums the products x @ w of all ranks, and returns each rank's rows. It runs on
CPU processes without overlap and by a schedule of its own, has gradients, and works in torch.compile. It is simulated,
planned, explained and measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.slow import slow

from weft.bench.core import records
from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.bench.report import markdown
from weft.builders import Problem, builder
from weft.builders.operands import peer
from weft.launch import Pool
from weft.operator.calls import made
from weft.operator.registration import registered
from weft.operator.spec import Operator
from weft.plan import explain
from weft.runtime.unfused.collectives import all_gather
from weft.schedule import RANK, Draft, Schedule
from weft.schedule.verify import verify
from weft.sim import NULL, simulate


@dataclass(frozen=True, slots=True)
class MatmulScatter(Problem):
    """x [m, k] and w [k, n] in; y [m / ranks, n] out."""

    name: ClassVar[str] = "matmul_scatter"
    world_size: int
    m: int
    n: int
    k: int
    dtype: str


@builder(MatmulScatter)
def serial(p: MatmulScatter) -> Schedule:
    d, (x, w, y) = _operands("serial", p)
    whole = d.buffer("whole", p.m, p.n, p.dtype, "scratch")
    d.lane("compute").matmul(whole.part(), x.part(), w.part()).reduce_scatter(whole.part(), y.part())
    return d.schedule()


@builder(MatmulScatter)
def straight(p: MatmulScatter) -> Schedule:
    """Send the rows of each peer as soon as they are computed. Own rows are computed last, and added to the arrived
    rows.
    """
    d, (x, w, y) = _operands("straight", p)
    world, rows = p.world_size, p.m // p.world_size
    staged = d.buffer("staged", p.m, p.n, p.dtype, "scratch")
    box = d.buffer("box", p.m, p.n, p.dtype, "symmetric")
    done, there, credit = (d.signals(signal, world) for signal in ("done", "there", "credit"))
    compute, copy = d.lane("compute"), d.lane("copy", "copy")
    for distance in range(1, world + 1):
        to = peer(world, distance)
        part = (to * rows, rows)
        compute.matmul(staged.part(rows=part), x.part(rows=part), w.part()).set(done, to)
        copy.wait(done, to).wait(credit, to, previous=True)
        copy.copy(staged.part(rows=part), box.part(rows=(RANK * rows, rows), at=to)).set(there, RANK, at=to)
    for source in range(world):
        compute.wait(there, source)
    compute.reduce(y.part(), *(box.part(rows=(source * rows, rows)) for source in range(world)))
    for source in range(world):
        compute.set(credit, RANK, at=source)
    return d.schedule()


def _operands(name: str, p: MatmulScatter) -> tuple[Draft, tuple[Any, ...]]:
    d = Draft(name, p.world_size)
    x, w = d.buffer("x", p.m, p.k, p.dtype, "input"), d.buffer("w", p.k, p.n, p.dtype, "input")
    return d, (x, w, d.buffer("y", p.m // p.world_size, p.n, p.dtype, "output"))


class Call(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor


class Spec(Operator[Call]):
    name, form = "matmul_scatter", Call
    gradients_of: ClassVar[Mapping[str, str]] = {"x": "x", "w": "w"}

    def problem(self, call: Call, world: int, most: int) -> MatmulScatter:
        return MatmulScatter(world, call.x.shape[0], call.w.shape[1], call.x.shape[1], "fp32")

    def outputs(self, call: Call, world: int) -> dict[str, Any]:
        return {"y": call.x.new_empty(call.x.shape[0] // world, call.w.shape[1])}

    def gradients(self, p: Any, group: Any, saved: Any, grads: Any, wanted: Any, turn: Any, beside: Any) -> list[Any]:
        (x, w), rows = saved, [p.m // p.world_size] * p.world_size
        whole = all_gather(grads[0].contiguous(), rows, group.rank(), group, turn, "all_gather of y's gradient")
        return [whole @ w.t() if wanted[0] else None, x.t() @ whole if wanted[1] else None]

    def drawn(self, p: MatmulScatter, rank: int, generator: torch.Generator) -> Call:
        return Call(*(torch.randn(*s, generator=generator, device=generator.device) for s in ((p.m, p.k), (p.k, p.n))))

    def expected(self, p: MatmulScatter, rank: int, calls: Sequence[Call]) -> list[torch.Tensor]:
        return [sum(x.double() @ w.double() for x, w in calls).chunk(p.world_size)[rank]]  # type: ignore[union-attr]


OPERATOR = registered(Spec())


def matmul_scatter(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, schedule: Any = None) -> torch.Tensor:
    (y,) = made(OPERATOR, group, x, lambda _: Call(x, w), schedule=schedule)
    return y


def run(group: dist.ProcessGroup) -> None:
    rank, world, p = group.rank(), group.size(), MatmulScatter(group.size(), 4 * group.size(), 6, 8, "fp32")
    compiled = torch.compile(lambda x, w: matmul_scatter(x, w, group), fullgraph=True, backend="aot_eager")
    for call, schedule in enumerate(("serial", "straight", None, "straight", "compiled")):
        calls = [OPERATOR.drawn(p, r, torch.Generator().manual_seed(10 * call + r)) for r in range(world)]
        x, w = (t.clone().requires_grad_() for t in calls[rank])
        y = compiled(x, w) if schedule == "compiled" else matmul_scatter(x, w, group, schedule)
        torch.testing.assert_close(y.double(), OPERATOR.expected(p, rank, calls)[0], rtol=1e-5, atol=1e-5)
        grad = torch.randn(p.m, p.n, generator=torch.Generator().manual_seed(call))
        y.backward(grad.chunk(world)[rank])
        torch.testing.assert_close(x.grad, grad @ calls[rank].w.t())
        torch.testing.assert_close(w.grad, calls[rank].x.t() @ grad)
    torch.library.opcheck(torch.ops.weft.matmul_scatter.default, (x, w, group.group_name, "serial", 0.0))


def measured(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    options = BenchOptions("matmul_scatter", "16x6x8", variants=("weft", "straight"), quick=True, seconds=0.05)
    return run_rank(group.rank(), 2, options)


@pytest.mark.parametrize("world", [slow(1), slow(2), 3])
def test_it_runs_differentiates_and_compiles(pool: Pool, world: int) -> None:
    pool.run(run, ranks=world, timeout_s=120)


def test_it_is_verified_simulated_planned_and_explained() -> None:
    p = MatmulScatter(4, 4096, 1024, 8192, "bf16")
    for build in (serial, straight):
        verify(build(MatmulScatter(4, 8, 4, 4, "bf16")))
        assert [span for span in simulate(build(p), NULL).timeline if "matmul" in span.name]
    assert "straight" in explain("matmul_scatter", M=4096, N=1024, K=8192, ranks=4, hw="h200")


@pytest.mark.slow
def test_it_is_measured_and_reported(pool: Pool, tmp_path: Path) -> None:
    written = pool.run(measured, ranks=2, timeout_s=120)[0]
    assert {r["variant"] for r in written} == {"serial", "weft", "straight"}
    assert all(r["p50_ms"] > 0 and r["error"] < 1e-5 for r in written)
    records.append(tmp_path / "results.jsonl", [r | {"device": "cuda"} for r in written])  # CPU times may be too short
    assert "| 16x6x8 | " in markdown(records.read([tmp_path / "results.jsonl"]))
