"""What an executor refuses of a model before it plans and loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oneloop.config import EngineConfig
from oneloop.errors import ConfigError, ModelError
from oneloop.executor.loading import refuse_card
from oneloop.formats.quantization.config import WHILE_LOADING
from oneloop.formats.quantization.spec import QuantizationSpec
from oneloop.loader.resolve import resolve_model
from oneloop_kernels.ops import fp8_linear


@pytest.mark.parametrize("setting", ["deterministic", "deterministic_requests"])
def test_the_fixed_order_of_8_bit_weights_wants_a_card_with_kernels_for_them(
    tiny_model, setting, monkeypatch
):
    """Which cards those are the kernels say."""
    monkeypatch.setattr(fp8_linear, "LEAST_GENERATION", 11)
    spec = resolve_model(str(tiny_model), load_format="dummy").spec
    fp8 = replace(spec, quantization=QuantizationSpec(method="fp8", scheme=WHILE_LOADING["fp8"]))
    config = EngineConfig.from_flat({"device": "cuda", setting: True})
    with pytest.raises(ConfigError, match="compute capability 11 on") as error:
        refuse_card(fp8, config, 10)
    assert error.value.field == setting
    refuse_card(fp8, config, 11)
    refuse_card(spec, config, 8)
    refuse_card(fp8, EngineConfig.from_flat({"device": "cuda"}), 8)


def test_experts_of_8_bits_want_a_card_with_kernels_for_them(tiny_sparse_model):
    """In any order; other experts, and those that are left alone, do not."""
    spec = resolve_model(str(tiny_sparse_model), load_format="dummy").spec
    quantization = QuantizationSpec(method="fp8", scheme=WHILE_LOADING["fp8-block"])
    fp8 = replace(spec, quantization=quantization)
    config = EngineConfig.from_flat({"device": "cuda", "model": str(tiny_sparse_model)})
    with pytest.raises(
        ModelError, match="from compute capability 9 on, and this card's is 8; take the model"
    ) as error:
        refuse_card(fp8, config, 8)
    assert error.value.file == str(tiny_sparse_model)
    refuse_card(fp8, config, 9)
    refuse_card(spec, config, 8)
    refuse_card(replace(spec, quantization=replace(quantization, ignored=("experts",))), config, 8)
