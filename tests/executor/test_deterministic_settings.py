"""Where the deterministic mode is asked for and cannot hold, the start says so."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oneloop.config import EngineConfig
from oneloop.errors import ConfigError
from oneloop.executor.loading import ModelLoading
from oneloop.start_times import StartTimes

SETTINGS = ["deterministic", "deterministic_requests"]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("more", [{"device": "cpu"}, {"device": "cuda", "kv_cache_dtype": "fp8"}], ids=str)
def test_settings_that_do_not_go_together(setting: str, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat({setting: True, **more})
    assert caught.value.field == setting


@pytest.mark.parametrize("setting", SETTINGS)
def test_models_whose_kernels_have_no_fixed_order(setting: str, make_spec: Any) -> None:
    loading = ModelLoading(EngineConfig.from_flat({"device": "cuda", setting: True}), StartTimes())
    spec = make_spec()
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
