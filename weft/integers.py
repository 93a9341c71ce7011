"""The rules for arguments that must be integers or real numbers, for code with and without torch.

An argument of the public functions may be an integer of numpy, or a tensor with one integer. Code that receives it
computes with a Python int, which prints and serialises the same everywhere.
"""

from __future__ import annotations

import numbers
import operator
from dataclasses import fields
from functools import cache
from typing import Any

from weft.words import kind


def integer(name: str, given: Any, fix: str) -> int:
    """Return `given` as an int. Allowed are integers of numpy, and tensors with one integer, but no booleans.

    Raise `ValueError` for anything else, and for integers beyond 64 bits. name, fix: the argument's name and the advice
    in the error text.
    """
    number = given if type(given) is int else _index(name, given, fix)
    if number.bit_length() > 63:
        raise ValueError(f"{name} is {shown(number)}, which does not fit in 64 bits: {fix}")
    return number


def _index(name: str, given: Any, fix: str) -> int:
    # The dtype of numpy's booleans is "bool", and of torch's "torch.bool".
    if not isinstance(given, bool) and not str(getattr(given, "dtype", "")).endswith("bool"):
        try:
            return operator.index(given)
        except TypeError:
            pass
        except Exception as error:  # tensors without values, on meta devices or in fake modes, raise several types
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{name}={given!r} has no value that can be read ({reason}): {fix}") from error
    raise ValueError(f"{name}={given!r} is {kind(given)}: {fix}")


def is_real(given: Any) -> bool:
    """True for a real number of Python or numpy. False for booleans, and for time spans, which numpy counts as integers."""
    if isinstance(given, int | float):  # torch.compile can trace this, but not the rest
        return not isinstance(given, bool)
    return isinstance(given, numbers.Real) and "timedelta" not in type(given).__name__


def convert(problem: Any, *names: str) -> None:
    """Convert fields of a frozen dataclass to int, or to (nested) tuples of int if the annotation says so. Raise `ValueError`
    unless they are integers, or lists of integers.
    """
    form: type = type(problem)
    tuples = _tuples_of(form)
    for name in names:
        given = getattr(problem, name)
        if name in tuples:
            if not isinstance(given, list | tuple):
                raise ValueError(f"{name}={given!r} is {kind(given)}: pass a list of sizes")
            object.__setattr__(problem, name, _converted(name, given))
        elif type(given) is not int:
            object.__setattr__(problem, name, integer(name, given, "pass a size, an integer"))


@cache
def _tuples_of(form: type) -> frozenset[str]:
    """Return the names of the fields of a dataclass that are tuples. Annotations are strings."""
    return frozenset(field.name for field in fields(form) if str(field.type).startswith("tuple"))


def _converted(name: str, given: Any) -> Any:
    if isinstance(given, list | tuple):
        return tuple(one if type(one) is int else _converted(f"{name}[{i}]", one) for i, one in enumerate(given))
    return integer(name, given, "pass a size, an integer")


def shown(number: Any) -> str:
    """Return the number as text. For an integer of more than 64 bits, the text gives only the number of bits."""
    is_long = type(number) is int and number.bit_length() > 64
    return f"a number of {number.bit_length()} bits" if is_long else repr(number)
