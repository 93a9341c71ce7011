"""The command line: `weft demo`, `weft bench`, `weft plan`, `weft reproduce`, `weft doctor`.

It needs the packages of the extra `weft[cli]`, which the library does not. `weft --help` answers at once: torch loads when needed.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The `weft` command; without the extra, one line that says what to install, and exit code 1."""
    try:
        from weft.cli.app import main as run

        run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich", "matplotlib"):
            raise
        sys.exit(f"weft: the command needs {missing}: pip install 'weft[cli]'")
