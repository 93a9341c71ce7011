"""Operators as descriptions: what is asked for. The ways known to do it are in `weft.schedule.builders`."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from weft.schedule import options as own
from weft.schedule.candidate import Candidate
from weft.words import counted, kind


@dataclass(frozen=True, slots=True)
class Problem:
    """What the planner asks of an operator's description, beside its builders. One of them is `serial`: the library's calls,
    one after the other, which is what the others are compared with and what says how large the whole operations are."""

    world_size: int
    name: ClassVar[str]
    """The operator's."""
    title: ClassVar[str]
    """What messages call it: its name, unless callers do not know the operator by that because others call it for them."""
    tried_on_gpus: ClassVar[bool] = True
    """Whether its schedules have run and been timed there; if not, none but serial is taken unasked."""
    rounds_sums: ClassVar[bool] = False
    """Whether the library, too, rounds what ranks have computed to the result's dtype before it adds it up."""

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            PROBLEMS[cls.name] = cls
            if "title" not in cls.__dict__:
                cls.title = cls.name

    @classmethod
    def sized(cls, m: int, n: int, k: int, ranks: int, dtype: str) -> Problem:
        """With even sizes, as plans and benchmarks name them. Options of an operator's own follow as keywords: `weft plan`
        and `weft bench` have them too. `weft plan NAME --help` is this docstring of an operator's own (what M, N and K are, and
        examples), and for an option the text that its type is `Annotated` with."""
        given: dict[str, Any] = {"world_size": ranks, "m": m, "n": n, "k": k, "dtype": dtype}
        if {field.name for field in fields(cls)} != given.keys():
            raise ValueError(f"{cls.name} cannot be planned by sizes M, N and K")
        return cls(**given)

    @property
    def text(self) -> str:
        """Sizes, for a line of text."""
        sizes = (f"{field.name}={getattr(self, field.name)}" for field in fields(self) if field.name != "world_size")
        return f"{', '.join(sizes)}, {counted(self.world_size, 'rank')}"

    @property
    def has_work(self) -> bool:
        """Whether anything is to be computed."""
        return True

    @property
    def family(self) -> tuple[Hashable, float]:
        """(what is alike in problems that differ in one size only, that size): choices are made for a few sizes of each family
        (`weft.plan.nearby`). Here every problem is a family of its own."""
        return self, 0.0

    def resized(self, size: float) -> Problem:
        """The one of this family that is nearest to a size."""
        return self

    @property
    def not_captured(self) -> str:
        """Why no CUDA graph can capture it, whatever the schedule; empty if one may."""
        return ""

    @property
    def uneven(self) -> str:
        """How ranks differ, so that each has to be simulated; empty if all do alike."""
        return ""

    def takes(self, candidate: Candidate) -> bool:
        """Whether a call may take it that pins none."""
        return True

    def worth_running(self, candidate: Candidate) -> bool:
        """Whether to try it where no model says how fast it is: each one that is run costs a first call some milliseconds."""
        return True


PROBLEMS: dict[str, type[Problem]] = {}
"""By the operator's name."""


def require_sizes(m: int, n: int, k: int, world_size: int) -> None:
    """Raises `ValueError` for sizes that cannot be."""
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in (m, n, k))
    if not whole or world_size < 1:
        raise ValueError(f"m={m}, n={n}, k={k}, world_size={world_size}: sizes are whole numbers from 0, ranks from 1")


def require_even(m: int, n: int, k: int, world_size: int) -> None:
    """Raises `ValueError` for sizes that cannot be, or an m of which ranks do not have equal parts."""
    require_sizes(m, n, k, world_size)
    if m % world_size:
        below = m - m % world_size
        either = f"{below} or " if below else ""
        raise ValueError(f"m={m} must be divisible by world_size={world_size}: use {either}{below + world_size}")


def described(op: str, *, m: int, n: int, k: int, ranks: int, dtype: str = "bf16", **options: Any) -> Problem:
    """The operator of that name with even sizes, as `weft.plan.explain` describes them. `ValueError` if it does not go. options:
    of its `Problem.sized`, of the types that these keywords are annotated with."""
    if op not in PROBLEMS:
        raise ValueError(f"no operator {op!r} can be planned; there is {', '.join(sorted(PROBLEMS))}")
    sizes = {"m": m, "n": n, "k": k, "ranks": ranks}
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise ValueError(f"{name}={size!r} is {kind(size)}: pass a size, a whole number")
    if options:
        own.check_names(op, {name: repr(value) for name, value in options.items()}, PROBLEMS)
        known = own.keywords(PROBLEMS[op].sized)
        options = {
            one.name: own.checked(one.name, options[one.name], one.annotation) for one in known if one.name in options
        }
    m, n, k, ranks = map(operator.index, sizes.values())
    return PROBLEMS[op].sized(m, n, k, ranks, dtype, **options)


def option_from_text(op: str, given: str) -> tuple[str, Any]:
    """Return name and value of an option of that operator from "NAME=VALUE". `ValueError` for an option that it does not have, or a
    text that is no value of it."""
    name, text = own.split(given)
    own.check_names(op, {name: text}, PROBLEMS)
    (annotation,) = (one.annotation for one in own.keywords(PROBLEMS[op].sized) if one.name == name)
    return name, own.from_text(name, text, annotation)
