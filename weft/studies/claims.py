"""The comparison of a paper's claims with weft's results, for `weft reproduce` and docs/reproduction.md.

A claim with a number is reproduced if weft's number differs from the paper's by at most a limit. A claim can have its
own limit. Otherwise the limit is 10% of the paper's number, or for percentages 5 points. A percentage below 10% has a
smaller limit: half of it, but at least 1 point. For a claim without a number, the study decides whether it is
reproduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.bench.core.tables import ResultTable, table

POINTS, LEAST_POINTS, SHARE, RATIO = 5.0, 1.0, 0.5, 0.1
"""The allowed deviations of claims without a limit. For percentages: the largest and the smallest number of points, and a
fraction of the paper's percentage. For other numbers: a fraction.
"""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and weft's result for the same quantity.

    where: the section or figure of the paper.
    paper, ours: the number of the paper and of weft, or a text if the claim has no number.
    unit: the unit of both numbers, such as "x", "us" or "%".
    limit: the largest deviation with which the claim is reproduced; None for the default. Deviations are fractions of
        the paper's number, or points if the unit is "%".
    held: the study's verdict if `paper` or `ours` is a text; True if the claim is reproduced.
    """

    what: str
    where: str
    paper: float | str
    ours: float | str
    unit: str = ""
    limit: float | None = None
    held: bool | None = None

    @property
    def off(self) -> float | None:
        """The deviation of `ours` from `paper`: in points for percentages, otherwise as a fraction of `paper`. None if
        either is a text.
        """
        if isinstance(self.paper, str) or isinstance(self.ours, str):
            return None
        return self.ours - self.paper if self.unit == "%" or not self.paper else self.ours / self.paper - 1

    @property
    def reproduced(self) -> bool | None:
        if self.held is not None or self.off is None:
            return self.held
        return abs(self.off) <= (self._usual_limit if self.limit is None else self.limit) + 1e-9

    @property
    def _usual_limit(self) -> float:
        if self.unit != "%":
            return RATIO
        return min(POINTS, max(LEAST_POINTS, SHARE * abs(float(self.paper))))

    @property
    def said(self) -> str:
        """The verdict on a claim with its own limit: "yes" if it is reproduced, else "no". It is "" for claims with the default
        limit, whose verdict follows from the deviation.
        """
        return "" if self.limit is None else "yes" if self.reproduced else "no"

    def number(self, value: float | str) -> str:
        if isinstance(value, str):
            return value
        if self.unit == "%":
            return f"{value:.1f}%".replace(".0%", "%") if value is self.paper else f"{value:.1f}%"
        return f"{value:.2f}x" if self.unit == "x" else f"{value:.3g} {self.unit}".strip()

    @property
    def deviation(self) -> str:
        if self.off is None:
            return ""
        return f"{self.off:+.1f} points" if self.unit == "%" else f"{100 * self.off:+.0f}%"

    @property
    def allowed(self) -> str:
        if self.limit is None:
            return ""
        return f"{self.limit:g} points" if self.unit == "%" else f"{100 * self.limit:g}%"


def claims_table(title: str, found: Sequence[Claim]) -> ResultTable:
    """Return a table with a row for each claim. The last column says which claims are reproduced. If any claim has its
    own limit (`Claim.limit`), the column is empty for the claims with the default limit.
    """
    limited = any(claim.limit is not None for claim in found)
    columns: dict[str, Callable[[Claim], str]] = {
        "claim": lambda c: c.what,
        "section": lambda c: c.where,
        "paper": lambda c: c.number(c.paper),
        "ours": lambda c: c.number(c.ours),
        "deviation": lambda c: c.deviation,
        "allowed": lambda c: c.allowed,
        "within" if limited else "reproduced": lambda c: c.said if limited else "yes" if c.reproduced else "no",
    }
    return table(title, found, columns)
