"""Views on the slab."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from oneloop.worker.inputs import SlabViews


def test_views_are_the_slab_itself(core_factory, buffer_factory):
    core = core_factory()
    buffer = buffer_factory(core.layout.num_bytes)
    views = SlabViews.over(buffer, core.layout)
    handle = core.submit([4, 5, 6], max_tokens=1, temperature=0.0)
    step = core.schedule(buffer)
    header = views.header()
    assert (header.step_id, header.num_rows, header.num_tokens, header.num_samples) == (step, 1, 3, 1)
    assert views.token_ids[:3].tolist() == [4, 5, 6]
    views.output_token[0] = 42
    (delta,) = core.commit(step, buffer)
    assert (delta.request, delta.token_ids) == (handle, [42])


def test_nothing_is_copied(core_factory, buffer_factory):
    layout = core_factory().layout
    buffer = buffer_factory(layout.num_bytes)
    views = SlabViews.over(buffer, layout)
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    for field in layout.fields:
        if field.name not in (
            "header",
            "freed_slot",
            "admitted_adapter",
            "mask_header",
        ):  # read by name, or not at all
            assert getattr(views, field.name).ctypes.data == start + field.offset


def test_a_layout_of_another_version_is_named(core_factory, buffer_factory):
    layout = core_factory().layout
    older = SimpleNamespace(
        fields=[field for field in layout.fields if field.name != "cow_src"],
        header={name: index for name, index in layout.header.items() if name != "num_forks"},
    )
    with pytest.raises(ValueError, match=r"lacks cow_src, header\.num_forks"):
        SlabViews.over(buffer_factory(layout.num_bytes), older)
