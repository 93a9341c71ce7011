"""The links between the hosts of a group: when ranks measure them, and which rank's numbers all ranks use.

A group on several hosts measures at most once, at its first choice of a schedule, where ranks synchronise anyway. On
GPUs it does so only if there are schedules to choose from. A group that uses only pinned schedules never measures. The
first rank looks for saved numbers:

    saved numbers for the same hosts and ranks      every rank uses them
    none                                            all ranks measure, and use the first rank's numbers

With WEFT_SELF_CALIBRATION=0 on any rank, no rank measures or uses numbers. Implausible numbers are dropped, with a
warning. CPU ranks measure gloo, and GPUs NCCL.
"""

from __future__ import annotations

from weft import env, symm
from weft.caller import warn_once
from weft.errors import WeftError
from weft.plan import links
from weft.runtime.links import is_settled, library_of, measure_links, settle
from weft.sim.between_hosts import Measured
from weft.symm import Communicator


def know_links(comm: Communicator, deadline_s: float | None = None) -> None:
    """Make all ranks of a group on several hosts plan with the same measured links.

    All ranks must make the first call together. Later calls do nothing.
    """
    if comm.all_mapped or is_settled(comm):
        return
    with symm.set_up_within(deadline_s):
        stands = comm.all_gather(_stand(comm), what="links between hosts that are known")
        found = stands[0][1]
        if not all(enabled for enabled, _ in stands):
            settle(comm, None)
            return
        if found is None:
            found = comm.all_gather(_measured(comm, deadline_s), what="the first rank's links")[0]
            if comm.rank == 0:
                remember(found)
    settle(comm, found.checked()[0].network())


def remember(found: Measured) -> None:
    """Save the plausible links for later processes, and warn of implausible links. Call this function on one rank only."""
    kept, dropped = found.checked()
    if dropped:
        warn_once(f"implausible measurements of the links between hosts are ignored: {'; '.join(dropped)}")
    if kept.links:
        links.save(kept)


def _stand(comm: Communicator) -> tuple[bool, Measured | None]:
    """Return this rank's input to the decision whether ranks measure the links between hosts: (True if this rank may
    measure, its saved links or None).

    With WEFT_SELF_CALIBRATION=0, the first value is False. Only the first rank looks for saved links.
    """
    if comm.rank or not env.self_calibration():
        return env.self_calibration(), None
    try:
        return True, links.find(comm.hosts, library_of(comm))
    except ValueError as error:
        warn_once(f"the saved links between hosts are ignored: {error}")
        return True, None


def _measured(comm: Communicator, deadline_s: float | None) -> Measured | None:
    """Measure the links. Return the result on the first rank, and None on other ranks."""
    try:
        found = measure_links(comm, deadline_s=deadline_s)
    except WeftError:  # the group has failed
        raise
    except BaseException as error:  # raised on this rank only: its peers would wait for it
        comm.poison(f"a measurement of links: {error!r}")
        raise
    return found if comm.rank == 0 else None
