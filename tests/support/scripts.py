"""Scripts of docs/ and examples/, imported as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DOCS, EXAMPLES = (Path(__file__).parents[2] / name for name in ("docs", "examples"))


def load(path: Path) -> ModuleType:
    """Return the script as a new module, without running its `main`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
