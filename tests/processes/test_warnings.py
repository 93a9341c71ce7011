"""Warnings point to the line that called weft, whether it calls an operator, an autograd Function, a backward, a module
or a compiled program.
"""

from __future__ import annotations

import linecache
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.caller import warn
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.operator import layout, select
from weft.plan import store

TABLE = weft.EmbeddingBagConfig(4, 2, "t", ("f",))


def tall(columns: int) -> torch.Tensor:
    """Return a matrix [8, columns] whose rows and columns are not contiguous."""
    return torch.randn(16, 2 * columns)[::2, ::2]


def all_gather_matmul(group: dist.ProcessGroup) -> None:
    weft.all_gather_matmul(torch.randn(4, 8), [tall(3)], 0, group)  # the line


def all_gather_matmul_rows(group: dist.ProcessGroup) -> None:
    weft.all_gather_matmul(torch.randn(8, 4).t(), [torch.randn(8, 3)], 0, group)  # the line


def with_gradients(group: dist.ProcessGroup) -> None:
    weft.all_gather_matmul(torch.randn(8, 4).t().requires_grad_(), [torch.randn(8, 5)], 0, group)  # the line


def compiled(group: dist.ProcessGroup) -> None:
    name = group.group_name

    @torch.compile(backend="aot_eager")  # the line
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weft.all_gather_matmul(x, [w], 0, name)[1][0] * 2

    call(torch.randn(4, 8), tall(6))  # for a compiled program, only its first line is known


def scaled(group: dist.ProcessGroup) -> None:
    x, w, one = torch.randn(4, 32).to(torch.float8_e4m3fn), torch.randn(32, 16).to(torch.float8_e4m3fn), torch.ones(1)
    weft.all_gather_scaled_matmul(x, [w], one, [one], 0, group)  # the line


def all_to_all_matmul(group: dist.ProcessGroup) -> None:
    w = torch.randn(1, 8, 6)[:, :, ::2]
    splits = torch.tensor([4] + [0] * (group.size() - 1))
    weft.all_to_all_matmul(torch.randn(4, 8), w, splits, group=group, schedule="dispatch[by=dma,rest=each]")  # the line


def without_overlap(group: dist.ProcessGroup) -> None:
    # Earlier tests may have triggered the warning.
    os.environ["WEFT_QUIET"], select.warn_once.__globals__["_warned"] = "0", False
    needed, select._CLEARLY_US["cpu"] = select._CLEARLY_US["cpu"], 1e9  # no schedule is that much faster than serial
    x, w = torch.randn(2, 37), torch.randn(37, 29)  # a shape for which no other test has chosen a schedule
    try:
        weft.all_gather_matmul(x, [w], 0, group)  # the line
    finally:
        os.environ["WEFT_QUIET"], select._CLEARLY_US["cpu"] = "1", needed


def cannot_be_kept(group: dist.ProcessGroup) -> None:
    cache, os.environ["WEFT_CACHE_DIR"], store._warned = os.environ["WEFT_CACHE_DIR"], "/dev/null/nowhere", False
    try:
        weft.all_gather_matmul(torch.randn(2, 6), [torch.randn(6, 2)], 0, group, schedule="autotune")  # the line
    finally:
        os.environ["WEFT_CACHE_DIR"] = cache


def pooled(group: dist.ProcessGroup) -> None:
    weft.embedding_pool([torch.ones(4, 2)], (torch.tensor([1, 9]), torch.tensor([0, 2])), [TABLE])  # the line


def embedding_all_to_all(group: dist.ProcessGroup) -> None:
    sharding = weft.place_tables([TABLE], group.size(), placement=[0])
    mine = [torch.ones(4, 2)] if group.rank() == 0 else []
    features = weft.KeyedJaggedTensor(["f"], torch.tensor([1, 9]), lengths=torch.tensor([1, 1]))
    weft.embedding_all_to_all(mine, features, sharding, group=group)  # the line


def module(group: dist.ProcessGroup) -> None:
    ebc = ShardedEmbeddingBagCollection([TABLE], group=group, placement=[0])
    # torch's own modules and its no_grad are in between.
    model = torch.no_grad()(torch.nn.Sequential(ebc))
    model(weft.KeyedJaggedTensor(["f"], torch.tensor([1, 9]), lengths=torch.tensor([2])))  # the line


# (function that calls weft, words of its warning). Tables are on rank 0.
CALLS: dict[Callable[[dist.ProcessGroup], None], str] = {
    all_gather_matmul: "Bs[0] is copied",
    all_gather_matmul_rows: "A_shard is copied",
    with_gradients: "A_shard is copied",
    compiled: "Bs[0] is copied",
    scaled: "Bs[0] is copied",
    all_to_all_matmul: "w_experts is copied",
    without_overlap: "without overlap",
    cannot_be_kept: "cannot be saved",
    pooled: "out of range",
    embedding_all_to_all: "out of range",
    module: "out of range",
}


def warned(group: dist.ProcessGroup, call: Callable[[dist.ProcessGroup], None]) -> list[tuple[str, str, str]]:
    """Return (text, file, line) of each warning of weft."""
    layout._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(group)
    words = CALLS[call]
    return [
        (str(w.message), w.filename, linecache.getline(w.filename, w.lineno)) for w in caught if words in str(w.message)
    ]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_warning_points_at_the_line_that_called(pool: Pool, call: Callable[[dist.ProcessGroup], None]) -> None:
    first, *_ = pool.run(warned, call, ranks=2, timeout_s=60)
    assert len(first) == 1
    ((_, file, line),) = first
    assert Path(file).name == "test_warnings.py"
    assert line.rstrip().endswith("# the line")


def with_many_shapes(group: dist.ProcessGroup) -> list[str]:
    """Return the warnings of copies in calls of two operators, with arguments of several strides."""
    layout._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (4, 6, 8):
            x = torch.randn(8, rows).t()
            weft.all_gather_matmul(x, [torch.randn(8, 3)], 0, group)
            weft.matmul_reduce_scatter(x, torch.randn(8, 3), "sum", 0, group)
    return [str(w.message).partition(" in every call")[0] for w in caught if "is copied" in str(w.message)]


def test_a_copy_is_warned_of_once_per_operator_and_argument(pool: Pool) -> None:
    for found in pool.run(with_many_shapes, ranks=2, timeout_s=60):
        assert found == ["all_gather_matmul: A_shard is copied", "matmul_reduce_scatter: A is copied"]


def test_a_thread_without_a_caller_may_warn(recwarn: pytest.WarningsRecorder) -> None:
    thread = threading.Thread(target=warn, args=("all alone",))
    thread.start()
    thread.join()
    assert [(str(w.message), Path(w.filename).name) for w in recwarn] == [("all alone", "threading.py")]
