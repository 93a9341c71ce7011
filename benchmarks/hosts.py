"""GEMMs and collectives between two hosts emulated on this machine: by gloo alone, and by weft's two-level collectives.

    python benchmarks/hosts.py --ranks 4 --rate 1gbit

A link of the given rate (`tc tbf`) joins two network namespaces. torchrun starts `--ranks` ranks in each. The ranks first measure
the link's rate and round trip. Then the variants of each operator are called in turn:

    GEMMs        gloo called by hand; weft's choice
    experts      gloo called by hand; "one by one", which exchanges and then computes; weft's choice; "far first", which starts with
                 the other host's tokens
    embeddings   "one pass", which pools all samples and then exchanges; weft's choice; "far first", which starts with the other
                 host's samples

The result of each call is checked. A line of the output has the slowest rank's median time, and the bytes that one host sends per
call. It also has the speed relative to the first variant: the median over all turns of this variant's time / the variant's time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
BY_HAND = "gloo by hand"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=4, help="ranks on each host")
    parser.add_argument("--rate", default="1gbit", help="rate of the link, as tc writes it")
    parser.add_argument(
        "--delay", type=float, default=0.0, metavar="MS",
        help="milliseconds that a packet takes from one host to the other; the round trip is at least twice as long",
    )  # fmt: skip
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[4096],
        help="M: rows of the whole matrix that is gathered or reduced; one measurement for each value",
    )
    parser.add_argument("--cols", type=int, default=1024, help="columns of the matrix")
    parser.add_argument(
        "--pooling", type=int, nargs="+", default=[8, 32, 96], help="rows per bag; one measurement for each"
    )
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[64, 256, 512], help="N of experts; one measurement for each"
    )
    parts = ["gemm", "experts", "embedding"]
    parser.add_argument(
        "--only", nargs="+", choices=[*parts, "curves", "links"], default=parts,
        help="what to measure (default: all but the curves of embeddings, and predictions from links)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="file for the records")
    parser.add_argument("--append", action="store_true", help="keep the file's earlier records")
    parser.add_argument("--calls", type=int, default=5, help="calls of each variant (default: 5)")
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank(given)
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from support.two_hosts import TwoHosts

    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(TwoHosts(given.delay / 1e3))
        hosts.limit(given.rate)
        print(
            f"two network namespaces, tc tbf of {given.rate}, a relay that delays packets by {given.delay} ms, "
            f"{given.ranks} ranks on each host, {os.cpu_count()} cores"
        )
        # In a cache of its own, choices rest on the links and times of this run.
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        launchers = hosts.torchrun(given.ranks, [__file__, *sys.argv[1:]], WEFT_QUIET="1", WEFT_CACHE_DIR=cache)
        said = [launcher.communicate()[0] for launcher in launchers]
        records = [line.removeprefix("record ") for line in said[0].splitlines() if line.startswith("record ")]
        print(said[0])
        if given.json is not None:
            known = json.loads(given.json.read_text()) if given.append and given.json.exists() else []
            given.json.write_text("[\n" + ",\n".join([*map(json.dumps, known), *records]) + "\n]\n")
        if any(launcher.returncode for launcher in launchers):
            raise SystemExit(said[1])
    if given.delay:
        print(f"the relay used {hosts.relay_share:.0%} of a core")


def rank(given: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 prints."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    rate = _measure_link(dist.get_world_size() // 2)
    for rows in given.rows:
        if "gemm" in given.only:
            _gemms(group, rows, given.cols, given.calls)
        if "experts" in given.only:
            for wide in given.widths:
                _experts(group, 2 * rows, given.cols, wide, given.calls)
        if "embedding" in given.only:
            for bag in given.pooling:
                _embeddings(group, rows, bag, given.calls)
        if "links" in given.only:
            _predictions(group, rows, given.cols, given.calls)
        if "curves" in given.only:
            _curves(group, rows, given.calls, rate)
    dist.destroy_process_group()


def _gemms(group: dist.ProcessGroup, rows: int, cols: int, calls: int) -> None:
    """Compare gloo by hand and weft's choice."""
    import weft
    from weft.runtime.collectives import all_gather_by_torch, reduce_scatter_by_torch

    world = group.size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    shard, narrow = torch.randn(rows // world, cols, generator=generator), torch.randn(cols, 16)
    x, wide = torch.randn(rows, 16, generator=generator), torch.randn(16, cols)
    for tensor in (narrow, wide):
        dist.broadcast(tensor, 0)

    def gathered() -> torch.Tensor:
        whole = shard.new_empty(rows, cols)
        all_gather_by_torch(whole, shard)
        return whole @ narrow

    def scattered() -> torch.Tensor:
        mine = x.new_empty(rows // world, cols)
        reduce_scatter_by_torch(mine, x @ wide)
        return mine

    def reduced() -> torch.Tensor:
        y = x @ wide
        dist.all_reduce(y)
        return y

    for op, by_hand, call in (
        (
            "all_gather_matmul",
            gathered,
            lambda: weft.all_gather_matmul(shard, [narrow], 0, group, return_A=False)[1][0],
        ),
        ("matmul_reduce_scatter", scattered, lambda: weft.matmul_reduce_scatter(x, wide, "sum", 0, group)),
        ("matmul_all_reduce", reduced, lambda: weft.matmul_all_reduce(x, wide, group)),
    ):
        _compare("gemm", op, {"rows": rows, "columns": cols}, {BY_HAND: by_hand, "weft": call}, calls)


def _embeddings(group: dist.ProcessGroup, batch: int, bag: int, calls: int) -> None:
    """Compare the variants of embedding_all_to_all: four fp32 tables of dimension 64 on each rank."""
    sizes = {"samples": batch, "bag": bag}
    _compare_ways("embedding", "embedding_all_to_all", sizes, _embedding_call(group, batch, bag), calls)


def _embedding_call(group: dist.ProcessGroup, batch: int, bag: int) -> Callable[..., torch.Tensor]:
    """Return a call on four fp32 tables of dimension 64 on each rank."""
    import weft

    world = group.size()
    tables = [weft.EmbeddingBagConfig(50_000, 64, f"t{t}", [f"f{t}"]) for t in range(4 * world)]
    sharding = weft.place_tables(tables, world, placement=[t % world for t in range(4 * world)])
    weights = [torch.randn(50_000, 64) for _ in range(4)]
    features = torch.randint(50_000, (4 * batch * bag,)), torch.arange(0, 4 * batch * bag + 1, bag)
    return lambda **more: weft.embedding_all_to_all(weights, features, sharding, group=group, **more)


def _curves(group: dist.ProcessGroup, batch: int, calls: int, rate: float) -> None:
    """Record times of embeddings in the orders "one pass", "far first" and "far last", for several ratios of link time to
    pooling time, and for several slice sizes.
    """
    from weft.runtime.cpu.embedding_far_first import FarFirst
    from weft.runtime.two_ways import TwoWays

    far_samples = batch // group.size()  # per rank
    link_s = (group.size() // 2) * (batch // 2) * 4 * 64 * 4 / rate  # one host's tables, for the other host's samples

    def run(call: Callable[..., torch.Tensor], pieces: int, far_last: bool) -> torch.Tensor:
        kept = FarFirst.pinned_pieces, FarFirst.far_last, TwoWays.takes_other
        FarFirst.pinned_pieces, FarFirst.far_last, TwoWays.takes_other = pieces or None, far_last, lambda *_: pieces > 0  # type: ignore
        try:
            return call()
        finally:
            FarFirst.pinned_pieces, FarFirst.far_last, TwoWays.takes_other = kept  # type: ignore[method-assign]

    def point(
        call: Callable[..., torch.Tensor], ways: dict[str, tuple[int, bool]], calls: int, **about: Any
    ) -> None:  # fmt: skip
        pool_ms = _pooling_s(lambda **more: run(partial(call, **more), 0, False)) * 1e3
        made = {name: partial(run, call, *way) for name, way in ways.items()}
        for name, (times, skews) in _timed_in_turns(made, calls).items():
            _record({
                **about, "ranks": group.size(), "hosts": 2, "batch": batch, "link_ms": link_s * 1e3, "pool_ms": pool_ms,
                "ratio": link_s * 1e3 / pool_ms, "way": name, "ms": statistics.median(times) * 1e3, "best_ms": min(times) * 1e3,
                "skew_ms": statistics.median(skews) * 1e3, "calls": calls, "rate_MBps": rate / 1e6,
            })  # fmt: skip

    first = _embedding_call(group, batch, 32)
    first(), first()
    of_row_s = _pooling_s(lambda **more: run(partial(first, **more), 0, False)) / 32
    for ratio in (4, 2, 1, 0.5, 0.25):
        bag = max(1, round(link_s / ratio / of_row_s))
        ways = {"one pass": (0, False), "far first": (2, False), "far last": (2, True)}
        point(_embedding_call(group, batch, bag), ways, calls, curve="ratio", wanted_ratio=ratio, bag=bag)
    bag = max(1, round(link_s / of_row_s))
    call = _embedding_call(group, batch, bag)
    sizes = (2, 4, 8, 16, 32, 64, 128, 256, 512, far_samples // 2)
    for size in sizes:
        pieces = max(1, far_samples // size)
        ways = {"one pass": (0, False), "far first": (pieces, False), "far last": (pieces, True)}
        point(call, ways, min(calls, 3), curve="slice", slice=size, pieces=pieces, bag=bag)


def _predictions(group: dist.ProcessGroup, rows: int, cols: int, calls: int) -> None:
    """Record times of collectives, and their predictions. The rates for the predictions are measured before each round of
    calls.
    """
    from weft import symm
    from weft.runtime.collectives import all_gather_by_torch, reduce_scatter_by_torch
    from weft.runtime.links import measure_links

    comm, world = symm.communicator(group, torch.device("cpu")), group.size()
    shard, whole = torch.randn(rows // world, cols), torch.ones(rows, cols)
    sent, mine = torch.randn(rows, cols), torch.ones(rows // world, cols)
    collectives: dict[str, tuple[str, Callable[[], object]]] = {
        "all-to-all by gloo": ("all_to_all", lambda: dist.all_to_all_single(whole, sent)),
        "all-gather by gloo": ("all_gather", lambda: all_gather_by_torch(whole, shard)),
        "reduce-scatter by gloo": ("reduce_scatter", lambda: reduce_scatter_by_torch(mine, sent)),
        "all-reduce by gloo": ("all_reduce", lambda: dist.all_reduce(sent)),
    }
    times: dict[str, list[float]] = {name: [] for name in collectives}
    networks = []
    for number in range(calls + 1):
        found = measure_links(comm).network()
        assert found is not None
        took = {name: _largest(_timed(run)) for name, (_, run) in collectives.items()}
        sent.normal_()  # sums of sums would overflow
        if number:  # the first round sets up memory and connections
            networks.append(found)
            for name, seconds in took.items():
                times[name].append(seconds)
    numbers = (field for field in networks[0].__dataclass_fields__ if field != "hosts")
    middle = {field: statistics.median(getattr(one, field) for one in networks) for field in numbers}
    for name, (op, _) in collectives.items():
        without = [replace(one, copy_bytes_per_us=math.inf, fresh_bytes_per_us=math.inf) for one in networks]
        predicted, by_link = (
            [one.collective_us(op, whole.nbytes) / 1e3 for one in every] for every in (networks, without)
        )
        _record({
            "curve": "prediction", "collective": name, "nbytes": whole.nbytes, "predicted_ms": statistics.median(predicted),
            "link_ms": statistics.median(by_link), "ms": statistics.median(times[name]) * 1e3,
            "best_ms": min(times[name]) * 1e3, "calls": calls, "ranks": world, "cores": os.cpu_count(), **middle,
        })  # fmt: skip


def _pooling_s(call: Callable[..., torch.Tensor]) -> float:
    """Return the seconds in which a call pools: the median of three calls, on the slowest rank."""
    import weft

    found = []
    for _ in range(3):
        call(timeline=(timeline := weft.Timeline()))
        found.append(sum(span.end_us - span.start_us for span in timeline.spans if span.name == "pool") / 1e6)
    return _largest(statistics.median(found))


def _timed_in_turns(
    ways: dict[str, Callable[[], torch.Tensor]], calls: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Call the variants `ways` in turn, `calls` times each. Return {variant: (seconds of the slowest rank in each call,
    seconds from the first to the last rank's end of each call)}.
    """
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    wanted = next(iter(ways.values()))()
    for way in ways.values():
        assert torch.equal(way(), wanted)
    for _ in range(calls):
        for name, way in ways.items():
            took = _timed(way)
            most, least = _largest(took), -_largest(-took)
            found[name][0].append(most)
            found[name][1].append(most - least)
    return found


def _largest(number: float) -> float:
    found = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _record(record: dict[str, Any]) -> None:
    if not dist.get_rank():
        print("record", json.dumps({name: round(x, 3) if isinstance(x, float) else x for name, x in record.items()}))


def _experts(group: dist.ProcessGroup, tokens: int, hidden: int, wide: int, calls: int) -> None:
    """Compare the variants of experts: four per rank, fp32, with the `tokens` tokens of all ranks spread evenly."""
    import weft

    world, each = group.size(), 4
    splits = torch.full((world * each,), tokens // (world * world * each))
    x = torch.randn(int(splits.sum()), hidden, generator=torch.Generator().manual_seed(dist.get_rank()))
    w, back = torch.randn(each, hidden, wide) / hidden**0.5, torch.randn(each, wide, hidden) / wide**0.5
    _, received = weft.all_to_all_matmul(x, w, splits, group=group, return_received=True)
    h = torch.randn(int(received.sum()), wide, generator=torch.Generator().manual_seed(dist.get_rank()))
    order = torch.arange(len(h)).view(world, each, -1).transpose(0, 1).flatten()  # to the order of experts

    def multiplied(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cat([part @ of_expert for part, of_expert in zip(rows.chunk(each), w, strict=True)])

    def dispatched() -> torch.Tensor:
        counts = torch.empty_like(splits)
        dist.all_to_all_single(counts, splits)
        sizes = [table.view(world, each).sum(1).tolist() for table in (counts, splits)]
        arrived = x.new_empty(sum(sizes[0]), hidden)
        dist.all_to_all_single(arrived, x, *sizes)
        return multiplied(arrived[order], w)

    def combined() -> torch.Tensor:
        made, y = multiplied(h, back), x.new_empty(len(x), hidden)
        sizes = [table.view(world, each).sum(1).tolist() for table in (splits, received)]
        dist.all_to_all_single(y, torch.empty_like(made).index_copy_(0, order, made), *sizes)
        return y

    sizes = {"tokens": tokens, "hidden": hidden, "columns": wide}
    for op, call, by_hand in (
        ("all_to_all_matmul", lambda: weft.all_to_all_matmul(x, w, splits, group=group), dispatched),
        ("matmul_all_to_all", lambda: weft.matmul_all_to_all(h, back, received, splits, group=group), combined),
    ):
        _compare_ways("experts", op, sizes, call, calls, by_hand)


def _compare_ways(
    part: str,
    op: str,
    sizes: dict[str, int],
    call: Callable[[], torch.Tensor],
    calls: int,
    by_hand: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Compare weft's choice with "one by one", "far first", and `by_hand` if given. Omit "far first" if the call is so small that
    weft never uses it.
    """
    from weft.runtime.two_ways import TwoWays

    choose, ways = TwoWays.takes_other, []

    def forced(way: Callable[..., bool]) -> torch.Tensor:
        TwoWays.takes_other = way  # type: ignore[method-assign]
        try:
            return call()
        finally:
            TwoWays.takes_other = choose  # type: ignore[method-assign]

    for _ in range(12):
        call()
    forced(lambda *given: ways.append(choose(*given)) or ways[-1])
    hand = {} if by_hand is None else {BY_HAND: by_hand}
    first = "one pass" if part == "embedding" else "one by one"
    others = {"far first": lambda: forced(lambda *_: True)} if ways else {}
    _compare(
        part,
        op,
        sizes,
        hand | {first: lambda: forced(lambda *_: False), "weft": call} | others,
        calls,
        "far first" if ways and ways[-1] else first,
    )


def _measure_link(peer: int) -> float:
    """Return the bytes per second between the first ranks of both hosts. Print the rate and the round trip."""
    data, one = torch.ones(16 << 20, dtype=torch.uint8), torch.ones(1)
    trips = [_timed(lambda: _ping(one, one, peer)) for _ in range(20)]
    took, trip = _timed(lambda: _ping(data, one, peer)), statistics.median(trips)
    found = torch.tensor([data.nbytes / (took - trip / 2), trip], dtype=torch.float64)
    dist.broadcast(found, 0)
    rate, trip = found.tolist()
    if not dist.get_rank():
        print(f"measured: {rate / 1e6:.0f} MB/s, round trip {trip * 1e6:.0f} us")
    _record({"curve": "link", "rate_MBps": rate / 1e6, "round_trip_us": trip * 1e6, "cores": os.cpu_count(),
             "load": os.getloadavg()[0]})  # fmt: skip
    return rate


def _ping(there: torch.Tensor, back: torch.Tensor, peer: int) -> None:
    if dist.get_rank() == 0:
        dist.send(there, peer)
        dist.recv(back, peer)
    elif dist.get_rank() == peer:
        dist.recv(there, 0)
        dist.send(back, 0)


def _timed(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _compare(
    part: str,
    op: str,
    sizes: dict[str, int],
    variants: dict[str, Callable[[], torch.Tensor]],
    calls: int,
    chosen: str = "",
) -> None:
    """Time variants in turns, and record them. The speed of a variant is relative to the first variant's call in the
    same turn.
    """
    first, *_ = variants
    wanted = variants[first]()
    times: dict[str, list[float]] = {name: [] for name in variants}
    sent: dict[str, float] = {}
    for call in variants.values():  # weft's first call autotunes
        torch.testing.assert_close(call(), wanted, rtol=1e-4, atol=1e-3)
    for _ in range(calls):
        for name, call in variants.items():
            call()  # allocates memory that the previous variant did not need
            dist.barrier()
            before = _sent_bytes()
            times[name].append(_largest(_timed(call)))
            sent[name] = _sent_bytes() - before
    for name, found in times.items():
        speeds = [base / took for base, took in zip(times[first], found, strict=True)]
        _record({
            "curve": "operator", "part": part, "op": op, **sizes, "ranks": dist.get_world_size(), "variant": name,
            "ms": statistics.median(found) * 1e3, "best_ms": min(found) * 1e3, "speed": statistics.median(speeds),
            "not_slower": sum(speed >= 0.98 for speed in speeds), "calls": calls, "sent_MB": sent[name] / 1e6,
            **({"chosen": chosen} if chosen else {}),
        })  # fmt: skip
        if not dist.get_rank():
            shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
            print(f"{op:22} {shown:38} {name:14} {statistics.median(found) * 1e3:8.1f} ms {statistics.median(speeds):6.2f}x "
                  f"{sent[name] / 1e6:8.2f} MB sent by host 0")  # fmt: skip


def _sent_bytes() -> int:
    """Return the bytes that this host has sent over the link, including headers."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("weft0:"))
    return int(line.split(":")[1].split()[8])


if __name__ == "__main__":
    main()
