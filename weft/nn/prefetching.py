"""Prefetching: distribute the ids of a batch while other work runs, before the call of the module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from weft.embedding.jagged import JaggedInput
from weft.nn.input_dist import InputDist


class Prefetched:
    """A batch whose ids are being distributed to the ranks that own the tables. Every rank must make a `Prefetched`,
    and call `arrived`.

    On GPUs a separate stream exchanges the numbers of ids, after the work that is already enqueued. The ids are sent
    when the module is called with the batch. In that call the CPU waits only for the separate stream, not for work
    enqueued since.

    features: a batch, as for `InputDist`. `arrived` raises errors about a bad batch.
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
        """Send the ids. Return the results of a call of `InputDist`, valid in the order of the current stream."""
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
