"""Options of layers, which ranks compare in addition to the layers' calls.

A layer may use options that its operators do not see: a rotary table, a mask, an activation, the eps of a norm. So a layer
records these options at the beginning of its forward, and the group's next call compares them:

    on CPU    in the rendezvous of that call (`weft.runtime.meeting`)
    on GPUs   in an exchange between CPUs at the first call of a shape, and later with the digests of calls (`weft.symm.calls`)

There are two records: one for layers whose forward needs all ranks, and one for other layers, such as norms, which a single
rank may call alone. If a record is empty on a rank, this rank's record is not compared: the rank may run a compiled graph,
which records no options.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from weft import _core
from weft.words import by_rank

_FACTOR, _COUNT_BITS, _DIGEST_BITS = 0x9E3779B97F4A7C15, 16, 48
_TOLD_AT_ONCE = 16  # most texts in a message, each of at most _TEXT_BYTES
_TEXT_BYTES = 1024


class Noted(NamedTuple):
    """The layer options that ranks compare with a call.

    records: two 64-bit hashes: of the options of layers whose forward needs all ranks, and of the options of other layers.
        A hash is 0 if no such layer was called.
    texts: the options as text, for errors.
    """

    records: tuple[int, int]
    texts: tuple[str, ...]


NOTHING = Noted((0, 0), ())


class Layers:
    """The options of layers whose forward has begun on this rank since the group's last call.

    counts: the record of the group's calls (`GroupCalls`). Its field `has_layers` is True while this object has options
        that no call has compared yet.
    """

    def __init__(self, counts: _core.CallCounts) -> None:
        self._counts = weakref.proxy(counts)
        self._collective: dict[
            str, int
        ] = {}  # fingerprints by text: ranks may call a layer a different number of times
        self._others: dict[str, int] = {}

    def note(self, text: str, fingerprint: int, is_collective: bool) -> None:
        """Record the options of a layer whose forward begins.

        text: the options.
        fingerprint: a 64-bit hash of the text.
        is_collective: True if the forward needs all ranks.
        """
        (self._collective if is_collective else self._others)[text] = fingerprint
        self._counts.has_layers = True

    def take(self) -> Noted:
        """Return the options that were recorded since the last call, and forget them."""
        if not self._collective and not self._others:
            return NOTHING
        taken, self._collective, self._others = (self._collective, self._others), {}, {}
        self._counts.has_layers = False
        return Noted((_joined(taken[0]), _joined(taken[1])), (*taken[0], *taken[1]))


def _joined(noted: dict[str, int]) -> int:
    joined = 0
    for fingerprint in noted.values():
        joined = (joined * _FACTOR + fingerprint) % 2**64
    return joined


def differ(records: Sequence[tuple[int, ...]]) -> bool:
    """True if any two ranks have recorded different options. records: `Noted.records` of each rank. Empty records are ignored."""
    return any(len({one for one in of_ranks if one}) > 1 for of_ranks in zip(*records, strict=True))


def difference(texts: Sequence[Sequence[str]]) -> str:
    """Return an error text that lists, for each rank, the layer options that it has recorded and some other rank has not.

    texts: for each rank, the recorded options as texts (`Noted.texts`); a rank with an empty record is not compared.
    """
    own = [[one for one in some if any(one not in others for others in texts if others)] for some in texts]
    return f"ranks call layers with different options: {by_rank((rank, '; '.join(some)) for rank, some in enumerate(own) if some)}"


def words_differ(mine: Sequence[int], theirs: Sequence[int]) -> bool:
    """True if this rank and a peer have called layers with different options.

    mine, theirs: the digests of the options of all layers so far, on this rank and on the peer (results of
        `MadeLayers.add`).
    """
    mask = (1 << _COUNT_BITS) - 1
    return any(a != b and a & mask == b & mask for a, b in zip(mine, theirs, strict=True))


class MadeLayers:
    """The options, as texts, of all layers that this rank has called, and the texts that peers have sent.

    Ranks compare digests of the options of all calls so far: one for layers whose forward needs all ranks, and one for
    other layers, as in `Noted.records`. A digest is a 64-bit word: 48 bits of a hash, and 16 bits that count the calls with
    options. Only words with equal counts are compared.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []  # distinct
        self._known: set[str] = set()
        self._told = 0
        self._of_peers: dict[int, list[str]] = {}

    def add(self, words: tuple[int, int], noted: Noted) -> tuple[int, int]:
        """Add the options of a call. Return the two digests of the options up to this call.

        words: the two digests of the options up to the previous call.
        noted: the options of this call.
        """
        for text in noted.texts:
            if text not in self._known:
                self._known.add(text)
                self._texts.append(text)
        first, second = (_added(word, record) for word, record in zip(words, noted.records, strict=True))
        return first, second

    def news(self) -> list[bytes]:
        """Return texts that have not been sent to peers yet, at most `_TOLD_AT_ONCE`."""
        texts = self._texts[self._told : self._told + _TOLD_AT_ONCE]
        self._told += len(texts)
        return [text.encode()[:_TEXT_BYTES] for text in texts]

    def heard(self, rank: int, texts: Sequence[bytes]) -> None:
        """Record the option texts of layers that the peer `rank` has called."""
        self._of_peers.setdefault(rank, []).extend(text.decode(errors="replace") for text in texts)

    def difference(self, rank: int) -> str:
        """Return an error text with the layers and options that this rank has recorded and `rank` has not, and the
        reverse.
        """
        here, there = list(self._texts), self._of_peers.get(rank, [])
        mine, theirs = ([one for one in some if one not in others] for some, others in ((here, there), (there, here)))
        if not mine and not theirs:
            return "the same layers in a different order"
        return f"only here {_some(mine)}, and only on rank {rank} {_some(theirs)}"


def _added(word: int, record: int) -> int:
    if not record:
        return word
    count, digest = word + 1 & (1 << _COUNT_BITS) - 1, word >> _COUNT_BITS
    digest = ((digest ^ record) * _FACTOR >> 8) & (1 << _DIGEST_BITS) - 1
    return digest << _COUNT_BITS | count


def _some(texts: Sequence[str]) -> str:
    return "; ".join(texts[:2]) + "; ..." * (len(texts) > 2) if texts else "nothing"
