"""The anonymous files of CPU symmetric memory, in one process."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from support.on_ranks import descriptors

from weft.symm import cpu


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
