"""Symmetric memory: buffers and signals that every rank of a group can address, on CPU processes and on GPUs."""

from weft.symm.buffer import Signal, SymmetricBuffer
from weft.symm.communicator import Communicator, communicator, open_communicator, set_up_within
from weft.symm.exchange import Exchange
from weft.symm.failures import on_failure
from weft.symm.groups import require_member
from weft.symm.memory import Region

__all__ = [
    "Communicator", "Exchange", "Region", "Signal", "SymmetricBuffer", "communicator", "on_failure", "open_communicator",
    "require_member", "set_up_within",
]  # fmt: skip
