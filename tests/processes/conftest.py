"""One pool of eight workers for all tests of several processes (under pytest-xdist: one for each of its workers)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.launch import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers that stay up between tests and start at first use. A test that kills ranks makes its own pool."""
    with Pool(8) as workers:
        yield workers
