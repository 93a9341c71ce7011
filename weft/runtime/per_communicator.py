"""Objects of which a communicator has one, such as its rendezvous."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from weft.symm import Communicator

T = TypeVar("T")


def of_communicator(known: dict[Communicator, T], comm: Communicator, make: Callable[[Communicator], T]) -> T:
    """Return the entry of `comm`, and make it if there is none.

    When an entry is made, drop the entries of closed communicators. Nothing else would free them, because an entry may
    refer to its communicator.
    """
    found = known.get(comm)
    if found is None:
        for closed in [one for one in known if one.closed]:
            del known[closed]
        found = known[comm] = make(comm)
    return found
