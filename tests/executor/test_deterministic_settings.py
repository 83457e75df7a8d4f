"""Where the deterministic mode is asked for and cannot hold, the start says so."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oneloop.config import EngineConfig
from oneloop.errors import ConfigError
from oneloop.executor.loading import ModelLoading
from oneloop.formats.model_spec import ModelSpec
from oneloop.start_times import StartTimes

SETTINGS = ["deterministic", "deterministic_requests"]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("more", [{"device": "cpu"}, {"device": "cuda", "kv_cache_dtype": "fp8"}], ids=str)
def test_settings_that_do_not_go_together(setting: str, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat({setting: True, **more})
    assert caught.value.field == setting


@pytest.mark.parametrize("setting", SETTINGS)
def test_models_whose_kernels_have_no_fixed_order(setting: str) -> None:
    loading = ModelLoading(EngineConfig.from_flat({"device": "cuda", setting: True}), StartTimes())
    spec = ModelSpec(
        architecture="LlamaForCausalLM", hidden_size=64, intermediate_size=128, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=16, vocab_size=128, max_position=128, rms_norm_eps=1e-5, rope_theta=1e4,
        rope_scaling=None, tie_word_embeddings=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
        dtype="bfloat16",
    )  # fmt: skip
    loading._check_order(spec)
    for changes in ({"moe": SimpleNamespace()}, {"quantization": SimpleNamespace()}):
        with pytest.raises(ConfigError) as caught:
            loading._check_order(replace(spec, **cast("Any", changes)))
        assert caught.value.field == setting
    without = ModelLoading(EngineConfig.from_flat({"device": "cuda"}), StartTimes())
    without._check_order(replace(spec, **cast("Any", {"moe": SimpleNamespace()})))


def test_which_orders_steps_may_have() -> None:
    def orders(**settings: bool) -> tuple[bool, ...]:
        return EngineConfig.from_flat({"device": "cuda", **settings}).worker.orders

    assert orders() == (False,)
    assert orders(deterministic_requests=True) == (False, True)
    assert orders(deterministic=True) == orders(deterministic=True, deterministic_requests=True) == (True,)
