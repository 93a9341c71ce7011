"""Every variant of the Triton kernel that the launcher can request compiles for NVIDIA and for AMD, without a GPU.

Triton compiles for the device that its driver names. Here a fake driver names the device, so the launcher's own
constants and types are used. For NVIDIA, ptxas also gives the number of registers. If tables are aligned and have one
width, rows must be read 16 bytes at a time, without spilled registers. If widths differ, masks and strides need
registers, and a few may be spilled.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.reference import problem, tables_of
from support.slow import mostly, pairs, slow

from weft import env
from weft.embedding import EmbeddingSharding
from weft.embedding.options import EmbeddingOptions
from weft.embedding.plan import EmbeddingPlan

triton = pytest.importorskip("triton", reason="Triton is not installed here: it compiles the GPU kernels")
if env.triton_interpreted():
    pytest.skip("TRITON_INTERPRET=1: this process interprets kernels, it compiles none", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from weft.runtime.cuda import add_up, grouped_config, grouped_matmul, move, round_trip, tracked_matmul  # noqa: E402
from weft.runtime.cuda.embedding_kernel import EmbeddingKernel, VariantKey  # noqa: E402
from weft.runtime.cuda.kernel_call import Base, Count, kernel_call  # noqa: E402
from weft.schedule import kernels as schedule_kernels  # noqa: E402
from weft.sim import model as sim_model  # noqa: E402

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
SPILLED_BYTES = 176  # limit per thread if the widths of tables differ; only timelines come near it
UNIFORM = (64,) * 4
MIXED = (8, 3, 16, 1, 70, 300)
PUT = {"transport": "put", "slice_size": 3}


class NamedDevice:
    """A fake driver for Triton: the current device, and its target."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target)

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[None]:
    before = driver._active
    driver.set_active(NamedDevice(target))
    try:
        yield
    finally:
        driver._active = before


def compiled(
    target: str, sharding: EmbeddingSharding, options: dict[str, Any], key: dict[str, Any], rank: int = 0
) -> tuple[Any, EmbeddingKernel]:
    kernel = EmbeddingKernel(EmbeddingPlan(sharding, EmbeddingOptions(**options)), rank, torch.device("cpu"))
    kernel._on_nvidia = TARGETS[target].backend == "cuda"  # the launcher would query the device, which does not exist
    usual = {"values": torch.int64, "offsets": torch.int64, "wait": True, "enter": True, "leave": True}
    unusual = {"wide": False, "weighted": False, "counted": False, "timeline": False}
    variant = VariantKey(**usual | unusual | key)
    with compiling_for(TARGETS[target]):
        return kernel.compile(variant, kernel.constants(variant)), kernel


def registers_and_stack(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Return the registers and the bytes of stack per thread, from the assembler's output. Spilled registers are on the
    stack.
    """
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, timeout=300, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


INT32 = {"values": torch.int32, "offsets": torch.int32}
# name: (world size, dims, options of the problem and of the plan, variant)
VARIANTS: dict[str, tuple[int, tuple[int, ...], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, UNIFORM, {}, {}, {"wait": False}),
    "one rank puts": (1, UNIFORM, {}, PUT, {}),
    "three ranks": (3, MIXED, {}, {}, {}),
    "three ranks put": (3, MIXED, {}, PUT, {}),
    "eight ranks": (8, UNIFORM * 2, {}, {}, {}),
    "eight ranks put": (8, UNIFORM * 2, {}, PUT, {}),
    "a rank without tables, put": (8, UNIFORM, {}, PUT, {}),
    "int32": (2, UNIFORM, {}, {}, INT32),
    "int32 ids": (2, UNIFORM, {}, {}, {"values": torch.int32}),
    "int32 offsets": (2, UNIFORM, {}, PUT, {"offsets": torch.int32}),
    "wide positions": (2, UNIFORM, {}, {}, {"wide": True}),
    "wide positions, put, any width": (2, MIXED, {}, PUT, {"wide": True, "weighted": True}),
    "weighted": (2, UNIFORM, {}, {}, {"weighted": True}),
    "weighted, any width": (2, MIXED, {}, PUT, {"weighted": True}),
    "hashed": (2, UNIFORM, {}, {"hash": True}, {}),
    "hashed, int32, weighted, put": (2, MIXED, {}, PUT | {"hash": True}, INT32 | {"weighted": True}),
    "trusted ids": (2, UNIFORM, {}, {"bounds_check": "none"}, {}),
    "trusted ids, any width, put": (2, MIXED, {}, PUT | {"bounds_check": "none"}, {}),
    "counted": (2, UNIFORM, {}, PUT, {"counted": True}),
    "timed": (2, UNIFORM, {}, {}, {"timeline": True}),
    "timed and counted, put, any width": (2, MIXED, {}, PUT, {"timeline": True, "counted": True}),
    "first launch of several": (2, UNIFORM, {}, {}, {"leave": False}),
    "middle launch of several": (2, MIXED, {}, {}, {"enter": False, "leave": False}),
    "middle launch of several, put": (2, MIXED, {}, PUT, {"enter": False, "leave": False}),
    "last launch of several, put": (2, UNIFORM, {}, PUT, {"enter": False}),
    "without waits": (2, UNIFORM, {}, PUT, {"wait": False}),
    "one column": (2, (1, 1), {}, {}, {}),
    "wider than a block": (2, (300, 513), {}, {}, {}),
    "fp16, any width, put": (2, MIXED, {"dtype": torch.float16}, PUT, {"weighted": True}),
    "bf16, any width": (2, MIXED, {"dtype": torch.bfloat16}, {}, {}),
    "fp16 outputs": (2, UNIFORM, {}, {"output_dtype": "fp16"}, {}),
    "bf16 outputs, any width, put": (2, MIXED, {}, PUT | {"output_dtype": "bf16"}, {"weighted": True}),
}


FEW = (
    "one rank",
    "three ranks put",
    "hashed, int32, weighted, put",
    "timed and counted, put, any width",
    "bf16, any width",
    "bf16 outputs, any width, put",
)


@pytest.mark.parametrize("name", mostly(VARIANTS, *FEW))
def test_variant_compiles(name: str, tmp_path: Path) -> None:
    world_size, dims, of_problem, of_plan, key = VARIANTS[name]
    sharding = problem(world_size, dims, **of_problem).sharding
    built, _ = compiled("sm_90", sharding, of_plan, key, rank=world_size - 1)
    _, stack = registers_and_stack(built.asm["cubin"], tmp_path)
    assert stack <= SPILLED_BYTES


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.float32, PUT), (torch.float16, {}), (torch.bfloat16, {})],
    ids=["fp32", "fp32 put", "fp16", "bf16"],
)
def test_rows_are_read_16_bytes_at_a_time_and_stay_in_registers(
    dtype: torch.dtype, dim: int, options: dict[str, Any], tmp_path: Path
) -> None:
    tables = tables_of((dim,) * 4, dtype=dtype)
    built, kernel = compiled("sm_90", EmbeddingSharding(tables, (0, 0, 1, 1), 2), options, {})
    rows_bytes = kernel._rows * kernel._block_d * dtype.itemsize
    loads = re.findall(r"ld\.global\S*\.v4\.b32", built.asm["ptx"])
    assert len(loads) >= rows_bytes // (32 * 16)
    registers, stack = registers_and_stack(built.asm["cubin"], tmp_path)
    assert stack == 0
    assert 65536 // (32 * registers) >= 12  # programs per SM: enough rows must be in flight to hide latency


@pytest.mark.parametrize(("options", "dims"), pairs([{}, PUT], [UNIFORM, MIXED], (PUT, MIXED)), ids=str)
def test_compiles_for_amd(options: dict[str, Any], dims: tuple[int, ...]) -> None:
    built, _ = compiled("gfx942", problem(2, dims).sharding, options, {})
    assert built.asm["hsaco"]
    if dims == UNIFORM:
        assert "global_load_dwordx4" in built.asm["amdgcn"]


def how_rows_are_added(built: Any) -> tuple[str, ...]:
    """Return the layouts of the blocks whose rows are summed. A layout assigns rows to threads, and so determines the
    order of additions.
    """
    text = built.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    summed = re.findall(r"\}\) : \(tensor<(\d+x\d+xf32), (#\w+)>\)", text)
    assert summed
    return tuple(f"{shape} {layouts[name]}" for shape, name in summed)


@pytest.mark.parametrize("dims", [(8, 12, 16, 4), MIXED], ids=["aligned", "any width"])
def test_bags_are_added_in_the_same_order_whatever_the_world(dims: tuple[int, ...]) -> None:
    """Bits must not depend on the owner of a table, the number of ranks, or the transport."""
    ways = set()
    for world_size, options in ((1, {}), (2, PUT), (3, {})):
        sharding = problem(world_size, dims).sharding
        ways.add(how_rows_are_added(compiled("sm_90", sharding, options, {}, world_size - 1)[0]))
    assert len(ways) == 1, ways


def check_occupancy(config: grouped_matmul.Config, built: Any, tmp_path: Path, spilled_bytes: int = 0) -> None:
    """Check that as many programs fit on an SM as the configuration says, and that at most `spilled_bytes` of registers of each
    thread spill.
    """
    registers, stack = registers_and_stack(built.asm["cubin"], tmp_path)
    assert stack <= spilled_bytes
    assert config.per_sm * config.warps * 32 * registers <= 65536
    assert config.per_sm * (built.metadata.shared + 1024) <= 228 * 1024


def grouped(target: str, dtype: torch.dtype, config: grouped_matmul.Config, **key: Any) -> Any:
    usual = {"world_size": 2, "experts": 128, "k": 7168, "n": 4096, "transposed": False, "aligned": True, "tma": False}
    with compiling_for(TARGETS[target]):
        return grouped_matmul.compile_variant(grouped_matmul.GroupedVariant(dtype=dtype, config=config, **usual | key))


@pytest.mark.parametrize(
    "key",
    [
        {},
        slow({"transposed": True}),
        slow({"world_size": 64, "experts": 16}),
        slow({"back": True}),
        {"back": True, "transposed": True},
        slow({"merged": True}),
        {"merged": True, "back": True},
        slow({"adds": True}),
        {"adds": True, "transposed": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("config", mostly(grouped_config.CONFIGS, grouped_config.CONFIGS[0]), ids=str)
def test_grouped_matmul_with_tensor_maps(config: grouped_matmul.Config, key: dict[str, Any], tmp_path: Path) -> None:
    """Loads and stores use TMA, products use the tensor cores, and as many programs fit on an SM as the configuration
    says.
    """
    config = replace(config, parts=2) if key.get("merged") else config  # as `choose_config` does
    built = grouped("sm_90", torch.bfloat16, config, tma=True, **key)
    ptx = built.asm["ptx"]
    loads = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared", ptx)
    assert loads.count("2") == loads.count("3") == config.stages
    stores = 2 if "back" in key else 1  # to this rank's result, or to the outbox
    by_tensor_map = len(re.findall(r"cp\.async\.bulk\.tensor\.4d\.global", ptx)) / config.parts
    if key.get("merged") and key.get("back"):
        assert by_tensor_map == 0
        assert "st.global.v4" in ptx  # 16 bytes at a time
    else:
        assert stores >= by_tensor_map >= 1
    # Launches that add to the result ignore `swap`, and wgmma needs 64 rows.
    assert ("wgmma.mma_async" in ptx) == (config.block_m >= 64 or "adds" not in key)
    assert ("ld.global.v4" in ptx) == ("adds" in key)  # the stored tile is read 16 bytes at a time
    check_occupancy(config, built, tmp_path)


PARAMETER_BYTES = {"b64": 8, "u64": 8, "s64": 8, "b32": 4, "u32": 4, "s32": 4}


@pytest.mark.parametrize("tma", [slow(False), True])
@pytest.mark.parametrize("back", [slow(False), True])
def test_native_launches_pass_the_parameters_of_grouped_gemms(back: bool, tma: bool) -> None:
    key: dict[str, Any] = {
        "world_size": 2,
        "experts": 4,
        "k": 512,
        "n": 1024,
        "transposed": True,
        "aligned": tma,
        "tma": tma,
    }
    variant = grouped_matmul.GroupedVariant(dtype=torch.bfloat16, config=grouped_config.CONFIGS[0], back=back, **key)
    with compiling_for(TARGETS["sm_90"]):
        built = grouped_matmul.compile_variant(variant)
    entry, _, _ = built.asm["ptx"].partition(".entry")[2].partition(")")
    found = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^,]*?_param_\d+(?:\[(\d+)\])?", entry)
    sizes = [int(count or PARAMETER_BYTES[kind]) for kind, count in found]
    assert sizes.count(128) == 4 * tma

    def operand(number: int, columns: int, rows: Count | int = 7) -> grouped_matmul.Operand:
        return grouped_matmul.Operand.of(torch.empty(7, columns, dtype=torch.bfloat16), Base(number, 0), rows)

    x, w, y = operand(0, 512, Count(3)), torch.empty(4, 1024, 512, dtype=torch.bfloat16), operand(1, 1024, Count(4))
    operands = (y, operand(5, 1024), None, x) if back else (x, operand(5, 512), None, y)
    weights = grouped_matmul.Operand.of(w, Base(2, 0), 4)
    tensors = [(one or weights).argument(i, variant) for i, one in enumerate(operands)]
    arguments = [*tensors, *[Base(2, 0)] * 4, *[1] * grouped_matmul._NUMBERS]
    compiled = SimpleNamespace(metadata=built.metadata, src=built.src, function=1)
    for change, is_native in ((0, True), (4, False)):
        changed = [*sizes[:-1], sizes[-1] + change] if change else sizes
        program: Any = SimpleNamespace(parameters_of=lambda _, changed=changed: changed)
        assert (kernel_call(program, compiled, 1, arguments) is not None) == is_native
    assert kernel_call(program, compiled, 1, arguments[:-1]) is None


@pytest.mark.parametrize("back", [slow(False), True])
def test_parts_of_tiles_in_two_rounds_need_no_stack(back: bool, tmp_path: Path) -> None:
    config = replace(grouped_config.CONFIGS[1], splits=8, rounds=2)
    built = grouped("sm_90", torch.bfloat16, config, tma=True, back=back, merged=True)
    assert registers_and_stack(built.asm["cubin"], tmp_path)[1] == 0


def test_tiles_are_chosen_by_their_number() -> None:
    """Choose small tiles if there are few tiles or rows. Cut tiles into thirds if they may occupy 1/2 to 2/3 of the programs."""

    def chosen(rows: float, n: int, k: int, segments: int, merged: bool) -> tuple[int, int, int]:
        config = grouped_matmul.choose_config(2, rows, n, k, segments, 132, merged=merged)
        return config.block_m, config.block_n, config.rounds

    assert chosen(98, 576, 1728, 4, True) == (128, 128, 1)
    assert chosen(196, 4864, 48000, 1, True) == (128, 256, 1)  # 38 tiles in three parts occupy more than 76 tiles
    assert chosen(196, 4864, 1000, 1, True) == (128, 128, 1)  # K is too short for parts
    assert chosen(3.5, 12032, 26624, 4, True) == (16, 128, 1)
    assert chosen(281, 5696, 4480, 1, True) == (128, 256, 1)
    assert chosen(264, 14848, 25152, 2, True) == (128, 256, 2)
    assert chosen(256.5, 1664, 39680, 4, False) == (128, 256, 2)
    assert chosen(517, 640, 19840, 8, False) == (128, 256, 1)


@pytest.mark.parametrize("config", grouped_config.CONFIGS, ids=str)
def test_kernels_for_rows_without_alignment_have_small_tiles(config: grouped_matmul.Config) -> None:
    """The compilation of large tiles takes seconds, and such rows are rare."""
    w = torch.empty(2, 64, 128, dtype=torch.bfloat16)
    variant = grouped_matmul._variant(w, w.device, 2, config, False, False, False, False)
    assert not variant.aligned
    assert not variant.tma
    assert variant.config.tile <= grouped_config.PLAIN.tile


def test_the_model_of_grouped_gemms_has_the_kernels_numbers() -> None:
    """The simulator imports no kernels, so it has copies of their constants."""
    least_k = {grouped_config.LEAST_STEPS * config.block_k for config in grouped_config.CONFIGS}
    ours = sim_model._FEW_ROUNDS, sim_model._GROUPED_SHARERS, {sim_model._LEAST_K}
    assert ours == (grouped_config.FEW_ROUNDS, grouped_config.MAX_SPLITS, least_k)
    assert sim_model._TWO_ROUNDS_K == grouped_config.TWO_ROUNDS_K
    assert schedule_kernels.FEW_ROWS == grouped_config.FEW_ROWS
    tiles = {(config.block_m, config.block_n) for config in grouped_config.CONFIGS}
    assert set(zip(*(sizes.tolist() for sizes in sim_model._GROUPED_TILES), strict=True)) <= tiles


@pytest.mark.parametrize(
    "key", [{}, slow({"transposed": True}), slow({"back": True}), slow({"back": True, "merged": True})], ids=str
)
@pytest.mark.parametrize("config", [grouped_config.LARGE, *map(slow, grouped_config.CONFIGS[1:])], ids=str)
def test_grouped_matmul_of_shared_tiles(config: grouped_matmul.Config, key: dict[str, Any], tmp_path: Path) -> None:
    """Both loops over K are pipelined. Registers do not spill, except a few in the configuration for few tiles of merged rows,
    which is faster on an H100 than the other configurations.
    """
    config = replace(config, parts=2) if key.get("merged") else config
    built = grouped("sm_90", torch.bfloat16, replace(config, splits=8), tma=True, **key)
    loads = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared", built.asm["ptx"])
    assert loads.count("2") == loads.count("3") == 2 * config.stages
    is_for_few_tiles = config == grouped_config.CONFIGS[6]
    check_occupancy(config, built, tmp_path, 32 * (is_for_few_tiles and key == {"back": True, "merged": True}))


@pytest.mark.parametrize(
    "key",
    [slow({}), slow({"transposed": True}), {"aligned": False, "k": 100, "n": 33}, {"back": True}, {"adds": True}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)], ids=str)
def test_grouped_matmul_with_pointers(dtype: torch.dtype, key: dict[str, Any], tmp_path: Path) -> None:
    built = grouped("sm_90", dtype, grouped_config.PLAIN, **key)
    assert registers_and_stack(built.asm["cubin"], tmp_path)[1] <= 32  # bytes; some versions of Triton spill a few
    assert ("cp.async.cg" in built.asm["ptx"]) == key.get("aligned", True)  # 16 bytes at a time
    assert grouped("gfx942", dtype, grouped_config.PLAIN, **key).asm["hsaco"]


def tracked(target: str, dtype: torch.dtype, **key: Any) -> Any:
    usual = {
        "k": 8192,
        "n": 4096,
        "transposed": False,
        "aligned": True,
        "tma": False,
        "rows": 128,
        "cols": 256,
        "sets": 1,
    }
    with compiling_for(TARGETS[target]):
        return tracked_matmul.compile_variant(tracked_matmul.TrackedVariant(dtype=dtype, **usual | key))


@pytest.mark.parametrize(
    "key", [{}, {"transposed": True}, {"cols": 128, "sets": 2}, {"splits": 4}, {"adds": True}], ids=str
)
def test_tracked_matmul_with_tensor_maps(key: dict[str, Any], tmp_path: Path) -> None:
    """Operands are loaded by TMA in three stages, products use the tensor cores, and no registers are spilled."""
    built = tracked("sm_90", torch.bfloat16, tma=True, **key)
    ptx = built.asm["ptx"]
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx)) == 6
    assert "st.global.v4.b32" in ptx
    assert "st.global.b16" not in ptx
    assert ("ld.global.v4.b32" in ptx) == (key.get("adds", False) or "splits" in key)
    assert "wgmma.mma_async" in ptx
    registers, stack = registers_and_stack(built.asm["cubin"], tmp_path)
    assert stack == 0
    assert built.metadata.num_warps * 32 * registers <= 65536
    assert built.metadata.shared + 1024 <= 228 * 1024


@pytest.mark.parametrize(
    "key", [slow({}), slow({"transposed": True}), {"aligned": False, "k": 100, "n": 33}, {"adds": True}], ids=str
)
def test_tracked_matmul_with_pointers(key: dict[str, Any]) -> None:
    for dtype in (torch.float16, torch.float32):
        assert tracked("sm_90", dtype, rows=64, cols=64, **key).asm["cubin"]
    assert tracked("gfx942", torch.bfloat16, rows=64, cols=64, ptx=False, **key).asm["hsaco"]


@pytest.mark.parametrize("eps", [None, 1e-6], ids=["", "normed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_read_and_write_16_bytes_at_a_time(dtype: torch.dtype, eps: float | None, tmp_path: Path) -> None:
    for parts, target in ((4, "sm_90"), (11, "sm_90"), (4, "gfx942")):
        arguments, warps, constants = add_up.arguments_of(add_up.SumVariant(dtype, parts, 16, 8192, True, eps))
        with compiling_for(TARGETS[target]):
            built = add_up.device_code.add_up_kernel.warmup(*arguments, grid=(1,), num_warps=warps, **constants)
        if target == "gfx942":
            assert "global_load_dwordx4" in built.asm["amdgcn"]
            continue
        wide = re.findall(r"(ld|st)\.global\S*\.v4\.b32", built.asm["ptx"])
        assert wide.count("ld") >= parts
        assert wide.count("st") >= 1
        registers, stack = registers_and_stack(built.asm["cubin"], tmp_path)
        assert stack == 0
        assert 65536 // (32 * warps * registers) >= 2  # programs per SM: enough loads must be in flight to hide latency


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_copies_that_add(dtype: str) -> None:
    """Each addition is one atomic instruction for one or several items, with the scope of all devices."""
    for step in (move.ITEM_BYTES[dtype], 16):
        constants = move._constants(step, dtype) | {"PTX": True}
        names = move.device_code.move_kernel.arg_names
        arguments = [torch.int64 if n in move.device_code.TABLES else 1 for n in names[: len(names) - len(constants)]]
        with compiling_for(TARGETS["sm_90"]):
            ptx = move.device_code.move_kernel.warmup(*arguments, grid=(1,), num_warps=8, **constants).asm["ptx"]
        assert re.search(r"(atom|red)[.\w]*\.sys[.\w]*\.add", ptx), "no addition at system scope"


@pytest.mark.parametrize("ranges", [2, 16])
def test_an_exchange_of_rows_moves_16_bytes_at_a_time(ranges: int, tmp_path: Path) -> None:
    """A program of any variant fits on a multiprocessor, because all programs must run at once."""
    kernel, library = round_trip.device_code.round_trip_kernel, round_trip
    for step, item_bytes in ((16, 2), (16, 4), (4, 4), (2, 2)):
        constants = library.constants_of(step, ranges, 2, item_bytes) | {"PTX": True}
        with compiling_for(TARGETS["sm_90"]):
            built = kernel.warmup(*library.arguments_of(constants), grid=(1,), num_warps=library.WARPS, **constants)
        if step == 16:
            wide = re.findall(r"(ld|st)\.global\S*\.v2\.b64", built.asm["ptx"])
            assert min(wide.count("ld"), wide.count("st")) >= 3 * 4  # three loops, 64 bytes per thread
        registers, stack = registers_and_stack(built.asm["cubin"], tmp_path)
        assert stack <= 32  # a few scalars, outside of the loops
        assert 32 * library.WARPS * registers <= 65536
