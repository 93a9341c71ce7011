"""Code that `weft plan` and `weft sim` share: a command for each operator, with its arguments and help."""

from __future__ import annotations

import contextlib
import enum
import gc
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_origin

import typer
from typer.main import get_command

from weft.bench.core.arguments import given_once, sizes
from weft.bench.table_1 import SYNTHETIC, TABLE_1
from weft.cli.names import Named

if TYPE_CHECKING:
    from weft.builders import Problem


class Mode(enum.StrEnum):
    queued = "queued"
    graph = "graph"
    single = "single"


SAYS_EVERY_S = 2.0  # seconds between progress lines if there is no terminal
GEMMS_OF = "all_gather_matmul"  # the operator whose --shape may name one of FiCCO's GEMMs
_MANY = "Plans for 256 GPUs take some seconds."


class Operators(Named):
    """A group with a command for each operator. It imports operators on demand, because they need numpy."""

    run: ClassVar[Callable[..., None]]
    """The function that all commands call. Its first argument is the operator's name."""
    command: ClassVar[str]
    """The name of the group, as users type it."""
    epilog_of_operators: ClassVar[str] = ""

    noun = "operator"

    def list_commands(self, ctx: Any) -> list[str]:
        from weft.bench.core.operators import names

        return [*names(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from weft.bench.core.operators import LAYERS
        from weft.builders.problem import PROBLEMS, SCALED

        if cmd_name in LAYERS:
            return _layers(cmd_name, self.command)
        if (of := SCALED.get(cmd_name, cmd_name)) in PROBLEMS:
            return _command(cmd_name, PROBLEMS[of], type(self))
        return super().get_command(ctx, cmd_name)


def _layers(name: str, command_name: str) -> Any:
    """Return the command of `name`, a benchmark of layers. It raises an error, which says that layers are planned operator by
    operator.
    """
    verb = {"weft sim": "simulate"}.get(command_name, "plan")
    of = (
        "all_gather_matmul and matmul_reduce_scatter"
        if name == "tensor_parallel"
        else "all_to_all_matmul and matmul_all_to_all"
    )
    told = f"Layers call several operators: {verb} each of them, such as {of}."
    alone = typer.Typer(add_completion=False)

    @alone.command(name, help=told, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def command() -> None:
        raise ValueError(f"{name}: {told[0].lower()}{told[1:-1]}; weft bench {name} measures whole layers")

    return get_command(alone)


def _command(name: str, problem: type[Problem], group: type[Operators]) -> Any:
    """Return the command of operator `name`. Its help consists of three texts: the first paragraph of the docstring of the
    `problem` class; the docstring of the class's method `sized`; and examples of this operator. `--option` accepts the keyword
    arguments of `sized` after dtype.
    """
    from weft.builders.problem import Problem, plain

    def command(**given: Any) -> None:
        op, given["dtype"] = plain(name, given["dtype"])
        group.run(op, **given)

    sized = inspect.signature(problem.sized, eval_str=True).parameters
    dtype = sized["dtype"].default if name == problem.name else "fp8"
    replaced: dict[str, dict[str, Any]] = {"option": {"annotation": Annotated[list[str] | None, _own_options(problem)]}}
    if problem.name != GEMMS_OF:
        replaced["shape"] = {"annotation": Annotated[str, shape_option("")]}
    if dtype is not inspect.Parameter.empty:
        replaced["dtype"] = {"default": dtype}
    taken = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, **replaced.get(one.name, {}))
        for one in inspect.signature(group.run, eval_str=True).parameters.values()
        if one.name != "op"
    ]
    command.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    first, _, rest = (inspect.getdoc(problem) or "").partition("\n\n")
    sizes = inspect.getdoc(problem.sized)
    if not sizes or sizes == inspect.getdoc(Problem.sized):  # the problem's docstring defines M, N and K
        sizes = f"{rest}\n\n    {group.command} {problem.name} --shape 8192,8192,4096 --ranks 8"
    if name != problem.name:
        first += " The operands are fp8 numbers with scales."
    if f"weft plan {name} " not in sizes:  # the examples are those of the operator from which this one is derived
        sizes = re.sub(r"weft plan \w+ ", f"weft plan {name} ", sizes)
    sizes = sizes.replace("weft plan ", f"{group.command} ")
    if "everything" not in inspect.signature(group.run).parameters:
        sizes = sizes.replace(" --all", "")
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    alone.command(name, help=f"{first}\n\n{sizes}", epilog=group.epilog_of_operators or None)(command)
    return get_command(alone)


def _own_options(problem: type[Problem]) -> Any:
    """Return the parameter `--option`, whose help lists the operator's own options. For an operator without options, the
    parameter is hidden.
    """
    from weft.builders.options import keywords

    listed = []
    for keyword in keywords(problem.sized):
        of = keyword.annotation
        text = "".join(get_args(of)[1:]) if get_origin(of) is Annotated else ""
        default = "" if keyword.default is None else f" [default: {keyword.default}]"
        listed.append(f"**{keyword.name}**: {text}{default}")
    return typer.Option(
        metavar="NAME=VALUE",
        hidden=not listed,
        help=" ".join(["An option of this operator; may be repeated.", *listed]),
    )


def shape_option(also: str) -> Any:
    """Return the parameter `--shape`. also: text to append to its help, such as other values that it accepts."""
    sizes = (
        "M: rows, tokens, or samples. N: columns of one rank's weight, of an expert's weight, or of a table. "
        "K: the summed dimension, or the rows of a bag."
    )
    return typer.Option(metavar="M,N,K", help=sizes + also)


Shape = Annotated[str, shape_option(" Also g1 to g16 and s1 to s16: FiCCO's GEMMs, with N divided by the ranks.")]
Ranks = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=(
            "Number of GPUs, at most 256. Rows that are gathered or scattered must be divisible by this number. "
            f"Default: the size in the name of the topology if it has one, otherwise 2. {_MANY}"
        ),
        show_default=False,
    ),
]
Hw = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help=(
            "A machine: the name of a file in weft/hw, such as h100 or mi300x, or the path of such a TOML file. Default: "
            "this machine, or h200 if weft does not know it."
        ),
    ),
]
Topology = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help=(
            "How GPUs are linked: switch, mesh, ring, torus, hosts (weft/hw/topology/shapes), or the path of a TOML file or of "
            "an InfraGraph in JSON. A name may have a size: torus:16x8 (columns, rows), torus:8x8x4 (any number of dimensions), "
            "hosts:4x8 (machines, GPUs of each), ring:8. "
            "Default: the topology of the machine file."
        ),
    ),
]
Dtype = Annotated[
    str, typer.Option(help="bf16, fp16, fp32 or fp8. The machine file needs a matmul rate for this dtype.")
]
ModeOf = Annotated[
    Mode,
    typer.Option(
        help="queued: the CPU launches calls ahead of the GPU. graph: calls are captured and replayed. single: the CPU "
        "synchronises after each call."
    ),
]
Json = Annotated[
    Path | None,
    typer.Option(dir_okay=False, help="Append all results to this file, as one line of JSON; existing lines stay."),
]


def arguments(
    op: str,
    shape: str,
    ranks: int | None,
    hw: str | None,
    topology: str | None,
    option: list[str] | None,
) -> dict[str, Any]:
    """Return the keyword arguments that describe a problem of operator `op`: sizes, ranks and own options."""
    from weft.builders.problem import option_from_text
    from weft.hw import load_machine
    from weft.hw.topology import ranks_of

    named = topology or (load_machine(hw).topology if hw else None)
    wired = ranks_of(named) if named else None
    ranks = ranks or wired or 2
    if wired not in (None, ranks):
        of = "--topology" if topology else f"the topology of {hw},"
        raise ValueError(f"--ranks {ranks}, but {of} {named} has {wired} ranks: omit --ranks, or use another topology")
    m, n, k = shape_of(shape, ranks if op == GEMMS_OF else None)
    options = given_once([option_from_text(op, one) for one in option or ()])
    return {"M": m, "N": n, "K": k, "ranks": ranks, **options}


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Context manager: disable the garbage collector. During a plan or a simulation it would take a third of the time,
    and find nothing.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.freeze()  # later collections skip the remaining objects too
            gc.enable()


def shape_of(text: str, ranks: int | None) -> tuple[int, int, int]:
    """Parse `--shape`; return (M, N, K).

    ranks: the number of ranks. If the text names a GEMM of FiCCO, such as "g1", the GEMM's N is divided by this number.
        None: the text must be sizes.
    """
    for gemm in (*TABLE_1, *SYNTHETIC) if ranks else ():
        if gemm.name == text:
            return gemm.m, gemm.sharded(ranks or 1).n, gemm.k
    named = ", or one of g1 to g16 and s1 to s16" if ranks else ""
    m, n, k, suffix = sizes(text, named)
    if suffix:
        raise ValueError(
            f"--shape {text!r}: leave out {suffix!r}, which plans do not support; pass options as --option NAME=VALUE"
        )
    return m, n, k
