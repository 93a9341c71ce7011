"""The command line: `weft demo`, `weft bench`, `weft plan`, `weft doctor`.

`weft --help` answers at once: torch loads when needed.
"""

from __future__ import annotations

from weft.cli.app import app, main

__all__ = ["app", "main"]
