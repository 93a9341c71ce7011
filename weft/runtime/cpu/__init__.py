"""The executor of schedules on CPU processes, for one rank.

| module | contents |
|---|---|
| `schedule` | the executor |
| `checked` | checks that refuse schedules that cannot run |
| `program` | the steps of this rank as functions |
| `steps` | the implementation of each step kind |
| `places` | the addresses of buffers and counters |
| `sizes` | the evaluation of dynamic sizes |
| `run` | the state that all lanes share during a run |
| `memory` | memory and threads that all executors of a group share |
| `messages` | messages between ranks, by gloo |
| `embedding` | embedding_all_to_all, with executors of its own |
"""
