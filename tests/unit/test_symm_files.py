"""Files and the store through which ranks meet."""

from __future__ import annotations

import os
import threading
import time
from typing import Any
from unittest import mock

import pytest
from support.on_ranks import descriptors

from weft.errors import DeadlineError
from weft.symm import cpu
from weft.symm.at_exit import threads_inside
from weft.symm.store import PatientStore


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupt_while_pages_are_reserved_leaves_no_file(error: type[BaseException]) -> None:
    before = descriptors()
    with mock.patch.object(os, "posix_fallocate", side_effect=error("now")):
        if error is OSError:
            assert cpu._reserve(4096) == (None, "reserving failed: now")
        else:
            with pytest.raises(error):
                cpu._reserve(4096)
    assert not descriptors() - before


class StoppedStore:
    """A store whose answer arrives after the deadline."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def get(self, key: str) -> bytes:
        self.answers.wait()
        return b""


def test_the_exit_waits_for_a_query_that_was_abandoned() -> None:
    """If torch's native code returned while the interpreter exits, it would abort the process."""
    stopped: Any = StoppedStore()
    store = PatientStore(stopped, 0, time.monotonic())
    with pytest.raises(DeadlineError, match="rank 0 waited for the store of this process group to answer"):
        store.get("key")
    thread = store._thread
    assert thread is not None
    assert thread.ident in threads_inside()
    stopped.answers.set()
    store.close()
    thread.join()
    assert thread.ident not in threads_inside()
