"""Styles for `torch.distributed.tensor.parallel.parallelize_module`, with the names, arguments and layouts of torch's styles.
Changing the imports makes a model's collectives overlap.

    from weft.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

`docs/tensor_parallel.md` lists the layouts that overlap; for all others torch's code runs.
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
