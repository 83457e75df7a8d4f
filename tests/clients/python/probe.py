"""What the probes of Python clients share: the task comes in a JSON file, and a result for each case goes to another.

A probe runs in an environment of its own (tools/client_environments.py), so it knows neither oneloop nor pytest: it
asks, and writes what its client made of the answers; tests/clients/test_frameworks.py judges. Its two arguments are the
files. Standard output is the client's own.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def read_task() -> dict[str, Any]:
    """The server's address and key, and what to ask (`task` in tests/clients/test_frameworks.py)."""
    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return task


def run(cases: dict[str, Callable[[], Any]]) -> None:
    """Runs every case, also after one failed, and writes the results by name."""
    results = {}
    for name, case in cases.items():
        try:
            results[name] = case()
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
    Path(sys.argv[2]).write_text(json.dumps(results))


def in_each_way(task: dict[str, Any], case: Callable[[dict[str, Any]], Any]) -> Callable[[], Any]:
    """The case for each of the task's ways to have a tool called."""
    return lambda: {name: case(way) for name, way in task["tool_ways"].items()}


def error_of(call: Callable[[], Any]) -> dict[str, Any]:
    """The names of the class and its bases, the HTTP status and the message of what a call raises."""
    try:
        call()
    except Exception as error:
        return {
            "bases": [base.__name__ for base in type(error).__mro__],
            "status": error.status_code if hasattr(error, "status_code") else None,
            "message": str(error),
        }
    return {"failed": "no error was raised"}
