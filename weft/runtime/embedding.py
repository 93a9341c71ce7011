"""The executors of embedding_all_to_all on a communicator. All calls with the same plan share an executor."""

from __future__ import annotations

from weft.embedding.plan import EmbeddingPlan
from weft.runtime.cpu.embedding import EmbeddingAllToAllCpu
from weft.runtime.embedding_unfused import EmbeddingAllToAllUnfused
from weft.runtime.executor import Executor
from weft.runtime.per_communicator import of_communicator
from weft.symm import Communicator

_executors: dict[Communicator, dict[EmbeddingPlan, Executor]] = {}


def executors_on(comm: Communicator) -> dict[EmbeddingPlan, Executor]:
    """Return all executors of embedding_all_to_all on `comm`, by plan. Some executors may be closed."""
    return of_communicator(_executors, comm, lambda _: {})


def executor_of(plan: EmbeddingPlan, comm: Communicator) -> Executor:
    """Return the executor of `plan` on `comm`. The first call for a plan makes the executor, so all ranks must make this
    call together.

    plan: the tables, their placement and the options of the calls. It must be equal on all ranks, and its transport must
        not be "auto".
    """
    executors = executors_on(comm)
    executor = executors.get(plan)
    if executor is None or executor.gone:
        executor = executors[plan] = _made(plan, comm)
    return executor


def _made(plan: EmbeddingPlan, comm: Communicator) -> Executor:
    if plan.options.transport == "serial":
        return EmbeddingAllToAllUnfused(plan, comm)
    if comm.device.type == "cuda":
        from weft.runtime.cuda.embedding import EmbeddingAllToAllCuda  # needs Triton, which a CPU machine may lack

        return EmbeddingAllToAllCuda(plan, comm)
    return EmbeddingAllToAllCpu(plan, comm)
