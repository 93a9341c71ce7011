"""The registry of builders, and the candidates that it provides for a problem.

A builder is a function that takes a problem and parameters, and returns a `Schedule`. Schedules of registered builders can be
run, simulated, verified, traced and planned like weft's own:

    @builder(AllGatherMatmul, chunks=(1, 2, 4))
    def my_schedule(p: AllGatherMatmul, *, chunks: int) -> Schedule: ...
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from weft.builders.problem import Candidate, Problem
from weft.errors import ScheduleError
from weft.schedule.schedule import Schedule


class NotApplicableError(ValueError):
    """A builder has no schedule for the problem. The text is the reason, and is shown to users."""


def require_peers(problem: Problem) -> None:
    """Raise `NotApplicableError` if there is only one rank."""
    if problem.world_size == 1:
        raise NotApplicableError("there is only one rank, so there is nothing to send")


def require_products(problem: Any) -> None:
    """Raise `NotApplicableError` if there is only one rank, or no product to send."""
    require_peers(problem)
    if not problem.has_work:
        raise NotApplicableError("a size is 0, so there is nothing to multiply")


def cannot_do(name: str, problem: Problem, why: NotApplicableError) -> NotApplicableError:
    """Return the error for a pinned schedule that does not support `problem`."""
    return NotApplicableError(
        f'schedule {name!r} does not support {problem.title} of {problem.text}: {why}. Pass schedule="serial", or '
        "do not pin a schedule"
    )


@dataclass(frozen=True, slots=True)
class _Builder:
    function: Callable[..., Schedule]
    parameters: dict[str, tuple[Any, ...]]
    defaults: dict[str, Any]

    def candidate(self, problem: Problem, chosen: dict[str, Any]) -> Candidate:
        given = ((key, value) for key, value in chosen.items() if self.defaults.get(key) != value)
        return Candidate(
            self.function.__name__, tuple(given), partial(_built, self.function, problem, tuple(chosen.items()))
        )


_builders: dict[type, dict[str, _Builder]] = {}
_MOST = 999_999
_NUMBER, _PROPORTION = re.compile("0|[1-9][0-9]{0,5}"), re.compile("[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})+")


def builder(
    problem: type, **parameters: tuple[Any, ...]
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Return a decorator that registers a function as a builder for `problem`.

    parameters: for each parameter of the function, the values that the planner tries. Each combination is a candidate.
        The name of a candidate omits parameters that have the function's default value.

    A function replaces a registered function with the same name and module, as when a notebook's cell runs again. Raise
    `ValueError` if the registered function is from another module.
    """

    def register(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
        known = _builders.get(problem, {}).get(function.__name__)
        if known is not None and known.function.__module__ != function.__module__:
            raise ValueError(
                f"{problem.__name__} already has a builder named {function.__name__!r}, from "
                f"{known.function.__module__}: give yours another name"
            )
        signature = inspect.signature(function).parameters
        defaults = {key: signature[key].default for key in parameters if key in signature}
        _builders.setdefault(problem, {})[function.__name__] = _Builder(function, parameters, defaults)
        return function

    return register


def unregister(problem: type, name: str) -> None:
    """Remove a registered builder, for tests."""
    del _builders[problem][name]


def builders_of(problem: type) -> tuple[tuple[str, Callable[..., Schedule]], ...]:
    """Return (name, function) of each builder that is registered for `problem`."""
    return tuple((name, entry.function) for name, entry in _builders.get(problem, {}).items())


def outside_builders(problem: type) -> tuple[str, ...]:
    """Return the names of the builders for `problem` that are a user's, not weft's."""
    return tuple(
        name for name, function in builders_of(problem) if not function.__module__.startswith("weft.builders.")
    )


def candidates(problem: Problem, builders: tuple[str, ...] | None = None) -> list[Candidate]:
    """Return the candidates for `problem`, serial first.

    builders: the names of the builders to use. Default: all except builders with a parameter `hosts`, which are for
        ranks on several hosts (`Problem.between_hosts`).

    `Candidate.build` raises `NotApplicableError` if the builder does not support the problem.
    """
    known = _builders.get(type(problem), {})
    for name in builders or ():
        if name not in known:
            raise ValueError(f"no schedule {name!r} for {problem.title}; use one of {', '.join(known)}")
    found = []
    usual = (name for name, entry in known.items() if "hosts" not in entry.parameters)
    for name in builders or sorted(usual, key=lambda name: name != "serial"):
        entry = known[name]
        for values in itertools.product(*entry.parameters.values()):
            found.append(entry.candidate(problem, dict(zip(entry.parameters, values, strict=True))))
    return found


def named(problem: Problem, name: str) -> Candidate:
    """Return the candidate with this name, such as "shard[chunks=2,send=in_turn,by=dma]".

    The name may have values that the planner does not try: any number that is at least the smallest registered number. If a
    proportion such as "2:1:1" is registered, any proportion is allowed.

    Each candidate has exactly one spelling, because ranks compare names. A name lists parameters in the order of
    registration, and omits parameters that have the default value. Raise `ValueError` for any other spelling or an
    unknown name. The error gives the right spelling, the reason, or the nearest names that support `problem`.
    """
    entry, chosen = _parsed(problem, name)
    if entry is not None and chosen is not None:
        found = entry.candidate(problem, chosen)
        if found.name == name:
            return found
    return _named_otherwise(problem, name)


def _parsed(problem: Problem, name: str) -> tuple[_Builder | None, dict[str, Any] | None]:
    """Return (builder, values of its parameters) for the candidate `name`.

    The builder is None if it is unknown. The values are None if one of them is not registered.
    """
    head, _, rest = name.partition("[")
    entry = _builders.get(type(problem), {}).get(head)
    if entry is None:
        return None, None
    given = dict(word.partition("=")[::2] for word in rest.removesuffix("]").split(",") if word)
    chosen = {}
    for key, listed in entry.parameters.items():
        text = given.get(key, str(entry.defaults.get(key)))
        match = next((value for value in listed if str(value) == text), None)
        if match is None:
            return entry, None
        chosen[key] = match
    return entry, chosen


def _named_otherwise(problem: Problem, name: str) -> Candidate:
    """Return the candidate for a valid name that is not among the planner's candidates. Raise `ValueError` if the name is
    invalid.
    """
    known = {candidate.name: candidate for candidate in candidates(problem)}
    if name in known:
        return known[name]
    head, _, rest = name.partition("[")
    entry = _builders.get(type(problem), {}).get(head)
    words = [word.partition("=")[::2] for word in rest.removesuffix("]").split(",")]
    given = dict(words)
    optional = {key for key, default in entry.defaults.items() if default in entry.parameters[key]} if entry else set()
    if entry is None or not rest.endswith("]") or given.keys() | optional != entry.parameters.keys():
        if not known:
            raise ValueError(
                f"no schedule {name!r} for {problem.title}: no builder is registered for "
                f"{type(problem).__name__}; import the file that registers them"
            )
        if entry is None and head == "serial":
            raise ValueError(
                f"no schedule 'serial' for {problem.title}, but every problem needs one: register a builder named "
                f"serial for {type(problem).__name__} that calls NCCL and cuBLAS one after the other"
            )
        by_likeness = difflib.get_close_matches(name, known, n=len(known), cutoff=0.0)
        near = itertools.islice((one for one in by_likeness if _applies(known[one])), 3)
        if not (nearest := ", ".join(near)):
            raise ValueError(
                f"no schedule {name!r} for {problem.title}: none of its builders supports {problem.text}: "
                "use other sizes or options, or register a builder that supports this problem"
            )
        listing = f"; `weft plan {problem.title} --shape M,N,K --all` lists all" * type(problem).__module__.startswith(
            "weft."
        )
        raise ValueError(f"no schedule {name!r} for {problem.title}; the nearest are {nearest}{listing}")
    if twice := [key for key in given if sum(key == word for word, _ in words) > 1]:
        raise ValueError(f"no schedule {name!r}: {', '.join(twice)} is given more than once: give each parameter once")
    chosen = {
        key: _value(f"no schedule {name!r}: {key}", given[key], listed) if key in given else entry.defaults[key]
        for key, listed in entry.parameters.items()
    }
    found = entry.candidate(problem, chosen)
    if found.name != name:
        raise ValueError(f"no schedule {name!r}: write it as {found.name!r}")
    return found


def _applies(candidate: Candidate) -> bool:
    try:
        candidate.build()
    except (NotApplicableError, ScheduleError):
        return False
    return True


def _value(where: str, text: str, listed: tuple[Any, ...]) -> Any:
    """Parse `text` as the value of a parameter whose registered values are `listed`.

    where: the prefix of the error text.
    """
    for value in listed:
        if text == str(value):
            return value
    numbers = [value for value in listed if isinstance(value, int)]
    proportions = [value for value in listed if isinstance(value, str) and _PROPORTION.fullmatch(value)]
    if numbers and _NUMBER.fullmatch(text) and int(text) >= min(numbers):
        return int(text)
    if proportions and _PROPORTION.fullmatch(text):
        return text
    known = [str(value) for value in listed if value not in numbers and value not in proportions]
    known += [f"a number from {min(numbers)} to {_MOST}"] if numbers else []
    known += [f"a proportion such as {proportions[-1]}"] if proportions else []
    raise ValueError(f"{where} is {text!r}: use {' or '.join(known)}")


@lru_cache(maxsize=2)  # the first call builds a schedule twice: to check it and to run it
def _built(function: Callable[..., Schedule], problem: Problem, given: tuple[tuple[str, Any], ...]) -> Schedule:
    chosen = dict(given)
    try:
        made = function(problem, **chosen)
    except NotApplicableError:
        raise
    except Exception as error:
        text = f"builder {function.__module__}.{function.__name__} with parameters {chosen}, for {problem}"
        raise ScheduleError(f"{text}: {type(error).__name__}: {error}") from error
    if not isinstance(made, Schedule):
        raise ScheduleError(
            f"builder {function.__module__}.{function.__name__} returned {made!r}, not a Schedule: return d.schedule()"
        )
    return made
