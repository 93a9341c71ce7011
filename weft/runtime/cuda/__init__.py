"""A rank's side of a call on GPUs.

`schedule` runs any schedule: `compile` turns its steps into what `issue` gives to streams in every run, with `context` for what
that works with, `memory` for what executors share of it, `regions` for places, `groups` and `tokens` for signals, `calls` for the
library, `sizes` for what only a run knows, and `tile_kernels`. `runnable` refuses what nobody is registered for, `watch` keeps
deadlines. `embedding` is embedding_all_to_all.
"""
