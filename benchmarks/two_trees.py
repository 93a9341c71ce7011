"""Compare two versions of weft on one machine: is a recorded shape slower than before, or slower than serial?

    python benchmarks/two_trees.py OTHER_TREE --json FILE [--only SUBSTRING] [--drawn 40] [--seconds 500]

Each tree runs its own ranks on the same GPUs. The trees alternate for every shape, five times each: first calls, then rows of calls
in each mode (queued after a sleep kernel, graph, single). Each tree also times NCCL's collective and cuBLAS's GEMM. These are the
same in both trees, so their difference is noise.

Shapes are all of `benchmarks/shapes` that were recorded on 2 ranks (bf16 and fp8 gathers, experts with `max_rows`, dense
embeddings), and `--drawn` random gathers (seed 20261123). For random gathers, M is log-uniform in 64 to 32768; N and K are
multiples of 64, log-uniform in 512 to 16384.

A shape is reported in two cases, if at least four of five repetitions agree. It is slower than the other tree if it takes 5% more
time. It is slower than serial if its speed is below 0.98 of serial's, or in mode single if a call takes 15 us more.

The script calls only public operators, so it can compare any two versions that have them. It writes one JSON object to FILE, with
the milliseconds of all repetitions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

REPETITIONS, ROW_MS, DRAWN_SEED = 5, 8.0, 20261123
HERE = Path(__file__).resolve().parent
Calls = dict[str, Callable[[], Any]]


def shapes(drawn: int) -> list[dict[str, Any]]:
    """Return the shapes to time, the same list in every process."""
    groups = tomllib.loads((HERE / "shapes" / "all_gather_matmul.toml").read_text())
    found: dict[str, dict[str, Any]] = {}

    def gather(m: int, n: int, k: int, kind: str) -> None:
        found.setdefault(f"{kind} {m}x{n}x{k}", {"kind": kind, "m": m, "n": n, "k": k})

    for name, group in groups.items():
        if name == "cpu":
            continue
        for m, n, k in group.get("shapes", ()):
            gather(m, n, k, "bf16")
            gather(m, n, k, "fp8")
        for layer in group.get("layers", {}).values():
            for m in layer.get("m", group.get("m")):
                gather(m, layer["n"], layer["k"], "bf16")
    for name, group in tomllib.loads((HERE / "shapes" / "all_to_all_matmul.toml").read_text()).items():
        for layer in group["layers"].values() if name != "cpu" else ():
            for tokens in group["tokens"]:
                for skew in group["skews"]:
                    shape = {"tokens": tokens, "n": layer["n"], "k": layer["k"], "experts": group["experts"]}
                    shape |= {"kind": "experts", "top_k": group["top_k"], "skew": skew}
                    name = f"{tokens}x{layer['n']}x{layer['k']}-e{group['experts']}-top{group['top_k']}-zipf{skew}"
                    found[f"experts {name}"] = shape
    for tables, rows, dim, batch, most in (
        (128, 1_000_000, 64, 16384, 128), (96, 1_000_000, 64, 16384, 32), (128, 200_000, 256, 4096, 32),
        (256, 100_000, 128, 1024, 20), (26, 100_000, 64, 1024, 8),
    ):  # fmt: skip
        name = f"embedding {tables}x{rows}-d{dim}-b{batch}-l{most}"
        found[name] = {"kind": "embedding", "tables": tables, "rows": rows, "dim": dim, "batch": batch, "most": most}
    choose = random.Random(DRAWN_SEED)
    for _ in range(drawn):

        def size(least: int, most: int, step: int) -> int:
            return step * max(1, round(math.exp(choose.uniform(math.log(least), math.log(most))) / step))

        m, n, k = size(64, 32768, 2), size(512, 16384, 64), size(512, 16384, 64)
        found[f"drawn {m}x{n}x{k}"] = {"kind": "bf16", "m": m, "n": n, "k": k}
    cost = {name: s.get("m", 1) * s.get("n", 1) * s.get("k", 1) for name, s in found.items()}
    return [{"name": name, **found[name]} for name in sorted(found, key=lambda name: cost[name])]  # cheap shapes first


# --- a rank of one tree ---


def gathers(shape: dict[str, Any], device: Any, group: Any) -> tuple[Calls, Any]:
    import torch
    import torch.distributed as dist

    import weft

    m, n, k, world = shape["m"], shape["n"], shape["k"], dist.get_world_size()
    generator = torch.Generator(device).manual_seed(7)
    w = torch.randn(n, k, device=device, generator=generator)
    x = torch.randn(m, k, device=device, generator=generator)
    mine = slice(dist.get_rank() * (m // world), (dist.get_rank() + 1) * (m // world))
    if shape["kind"] == "bf16":
        w16, x16 = (w * k**-0.5).bfloat16().t(), x.bfloat16()
        shard, whole = x16[mine].clone(), torch.empty_like(x16)

        def weft_call() -> Any:
            return weft.all_gather_matmul(shard, [w16], 0, group, return_A=False)[1][0]

        def serial() -> Any:
            dist.all_gather_into_tensor(whole, shard, group=group)
            return torch.mm(whole, w16)

        exact = x16[:: max(1, m // 64)].double() @ w16[:, :64].double()
        return {"weft": weft_call, "serial": serial}, (slice(None, None, max(1, m // 64)), slice(0, 64), exact)
    w8, x8 = w.to(torch.float8_e4m3fn).t(), x.to(torch.float8_e4m3fn)
    one, scale = torch.ones((), device=device), torch.full((), k**-0.5, device=device)
    shard8, whole8 = x8[mine].clone(), torch.empty_like(x8)

    def weft_scaled() -> Any:
        return weft.all_gather_scaled_matmul(
            shard8, [w8], one, [scale], 0, group, out_dtypes=[torch.bfloat16], return_A=False
        )[1][0]

    def serial_scaled() -> Any:
        dist.all_gather_into_tensor(whole8.view(torch.uint8), shard8.view(torch.uint8), group=group)
        return torch._scaled_mm(whole8, w8, scale_a=one, scale_b=scale, out_dtype=torch.bfloat16)

    exact = (x8[:: max(1, m // 64)].double() @ w8[:, :64].double()) * k**-0.5
    return {"weft": weft_scaled, "serial": serial_scaled}, (slice(None, None, max(1, m // 64)), slice(0, 64), exact)


def experts(shape: dict[str, Any], device: Any, group: Any) -> tuple[Calls, Any]:
    import torch
    import torch.distributed as dist

    import weft

    world, rank = dist.get_world_size(), dist.get_rank()
    popularity = torch.arange(1, shape["experts"] + 1).double() ** -shape["skew"]
    counts = []
    for source in range(world):
        generator = torch.Generator().manual_seed(source)
        noise = -torch.empty(shape["tokens"], shape["experts"]).exponential_(generator=generator).log()
        chosen = (popularity.log() + noise).topk(shape["top_k"], dim=1).indices
        counts.append(torch.bincount(chosen.flatten(), minlength=shape["experts"]))
    per_rank = torch.stack(counts).view(world, world, -1).sum((0, 2))
    bound = -(-int(per_rank.max()) // 128) * 128
    local = shape["experts"] // world
    generator = torch.Generator(device).manual_seed(11)
    every = [
        torch.randn(shape["tokens"] * shape["top_k"], shape["k"], device=device, generator=generator).bfloat16()
        for _ in range(world)
    ]
    w = torch.empty(local, shape["k"], shape["n"], device=device, dtype=torch.bfloat16)
    for expert in range(local):
        w[expert] = (
            torch.randn(shape["k"], shape["n"], device=device, generator=generator) * shape["k"] ** -0.5
        ).bfloat16()
    tokens, splits = every[rank], counts[rank].to(device)

    def call() -> Any:
        return weft.all_to_all_matmul(tokens, w, splits, group=group, max_rows=bound, capacity=tokens.shape[0])

    # The first rows of the result: the rows of all ranks, in rank order, for this rank's first expert that has any.
    firsts = [torch.cat([torch.zeros(1, dtype=torch.int64), of.cumsum(0)]) for of in counts]
    expert = next(e for e in range(local) if sum(int(of[rank * local + e]) for of in counts))
    g = rank * local + expert
    x = torch.cat([every[s][int(firsts[s][g]) : int(firsts[s][g + 1])] for s in range(world)])[:64]
    exact = x.double() @ w[expert][:, :64].double()
    return {"weft": call}, (slice(0, x.shape[0]), slice(0, 64), exact)


def embedding(shape: dict[str, Any], device: Any, group: Any) -> tuple[Calls, Any]:
    import torch
    import torch.distributed as dist

    import weft

    world, rank = dist.get_world_size(), dist.get_rank()
    tables = [weft.EmbeddingBagConfig(shape["rows"], shape["dim"], f"t{i}", (f"f{i}",)) for i in range(shape["tables"])]
    sharding = weft.place_tables(tables, world)
    mine = sharding.local_tables(rank)
    weights = [torch.randn(shape["rows"], shape["dim"], device=device) for _ in mine]
    generator = torch.Generator().manual_seed(13 + rank)
    lengths = torch.randint(0, shape["most"] + 1, (len(mine) * shape["batch"],), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
    values = torch.randint(0, shape["rows"], (int(lengths.sum()),), generator=generator).to(device)

    def call() -> Any:
        return weft.embedding_all_to_all(weights, (values, offsets), sharding, group=group)

    # This rank's first table, for its own first samples.
    local = shape["batch"] // world
    column = next(slot.column for slot in sharding.local_slots(rank) if slot.table == mine[0])
    rows = []
    for sample in range(rank * local, rank * local + 16):
        ids = values[offsets[sample] : offsets[sample + 1]]
        rows.append(weights[0][ids].double().sum(0))
    return {"weft": call}, (slice(0, 16), slice(column, column + shape["dim"]), torch.stack(rows))


def worker(given: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    os.environ |= {"RANK": str(given.rank), "WORLD_SIZE": "2", "WEFT_QUIET": "1"}
    device = torch.device("cuda", given.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{given.meet}-{given.who}", rank=given.rank, world_size=2)
    control = dist.new_group(backend="gloo")
    group = dist.group.WORLD
    assert group is not None
    turns = dist.FileStore(f"{given.meet}-turns", -1)
    turns.set_timeout(timedelta(seconds=180))
    meeting = symm_mem.rendezvous(symm_mem.empty(1, dtype=torch.int64, device=device), group.group_name)
    turn = 0

    def most(value: float) -> float:
        every = [torch.empty(1, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(every, torch.tensor([value], dtype=torch.float64), group=control)
        return max(float(one) for one in every)

    def my_turn() -> None:
        nonlocal turn
        if given.who == "b" or turn:
            turns.wait([f"{'b' if given.who == 'a' else 'a'}{turn - (given.who == 'a')}"])
        dist.barrier(control)

    def pass_on() -> None:
        nonlocal turn
        torch.cuda.synchronize(device)
        dist.barrier(control)
        if given.rank == 0:
            turns.set(f"{given.who}{turn}", "1")
        turn += 1

    def row(call: Callable[[], Any], mode: str, calls: int, host_ms: float) -> tuple[float, float]:
        """Return (device or wall milliseconds per call, CPU milliseconds per call)."""
        if mode == "single":
            took = []
            for _ in range(calls + 1):
                start = time.perf_counter()
                call()
                torch.cuda.synchronize(device)
                took.append(1e3 * (time.perf_counter() - start))
            return statistics.median(took[1:]), 0.0
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        dist.barrier(control)
        torch.cuda._sleep(int(2e6 * (1.0 + 1.4 * host_ms * calls)))
        meeting.barrier()
        before.record()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        host = 1e3 * (time.perf_counter() - start) / calls
        after.record()
        torch.cuda.synchronize(device)
        return before.elapsed_time(after) / calls, host

    made = {"bf16": gathers, "fp8": gathers, "experts": experts, "embedding": embedding}
    stop_at = time.monotonic() + given.seconds
    with open(f"{given.meet}-{given.who}{given.rank}.jsonl", "w") as out:
        for shape in (s for s in shapes(given.drawn) if given.only in s["name"]):
            my_turn()
            # The first tree decides, so that both trees stop at the same shape.
            if given.who == "a" and given.rank == 0:
                turns.set(f"go{shape['name']}", "0" if time.monotonic() > stop_at else "1")
            if turns.get(f"go{shape['name']}") == b"0":
                pass_on()
                break
            calls, (rows, columns, exact) = made[shape["kind"]](shape, device, group)
            result: dict[str, Any] = {"shape": shape["name"], "times": {}}
            torch.cuda.synchronize(device)
            dist.barrier(control)
            start = time.perf_counter()
            calls["weft"]()
            torch.cuda.synchronize(device)
            result["first_ms"] = most(1e3 * (time.perf_counter() - start))
            for name, call in calls.items():
                for _ in range(3):
                    got = call()
                error = float((got[rows, columns].double() - exact).abs().max() / exact.abs().max())
                assert most(error) < 0.02, f"{shape['name']}: {name} is off by {error}"
                del got
            graphs, stream = {}, torch.cuda.Stream(device)
            for name, call in calls.items():
                stream.wait_stream(torch.cuda.current_stream(device))
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(stream):
                    call()
                torch.cuda.synchronize(device)
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    kept = call()
                graph.replay()
                torch.cuda.synchronize(device)
                graphs[name] = graph, kept
                error = float((kept[rows, columns].double() - exact).abs().max() / exact.abs().max())
                assert most(error) < 0.02, f"{shape['name']}: {name} as a graph is off by {error}"
            modes: dict[str, Calls] = {
                "queued": calls, "graph": {name: graph.replay for name, (graph, _) in graphs.items()}, "single": calls
            }  # fmt: skip
            host: dict[tuple[str, str], float] = {}
            counts: dict[tuple[str, str], int] = {}
            for mode, of_mode in modes.items():
                for name, call in of_mode.items():
                    took, busy = row(call, "queued", 3, 0.3)
                    took, busy = row(call, "queued", 3, most(busy))
                    counts[mode, name] = max(2, min(12 if mode == "graph" else 20, round(ROW_MS / most(took))))
                    host[mode, name] = most(busy)
            pass_on()
            for repetition in range(REPETITIONS):
                my_turn()
                order = [(mode, name) for mode, of_mode in modes.items() for name in of_mode]
                random.Random(repetition).shuffle(order)
                for mode, name in order:
                    took, busy = row(modes[mode][name], mode, counts[mode, name], host[mode, name])
                    host[mode, name] = most(max(busy, 0.5 * host[mode, name]))
                    result["times"].setdefault(f"{mode} {name}", []).append(most(took))
                pass_on()
            out.write(json.dumps(result) + "\n")
            out.flush()
            my_turn()
            del calls, graphs, modes, exact, kept
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            pass_on()
    torch.cuda.synchronize(device)
    os._exit(0)


# --- both trees ---


def summary(found: list[dict[str, Any]]) -> str:
    lines = []
    for kind in ("bf16", "drawn", "fp8", "experts", "embedding"):
        for mode in ("queued", "graph", "single"):
            rows = [r for r in found if r["shape"].startswith(kind) and f"{mode} weft" in r["b"]["times"]]
            if not rows:
                continue
            ratio, control, worse, below = [], [], [], []
            for r in rows:
                a, b = (r[who]["times"][f"{mode} weft"] for who in "ab")
                factor = statistics.median(b) / statistics.median(a)
                ratio.append(factor)
                if factor > 1.05 and sum(y > 1.05 * x for x, y in zip(a, b, strict=True)) >= 4:
                    worse.append(f"{r['shape']} {factor:.3f}")
                if f"{mode} serial" in r["b"]["times"]:
                    sa, sb = (r[who]["times"][f"{mode} serial"] for who in "ab")
                    control.append(statistics.median(sb) / statistics.median(sa))
                    slower = [y > s / 0.98 if mode != "single" else y > s + 0.015 for s, y in zip(sb, b, strict=True)]
                    if sum(slower) >= 4:
                        below.append(f"{r['shape']} {statistics.median(sb) / statistics.median(b):.3f}x")
            line = f"{kind:9} {mode:6} {len(rows):3} shapes: this tree / other {statistics.geometric_mean(ratio):.3f}"
            line += f", worst {max(ratio):.3f}"
            if control:
                gain = [
                    statistics.median(r["b"]["times"][f"{mode} serial"])
                    / statistics.median(r["b"]["times"][f"{mode} weft"])
                    for r in rows
                ]
                line += f"; serial the same {statistics.geometric_mean(control):.3f}"
                line += f"; over serial {statistics.geometric_mean(gain):.3f}x, least {min(gain):.3f}x"
            lines.append(line)
            lines += [f"    slower than the other tree by 5%: {one}" for one in worse]
            lines += [f"    below the bar against serial: {one}" for one in below]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other", type=Path, nargs="?", help="The root of the other tree, with its native module built.")
    parser.add_argument("--json", type=Path, help="Write the milliseconds of all repetitions to this file.")
    parser.add_argument("--only", default="", help="Measure only shapes whose name contains this.")
    parser.add_argument("--drawn", type=int, default=40, help="Number of random shapes. Default: 40.")
    parser.add_argument("--seconds", type=float, default=500.0, help="Begin no shape after this time. Default: 500.")
    parser.add_argument("--summary", type=Path, help="Print the summary of this file, and measure nothing.")
    parser.add_argument("--other-commit", default="", help="The other tree's commit, for the record.")
    for hidden in ("--who", "--meet"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.summary:
        print(summary(json.loads(given.summary.read_text())["shapes"]))
        return
    if given.who:
        worker(given)
        return
    trees = {"a": given.other.resolve(), "b": HERE.parent}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--meet", f"{folder}/m", "--only", given.only]
        command += ["--drawn", str(given.drawn), "--seconds", str(given.seconds)]
        running = [
            subprocess.Popen(
                [*command, "--who", who, "--rank", str(rank)], cwd=folder, env=os.environ | {"PYTHONPATH": str(tree)}
            )
            for who, tree in trees.items()
            for rank in range(2)
        ]
        try:
            while any(process.poll() is None for process in running):
                if any(process.poll() not in (None, 0) for process in running):
                    print("a rank has failed: the shapes before it are kept", file=sys.stderr)
                    break
                time.sleep(0.5)
        finally:
            for process in running:
                process.kill()
        of = {}
        for who in trees:
            path = Path(f"{folder}/m-{who}0.jsonl")
            lines = path.read_text().splitlines() if path.exists() else []
            of[who] = {one["shape"]: one for one in map(json.loads, lines)}
        found = [{"shape": name, "a": of["a"][name], "b": of["b"][name]} for name in of["b"] if name in of["a"]]
    print(summary(found))
    if given.json and found:
        from weft.bench.core.records import environment

        record = {"op": "two_trees", "other": given.other_commit or str(given.other), **environment("cuda")}
        lines = ",\n".join(json.dumps(one) for one in found)
        given.json.write_text(json.dumps(record)[:-1] + f', "shapes": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
