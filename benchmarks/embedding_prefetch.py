"""The time that a recommendation model's step waits for the exchange of ids, and the fraction that `prefetch` hides.

    torchrun --nproc-per-node 2 benchmarks/embedding_prefetch.py [--json FILE] [--quick]

Every rank trains an embedding module and a dense layer, cycling through twenty batches. Five variants alternate:

    plain        the module distributes a batch's ids in its call
    prefetch     the module starts to distribute a batch's ids in the preceding step
    bounded      plain, with `max_ids` and `batch_size`, so that the CPU waits for nothing
    ahead        prefetch, with `max_ids` and `batch_size`
    distributed  the lower bound: every rank already has its tables' ids of the global batch

exposed = plain - distributed; hidden = (plain - prefetch) / exposed; "ahead hidden" likewise. Times are milliseconds per step, the
slowest rank's median over rounds. All variants must leave equal tables. On CPU, shapes are small.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.bench.core.console import print_table
from weft.bench.core.records import append, environment
from weft.embedding import EmbeddingBagConfig, KeyedJaggedTensor
from weft.nn import ShardedEmbeddingBagCollection

BATCHES, ROUNDS = 20, 5
CASES = {  # tables of all ranks, rows, D, local batch, mean ids per bag L (uniform in 1 .. 2L - 1)
    "dcnv2-like 26 x 1M x 128, B 8192, L 10": (26, 1_000_000, 128, 8192, 10),
    "one-hot 26 x 1M x 128, B 16384": (26, 1_000_000, 128, 16384, 1),
    "wide 256 x 100k x 64, B 2048, L 20": (256, 100_000, 64, 2048, 20),
    "small 64 x 1M x 128, B 256, L 20": (64, 1_000_000, 128, 256, 20),
}
SMALL = {"small 6 x 1k x 16, B 64, L 3": (6, 1000, 16, 64, 3)}


def batches_of(case: tuple[int, ...], source: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (ids, lengths) of each batch of rank `source`; lengths is [tables * local batch]."""
    tables, rows, _, batch, mean = case
    generator, found = torch.Generator().manual_seed(7 + source), []
    for _ in range(BATCHES):
        lengths = torch.randint(1, 2 * mean, (tables * batch,), generator=generator)
        found.append(
            (torch.randint(0, rows, (int(lengths.sum()),), generator=generator).to(device), lengths.to(device))
        )
    return found


def measured(case: tuple[int, ...], device: torch.device, control: Any, calls: int) -> dict[str, float]:
    tables, rows, dim, batch, _ = case
    world, rank, names = dist.get_world_size(), dist.get_rank(), [f"f{i}" for i in range(tables)]
    configs = [EmbeddingBagConfig(rows, dim, f"t{i}", (names[i],)) for i in range(tables)]
    placement = [i % world for i in range(tables)]
    group: Any = dist.group.WORLD

    def made(given: Any, **options: Any) -> ShardedEmbeddingBagCollection:
        torch.manual_seed(1)
        return ShardedEmbeddingBagCollection(
            configs,
            group=group,
            device=device,
            placement=placement,
            optimizer=weft.SGD(lr=0.01),
            input=given,
            **options,
        )

    local = batches_of(case, rank, device)
    of_all = [batches_of(case, source, device) for source in range(world)]
    own = [i for i in range(tables) if placement[i] == rank]

    def keyed(which: int) -> KeyedJaggedTensor:
        ids, lengths = local[which % BATCHES]
        return KeyedJaggedTensor(names, ids, lengths=lengths)

    def joined(which: int) -> KeyedJaggedTensor:
        """Return this rank's features for the samples of all ranks."""
        lengths, ids = [], []
        of_source = [of[which] for of in of_all]
        cuts = [torch.cat([n.new_zeros(1), n.view(tables, batch).sum(1).cumsum(0)]).tolist() for _, n in of_source]
        for table in own:
            for (values, n), cut in zip(of_source, cuts, strict=True):
                lengths.append(n.view(tables, batch)[table])
                ids.append(values[cut[table] : cut[table + 1]])
        return KeyedJaggedTensor([names[i] for i in own], torch.cat(ids), lengths=torch.cat(lengths))

    ready = [joined(which) for which in range(BATCHES)]
    most = torch.tensor([max(one.values().numel() for one in ready)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=control)
    bound = {"max_ids": int(1.1 * most), "batch_size": batch}
    modules = {
        "plain": made("local_batch"), "prefetch": made("local_batch"), "bounded": made("local_batch", **bound),
        "ahead": made("local_batch", **bound), "distributed": made("global_batch"),
    }  # fmt: skip
    layer = torch.nn.Sequential(torch.nn.Linear(tables * dim, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)).to(device)

    def plain(count: int, name: str = "plain") -> None:
        for step in range(count):
            layer(modules[name](keyed(step)).values()).sum().backward()

    def prefetch(count: int, name: str = "prefetch") -> None:
        module, following = modules[name], keyed(0)
        module.prefetch(following)
        for step in range(count):
            one = following
            pooled = module(one).values()
            if step + 1 < count:
                following = keyed(step + 1)
                module.prefetch(following)
            layer(pooled).sum().backward()

    def distributed(count: int) -> None:
        for step in range(count):
            layer(modules["distributed"](ready[step % BATCHES]).values()).sum().backward()

    ways: dict[str, Callable[[int], None]] = {
        "plain": plain, "prefetch": prefetch, "bounded": lambda count: plain(count, "bounded"),
        "ahead": lambda count: prefetch(count, "ahead"), "distributed": distributed,
    }  # fmt: skip
    ms = timed(ways, device, control, calls)
    first, *others = ([weight.detach() for weight in module.parameters()] for module in modules.values())
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True)), (
            "the variants trained the tables differently"
        )
    exposed = ms["plain"] - ms["distributed"]
    for module in modules.values():
        module.close()
    hidden = {
        name: (ms["plain"] - ms[way]) / exposed if exposed > 0 else 0.0
        for name, way in (("hidden", "prefetch"), ("ahead hidden", "ahead"))
    }
    return ms | {"exposed": exposed} | hidden


def timed(ways: dict[str, Callable[[int], None]], device: torch.device, control: Any, calls: int) -> dict[str, float]:
    """Return milliseconds per call for each variant: the slowest rank's median over rounds. Variants alternate.

    ways: functions that make the given number of calls.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + ROUNDS):
        for name, way in ways.items():
            synchronize(device)
            dist.barrier(control)
            begin = time.perf_counter()
            way(calls)
            synchronize(device)
            if number:
                found[name].append(1e3 * (time.perf_counter() - begin) / calls)
    slowest = torch.tensor([statistics.median(times) for times in found.values()], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=control)
    return dict(zip(ways, slowest.tolist(), strict=True))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(
    about: str | None,
    title: str,
    measure: Callable[..., dict[str, float]],
    calls: int,
    beside: dict[str, Any] | None = None,
    *,
    cases: Mapping[str, Any] = CASES,
    small: Mapping[str, Any] = SMALL,
) -> None:
    """Run `measure(case, device, control, calls)` for all cases on this rank. Rank 0 prints a table and appends records.

    about: the text of --help. beside: additional fields of each record. cases, small: the cases on GPUs and on CPU.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the times to this file")
    parser.add_argument("--quick", action="store_true", help="run few steps, to try the script out")
    given = parser.parse_args()
    on_gpu, rank = torch.cuda.is_available(), int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    control, found = dist.new_group(backend="gloo"), dict[str, dict[str, float]]()
    for name, case in (cases if on_gpu else small).items():
        ms = found[name] = measure(case, device, control, 5 if given.quick or not on_gpu else calls)
        if rank == 0 and given.json is not None:
            append(given.json, [{"case": name, "ms": ms, **(beside or {}), **environment(device.type)}])
        if on_gpu:
            gc.collect()  # TorchRec's modules are in reference cycles
            torch.cuda.empty_cache()
    if rank == 0:
        columns = dict.fromkeys(column for ms in found.values() for column in ms)
        lines = [(name, *(f"{ms[one]:.3f}" if one in ms else "" for one in columns)) for name, ms in found.items()]
        print_table(title, ("case", *columns), lines, [])
    dist.destroy_process_group()


if __name__ == "__main__":
    run(__doc__, "milliseconds of a step", measured, 2 * BATCHES)
