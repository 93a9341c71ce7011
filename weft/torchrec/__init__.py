"""Sharders for TorchRec's `DistributedModelParallel` whose tables are pooled, exchanged and updated by weft.

    from weft.torchrec import EmbeddingBagCollectionSharder  # instead of torchrec.distributed.embeddingbag's
    model = DistributedModelParallel(model, plan=plan, sharders=[EmbeddingBagCollectionSharder()])

The sharded module is a `ShardedModule` of TorchRec, with the same names in its state dict, the same order of output columns and a
`fused_optimizer`; pipelines work on it as on TorchRec's own. Importing this needs TorchRec and FBGEMM, which weft does not.
"""

try:
    import fbgemm_gpu  # noqa: F401  # TorchRec needs its operators
    import torchrec  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"weft.torchrec needs TorchRec and FBGEMM ({error}): pip install torchrec, and fbgemm-gpu or fbgemm-gpu-cpu, in the "
        "releases for this torch"
    ) from error

from weft.torchrec.fused_optimizer import FusedOptimizer
from weft.torchrec.sharded import ShardedEmbeddingBagCollection
from weft.torchrec.sharded_collection import ShardedEmbeddingCollection
from weft.torchrec.sharder import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

__all__ = [
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "FusedOptimizer",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
]
