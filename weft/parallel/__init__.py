"""Styles for `torch.distributed.tensor.parallel.parallelize_module`, with the names, arguments and layouts of torch's: a model that
is divided by those is divided by these, with collectives that overlap, after a change of imports.

    from weft.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

`docs/tensor_parallel.md` says which layouts overlap; all others are torch's own.
"""

from torch.distributed.tensor.parallel import PrepareModuleOutput, SequenceParallel

from weft.parallel.inputs import PrepareModuleInput, PrepareModuleInputOutput
from weft.parallel.linear import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]
