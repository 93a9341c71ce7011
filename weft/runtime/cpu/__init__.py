"""The executor of schedules on CPU processes, for one rank.

`schedule` is the executor. `checked` refuses schedules that cannot run. `program` turns the steps into functions, `steps`
implements each step kind, `places` has the addresses of buffers and counters, and `sizes` evaluates dynamic sizes. `run`
has the state that all lanes share during a run. `embedding` is a separate executor, for embedding_all_to_all.
"""
