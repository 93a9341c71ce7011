"""docs/reproduction.md is up to date, gives a reason for each claim that is not reproduced, and its verdicts follow
from the numbers.
"""

from __future__ import annotations

import re
import tomllib

import pytest
from support.scripts import DOCS, load

from weft.studies.claims import Claim, claims_table

script = load(DOCS / "reproduction.py")


def test_the_page_is_made_from_records_and_reasons() -> None:
    assert script.page() == (DOCS / "reproduction.md").read_text(), "out of date: python docs/reproduction.py"


def test_reasons_have_no_results() -> None:
    """Results come only from records. A reason may contain items and sections of the papers, and numbers that the paper
    and weft share.
    """
    for paper in tomllib.loads(script.REASONS.read_text()).values():
        for reason in [*paper["why"].values(), *(one["why"] for one in paper["not_built"])]:
            assert not re.search(r"\d\.\d+x|\d points|\d+\.\d+ ?(us|ms|%)", reason), reason


def test_a_claim_needs_a_reason_and_a_reason_a_claim() -> None:
    missed, met = Claim("missed", "1", 10, 30, "%"), Claim("met", "1", 10, 12, "%")
    script.check("paper", [missed, met], {"missed": "why"})
    with pytest.raises(ValueError, match=r"paper: not reproduced, without a reason in reproduction.toml: missed"):
        script.check("paper", [missed, met], {})
    with pytest.raises(ValueError, match=r"has reasons for no claim: other"):
        script.check("paper", [met], {"other": "why"})
    with pytest.raises(ValueError, match=r"several claims have the name 'met'"):
        script.check("paper", [met, met], {})


@pytest.mark.parametrize(
    ("claim", "reproduced", "deviation"),
    [
        (Claim("", "", 20, 24.9, "%"), True, "+4.9 points"),
        (Claim("", "", 20, 25.1, "%"), False, "+5.1 points"),
        (Claim("", "", 20, 22.5, "%", 2), False, "+2.5 points"),
        (Claim("", "", 7, 11.1, "%"), False, "+4.1 points"),
        (Claim("", "", 7, 3.6, "%"), True, "-3.4 points"),
        (Claim("", "", 1, 0.0, "%"), True, "-1.0 points"),
        (Claim("", "", 1, 2.1, "%"), False, "+1.1 points"),
        (Claim("", "", 2.0, 1.82, "x"), True, "-9%"),
        (Claim("", "", 2.0, 1.78, "x"), False, "-11%"),
        (Claim("", "", 0, 0.0, "%", 0), True, "+0.0 points"),
        (Claim("", "", "yes", "3 of 4", held=False), False, ""),
        (Claim("", "", "yes", "4 of 4", held=True), True, ""),
    ],
)
def test_verdicts_follow_from_the_deviation(claim: Claim, reproduced: bool, deviation: str) -> None:
    assert claim.reproduced is reproduced
    assert claim.deviation == deviation


def test_a_table_judges_claims_that_have_a_limit() -> None:
    cells = claims_table("title", [Claim("a", "1", 20, 26, "%", 5), Claim("b", "2", 2.0, 2.0, "x")]).cells
    assert cells[0] == ("a", "1", "20%", "26.0%", "+6.0 points", "5 points", "no")
    assert cells[1] == ("b", "2", "2.00x", "2.00x", "+0%", "", "")
    without = claims_table("title", [Claim("a", "1", 20, 26, "%"), Claim("b", "2", 2.0, 2.0, "x")])
    assert without.columns[-1] == "reproduced"
    assert [line[-1] for line in without.cells] == ["no", "yes"]
