"""A slab in ordinary memory, for benches that stand in for the executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.worker.inputs import SlabViews, aligned_buffer

if TYPE_CHECKING:
    from oneloop_core import SlabLayout


class Slab:
    """buffer: what the core is given. views: its arrays."""

    def __init__(self, layout: SlabLayout) -> None:
        self.buffer = aligned_buffer(layout.num_bytes)
        self.views = SlabViews.over(self.buffer, layout)
