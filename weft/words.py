"""Words in sentences: numbers of things, and what kind of thing something is."""

from __future__ import annotations

from collections.abc import Iterable


def counted(count: int, noun: str, plural: str = "") -> str:
    """ "1 rank", "2 ranks". plural: where it is not the noun and an "s"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def joined(*parts: str) -> str:
    """Return those parts of a sentence that are not empty, with commas between."""
    return ", ".join(part for part in parts if part)


def by_rank(said: Iterable[tuple[int, str]]) -> str:
    """What each rank says; what several say alike, once: "ranks 0, 2: this; rank 1: that"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in said:
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()
    )


def kind(thing: object) -> str:
    """ "a list", "an int": of what type it is."""
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
