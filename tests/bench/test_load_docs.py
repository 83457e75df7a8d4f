"""docs/benchmarking.md names what there is."""

import re
from pathlib import Path

from oneloop_bench.commands.main import make_parser
from oneloop_bench.commands.serve_options import DATASETS
from oneloop_bench.load.checks import CHECKS
from oneloop_bench.load.datasets import MEAN_IN, MEAN_OUT, SIGMA_IN, SIGMA_OUT

PAGE = (Path(__file__).parents[2] / "docs/benchmarking.md").read_text()


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
