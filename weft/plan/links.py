"""Measured links between hosts (`weft.sim.between_hosts.Measured`), saved for later processes on the same hosts.

`weft.operator.know_links` measures them. A file is valid only for the same ranks on the same hosts, and for the same
versions of packages and driver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from weft.plan import saved, store
from weft.plan.machine import versions
from weft.sim.between_hosts import LinkFound, Measured

_WHAT = "links"  # the first word of the file name
_AGAIN = "the first call of the next group on these hosts measures again"


def save(found: Measured) -> None:
    """Save `found`, if the cache folder is writable. Call this function on one rank only."""
    content = {
        **asdict(found), "machine": _machine(found.hosts, found.library), "world_size": len(found.hosts), "versions": versions(),
        "date": store.today(),
        "links": [(*link.hosts, link.bytes_per_us, link.round_trip_us) for link in found.links],
    }  # fmt: skip
    store.keep(store.path_of(_WHAT, content["machine"], content["world_size"]), content)


def find(hosts: Sequence[str], library: str) -> Measured | None:
    """Return the saved links for ranks on these hosts that communicate by `library`; None if no links are saved.

    Raise `ValueError` if the links were measured with other versions of packages or driver, and `UnreadableError` if
    the file is broken.
    """
    return saved.load(_read, _WHAT, _machine(hosts, library), len(hosts), _HOLDS, _AGAIN)


def _read(hosts: tuple[str, ...], links: tuple[tuple[str, str, float, float], ...], **content: Any) -> Measured:
    found = {name: content[name] for name in (*_NUMBERS, "library")}
    return Measured(hosts, tuple(LinkFound((one, other), rate, us) for one, other, rate, us in links), **found)


def _machine(hosts: Sequence[str], library: str) -> str:
    return f"{name_of(hosts)} {library}"


def name_of(hosts: Sequence[str]) -> str:
    """Return a short name for this list of hosts, for use in a file name."""
    return f"hosts {hashlib.sha256(repr(list(hosts)).encode()).hexdigest()[:16]}"


_NUMBERS = ("exchange_bytes_per_us", "copy_bytes_per_us", "fresh_bytes_per_us")
_HOLDS: dict[str, saved.Check] = {
    "machine": saved.is_text,
    "world_size": saved.is_whole,
    "date": saved.is_text,
    "versions": saved.are_versions,
    "library": saved.is_text,
    "hosts": lambda found: isinstance(found, list) and all(map(saved.is_text, found)),
    "links": saved.rows_of(saved.is_text, saved.is_text, store.is_positive, store.is_positive),
    **dict.fromkeys(_NUMBERS, saved.none_or(store.is_positive)),
}
"""{field of a file with measured links: function that returns True for a valid JSON value}"""
