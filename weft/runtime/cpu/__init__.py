"""The executor for CPU processes: one rank's side of a call.

`schedule` runs any schedule. `checked` refuses schedules that cannot run here. `program` prepares the steps, `steps` implements
each kind of step, and `places` locates buffers and counters. `sizes` evaluates dynamic sizes. `run` is the state that the lanes
share in a run. `embedding` is embedding_all_to_all.
"""
