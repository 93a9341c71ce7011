"""Options that only some operators have, such as gather_dim. An operator's options are keyword arguments of its problem's
method `sized`. Arguments that all operators have (M, N, K, ranks and dtype) do not count as options.

Users pass an option as a Python value (`weft.plan.explain`) or as a string (`--option` of `weft plan` and `weft
bench`). Both forms are checked against the keyword's annotation: bool, int, float, str, Literal, or a union of these
types and None. A keyword with another annotation accepts only Python values, and its problem checks them.
"""

from __future__ import annotations

import inspect
import math
import numbers
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from weft.words import and_list, kind, or_list

ALL_HAVE = ("m", "n", "k", "ranks", "dtype")
"""The keywords of `sized` that all operators have."""
_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_NOTHING = "none"


def keywords(sized: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a problem's method `sized` that are options, with evaluated annotations."""
    return [one for name, one in inspect.signature(sized, eval_str=True).parameters.items() if name not in ALL_HAVE]


def name_and_value(text: str) -> tuple[str, str]:
    """Split "NAME=VALUE" into (name, value). Raise `ValueError` if either is missing."""
    name, equals, value = text.partition("=")
    if not name.isidentifier():
        raise ValueError(f"option {text!r} has no name: write NAME=VALUE, such as gather_dim=-1")
    if not equals or not value:
        raise ValueError(f"option {text!r} has no value: write it as {name}=VALUE")
    return name, value


def from_text(name: str, text: str, annotation: Any) -> Any:
    """Parse `text` as a value of type `annotation`. Raise `ValueError` with the allowed strings if it does not match."""
    wanted = _alternatives(annotation)
    if type(None) in wanted and text.lower() == _NOTHING:
        return None
    for one in wanted:
        if one is bool and text.lower() in _TRUTHS:
            return _TRUTHS[text.lower()]
        if get_origin(one) is Literal:
            for value in get_args(one):
                if text == str(value):
                    return value
        if one is str:
            return text
        if one in (int, float):
            try:
                number = one(text)
            except ValueError:
                continue
            if math.isfinite(number):
                return number
    known = _allowed(wanted, _TEXTS, str)
    if not known:
        of = ", ".join(getattr(one, "__name__", str(one)) for one in wanted)
        raise ValueError(
            f"{name}={text}: a value of type {of} cannot be written as text: pass the value to weft.plan.explain. (Only bool, "
            "int, float, str and Literal can be written as text)"
        )
    raise ValueError(f"{name}={text}: give {or_list(known)}")


def checked(name: str, value: Any, annotation: Any) -> Any:
    """Return `value`, converted to int or float if needed. Raise `ValueError` if it does not match `annotation`."""
    wanted = _alternatives(annotation)
    for one in wanted:
        if one not in _VALUES and get_origin(one) is not Literal:
            return value
        if get_origin(one) is Literal:
            if any(value == other and type(value) is type(other) for other in get_args(one)):
                return value
        elif one in (bool, str, type(None)):
            if isinstance(value, one):
                return value
        elif one is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return int(value)
        elif one is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
            return float(value)
    found = "not a valid value" if any(get_origin(one) is Literal for one in wanted) else kind(value)
    raise ValueError(f"{name}={value!r} is {found}: pass {or_list(_allowed(wanted, _VALUES, repr))}")


def check_names(op: str, given: Mapping[str, str], problems: Mapping[str, Any]) -> None:
    """Raise `ValueError` if operator `op` lacks one of the options `given`. The error lists the options that `op` has.

    given: the options that the user gave, as {name: value as text}.
    problems: the problem class of each operator, by name.
    """
    having = {name: _names(one) for name, one in problems.items()}
    unknown = given.keys() - having[op]
    if not unknown:
        return
    said = ", ".join(f"{name}={given[name]}" for name in sorted(unknown))
    others = [name for name in sorted(having) if unknown <= set(having[name])]
    elsewhere = f" ({and_list(others)} {'have' if len(others) > 1 else 'has'} it)" if others else ""
    own = f"its own options are {', '.join(having[op])}" if having[op] else "it has no options of its own"
    raise ValueError(f"{said}: {op} has no such option{elsewhere}; {own}")


def _names(problem: Any) -> list[str]:
    return [name for name in inspect.signature(problem.sized).parameters if name not in ALL_HAVE]


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the types in a union, with None last. For another annotation, return a tuple with only the annotation."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        found = [one for of in get_args(annotation) for one in _alternatives(of)]
        return tuple(sorted(found, key=lambda one: one is type(None)))
    return (annotation,)


_TEXTS = {
    bool: "true or false (1 or 0, yes or no)", int: "an integer", float: "a finite number", type(None): _NOTHING,
}  # fmt: skip
_VALUES = {
    bool: "True or False", int: "an int", float: "a number", str: "a string", type(None): "None",
}  # fmt: skip


def _allowed(wanted: Iterable[Any], texts: Mapping[Any, str], show: Callable[[Any], str]) -> list[str]:
    """Return, for error messages, a text for each value that an option may have. `wanted` lists types and Literals.

    texts: a description of the values of each type, as {type: text such as "a finite number"}.
    show: a function that prints a value of a Literal.
    """
    found: list[str] = []
    for one in wanted:
        if get_origin(one) is Literal:
            found += map(show, get_args(one))
        elif one in texts:
            found.append(texts[one])
    return found
