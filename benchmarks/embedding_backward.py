"""The times of the embedding backward's kernels on one GPU: the sort of ids and its parts, and the update for each tile size.

    python benchmarks/embedding_backward.py [--json FILE] [--preset pgas-weak,dcnv2-zipf1.05] [--sizes]

Tables and ids are the same as on one rank of `weft bench embedding_training` on two ranks. Times are medians of nine
runs. --sizes also times other group and grid sizes of the update. It appends one JSON object per preset to FILE.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import weft
from weft.bench.core.console import print_table
from weft.bench.core.records import append, environment
from weft.bench.ops.embedding_presets import Zipf, fitting_scale, jagged_input
from weft.bench.ops.embedding_training import TRAINED
from weft.embedding import FusedUpdate, as_jagged
from weft.embedding.check import check_jagged
from weft.embedding.forward_call import ForwardCall, Tables
from weft.embedding.options import EmbeddingOptions
from weft.embedding.plan import plan_of
from weft.runtime.cuda import embedding_backward, embedding_runs

DEVICE = torch.device("cuda", 0)
SIZES = list(itertools.product((256, 512, 1024, 2048), (8, 16, 32, 48)))
"""(elements per group, one-warp programs per SM)."""


def milliseconds(call: Callable[[], object]) -> float:
    call()
    found = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def measured(name: str, all_sizes: bool) -> dict[str, float]:
    """Return {part of the backward: milliseconds}. name: a preset. all_sizes: True for other group and grid sizes too."""
    preset = TRAINED[name]
    free = torch.cuda.mem_get_info(DEVICE)[0]
    scale = fitting_scale(replace(preset, indices=Zipf(0)), 2, torch.float32, table_bytes=0.6 * free)
    config = preset.config(2, scale)
    sharding, rank = config.sharding, 0
    owned = list(sharding.local_tables(rank))
    weights = [
        torch.zeros(sharding.tables[t].num_embeddings, sharding.tables[t].embedding_dim, device=DEVICE) for t in owned
    ]
    bags, rows = [config.bags[t] for t in owned], [len(weight) for weight in weights]
    jagged = as_jagged(jagged_input(bags, rows, preset.indices, config.global_batch, owned, 0, DEVICE))
    checked = check_jagged(jagged, sharding, rank, config.batch_sizes, weights)
    update = FusedUpdate(weft.RowwiseAdagrad(lr=0.01), weights)
    states = [list(of_table.values()) for of_table in update.states]
    tables = Tables(update.optimizer, weights, states, update.learning_rate, update.step)
    of = ForwardCall(plan_of(sharding, EmbeddingOptions("direct")), rank, checked, tables, 1.0, False)
    received = torch.randn(config.global_batch, sum(w.shape[1] for w in weights), device=DEVICE)
    sgd = tables._replace(optimizer=weft.SGD(lr=0.01), states=[[] for _ in weights])
    ids, found = embedding_runs.occurrences(of, jagged), embedding_runs.sorted_rows(of, jagged)
    runs = int(found.tensors.runs)
    ms = {
        "ids": float(ids.keys.numel()), "rows": float(runs), "longest": float(found.tensors.starts[: runs + 1].diff().max()),
        "keys": milliseconds(lambda: embedding_runs.occurrences(of, jagged)),
        "torch.sort": milliseconds(lambda: torch.sort(ids.keys, stable=True)),
        "sort, all": milliseconds(lambda: embedding_runs.sorted_rows(of, jagged)),
        "update": milliseconds(lambda: embedding_backward.update(of, tables, found, received)),
        "SGD": milliseconds(lambda: embedding_backward.update(of, sgd, found, received)),
        "SGD by atomics": milliseconds(lambda: embedding_backward.add_each(of, sgd, jagged, received)),
    }  # fmt: skip
    usual = embedding_backward._GROUP, embedding_backward._UPDATES_PER_SM
    for group, programs in SIZES if all_sizes else []:
        embedding_backward._GROUP, embedding_backward._UPDATES_PER_SM = group, programs
        ms[f"update {group}, {programs}"] = milliseconds(lambda: embedding_backward.update(of, tables, found, received))
    embedding_backward._GROUP, embedding_backward._UPDATES_PER_SM = usual
    return ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the times to this file")
    parser.add_argument(
        "--preset",
        default=",".join(TRAINED),
        help="comma-separated presets of weft bench embedding_training; default: all",
    )
    parser.add_argument("--sizes", action="store_true", help="also time other group sizes and grid sizes of the update")
    given = parser.parse_args()
    lines: dict[str, dict[str, float]] = {}
    for name in given.preset.split(","):
        lines[name] = measured(name, given.sizes)
        print(name, {part: round(value, 3) for part, value in lines[name].items()}, flush=True)
        if given.json is not None:
            append(given.json, [{"preset": name, "ms": lines[name], **environment("cuda")}])
        torch.cuda.empty_cache()
    parts = list(next(iter(lines.values())))
    rows = [
        (part, *(f"{ms[part]:.3f}" if ms[part] < 1e4 else f"{ms[part]:.0f}" for ms in lines.values())) for part in parts
    ]
    print_table("milliseconds", ("part", *lines), rows, [])


if __name__ == "__main__":
    main()
