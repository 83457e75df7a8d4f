"""CPUs that a process may use, and those that its control group grants."""

import os

import pytest

from oneloop.device.cpus import usable_cpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("300000 100000", 3),
        ("max 100000", 16),
        ("", 16),
        ("99 0 1", 16),
    ],
)
def test_the_lesser_of_affinity_and_quota(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(16)), raising=False)
    quota_file = tmp_path / "cpu.max"
    quota_file.write_text(text)
    assert usable_cpus(quota_file) == expected


def test_without_a_control_group_those_it_may_run_on(tmp_path):
    assert usable_cpus(tmp_path / "missing") == len(os.sched_getaffinity(0))
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
