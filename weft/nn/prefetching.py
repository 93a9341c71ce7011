"""Prefetching: distribute the ids of a batch while other work runs, before the call of the module.

`prefetched` prefetches the batches of a training loop. `Prefetched` is one batch of one module.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from weft.embedding.jagged import JaggedInput
from weft.errors import WeftError
from weft.nn.boxed_ids import BoxedBatch
from weft.nn.input_dist import InputDist
from weft.runtime.opaque import opaque
from weft.symm.calls import calls_of
from weft.words import kind

Batch = TypeVar("Batch")


class Prefetched:
    """A batch whose ids are being distributed to the ranks that own the tables. Every rank must construct a
    `Prefetched`, and call `arrived`.

    On GPUs a separate stream exchanges the numbers of ids, after the work that is already enqueued. `arrived` waits for
    this stream, but not for work that was enqueued later, and then sends the ids.

    features: the features of this rank's samples. `arrived` raises errors about a bad batch.
    refusal: an error that the caller has found in the batch. `arrived` raises this error on all ranks.
    """

    def __init__(self, distribution: InputDist, features: Any, refusal: Exception | None = None) -> None:
        self.features, self._distribution = features, distribution
        self._side = None
        calls_of(distribution.group).prefetches = True
        if distribution.device.type == "cuda":
            self._side = _side_stream(distribution.device)
            self._side.wait_stream(torch.cuda.current_stream(distribution.device))
        with self._aside():
            self._begun = distribution.begin(features, refusal)

    def arrived(self, before_ids_leave: Callable[[], None]) -> tuple[JaggedInput, tuple[int, ...]]:
        """Send the ids, and return the features of this rank's tables and every rank's batch size, as `InputDist.__call__`
        does. The tensors are valid on the current stream.

        before_ids_leave: a function that is called before the ids are sent, for checks. If it raises, it raises on all ranks.
        """
        with self._aside():
            if not isinstance(self._begun, BoxedBatch):
                before_ids_leave()
            sent = self._distribution.send(self._begun)
        if self._side is not None:
            here = torch.cuda.current_stream(self._distribution.device)
            here.wait_stream(self._side)
            for tensor in sent.tensors:
                tensor.record_stream(here)
        return self._distribution.arrive(sent)

    def discard(self) -> None:
        """Drop the batch, because no call of the module will use it. First wait until the exchange of numbers of ids no longer
        reads the batch.
        """
        if self._side is not None:
            torch.cuda.current_stream(self._distribution.device).wait_stream(self._side)
        if isinstance(self._begun, BoxedBatch):
            return
        with contextlib.suppress(WeftError):  # the group has failed, which the next call reports
            self._begun.headers.wait()

    def _aside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def prefetched(batches: Iterable[Batch], features_of: Mapping[nn.Module, Callable[[Batch], Any]]) -> Iterator[Batch]:
    """Yield `batches`, and distribute the ids of each batch while the loop's body runs with the batch before it. One
    run of the body is called a step.

        for batch in weft.nn.prefetched(loader, {ebc: lambda batch: batch.features}):
            loss(model(batch)).backward()

    The losses are the same as in a loop over `batches`. The step must call each module once, with the features of its
    batch. After that call, the next batch is read, and the distribution of its ids begins
    (`ShardedEmbeddingBagCollection.prefetch`).

    - The last step distributes nothing. All ranks need the same number of batches: if one rank has fewer, the others
      raise an error, after the `deadline_s` of the module. On CPU the error says that a rank may have run out of batches.
    - If reading a batch raises, the error is raised after the steps of all earlier batches.
    - If no rank calls a module in a step, the ids that were prefetched for this step are discarded.
    - After a break, or an exception that leaves the loop, the prefetched batch is discarded, and modules can be called
      with any batch. If `batches` is an iterator, the discarded batch is lost. An exception that the step itself
      catches loses no batch.
    - To call a module with another batch inside the loop, call its `cancel_prefetch()` first, on every rank.

    features_of: for each module, a function that returns the features of a batch. The step must pass the same object to
        the module.

    Raises `TypeError` if a module has no `prefetch`, or another argument has the wrong type.
    """
    wrong = ""
    if not isinstance(features_of, Mapping):
        wrong = f"features_of is {kind(features_of)}"
    elif bad := [of for of in features_of.values() if not callable(of)]:
        wrong = f"a value of features_of is {kind(bad[0])}"
    if wrong:
        raise TypeError(f"{wrong}: pass a dict {{module: function of a batch that returns the module's features}}")
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches is {kind(batches)}: pass a DataLoader or another iterable of batches")
    for module in features_of:
        if not hasattr(module, "prefetch"):
            raise TypeError(f"{kind(module)} does not prefetch: pass a ShardedEmbeddingBagCollection")
    return _steps(batches, dict(features_of))


def _steps(batches: Iterable[Batch], features_of: Mapping[Any, Callable[[Batch], Any]]) -> Iterator[Batch]:
    iterator, begun = iter(batches), set[Any]()
    ahead: list[tuple[Any, Exception | None]] = []  # the next batch, or the error of reading it, once it has been read

    def look() -> tuple[Any, Exception | None]:
        if not ahead:
            try:
                ahead.append((next(iterator), None))
            except Exception as error:
                ahead.append((None, error))
        return ahead[0]

    @opaque
    def begin(module: Any, inputs: Any, output: Any) -> None:
        batch, error = look()
        if error is None and module not in begun:
            begun.add(module)
            module.prefetch(features_of[module](batch))

    handles = [module.register_forward_hook(begin) for module in features_of]
    try:
        while True:
            batch, error = look()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            ahead.clear()
            for module in features_of:
                if module not in begun:  # the last step did not call it
                    module.cancel_prefetch()
            begun.clear()
            yield batch
    finally:
        for handle in handles:
            handle.remove()
        for module in features_of:
            module.cancel_prefetch()
