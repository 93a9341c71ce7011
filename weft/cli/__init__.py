"""The command line: `weft demo`, `weft bench`, `weft plan`, `weft sim`, `weft reproduce`, `weft doctor`.

The commands need the packages of the extra `weft[cli]`. torch is imported on demand, so that `weft --help` is fast.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `weft` command. If the extra `weft[cli]` is missing, print how to install it, and exit with status 1."""
    try:
        from weft.bench.core.arguments import one_line

        with one_line("weft"):  # also handles Ctrl-C during imports
            from weft.cli.app import main as run

            run()
    except KeyboardInterrupt:  # during the import of `one_line`
        sys.exit(130)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich", "matplotlib", "torch", "numpy"):
            raise
        sys.exit(f"weft: the command needs {missing}: pip install 'weft[cli]'")
