"""The kind of a span: computing, sending or waiting. It determines the span's colour and category.

The kind follows from the span's name. Names of waits begin with "wait". Copies and collectives count as sending. A
kernel that pools, and stores the results in a peer's memory, counts as computing.
"""

from __future__ import annotations

from typing import Literal, get_args

from weft.schedule.steps import CollectiveOp
from weft.timeline import Span

Kind = Literal["compute", "send", "wait"]
_SENDING = ("put", "copy", "store", "send", *get_args(CollectiveOp))


def kind_of(span: Span) -> Kind:
    if span.name.startswith("wait"):
        return "wait"
    return "send" if span.name.startswith(_SENDING) else "compute"
