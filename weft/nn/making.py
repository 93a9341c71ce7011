"""The construction of a module with embedding tables by all ranks: compare arguments, choose a seed, fill tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft import env, symm
from weft.arguments import checked_device, checked_within
from weft.embedding.check import DEVICE_TYPES
from weft.embedding.partition import Partition
from weft.embedding.tables import EmbeddingBagConfig, EmbeddingSharding
from weft.errors import DisagreementError, RefusedError
from weft.nn.embedding_table import first_values
from weft.nn.id_bound import checked_max_ids
from weft.symm.groups import is_not_a_member, require_member
from weft.words import by_rank

T = TypeVar("T")


def rank_in(group: Any) -> int:
    """Return this rank's number in `group`. Raise `ValueError` if this rank is not in the group."""
    if group is None:
        raise ValueError("group=None: pass dist.group.WORLD for all ranks, or the group that shares the tables")
    if is_not_a_member(group):
        raise ValueError("this rank is not in the group: construct the collection only on the ranks of the group")
    require_member(group)
    return dist.get_rank(group)


def device_for(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    """Return the device of this rank's tables. Raise `ValueError` for a device that is not supported."""
    if device is None:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    device = checked_device(device)
    if device.type not in (*DEVICE_TYPES, "meta"):
        raise ValueError(f"device={str(device)!r} is not supported: pass {' or '.join(DEVICE_TYPES)}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}, but torch sees no GPU: run `weft doctor` to see why")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def checked_input_options(
    input: Any, is_weighted: Any, max_ids: Any, batch_size: Any = None
) -> tuple[int | None, int | None]:
    """Return `max_ids` and `batch_size`, each as an integer or None. Raise `ValueError` for invalid or contradictory options of a
    module's input.
    """
    if not isinstance(input, str) or input not in ("local_batch", "global_batch"):
        raise ValueError(f"input={input!r} must be 'local_batch' or 'global_batch'")
    if not isinstance(is_weighted, bool):
        raise ValueError(f"is_weighted={is_weighted!r} must be True or False")
    max_ids = checked_max_ids(max_ids)
    if max_ids is not None and input == "global_batch":
        raise ValueError(
            f"max_ids={max_ids} works only with input='local_batch', because no ids are sent for a "
            "global batch: do not pass max_ids"
        )
    if batch_size is not None:
        allowed = "at least 1 and less than 2**31, or None for any number of samples"
        batch_size = checked_within("batch_size", batch_size, 1, 2**31 - 1, allowed)
        if max_ids is None:
            raise ValueError(
                f"batch_size={batch_size} works only with max_ids, the largest number of ids that a rank receives: pass both"
            )
        if max_ids >= 2**31:
            raise ValueError(
                f"max_ids={max_ids} must be less than 2**31 with batch_size, because each rank allocates memory for max_ids "
                "ids: pass the largest number of ids that a rank receives"
            )
    return max_ids, batch_size


def check_table_names(tables: Iterable[EmbeddingBagConfig]) -> None:
    """Raise `ValueError` for a name that a parameter cannot have."""
    for table in tables:
        if "." in table.name:
            raise ValueError(f"table {table.name!r}: torch allows no dot in a parameter's name: choose another name")


def agree_on_module(
    group: dist.ProcessGroup,
    device: Any,
    sharding: EmbeddingSharding | None,
    said: dict[str, Any],
    refusal: Exception | None,
    deadline_s: float | None,
    module: str,
) -> tuple[EmbeddingSharding, int]:
    """Return (the sharding, the first rank's seed for initial values) if all ranks have equal arguments. All ranks must
    make this call.

    Otherwise every rank raises `DisagreementError`, or, if a rank refused its arguments, `RefusedError` with the
    reason.

    said: further arguments to compare, by name.
    refusal: this rank's error about its own arguments, if any.
    module: the name of the class, for error texts.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    if refusal is None and (faults := env.faults()):
        refusal = ValueError("; ".join(faults))
    # Refused arguments may have any type, and may not pickle. An `init_fn` may not pickle either.
    mine: tuple[EmbeddingSharding | None, dict[str, Any], str | None, int] = None, {}, str(refusal), seed
    if refusal is None and sharding is not None:
        mine = replace(sharding, tables=tuple(replace(t, init_fn=None) for t in sharding.tables)), said, None, seed
    comm = _comm_of(group, device, deadline_s)
    what = f"making a {module}"
    everyone = comm.all_gather(mine, what=what, deadline_s=_patient(deadline_s))
    if reasons := by_rank((rank, text) for rank, (_, _, text, _) in enumerate(everyone) if text is not None):
        raise RefusedError(f"arguments refused by {reasons}") from refusal
    first_sharding, first_said, _, seed = everyone[0]
    for rank, (other_sharding, other_said, _, _) in enumerate(everyone):
        # A rank that places only whole tables has no placement here: its sharding has the owners.
        first_cut, other_cut = (of.get("placement", "only whole tables") for of in (first_said, other_said))
        difference = f"placement={first_cut} and {other_cut}" if first_cut != other_cut else ""
        difference = difference or first_sharding.difference(other_sharding)
        for name in {**first_said, **other_said}:
            here, there = first_said.get(name), other_said.get(name)
            if not difference and here != there:
                difference = f"{name}={here!r} and {there!r}"
        if difference:
            raise DisagreementError(
                f"ranks 0 and {rank} construct different modules ({difference}): pass the same arguments on all ranks"
            )
    assert sharding is not None
    return sharding, seed


def agree_on_parts(
    group: dist.ProcessGroup,
    device: Any,
    partition: Partition | None,
    said: dict[str, Any],
    refusal: Exception | None,
    deadline_s: float | None,
    module: str,
) -> int:
    """Return the first rank's seed if all ranks have the same tables, shardings and other arguments. All ranks must
    make this call.

    Arguments and errors are as for `agree_on_module`, except that `partition` replaces `sharding`.
    """
    whole = None
    if partition is not None:
        first = [first_values(table) for table in partition.tables]
        said = {**said, "placement": repr(partition.shardings), "first values": first}
        whole = EmbeddingSharding(partition.tables, (0,) * len(partition.tables), group.size())
    return agree_on_module(group, device, whole, said, refusal, deadline_s, module)[1]


def _comm_of(group: dist.ProcessGroup, device: Any, deadline_s: float | None) -> symm.Communicator:
    """Return the communicator on which ranks construct a module together. It is the communicator for the device type of the
    group's backend. So all ranks use the same communicator, even if one rank passes a device of another type.
    """
    usual = device_for(group, None)
    meets_on = device if isinstance(device, torch.device) and device.type == usual.type else usual
    return symm.communicator(group, meets_on, deadline_s=_patient(deadline_s))


def _patient(deadline_s: float | None) -> float:
    """Return the deadline for waits while a module is constructed: `deadline_s`, or if it is None, `WEFT_DEADLINE_S`. Other
    set-up waits have the shorter `WEFT_SETUP_DEADLINE_S`, but peers may need longer to fill their tables.

    If an environment variable of weft is invalid, return the default of `WEFT_SETUP_DEADLINE_S`. The rank then continues to the
    comparison of arguments, in which all ranks raise an error.
    """
    if deadline_s is None:
        return env.SETUP_S if env.faults() else env.deadline_s()
    return deadline_s


def fill_together(
    make: Callable[[], None], group: dist.ProcessGroup, device: torch.device, deadline_s: float | None
) -> None:
    """Call `make`, which makes and fills this rank's tables. All ranks must make this call.

    If a rank runs out of memory, or its `init_fn` raises, all ranks raise.
    """
    on_all_ranks(make, "filling embedding tables", "tables could not be filled", group, device, deadline_s)


def on_all_ranks(
    act: Callable[[], T], what: str, failure: str, group: dist.ProcessGroup, device: torch.device, deadline_s: float | None
) -> list[T]:  # fmt: skip
    """Call `act`, and return its results on all ranks, by rank. All ranks must make this call.

    If `act` raises on a rank, every rank raises `RefusedError` with the reasons. A rank whose memory is exhausted raises
    its own error, because callers may catch memory errors and retry.

    what: a name for the call. Ranks compare their names, so that different calls do not pair.
    failure: the beginning of the error text.
    """
    result, failed = None, None
    try:
        result = act()
    except Exception as error:
        failed = error
    comm = _comm_of(group, device, deadline_s)
    said = None if failed is None else str(failed) or repr(failed)
    everyone = comm.all_gather((said, result), what=what, deadline_s=_patient(deadline_s))
    if isinstance(failed, MemoryError | torch.OutOfMemoryError):
        raise failed
    if reasons := by_rank((rank, text) for rank, (text, _) in enumerate(everyone) if text is not None):
        raise RefusedError(f"{failure}: {reasons}") from failed
    return [one for _, one in everyone]
