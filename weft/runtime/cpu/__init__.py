"""The executor of schedules on CPU processes, for one rank.

`schedule` is the executor. `checked` refuses schedules that cannot run. `program` prepares the steps, `steps`
implements each step kind, `places` locates buffers and counters, and `sizes` evaluates dynamic sizes. `run` is the
state that the lanes share in a run. `embedding` is the separate executor of embedding_all_to_all.
"""
