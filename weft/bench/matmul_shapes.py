"""Shapes of operators with a GEMM, from `benchmarks/shapes/OP.toml`, each with where it comes from; or as typed, MxNxK.

With "-symmetric" behind it a group or a shape has its input in symmetric memory already, which is a shape of its own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import weft

CPU_GROUP = "cpu"
"""The group that runs on CPUs by default; the others run on GPUs."""
_SYMMETRIC = "-symmetric"


@dataclass(frozen=True)
class MatmulShape:
    """[m, k] @ [k, n], n on each rank. symmetric: peers can read the input where it lies."""

    m: int
    n: int
    k: int
    sources: tuple[str, ...] = ()
    symmetric: bool = False

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}{_SYMMETRIC * self.symmetric}"


def shapes_file(op: str) -> Path:
    return Path(weft.__file__).parents[1] / "benchmarks" / "shapes" / f"{op}.toml"


def find_shapes(file: Path, preset: str | None, device: str) -> tuple[MatmulShape, ...]:
    """Those of all groups that suit the device, or of the groups and shapes that `preset` names, with commas between.

    Raises ValueError for a name that is neither.
    """
    groups = _groups(file)
    found: list[MatmulShape] = []
    for given in named_groups(tuple(groups), preset, device):
        name, symmetric = given.removesuffix(_SYMMETRIC), given.endswith(_SYMMETRIC)
        typed = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", name)
        if name in groups:
            found += [replace(shape, symmetric=symmetric) for shape in groups[name]]
        elif typed:
            found.append(MatmulShape(int(typed[1]), int(typed[2]), int(typed[3]), symmetric=symmetric))
        else:
            raise ValueError(
                f"no preset {given!r}: give one of {known_groups(tuple(groups), file)}, or a shape MxNxK such as 8192x4096x8192; "
                f"with {_SYMMETRIC} behind it, inputs lie in symmetric memory"
            )
    return _merged(found)


def named_groups(groups: Sequence[str], preset: str | None, device: str) -> list[str]:
    """What `preset` names, with commas between; None: the groups that suit the device."""
    if preset is None:
        return [group for group in groups if (group == CPU_GROUP) == (device == "cpu")]
    return [part.strip() for part in preset.split(",")]


def known_groups(groups: Sequence[str], file: Path) -> str:
    """For an error: which groups there are."""
    return ", ".join(groups) or f"nothing (there is no {file}: shapes are in the repository, not in the wheel)"


def _merged(shapes: list[MatmulShape]) -> tuple[MatmulShape, ...]:
    """Each shape once, with all its sources."""
    sources: dict[MatmulShape, list[str]] = {}
    for shape in shapes:
        sources.setdefault(replace(shape, sources=()), []).extend(shape.sources)
    return tuple(replace(shape, sources=tuple(dict.fromkeys(found))) for shape, found in sources.items())


def _groups(file: Path) -> dict[str, list[MatmulShape]]:
    if not file.exists():
        return {}
    return {name: list(_shapes(name, group)) for name, group in tomllib.loads(file.read_text()).items()}


def _shapes(name: str, group: dict[str, Any]) -> Iterator[MatmulShape]:
    for m, n, k in group.get("shapes", []):
        yield MatmulShape(m, n, k, (name,))
    for layer, given in group.get("layers", {}).items():
        for m in given.get("m", group.get("m", [])):
            yield MatmulShape(m, given["n"], given["k"], (f"{name} {layer}",))
