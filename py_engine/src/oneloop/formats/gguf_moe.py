"""The experts of a GGUF file → MoeSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oneloop.formats.model_spec import MoeSpec

if TYPE_CHECKING:
    from oneloop.formats.gguf_metadata import GgufMetadata

RENORMALISED: Final = {"llama": True, "qwen2moe": False, "qwen3moe": True}
"""GGUF's architectures that may have experts → what is meant where a file does not say expert_weights_norm."""
_MAX_EXPERTS: Final = 4096
_MAX_WIDTH: Final = 1 << 20
_SOFTMAX: Final = 1
_OTHER_MATHEMATICS: Final = {
    "expert_group_count": "choosing groups of experts first",
    "leading_dense_block_count": "layers without experts before those with",
    "expert_chunk_feed_forward_length": "experts in chunks",
}
"""Keys that must be absent or at most 1 (0 for counts of layers) → what they ask for."""


def gguf_moe_spec(metadata: GgufMetadata, arch: str, feed_forward: int) -> MoeSpec | None:
    """None where there are no experts. feed_forward: the key feed_forward_length.

    ModelError names the key that is missing, impossible or not supported.
    """
    key = f"{arch}.expert_count"
    if metadata.integer(key, 0, 1 << 32, default=0) == 0:
        if arch.endswith("moe"):
            metadata.fail(key, "this key is missing (a whole number from 1 on)")
        return None
    if arch not in RENORMALISED:
        metadata.fail(key, f"experts in '{arch}' are not supported; they are in {', '.join(RENORMALISED)}")
    _refuse_others(metadata, arch)
    num_experts = metadata.integer(key, 1, _MAX_EXPERTS)
    top_k = metadata.integer(f"{arch}.expert_used_count", 1, num_experts)
    is_qwen2 = arch == "qwen2moe"
    default = max(1, feed_forward // top_k) if is_qwen2 else feed_forward
    shared = 0
    if is_qwen2:
        shared_key = f"{arch}.expert_shared_feed_forward_length"
        shared = metadata.integer(shared_key, 1, _MAX_WIDTH, default=feed_forward)
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=metadata.integer(
            f"{arch}.expert_feed_forward_length", 1, _MAX_WIDTH, default=default
        ),
        renormalised=metadata.boolean(f"{arch}.expert_weights_norm", default=RENORMALISED[arch]),
        shared_intermediate_size=shared,
        shared_gate=shared > 0,
        layout="mixtral" if arch == "llama" else "qwen",
    )


def _refuse_others(metadata: GgufMetadata, arch: str) -> None:
    """What needs other mathematics."""
    for name, what in _OTHER_MATHEMATICS.items():
        most = 0 if name.endswith(("block_count", "length")) else 1
        if metadata.integer(f"{arch}.{name}", 0, 1 << 32, default=0) > most:
            metadata.fail(f"{arch}.{name}", f"{what} is not supported")
    scale = f"{arch}.expert_weights_scale"
    if metadata.real(scale, 0.0, 1e6, default=1.0) not in (0.0, 1.0):  # 0: the file's maker had none to tell
        metadata.fail(scale, "weights that are multiplied by a number are not supported")
    gating = f"{arch}.expert_gating_func"
    if metadata.integer(gating, 0, 1 << 16, default=_SOFTMAX) not in (0, _SOFTMAX):
        metadata.fail(gating, f"only routing by softmax ({_SOFTMAX}) is supported")
    step = f"{arch}.interleave_moe_layer_step"
    if metadata.integer(step, 0, 1 << 16, default=1) > 1:
        metadata.fail(step, "layers without experts between those with are not supported")
    if arch != "qwen2moe" and metadata.integer(f"{arch}.expert_shared_count", 0, 1 << 16, default=0):
        metadata.fail(f"{arch}.expert_shared_count", f"'{arch}' with a shared expert is not supported")
