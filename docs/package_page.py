"""Rewrite the README for a package index: links to paths become URLs of the repository.

    python docs/package_page.py FOLDER

It rewrites FOLDER/README.md, in a copy of the tree from which packages are built (`make release`). In a checkout, links stay
paths, so they work in a fork, on a branch and without a network.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)", re.DOTALL)


def package_page(readme: str, repository: str) -> str:
    """Return `readme` with absolute URLs: files under `repository`/blob/main, pictures under `repository`/raw/main."""

    def absolute(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/main/{path})"

    return _LINK.sub(absolute, readme)


def main(folder: Path) -> None:
    """Rewrite FOLDER/README.md. Raise SystemExit if the repository's URL is still the placeholder."""
    repository = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    if repository.partition("://")[2].partition("/")[0].endswith(".example"):
        sys.exit(f"project.urls in pyproject.toml says {repository}: give the repository's address before you release")
    page = folder / "README.md"
    page.write_text(package_page(page.read_text(), repository))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
