"""A serving interpreter: what was loaded is collected no more. In a process of its own, since it lasts."""

import subprocess
import sys

SCRIPT = """
import gc, math, sys
from oneloop.engine.interpreter import collect_rarely, settle_interpreter
before = math.prod(gc.get_threshold())
collect_rarely()
assert gc.get_freeze_count() == 0
assert math.prod(gc.get_threshold()) > 10 * before, "objects until a full collection"
settle_interpreter()
assert gc.get_freeze_count() > 1000
assert math.prod(gc.get_threshold()) > 10 * before
assert sys.getswitchinterval() < 0.005
"""


def test_what_is_loaded_is_frozen():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=30)
