"""The methods of embedding modules that distribute the ids of a batch before its call."""

from __future__ import annotations

from typing import Any, cast

import torch

from weft.embedding.check import no_tables_on
from weft.embedding.jagged import JaggedInput
from weft.nn.id_bound import require_bound, totals_of_ranks
from weft.nn.input_dist import InputDist
from weft.nn.prefetching import Prefetched
from weft.nn.trained_tables import TrainedTables
from weft.operator.together import together


class PrefetchingTables(TrainedTables):
    """The base class of modules that `weft.nn.prefetched` pipelines.

    input: the option of `ShardedEmbeddingBagCollection`. device: the device of the tables.
    """

    input: str
    device: torch.device
    _input_dist: InputDist
    _prefetched: Prefetched | None
    _max_ids: int | None

    def prefetch(self, features: Any) -> None:
        """Begin to distribute the ids of the next batch while earlier work runs. Every rank must call `prefetch`, and
        pass its prefetched batch to its next call of the module. In a loop, use `weft.nn.prefetched`.

            module.prefetch(batches[0])
            for batch, following in zip(batches, batches[1:]):
                pooled = module(batch)
                module.prefetch(following)
                loss(pooled).backward()

        On GPUs a separate stream exchanges the numbers of ids, after the work that is already enqueued. At the next
        call of the module, the CPU waits only for this exchange, and then sends the ids. It does not wait for work that
        you enqueue after `prefetch`, such as backward, so this work overlaps with the sending. Do not change the
        tensors of the batch before the call. Errors about bad input are raised by the call. With row-wise or
        data-parallel tables, `prefetch` waits for the GPU.

        If the module was made with `max_ids` and `batch_size`, the separate stream also sends the ids, and the CPU waits for
        nothing. `prefetch` then raises the errors that the CPU can find.

        features: the object that you pass to the next call.

        Raises `ValueError` with input="global_batch", or if another prefetched batch has not been passed to the module
        yet.
        """
        with together(f"prefetch of {self._name}", self.group, self._exchange_device, self.deadline_s):
            if self.input != "local_batch":
                raise ValueError(
                    f"prefetch has no effect with input={self.input!r}, because ranks exchange no ids: "
                    "remove the call to prefetch"
                )
            if self.device.type == "meta":
                raise ValueError(no_tables_on(self.device))
            if self._prefetched is not None:
                raise ValueError(
                    "prefetch: another batch is already prefetched: first call the module with that batch, or call "
                    "cancel_prefetch()"
                )
            self._begin_ahead(features, None)

    def _begin_ahead(self, features: Any, refusal: Exception | None) -> None:
        """Begin to send the ids of a batch to the ranks of their tables, for `prefetch`.

        refusal: an error that the caller has found in the batch. The next call of the module raises this error on all
            ranks.
        """
        self._prefetched = Prefetched(self._input_dist, features, refusal)

    def cancel_prefetch(self) -> None:
        """Discard the prefetched batch, if there is one. If one rank makes this call, all ranks must make this call.
        Ranks do not wait for each other.
        """
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            prefetched.discard()

    def _taken(self, features: Any) -> tuple[JaggedInput, tuple[int, ...]]:
        """Finish the distribution of ids of the prefetched batch. Return (the features of this rank's tables for all samples,
        the batch sizes of all ranks). All ranks must make this call.
        """
        prefetched = cast(Prefetched, self._prefetched)
        self._require_prefetched(features)
        self._prefetched = None
        return prefetched.arrived(lambda: self._require_bound(features))

    def _require_prefetched(self, features: Any) -> None:
        """Raise `ValueError` unless `features` is the prefetched batch."""
        if features is not cast(Prefetched, self._prefetched).features:
            raise ValueError(
                "the module is called with a batch other than the prefetched batch: pass the same object to prefetch and to the "
                "next call, or call cancel_prefetch()"
            )

    def _require_bound(self, features: Any) -> None:
        """Raise `RefusedError` on every rank if any rank would receive more than `max_ids` ids. Without `max_ids`, do
        nothing. All ranks must make this call.
        """
        if (bound := self._max_ids) is not None and not self._input_dist.needs_no_cpu:
            of_ranks = self._input_dist.features_of_rank
            totals = totals_of_ranks(features, of_ranks, self.group, self._exchange_device(), self.deadline_s)
            require_bound(totals, bound, "")
