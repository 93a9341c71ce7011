"""A training step of row-wise pooled tables: the owners of rows pool them (`dedup=False`), or distinct rows travel
(`dedup=True`).

    python benchmarks/row_wise_dedup.py [--json FILE] [--ranks 2] [--repetitions 9] [--rate 1gbit]

With --rate, each rank of two is on a host of its own: a network namespace (Linux, root), with a link of this rate between them.
A step is forward, backward and rowwise Adagrad. Both modules run in turn on the same batch. Ranks run on GPUs if there
are any, else on CPU processes. Times are the slowest rank's medians. `distinct` is the number of distinct ids of a
rank, divided by its number of bags. In the last two distributions a rank draws ids from a small set of rows, as if
its samples were of few users.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.bench.core.console import print_table
from weft.bench.core.records import environment
from weft.bench.ops.embedding_presets import Zipf
from weft.embedding import RowWise
from weft.launch import run_ranks

SHAPES = {
    "cuda": ((8, 128, 8192, 20), (1, 512, 4096, 100), (8, 128, 1024, 5)),
    "cpu": ((4, 64, 1024, 20), (1, 128, 512, 100), (4, 64, 1024, 3)),
}
"""(tables, columns, samples of a rank, mean length of a bag)."""
ROWS = {"cuda": 1_000_000, "cpu": 100_000}
LAWS = ("uniform", "zipf 1.05", "2% distinct", "0.2% distinct")


def drawn(law: str, rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw `count` ids."""
    if law.endswith("distinct"):
        size = max(1, int(float(law.split("%")[0]) / 100 * count))
        few = torch.randint(0, rows, (size,), generator=generator, device=generator.device)
        return few[torch.randint(0, size, (count,), generator=generator, device=generator.device)]
    return Zipf(1.05 if law.startswith("zipf") else 0).draw(rows, count, generator)


def measured(rank: int, world: int, repetitions: int) -> list[dict[str, Any]]:
    """Time both modules on all shapes and distributions. Return a record for each, equal on all ranks."""
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    group, records = dist.group.WORLD, []
    for (tables, columns, samples, length), law in itertools.product(SHAPES[kind], LAWS):
        names = [f"f{number}" for number in range(tables)]
        configs = [weft.EmbeddingBagConfig(ROWS[kind], columns, f"table of {name}", [name]) for name in names]
        generator = torch.Generator(device).manual_seed(rank)
        lengths = torch.randint(0, 2 * length + 1, (tables, samples), generator=generator, device=device)
        ids = [drawn(law, ROWS[kind], int(of_table.sum()), generator) for of_table in lengths]
        features = weft.KeyedJaggedTensor.from_lengths_sync(names, torch.cat(ids), lengths.flatten())
        grad = torch.randn(samples, tables * columns, generator=generator, device=device)
        modules = {
            dedup: weft.nn.ShardedEmbeddingBagCollection(
                configs,
                group=group,
                device=device,
                placement=[RowWise()] * tables,
                dedup=dedup,
                optimizer=weft.RowwiseAdagrad(lr=0.01),
            )
            for dedup in (False, True)
        }
        modules[True].load_state_dict(modules[False].state_dict())
        times: dict[bool, list[float]] = {dedup: [] for dedup in modules}
        outputs: dict[bool, torch.Tensor] = {}
        for _, (dedup, module) in itertools.product(range(repetitions + 2), modules.items()):
            dist.barrier()
            begin = time.perf_counter()
            pooled = module(features).values()
            pooled.backward(grad)
            if kind == "cuda":
                torch.cuda.synchronize()
            times[dedup].append(1e3 * (time.perf_counter() - begin))
            outputs.setdefault(dedup, pooled.detach().clone())
        torch.testing.assert_close(outputs[True], outputs[False], rtol=1e-4, atol=1e-6)
        found: list[Any] = [None] * world
        distinct = sum(len(one.unique()) for one in ids) / (tables * samples)
        dist.all_gather_object(found, (distinct, *(statistics.median(times[dedup][2:]) for dedup in modules)))
        shape = {"tables": tables, "columns": columns, "samples": samples, "length": length, "ids": law}
        worst = [max(of_rank) for of_rank in zip(*found, strict=True)]
        records.append({**shape, **dict(zip(("distinct_per_bag", "sums_ms", "dedup_ms"), worst, strict=True))})
        for module in modules.values():
            module.close()
    return records


def between_hosts(rate: str) -> None:
    """Run this program on two hosts, with one rank each."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.two_hosts import TwoHosts

    with TwoHosts() as hosts:
        hosts.limit(rate)
        launchers = hosts.torchrun(1, [__file__, *sys.argv[1:]], WEFT_QUIET="1", COLUMNS="150")
        said = [launcher.communicate()[0] for launcher in launchers]
    print(said[0])
    if any(launcher.returncode for launcher in launchers):
        raise SystemExit(said[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the times to this file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--rate", help="rate of the link between two hosts, as tc writes it, for example 1gbit")
    given = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() and not given.rate else "cpu"
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        records = measured(dist.get_rank(), dist.get_world_size(), given.repetitions)
    elif given.rate:
        between_hosts(given.rate)
        return
    else:
        backend = "nccl" if kind == "cuda" else "gloo"
        records = run_ranks(given.ranks, measured, given.repetitions, backend=backend)[0]
    if int(os.environ.get("RANK", "0")):
        return
    if given.json is not None:
        written = {"ranks": given.ranks, "rate": given.rate, **environment(kind), "records": records}
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    rows = [
        (
            f"{r['tables']} x D {r['columns']}, {r['samples']} samples, {r['length']} ids a bag", r["ids"],
            f"{r['distinct_per_bag']:.2f}", f"{r['sums_ms']:.2f}", f"{r['dedup_ms']:.2f}", f"{r['sums_ms'] / r['dedup_ms']:.2f}x",
        )
        for r in records
    ]  # fmt: skip
    head = "shape", "ids", "distinct ids a bag", "owners pool, ms", "dedup=True, ms", "gain"
    where = f", a link of {given.rate} between them" if given.rate else ""
    print_table(f"row-wise pooled tables, {given.ranks} ranks on {kind}{where}", head, rows, [])


if __name__ == "__main__":
    main()
