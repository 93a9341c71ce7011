"""The benchmark of tensor-parallel blocks: refused options; on two ranks, its baseline against stock modules in
float64, and the detection of spoiled gradients and stale results.

Cheapest first: options and tables without processes, then two ranks.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bench import cpu_ranks

import weft.nn
from weft.bench.core.operator import Measured
from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.bench.ops import layers, tensor_parallel
from weft.bench.ops.layers import Layer
from weft.bench.ops.tensor_parallel import OPERATOR, Comparison
from weft.bench.ops.tensor_parallel_variants import Block, ModelSizes, StockAttention, StockMLP, variants_of
from weft.bench.report import markdown
from weft.launch import Pool

TINY = ModelSizes(32, 48, 4, 2, 24)
MLP, ATTENTION = Block("tiny", "mlp", TINY), Block("tiny", "attention", TINY)
WHOLE = [Block("whole", kind, TINY._replace(whole=True)) for kind in ("mlp", "attention")]
CPU = torch.device("cpu")
CHECKED = 3
"""The number of calls of a variant until it has been checked."""


def _options(**given: Any) -> BenchOptions:
    return BenchOptions(**{"op": OPERATOR.name, "modes": ("queued",), "quick": True, "seconds": 0.01, **given})


def test_presets_are_both_blocks_of_models_that_suit_the_device() -> None:
    of = ("mlp", "attention")
    assert [block.name for block in OPERATOR.presets(_options())] == [f"cpu {kind}" for kind in of]
    assert [block.name for block in OPERATOR.presets(_options(preset="cpu-whole"))] == [
        f"cpu-whole {kind}" for kind in of
    ]
    gpus = OPERATOR.presets(_options(device="cuda"))
    assert [block.name for block in gpus] == [f"llama-3-{size} {kind}" for size in ("8b", "70b", "405b") for kind in of]
    assert {block.model.length for block in gpus} == {8192}
    assert {block.model.head_dim for block in gpus} == {128}


def _rows(ms: dict[str, float], **more: Any) -> list[dict]:
    common = {
        "config": "llama-3-8b mlp",
        "dtype": "bf16",
        "device": "cuda",
        "ranks": 2,
        "repetitions": 9,
        "variables": {},
        "length": 8192,
    }
    rows = [common | {"variant": name, "p50_ms": of, "p20_ms": of, "p80_ms": of} | more for name, of in ms.items()]
    for r in rows:
        r |= {"hidden": 0.25, "fused_by_torch": 0} if r["variant"] in ("weft", "asynctp") else {"hidden": 3.0}
    return rows


def test_a_table_has_what_was_measured() -> None:
    rows = _rows({"serial": 10.0, "compute": 6.0, "weft": 9.0, "weft-compiled": 5.0, "asynctp": 7.5})
    text = OPERATOR.table(rows)
    header = "| block | compute | serial | weft | weft: hidden | weft-compiled | asynctp | weft-compiled vs asynctp |"
    assert text.splitlines()[0] == header
    assert "| llama-3-8b mlp | 6 | 10 | 9 | 25% | 5 | 7.5 | 1.50x |" in text
    assert "asynctp: a compiled call contains none of AsyncTP's operators: its collectives did not overlap." in text
    assert "asynctp never gathers by NVLink multicast here, because M is above 2048." in text
    assert "which it uses to gather for M <= 2048." in OPERATOR.table([r | {"length": 512} for r in rows])
    noisy = [r | {"p20_ms": 0.3 * r["p50_ms"], "p80_ms": 1.7 * r["p50_ms"]} for r in rows]
    assert "| (1.50x) |" in OPERATOR.table(noisy)
    few = OPERATOR.table(rows[:3])
    assert few.splitlines()[0] == "| block | compute | serial | weft | weft: hidden |"
    assert "asynctp" not in few
    two = [*rows, *(r | {"config": "b", "fused_by_torch": 2} for r in rows)]
    assert "of AsyncTP's operators: its collectives did not overlap (llama-3-8b mlp)." in OPERATOR.table(two)
    assert "a compiled call contains 2 of AsyncTP's operators (b)." in OPERATOR.table(two)


def test_blocks_of_a_large_tensor_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_BLOCK", 8)
    wanted = torch.arange(1.0, 13.0).view(6, 2)
    for row in range(6):
        for value, error in ((torch.nan, torch.inf), (torch.inf, torch.inf), (24.0, (24.0 - 2 * row - 1) / 12)):
            found = wanted.clone()
            found[row, 0] = value
            assert layers._distance(found, wanted) == pytest.approx(error)
    assert layers._distance(wanted, wanted) == 0


# --- two ranks ---


def _gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts, dim).double()


def _baseline_errors(group: dist.ProcessGroup, block: Block) -> dict[str, float]:
    """Return the errors of `serial` against a stock module in float64 on whole tensors."""
    work = Comparison(block, (), cpu_ranks(group), torch.float32)
    assert list(work.layers) == ["serial", "compute"]
    stock = {"mlp": StockMLP, "attention": StockAttention}[block.kind](block.model, CPU, torch.float64)
    divided = {name: int(name in ("down_proj.weight", "o_proj.weight")) for name, _ in stock.named_parameters()}
    parameters = dict(work.layers["serial"].module.named_parameters())
    stock.load_state_dict({name: _gathered(parameters[name], dim) for name, dim in divided.items()})
    is_whole = block.model.whole  # then sequences are the second dimension, and of the stock modules the first one
    x = (
        (work.inputs["x"].detach().double().transpose(0, 1) if is_whole else _gathered(work.inputs["x"], 0))
        .clone()
        .requires_grad_()
    )
    rotary = weft.nn.rotary_embedding(block.model.length, block.model.head_dim)
    y = stock(x, rotary) if block.kind == "attention" else stock(x)
    y.backward(work.grad.double().transpose(0, 1) if is_whole else _gathered(work.grad, 0))
    whole = {"y": (y.detach(), 0), "the gradient of x": (x.grad, 0)}
    whole |= {f"the gradient of {name}": (p.grad, divided[name]) for name, p in stock.named_parameters()}
    assert whole.keys() == work.wanted.keys()
    part = {name: of.chunk(group.size(), dim)[group.rank()] for name, (of, dim) in whole.items()}
    if is_whole:
        part |= {name: whole[name][0].transpose(0, 1) for name in ("y", "the gradient of x")}
    return {name: float((work.wanted[name] - part[name]).abs().max() / part[name].abs().max()) for name in whole}


@pytest.mark.parametrize("block", [MLP, ATTENTION, *WHOLE], ids=lambda block: block.name)
def test_the_baseline_is_right(pool: Pool, block: Block) -> None:
    for errors in pool.run(_baseline_errors, block, ranks=2, timeout_s=60):
        assert len(errors) == 5 + (block.kind == "attention")
        assert max(errors.values()) < 1e-5, errors


def _sizes(group: dist.ProcessGroup, block: Block) -> list[list[tuple[int, ...]]]:
    """Return the sizes of each variant's results. The result of `compute` may contain anything, but must have the same
    size.
    """
    work = Comparison(block, ("weft",), cpu_ranks(group), torch.bfloat16)
    made = [work.results(name, work.call(name)) for name in ("compute", "serial", "weft")]
    assert {value.dtype for of in made for value in of.values()} == {torch.bfloat16}
    return [[tuple(value.shape) for value in of.values()] for of in made]


@pytest.mark.parametrize("block", [MLP, ATTENTION], ids=["mlp", "attention"])
def test_compute_alone_is_of_the_same_size(pool: Pool, block: Block) -> None:
    for compute, serial, weft_s in pool.run(_sizes, block, ranks=2, timeout_s=60):
        assert compute == serial == weft_s


def _spoiled_gradient(after: int, rank: int, variant: Layer) -> Layer:
    """Return a variant that spoils the gradient of up_proj on one rank, after `after` calls, by a thousandth of its
    largest element.
    """
    calls = 0

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return grad + 1e-3 * grad.abs().max() if calls > after and dist.get_rank() == rank else grad

    variant.module.up_proj.weight.register_hook(spoil)  # type: ignore[union-attr, operator]
    return variant


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def _stale(variant: Layer) -> Layer:
    """Return a variant that computes its result once, and returns the same memory in later calls."""
    kept: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        y = variant.call(x)
        kept.append(y.detach().clone()) if not kept else None
        return _Kept.apply(y, kept[0])

    return Layer(variant.module, call)


def _measured(
    group: dist.ProcessGroup, block: Block, change: Callable[..., Layer] | None = None, *given: Any, **options: Any
) -> Measured:
    made = variants_of

    def changed(*arguments: Any) -> dict[str, Layer]:
        variants = made(*arguments)
        return variants | ({} if change is None else {"weft": change(*given, variants["weft"])})

    tensor_parallel.variants_of = changed
    try:
        wanted = _options(**{"variants": ("weft",), **options})
        return OPERATOR.measure(block, cpu_ranks(group), wanted, [], lambda what, share: None)
    finally:
        tensor_parallel.variants_of = made


@pytest.mark.parametrize("block", [MLP, ATTENTION], ids=["mlp", "attention"])
def test_records(pool: Pool, block: Block) -> None:
    first, second = pool.run(_measured, block, ranks=2, timeout_s=60)
    assert first.wrong == second.wrong == ()
    assert [r["p50_ms"] for r in first.records] == [r["p50_ms"] for r in second.records], "ranks agree"
    of = {r["variant"]: r for r in first.records}
    assert list(of) == ["serial", "compute", "weft"]
    wanted = "op config variant mode device ranks dtype p20_ms p50_ms p80_ms skew_ms repetitions calls host_us first_call_ms "
    wanted += (
        "baseline speedup speedup_over roofline_ms error hidden length machine versions commit source harness date"
    )
    for r in first.records:
        assert set(wanted.split()) <= set(r)
        assert (r["op"], r["config"], r["mode"], r["length"]) == ("tensor_parallel", block.name, "queued", 24)
        assert r["speedup"] == of["serial"]["p50_ms"] / r["p50_ms"]
        assert "fused_by_torch" not in r
    assert of["weft"]["error"] < 1e-5
    assert of["compute"]["error"] is None
    assert of["compute"]["hidden"] is None
    serial, compute, mine = (of[name]["p50_ms"] for name in ("serial", "compute", "weft"))
    hidden = (serial - mine) / (serial - compute) if serial > compute else None
    assert of["weft"]["hidden"] == (None if hidden is None else pytest.approx(hidden))
    json.dumps(first.records, allow_nan=False)
    assert f"| {block.name} |" in markdown([r | {"device": "cuda", "run": "a"} for r in first.records])


@pytest.mark.parametrize(
    ("after", "so"), [(0, "it was not timed"), (CHECKED, "this was the last output of a row of calls")]
)
def test_a_spoiled_gradient_is_found_on_every_rank(pool: Pool, after: int, so: str) -> None:
    for found in pool.run(_measured, MLP, _spoiled_gradient, after, 1, ranks=2, timeout_s=60):
        assert [r["variant"] for r in found.records] == ["serial", "compute"]
        (wrong,) = found.wrong
        assert wrong.startswith("tiny mlp: the gradient of up_proj.weight of weft differs from serial's by 0.001 of")
        assert so in wrong


def test_a_result_that_is_not_written_anew_is_found(pool: Pool) -> None:
    for found in pool.run(_measured, MLP, _stale, ranks=2, timeout_s=60):
        assert [r["variant"] for r in found.records] == ["serial", "compute"]
        assert found.wrong[0].startswith("tiny mlp: y of weft differs from serial's by inf of")


def _run(group: dist.ProcessGroup, file: Path, spoil: bool) -> list[dict] | str:
    before, made = tensor_parallel.MODELS["cpu"], variants_of
    tensor_parallel.MODELS["cpu"] = TINY

    def spoiled(block: Block, *others: Any) -> dict[str, Layer]:
        variants = made(block, *others)
        return variants | ({"weft": _spoiled_gradient(0, 0, variants["weft"])} if block.kind == "mlp" else {})

    tensor_parallel.variants_of = spoiled if spoil else made
    try:
        return run_rank(group.rank(), group.size(), _options(variants=("weft",), json=file))
    except RuntimeError as error:
        return str(error)
    finally:
        tensor_parallel.MODELS["cpu"], tensor_parallel.variants_of = before, made


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [False, True], ids=["", "spoiled"])
def test_a_run_records_and_ends_with_what_was_wrong(pool: Pool, tmp_path: Path, spoil: bool) -> None:
    file = tmp_path / "blocks.jsonl"
    first, second = pool.run(_run, file, spoil, ranks=2, timeout_s=100)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    measured = [(r["config"], r["variant"]) for r in rows]
    of_mlp = ["serial", "compute"] if spoil else ["serial", "compute", "weft"]
    assert measured == [("cpu mlp", v) for v in of_mlp] + [("cpu attention", v) for v in ("serial", "compute", "weft")]
    assert len({r["run"] for r in rows}) == 1
    if spoil:
        assert first == second
        assert first.startswith("cpu mlp: the gradient of up_proj.weight of weft differs")
    else:
        assert (first, second) == (rows, [])


@pytest.mark.slow
@pytest.mark.parametrize("block", [MLP, ATTENTION], ids=["mlp", "attention"])
def test_compiled_blocks_are_checked_too(pool: Pool, block: Block) -> None:
    variants = ("weft", "weft-compiled")
    found, _ = pool.run(_compiled, block, variants, ranks=2, timeout_s=300)
    assert found.wrong == ()
    of = {r["variant"]: r for r in found.records}
    assert list(of) == ["serial", "compute", *variants]
    assert of["weft-compiled"]["error"] < 1e-5


def _compiled(group: dist.ProcessGroup, block: Block, variants: tuple[str, ...]) -> Measured:
    return _measured(group, block, variants=variants)
