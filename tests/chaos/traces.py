"""The events and the current action of a rank, recorded for the process that watches it.

Events are lines of a file. The current action is on a board in shared memory. A rank may be killed, stopped or hang at
any moment; everything that it wrote before stays readable. Times are `time.monotonic`, which is the same in all
processes of a machine.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

STARTING, BETWEEN, CALLING, DONE, LEAVING = range(5)
_ROW = struct.Struct("<dd")
_PLACES = 32  # rows: one for each rank, and the last two for the whole trial
_GO, _HOME = _PLACES - 2, _PLACES - 1


class Trace:
    """A file with one line of JSON per event. It is written without buffers, so that it survives the death of its
    process.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def write(self, event: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"event": event, "t": time.monotonic(), **values}) + "\n").encode())

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]


class Board:
    """A row for each rank: its action, and since when.

    go: the victim has reached the place of the fault. home: all ranks have finished, and may leave.
    """

    def __init__(self, path: Path, rank: int | None = None) -> None:
        if not path.exists():
            path.write_bytes(bytes(_ROW.size * _PLACES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _ROW.size * _PLACES)
        self._rank = rank

    def _write(self, row: int, state: int) -> None:
        """Write the whole row at once. `pack_into` would clear the row first, and a rank may be stopped in between."""
        self._memory[row * _ROW.size : (row + 1) * _ROW.size] = _ROW.pack(state, time.monotonic())

    def set(self, state: int) -> None:
        assert self._rank is not None
        self._write(self._rank, state)

    def of(self, rank: int) -> tuple[int, float]:
        state, since = _ROW.unpack_from(self._memory, rank * _ROW.size)
        return int(state), since

    def go(self) -> None:
        self._write(_GO, 1)

    def gone_at(self) -> float | None:
        said, when = _ROW.unpack_from(self._memory, _GO * _ROW.size)
        return when if said else None

    def send_home(self) -> None:
        self._write(_HOME, 1)

    def wait_until_sent_home(self) -> None:
        while not _ROW.unpack_from(self._memory, _HOME * _ROW.size)[0]:
            time.sleep(0.005)
