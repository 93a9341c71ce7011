"""An operator's own options: strings and values for each type of annotation, and refused values."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Optional

import pytest

from weft import plan
from weft.builders import described
from weft.builders.options import checked, from_text
from weft.builders.problem import option_from_text

BY = Literal["dma", "kernel", 2]
SHAPE: dict[str, Any] = {"M": 16, "N": 16, "K": 16, "ranks": 2, "hw": "h200"}


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (bool, "false", False), (bool, "False", False), (bool, "NO", False), (bool, "0", False),
        (bool, "true", True), (bool, "Yes", True), (bool, "1", True),
        (int, "-1", -1), (float, "1e-5", 1e-5), (float, "2", 2.0), (str, "true", "true"), (str, "3", "3"),
        (int | None, "none", None), (Optional[int], "4", 4), (None | bool, "no", False),  # noqa: UP045
        (BY, "kernel", "kernel"), (BY, "2", 2), (BY | None, "None", None), (Annotated[bool, "words"], "no", False),
        (Annotated[float | None, "words"], "0.5", 0.5),
    ],
)  # fmt: skip
def test_texts_are_values_of_the_annotation(annotation: Any, text: str, value: Any) -> None:
    found = from_text("one", text, annotation)
    assert (found, type(found)) == (value, type(value))
    again = checked("one", found, annotation)
    assert (again, type(again)) == (value, type(value)), "and pass as values"


@pytest.mark.parametrize(
    ("annotation", "text", "said"),
    [
        (bool, "maybe", "one=maybe: give true or false (1 or 0, yes or no)"),
        (bool, "2", "one=2: give true or false"),
        (bool, "none", "one=none: give true or false"),
        (int, "1.5", "one=1.5: give an integer"),
        (int, "true", "one=true: give an integer"),
        (float, "inf", "one=inf: give a finite number"),
        (int | None, "some", "one=some: give an integer or none"),
        (BY, "3", "one=3: give dma, kernel or 2"),
        (list[int], "[1]", "one=[1]: a value of type list cannot be written as text"),
    ],
)
def test_other_texts_are_refused_with_what_is_allowed(annotation: Any, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        from_text("one", text, annotation)


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        (bool, "yes", "one='yes' is a str: pass True or False"),
        (bool, 1e-5, "one=1e-05 is a float: pass True or False"),
        (bool, 1, "one=1 is an int: pass True or False"),
        (bool, None, "one=None is a NoneType: pass True or False"),
        (int, True, "one=True is a bool: pass an int"),
        (int | None, "4", "one='4' is a str: pass an int or None"),
        (float, True, "one=True is a bool: pass a number"),
        (str, 3, "one=3 is an int: pass a string"),
        (BY, "store", "one='store' is not a valid value: pass 'dma', 'kernel' or 2"),
    ],
)
def test_values_of_other_types_are_refused(annotation: Any, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        checked("one", value, annotation)


def test_values_of_types_that_are_not_known_are_the_problems_to_check() -> None:
    assert checked("one", [1], list[int]) == [1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"norm": "yes"}, "norm='yes' is a str: pass True or False"),
        ({"norm": 1e-5}, "norm=1e-05 is a float: pass True or False"),
        ({"bias": True}, "bias=True: matmul_all_reduce has no such option; its own options are residual, norm"),
        ({"M": True}, "m=True is a bool: pass a size, an integer"),
        ({"K": 1.5}, "k=1.5 is a float: pass a size, an integer"),
        (
            {"gather_dim": 0},
            "gather_dim=0: matmul_all_reduce has no such option (matmul_all_gather and matmul_all_gather_gradients have it)",
        ),
    ],
)
def test_an_explanation_refuses_them(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        plan.explain("matmul_all_reduce", **SHAPE | given)


def test_an_operator_without_options_says_so() -> None:
    with pytest.raises(
        ValueError,
        match=r"norm=true: matmul_reduce_scatter has no such option \(matmul_all_reduce has it\); it has no ",
    ):
        option_from_text("matmul_reduce_scatter", "norm=true")


def test_a_problem_takes_what_texts_say() -> None:
    sizes: dict[str, Any] = {"m": 16, "n": 16, "k": 16, "ranks": 2}
    for text, eps in (("no", None), ("yes", 1e-6)):
        p: Any = described("matmul_all_reduce", **sizes, norm=option_from_text("matmul_all_reduce", f"norm={text}")[1])
        assert (p.eps, p.residual) == (eps, False)
