"""The kind of a span, for colours and categories: computing, sending or waiting.

Executors name their spans. A wait's name begins with "wait". A copy or a collective only sends. A span that pools and stores into
a peer's memory counts as computing, and its bytes leave during the span.
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
