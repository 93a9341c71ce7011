"""The help of `weft bench OP`: presets, variants, options and examples exist, and nothing that OP refuses is shown."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
import torch
from support.made_up import registered_by_a_test

from weft.bench import help
from weft.bench.__main__ import options_of
from weft.bench.core.operators import measured, operator
from weft.bench.core.options import BenchOptions
from weft.builders.problem import plain

OPTIONS = ("scale", "option", "variants", "seconds", "counters", "pictures")
PLACEHOLDER = re.compile(r"[A-Z]{4}|MxNxK|-N$")


def names(lines: help.Lines) -> list[str]:
    """Return the names of a list that are no patterns. "g1 to g16" has g1 and g16."""
    listed = [name for line, _ in lines for name in re.split(", | to ", line)]
    return [name for name in listed if not PLACEHOLDER.search(name)]


def test_every_operator_and_study_has_help() -> None:
    ours = {name for name in measured() if not registered_by_a_test(name)}
    assert set(help.HELP) == ours
    assert all(name in help.overview("weft bench") for name in ours)


@pytest.mark.parametrize("name", help.HELP)
def test_options_that_the_operator_refuses_are_not_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of([name, "--help"], "weft bench")
    shown = capsys.readouterr().out
    refused = {one for one in OPTIONS if one in operator(name).refuses}
    assert {one for one in OPTIONS if f"\n  --{one} " not in f"{shown} "} == refused
    assert shown.startswith(f"usage: weft bench {name} [options]\n")
    assert len(shown.splitlines()) < 90


@pytest.mark.parametrize("name", help.HELP)
def test_presets_and_variants_are_known(name: str) -> None:
    op, dtype = plain(name, None)
    of, device = help.HELP[name], "cuda"
    dtype = dtype or operator(op).default_dtype(device)

    def known(preset: str, variants: tuple[str, ...] = ()) -> None:
        try:
            BenchOptions(op, preset, 2, device, variants, operator(op).modes(device), dtype=dtype)
        except ValueError as error:
            if "cannot run here" not in str(error):
                raise

    presets = names(of.presets)
    for preset in presets:
        known(preset)
    for variant in names(of.variants):
        known(presets[0], (variant,))


@pytest.mark.parametrize("name", help.HELP)
def test_examples_are_commands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert help.HELP[name].examples
    for line in help.HELP[name].examples:
        options = options_of(shlex.split(line))
        assert options.op == plain(name, None)[0]


def test_help_of_an_operator_needs_no_torch() -> None:
    script = "import sys; sys.argv = ['', 'pgas', '--help']; sys.modules['torch'] = None; from weft.bench.__main__ import *; main()"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert "weak and strong scaling" in " ".join(found.stdout.split())
