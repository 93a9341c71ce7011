"""`weft sim OP`: simulate every schedule of an operator on a modelled machine, and compare the times with a lower
bound.

The command needs neither torch nor a GPU.
"""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from weft.bench.core.arguments import appended, check_file, check_folder
from weft.cli.operators import (
    SAYS_EVERY_S,
    Dtype,
    Hw,
    Json,
    Mode,
    ModeOf,
    Operators,
    Ranks,
    Shape,
    Topology,
    arguments,
    without_collection,
)
from weft.files import append_json, write_whole

_COLUMNS = (
    "predicted us: the time of a call",
    "speedup: the time of serial, the schedule without overlap, divided by the schedule's time",
    "exposed us: the time in which a rank has nothing to compute; empty if kernels send while they compute",
    "x bound: the schedule's time divided by the bound, a time that no schedule can beat",
)
_ALL = "all"


def _run(
    op: str,
    shape: Shape,
    ranks: Ranks = None,
    hw: Hw = None,
    topology: Topology = None,
    dtype: Dtype = "bf16",
    mode: ModeOf = Mode.queued,
    option: list[str] | None = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A schedule to simulate in addition to serial; may be repeated. Default: all.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            metavar="NAME FILE",
            help="Write the timeline of one run of this schedule as a Chrome trace, for https://ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None,
    chakra: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            metavar="NAME FOLDER",
            help="Write this schedule as a Chakra execution trace, with ASTRA-sim's network and system files.",
            show_default=False,
        ),
    ] = None,
    kineto: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            metavar="NAME FOLDER",
            help="Write the timeline of this schedule as a Kineto trace for each rank, for HolisticTraceAnalysis.",
            show_default=False,
        ),
    ] = None,
    infragraph: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write the topology as an InfraGraph in JSON.", show_default=False),
    ] = None,
    json: Json = None,
) -> None:
    from weft.bench.core.console import print_table, progress
    from weft.plan.compare import HEADER, comparison

    sized = arguments(op, shape, ranks, hw, topology, option)
    if json is not None:
        check_file("--json", json)
    if infragraph is not None:
        check_file("--infragraph", infragraph)
    if trace is not None:
        check_file("--trace", trace[1])
    for given, one in (("--chakra", chakra), ("--kineto", kineto)):
        if one is not None:
            check_folder(given, one[1])
    wanted = [] if schedule is None or _ALL in schedule else schedule
    written = [one[0] for one in (trace, kineto, chakra) if one is not None]
    with progress(1.0, True, "weft sim: ", every_s=SAYS_EVERY_S) as step, without_collection():
        found = comparison(
            op,
            hw=hw,
            topology=topology,
            dtype=dtype,
            mode=mode.value,
            schedules=wanted,
            written=written,
            progress=step,
            **sized,
        )
    facts = found.facts()
    width = max(len(what) for what, _ in facts)
    print("\n".join(f"{what:<{width}}  {text}" for what, text in facts))
    print_table("schedules", HEADER, found.cells(), (*_COLUMNS, *found.left_out()))
    if json is not None:
        append_json(json, [found.as_json()])
        print(appended(json, 1))
    if infragraph is not None:
        from weft.hw.topology import infragraph_of

        write_whole(
            infragraph, dumps(infragraph_of(found.model.wiring.of(sized["ranks"]), found.machine.name), indent=1)
        )
        print(f"written: {infragraph}, the topology as an InfraGraph")
    if trace is not None:
        from weft.trace import write_trace

        traced = found.simulated(trace[0])
        about = {what: text for what, text in facts if what != "bound"}
        write_trace(trace[1], {trace[0]: traced.timeline}, **about)
        print(f"written: {trace[1]}, a trace of {trace[0]}: open it in https://ui.perfetto.dev")
    if kineto is not None:
        from weft.trace.kineto import write_kineto

        write_kineto(kineto[1], found.simulated(kineto[0]).timeline)
        print(f"written: {kineto[1]}, a Kineto trace of {kineto[0]} for each rank")
    if chakra is not None:
        exported = found.chakra(chakra[0], op)
        exported.write(chakra[1])
        scaled = f"; its times are {exported.scale} times as long" if exported.scale > 1 else ""
        print(f"written: {chakra[1]}, a Chakra trace of {chakra[0]}{scaled}")


class _Sims(Operators):
    run = staticmethod(_run)
    command = "weft sim"
    epilog_of_operators = "\n\n".join(("Columns of the table:", *_COLUMNS))


sim = typer.Typer(
    cls=_Sims,
    no_args_is_help=True,
    help=(
        "Simulate every schedule of an operator, on this machine or another. Compare the predicted times with the time without "
        "overlap (serial), and with a lower bound."
        "\n\n    weft sim matmul_reduce_scatter --shape 16384,8192,4096 --hw mi300x --topology torus:16x8"
        "\n\n    weft sim embedding_all_to_all --shape 32768,64,32 --option tables=128 --hw mi300x --topology torus:8x4x4"
        "\n\n    weft sim all_gather_matmul --shape g5 --hw mi300x --ranks 8 --trace serial serial.json"
    ),
)
