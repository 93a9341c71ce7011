"""T3's output maps: the map as a value (`map`), its routes between ranks (`routes`), and the schedule made from them (`steps`).

`matmul_reduce_scatter` and `matmul_all_reduce` have schedules that are made from maps.
"""
