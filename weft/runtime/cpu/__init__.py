"""A rank's side of a call on CPU processes.

`schedule` runs any schedule: `program` binds its steps to memory, `sizes` puts in numbers what only a run knows, `run` is what
the lanes of one run share. `embedding` is embedding_all_to_all.
"""
