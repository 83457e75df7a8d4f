"""How the interpreter of a serving process is set: few pauses, of the collector and for the GIL."""

from __future__ import annotations

import gc
import sys
from typing import Final

_COLLECT_AFTER: Final = (2_000, 5, 100)
"""Thresholds of the collector's generations."""
_SWITCH_S: Final = 0.001


def collect_rarely() -> None:
    """At the beginning of a process that serves, before anything large is imported.

    What is imported and loaded stays, so that looking through it for garbage finds none: a tenth of torch's import.
    """
    gc.set_threshold(*_COLLECT_AFTER)


def settle_interpreter() -> None:
    """Once everything that lives as long as the process is loaded, before anything is served.

    What is loaded is left to no collection, and full collections become rare.

    Left to the collector, each full collection walks all of it: 100 ms with torch imported, in which nothing else runs.
    A request makes some hundred containers that live as long as it does, so at the usual threshold a burst of 500 has
    half a dozen full collections of 20 ms each. A thread that computes in Python (a chat template) gives the GIL back
    to the loop after 1 ms instead of 5.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    collect_rarely()
