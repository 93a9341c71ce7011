"""The texts of `weft bench --help` and `weft bench OP --help`. They are plain data, because help must not import torch."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

Lines = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class OperatorHelp:
    """The help of one operator or study.

    about: what is measured. presets, variants: pairs (names, description).
    examples: the arguments of commands after `weft bench`.
    without: options of `weft bench` that the operator refuses, or that have no effect.
    """

    about: str
    presets: Lines
    variants: Lines
    examples: tuple[str, ...]
    without: frozenset[str] = frozenset()


_NO_PICTURES = frozenset({"pictures"})
_GEMM = _NO_PICTURES | {"scale"}
_EXPERTS = _GEMM | {"option"}
_TABLES = _NO_PICTURES | {"option", "shape"}
_LAYER = _EXPERTS | {"shape"}
_STUDY = frozenset({"option", "variants", "seconds", "shape"})

_MODELS: Lines = (
    ("measured", "from small GEMMs, where latency dominates, to large ones"),
    ("llama-3-8b, llama-3-70b, llama-3-405b", "the layers of a model, tensor parallelism 2, with 64 to 32768 rows"),
)
_MIXTRAL: Lines = (("mixtral-8x7b", "the same, attention and one expert"),)
_T3: Lines = (("t3", "the layers of the T3 paper's table 2"),)
_CPU: Lines = (("cpu", "small shapes for CPU processes"),)
_ANY: Lines = (("MxNxK", "any shape, also as --shape M,N,K. N is the number of columns on each rank"),)
_FICCO: Lines = (
    ("table-1, synthetic", "FiCCO's 16 GEMMs each: N is divided by the ranks, M is halved until it fits"),
    ("g1 to g16, s1 to s16", "one of these GEMMs. g1-m4 has a quarter of g1's M; table-1-m16 a sixteenth"),
)
_SYMMETRIC: Lines = (("NAME-symmetric", "preset or shape NAME with inputs in torch's symmetric memory (on GPUs)"),)
_ROW_MAJOR: Lines = (("NAME-rowmajor", "preset or shape NAME with row-major weights, as in backward"),)
_SKEWED: Lines = (
    ("mixtral-8x7b, deepseek-v3, qwen3-30b-a3b", "the experts of a model, tokens spread evenly and by Zipf's law"),
    *_CPU,
    ("TOKENSxNxK-eEXPERTS-topK[-zipfS]", "tokens on each rank, experts of all ranks, skew S"),
)

_SERIAL: Lines = (("serial", "the baseline, which always runs: NCCL (gloo) and torch's GEMM, one after the other"),)
_WEFTS: Lines = (
    ("weft", "the schedule that weft chooses"),
    ("all", "every schedule; or the beginning of schedules' names, such as"),
)
_EXPERTS_BY_HAND: Lines = (
    *_SERIAL,
    ("padded", "the baseline of mode graph: each expert gets the same number of rows of each rank, by padding"),
)
_ASYNCTP: Lines = (("asynctp", "torch's fused operator, on GPUs"),)


def _wefts(name: str) -> Lines:
    return (_WEFTS[0], ("all", f"{_WEFTS[1][1]} {name}"))


HELP = {
    "all_gather_matmul": OperatorHelp(
        "Gather rows of x from all ranks, and multiply them by this rank's weights.",
        (*_MODELS, *_MIXTRAL, *_CPU, *_FICCO, *_ANY, *_SYMMETRIC),
        (
            *_SERIAL, *_wefts("shard or 'shard[chunks=2'"), ("autotune", "the fastest measured schedule"),
            ("heuristic", "FiCCO's choice"), *_ASYNCTP, ("prefetch", "NCCL gathers the next call's x meanwhile, as FSDP does"),
        ),
        (
            "all_gather_matmul --preset llama-3-8b --mode queued --mode graph",
            "all_gather_matmul --shape 8192,4096,8192 --variants all --seconds 0.1",
            "all_gather_matmul --preset table-1,synthetic --variants all --mode queued --json ficco.jsonl",
        ),
        _GEMM,
    ),
    "all_gather_matmul_gradients": OperatorHelp(
        "Compute all gradients of all_gather_matmul.",
        (*_MODELS, *_MIXTRAL, *_CPU, *_ANY),
        (*_SERIAL, *_wefts("gather")),
        ("all_gather_matmul_gradients --preset llama-3-8b --mode queued",),
        _GEMM,
    ),
    "all_gather_scaled_matmul": OperatorHelp(
        "Run all_gather_matmul on fp8 operands with scales: all_gather_matmul --dtype fp8.",
        (*_MODELS, *_MIXTRAL, *_CPU, *_FICCO, *_ANY, *_SYMMETRIC),
        (*_SERIAL, *_wefts("shard"), *_ASYNCTP),
        ("all_gather_scaled_matmul --preset llama-3-8b --mode queued",),
        _GEMM,
    ),
    "all_to_all_matmul": OperatorHelp(
        "Send every token to the rank of its expert, and multiply it there (MoE dispatch).",
        _SKEWED,
        (
            *_EXPERTS_BY_HAND, *_wefts("dispatch"),
            ("NAME-bounded", "variant NAME with max_rows"),
        ),
        (
            "all_to_all_matmul --preset mixtral-8x7b --variants weft,dispatch",
            "all_to_all_matmul --preset 4096x28672x4096-e8-top2-zipf1 --variants weft-bounded --mode queued",
        ),
        _EXPERTS,
    ),
    "embedding_all_to_all": OperatorHelp(
        "Pool the embeddings of all tables, and send each vector to the rank of its sample.",
        (
            ("dcnv2", "the tables of MLPerf's DLRM-DCNv2, several ids per bag"),
            ("criteo-kaggle", "26 tables of narrow rows, one id per bag: mostly communication"),
            ("meta-2021", "856 tables with the reuse of ids of a production batch"),
            ("pgas-weak, pgas-strong", "the PGAS paper: 64 tables on each rank, or 96 tables in all"),
            ("fused-inter", "the fused-embedding paper's batches and tables per rank; or one, such as 'fused-inter/1024|256'"),
            ("grid-64x200k-d256-b4096-l32, grid-128x100k-d128-b1024-l20", "tables x rows on each rank, columns, batch, ids"),
        ),
        (
            ("embedding_bag", "the baseline, which always runs: nn.EmbeddingBag of each table, then NCCL's (gloo's) all-to-all"),
            ("batched, fbgemm, embedding_bag-async", "other baselines"),
            ("pipelined-N", "a baseline: pooling in N kernels, overlapped with NCCL"),
            ("weft", "the transport that weft chooses"),
            ("per-table", "direct with a kernel for each table (on GPUs)"),
            ("direct, put", "weft with this transport. Append -natural for the order of the batch and -sliceN for the size of "
             "slices, such as put-natural-slice8. On GPUs, -programsN (per multiprocessor) and -registersN (per thread) limit "
             "the occupancy"),
        ),
        (
            "embedding_all_to_all --preset dcnv2",
            "embedding_all_to_all --preset pgas-weak --variants put-slice1,put-slice8,put-slice64 --mode queued",
            "embedding_all_to_all --device cuda --ranks 2 --json results.jsonl",
        ),
        _TABLES,
    ),
    "embedding_training": OperatorHelp(
        "Run a training step of embeddings: forward, backward and rowwise Adagrad.",
        (
            ("dcnv2, dcnv2-zipf1.05", "the tables of MLPerf's DLRM-DCNv2, ids uniform or by Zipf's law"),
            ("pgas-weak, pgas-strong", "the PGAS paper: 64 tables on each rank, or 96 tables in all"),
            ("64x200k, 128x100k", "tables x rows on each rank"),
        ),
        (
            ("weft", "weft's module and optimizer"), ("fbgemm-deterministic, fbgemm", "FBGEMM's fused update"),
            ("torch", "nn.EmbeddingBag, all-to-all and torch's update; runs only if named"),
        ),
        ("embedding_training --preset dcnv2,dcnv2-zipf1.05 --mode queued",),
        _TABLES,
    ),
    "expert_parallel": OperatorHelp(
        "Run the experts of an MoE layer, forward and backward.",
        (*_SKEWED,),
        (("serial", "the baseline, by hand"), ("weft", "weft.nn.ExpertParallelMLP"), ("weft-bounded", "the same with max_rows")),
        ("expert_parallel --preset qwen3-30b-a3b",),
        _EXPERTS,
    ),
    "matmul_all_gather": OperatorHelp(
        "Multiply x by this rank's weights, and gather the products of all ranks.",
        (*_MODELS, *_MIXTRAL, *_CPU, *_ANY),
        (*_SERIAL, *_wefts("gather")),
        ("matmul_all_gather --preset llama-3-8b --option gather_dim=-1",),
        _GEMM,
    ),
    "matmul_all_gather_gradients": OperatorHelp(
        "Compute both gradients of matmul_all_gather.",
        (*_MODELS, *_MIXTRAL, *_CPU, *_ANY),
        (*_SERIAL, *_wefts("gather")),
        ("matmul_all_gather_gradients --preset llama-3-8b --mode queued",),
        _GEMM,
    ),
    "matmul_all_reduce": OperatorHelp(
        "Multiply x by this rank's weights, and sum the products of all ranks on every rank.",
        (*_MODELS, *_MIXTRAL, *_CPU, *_ANY),
        (*_SERIAL, *_wefts("scatter")),
        (
            "matmul_all_reduce --preset llama-3-8b --mode graph",
            "matmul_all_reduce --shape 16,8192,4096 --option residual=true --option norm=true",
        ),
        _GEMM,
    ),
    "matmul_all_to_all": OperatorHelp(
        "Multiply received rows by their experts' weights, and return every row to its rank (MoE combine).",
        _SKEWED,
        (
            *_EXPERTS_BY_HAND, *_wefts("combine"),
            ("NAME-bounded", "variant NAME with rows"),
        ),
        ("matmul_all_to_all --preset deepseek-v3 --variants weft-bounded,combine --mode queued",),
        _EXPERTS,
    ),
    "matmul_reduce_scatter": OperatorHelp(
        "Multiply x by this rank's weights, and give each rank its rows of the sum over ranks.",
        (*_MODELS, *_T3, *_CPU, *_ANY, *_ROW_MAJOR),
        (*_SERIAL, *_wefts("scatter"), *_ASYNCTP),
        (
            "matmul_reduce_scatter --preset llama-3-8b --mode queued",
            "matmul_reduce_scatter --preset t3 --mode queued --json t3.jsonl",
        ),
        _GEMM,
    ),
    "scaled_matmul_reduce_scatter": OperatorHelp(
        "Run matmul_reduce_scatter on fp8 operands with scales.",
        (*_MODELS, *_T3, *_CPU, *_ANY),
        (*_SERIAL, *_wefts("scatter"), *_ASYNCTP),
        ("scaled_matmul_reduce_scatter --preset llama-3-8b --mode queued",),
        _GEMM,
    ),
    "tensor_parallel": OperatorHelp(
        "Run tensor-parallel Llama blocks, forward and backward.",
        (
            ("llama-3-8b, llama-3-70b, llama-3-405b, cpu", "MLP and attention of a model"),
            ("NAME-whole", "the same without sequence parallelism"),
        ),
        (
            ("serial", "the baseline, by hand"), ("weft", "weft.nn.ParallelMLP, weft.nn.ParallelAttention"),
            ("weft-compiled", "the same under torch.compile"), ("asynctp", "torch's styles under torch.compile, on GPUs"),
        ),
        ("tensor_parallel --preset llama-3-8b,llama-3-70b --variants weft,weft-compiled,asynctp",),
        _LAYER,
    ),
    "inefficiency": OperatorHelp(
        "Measure the losses of a GEMM and an all-gather in pieces and at the same time (the FiCCO paper).",
        (("g1 to g16", "a GEMM of FiCCO's table I"),),
        (),
        ("inefficiency --json losses.jsonl --pictures losses",),
        _STUDY | {"counters"},
    ),
    "fused_embedding": OperatorHelp(
        "Measure the figures of the fused-embedding paper on two GPUs.",
        (
            ("grid, grid-short", "batch sizes and tables, with long and with short bags"),
            ("occupancy, slices", "the time by programs and registers, and by the size of slices"),
            ("timeline, kernels", "what programs do over time, and their registers"),
            ("FIGURE/CONFIGURATION", "one of these, such as 'grid/1024|256'"),
        ),
        (),
        ("fused_embedding --json fused.jsonl",),
        _STUDY | _NO_PICTURES | {"scale"},
    ),
    "pgas": OperatorHelp(
        "Measure the figures of the PGAS paper on one and two GPUs.",
        (
            ("weak, strong", "weak and strong scaling"),
            ("batch, width, dlrm", "small batches; small messages; inference with a dense MLP"),
            ("FIGURE/CONFIGURATION", "one of these, such as weak/1 (one GPU) or weak/2"),
        ),
        (),
        ("pgas --preset weak,strong --json pgas.jsonl",),
        _STUDY | _NO_PICTURES | {"scale"},
    ),
}  # fmt: skip

_ABOUT = (
    "Measure variants of an operator: weft with the schedule that it chooses, weft with other schedules, and baselines, such as "
    "calls of NCCL (gloo) and cuBLAS without overlap. The result of every variant is first compared with a float64 reference.",
    "The command starts its own ranks, or uses torchrun's ranks. Each time is the slowest rank's median. \"over roofline\" is this "
    "time divided by the time that the call's bytes and FLOPs need at peak rates, which the same run measures. This quotient can "
    "be below 1 if data fit into a cache.",
)
_NEVER_SLOWER = "Compare weft with serial on random shapes (has its own options)"
_EXAMPLES = (
    "weft bench all_gather_matmul --preset llama-3-8b",
    "weft bench embedding_all_to_all --preset dcnv2 --mode queued --json results.jsonl",
    "torchrun --nproc-per-node 2 -m weft.cli bench embedding_all_to_all --device cuda --dtype fp16",
)
_WIDEST = 30  # columns for names; longer names get a line of their own


def asked_for(arguments: Sequence[str]) -> str | None:
    """Return the operator or study that the command line names; None if it names none of `HELP`."""
    return next((one for one in arguments if one in HELP), None)


def overview(program: str) -> str:
    """Return the help of `weft bench` without an operator."""
    operators = [*((name, one.about.removesuffix(".")) for name, one in HELP.items()), ("never-slower", _NEVER_SLOWER)]
    return "\n\n".join([
        f"usage: {program} OP [options]\n       {program} OP --help",
        *(textwrap.fill(one, _columns()) for one in _ABOUT),
        _listed("operators and studies (OP)", operators),
        f"`{program} OP --help` shows OP's options, presets, variants and examples.",
        "\n".join(["examples:", *(f"  {line}" for line in _EXAMPLES)]),
    ])  # fmt: skip


def lists(name: str, program: str) -> str:
    """Return the presets, variants and examples of an operator or study, for the end of its help."""
    of = HELP[name]
    blocks = [_listed("presets (--preset)", of.presets)]
    blocks += [_listed("variants (--variants)", of.variants)] if of.variants else []
    return "\n\n".join([*blocks, "\n".join(["examples:", *(f"  {program} {line}" for line in of.examples)])])


def about(name: str | None) -> str:
    """Return the description of an operator or study; of all, if `name` is None."""
    return textwrap.fill(_ABOUT[0] if name is None else HELP[name].about, _columns())


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, 120) - 2


def _listed(title: str, lines: Sequence[tuple[str, str]]) -> str:
    width = 2 + min(_WIDEST, max(len(name) for name, _ in lines))
    found = [f"{title}:"]
    for name, text in lines:
        first, *rest = textwrap.wrap(text, _columns() - 2 - width, break_on_hyphens=False)
        found += [f"  {name}", f"  {'':{width}}{first}"] if len(name) > width - 2 else [f"  {name:{width}}{first}"]
        found += [f"  {'':{width}}{one}" for one in rest]
    return "\n".join(found)
