"""Docstrings and pages are plain technical English: what a script can check of it, with limits that may only fall.

The rules: no headless docstring ("Of ...", "What ..."), an imperative verb first in functions ("Return ..."), no sentence of more
than 30 words, and no phrase of `UNCLEAR`. `python tests/unit/test_sentences.py` lists all violations.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 30
HEADLESS = frozenset(re.findall(r"\w+", """
    Of What Whether By As Where That To How Who Which
"""))  # fmt: skip
NOT_VERBS = frozenset(re.findall(r"\w+", """
    A All An Also And Another At Between Both Bytes Each Every For From Half However If In It Its No None Of
    On One Or Other Rank Several Small That The There These They This Those Three Two Under What Whatever When
    Where Which Who With
"""))  # fmt: skip
VERBS_IN_S = frozenset(re.findall(r"\w+", """
    Access Address Bypass Compress Cross Discuss Express Focus Guess Pass Press Process Suppress
"""))  # fmt: skip
UNCLEAR = re.compile(
    r"\bmust (make|construct|call) it\b"  # name the object or the call
    r"|\boutput of all ranks\b"  # one output, or one for each rank?
    r"|\b(former|latter|respectively|aforementioned|thereof|wherein|whereby)\b"  # repeat the noun
    r"|\bit\b[^.:;(]*\bit\b[^.:;(]*\bit\b"  # repeat the noun
    r"|\bof [^.,:;(]*\bof [^.,:;(]*\bof [^.,:;(]*\bof\b"  # four nested nouns: split the sentence
    r"|\b(that|which) the [\w ]+ (is|are)[;.,]"  # "the exchange that the launch is"
    r"|^[a-z_, ]+: (those|that) of\b"  # an argument: repeat the noun
    r"|\bthat the \w+ which\b"  # a clause in a clause
    r"|\bat once\b"  # immediately, or at the same time?
    r"|\b(are|is) (those|that) of\b|\bexcept those\b"  # repeat the noun
    r"|\b(equally many|whole numbers?|anew(?!:)|likewise)\b"  # the same number, integer, again, also
    r"|\bReturn (what|by how|which)\b"  # name the result
    r"|^(Runs on|Called (before|after)|Used only)\b"  # name the subject
)
"""Phrases that readers of weft's docstrings had to read twice."""
LIMITS = {"headless": 0, "not imperative": 0, "long": 6, "unclear": 0}
"""The most violations that may remain. Lower a limit when you remove violations."""


def docstrings(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, True for a function but not a property) of each docstring, including those of attributes."""
    nodes: list[Any] = [ast.parse(source)]
    while nodes:  # ast.walk also visits expressions, which takes longer than all else
        node = nodes.pop()
        body = getattr(node, "body", ())
        for field in (body, *(getattr(node, name, ()) for name in ("orelse", "finalbody", "handlers", "cases"))):
            nodes += field
        for place, statement in enumerate(body):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                is_function = place == 0 and isinstance(node, ast.FunctionDef) and not is_property(node)
                yield statement.lineno, value.value, is_function


def is_property(function: ast.FunctionDef) -> bool:
    """True if the function is read as an attribute, whose docstring is a noun."""
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def first_word(text: str) -> str:
    """Return the first word; empty if the text begins with a name in backquotes, a bracket or a number."""
    found = re.match(r"\s*([A-Za-z][a-z-]*)\b", text)
    return found[1] if found else ""


def is_imperative(text: str) -> bool:
    """True unless the first word is a determiner, a pronoun or in the third person. "True if ..." passes."""
    word = first_word(text)
    return word not in NOT_VERBS | HEADLESS and (not word.endswith("s") or word in VERBS_IN_S)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring or a page, without code, tables, headings and pictures.

    An argument ("name: text") and an item of a list begin a sentence.
    """
    text = re.sub(r"```.*?```|<!--.*?-->|!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        if re.match(r"\s{4}|\s*[|#]", paragraph.strip("\n")) and not re.match(r"\s*\S.*\n\s{0,3}\S", paragraph):
            continue
        lines = [line for line in paragraph.splitlines() if not re.match(r"\s*\||.*\S {2,}\S", line)]
        joined = re.sub(r"\n\s*(?=[-*] |\d+\. |\w+(, \w+)*: )", "\0", "\n".join(lines))
        for part in joined.split("\0"):
            yield from (" ".join(one.split()) for one in re.split(r"(?<=[.!?])[)\"*]*\s+", part) if one.strip())


def violations() -> dict[str, list[str]]:
    """Return the violations of each rule, as "file:line: text"."""
    found: dict[str, list[str]] = {rule: [] for rule in LIMITS}
    for path in sorted(
        path for folder in ("weft", "tests", "docs", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ):
        where = path.relative_to(ROOT)
        for line, text, is_function in docstrings(path.read_text()):
            text = inspect.cleandoc(text)
            if first_word(text) in HEADLESS:
                found["headless"].append(f"{where}:{line}: {text[:80]}")
            if is_function and where.parts[0] == "weft" and not is_imperative(text):
                found["not imperative"].append(f"{where}:{line}: {text[:80]}")
            found["long"] += [f"{where}:{line}: {one}" for one in sentences(text) if len(one.split()) > MOST_WORDS]
            if where.parts[0] == "weft":
                found["unclear"] += [f"{where}:{line}: {one}" for one in sentences(text) if UNCLEAR.search(one)]
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        if path.name != "results.md" and "Generated from" not in path.read_text()[:200]:
            where = path.relative_to(ROOT)
            found["long"] += [f"{where}: {one}" for one in sentences(path.read_text()) if len(one.split()) > MOST_WORDS]
    return found


def test_no_more_sentences_break_a_rule() -> None:
    for rule, found in violations().items():
        assert len(found) <= LIMITS[rule], "\n".join([rule, *found])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Return the sum.", True), ("True if it is there.", True), ("Pass a value on.", True), ("`TypeError` for a list.", True),
        ("The sum.", False), ("Returns the sum.", False), ("How many rows there are.", False),
    ],
)  # fmt: skip
def test_imperatives_are_recognised(text: str, wanted: bool) -> None:
    assert is_imperative(text) == wanted


def test_docstrings_of_attributes_are_found() -> None:
    source = 'A = 1\n"""Of a thing."""\n\n\ndef f():\n    """Return 1."""\n    return 1\n'
    assert [*docstrings(source)] == [(2, "Of a thing.", False), (6, "Return 1.", True)]


def test_sentences_end_at_full_stops_and_code_has_none() -> None:
    text = "One sentence. Another\nof two lines.\n\n    x = y      a table line without end\n\nsize: an argument.\nrank: another."
    assert [*sentences(text)] == ["One sentence.", "Another of two lines.", "size: an argument.", "rank: another."]


if __name__ == "__main__":
    for rule, those in violations().items():
        print(f"{rule}: {len(those)} (at most {LIMITS[rule]})", *those, sep="\n  ")
