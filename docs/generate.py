"""Write docs/api.md from docstrings and docs/environment.md from weft/env.py: `python docs/generate.py`.

A test fails if a page differs from the output of this script. The script is not installed with weft.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import weft
from weft import env
from weft.embedding import EmbeddingOptimizer

HERE = Path(__file__).parent
_GENERATED = "<!-- Generated from {source} by `python docs/generate.py`: edit there. -->\n\n"
_MODULES = (
    "builders",
    "embedding",
    "nn",
    "parallel",
    "plan",
    "schedule",
    "sim",
    "symm",
    "trace",
    "hw",
    "timeline",
    "launch",
)
_OF_EMBEDDING = ("EmbeddingOptimizer", "plan_tables")
"""Names of `weft.embedding` that the page describes in full."""


def api() -> str:
    """Return the reference: the names of `weft` in full, and the names of its modules with their first sentence."""
    parts = [
        _GENERATED.format(source="the docstrings"),
        "# API\n\nEvery public name of weft, with its arguments, results and errors. "
        "The [glossary](glossary.md) defines the terms.\n",
        "## weft\n",
    ]
    for name in sorted(weft.__all__, key=str.lower):
        value = getattr(weft, name)
        if callable(value):
            parts.append(f"### weft.{name}\n\n{_full(value)}")
    parts += [f"### weft.nn.{name}\n\n{_full(getattr(weft.nn, name))}" for name in weft.nn.__all__]
    ours = [name for name in weft.parallel.__all__ if getattr(weft.parallel, name).__module__.startswith("weft.")]
    parts += [f"### weft.parallel.{name}\n\n{_full(getattr(weft.parallel, name))}" for name in ours]
    parts += [f"### weft.embedding.{name}\n\n{_full(getattr(weft.embedding, name))}" for name in _OF_EMBEDDING]
    parts.append("## weft.errors\n\n" + _sentence(weft.errors) + "\n")
    parts.append(_table(_defined(weft.errors)))
    for name in _MODULES:
        module = importlib.import_module(f"weft.{name}")
        named = getattr(module, "__all__", None)
        names = {n: getattr(module, n) for n in named} if named else _defined(module)
        parts.append(f"## weft.{name}\n\n{_sentence(module)}\n")
        parts.append(_table({n: value for n, value in names.items() if callable(value) and _doc(value)}))
    return "\n".join([*parts[:2], _contents(parts), *parts[2:]])


def _contents(parts: list[str]) -> str:
    """Return a list of the page's sections, with links to the names that each section describes in full."""
    sections: dict[str, list[str]] = {}
    links: dict[str, str] = {}
    for mark, title in re.findall(r"^(##|###) (\S+)$", "\n".join(parts), re.MULTILINE):
        anchor = title.lower().replace(".", "")  # as Markdown renderers make it, with a number for duplicates
        same = [of.partition("-")[0] for of in links.values()].count(anchor)
        links[title] = f"{anchor}-{same}" if same else anchor
        module, _, name = title.rpartition(".")
        if mark == "##":
            sections.setdefault(title, [])
        else:
            sections.setdefault(module, []).append(f"[{name}](#{links[title]})")
    lines = [f"- [{title}](#{links[title]})" + f": {', '.join(of)}" * bool(of) for title, of in sections.items()]
    return "\n".join(lines) + "\n"


def environment() -> str:
    """Return a table of the variables that `weft.env` reads."""
    rows = ["| variable | default | what it does |", "|---|---|---|"]
    rows += [f"| {name} | {default} | {text} |" for name, default, text in variables()]
    return (
        _GENERATED.format(source="weft/env.py")
        + "# Environment variables\n\nEnvironment variables change weft's defaults for a whole job, for example deadlines. "
        + "Arguments of calls override them. In place of 1 and 0, switches of weft (`WEFT_*`) accept true, yes and on, or "
        + "false, no and off.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def variables() -> Iterator[tuple[str, str, str]]:
    """Yield (names, default, meaning) for each public function of `weft.env` whose docstring begins with a variable's name.

    weft's own variables come first."""
    for function in sorted(_defined(env).values(), key=lambda f: not _doc(f).startswith("`WEFT_")):
        names, _, text = " ".join((inspect.getdoc(function) or "").split()).partition(": ")
        if names.startswith("`"):
            default = re.search(r" \(default ([^)]*)\)", text)
            text = text if default is None else text.replace(default[0], "", 1)
            yield names, "" if default is None else default[1], text[0].upper() + text[1:]


def _defined(module: Any) -> dict[str, Any]:
    """Return the functions and classes that the module itself defines, in source order."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    }


def _full(value: Any) -> str:
    parameters = inspect.signature(value).parameters
    text = f"```python\n{_signature(value)}\n```\n\n{_markdown(inspect.getdoc(value) or '', set(parameters))}\n"
    if inspect.isclass(value) and issubclass(value, EmbeddingOptimizer) and value is not EmbeddingOptimizer:
        text += "\nThe other arguments are those of [EmbeddingOptimizer](#weftembeddingembeddingoptimizer).\n"
    if inspect.isclass(value):
        fields = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
        # Show members of undocumented base classes with the class.
        hidden = [base for base in value.__mro__[1:] if base.__module__.startswith("weft.nn.") and not _is_shown(base)]
        members = {n: m for of in (*reversed(hidden), value) for n, m in vars(of).items()}
        methods = {
            n: m for n, m in members.items() if not n.startswith("_") and n not in fields and _is_method(m) and _doc(m)
        }
        text += f"\n{_table(methods)}" if methods else ""
    return text


def _is_shown(base: type) -> bool:
    return getattr(weft.nn, base.__name__, None) is base


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod, property))


def _doc(value: Any) -> str:
    """Return the value's own docstring, not an inherited one. For a dataclass without a docstring, return its field names."""
    if inspect.isbuiltin(value):
        return ""  # a bound method of a built-in class: its docstring describes the class's method, not weft's name
    of: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    text = inspect.cleandoc(of.__doc__ or "")
    if inspect.isclass(of) and dataclasses.is_dataclass(of) and text.startswith(f"{of.__name__}("):
        return f"Fields: {', '.join(f'`{field.name}`' for field in dataclasses.fields(of))}."
    return text


def _signature(value: Callable[..., Any]) -> str:
    found = inspect.signature(value)
    short = _unquoted(f"{value.__name__}{found}")
    if len(short) <= 100:
        return short
    lines, starred = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines.append("    *,")
            starred = True
        lines.append(f"    {parameter},")
    returned = "" if found.return_annotation is inspect.Signature.empty else f" -> {found.return_annotation}"
    return _unquoted("\n".join([f"{value.__name__}(", *lines, f"){returned}"]))


def _unquoted(signature: str) -> str:
    """Return the signature without quotes around annotations and without addresses of functions."""
    signature = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", signature)
    return re.sub(r"""(: |-> )(['"])(.*?)\2(?=,| =|\)|$)""", r"\1\3", signature, flags=re.MULTILINE)


def _markdown(text: str, parameters: set[str]) -> str:
    """Return a docstring as Markdown. Each argument becomes a list item with its indented lines."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        found = re.match(r"\s*(\w+(?:, \w+)*): (.*)", line)
        if found and set(found[1].split(", ")) <= parameters:
            if not inside:
                lines.append("")
            lines.append(f"- `{found[1]}`: {found[2]}")
            inside = True
        elif line.strip() == "Args:":
            continue
        elif inside and line.startswith(" "):
            lines.append(f"  {line.strip()}")
        else:
            if inside and line.strip():
                lines.append("")
            inside = inside and not line.strip()
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _sentence(value: Any) -> str:
    """Return the first sentence of a docstring."""
    paragraph = " ".join(_doc(value).partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s(?=[A-Z`])", paragraph)[0]


def _table(names: dict[str, Any]) -> str:
    rows = [f"| `{name}` | {_sentence(value).replace('|', chr(92) + '|')} |" for name, value in names.items()]
    return "\n".join(["| name | what it is |", "|---|---|", *rows]) + "\n"


def main() -> None:
    (HERE / "api.md").write_text(api())
    (HERE / "environment.md").write_text(environment())


if __name__ == "__main__":
    main()
