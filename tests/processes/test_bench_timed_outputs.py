"""Timed outputs are checked: a variant that is right in a single call, but wrong in a row of calls or of replays, gets
no time.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.bench import cpu_ranks

from weft.bench.core import measure
from weft.bench.core.harness import Mode, Ranks
from weft.bench.core.measure import Results, Workload, check, measure_variants
from weft.launch import Pool


class _Doubling(Workload):
    """The workload y = 2 x, in float32."""

    name, input_sets, dtype = "doubling", 2, torch.float32

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.x = [torch.arange(8.0).view(4, 2) + 10 * which for which in range(self.input_sets)]

    def reference(self, which: int) -> torch.Tensor:
        return 2 * self.x[which].double()

    def limit(self, name: str, errors: Any) -> float:
        return 1e-6

    def __call__(self, which: int) -> torch.Tensor:
        return 2 * self.x[which]


class _Tiring:
    """A variant that is right for some calls. From then on rank 1 returns the result of the previous call."""

    def __init__(self, work: _Doubling, calls: int) -> None:
        self.work, self.left, self.before = work, calls, work(0)

    def __call__(self, which: int) -> torch.Tensor:
        self.left -= 1
        found = self.before if self.left < 0 and self.work.ranks.rank == 1 else self.work(which)
        self.before = self.work(which)
        return found


class _Recorder:
    """A replacement for CUDA graphs, which makes the same call again into the same memory. A variant called `once`
    writes only in its first replays.
    """

    def __init__(self, ranks: Ranks) -> None: ...

    def capture(self, call: Callable[[int], torch.Tensor], which: int) -> Any:
        output, left = call(which), [getattr(call, "replays", 10**9)]

        class Graph:
            def replay(self) -> None:
                left[0] -= 1
                if left[0] >= 0:
                    output.copy_(call(which))

        return Graph(), output


def _measured(
    group: dist.ProcessGroup, modes: tuple[Mode, ...], variants: dict[str, int | str]
) -> tuple[Results, dict[str, str]]:
    """Measure the variants. variants: {name: number of calls after which it gets wrong, or "replays" if its graphs
    write only in their first replay}.
    """
    work = _Doubling(cpu_ranks(group))
    made: dict[str, Any] = {"baseline": work}
    for name, how in variants.items():
        made[name] = _Tiring(work, how if isinstance(how, int) else 10**9)
        if how == "replays":
            made[name].replays = 1
    eager = check(made, work).wrong
    for name, how in variants.items():
        if isinstance(how, int):
            made[name].left = how
    with mock.patch.object(measure, "Recorder", _Recorder):
        found = measure_variants(
            work, made, {}, modes=modes, seconds=0.01, repetitions=(3, 3), step=lambda what, share: None
        )
    return found, eager


@pytest.mark.parametrize("mode", ["single", "queued"])
def test_a_row_that_ends_wrong_has_no_time(pool: Pool, mode: Mode) -> None:
    # The timed calls follow a first call and 2 x 2 checked calls.
    for found, eager in pool.run(_measured, (mode, "graph"), {"fresh": 10**9, "tiring": 7}, ranks=2):
        assert eager == {}
        assert (mode, "fresh") in found.timings
        assert (mode, "tiring") not in found.timings
        assert ("graph", "tiring") not in found.timings, "nor is it captured"
        (text,) = found.wrong.values()
        assert f"doubling: tiring, {mode}, differs from the float64 reference" in text
        assert "its time is discarded" in text
        assert found.errors["tiring"] > 0.1
        assert found.errors["fresh"] == 0


def test_a_graph_that_is_replayed_without_writing_has_no_time(pool: Pool) -> None:
    for found, eager in pool.run(_measured, ("queued", "graph"), {"fresh": 10**9, "once": "replays"}, ranks=2):
        assert eager == {}
        assert {name for mode, name in found.timings if mode == "queued"} == {"baseline", "fresh", "once"}
        assert {name for mode, name in found.timings if mode == "graph"} == {"baseline", "fresh"}
        (text,) = found.wrong.values()
        assert "once, graph, differs" in text


def _tiring_baseline(group: dist.ProcessGroup) -> str:
    work = _Doubling(cpu_ranks(group))
    try:
        measure_variants(
            work, {"baseline": _Tiring(work, 7)}, {}, modes=("queued",), seconds=0.01, repetitions=(3, 3),
            step=lambda what, share: None,
        )  # fmt: skip
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_wrong_baseline_ends_the_run(pool: Pool) -> None:
    for found in pool.run(_tiring_baseline, ranks=2):
        assert "baseline, queued, differs" in found
