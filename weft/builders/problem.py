"""Problems: the sizes and options of an operator's call, and the candidates among which the planner selects a schedule.
`weft.builders.registry` has the builders of the schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from weft.builders import options as own
from weft.integers import integer
from weft.schedule.schedule import Schedule
from weft.words import counted


@dataclass(frozen=True, slots=True)
class Candidate:
    """A builder with values for its parameters.

    builder: the builder's name.
    parameters: the parameters whose values differ from their defaults, as pairs (name, value).
    build: a function that returns the schedule.
    """

    builder: str
    parameters: tuple[tuple[str, Any], ...]
    build: Callable[[], Schedule]

    @property
    def pieces_grow(self) -> bool:
        """True if each shard is cut into W pieces for W ranks, which makes planning slow for many ranks."""
        return ("steps", 0) in self.parameters

    @property
    def name(self) -> str:
        given = ",".join(f"{key}={value}" for key, value in self.parameters)
        return f"{self.builder}[{given}]" if given else self.builder


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes and options of an operator's call, for builders and the planner.

    Every problem has a builder `serial`, the baseline, which calls NCCL and cuBLAS one after the other. The GEMM and
    the collective of `serial` are not cut into pieces.
    """

    world_size: int
    name: ClassVar[str]
    """The name of the operator."""
    title: ClassVar[str]
    """The name in error texts. It differs from `name` for operators that users do not call directly, such as backward
    passes.
    """
    tried_on_gpus: ClassVar[bool] = True
    """True if the operator's schedules have been timed on GPUs. If False, serial is selected unless a schedule is pinned."""
    rounds_sums: ClassVar[bool] = False
    """True if serial rounds each rank's product to the result's dtype before NCCL reduces the products."""

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            PROBLEMS[cls.name] = cls
            if "title" not in cls.__dict__:
                cls.title = cls.name

    @classmethod
    def sized(cls, m: int, n: int, k: int, ranks: int, dtype: str) -> Problem:
        """Return the problem with equal sizes on all ranks, from the arguments of `weft plan` and `weft bench`.

        Operators override this method, and add their own options as keywords. The docstring of the override defines M,
        N and K. `weft plan NAME --help` prints this docstring, and the text in the `Annotated` type of each option.
        """
        given: dict[str, Any] = {"world_size": ranks, "m": m, "n": n, "k": k, "dtype": dtype}
        if {field.name for field in fields(cls)} != given.keys():
            raise ValueError(f"{cls.name} cannot be planned by M, N and K: define {cls.__name__}.sized")
        return cls(**given)

    @property
    def operator(self) -> str:
        """The name of the operator in plans and records."""
        return self.name

    @property
    def text(self) -> str:
        """The sizes and options as one line of text."""
        sizes = (f"{field.name}={getattr(self, field.name)}" for field in fields(self) if field.name != "world_size")
        return f"{', '.join(sizes)}, {counted(self.world_size, 'rank')}"

    @property
    def has_work(self) -> bool:
        """True if there is anything to compute."""
        return True

    @property
    def family(self) -> tuple[Hashable, float]:
        """(key, size): problems with equal keys form a family, in which problems differ only in `size`, such as the
        number of rows.

        Schedules are selected for some sizes of each family (`weft.plan.nearby`). By default every problem is its own
        family.
        """
        return self, 0.0

    @property
    def chosen_like(self) -> Problem:
        """The problem that determines the schedule for this problem, so that both have results with equal bits. By
        default, it is this problem.
        """
        return self

    @property
    def measured_family(self) -> tuple[Hashable, float]:
        """A pair (key, size), as for `family`, but for choices by measured times. Problems with equal keys and similar `size`
        share measured times. The key may omit sizes that the key of `family` contains, such as the number of rows of
        each rank.

        By default, the pair is `family`.
        """
        return self.family

    def resized(self, size: float) -> Problem:
        """Return the problem of this family whose size is nearest to `size`."""
        return self

    @property
    def not_captured(self) -> str:
        """The reason why no schedule of the problem can be captured in a CUDA graph; "" if schedules can."""
        return ""

    @property
    def uneven(self) -> str:
        """A text that says how the work of ranks differs. "" if all ranks do the same work; then it is enough to
        simulate one rank.
        """
        return ""

    @property
    def evened(self) -> tuple[Problem, float] | None:
        """(problem, ratio): a similar problem in which all ranks do the same work. One rank is then enough for a
        simulation. None if there is no such problem.

        ratio: the rows of the similar problem, divided by the rows of this problem.
        """
        return None

    def takes(self, candidate: Candidate) -> bool:
        """True if a call without a pinned schedule may use `candidate`."""
        return True

    def between_hosts(self, rails: int) -> tuple[str, ...]:
        """Return the names of the schedules to time, besides serial, if ranks are on several hosts.

        rails: the number of hosts if the ranks form rails: every host has the same number of consecutive ranks, at
            least two. Otherwise 0.
        """
        return ()

    def worth_running(self, candidate: Candidate) -> bool:
        """True if `candidate` should be timed on machines such as CPUs, where times cannot be predicted.

        Select few candidates, because each delays the first call.
        """
        return True


NEARLY = 1.02
"""The largest ratio that `Problem.evened` returns. The similar problem then takes almost as long as the given one, so
the simulator neglects the difference.
"""

_MOST = 1 << 40
"""The largest size that `described` accepts. The product of two sizes and a small number then fits into 64 bits."""
PROBLEMS: dict[str, type[Problem]] = {}
"""{name of an operator: its problem class}"""
SCALED = {"all_gather_scaled_matmul": "all_gather_matmul"}
"""{fp8 operator: the operator whose problem with dtype fp8 it solves}"""


def require_sizes(m: int, n: int, k: int, world_size: int) -> None:
    """Raise `ValueError` unless the sizes are at least 0, and world_size is at least 1."""
    if min(m, n, k) < 0 or world_size < 1:
        raise ValueError(
            f"m={m}, n={n}, k={k}, world_size={world_size}: sizes must be at least 0, and world_size at least 1"
        )


def require_even(m: int, n: int, k: int, world_size: int) -> None:
    """Raise `ValueError` for invalid sizes (`require_sizes`), and if m is not divisible by world_size."""
    require_sizes(m, n, k, world_size)
    if m % world_size:
        below = m - m % world_size
        either = f"{below} or " if below else ""
        raise ValueError(f"m={m} must be divisible by world_size={world_size}: use {either}{below + world_size}")


def plain(name: str, dtype: str | None) -> tuple[str, Any]:
    """Return (operator, dtype) to plan or measure for the given name and dtype.

    An fp8 operator becomes the plain operator with dtype fp8, such as all_gather_scaled_matmul -> all_gather_matmul.
    Raise `ValueError` for an fp8 operator with another dtype. Other names are returned unchanged.
    """
    if name not in SCALED:
        return name, dtype
    if dtype not in (None, "fp8"):
        raise ValueError(f"dtype {dtype}: {name} needs dtype fp8; use {SCALED[name]} for {dtype}")
    return SCALED[name], "fp8"


def described(op: str, *, m: int, n: int, k: int, ranks: int, dtype: str = "bf16", **options: Any) -> Problem:
    """Return the problem of operator `op` with equal sizes on all ranks. The arguments are as for `weft.plan.explain`.

    options: keywords of the operator's `Problem.sized`.

    Raises `ValueError` if the operator, a size or an option is invalid.
    """
    if not isinstance(op, str) or op not in (*PROBLEMS, *SCALED):
        names = ", ".join(sorted([*PROBLEMS, *SCALED]))
        raise ValueError(f"{op!r} is not an operator that can be planned: use one of {names}")
    op, dtype = plain(op, dtype)
    sizes = {"m": m, "n": n, "k": k, "ranks": ranks}
    sizes = {name: integer(name, size, "pass a size, an integer") for name, size in sizes.items()}
    for name, size in sizes.items():
        if size > _MOST:
            raise ValueError(f"{name}={size} is too large: sizes are at most {_MOST}")
    if options:
        own.check_names(op, {name: repr(value) for name, value in options.items()}, PROBLEMS)
        known = own.keywords(PROBLEMS[op].sized)
        options = {
            one.name: own.checked(one.name, options[one.name], one.annotation) for one in known if one.name in options
        }
    m, n, k, ranks = sizes.values()
    return PROBLEMS[op].sized(m, n, k, ranks, dtype, **options)


def option_from_text(op: str, given: str) -> tuple[str, Any]:
    """Parse "NAME=VALUE", an option of operator `op`. Return (name, value).

    Raise `ValueError` for an unknown option or an invalid value."""
    name, text = own.name_and_value(given)
    own.check_names(op, {name: text}, PROBLEMS)
    (annotation,) = (one.annotation for one in own.keywords(PROBLEMS[op].sized) if one.name == name)
    return name, own.from_text(name, text, annotation)
