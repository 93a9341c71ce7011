"""Sharders for TorchRec's `DistributedModelParallel`. The sharded modules use weft to pool embeddings, exchange them
between ranks, and update tables.

    model = DistributedModelParallel(model, plan=plan, sharders=[EmbeddingBagCollectionSharder()])

A sharded module is a TorchRec `ShardedModule`, which TorchRec's pipelines can use. Its state dict names, the order of
its output columns and its `fused_optimizer` are the same as in TorchRec's own module. This package needs TorchRec and
FBGEMM, which weft does not install.
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
