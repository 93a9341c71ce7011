"""Drop-in replacements for the styles of `torch.distributed.tensor.parallel`, with collectives that overlap with GEMMs.

Names, arguments and layouts are torch's: change only the imports, and pass the styles to `parallelize_module`.
`docs/tensor_parallel.md` lists the layouts that overlap. All other layouts run torch's code.
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
