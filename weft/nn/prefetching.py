"""The distribution of a batch's ids before the call of the batch, while other work runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from weft.embedding.jagged import JaggedInput
from weft.nn.input_dist import InputDist


class Prefetched:
    """A batch on its way to the ranks that own its tables. Every rank makes and ends it.

    On GPUs this happens on a separate stream. The numbers of ids are sent after the work that is enqueued by then. The ids follow
    at the call of the batch. There the host waits only for that stream, not for the work enqueued since.

    features: a batch, as for `InputDist`. Errors are raised by `arrived`.
    """

    def __init__(self, distribution: InputDist, features: Any) -> None:
        self.features, self._distribution = features, distribution
        self._side = None
        if distribution.device.type == "cuda":
            self._side = _side_stream(distribution.device)
            self._side.wait_stream(torch.cuda.current_stream(distribution.device))
        with self._aside():
            self._begun = distribution.begin(features)

    def arrived(self, before_ids_leave: Callable[[], None]) -> tuple[JaggedInput, tuple[int, ...]]:
        """Send the ids, and return the results of `InputDist`'s call, valid in the order of the current stream."""
        with self._aside():
            before_ids_leave()
            sent = self._distribution.send(self._begun)
        if self._side is not None:
            here = torch.cuda.current_stream(self._distribution.device)
            here.wait_stream(self._side)
            for tensor in sent.tensors:
                tensor.record_stream(here)
        return self._distribution.arrive(sent)

    def _aside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
