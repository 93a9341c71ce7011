"""The benchmark of MoE experts: its baseline against a dense layer in float64, its records, and the detection of a wrong
gradient.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.bench import cpu_ranks

from weft.bench.core.operator import Measured
from weft.bench.core.options import BenchOptions
from weft.bench.ops.expert_parallel import OPERATOR, Comparison
from weft.bench.ops.moe_shape import MoeShape
from weft.bench.report import markdown
from weft.launch import Pool

(TINY,) = MoeShape.named("6x8x10-e4-top2-zipf0.5", {})
LONELY = MoeShape(1, 8, 10, experts=4, top_k=1)
"""One token a rank: most experts have no rows."""


def _options(**given: Any) -> BenchOptions:
    return BenchOptions(**{"op": OPERATOR.name, "modes": ("queued",), "quick": True, "seconds": 0.01, **given})


def test_presets_are_those_of_combine() -> None:
    gpus = OPERATOR.presets(_options(device="cuda"))
    assert len(gpus) == 18
    assert {(shape.n, shape.k) for shape in gpus} == {(4096, 14336), (7168, 2048), (2048, 768)}
    (named,) = OPERATOR.presets(_options(preset="6x8x10-e4-top2"))
    assert (named.m, named.n, named.k, named.experts, named.top_k) == (6, 8, 10, 4, 2)


def test_a_table_has_a_row_for_each_shape() -> None:
    ms = {"serial": 10.0, "compute": 6.0, "weft": 8.0, "weft-bounded": 5.0}
    rows = [
        {"config": "a", "variant": name, "p50_ms": of, "p20_ms": of, "p80_ms": of, "repetitions": 9, "speedup": 10 / of,
         "hidden": 0.5, "device": "cuda", "ranks": 2, "variables": {}}
        for name, of in ms.items()
    ]  # fmt: skip
    text = OPERATOR.table(rows)
    assert "| a | 6 | 10 | 8 | 5 | 1.25x | 2.00x | 50% |" in text
    assert "weft: 1.25x serial in the geometric mean of 1 shape, 1.25x at worst." in text


# --- two ranks ---


def _gathered(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return [part.double() for part in parts]


def _baseline_errors(group: dist.ProcessGroup, shape: MoeShape) -> dict[str, float]:
    """Return the errors of `serial` against dense experts in float64, which have all weights and all tokens."""
    work = Comparison(shape, (), cpu_ranks(group), torch.float32)
    assert list(work.layers) == ["serial", "compute", "weft", "weft-bounded"]
    module = work.layers["serial"].module
    gate_up, down = (torch.cat(_gathered(w)).requires_grad_() for w in (module.gate_up_proj, module.down_proj))
    x, weights = ([part.requires_grad_() for part in _gathered(of)] for of in work.inputs.values())
    index = [shape.chosen(rank, 0) for rank in range(group.size())]
    results = []
    for tokens, of_tokens, experts in zip(x, weights, index, strict=True):
        gate, up = torch.einsum("th,ekh->tek", tokens, gate_up).chunk(2, dim=2)
        every = torch.einsum("tek,ehk->teh", F.silu(gate) * up, down)
        chosen = every.gather(1, experts.unsqueeze(2).expand(-1, -1, shape.n))
        results.append((chosen * of_tokens.unsqueeze(2)).sum(1))
    torch.autograd.backward(results, _gathered(work.grad))
    local, rank = shape.experts // group.size(), group.rank()
    here = slice(rank * local, (rank + 1) * local)
    expected = {
        "y": results[rank].detach(), "the gradient of x": x[rank].grad, "the gradient of top_k_weights": weights[rank].grad,
        "the gradient of gate_up_proj": gate_up.grad[here], "the gradient of down_proj": down.grad[here],
    }  # fmt: skip
    assert expected.keys() == work.wanted.keys()
    return {
        name: float((work.wanted[name] - of).abs().max() / of.abs().max().clamp(min=1)) for name, of in expected.items()
    }


@pytest.mark.parametrize("shape", [TINY, LONELY], ids=lambda shape: shape.name)
def test_the_baseline_is_right(pool: Pool, shape: MoeShape) -> None:
    for errors in pool.run(_baseline_errors, shape, ranks=2, timeout_s=60):
        assert max(errors.values()) < 1e-5, errors


def _measured(group: dist.ProcessGroup, spoil: bool) -> Measured:
    made = OPERATOR.workload(TINY, cpu_ranks(group), _options())
    if spoil:
        made.layers["weft-bounded"].module.max_rows = 1  # type: ignore[assignment]
    return made.measured(_options(), [], lambda what, share: None)


def test_records(pool: Pool) -> None:
    first, second = pool.run(_measured, False, ranks=2, timeout_s=100)
    assert first.wrong == second.wrong == ()
    assert [r["p50_ms"] for r in first.records] == [r["p50_ms"] for r in second.records], "ranks agree"
    of = {r["variant"]: r for r in first.records}
    assert list(of) == ["serial", "compute", "weft", "weft-bounded"]
    assert of["compute"]["error"] is None
    assert max(of[name]["error"] for name in ("weft", "weft-bounded")) < 1e-5
    for r in first.records:
        assert (r["op"], r["tokens"], r["experts"], r["rows"], r["skew"]) == ("expert_parallel", 6, 4, 12, 0.5)
    json.dumps(first.records, allow_nan=False)
    assert f"| {TINY.name} |" in markdown([r | {"device": "cuda", "run": "a"} for r in first.records])


def test_too_few_rows_are_an_error_of_the_variant(pool: Pool) -> None:
    with pytest.raises(Exception, match="max_rows=1"):
        pool.run(_measured, True, ranks=2, timeout_s=100)


def _spoiled(group: dist.ProcessGroup) -> tuple[str, ...]:
    work = OPERATOR.workload(TINY, cpu_ranks(group), _options())
    variant = work.layers["weft"]

    def call(*inputs: Any) -> torch.Tensor:
        y = variant.call(*inputs)
        y.register_hook(lambda grad: grad * (1.001 if group.rank() == 1 else 1.0))
        return y

    work.layers["weft"] = variant._replace(call=call)  # type: ignore[index]
    return tuple(work.measured(_options(), [], lambda what, share: None).wrong)


def test_a_wrong_gradient_is_found_on_every_rank(pool: Pool) -> None:
    for wrong in pool.run(_spoiled, ranks=2, timeout_s=100):
        assert len(wrong) == 1
        assert wrong[0].startswith(f"{TINY.name}: the gradient of ")
        assert "of weft differs from serial's by 0.001" in wrong[0]
