"""T3's output maps, which list the destination of each chunk of a GEMM's output.

`map` has the maps, `routes` derives the routes between ranks, and `steps` builds the schedule.

`matmul_reduce_scatter` and `matmul_all_reduce` have schedules that are made from maps.
"""
