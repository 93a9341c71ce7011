"""Words in sentences: numbers of things, and what kind of thing something is."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """ "1 rank", "2 ranks". plural: where it is not the noun and an "s"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def kind(thing: object) -> str:
    """ "a list", "an int": of what type it is."""
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
