"""The serial schedule of every operator, run as a user would write it: NCCL / gloo and cuBLAS calls, one after the other.

    serial          the steps of a serial schedule as torch calls
    collectives     collectives of a matrix, for the methods `unfused` and `gradients` of an operator's spec
    experts         exchanges of tokens for expert parallelism; its helpers are `grouped_matmul`, `permutation` and `sizes`
    native_experts  the same on GPUs, as steps of native code
    unpack          a copy that puts the matrices of all ranks side by side, and its inverse
    turn            the rendezvous, deadlines and timelines of these calls

Specs of operators import `all_gather`, `reduce_scatter`, `all_reduce`, `all_reduce_` and `Turn` from here.
"""

from weft.runtime.unfused.collectives import all_gather, all_reduce, all_reduce_, reduce_scatter
from weft.runtime.unfused.turn import STRAIGHT, Turn

__all__ = ["STRAIGHT", "Turn", "all_gather", "all_reduce", "all_reduce_", "reduce_scatter"]
