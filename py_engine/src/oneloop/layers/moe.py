"""The sparse feed-forward block: experts chosen token by token, and one that every token has, where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.formats.expected import EXPERT_NAMES
from oneloop.layers.limits import MLP_TOKENS_AT_ONCE
from oneloop.layers.mlp import GatedMLP
from oneloop.quant.experts import stored_experts
from oneloop_kernels.ops.moe import MOE, Experts, MoeCall, num_counters
from oneloop_kernels.ops.moe.packed_stack import PackedStack
from oneloop_kernels.ops.moe.weights import kind_of

if TYPE_CHECKING:
    from oneloop.formats.model_spec import MoeSpec
    from oneloop.formats.quantization.gguf import GgufQuantization
    from oneloop.formats.quantization.spec import QuantizationSpec
    from oneloop.layers.norm import RMSNorm
    from oneloop.quant.base import Target


class SparseMLP:
    """x + the sum of the experts that norm(x) is sent to, each times its weight; see ops.moe.

    experts: the weights of all of them, stacked.
    """

    __slots__ = (
        "_compute", "_counters", "_down", "_gate_up", "_in_parts", "_name", "_spec", "_statistics", "experts", "shared",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        spec: MoeSpec,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantizationSpec | GgufQuantization | None = None,
    ) -> None:
        """name: checkpoint name prefix of the layer. The router and the gate of a shared expert are always plain."""
        names = EXPERT_NAMES[spec.layout]
        self._name = f"{name}.{names.block}"
        self._spec = spec
        num_experts, width = spec.num_experts, spec.intermediate_size
        each = [f"{self._name}.experts.{expert}" for expert in range(num_experts)]
        halves = [{f"{one}.{names.gate}": width, f"{one}.{names.up}": width} for one in each]
        outputs = [{f"{one}.{names.down}": hidden_size} for one in each]
        self._gate_up = stored_experts(quantization, hidden_size, halves, dtype=dtype, device=device)
        self._down = stored_experts(quantization, width, outputs, dtype=dtype, device=device)
        self.experts = Experts(
            router=torch.empty(num_experts + spec.shared_gate, hidden_size, dtype=dtype, device=device),
            gate_up=self._gate_up.weight,
            down=self._down.weight,
            top_k=spec.top_k,
            renormalised=spec.renormalised,
        )
        self.shared: GatedMLP | None = None
        if spec.shared_intermediate_size:
            self.shared = GatedMLP(
                f"{self._name}.shared_expert",
                hidden_size,
                spec.shared_intermediate_size,
                bias=False,
                dtype=dtype,
                device=device,
                quantization=quantization,
            )
        self._statistics: torch.Tensor | None = None
        self._counters = torch.zeros(num_counters(num_experts), dtype=torch.int32, device=device)
        self._compute = MOE.resolve(device, dtype)
        self._in_parts = device.type == "cpu"

    def __call__(self, x: torch.Tensor, *, norm: RMSNorm, slots: torch.Tensor) -> None:
        """x += experts(norm(x)), in place. x: [num_tokens, hidden_size] contiguous.

        slots: [≤ num_tokens] int64: rows with a negative one, or none, are padding, which is sent to no expert.
        """
        step = MLP_TOKENS_AT_ONCE if self._in_parts else x.shape[0]
        for first in range(0, x.shape[0], step):
            self._add(x[first : first + step], norm, slots[first : first + step])

    def _add(self, x: torch.Tensor, norm: RMSNorm, slots: torch.Tensor) -> None:
        shared = None if self.shared is None else self.shared.output(x, norm=norm)
        self._compute(MoeCall(x, self.experts, norm.norm, self._counters, slots, shared, self._statistics))

    @property
    def kinds(self) -> tuple[str, ...]:
        """How gate and up of the experts are kept, and down: layers that agree in it have the same kernels."""
        return tuple(
            f"{kind_of(weight)} {weight.shift}" if isinstance(weight, PackedStack) else kind_of(weight)
            for weight in (self.experts.gate_up, self.experts.down)
        )

    def count_tokens(self) -> torch.Tensor:
        """[num_experts] int64 on the device: the tokens that each expert is sent from now on."""
        counts = torch.zeros(self._spec.num_experts, dtype=torch.int64, device=self._counters.device)
        self._statistics = counts
        return counts

    def weight_targets(self) -> dict[str, Target]:
        """Checkpoint tensor name → where it goes."""
        spec = self._spec
        targets: dict[str, Target] = {f"{self._name}.gate.weight": self.experts.router[: spec.num_experts]}
        if spec.shared_gate:
            targets[f"{self._name}.shared_expert_gate.weight"] = self.experts.router[spec.num_experts :]
        targets |= self._gate_up.targets() | self._down.targets()
        if self.shared is not None:
            targets |= self.shared.weight_targets()
        return targets
