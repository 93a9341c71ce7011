"""Remarks below tables. They name differences that are within their noise, differences between two runs of one schedule, and
features of other libraries that were disabled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from weft.bench.core import harness
from weft.bench.core.tables import Record, times
from weft.words import counted

MULTICAST_M = 2048
"""Up to this M, torch's fused_all_gather_matmul(return_A=False) uses NVLink multicast if available."""

_NO_MULTICAST, _NO_NVLS = "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"


def gain(one: Record | None, base: Record | None, same: bool = False) -> str:
    """Return the speedup of record `one` over record `base`, such as "1.25x"; "" if either is None.

    The text is in parentheses if the difference is within twice its noise, or if both variants ran the same schedule
    (`same`) and `one` was faster. Records without noise count as exact.
    """
    if not (one and base):
        return ""
    noises = [
        harness.noise(r["p20_ms"], r["p50_ms"], r["p80_ms"], r["repetitions"]) for r in (one, base) if "p20_ms" in r
    ]
    factor = base["p50_ms"] / one["p50_ms"]
    is_clear = len(noises) < 2 or harness.is_clear(factor, *noises)
    return times(factor, is_clear and not (same and factor > 1))


def unclear(cells: Sequence[str]) -> list[str]:
    """Return a list with a sentence that explains why speedups in `cells` are in parentheses (see `gain`). The list is empty if
    no cell has parentheses.
    """
    some = [cell for cell in cells if cell]
    in_them = sum(cell.startswith("(") for cell in some)
    if not in_them:
        return []
    return [
        f"Factors in parentheses ({in_them} of {len(some)}) differ from 1 by less than twice their noise, or are gains of a "
        "schedule over itself."
    ]


def twins(pairs: Sequence[tuple[Record, Record]]) -> list[str]:
    """Return a remark on the time differences between variants that ran the same schedule: noise, and the time that weft's own
    code adds.

    pairs: the two records of each pair of such variants.
    """
    if not pairs:
        return []
    off = [abs(a["p50_ms"] / b["p50_ms"] - 1) for a, b in pairs]
    return [
        f"{counted(len(off), 'pair')} of variants ran the same schedule. Because of noise and of weft's own code, their times "
        f"differ by {median(off):.1%} in the median, and by {max(off):.1%} at most."
    ]


def of_asynctp(rows: Sequence[Record]) -> list[str]:
    """Return remarks on whether AsyncTP could use NVLink multicast. rows: records of one dtype, with AsyncTP's records."""
    if rows[0]["dtype"] == "fp8":
        return ["asynctp (torch's scaled operator) does not gather by NVLink multicast."]
    said = []
    for variables, how, some in _by_variables(rows):
        of = "" if len(some) == len(rows) else f" ({', '.join(dict.fromkeys(r['config'] for r in some))})"
        if variables.get(_NO_MULTICAST) == "1":
            said.append(
                f"asynctp ran without NVLink multicast ({_NO_MULTICAST}=1{how}){of}. If a machine has it, torch uses it to gather "
                f"for M <= {MULTICAST_M}, and may then be faster than here."
            )
        elif not variables:
            said.append(
                "The records do not say if asynctp could use NVLink multicast, which it uses to gather for M <= "
                f"{MULTICAST_M}{of}."
            )
    return said


def of_nccl(rows: Sequence[Record]) -> list[str]:
    """Return a remark if NCCL ran without NVLS (reductions inside the NVLink switches). There is no remark for two
    ranks: NCCL needs more ranks to use NVLS.
    """
    if rows[0]["device"] != "cuda" or rows[0]["ranks"] <= 2:
        return []
    without = [how for variables, how, _ in _by_variables(rows) if variables.get(_NO_NVLS) == "0"][:1]
    return [
        f"NCCL also ran without NVLink multicast ({_NO_NVLS}=0{how}), which it can use on more than two GPUs."
        for how in without
    ]


def _by_variables(rows: Sequence[Record]) -> list[tuple[Mapping[str, str], str, list[Record]]]:
    """Group the records `rows` by the environment variables of other libraries, such as NCCL, that they contain.

    Return (variables, how, rows) of each group. how: a text for the remark: "" if the run itself recorded the
    variables, ", noted by hand" if a person added them afterwards.
    """
    found: dict[tuple[Any, str], list[Record]] = {}
    for row in rows:
        known = row["variables"] is not None
        variables = row["variables"] if known else row.get("variables_by_hand", {})
        found.setdefault((tuple(variables.items()), "" if known else ", noted by hand"), []).append(row)
    return [(dict(variables), how, some) for (variables, how), some in found.items()]
