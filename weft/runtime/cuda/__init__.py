"""The GPU executor: one rank's side of a call.

| module | what it does |
|---|---|
| `schedule` | runs any schedule; `runnable` first refuses steps that no code is registered for |
| `compile` | turns a rank's steps into the items that `issue` enqueues on streams in every run |
| `context`, `memory` | what the compiler works with; the memory and streams that executors share |
| `regions` | the addresses of regions and signal words |
| `groups`, `flags` | signals between ranks, as flags |
| `calls` | calls of torch, cuBLAS and NCCL |
| `sizes` | dynamic sizes, which are known only at run time |
| `tile_kernels` | weft's GEMM kernels |
| `watch` | deadlines |
| `embedding`, `embedding_backward` | embedding_all_to_all |
"""
