"""The executor of schedules on GPUs, for one rank.

| module | contents |
|---|---|
| `schedule` | the executor; `runnable` refuses steps that have no implementation |
| `compile` | turns a rank's steps into the items that `issue` enqueues on streams in every run |
| `context`, `memory` | the compiler's input; the memory and streams that executors share |
| `regions` | the addresses of regions and signal words |
| `flags` | signals between ranks, as flags |
| `calls` | calls of torch, cuBLAS and NCCL |
| `sizes` | dynamic sizes |
| `tile_kernels` | weft's GEMM kernels |
| `watch` | deadlines |
| `embedding`, `embedding_backward` | embedding_all_to_all |
"""
