"""Registries of objects that exist once for each communicator, such as its rendezvous."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from weft.symm import Communicator

T = TypeVar("T")


def of_communicator(known: dict[Communicator, T], comm: Communicator, make: Callable[[Communicator], T]) -> T:
    """Return the entry of `comm` in `known`. If there is none, make it, and remove the entries of closed communicators."""
    found = known.get(comm)
    if found is None:
        for closed in [one for one in known if one.closed]:
            del known[closed]
        found = known[comm] = make(comm)
    return found
