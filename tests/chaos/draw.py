"""Draw injections. Injection i of a seed is always the same, however many injections are drawn.

Kinds of fault are dealt like cards. The first round has each kind once. In further rounds, kinds with many variants
come several times. Operators are dealt in the same way, so that after some hundred injections every kind has met every
operator. The rest (ranks, schedule, which rank fails, when) is drawn from a random generator with a seed for each
injection.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from .checkpoints import SAVING
from .operators import CHECKPOINTS, ON_DEMAND, OPERATORS, TRAINING
from .work import Work

Phase = Literal["set-up", "first call", "steady", "backward", "checkpoint"]
STEPS, TURN = 36, 14  # STEPS: the number of a rank's steps. From step TURN on, calls have another shape.
SET_UP, FIRST, STEADY, BACKWARD, CHECKPOINT = "set-up", "first call", "steady", "backward", "checkpoint"
CALLED = (SET_UP, FIRST, STEADY)


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    family: its row in the report's table. lives: whether the group must survive, with right results in all later calls.
    waits: whether peers notice the fault only when their deadline passes. second: whether steps may, or must
    ("always"), call a second operator or shape. told: the error that every rank must get from the call instead of a
    result. operators: the operators that the fault applies to; if empty, all.
    """

    family: str
    phases: tuple[Phase, ...] = (*CALLED, BACKWARD)
    lives: bool = False
    waits: bool = False
    second: Literal["never", "warm", "cold", "always"] = "never"
    times: int = 1
    devices: tuple[str, ...] = ("cpu",)
    told: str = ""
    operators: tuple[str, ...] = ()


BOTH = ("cpu", "cuda")
WITH_ROWS = (
    "all_gather_matmul", "all_gather_scaled_matmul", "matmul_reduce_scatter", "scaled_matmul_reduce_scatter", "matmul_all_reduce",
    "matmul_all_gather",
)  # fmt: skip
MODULES = ("module, local batch", "module, global batch", *TRAINING)
KINDS: dict[str, Kind] = {
    "none": Kind("no fault", lives=True, devices=BOTH),
    # Faults caused by a signal from another process, at any moment.
    "kill": Kind("kill", times=3, devices=BOTH),
    "short stop": Kind("stop", lives=True, times=3, devices=BOTH),
    "long stop": Kind("stop", waits=True, times=2, devices=BOTH),
    "interrupt": Kind("interrupt", times=4, devices=BOTH),
    "terminate": Kind("exit"),
    # Faults caused by the rank itself, at a certain place of its program.
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
    "fewer batches": Kind("another call", (STEADY,), waits=True, operators=TRAINING),
    "fewer backwards": Kind("another call", (BACKWARD,), operators=TRAINING),
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
    "memory": Kind("bad input", CALLED, lives=True),
    "dtype": Kind("bad input", CALLED, lives=True),
    "value": Kind("bad input", CALLED, lives=True, times=2),
    "size": Kind("bad input", CALLED, lives=True),
    "infinite gradient": Kind(
        "bad input",
        (BACKWARD,),
        lives=True,
        told="RefusedError",
        times=2,
        operators=tuple(name for name in TRAINING if name not in ON_DEMAND),
    ),
    "skipped gradient": Kind(
        "bad input",
        (BACKWARD,),
        lives=True,
        times=2,
        operators=tuple(name for name in TRAINING if name not in ON_DEMAND),
    ),
    # Calls that would be valid if all ranks made them.
    "other option": Kind("other option", CALLED, second="warm", times=2, told="DisagreementError"),
    "other option, new": Kind("other option", (FIRST, STEADY), second="cold", times=2, told="DisagreementError"),
    "other dimensions": Kind("other option", CALLED, second="warm", told="DisagreementError", operators=WITH_ROWS),
    "other dimensions, new": Kind(
        "other option", (FIRST, STEADY), second="cold", told="DisagreementError", operators=WITH_ROWS
    ),
    "other module": Kind(
        "other option", (SET_UP,), lives=True, second="cold", told="DisagreementError", operators=MODULES
    ),
    "other learning rate": Kind("other option", (BACKWARD,), told="DisagreementError", operators=TRAINING),
    "other step": Kind("other option", (BACKWARD,), told="DisagreementError", operators=TRAINING),
    "frozen": Kind("another call", (STEADY,), operators=TRAINING),
    "flipped bit": Kind("checkpoint", (CHECKPOINT,), lives=True, times=2, operators=CHECKPOINTS),
    "damaged checkpoint": Kind(
        "checkpoint", (CHECKPOINT,), lives=True, told="CheckpointException", times=2, operators=CHECKPOINTS
    ),
    "other checkpoint": Kind(
        "checkpoint", (CHECKPOINT,), lives=True, told="CheckpointException", operators=CHECKPOINTS
    ),
    "other tables": Kind(
        "other tables", CALLED, lives=True, times=2, told="RefusedError", operators=("matmul_all_to_all",)
    ),
    "second thread": Kind("second thread", told="PoisonedGroupError", times=2),
}
SIGNALS = ("kill", "short stop", "long stop", "interrupt", "terminate")


@dataclass(frozen=True)
class Injection:
    """The description of one trial, which can be converted to JSON. Times are in seconds."""

    seed: int
    index: int
    device: str
    kind: str
    operator: str
    options: dict[str, Any]
    second: tuple[str, dict[str, Any]] | None  # another operator, and its options
    warm: bool  # whether all ranks have called the second operator before
    world: int
    size: int
    phase: str
    step: int  # -1: the fault comes while a module is made, or before the first call
    place: str  # before, between or after the calls of the step; or before save or load
    victim: int
    delay_s: float  # time between the place in the program and the signal
    pauses_s: tuple[float, ...]
    choice: int  # selects one form of the kind
    deadline_s: float
    steps: int = STEPS
    turn: int = TURN
    pace_s: float = 0.0  # pause between steps
    hosts: int = 1  # number of hosts on which ranks pretend to be

    @property
    def of_kind(self) -> Kind:
        return KINDS[self.kind]

    @property
    def backward(self) -> bool:
        return bool(self.options.get("backward"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def kinds_of(device: str, families: Sequence[str] = (), only: Sequence[str] = ()) -> list[str]:
    """Return the kinds that are dealt on `device`. With `families`, return only their kinds. With `only`, return only
    kinds that apply to one of these operators.
    """
    operators = _operators_of(device, only)
    return [
        name
        for name, kind in KINDS.items()
        if device in kind.devices
        and (not families or kind.family in families)
        and any(applies(name, operator) for operator in operators)
    ]


def applies(kind: str, operator: str) -> bool:
    """Return True if this kind of fault is injected into calls of this operator."""
    wanted, injected = KINDS[kind].operators, OPERATORS[operator].kinds
    return (not wanted or operator in wanted) and (not injected or kind in injected)


def _operators_of(device: str, only: Sequence[str]) -> list[str]:
    wanted = only or [name for name in OPERATORS if name not in ON_DEMAND]
    return [name for name, work in OPERATORS.items() if device in work.devices and name in wanted]


def draw(
    seed: int, index: int, device: str = "cpu", families: Sequence[str] = (), only: Sequence[str] = ()
) -> Injection:
    """Draw injection `index` of `seed`. families, only: the families of faults and the operators to draw from; if empty,
    all.
    """
    kind = _dealt(seed, index, kinds_of(device, families, only), device)
    operators = _operators_of(device, only)
    deal, place = divmod(index, len(operators))
    operator = _shuffled(f"{seed}:{device}:operators:{deal}", operators)[place]
    rng = random.Random(f"{seed}:{device}:{index}")
    of_kind = KINDS[kind]
    if not applies(kind, operator):
        operator = rng.choice(
            [name for name in of_kind.operators or operators if applies(kind, name) and name in operators]
        )
    phase = rng.choice(of_kind.phases)
    if device == "cuda" and SET_UP in of_kind.phases and rng.random() < 0.4:
        phase = SET_UP  # about half of all injections, because ranks meet and map memory during set-up
    if operator in CHECKPOINTS and kind in _IN_CHECKPOINTS and rng.random() < 0.7:
        phase = CHECKPOINT
    deadline_s = _deadline_s(of_kind, device)
    world = rng.choice([2, 2, 2, 3, 3, 4]) if device == "cpu" else 2
    options = options_of(operator, rng, deadline_s, device, world)
    second, warm = None, False
    if of_kind.family == "other option" and rng.random() < 0.5:
        options |= OPERATORS[operator].plain
    if kind in _FUSED and not options["optimizer"]:
        options |= {"optimizer": "SGD"}
    if kind == "short stop":
        options.pop("rounding", None)  # in so many steps, tables that round at random move too far
        if options.get("dtype") == "bfloat16" and "optimizer" in options:  # GEMMs in fp8 need this dtype of the result
            del options["dtype"]
    if of_kind.family == "checkpoint":
        options |= {"loads_on": "all"}
    if kind in ("infinite gradient", "skipped gradient"):
        options |= {"nonfinite": "raise" if kind == "infinite gradient" else "skip"}
    if kind == "fewer backwards":
        options |= {"batches": 2, "prefetch": "now" if options["prefetch"] else None}
    calls_forward = kind in ("fork, uses the group", "frozen") or (of_kind.second != "never" and phase != BACKWARD)
    if calls_forward and options.get("placement") == "replicated":
        options |= {"placement": "rows"}  # forward of data-parallel tables alone does not use the group
    if kind.startswith("other dimensions"):
        options |= {"outer": rng.choice([None, 0, 1]), "backward": False}
    if of_kind.second != "never":
        second = _second(kind, operator, options, rng, deadline_s, device, world)
        if second is not None and second[1].get("placement") == "replicated":
            second[1]["placement"] = "rows"  # as above: a rank that only runs this forward skips a call unnoticed
        warm = of_kind.second != "cold"
    if phase == BACKWARD:  # if there is no backward, the fault comes between two calls
        if OPERATORS[operator].differentiable and device == "cpu":
            options["backward"], second = True, None
        elif second is None:
            phase = STEADY
    step = {SET_UP: -1, FIRST: TURN}.get(
        phase, rng.choice([rng.randrange(2, TURN - 4), rng.randrange(TURN + 2, STEPS - 8)])
    )
    place = "between" if phase == BACKWARD or kind == "exception between calls" else "before"
    if phase == CHECKPOINT:
        step = rng.choice([n for n in SAVING if 3 < n < STEPS - 8])
        place = "load" if of_kind.family == "checkpoint" else rng.choice(["save", "load"])
    if kind == "exception after calls":
        place = "after"
    if step < 0 and (
        (kind not in SIGNALS and not OPERATORS[operator].is_module) or kind not in (*SIGNALS, *_WHILE_MAKING)
    ):
        step = 0
    steady_s = _STEP_S[operator in TRAINING]
    most_s = (
        {SET_UP: 0.3, FIRST: 0.05, CHECKPOINT: 0.03}.get(phase, steady_s)
        if device == "cpu"
        else {SET_UP: 3.0}.get(phase, 0.05)
    )
    steps, pace_s = (_LONG_RUN if kind == "short stop" else STEPS), 0.0
    if device == "cuda" and phase == SET_UP:
        steps, pace_s = 130, 0.02  # so that steps last as long as signals may arrive
    return Injection(
        seed=seed, index=index, device=device, kind=kind, operator=operator, options=options, second=second, warm=warm,
        world=world, size=rng.randrange(2), phase=phase, step=step, place=place, victim=rng.randrange(world),
        delay_s=rng.random() * most_s, pauses_s=_pauses(kind, rng, deadline_s), choice=rng.randrange(1000),
        deadline_s=deadline_s, steps=steps, pace_s=pace_s,
    )  # fmt: skip


_FUSED = ("infinite gradient", "skipped gradient", "other learning rate", "other step", "fewer backwards")
"""Faults of tables that backward updates."""
_STEP_S = (0.004, 0.015)  # the duration of a call, and of a training step
_LONG = ("long stop", "long straggler", "never call", "fewer batches")
_LONG_RUN = 250  # steps; enough of them for several pauses that coincide with calls
_IN_CHECKPOINTS = (
    *SIGNALS, "exit", "leave", "short straggler", "long straggler", "never call", "exception between calls",
)  # fmt: skip
_WHILE_MAKING = (
    "exit", "leave", "short straggler", "long straggler", "never call", "no descriptors", "no threads", "other module",
)  # fmt: skip


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
    """Return a short deadline if the group may fail, otherwise a long one.

    A group that has to survive must not miss its deadline, even on a busy machine.
    """
    if device == "cuda":
        return 20.0 if kind.lives else 4.0 if kind.waits else 8.0  # a first call may compile kernels
    return 8.0 if kind.lives or kind.told else 2.0


def _pauses(kind: str, rng: random.Random, deadline_s: float) -> tuple[float, ...]:
    """Return the durations for which the rank is stopped or sleeps."""
    if kind == "short stop":
        return tuple(rng.uniform(0.02, 0.4) for _ in range(rng.randrange(1, 5)))
    if kind == "short straggler":
        return (rng.uniform(0.02, 1.0),)
    return (deadline_s + rng.uniform(0.3, 1.2),) if kind in _LONG else ()


def options_of(operator: str, rng: random.Random, deadline_s: float, device: str, world: int) -> dict[str, Any]:
    """Draw the options of a call, including whether there is a backward."""
    work = OPERATORS[operator]
    options: dict[str, Any] = {"deadline_s": deadline_s, **work.drawn(rng, device)}
    if pinned := work.schedules(world, options):
        plain = ["serial", "serial", None] if device == "cpu" else []
        options["schedule"] = rng.choice([*plain, *pinned])
        options["backward"] = work.differentiable and device == "cpu" and rng.random() < 0.4
    return options


def between_hosts(injection: Injection) -> Injection:
    """Return the injection for ranks on two hosts.

    There all transports run as "serial". So ranks that differ in them alone make the same call, and the victim passes another
    option instead, if the operator has one.
    """
    if injection.of_kind.family != "other option" or injection.second is None:
        return replace(injection, hosts=2)
    operator, given = injection.second
    options, work, same = injection.options, OPERATORS[operator], {"transport"}
    if {name for name in given if given[name] != options.get(name)} <= same:
        changes = [change for change in work.other_options(injection.world, options) if not change.keys() <= same]
        changes = [change for change in changes if _fits(work, injection.world, options | change)]
        if not changes:
            return replace(injection, hosts=2, kind="none", second=None)
        return replace(injection, hosts=2, second=(operator, options | changes[injection.choice % len(changes)]))
    return replace(injection, hosts=2)


def _second(
    kind: str, operator: str, options: dict[str, Any], rng: random.Random, deadline_s: float, device: str, world: int
) -> tuple[str, dict[str, Any]]:
    """Return (operator, options) of the second call: another operator, or the same with another option, shape or dtype."""
    if KINDS[kind].family == "other option":
        return operator, options | _change(kind, operator, options, rng, world)
    other = kind.startswith("other operator") or (not kind.startswith("other ") and rng.random() < 0.5)
    if other:
        others = [name for name in _operators_of(device, ()) if name != operator]
        name = rng.choice(others)
        return name, options_of(name, rng, deadline_s, device, world) | {"backward": False}
    changed = {**options, "backward": False}
    if kind == "other dtype" and (dtype := OPERATORS[operator].other_dtype) is not None:
        dtype = "float16" if dtype == options.get("dtype") else dtype
        return operator, {name: value for name, value in changed.items() if name != "rounding"} | {"dtype": dtype}
    return operator, changed | {"other_size": True}


def _change(kind: str, operator: str, options: dict[str, Any], rng: random.Random, world: int) -> dict[str, Any]:
    """Return the changed options of the victim's call."""
    work = OPERATORS[operator]
    if kind == "other module":
        return rng.choice(work.other_makings(world, options))
    if kind.startswith("other dimensions"):
        return {"outer": rng.choice([outer for outer in (None, 0, 1) if outer != options["outer"]])}
    changes = [change for change in work.other_options(world, options) if _fits(work, world, options | change)]
    if "schedule" in options:
        others = [name for name in (None, "serial", *work.schedules(world, options)) if name != options["schedule"]]
        changes.append({"schedule": rng.choice(others)})
        # Ranks compare whether they want gradients only at the first call. Later, a call without gradients is the same
        # call.
        if kind == "other option, new" and work.differentiable:
            changes.append({"backward": not options["backward"]})
    return rng.choice(changes)


def _fits(work: type[Work], world: int, options: dict[str, Any]) -> bool:
    return options.get("schedule") in (None, "serial", *work.schedules(world, options))
