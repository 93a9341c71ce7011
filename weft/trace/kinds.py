"""The kind of a span, for colours and categories: computing, sending or waiting.

Executors name their spans. A wait's name begins with "wait"; a copy or a collective moves bytes and computes nothing. A span that
pools and stores into a peer at once is computing, and its bytes leave meanwhile.
"""

from __future__ import annotations

from typing import Literal

from weft.timeline import Span

Kind = Literal["compute", "send", "wait"]
_SENDING = ("put", "copy", "store", "send", "all_to_all", "all_gather", "reduce_scatter", "all_reduce")


def kind_of(span: Span) -> Kind:
    if span.name.startswith("wait"):
        return "wait"
    return "send" if span.name.startswith(_SENDING) else "compute"
