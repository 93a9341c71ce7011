"""The executor of schedules on GPUs, for one rank.

| module | contents |
|---|---|
| `schedule` | the executor; `runnable` raises for steps that GPUs cannot run |
| `compile` | turns a rank's steps into a list of operations, which `issue` enqueues on streams in every run |
| `context` | the steps, memory and streams of one executor |
| `memory` | the memory and streams that several executors share |
| `regions` | the addresses of regions and signal words |
| `flags` | signals between ranks, as flags |
| `calls` | calls of torch, cuBLAS and NCCL |
| `sizes` | steps whose sizes are known only at run time |
| `tile_kernels` | weft's GEMM kernels |
| `watch` | the thread that detects missed deadlines |
| `embedding`, `embedding_backward` | embedding_all_to_all, forward and backward |
"""
