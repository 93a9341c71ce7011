"""T3's output maps, which list the destination of each chunk of a GEMM's output.

`map` has the maps, `routes` derives the routes between ranks, and `steps` builds the schedule.

Some schedules of `matmul_reduce_scatter` and `matmul_all_reduce` are built from maps.
"""
