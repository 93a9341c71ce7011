"""Presets have the sizes that their sources state, shrink as documented, and draw the inputs that they describe."""

import itertools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weft.bench.core.options import BenchOptions
from weft.bench.ops import ficco_shapes
from weft.bench.ops.embedding_presets import (
    PRESETS,
    SMALL_TABLE,
    Bag,
    Scale,
    Zipf,
    find_presets,
    fitting_scale,
    jagged_input,
)
from weft.bench.ops.ficco_shapes import GatherShape, fitted
from weft.bench.ops.gemms import CPU_GROUP, GemmShape, find_shapes, memory_of_schedules, shapes_file
from weft.bench.ops.moe_shape import MoeShape
from weft.bench.table_1 import TABLE_1

CPU = torch.device("cpu")
META_2021_INDICES, META_2021_DISTINCT, META_2021_HOT_SHARE = 468_084_223, 61_644_628, 0.255
"""Published statistics of the batch. HOT_SHARE: the share of indices whose row occurs more than 1024 times in the
batch.
"""
FP32 = torch.float32


def probabilities(zipf: Zipf, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (probability of a row, number of rows with this probability). The tail is grouped, with an error of about
    1e-3.
    """
    edges = np.unique(np.concatenate([np.arange(min(rows, 200)), np.geomspace(min(rows, 200), rows, 600).round()]))
    power = 1 - zipf.exponent
    mass = np.log(edges + 1) if abs(power) < 1e-9 else ((edges + 1) ** power - 1) / power
    width = np.diff(edges)
    return np.diff(mass / mass[-1]) / width, width


def expected_distinct(zipf: Zipf, rows: int, draws: float) -> float:
    """Return the expected number of different rows among `draws` independent draws."""
    probability, count = probabilities(zipf, rows)
    return float((count * -np.expm1(-draws * probability)).sum())


def expected_hot_share(zipf: Zipf, rows: int, draws: float, reuse: float) -> float:
    """Return the expected share of draws whose row is drawn more than `reuse` times."""
    probability, count = probabilities(zipf, rows)
    return float((count * probability)[draws * probability > reuse].sum())


def test_weak_and_strong_scaling_as_the_paper_has_them() -> None:
    for ranks in (1, 2, 4):
        weak, strong = PRESETS["pgas-weak"].config(ranks), PRESETS["pgas-strong"].config(ranks)
        assert [len(weak.sharding.local_tables(r)) for r in range(ranks)] == [64] * ranks
        assert [len(strong.sharding.local_tables(r)) for r in range(ranks)] == [96 // ranks] * ranks
        assert weak.global_batch == strong.global_batch == 16384
        assert {(t.num_embeddings, t.embedding_dim) for t in weak.sharding.tables} == {(1_000_000, 64)}
        assert (weak.bags[0].mean, strong.bags[0].mean) == (64, 16)


def test_dcnv2_has_214_indices_a_sample_and_97_gib() -> None:
    config = PRESETS["dcnv2"].config(2)
    assert sum(bag.mean for bag in config.bags) == 214
    assert len(config.sharding.tables) == 26
    assert sum(config.table_bytes(r) for r in range(2)) / 2**30 == pytest.approx(97, abs=0.5)
    # One table has 100 of the 214 indices. After balancing by cost, no rank reads more than 60% of the rows.
    assert config.expected_rows_bytes(0) / sum(config.expected_rows_bytes(r) for r in range(2)) == pytest.approx(
        0.5, abs=0.1
    )


def test_criteo_kaggle_is_one_hot() -> None:
    config = PRESETS["criteo-kaggle"].config(2)
    assert all(bag == Bag(1, 1) for bag in config.bags)
    assert sum(t.num_embeddings for t in config.sharding.tables) == 33_762_577


def test_meta_2021_fit_meets_the_published_reuse() -> None:
    preset = PRESETS["meta-2021"]
    assert len(preset.tables) == 856
    draws = [shape.bags.mean * preset.global_batch for shape in preset.tables]
    distinct = sum(expected_distinct(preset.indices, s.rows, n) for s, n in zip(preset.tables, draws, strict=True))
    hot = sum(
        n * expected_hot_share(preset.indices, s.rows, n, 1024) for s, n in zip(preset.tables, draws, strict=True)
    )
    assert sum(draws) == pytest.approx(META_2021_INDICES, rel=0.01)
    assert distinct == pytest.approx(META_2021_DISTINCT, rel=0.01)
    assert hot / sum(draws) == pytest.approx(META_2021_HOT_SHARE, abs=0.01)


def test_meta_2021_keeps_its_reuse_when_scaled() -> None:
    config = PRESETS["meta-2021"].config(2, Scale(Fraction(1, 64), Fraction(1, 64)))
    some = list(range(0, 856, 20))
    rows = [config.sharding.tables[t].num_embeddings for t in some]
    values, offsets = jagged_input(
        [config.bags[t] for t in some], rows, config.preset.indices, config.global_batch, some, seed=0, device=CPU
    )
    cuts = offsets[:: config.global_batch].tolist()
    distinct = sum(values[a:b].unique().numel() for a, b in itertools.pairwise(cuts))
    draws = [config.bags[t].mean * config.global_batch for t in some]
    expected = sum(expected_distinct(config.preset.indices, r, n) for r, n in zip(rows, draws, strict=True))
    assert distinct == pytest.approx(expected, rel=0.02)
    # A bounded Zipf distribution is not quite scale-free: with 1/64 of the rows and of the batch, about 5/6 of the
    # reuse remain.
    assert values.numel() / distinct == pytest.approx(META_2021_INDICES / META_2021_DISTINCT, rel=0.2)


@pytest.mark.parametrize("exponent", [0.0, 0.9236, 1.0, 1.05])
def test_zipf_draws_what_it_expects(exponent: float) -> None:
    zipf, rows, draws = Zipf(exponent), 5000, 20_000
    drawn = zipf.draw(rows, draws, torch.Generator().manual_seed(1))
    assert drawn.min() >= 0
    assert drawn.max() < rows
    assert drawn.unique().numel() == pytest.approx(expected_distinct(zipf, rows, draws), rel=0.03)
    probability, count = probabilities(zipf, rows)
    assert (probability * count).sum() == pytest.approx(1)
    top = torch.bincount(drawn).max().item() / draws
    assert top == pytest.approx(probability[0], rel=0.1) or (exponent == 0 and top < 5 * probability[0])


def test_bags_and_offsets_are_what_the_operator_takes() -> None:
    values, offsets = jagged_input(
        [Bag(0, 4), Bag(3, 3)], [7, 50], Zipf(0), samples=100, tables=[0, 1], seed=3, device=CPU
    )
    assert offsets.shape == (201,)
    assert offsets[0] == 0
    assert offsets[-1] == values.numel()
    lengths = offsets.diff()
    assert set(lengths[:100].tolist()) == {0, 1, 2, 3, 4}
    assert set(lengths[100:].tolist()) == {3}
    assert values[: offsets[100]].max() == 6
    assert 6 < values[offsets[100] :].max() < 50


def test_a_tables_input_does_not_depend_on_who_owns_it() -> None:
    bags, rows = [Bag(0, 5), Bag(0, 6), Bag(2, 2)], [100, 200, 300]
    values, offsets = jagged_input(bags, rows, Zipf(0), 10, [0, 1, 2], 7, CPU)
    alone, alone_offsets = jagged_input(bags[1:2], rows[1:2], Zipf(0), 10, [1], 7, CPU)
    assert torch.equal(alone, values[offsets[10] : offsets[20]])
    assert torch.equal(alone_offsets.diff(), offsets[10:21].diff())
    empty, no_offsets = jagged_input([], [], Zipf(0), 10, [], 7, CPU)
    assert empty.numel() == 0
    assert no_offsets.tolist() == [0]


def test_scale_shrinks_batch_and_large_tables_only() -> None:
    config = PRESETS["dcnv2"].config(3, Scale(Fraction(1, 64), Fraction(1, 64)))
    rows = [t.num_embeddings for t in config.sharding.tables]
    assert max(rows) == 625_000
    assert sorted(rows)[0] == 3
    assert rows[7] == SMALL_TABLE  # was 1543
    assert sum(config.batch_sizes) == 1024
    assert max(config.batch_sizes) - min(config.batch_sizes) == 1
    with pytest.raises(ValueError, match=r"scale=2 must be above 0 and at most 1"):
        Scale(Fraction(2))


@pytest.mark.parametrize("name", PRESETS)
def test_the_fitting_scale_fits_and_twice_it_does_not(name: str) -> None:
    preset = PRESETS[name]
    scale = fitting_scale(preset, 2, FP32, table_bytes=1e9, rows_bytes=3e8)
    config = preset.config(2, scale)
    assert all(config.table_bytes(r) <= 1.2e9 and config.expected_rows_bytes(r) <= 3.6e8 for r in range(2))
    together = scale.batch == scale.rows
    if scale.rows < 1:
        twice = preset.config(2, Scale(scale.batch, 2 * scale.rows))
        assert together or any(twice.table_bytes(r) > 0.8e9 for r in range(2))
    if scale.batch < 1:
        twice = preset.config(2, Scale(2 * scale.batch, scale.rows))
        assert any(twice.expected_rows_bytes(r) > 2.4e8 for r in range(2))
    assert together or preset.indices.exponent == 0


def shapes_of(kind: Any, file: Path, preset: str | None, device: str) -> Any:
    options = BenchOptions("all_to_all_matmul" if kind is MoeShape else "all_gather_matmul", device=device)
    return find_shapes(kind, file, replace(options, preset=preset))


def test_families_and_unknown_names() -> None:
    assert len(find_presets("fused-inter")) >= 4
    assert find_presets("fused-inter/1024|256")[0].global_batch == 1024
    assert len(find_presets(None)) == len(PRESETS)
    with pytest.raises(ValueError, match=r"no preset 'dlrm': give one of pgas-weak.*meta-2021"):
        find_presets("dlrm")


def test_shapes_of_all_gather_matmul_follow_from_the_models() -> None:
    file = shapes_file("all_gather_matmul")
    everything = shapes_of(GemmShape, file, None, "cuda")
    assert len(everything) >= 60
    assert len({shape.name for shape in everything}) == len(everything)
    models = {  # hidden, MLP, query heads, key and value heads
        "llama-3-8b": (4096, 14336, 32, 8),
        "llama-3-70b": (8192, 28672, 64, 8),
        "llama-3-405b": (16384, 53248, 128, 8),
        "mixtral-8x7b": (4096, 14336, 32, 8),
    }
    for group, (hidden, mlp, heads, kv) in models.items():
        shapes = shapes_of(GemmShape, file, group, "cpu")
        assert {s.k for s in shapes} == {hidden}
        qkv = [s for s in shapes if f"{group} qkv" in s.sources]
        gate_up = [s for s in shapes if f"{group} gate_up" in s.sources]
        assert {s.n for s in qkv} == {(heads + 2 * kv) * 128 // 2}
        assert {s.n for s in gate_up} == {2 * mlp // 2}
        assert (min(s.m for s in qkv), max(s.m for s in qkv)) == (64, 32768)
    both = next(s for s in everything if s.name == "64x3072x4096")
    assert both.sources == ("llama-3-8b qkv", "mixtral-8x7b qkv"), "measured once, named by both"


def test_shapes_by_device_and_as_typed(tmp_path: Path) -> None:
    file = shapes_file("all_gather_matmul")
    small = shapes_of(GemmShape, file, None, "cpu")
    assert small == shapes_of(GemmShape, file, CPU_GROUP, "cuda")
    assert not {s.name for s in small} & {s.name for s in shapes_of(GemmShape, file, None, "cuda")}
    assert all(s.m % 8 == 0 for s in small)
    assert [s.name for s in shapes_of(GemmShape, file, "8192x4096x8192, 8x4x2,8x4x2", "cuda")] == [
        "8192x4096x8192",
        "8x4x2",
    ]
    assert shapes_of(GemmShape, tmp_path / "none.toml", "8x4x2", "cpu") == (GemmShape(8, 4, 2),)
    with pytest.raises(ValueError, match=r"no preset 'cpu': give one of nothing \(there is no .*none.toml"):
        shapes_of(GemmShape, tmp_path / "none.toml", "cpu", "cpu")
    with pytest.raises(ValueError, match=r"'8x0x2' is not a known shape: write MxNxK of integers above 0"):
        shapes_of(GemmShape, file, "8x0x2", "cpu")


def test_shapes_with_inputs_in_symmetric_memory_are_others() -> None:
    file = shapes_file("all_gather_matmul")
    both = shapes_of(GemmShape, file, "measured,measured-symmetric,8x4x2-symmetric", "cuda")
    assert [s.symmetric for s in both] == [False] * 8 + [True] * 9
    assert (both[8].name, both[-1].name) == (f"{both[0].name}-symmetric", "8x4x2-symmetric")
    assert both[8].sources == both[0].sources


def test_layers_of_all_to_all_matmul_follow_from_the_models() -> None:
    file = shapes_file("all_to_all_matmul")
    models = {  # hidden, MLP of an expert, experts, experts per token
        "mixtral-8x7b": (4096, 14336, 8, 2),
        "deepseek-v3": (7168, 2048, 256, 8),
        "qwen3-30b-a3b": (2048, 768, 128, 8),
    }
    for group, (hidden, mlp, experts, top_k) in models.items():
        shapes = shapes_of(MoeShape, file, group, "cpu")
        assert {(s.k, s.experts, s.top_k) for s in shapes} == {(hidden, experts, top_k)}
        assert {s.n for s in shapes if s.sources == (f"{group} gate_up",)} == {2 * mlp}
        for tokens in {s.m for s in shapes}:
            assert [s.skew > 0 for s in shapes if s.m == tokens and s.n == 2 * mlp] == [False, True]
    everything = shapes_of(MoeShape, file, None, "cuda")
    assert len({s.name for s in everything}) == len(everything) >= 20
    small = shapes_of(MoeShape, file, None, "cpu")
    assert small == shapes_of(MoeShape, file, CPU_GROUP, "cuda")
    assert all(s.experts % ranks == 0 for s in small for ranks in (2, 3, 4))
    typed = shapes_of(MoeShape, file, "8x4x2-e4-top2,8x4x2-e4-top2-zipf0.5", "cpu")
    assert typed == (MoeShape(8, 4, 2, experts=4, top_k=2), MoeShape(8, 4, 2, experts=4, top_k=2, skew=0.5))
    assert [s.name for s in typed] == ["8x4x2-e4-top2", "8x4x2-e4-top2-zipf0.5"]


@pytest.mark.parametrize("skew", [0.0, 0.5])
def test_a_router_draws_different_experts_in_proportion_to_their_popularity(skew: float) -> None:
    one = MoeShape(20_000, 1, 1, experts=8, top_k=1, skew=skew)
    popularity = torch.arange(1, 9).double() ** -skew
    shares = one.splits(2, which=0).double() / 20_000
    assert shares[0].tolist() == pytest.approx((popularity / popularity.sum()).tolist(), abs=0.012)
    assert not torch.equal(shares[0], shares[1])
    assert torch.equal(one.splits(2, 0), one.splits(4, 0)[:2]), (
        "a rank's tokens do not depend on how many ranks there are"
    )
    assert MoeShape(5, 1, 1, experts=3, top_k=3, skew=skew).splits(1, 0).tolist() == [[5, 5, 5]]
    most = MoeShape(500, 1, 1, experts=4, top_k=3, skew=5.0).splits(1, 0)[0]
    assert most[0] == 500, "nobody gets a token twice"
    assert most.sum() == 1500


def named(preset: str, ranks: int) -> list[GatherShape]:
    found = shapes_of(GatherShape, shapes_file("all_gather_matmul"), preset, "cuda")
    return [shape.on(ranks) for shape in found]


def test_ficcos_gemms_have_n_over_the_ranks() -> None:
    (g1, typed) = named("g1-m4, 64x64x64", 2)
    assert (g1.name, g1.m, g1.n, g1.k, g1.over) == ("g1-m4", 4096, 8192, 131072, 4)
    assert g1.about == "FiCCO's g1, 16384 x 16384 x 131072: N / 2, M / 4"
    assert (typed.name, typed.n, typed.gemm) == ("64x64x64", 64, "")
    assert [shape.name for shape in named("table-1,synthetic", 8)] == [f"{of}{i}" for of in "gs" for i in range(1, 17)]
    assert {shape.n * 8 for shape in named("table-1", 8)} == {gemm.n for gemm in TABLE_1}
    for wrong, why in (
        ("g1-m3", "M=16384 of g1 is not divisible by 3"),
        ("g17", "no preset 'g17'"),
        ("g1-m0", "no preset"),
    ):
        with pytest.raises(ValueError, match=why):
            named(wrong, 2)
    with pytest.raises(ValueError, match="preset g1: M=16384 must be divisible by ranks=3"):
        named("g1", 3)


class OneRank:
    """A group whose ranks all have the same values."""

    world_size = 2

    def most(self, value: float) -> float:
        return value


@pytest.mark.parametrize("variants", [[], ["ficco_1d"]])
def test_m_is_halved_until_inputs_results_and_schedules_fit(
    variants: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(preset: str, free: float) -> GatherShape:
        monkeypatch.setattr(ficco_shapes, "free_bytes", lambda ranks: free)
        return fitted(*named(preset, 2), OneRank(), "all_gather_matmul", "bf16", 2, variants)  # type: ignore[arg-type]

    whole, half = fit("g2", 1e15), fit("g2", 4e10)
    assert (whole.name, whole.m, whole.over) == ("g2", 131072, 1)
    assert half.over > 1
    assert (half.name, half.m * half.over, half.n, half.k) == (f"g2-m{half.over}", 131072, 8192, 16384)
    assert f"M / {half.over}" in half.about
    twice = replace(half, m=2 * half.m).on(2)
    for shape, fits in ((half, True), (twice, False)):
        schedules = memory_of_schedules(shape.problems("all_gather_matmul", 2, "bf16"), variants)
        left = 0.9 * 4e10 - shape.bytes(2, 2)
        assert (left > 0 and schedules <= left / 2) == fits
    assert fit("g2-m2", 1e9).name == "g2-m2"  # M is given
    assert fit("512x512x512", 1.0).name == "512x512x512"
    assert fit("g2", 1e9).name == "g2"  # the weight alone does not fit, so the call will be refused
