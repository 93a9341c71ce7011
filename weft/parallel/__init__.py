"""Styles for `torch.distributed.tensor.parallel.parallelize_module`, with the names, arguments and layouts of torch's
styles.

A model whose imports are changed to these styles overlaps its collectives with GEMMs.

`docs/tensor_parallel.md` lists the layouts that overlap. For all other layouts torch's code runs.
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
