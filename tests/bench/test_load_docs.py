"""docs/benchmarking.md names what there is."""

import re
import shlex
from pathlib import Path

import pytest

from oneloop_bench.commands.main import make_parser
from oneloop_bench.commands.serve_options import DATASETS
from oneloop_bench.load.checks import CHECKS
from oneloop_bench.load.datasets import MEAN_IN, MEAN_OUT, SIGMA_IN, SIGMA_OUT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/benchmarking.md").read_text()


def table(heading):
    """First column of the table with this heading."""
    rows = PAGE.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [re.sub(r"`", "", row.split("|")[1]).strip() for row in rows]


def test_tables_are_complete():
    assert table("check") == list(CHECKS)
    assert table("name") == list(DATASETS)


def test_options_exist():
    parsers = make_parser()._subparsers._group_actions[0].choices
    known = {option for parser in parsers.values() for option in parser._option_string_actions}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - {"--"}
    assert named
    assert named <= known


def test_commands_exist():
    parsers = make_parser()._subparsers._group_actions[0].choices
    assert set(re.findall(r"`oneloop bench ([a-z]+)", PAGE)) == set(parsers)


def test_the_shape_is_the_one_described():
    for number in (MEAN_IN, MEAN_OUT, SIGMA_IN, SIGMA_OUT):
        assert str(number) in PAGE


def commands_of(page):
    """What follows `oneloop` in its code blocks: lists of arguments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [
        shlex.split(line, comments=True)[1:] for line in lines if re.match(r"(\.venv/bin/)?oneloop ", line)
    ]


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarking.md"])
def test_commands_can_be_run_in_their_order(name):
    """Each has options that there are, and what `compare` reads has been saved before."""
    commands = [found[1:] for found in commands_of((ROOT / name).read_text()) if found[0] == "bench"]
    assert len(commands) >= 3
    saved = set()
    for command in commands:
        options = make_parser().parse_args(command)
        if options.command == "serve" and options.save_result:
            saved.add(options.result_filename)
        if options.command == "compare":
            assert {path.name for path in options.results} <= saved
