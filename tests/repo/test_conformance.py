"""docs/conformance.md names tests that exist, and every row of the public reports that it speaks of once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/conformance.md").read_text()
ROWS = [f"H{number:02}" for number in range(1, 21)] + ["T5", "T6", "T7", "T8", "T9", "T10", "T11"]
ROWS += ["T18", "T19", "T20", "T21", "T30"]


def test_every_row_is_there_once() -> None:
    assert re.findall(r"^\| ([HT]\d+) \|", PAGE, re.MULTILINE) == ROWS


def test_the_tests_exist() -> None:
    num_tests = 0
    for line in PAGE.splitlines():
        file = ""
        for named_file, test in re.findall(r"`([\w/]+\.py)?(?:::(\w+))?`", line):
            file = named_file or file
            if not (named_file or test):
                continue
            path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / file
            assert path.is_file(), line
            if test:
                num_tests += 1
                assert re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE), (file, test)
    assert num_tests > 40
