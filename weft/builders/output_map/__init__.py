"""T3's output maps, which list the destination of each chunk of a GEMM's output.

The user writes an `OutputMap` (`map`). `routes` combines the maps of all ranks, and derives which rank sends each chunk
to which rank. `steps` builds a schedule of copies, signals and sums from these routes.

Some schedules of `matmul_reduce_scatter` and `matmul_all_reduce` are built from maps.
"""
