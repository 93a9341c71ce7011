"""Tables and shardings: what they refuse, the places of columns, and the fingerprint that ranks compare.

Cheapest first: single descriptions, then columns against a plain count, then the fingerprint in another process.
"""

from __future__ import annotations

import enum
import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.embedding import EmbeddingBagConfig, EmbeddingSharding
from weft.words import counted


class TorchRecPooling(enum.Enum):
    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class TorchRecDataType(enum.Enum):
    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "INT8"


@dataclass
class TorchRecConfig:
    """The fields of TorchRec 1.6.1's `EmbeddingBagConfig`, and its value if no `init_fn` is given."""

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: TorchRecDataType = TorchRecDataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    need_pos: bool = False
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: object | None = None
    enable_embedding_update: bool = False
    stash_weights: bool = False
    pooling: TorchRecPooling = TorchRecPooling.SUM

    def __post_init__(self) -> None:
        if self.init_fn is None:
            bound = math.sqrt(1 / self.num_embeddings)
            low = -bound if self.weight_init_min is None else self.weight_init_min
            high = bound if self.weight_init_max is None else self.weight_init_max
            self.init_fn = functools.partial(torch.nn.init.uniform_, a=low, b=high)


def table(
    name: str = "t", rows: int = 10, dim: int = 4, features: tuple[str, ...] = ("f",), **more
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(rows, dim, name, features, **more)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 4, "t", ("f",)), ["'t'", "num_embeddings=0", "at least 1"]),
        ((10, -1, "t", ("f",)), ["'t'", "embedding_dim=-1", "at least 1"]),
        ((10.5, 4, "t", ("f",)), ["'t'", "num_embeddings=10.5", "integer"]),
        ((True, 4, "t", ("f",)), ["'t'", "num_embeddings=True", "integer"]),
        ((10, 4, "", ("f",)), ["name=''", "non-empty"]),
        ((10, 4, "t", ()), ["'t'", "no feature", "feature_names"]),
        ((10, 4, "t", "f0"), ["'t'", "['f0']"]),
        ((10, 4, "t", ("f", "g", "f")), ["'t'", "'f'", "2 times"]),
        ((10, 4, "t", ("f",), "max"), ["'t'", "pooling='max'", "'mean'"]),
        ((10, 4, "t", ("f",), "sum", torch.float64), ["'t'", "float64", "bfloat16"]),
        ((10, 4, "t", ("f",), "sum", torch.float32, "1"), ["'t'", "weight_init_max='1'", "finite number"]),
        ((10, 4, "t", ("f",), "sum", torch.float32, None, math.nan), ["'t'", "weight_init_min=nan", "finite number"]),
        (
            (10, 4, "t", ("f",), "sum", torch.float32, -1.0),
            ["'t'", "weight_init_min=-0.3", "above weight_init_max=-1.0"],
        ),
        ((10, 4, "t", ("f",), "sum", torch.float32, None, None, 1.0), ["'t'", "init_fn=1.0", "function of a tensor"]),
        (
            (10, 4, "t", ("f",), "sum", torch.float32, 1.0, None, len),
            ["'t'", "weight_init_max=1.0", "together with init_fn"],
        ),
    ],
)
def test_a_bad_table_is_refused_with_its_name_and_the_fix(arguments, words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        EmbeddingBagConfig(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((), (), 1), ["no tables"]),
        (((table("a"), table("b"), table("a")), (0, 0, 0), 1), ["duplicate", "'a'", "2 tables"]),
        (
            ((table("a"), table("b", dtype=torch.float16)), (0, 0), 1),
            ["'b'", "float16", "'a'", "float32", "collection per"],
        ),
        (((table("a"),), (2,), 2), ["'a'", "rank 2", "0 to 1"]),
        (((table("a"),), (-1,), 2), ["'a'", "rank -1"]),
        (((table("a"),), (0, 1), 2), ["2 entries", "1 table"]),
        (((table("a"),), (0,), 0), ["world_size=0"]),
        (((table("a"),), (0,), 1, (1.0, 2.0)), ["rows_read", "2 entries"]),
    ],
)
def test_a_bad_sharding_is_refused(arguments, words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        EmbeddingSharding(*arguments)


def test_torchrec_configs_are_read_by_their_fields():
    given_config = TorchRecConfig(100, 8, "users", TorchRecDataType.BF16, ["u", "v"], pooling=TorchRecPooling.MEAN)
    assert EmbeddingBagConfig.of(given_config) == table(
        "users", 100, 8, ("u", "v"), pooling="mean", dtype=torch.bfloat16
    )
    # Without feature names the feature is the table's name, as in TorchRec.
    assert EmbeddingBagConfig.of(TorchRecConfig(3, 2, "x")).feature_names == ("x",)
    ours = table()
    assert EmbeddingBagConfig.of(ours) is ours
    with pytest.raises(ValueError, match=r"'x'.*INT8.*FP16"):
        EmbeddingBagConfig.of(TorchRecConfig(3, 2, "x", TorchRecDataType.INT8))
    with pytest.raises(ValueError, match=r"'x'.*'none'.*'mean'"):
        EmbeddingBagConfig.of(TorchRecConfig(3, 2, "x", pooling=TorchRecPooling.NONE))
    with pytest.raises(TypeError, match=r"num_embeddings|pooling"):
        EmbeddingBagConfig.of({"name": "x"})


OTHER = {  # non-default values of the fields that weft does not use
    "num_embeddings_post_pruning": 3,
    "need_pos": True,
    "input_dim": 3,
    "total_num_buckets": 3,
    "use_virtual_table": True,
    "virtual_table_eviction_policy": object(),
    "enable_embedding_update": True,
    "stash_weights": True,
}
TAKEN = {  # and the values derived from these fields
    "num_embeddings": (7, lambda made: made.num_embeddings == 7),
    "embedding_dim": (7, lambda made: made.embedding_dim == 7),
    "name": ("y", lambda made: made.name == "y"),
    "data_type": (TorchRecDataType.FP16, lambda made: made.dtype == torch.float16),
    "feature_names": (["u"], lambda made: made.feature_names == ("u",)),
    "pooling": (TorchRecPooling.MEAN, lambda made: made.pooling == "mean"),
    "weight_init_max": (0.25, lambda made: made.first_values == (-0.5, 0.25) and made.init_fn is None),
    "weight_init_min": (0.25, lambda made: made.first_values == (0.25, 0.5) and made.init_fn is None),
    "init_fn": (torch.nn.init.ones_, lambda made: made.init_fn is torch.nn.init.ones_),
}


@pytest.mark.parametrize("option", [of.name for of in fields(TorchRecConfig)])
def test_each_of_torchrecs_options_is_applied_or_refused(option):
    given_config = TorchRecConfig(4, 2, "x")
    assert EmbeddingBagConfig.of(given_config).init_fn is None
    if option in TAKEN:
        value, applied = TAKEN[option]
        rest = {"num_embeddings": 4, "embedding_dim": 2, "name": "x"} | {option: value}
        assert applied(EmbeddingBagConfig.of(TorchRecConfig(**rest)))
    else:
        setattr(given_config, option, OTHER[option])
        with pytest.raises(ValueError, match=rf"table 'x': {option}=.* is not supported: leave it at its default, "):
            EmbeddingBagConfig.of(given_config)


def test_options_that_no_torchrec_has_yet_are_refused():
    @dataclass
    class Later(TorchRecConfig):
        shadow: str = "none"
        notes: list[str] = field(default_factory=list)

    assert EmbeddingBagConfig.of(Later(4, 2, "x")).name == "x"
    for option, value in (("shadow", "other"), ("notes", ["a"])):
        with pytest.raises(ValueError, match=f"{option}=.* is not supported"):
            EmbeddingBagConfig.of(Later(4, 2, "x", **{option: value}))
    plain = SimpleNamespace(**{of.name: getattr(TorchRecConfig(4, 2, "x"), of.name) for of in fields(TorchRecConfig)})
    assert EmbeddingBagConfig.of(plain) == EmbeddingBagConfig.of(TorchRecConfig(4, 2, "x"))
    plain.need_pos = True
    with pytest.raises(ValueError, match="need_pos=True is not supported"):
        EmbeddingBagConfig.of(plain)
    with pytest.raises(ValueError, match="weight_init_max=1 has no effect together with init_fn"):
        EmbeddingBagConfig.of(TorchRecConfig(4, 2, "x", weight_init_max=1, init_fn=torch.nn.init.ones_))


def test_first_values_are_no_part_of_a_table():
    filled = table(init_fn=torch.nn.init.ones_)
    assert filled == table() == table(weight_init_min=0.0)
    assert EmbeddingSharding((filled,), (0,), 1).fingerprint == EmbeddingSharding((table(),), (0,), 1).fingerprint


@st.composite
def shardings(draw) -> EmbeddingSharding:
    world_size = draw(st.integers(1, 4))
    pool = ["f0", "f1", "f2", "f3"]
    tables = tuple(
        table(f"t{i}", features=tuple(features), dim=dim)
        for i, (features, dim) in enumerate(
            draw(
                st.lists(
                    st.tuples(st.lists(st.sampled_from(pool), min_size=1, unique=True), st.integers(1, 9)),
                    min_size=1,
                    max_size=6,
                )
            )
        )
    )
    ranks = draw(st.lists(st.integers(0, world_size - 1), min_size=len(tables), max_size=len(tables)))
    return EmbeddingSharding(tables, tuple(ranks), world_size)


@given(shardings())
def test_slots_tile_the_columns_in_table_order(sharding: EmbeddingSharding):
    wanted = [(t, feature) for t, config in enumerate(sharding.tables) for feature in config.feature_names]
    assert [(slot.table, slot.feature) for slot in sharding.slots] == wanted
    column = 0
    for slot in sharding.slots:
        assert slot.column == column
        assert slot.dim == sharding.tables[slot.table].embedding_dim
        assert slot.rank == sharding.rank_of_table[slot.table]
        column += slot.dim
    assert sharding.total_dim == column
    keys = [slot.key for slot in sharding.slots]
    assert len(set(keys)) == len(keys)
    for slot, key in zip(sharding.slots, keys, strict=True):
        shared = sum(slot.feature in config.feature_names for config in sharding.tables) > 1
        assert key == (f"{slot.feature}@{sharding.tables[slot.table].name}" if shared else slot.feature)
    by_rank = [sharding.local_slots(rank) for rank in range(sharding.world_size)]
    assert sorted((slot for slots in by_rank for slot in slots), key=lambda slot: slot.column) == list(sharding.slots)
    tables_by_rank = [index for rank in range(sharding.world_size) for index in sharding.local_tables(rank)]
    assert sorted(tables_by_rank) == list(range(len(sharding.tables)))


def test_ranks_outside_the_sharding_have_no_tables():
    sharding = EmbeddingSharding((table(),), (0,), 2)
    assert sharding.local_tables(1) == () == sharding.local_slots(1)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank={rank}.*0 to 1"):
            sharding.local_tables(rank)


BASE = EmbeddingSharding((table("a"), table("b", features=("g", "h"))), (0, 1), 2)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(BASE, world_size=3), ["world_size=2", "3"]),
        (replace(BASE, rank_of_table=(1, 0)), ["'a'", "rank 0", "rank 1"]),
        (replace(BASE, tables=BASE.tables[:1], rank_of_table=(0,)), ["2 tables", "1"]),
        (replace(BASE, tables=BASE.tables[::-1]), ["table 0", "'b'"]),
        *(
            (
                replace(BASE, tables=(replace(BASE.tables[0], **change), BASE.tables[1])),
                ["table 0", str(*change.values())],
            )
            for change in (
                {"num_embeddings": 11},
                {"embedding_dim": 5},
                {"name": "c"},
                {"feature_names": ("z",)},
                {"pooling": "mean"},
            )
        ),
        (
            replace(BASE, tables=(BASE.tables[0], replace(BASE.tables[1], feature_names=("h", "g")))),
            ["table 1", "'h', 'g'"],
        ),
        (replace(BASE, tables=tuple(replace(t, dtype=torch.float16) for t in BASE.tables)), ["table 0", "float16"]),
    ],
)
def test_whatever_differs_changes_the_fingerprint_and_is_named(other, words):
    assert other.fingerprint != BASE.fingerprint
    assert other != BASE
    difference = BASE.difference(other)
    assert difference is not None
    assert all(word in difference for word in words), difference


def test_statistics_are_no_part_of_the_identity():
    informed = replace(BASE, rows_read=(3, 4))
    assert informed == BASE
    assert informed.fingerprint == BASE.fingerprint
    assert hash(informed) == hash(BASE)
    assert BASE.difference(informed) is None


@pytest.mark.slow  # test_embedding_plan.py tests the same for whole plans
def test_the_fingerprint_is_the_same_in_another_process():
    program = (
        "from weft.embedding import *\n"
        "a, b = EmbeddingBagConfig(10, 4, 'a', ('f',)), EmbeddingBagConfig(10, 4, 'b', ('g', 'h'))\n"
        "print(EmbeddingSharding((a, b), (0, 1), 2).fingerprint)"
    )
    env = {"PYTHONHASHSEED": "12345"}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=env, check=True
    )
    assert int(run.stdout) == BASE.fingerprint
    assert 0 <= BASE.fingerprint < 2**62


def test_describe_says_who_owns_what():
    tables = tuple(table(f"t{i}", rows=1024, dim=256, features=(f"f{i}",)) for i in range(6))
    text = EmbeddingSharding(tables, (0, 0, 0, 1, 0, 1), 3, rows_read=(1, 1, 1, 1, 1, 7)).describe()
    lines = text.splitlines()
    assert "t0 .. t2, t4" in lines[2]
    assert "4.0 MiB" in lines[2]
    assert "44.4%" in lines[2]  # 4 tables of (1 row + 1 vector), of 8 + 2 + 8 = 18 such
    assert "t3, t5" in lines[3]
    assert "55.6%" in lines[3]
    assert "nothing" in lines[4]


def test_one_of_a_thing_is_no_plural() -> None:
    text = EmbeddingSharding((table("a", dim=1),), (0,), 1).describe()
    assert text.startswith("1 table on 1 rank, 1 feature into 1 column of torch.float32")
    assert counted(0, "rank") == "0 ranks"
    assert counted(2, "entry", "entries") == "2 entries"
