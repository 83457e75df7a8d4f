"""The runner of the GPU tests leaves no test out, and tells what failed."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARKS = ("mark.gpu", "kernel_device", "ON_GPU")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "tools/gpu_tests.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_tests"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_tests"]


def test_every_file_with_gpu_tests_belongs_to_a_part(tool):
    paths = [ROOT / path.split("::")[0] for part in (*tool.TOGETHER, *tool.ALONE) for path in part.paths]
    assert all(path.exists() for path in paths)
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    marked = [path for path in files if any(mark in path.read_text() for mark in MARKS)]
    assert len(marked) > 15
    assert [path for path in marked if not any(path.is_relative_to(part) for part in paths)] == []


def test_what_one_part_leaves_out_another_runs(tool):
    """A test that a part names is left out by the part that has its file, and only such a test is."""
    parts = (*tool.TOGETHER, *tool.ALONE)
    named = [path for part in parts for path in part.paths if "::" in path]
    left_out = [test for part in parts for test in part.without]
    assert sorted(named) == sorted(set(left_out))
    for test in left_out:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()
        leaving = [part for part in parts if test in part.without]
        assert len({part.name for part in leaving}) == 1
        assert len(leaving) == leaving[0].shares
        assert any((ROOT / file).is_relative_to(ROOT / path) for path in leaving[0].paths)


def test_a_part_runs_all_but_what_it_leaves_out(tool, tmp_path):
    path = "tests/device/test_cpus.py"
    tests = re.findall(r"^def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE)
    left_out = f"{path}::{tests[0]}"
    (part,) = tool.parts_of("part", path, without=(left_out,))
    outcome = tool.Run(tmp_path, time.monotonic() + 120, ["-m", "not gpu"]).part(part)
    assert outcome.problems == []
    log = (tmp_path / "part.log").read_text()
    assert f"{left_out} " not in log
    assert all(f"::{name}" in log for name in tests[1:])


def test_whoever_takes_longest_begins_first(tool, tmp_path, monkeypatch):
    pytest_itself = tmp_path / "python"
    pytest_itself.write_text(f'#!/bin/sh\nshift 2\necho "$@" >>{tmp_path}/order\n')
    pytest_itself.chmod(0o755)
    monkeypatch.setattr(tool.sys, "executable", str(pytest_itself))
    parts = [tool.Part("short", ("a",), 5), tool.Part("long", ("b",), 50), tool.Part("middle", ("c",), 20)]
    tool.run_all(tool.Run(tmp_path, time.monotonic() + 120, []), parts, 1)
    assert [line.split()[-1] for line in (tmp_path / "order").read_text().splitlines()] == ["b", "c", "a"]
    assert all(part.seconds for part in tool.TOGETHER)


def test_shares_make_up_the_whole(tool):
    labels = [part.label for part in (*tool.TOGETHER, *tool.ALONE)]
    assert len(set(labels)) == len(labels)
    assert [part.share for part in tool.parts_of("x", "tests", shares=3)] == [1, 2, 3]


@pytest.mark.parametrize("shares", [1, 3])
def test_a_part_runs_its_share(tool, tmp_path, shares):
    arguments = ["-m", "not gpu"]
    run = tool.Run(tmp_path, time.monotonic() + 120, arguments)
    parts = tool.parts_of("buckets", "tests/device/test_cpus.py", shares=shares)
    outcomes = tool.run_all(run, parts, 2)
    assert [outcome.problems for outcome in outcomes] == [[]] * shares
    assert sum(outcome.passed for outcome in outcomes) == 7
    assert all((tmp_path / f"{part.label}.log").stat().st_size for part in parts)


@pytest.mark.parametrize(("workers", "threads"), [(1, "6"), (4, "1"), (18, "1")])
def test_parts_side_by_side_share_the_cpus(tool, tmp_path, monkeypatch, workers, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setattr(tool, "usable_cpus", lambda: 6)
    pytest_itself = tmp_path / "python"
    pytest_itself.write_text('#!/bin/sh\necho "$OMP_NUM_THREADS $MKL_NUM_THREADS"\n')
    pytest_itself.chmod(0o755)
    monkeypatch.setattr(tool.sys, "executable", str(pytest_itself))
    run = tool.Run(tmp_path, time.monotonic() + 120, [])
    tool.run_all(run, tool.parts_of("part", "tests", shares=2), workers)
    assert [(tmp_path / f"part_{share}.log").read_text().split() for share in (1, 2)] == [[threads] * 2] * 2


def test_who_has_the_card_to_itself_is_held_to_the_loops_limits(tool, tmp_path, monkeypatch):
    pytest_itself = tmp_path / "python"
    pytest_itself.write_text('#!/bin/sh\necho "$@"\n')
    pytest_itself.chmod(0o755)
    monkeypatch.setattr(tool.sys, "executable", str(pytest_itself))
    run = tool.Run(tmp_path, time.monotonic() + 120, [])
    tool.run_all(run, [*tool.parts_of("beside", "tests"), tool.alone("alone", "tests")], 1)
    asked = {name: (tmp_path / f"{name}.log").read_text().split() for name in ("beside", "alone")}
    assert [name for name, words in asked.items() if "--shared-card" in words] == ["beside"]
    assert tool.ALONE
    assert all(part.alone for part in tool.ALONE)
    assert not any(part.alone for part in tool.TOGETHER)


@pytest.mark.parametrize("status", [0, 2])
def test_the_whole(tool, tmp_path, monkeypatch, capsys, status):
    """What runs alone comes last and one by one; the status tells of failures; an unknown part is refused."""
    order = tmp_path / "order"
    pytest_itself = tmp_path / "python"
    pytest_itself.write_text(
        f"#!/bin/sh\necho begin >>{order}\nsleep 0.2\necho end >>{order}\nexit {status}\n"
    )
    pytest_itself.chmod(0o755)
    monkeypatch.setattr(tool.sys, "executable", str(pytest_itself))
    names = ["rope", *(part.name for part in tool.ALONE)]
    monkeypatch.setattr(
        tool.sys, "argv", ["x", "--out", str(tmp_path / "out"), "--workers", "4", "--only", ",".join(names)]
    )
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert bool(ended.value.code) == bool(status)
    assert order.read_text().split() == ["begin", "end"] * len(names)
    assert capsys.readouterr().out.count("pytest ended with status") == bool(status) * len(names)
    monkeypatch.setattr(tool.sys, "argv", ["x", "--only", "nosuch"])
    with pytest.raises(SystemExit):
        tool.main()
    assert "no part is called nosuch" in capsys.readouterr().err


def test_what_fails_is_told_with_its_reason(tool, tmp_path):
    report = tmp_path / "part.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="test_good"/>'
        '<testcase classname="tests.a" name="test_bad"><failure message="gap 3.5&#10;in prompt 4"/></testcase>'
        '<testcase classname="tests.a" name="test_left"><skipped/></testcase></testsuite></testsuites>'
    )
    outcome = tool.read_report(tool.Part("part", ()), report, 1.0)
    assert (outcome.passed, outcome.skipped) == (1, 1)
    assert outcome.problems == [("tests.a::test_bad", "gap 3.5 in prompt 4")]
    assert "1 FAILED" in outcome.line


def test_a_part_without_tests_or_without_time_has_not_passed(tool, tmp_path):
    part = tool.Part("none", ("tests/device/test_cpus.py",))
    assert tool.Run(tmp_path, time.monotonic() + 120, []).part(part).problems == [
        ("none", "no tests: is there a GPU?")
    ]
    (problem,) = tool.Run(tmp_path, time.monotonic(), []).part(part).problems
    assert "budget" in problem[1]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 2", "status 2"),  # as where a file cannot be collected
        ("exit 1", "status 1"),  # and no failure in the report
        ("sleep 60 & wait $!", "budget"),
        ("trap '' INT; exec sleep 20", "budget"),  # as one that hangs in a driver
    ],
)
def test_how_pytest_ended_is_told(tool, tmp_path, monkeypatch, script, reason):
    monkeypatch.setattr(tool, "INTERRUPT_S", 0.5)
    pytest_itself = tmp_path / "python"
    pytest_itself.write_text(f"#!/bin/sh\ntrap 'kill $!; exit 2' INT\n{script}\n")
    pytest_itself.chmod(0o755)
    monkeypatch.setattr(tool.sys, "executable", str(pytest_itself))
    outcome = tool.Run(tmp_path, time.monotonic() + 1, []).part(tool.Part("part", ("tests",)))
    (problem,) = outcome.problems
    assert outcome.seconds < 10
    assert problem[0] == "part"
    assert reason in problem[1]


def test_half_a_report_is_none(tool, tmp_path):
    report = tmp_path / "part.xml"
    for text in ("", "<testsuites><testsu"):
        report.write_text(text)
        outcome = tool.read_report(tool.Part("part", ()), report, 1.0)
        assert (outcome.passed, outcome.problems) == (0, [])
