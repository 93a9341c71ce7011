"""Comparisons across ranks at every call. (`weft.operator.together` compares the first call of a shape.)

    ranks                         compare
    CPU                           tables of row counts, before data is sent (`weft.runtime.meeting`)
    GPU                           a hash of all calls so far, called the digest, in a background thread (`weft.symm.calls`)
    any, WEFT_CHECK_CALLS=1       also tables of row counts, and the values of tensors that must be equal on all ranks,
                                  such as a bias. To read these values, the CPU waits for the GPU

If a call sends different numbers of rows to different ranks, each rank has two tables of row counts. The first table
has the number of rows that this rank sends to each peer, the second the number that it expects from each peer. Tables
agree if every rank sends each peer as many rows as the peer expects.

To compare tables cheaply, each rank contributes only one 64-bit number. This number is a weighted sum over the table of
sent rows, minus a weighted sum over the table of expected rows. All ranks use the same random weight for the same
sender, receiver and expert. If the tables agree, the numbers of all ranks add up to 0 (mod 2^64). Otherwise the total
is 0 only with a probability of 2^-64. If the total is not 0, ranks exchange the tables to find the difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch

from weft import _core
from weft.errors import RefusedError
from weft.operator.agreement import agreement_on
from weft.operator.spec import Operator
from weft.runtime.meeting import Topic
from weft.runtime.unfused.begun import Begun
from weft.runtime.within_host import NO_WORK
from weft.symm import Communicator
from weft.words import by_rank, counted

_MASK = (1 << 64) - 1
_BACKWARD = 0x5851F42D4C957F2D  # makes the fingerprints of forward and backward differ


class AcrossRanks:
    """The comparison of all calls of one shape with the calls of other ranks.

    what: the operator and shape, for error texts.
    said: the full description of the call, which ranks compared at the first call.
    fingerprint: the 64-bit number that represents the call in the digest, the hash of all calls so far (default: the
        hash of `said`).

    Attributes: `topic`, the description that CPU ranks compare.
    """

    def __init__(
        self, op: Operator[Any], comm: Communicator, what: str, said: str, fingerprint: int | None = None
    ) -> None:
        self._op, self._comm, self.what = op, comm, what
        self._agreement = agreement_on(comm.device)
        self._made = self._agreement.digest(comm.group)
        self.fingerprint = _number(f"{op.name} {said}") if fingerprint is None else fingerprint
        self.topic = Topic(f"counts of {what}", said)
        self._compares_all = comm.checks_calls
        self._compares_pairs = type(op).pairs is not Operator.pairs and (self._agreement.meets or self._compares_all)
        self._compares_values = type(op).equal is not Operator.equal and self._compares_all

    def begin(
        self, call: Any, capturing: bool, deadline_s: float | None, begun: Begun | None = None
    ) -> list[int] | None:
        """Compare this rank's call with the calls of its peers (see the table at the top of this file).

        Raise `RefusedError` on every rank if the tables of counts do not agree, or if values that must be equal differ.
        While a CUDA graph is captured (`capturing`), only add the call to the digest.

        begun: this call, if it has a first part that needs no other rank (`weft.runtime.unfused.begun`); otherwise
            None. A CPU rank runs the first part while it waits for its peers.

        If CPU ranks have synchronised in this method, return the number that each rank reports about the first part of
        its call (`Begun.number`). For example, the number says if a message was too large to be sent.
        Otherwise return None.
        """
        self.note()
        numbers = None
        if self._compares_pairs and not capturing:
            numbers = self._compare_pairs(call, deadline_s, begun)
        if self._compares_values and not capturing:
            self._compare_values(call, deadline_s)
        return numbers if self._agreement.meets else None

    def note(self) -> None:
        if self._made is not None:
            self._made.note(self.fingerprint, self.what)

    def begin_backward(self) -> None:
        if self._made is not None:
            self._made.note(self.fingerprint ^ _BACKWARD, f"backward of {self.what}")

    def _compare_pairs(self, call: Any, deadline_s: float | None, begun: Begun | None) -> list[int]:
        """Compare the tables of counts (`Operator.pairs`) of all ranks. Raise `RefusedError` on every rank if they do
        not agree.

        Return the number that each rank reports about the first part of its call (`Begun.number`). Return zeros if
        `begun` is None.
        """
        comm, world = self._comm, self._comm.world_size
        pairs = self._op.pairs(call, world)
        assert pairs is not None
        sent, expected = [
            table if _is_plain(table) else table.to("cpu", torch.int64).contiguous().view(world, -1) for table in pairs
        ]
        of_sent, of_expected = table_weights(world, sent.shape[1], comm.rank)
        excess = (_sum(sent, of_sent) - _sum(expected, of_expected)) & _MASK
        number, meanwhile, cargo, collective = 0, NO_WORK, None, None
        if begun is not None:
            number, meanwhile, cargo, collective = begun.number, begun.alone(), begun.cargo, begun.collective
        found = self._agreement.exchange_numbers(
            comm, self.topic, (excess, number), deadline_s, meanwhile, cargo, collective, _tables_agree
        )
        if not _tables_agree(found):
            self.refuse_tables(sent, expected)
        return [number for _, number in found]

    def refuse_tables(self, sent: torch.Tensor, expected: torch.Tensor) -> NoReturn:
        """Raise `RefusedError`, because the tables of ranks do not agree. All ranks must make this call.

        sent, expected: the tables of this rank, [ranks, experts].
        """
        comm, world = self._comm, self._comm.world_size
        self._agreement.count_refusal(comm)
        tables = comm.all_gather((sent.tolist(), expected.tolist()), what=f"tables of {self.what}")
        for source in range(world):
            for target in range(world):
                one, other = tables[source][0][target], tables[target][1][source]
                if one != other:
                    raise RefusedError(
                        f"{self.what}: rank {source} sends {_rows(one)} to rank {target}, which expects "
                        f"{_rows(other)}: pass row counts that come from the same dispatch on all ranks"
                    )
        raise AssertionError("the checksums of equal tables differ")

    def _compare_values(self, call: Any, deadline_s: float | None) -> None:
        mine = {name: _digest(tensor) for name, tensor in self._op.equal(call).items()}
        if not mine:
            return
        every = self._comm.all_gather(mine, what=f"values in {self.what}", deadline_s=deadline_s)
        for name in mine:
            if len({one[name] for one in every}) > 1:
                digests = by_rank((rank, one[name].hex()) for rank, one in enumerate(every))
                raise RefusedError(
                    f"{self.what}: {name} must have the same values on all ranks, but they differ (digests: {digests}): "
                    "pass the same tensor on every rank"
                )


@lru_cache(maxsize=1024)
def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1024)
def number_of_family(operator: str, family: Hashable) -> int:
    return _number(f"{operator} {family}") | 1


def passing_fingerprint(operator: str, family: Hashable, size: int) -> int:
    """Return a 64-bit number that represents a call of a new size when ranks compare their calls
    (`AcrossRanks.fingerprint`).

    The number is computed from the operator's name, the problem family (all that does not depend on the size) and the
    size, a number of rows. Ranks compare this number in place of a full description, which they have compared for
    another size of the family.
    """
    return of_size(number_of_family(operator, family), size)


def of_size(of_family: int, size: int) -> int:
    """Return the number that represents a call with `size` rows (`passing_fingerprint`).

    of_family: the result of `number_of_family` for the call's problem family.
    """
    return of_family * (2 * size + 1) & _MASK


@lru_cache(maxsize=64)
def table_weights(world: int, width: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random 64-bit weights for both tables of `rank`: [receiver, width] for the rows that `rank` sends, and
    [sender, width] for the rows that it expects. The count that a sender sends and the count that its receiver expects
    have the same weight.

    width: the number of counts for each pair of sender and receiver: 1, or the number of experts on a rank.
    """
    drawn = np.random.Generator(np.random.PCG64(0)).integers(1, 2**64, (world, world, width), dtype=np.uint64)
    sent, expected = (torch.from_numpy(of.copy().view(np.int64)) for of in (drawn[rank], drawn[:, rank]))
    return sent, expected


def _is_plain(table: torch.Tensor) -> bool:
    """True if `table` is a contiguous matrix of int64 in the memory of the CPU, so that its address is enough to read it."""
    return table.is_cpu and table.dtype == torch.int64 and table.dim() == 2 and table.is_contiguous()


def _sum(table: torch.Tensor, weights: torch.Tensor) -> int:
    return _core.weighted_sum(table.data_ptr(), weights.data_ptr(), weights.numel())


def _tables_agree(found: list[tuple[int, int]]) -> bool:
    """True if the tables of all ranks agree. found: two numbers from each rank. The first is the rank's weighted sum
    (see the top of this file); the sums of all ranks must add up to 0. The second is not used here.
    """
    return sum(excess for excess, _ in found) & _MASK == 0


def _rows(numbers: list[int]) -> str:
    rows = counted(sum(numbers), "row")
    return rows if len(numbers) == 1 else f"{rows} ({', '.join(map(str, numbers))} by expert)"


def _digest(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=8).digest()
