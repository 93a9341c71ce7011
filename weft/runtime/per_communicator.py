"""Registries of objects that exist once for each communicator, such as its rendezvous."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from weft.symm import Communicator

T = TypeVar("T")


def of_communicator(known: dict[Communicator, T], comm: Communicator, make: Callable[[Communicator], T]) -> T:
    """Return the entry of `comm` in `known`. If there is none, make it.

    A new entry also removes the entries of closed communicators. Otherwise these would never be freed, because an entry
    may refer to its communicator.
    """
    found = known.get(comm)
    if found is None:
        for closed in [one for one in known if one.closed]:
            del known[closed]
        found = known[comm] = make(comm)
    return found
