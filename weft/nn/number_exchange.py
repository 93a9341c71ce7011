"""The exchange of a batch's numbers of ids between GPUs of one host, by a kernel with a deadline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from weft import symm


class NumberExchange:
    """The exchange of a message from every rank to every rank, by `weft.runtime.cuda.headers`. All ranks must make every call.

    words: the number of int64 words of each message to rank 0, rank 1, and so on.
    deadline_s: the longest wait for a peer, in seconds. None: the process group's timeout, because ranks may read batches at
        different speeds.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, words: Sequence[int], deadline_s: float | None
    ) -> None:
        self.group, self.device, self.words, self.deadline_s = group, device, list(words), deadline_s
        self._may_be_ready = device.type == "cuda" and group.size() > 1

    @property
    def known(self) -> Any:
        """The exchange of this group, or None. All ranks construct it in the same call, which may be a call of any module."""
        if not self._may_be_ready:
            return None
        from weft.runtime.cuda.headers import known_headers

        return known_headers(self.group)

    @property
    def is_ready(self) -> bool:
        """False until `arrived` has been called once for this group. Until then NCCL must exchange the messages."""
        return self.known is not None

    @cached_property
    def _patience_s(self) -> float:
        if self.deadline_s is not None:
            return self.deadline_s
        timeout: timedelta = self.group._get_backend(self.device).options._timeout
        return timeout.total_seconds()

    @cached_property
    def _starts(self) -> torch.Tensor:
        """The index of the first word of each rank's message, if all messages are concatenated, and the end of the last."""
        return torch.tensor([0, *accumulate(self.words)], device=self.device)

    def run(self, send: torch.Tensor, into: torch.Tensor) -> None:
        """Enqueue the exchange on the current stream.

        send: int64, the messages to all ranks, one after the other. into: int64, receives the messages from all ranks.
        """
        self.known.run(send, self._starts, max(self.words), into, self._patience_s)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Order the work that is enqueued in this context after the last exchange, and before the next exchange of any stream."""
        known = self.known
        known.check()
        known.follow_last()
        yield
        known.note_last()

    def arrived(self) -> None:
        """Raise `DeadlineError` if messages have not arrived. Call this method when the CPU has waited for an exchange, by this
        object or by NCCL.
        """
        known = self.known
        if known is not None:
            known.check()
        elif self._may_be_ready and (comm := symm.communicator(self.group, self.device)).all_mapped:
            from weft.runtime.cuda.headers import headers_on

            # Not before the first batch has arrived: ranks may begin to train at different times, and the set-up of an exchange
            # has a shorter deadline than NCCL.
            headers_on(comm)
