"""Which steps of the GPU's runner have their sums in the fixed order: those that hold a row of a request that asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from oneloop.models.decoder import Decoder
from oneloop.models.registry import build_model
from oneloop.worker.gpu.runner import GpuModelRunner
from oneloop.worker.gpu.slab import HostSlab
from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.order import order_is_fixed
from oneloop_kernels.registry import TRITON, prefer

if TYPE_CHECKING:
    from collections.abc import Callable

ON_GPU = torch.cuda.is_available() and not INTERPRETED
if ON_GPU:
    pytestmark = pytest.mark.gpu
DEFAULT, FIXED = "default", "fixed"


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        pytest.param((False, True), [FIXED] * 2 + [DEFAULT] * 3, id="where requests may ask"),
        pytest.param((True,), [FIXED] * 5, id="where all are"),
        pytest.param((False,), [DEFAULT] * 5, id="where none is"),
    ],
)
def test_of_two_requests_one_asks(
    sides: Any,
    make_spec: Callable[..., Any],
    core_factory: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    orders: tuple[bool, ...],
    expected: list[str],
) -> None:
    """It ends after two steps, and the other goes on. Products and logits are looked at, in each step."""
    seen: dict[str, list[str]] = {}

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(Decoder, name)

        def spy(*arguments: Any) -> Any:
            seen.setdefault(name, []).append(FIXED if order_is_fixed() else DEFAULT)
            return original(*arguments)

        return spy

    spec = make_spec(head_dim=64, hidden_size=64)
    core = core_factory(
        block_size=sides.BLOCK_SIZE, num_blocks=sides.NUM_BLOCKS, vocab_size=sides.VOCAB_SIZE, hash_key=None
    )
    side = SideWithOrders(sides, spec, core.layout, orders)
    for name in ("forward", "compute_logits"):
        monkeypatch.setattr(Decoder, name, watched(name))
    requests = [
        ([1, 2, 3, 4, 5], {"max_tokens": 5, **sides.GREEDY}),
        ([6, 7, 8], {"max_tokens": 2, "deterministic": True, **sides.GREEDY}),
    ]
    outcome = sides.drive(side, core, requests, lookahead=False)
    assert sorted(map(len, outcome.texts)) == [2, 5]
    assert seen == {"forward": expected, "compute_logits": expected}


class SideWithOrders:
    """As test_gpu_runner.DeviceSide, launched kernel by kernel. orders: as the runner's."""

    def __init__(self, sides: Any, spec: Any, layout: Any, orders: tuple[bool, ...]) -> None:
        self._slabs = [HostSlab(layout, pinned=ON_GPU) for _ in range(3)]
        with prefer(TRITON):
            self.runner = GpuModelRunner(
                sides.fill(build_model(spec, torch.float32, sides.DEVICE)),
                sides.memory_plan(spec),
                layout,
                self._slabs,
                max_num_seqs=sides.MAX_NUM_SEQS,
                max_num_tokens=sides.MAX_TOKENS,
                enforce_eager=True,
                orders=orders,
            )
        self.buffers = [slab.buffer for slab in self._slabs]

    def launch(self, slab_index: int) -> None:
        self.runner.launch(slab_index)

    def num_masked(self, _slab_index: int) -> int:
        """No request has masks."""
        return 0

    def wait(self) -> None:
        if ON_GPU:
            torch.cuda.synchronize()
