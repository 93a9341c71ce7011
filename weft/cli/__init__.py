"""The command line: `weft demo`, `weft bench`, `weft plan`, `weft reproduce`, `weft doctor`.

It needs the packages of the extra `weft[cli]`, which the library does not need. `weft --help` is fast: torch is imported on
demand.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `weft` command. Without the extra, print the command that installs it, and exit with status 1."""
    from weft.bench.core.arguments import one_line

    try:
        with one_line("weft"):  # also handles Ctrl-C during imports
            from weft.cli.app import main as run

            run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich", "matplotlib", "torch", "numpy"):
            raise
        sys.exit(f"weft: the command needs {missing}: pip install 'weft[cli]'")
