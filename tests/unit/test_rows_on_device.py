"""The memory for distinct rows of embeddings, with streams and tensors that only record their use."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from weft.nn.deduplicated_embedding import _RowsOnDevice


class Stream:
    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class OnGpu:
    """A tensor [rows, 4] that claims to be on a GPU."""

    device, dtype = torch.device("cuda"), torch.float32

    def __init__(self, rows: int) -> None:
        self.shape, self.nbytes, self.streams = (rows, 4), 16 * rows, list[Stream]()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, place: slice) -> Any:
        return OnGpu(min(len(self), place.stop))

    def new_empty(self, rows: int, columns: int) -> OnGpu:
        return OnGpu(rows)

    def copy_(self, other: OnGpu) -> None:
        assert len(self) == len(other)

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream)


def test_streams_share_one_memory_one_after_the_other() -> None:
    memory: Any = _RowsOnDevice()
    first, second = Stream(), Stream()
    assert memory.nbytes == 0
    for here, waited in ((first, []), (first, []), (second, [first]), (first, [second])):
        here.waited.clear()
        with mock.patch.object(torch.cuda, "current_stream", return_value=here):
            assert len(memory.of(OnGpu(100), 128)) == 128
        assert here.waited == waited
        assert memory.nbytes == 16 * 128
    assert memory._memory.streams == [second, first]


def test_more_rows_take_larger_memory() -> None:
    memory: Any = _RowsOnDevice()
    with mock.patch.object(torch.cuda, "current_stream", return_value=None):
        for rows, rounded, kept in ((3, 4, 4), (70, 128, 128), (3, 4, 128)):
            assert len(memory.of(OnGpu(rows), rounded)) == rounded
            assert memory.nbytes == 16 * kept
