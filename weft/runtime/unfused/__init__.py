"""The serial schedule of every operator, run as a user would write it: NCCL / gloo and cuBLAS calls, one after the other.

    serial          the steps of a serial schedule as torch calls
    collectives     collectives of one matrix of this rank, for an operator's own `unfused` and `gradients`
    experts         exchanges of tokens, with `grouped_matmul`, `permutation` and `sizes`
    unpack          puts columns of ranks next to each other, and back
    turn            the rendezvous, deadlines and timelines of these calls

Specs of operators import from here: `all_gather`, `reduce_scatter`, `all_reduce`, `all_reduce_`, `Turn`.
"""

from weft.runtime.unfused.collectives import all_gather, all_reduce, all_reduce_, reduce_scatter
from weft.runtime.unfused.turn import STRAIGHT, Turn

__all__ = ["STRAIGHT", "Turn", "all_gather", "all_reduce", "all_reduce_", "reduce_scatter"]
