"""One rank of a torus represents all ranks: its time equals that of a simulation of every rank, and the work grows
linearly with the number of ranks.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest
from support.sim_toys import gpu
from support.slow import slow

from weft.builders import AllGatherMatmul, EmbeddingAllToAll
from weft.errors import ScheduleError
from weft.hw import load_machine
from weft.hw.topology import load_topology
from weft.plan import comparison
from weft.schedule import RANK, Index
from weft.sim import Model, run_us
from weft.sim.bounds import bound, bound_of
from weft.sim.orbits import NAMES, orbit, orbit_us

builders = importlib.import_module("weft.builders.embedding_all_to_all")


def _on_torus(*dims: int) -> Model:
    name = f"torus:{'x'.join(map(str, dims))}"
    return replace(gpu("mi300x", math.prod(dims)), world_size=0, wiring=load_topology(name, load_machine("mi300x")))


def _problem(world: int, batch: int, tables: int, rows: int) -> EmbeddingAllToAll:
    return EmbeddingAllToAll.sized(batch * world, 64, rows, world, tables=tables * world)


@pytest.mark.parametrize("dims", [(4, 4), (2, 3, 3), slow((8, 2)), slow((3, 5)), slow((8, 8)), slow((4, 4, 4))])
@pytest.mark.parametrize(("batch", "tables", "read"), [(256, 1, 32), (64, 4, 64), (16, 1, 1)])
def test_one_rank_takes_as_long_as_all(
    dims: tuple[int, ...], batch: int, tables: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def displaced(world: int, distance: int) -> Index:
        sign, to, stride = 1 if distance > 0 else -1, RANK * 0, 1
        for size in dims:
            to = to + (RANK // stride % size + sign * (abs(distance) // stride % size)) % size * stride
            stride *= size
        return to

    problem, model = _problem(math.prod(dims), batch, tables, read), _on_torus(*dims)
    monkeypatch.setattr(builders, "peer", displaced)  # peers in the order of their displacement
    for name in NAMES:
        schedule = getattr(builders, name)(problem)
        assert orbit_us(orbit(problem, model, name), model) == pytest.approx(
            run_us(schedule, model, "queued"), rel=1e-6
        )


def test_the_bound_is_that_of_all_ranks() -> None:
    problem, model = _problem(16, 64, 2, 8), _on_torus(4, 4)
    one, every = bound_of(orbit(problem, model, "serial", runs=1).program), bound(problem, model)
    assert (one.compute_us, one.links_us) == pytest.approx((every.compute_us, every.links_us))


def test_a_torus_of_1024_is_near_its_bound_where_links_decide() -> None:
    found = comparison(
        "embedding_all_to_all", M=1024 * 256, N=64, K=4, ranks=1024, hw="mi300x", dtype="fp32", topology="torus:32x32", tables=1024
    )  # fmt: skip
    rows = {row.name: row for row in found.rows}
    assert set(rows) == set(NAMES)
    assert all(row.over_bound is not None and row.over_bound >= 1 for row in rows.values())
    assert (rows["serial"].over_bound or 9) < 1.1
    with pytest.raises(ValueError, match="1024 ranks cannot be traced"):
        found.simulated("serial")


def test_a_trace_of_1024_ranks_is_refused_before_the_simulation() -> None:
    said: list[str] = []
    with pytest.raises(ValueError, match="1024 ranks cannot be traced: use at most 256 ranks"):
        comparison(
            "embedding_all_to_all", M=1024, N=64, K=4, ranks=1024, hw="mi300x", dtype="fp32", topology="torus:32x32",
            written=["serial"], progress=lambda what, share: said.append(what), tables=1024,
        )  # fmt: skip
    assert not said


def test_what_one_rank_cannot_represent_is_refused() -> None:
    model = _on_torus(4, 2)
    for problem, told in (
        (EmbeddingAllToAll.sized(32, 64, 1, 8, tables=7), "ranks have different tables"),
        (AllGatherMatmul.even(64, 64, 64, 8), "8 ranks of all_gather_matmul are too many"),
    ):
        with pytest.raises(ValueError, match=told):
            orbit(problem, model, "serial")
    with pytest.raises(ValueError, match="cannot represent all 2 ranks: use at least 3"):
        orbit(_problem(2, 4, 1, 1), _on_torus(2, 1), "serial")
    with pytest.raises(ValueError, match="needs a torus: use --topology"):
        orbit(_problem(8, 4, 1, 1), gpu("h200", 8), "serial")
    with pytest.raises(
        ValueError,
        match="does not support a simulation in which one rank represents all: use one of serial, direct, put",
    ):
        orbit(_problem(8, 4, 1, 1), model, "shard")
    with pytest.raises(ScheduleError, match="GB on a rank"):
        orbit(_problem(8, 1 << 22, 64, 1), model, "serial")
