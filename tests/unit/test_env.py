"""The meaning of environment variables: durations of waits, switches, folders."""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from weft import env


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_DEADLINE_S", raising=False)
    monkeypatch.delenv("WEFT_SETUP_DEADLINE_S", raising=False)


def test_set_up_is_given_less_time_than_a_call() -> None:
    assert env.setup_deadline_s() < env.deadline_s() / 2


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({"WEFT_DEADLINE_S": "3"}, 3),  # a deadline of 3 seconds holds for set-up too
        ({"WEFT_SETUP_DEADLINE_S": "7"}, 7),
        ({"WEFT_SETUP_DEADLINE_S": "200"}, 200),
        ({"WEFT_SETUP_DEADLINE_S": "200", "WEFT_DEADLINE_S": "100"}, 100),
        ({"WEFT_SETUP_DEADLINE_S": "7", "WEFT_DEADLINE_S": "100"}, 7),
    ],
)
def test_the_variables_say_how_much(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], seconds: float) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert env.setup_deadline_s() == seconds


@pytest.mark.parametrize("variable", ["WEFT_DEADLINE_S", "WEFT_SETUP_DEADLINE_S"])
@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "soon", ""])
def test_what_is_no_time_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable}={text!r}"):
        env.setup_deadline_s()


def test_a_cache_of_a_user_who_does_not_exist_is_said_once_and_lies_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", "~nosuchuser/x")
    monkeypatch.setattr("weft.caller._said", set())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="WEFT_CACHE_DIR='~nosuchuser/x' names a user without a home folder") as warned:
        assert {env.cache_dir() for _ in range(3)} == {tmp_path / f"weft-{os.getuid()}"}
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("variable", "read"),
    [
        ("WEFT_QUIET", env.quiet),
        ("WEFT_CHECK_CALLS", env.check_calls),
        ("WEFT_SELF_CALIBRATION", env.self_calibration),
    ],
)
def test_switches_have_words_for_on_and_off(
    monkeypatch: pytest.MonkeyPatch, variable: str, read: Callable[[], bool]
) -> None:
    monkeypatch.delenv(variable, raising=False)
    found = {"": read()}
    for text in ("0", "false", "No", "off", "1", "true", "YES", "on", " "):
        monkeypatch.setenv(variable, text)
        found[text] = read()
    assert [*found.values()] == [found[""], *[False] * 4, *[True] * 4, found[""]]
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match=f"{variable}='2' must be one of 1, true, yes, on, 0, false, no, off"):
        read()


@pytest.mark.parametrize(
    ("variable", "read", "bad"),
    [("WORLD_SIZE", env.world_size, ("abc", "0", "")), ("LOCAL_RANK", env.local_rank, ("abc", "-1", "1.0"))],
)
def test_numbers_of_launchers_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, read: Callable[[], int], bad: tuple[str, ...]
) -> None:
    monkeypatch.setenv(variable, "3")
    assert read() == 3
    for text in bad:
        monkeypatch.setenv(variable, text)
        with pytest.raises(
            ValueError, match=f"{variable}={text!r} must be an integer of at least .*: start the ranks with"
        ):
            read()


def test_every_invalid_variable_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = "WEFT_DEADLINE_S", "WEFT_CHECK_CALLS", "WEFT_QUIET", "WEFT_SELF_CALIBRATION"
    for name in bad:
        monkeypatch.delenv(name, raising=False)
    assert env.faults() == []
    for name in bad:
        monkeypatch.setenv(name, "yep")
    monkeypatch.setenv("WEFT_SETUP_DEADLINE_S", "5")
    assert [text.partition("=")[0] for text in env.faults()] == [*bad]


def test_the_list_of_own_variables_is_that_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "environment.md").read_text()
    assert set(env.OWN) == set(re.findall(r"^\| `(WEFT_\w+)`", page, re.MULTILINE))
