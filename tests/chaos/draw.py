"""What is injected: injection number i of a seed, always the same, whether it runs alone or among a thousand.

Kinds of fault are dealt like cards: the first round has each kind once, further rounds repeat what has many forms. Operators are
dealt in the same way, so that after some hundred injections every kind has met every operator. The rest (ranks, schedule, which
rank, when) is drawn from a generator of the injection's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["set-up", "first call", "steady", "backward"]
STEPS, TURN = 36, 14  # steps of a rank; from step TURN on another shape is called
SET_UP, FIRST, STEADY, BACKWARD = "set-up", "first call", "steady", "backward"
CALLED = (SET_UP, FIRST, STEADY)


@dataclass(frozen=True)
class Kind:
    """family: its row in the table. lives: the group must live on, and all later results be right. waits: peers notice it by their
    deadline alone. second: steps may, or must ("always"), call a second operator or shape. alone: on one rank."""

    family: str
    phases: tuple[Phase, ...] = (*CALLED, BACKWARD)
    lives: bool = False
    waits: bool = False
    second: Literal["never", "warm", "cold", "always"] = "never"
    times: int = 1
    devices: tuple[str, ...] = ("cpu",)


BOTH = ("cpu", "cuda")
KINDS: dict[str, Kind] = {
    "none": Kind("no fault", lives=True, devices=BOTH),
    # Signals that somebody else sends, at any moment.
    "kill": Kind("kill", times=3, devices=BOTH),
    "short stop": Kind("stop", lives=True, times=3, devices=BOTH),
    "long stop": Kind("stop", waits=True, times=2, devices=BOTH),
    "interrupt": Kind("interrupt", times=4, devices=BOTH),
    "terminate": Kind("exit"),
    # What a rank does at a certain place of its program.
    "exit": Kind("exit"),
    "leave": Kind("exit"),
    "short straggler": Kind("straggle", lives=True, devices=BOTH),
    "long straggler": Kind("straggle", waits=True, devices=BOTH),
    "never call": Kind("never call", waits=True),
    "other operator": Kind("another call", CALLED, second="warm"),
    "other operator, new": Kind("another call", (FIRST, STEADY), second="cold"),
    "other shape": Kind("another call", CALLED, second="warm"),
    "other shape, new": Kind("another call", (FIRST, STEADY), second="cold"),
    "other dtype": Kind("another call", CALLED, second="warm"),
    "other order": Kind("another call", (FIRST, STEADY), second="always", times=2),
    "exception between calls": Kind("exception", (FIRST, STEADY, BACKWARD), second="always", times=3, devices=BOTH),
    "exception after calls": Kind("exception", CALLED, lives=True),
    "exception on all ranks": Kind("exception", CALLED, lives=True),
    "no memory, MemoryError": Kind("no memory", times=2),
    "no memory, RuntimeError": Kind("no memory", times=2),
    "no memory, RLIMIT_AS": Kind("no memory"),
    "no descriptors": Kind("no memory", (SET_UP, FIRST)),
    "no threads": Kind("no memory", (SET_UP, FIRST)),
    "fork, idle": Kind("fork", lives=True),
    "fork, uses the group": Kind("fork", lives=True, times=2),
    "fork, drops the group": Kind("fork", lives=True),
    "sparse": Kind("bad input", CALLED, lives=True),
    "DTensor": Kind("bad input", CALLED, lives=True),
    "numpy": Kind("bad input", CALLED, lives=True),
    "dtype": Kind("bad input", CALLED, lives=True),
    "value": Kind("bad input", CALLED, lives=True, times=2),
    "size": Kind("bad input", CALLED, lives=True),
}
SIGNALS = ("kill", "short stop", "long stop", "interrupt", "terminate")

OPERATORS = (
    "all_gather_matmul", "all_gather_scaled_matmul", "all_to_all_matmul", "matmul_reduce_scatter", "scaled_matmul_reduce_scatter",
    "matmul_all_reduce", "matmul_all_gather", "matmul_all_to_all", "embedding_all_to_all", "module, local batch",
    "module, global batch",
)  # fmt: skip
SCALED = ("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter")


def _schedules(operator: str, world: int, options: dict[str, Any]) -> list[str]:
    """Pinned ones that overlap, and can do these calls."""
    several = world > 2
    if operator == "all_to_all_matmul":
        by = "kernel" if options["max_rows"] else "dma"  # copy engines take sizes from the host
        dispatch = [f"dispatch[by={by},rest=each]", f"dispatch_by_expert[by={by},chunks=2]"]
        return [*dispatch, *["dispatch[by=kernel,rest=together]"] * several]
    if operator == "matmul_all_to_all":
        by = "kernel" if options["rows"] else "dma"
        return [f"combine[chunks=2,by={by}]", "combine[chunks=1,by=store]", f"combine_by_expert[chunks=2,by={by}]"]
    if operator == "scaled_matmul_reduce_scatter":
        ways = ("chunks=1,by=dma", "chunks=2,by=kernel", "chunks=2,by=store")
        return ["scatter", *(f"direct[{way},add=reduce]" for way in ways)]
    if operator == "matmul_reduce_scatter":
        direct = [
            "direct[chunks=1,by=dma,add=reduce]",
            "direct[chunks=2,by=kernel,add=gemm]",
            "direct[chunks=2,by=store,add=reduce]",
        ]
        return ["scatter", *direct, *["ring[chunks=2,by=dma]"] * several]
    if operator == "matmul_all_reduce":
        two_shot = ["two_shot[chunks=1,by=dma,add=reduce]", "two_shot[chunks=2,by=kernel,add=gemm]"]
        return ["one_shot[by=kernel]", "one_shot[by=load]", *two_shot, "chunked[chunks=2,by=dma]"]
    if operator == "matmul_all_gather":
        return ["direct[chunks=1,by=kernel]", "direct[chunks=2,by=dma]"]
    shard = ["shard[chunks=1,send=in_turn,by=dma]", "shard[chunks=2,send=in_turn,by=kernel]"]
    ficco = [] if options["return_A"] else ["ficco_1d[start=uniform,gemms=fused,steps=0,by=dma]"]
    return [*shard, "gather[by=kernel]", *ficco, *["shard[chunks=2,send=at_once,by=dma]"] * several]


@dataclass(frozen=True)
class Injection:
    """A JSON-able description of one trial; times in seconds."""

    seed: int
    index: int
    device: str
    kind: str
    operator: str
    options: dict[str, Any]
    second: tuple[str, dict[str, Any]] | None  # another operator, and its options
    warm: bool  # whether all ranks have called the second one before
    world: int
    size: int
    phase: str
    step: int  # -1: while a module is made, or before the first call
    place: str  # in the step: before, between or after its calls
    victim: int
    delay_s: float  # from the place to the signal
    pauses_s: tuple[float, ...]
    choice: int  # among forms of a kind
    deadline_s: float
    steps: int = STEPS
    turn: int = TURN
    pace_s: float = 0.0  # between steps

    @property
    def of_kind(self) -> Kind:
        return KINDS[self.kind]

    @property
    def backward(self) -> bool:
        return bool(self.options.get("backward"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def draw(seed: int, index: int, device: str = "cpu") -> Injection:
    kind = _dealt(seed, index, [name for name, kind in KINDS.items() if device in kind.devices], device)
    operators = [name for name in OPERATORS if device == "cpu" or name != "module, local batch"]
    deal, place = divmod(index, len(operators))
    operator = _shuffled(f"{seed}:{device}:operators:{deal}", operators)[place]
    rng = random.Random(f"{seed}:{device}:{index}")
    of_kind = KINDS[kind]
    phase = rng.choice(of_kind.phases)
    if device == "cuda" and SET_UP in of_kind.phases and rng.random() < 0.4:
        phase = SET_UP  # half of all: hosts meet there, and memory is mapped
    deadline_s = _deadline_s(of_kind, device)
    world = rng.choice([2, 2, 2, 3, 3, 4]) if device == "cpu" else 2
    options = _options(operator, rng, deadline_s, device, world)
    second, warm = None, False
    if of_kind.second != "never":
        second = _second(kind, operator, options, rng, deadline_s, device, world)
        warm = of_kind.second != "cold"
    if phase == BACKWARD:  # of which not all operators have one: then between two calls
        if _has_backward(operator) and device == "cpu":
            options["backward"], second = True, None
        elif second is None:
            phase = STEADY
    step = {SET_UP: -1, FIRST: TURN}.get(
        phase, rng.choice([rng.randrange(2, TURN - 4), rng.randrange(TURN + 2, STEPS - 8)])
    )
    place = "between" if phase == BACKWARD or kind == "exception between calls" else "before"
    if kind == "exception after calls":
        place = "after"
    if step < 0 and ((kind not in SIGNALS and not _is_module(operator)) or kind not in (*SIGNALS, *_WHILE_MAKING)):
        step = 0
    most_s = {SET_UP: 0.3, FIRST: 0.05}.get(phase, 0.004) if device == "cpu" else {SET_UP: 3.0}.get(phase, 0.05)
    steps, pace_s = (_LONG_RUN if kind == "short stop" else STEPS), 0.0
    if device == "cuda" and phase == SET_UP:
        steps, pace_s = 130, 0.02  # for as long as signals may come
    return Injection(
        seed=seed, index=index, device=device, kind=kind, operator=operator, options=options, second=second, warm=warm,
        world=world, size=rng.randrange(2), phase=phase, step=step, place=place, victim=rng.randrange(world),
        delay_s=rng.random() * most_s, pauses_s=_pauses(kind, rng, deadline_s), choice=rng.randrange(1000),
        deadline_s=deadline_s, steps=steps, pace_s=pace_s,
    )  # fmt: skip


_LONG_RUN = 250  # steps, where several pauses are to meet calls
_WHILE_MAKING = ("exit", "leave", "short straggler", "long straggler", "never call", "no descriptors", "no threads")


def _is_pooled(operator: str) -> bool:
    return operator.startswith(("embedding", "module"))


def _has_backward(operator: str) -> bool:
    return not _is_pooled(operator) and operator not in SCALED


def _is_module(operator: str) -> bool:
    return operator.startswith("module")


def _shuffled(seed: str, cards: Sequence[str]) -> list[str]:
    cards = list(cards)
    random.Random(seed).shuffle(cards)
    return cards


def _dealt(seed: int, index: int, kinds: list[str], device: str) -> str:
    if index < len(kinds):
        return _shuffled(f"{seed}:{device}:kinds", kinds)[index]
    cards = [kind for kind in kinds for _ in range(KINDS[kind].times)]
    deal, place = divmod(index - len(kinds), len(cards))
    return _shuffled(f"{seed}:{device}:kinds:{deal}", cards)[place]


def _deadline_s(kind: Kind, device: str) -> float:
    """Short where it is to be missed. Long where missing it would be an error, which may not come from a machine that is busy."""
    if device == "cuda":
        return 20.0 if kind.lives else 4.0 if kind.waits else 8.0  # a first call may compile kernels
    return 8.0 if kind.lives else 2.0


def _pauses(kind: str, rng: random.Random, deadline_s: float) -> tuple[float, ...]:
    """Of a rank that is stopped, sleeps, or stays away."""
    if kind == "short stop":
        return tuple(rng.uniform(0.02, 0.4) for _ in range(rng.randrange(1, 5)))
    if kind == "short straggler":
        return (rng.uniform(0.02, 1.0),)
    return (deadline_s + rng.uniform(0.3, 1.2),) if kind in ("long stop", "long straggler", "never call") else ()


def _options(operator: str, rng: random.Random, deadline_s: float, device: str, world: int) -> dict[str, Any]:
    """Of a call; backward is drawn too."""
    options: dict[str, Any] = {"deadline_s": deadline_s}
    if operator.startswith("all_gather"):
        options["return_A"] = rng.random() < 0.5
    if operator in SCALED:
        options["by_row"] = rng.random() < 0.5
    if operator == "scaled_matmul_reduce_scatter":
        options |= {"bias": rng.random() < 0.5, "dtype": "bfloat16"}
    if operator == "all_to_all_matmul":
        options["max_rows"] = device == "cuda" or rng.random() < 0.3
    if operator == "matmul_all_to_all":
        options["rows"] = device == "cuda" or rng.random() < 0.3
    if operator == "matmul_all_reduce":
        options |= {"bias": rng.random() < 0.5, "residual": rng.random() < 0.5}
    if operator == "matmul_all_gather":
        options["columns"] = rng.random() < 0.5
    if not _is_pooled(operator):
        plain = ["serial", "serial", None] if device == "cpu" else []
        options["schedule"] = rng.choice([*plain, *_schedules(operator, world, options)])
        options["backward"] = _has_backward(operator) and device == "cpu" and rng.random() < 0.4
    if _is_pooled(operator):
        options |= {
            "transport": rng.choice(["direct", "put"]),
            "order": rng.choice(["remote_first", "natural"]),
            "bounds_check": rng.choice(["warning", "fatal"]),
            "outputs": rng.choice([2, 3]),
        }
    if _is_module(operator):
        options |= {
            "input": "local_batch" if operator == "module, local batch" else "global_batch",
            "is_weighted": rng.random() < 0.5,
        }
    return options


def _second(
    kind: str, operator: str, options: dict[str, Any], rng: random.Random, deadline_s: float, device: str, world: int
) -> tuple[str, dict[str, Any]]:
    """What else is called: another operator, or the same one in another shape or dtype."""
    other = kind.startswith("other operator") or (not kind.startswith("other ") and rng.random() < 0.5)
    if other:
        others = [name for name in OPERATORS if name != operator and (device == "cpu" or name != "module, local batch")]
        name = rng.choice(others)
        return name, _options(name, rng, deadline_s, device, world) | {"backward": False}
    changed = {**options, "backward": False}
    if kind == "other dtype" and operator != "all_gather_scaled_matmul":
        return operator, changed | {"dtype": "float16" if operator in SCALED else "bfloat16"}
    return operator, changed | {"other_size": True}
