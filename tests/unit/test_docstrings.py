"""Public names of `weft` are documented: a function's docstring describes each argument, the results and the errors."""

import inspect

import pytest

import weft

PUBLIC = [name for name in weft.__all__ if callable(getattr(weft, name))]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    value = getattr(weft, name)
    text = value.__doc__ or ""
    assert text, name
    assert not text.startswith(f"{name}("), "a dataclass without a text of its own gets its signature"
    if inspect.isfunction(value):
        missing = [argument for argument in inspect.signature(value).parameters if argument not in text]
        assert not missing
        assert "Raises" in text
        if value.__module__.startswith("weft.ops"):
            assert "Returns" in text
            assert "Memory: " in text
