"""pytest on the tests named, and how each ended into a JSON file: python tests/faults/run.py FILE TEST ..."""

import json
import sys
from pathlib import Path

import pytest


class Ends:
    """The end of each test: "passed", "skipped", or the type of the first error."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if self.of.get(item.nodeid, "passed") == "passed":
            self.of[item.nodeid] = report.outcome if call.excinfo is None else call.excinfo.typename
        return report


if __name__ == "__main__":
    ends = Ends()
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[2:]], plugins=[ends])
    Path(sys.argv[1]).write_text(json.dumps(ends.of))
