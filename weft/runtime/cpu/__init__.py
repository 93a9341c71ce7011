"""A rank's side of a call on CPU processes.

`schedule` runs any schedule: `checked` refuses what cannot run here, `program` has its steps ready, `steps` says what each kind of
them does and `places` where, `sizes` puts in numbers what only a run knows, `run` is what the lanes of one run share.
`embedding` is embedding_all_to_all.
"""
