"""The memory that a module with embedding tables uses on this rank, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weft.embedding.forward_call import COLLECTED
from weft.embedding.jagged import JaggedInput
from weft.embedding.tables import EmbeddingSharding, bytes_text
from weft.embedding.update import FusedUpdate

_SORT_BYTES = {"cpu": 20, "cuda": 60}
"""Bytes that backward needs for each id to sort the ids (docs/training_embeddings.md)."""


@dataclass(frozen=True)
class EmbeddingMemory:
    """The memory of a module on one rank, in bytes.

    tables, states: the bytes of each table of this rank, and of its optimizer states, by table name.
    gradients: the bytes of `.grad`, for tables without an optimizer.
    buffers: the symmetric memory of results, which modules with equal arguments share. With `dedup=True` on GPUs, the memory
        from which a call pools its distinct rows.
    in_flight: the bytes of ids, offsets and weights of calls whose backward has not run, of data that `accumulate()`
        keeps, and of prefetched batches. On GPUs it includes the last call's input, which is needed to report bad ids.
        Without pooling, it is the bytes of ids and of their routing.
    workspace: an estimate of the temporary memory of the last call's backward. `total` does not include it. On a GPU, all
        modules together keep up to 250 MB of it, for sorts of up to four million ids.
    """

    tables: dict[str, int]
    states: dict[str, int]
    gradients: int
    buffers: int
    in_flight: int
    workspace: int

    @property
    def total(self) -> int:
        """The bytes that are in use now, without `workspace`."""
        return sum(self.tables.values()) + sum(self.states.values()) + self.gradients + self.buffers + self.in_flight

    def __str__(self) -> str:
        lines = [f"{'table':<24} {'weight':>10} {'states':>10}"]
        lines += [f"{n:<24} {bytes_text(b):>10} {bytes_text(self.states[n]):>10}" for n, b in self.tables.items()]
        for name in ("gradients", "buffers", "in_flight", "total", "workspace"):
            lines.append(f"{name:<24} {bytes_text(getattr(self, name)):>10}")
        return "\n".join(lines)


class BatchesInFlight:
    """A counter of the memory of inputs that backward still needs, for `EmbeddingMemory.in_flight`. An input counts until
    autograd frees it.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = 64  # when more storages are recorded, drop freed storages
        self.last: tuple[int, int] = 0, 0
        """The numbers of ids and of samples in the last call with gradients."""

    def note(self, jagged: JaggedInput, blocks: int) -> None:
        """Record the input of a call with gradients.

        blocks: the number of features in the input.
        """
        self.keep([jagged.values, jagged.offsets, jagged.weights])
        self.last = jagged.values.numel(), (jagged.offsets.numel() - 1) // max(1, blocks)

    def keep(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Count the bytes of these tensors until their storage is freed."""
        if len(self._kept) > self._most:
            self._kept = {address: one for address, one in self._kept.items() if not one[0].expired()}
            self._most = max(64, 2 * len(self._kept))
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                self._kept[ref.cdata] = ref, storage.nbytes()

    @property
    def nbytes(self) -> int:
        """The bytes of inputs that are still referenced. Each storage counts once."""
        return sum(nbytes for ref, nbytes in self._kept.values() if not ref.expired())

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchesInFlight:
        return BatchesInFlight()


def memory_of(
    weights: dict[str, torch.Tensor], update: FusedUpdate | None, in_flight: int, buffers: Sequence[int], workspace: int
) -> EmbeddingMemory:
    """Return the memory of a module. in_flight, workspace: as in `EmbeddingMemory`. buffers: the bytes of each result
    buffer in symmetric memory.
    """
    grads = [weight.grad for weight in weights.values() if weight.grad is not None]
    states = [sum(state.nbytes for state in one.values()) for one in update.states] if update else []
    states += [0] * (len(weights) - len(states))
    return EmbeddingMemory(
        tables={name: weight.nbytes for name, weight in weights.items()},
        states=dict(zip(weights, states, strict=True)),
        gradients=sum(_nbytes(grad) for grad in grads),
        buffers=sum(buffers),
        in_flight=in_flight,
        workspace=workspace,
    )


def collected_bytes(update: FusedUpdate | None) -> int:
    """Return the bytes of the gradients of pooled vectors that `accumulate()` keeps."""
    return sum(one.received.nbytes for one in COLLECTED.get(id(update.step), [])) if update else 0


def pooled_workspace(batches: BatchesInFlight, sharding: EmbeddingSharding, rank: int, device: torch.device) -> int:
    """Return the bytes of workspace that backward of the last pooled call needs: gradients to send, received gradients, and
    sorting.
    """
    ids, samples = batches.last
    columns = sum(slot.dim for slot in sharding.local_slots(rank))
    elements = samples * columns + samples * sharding.total_dim // sharding.world_size
    return elements * sharding.dtype.itemsize + ids * _SORT_BYTES.get(device.type, 0)


def rows_workspace(sent: int, received: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the workspace of backward of a call without pooling. sent, received: the numbers of ids that this rank sent
    and received.
    """
    return (sent + received) * columns * dtype.itemsize + received * _SORT_BYTES.get(device.type, 0)


def _nbytes(grad: torch.Tensor) -> int:
    return grad._values().nbytes + grad._indices().nbytes if grad.is_sparse else grad.nbytes
