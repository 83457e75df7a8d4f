"""`oneloop serve MODEL --plan`: how the memory would be shared out, and what the card's limits allow. Loads nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from oneloop.config import NULL_MODEL, EngineConfig, mixed_step_tokens, resolve_dtype
from oneloop.device.cards import card_named
from oneloop.device.nvml import first_gpu
from oneloop.errors import ConfigError
from oneloop.executor.loading import refuse_card, refuse_settings
from oneloop.loader.resolve import check_format, resolve_model
from oneloop.worker.memory.free import machine_memory
from oneloop.worker.memory.ledger import DeviceMemory, MemoryPlanError
from oneloop.worker.memory.plan import plan_memory
from oneloop.worker.memory.sizes import ITEM_BYTES, kv_item_bytes
from oneloop.worker.roofline import known_roofline

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from oneloop.config import DtypeName
    from oneloop.device.cards import Card
    from oneloop.formats.model_spec import ModelSpec
    from oneloop.worker.memory.ledger import MemoryLedger, MemoryPlan

CONTEXTS: Final = (1024, 4096, 16_384)
"""Lengths that the concurrency is given for, beside max_model_len."""
BATCHES: Final = (1, 8, 32, 128, 256)
"""Decode batches that step times are given for, as far as the cache holds them…"""
PREDICTED_CONTEXT: Final = 1024
"""…at this length, or the longest there is. It is also the prompts' of the prefill figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerToPlan:
    """What is to be served, and where."""

    config: EngineConfig
    spec: ModelSpec
    dtype: DtypeName
    device_name: str
    memory: DeviceMemory
    card: Card | None
    """None for a CPU and an unknown card."""


def show_plan(options: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    """Print the plan of these engine settings; returns the exit code. Raises ConfigError or ModelError.

    Where they do not fit, the ledger is printed as far as it is known, before the error.
    """
    server = find_server(settings, options.plan_device)
    try:
        plan = plan_memory(server.spec, server.dtype, server.config, server.memory)
    except MemoryPlanError as error:
        values = {**ledger_values(server, error.ledger), "error": str(error)}
        print(json.dumps(values) if options.json else ledger_text(values), flush=True)
        raise
    values = as_values(server, plan)
    print(json.dumps(values) if options.json else as_text(server.card, values))
    return 0


def find_server(settings: Mapping[str, Any], plan_device: str | None) -> ServerToPlan:
    """settings: flat, as for EngineConfig.from_flat. plan_device: key of a card, or None for this machine.

    ConfigError or ModelError for what a start would refuse too, but for weights, which are not looked at.
    """
    card = None if plan_device is None else card_named(plan_device)
    if card is not None:
        if settings.get("device") == "cpu":
            raise ConfigError("plan_device", f"is {card.key}, but device is cpu; leave one of them away")
        settings = {**settings, "device": "cuda"}
    config = EngineConfig.from_flat(settings)
    if config.model.model == NULL_MODEL and config.worker.executor == "null":
        raise ConfigError("plan", "the null executor without a model has no memory to plan; name a model")
    name, memory, card = _device(config, card)
    source = resolve_model(
        config.model.model,
        revision=config.model.revision,
        load_format="dummy",
        quantization=config.model.quantization,
    )
    check_format(config.model.load_format, "safetensors" if source.gguf is None else "gguf", source.path)
    refuse_settings(source.spec, config)
    if card is not None:
        refuse_card(source.spec, config, card.generation)
    dtype = resolve_dtype(
        config.model.dtype, config.resolved.device, source.spec.dtype, gguf=source.gguf is not None
    )
    return ServerToPlan(
        config=config, spec=source.spec, dtype=dtype, device_name=name, memory=memory, card=card
    )


def _device(config: EngineConfig, card: Card | None) -> tuple[str, DeviceMemory, Card | None]:
    """Name, memory and, where it is known, limits of the device planned for."""
    if config.resolved.device == "cpu":
        return "CPU", machine_memory(), None
    if card is not None:
        return card.key, DeviceMemory(total=card.total_bytes, free=card.total_bytes), card
    gpu = first_gpu()
    if gpu is None:
        raise ConfigError(
            "plan_device",
            "no GPU is found here; name the card with --plan-device, or plan for the CPU with --device cpu",
        )
    return gpu.name, DeviceMemory(total=gpu.total_bytes, free=gpu.free_bytes), card_named(gpu.name)


def ledger_values(server: ServerToPlan, ledger: MemoryLedger) -> dict[str, Any]:
    """What each part of the memory goes to, in bytes."""
    return {
        "model": server.config.model.model,
        "device": server.config.resolved.device,
        "device_name": server.device_name,
        "dtype": server.dtype,
        "total_bytes": ledger.memory.total,
        "free_bytes": ledger.memory.free,
        "usable_bytes": ledger.usable,
        "ledger": {**ledger.reserved.items(), "kv_cache": ledger.kv_cache},
        "planned_bytes": ledger.planned,
    }


def as_values(server: ServerToPlan, plan: MemoryPlan) -> dict[str, Any]:
    """The plan as numbers: bytes, tokens, seconds."""
    resolved = server.config.resolved
    item_bytes = ITEM_BYTES[server.dtype]
    roofline = known_roofline(server.spec, server.card, item_bytes, kv_item_bytes(server.config, item_bytes))
    quick_step_tokens = None if roofline is None else roofline.quick_step_tokens()
    lengths = sorted({*(length for length in CONTEXTS if length < plan.max_model_len), plan.max_model_len})
    values: dict[str, Any] = {
        **ledger_values(server, plan.ledger),
        "num_blocks": plan.num_blocks,
        "block_size": plan.block_size,
        "kv_tokens": plan.pool_tokens,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": resolved.max_num_seqs,
        "max_num_batched_tokens": resolved.step_tokens,
        "mixed_step_tokens": mixed_step_tokens(server.config, quick_step_tokens),
        "concurrency": {str(length): plan.concurrency(length) for length in lengths},
    }
    if roofline is not None:
        context = min(PREDICTED_CONTEXT, plan.max_model_len)
        most = min(plan.concurrency(context), resolved.max_num_seqs)
        batches = [batch for batch in BATCHES if batch < most] + [min(most, BATCHES[-1])]
        values["predicted"] = {
            "context": context,
            "decode_s": {str(batch): roofline.decode_s(batch, context) for batch in batches},
            "prefill_tokens_per_s": roofline.prefill_tokens_per_s(context),
        }
    return values


def ledger_text(values: Mapping[str, Any]) -> str:
    """The ledger for a person."""
    lines = [f"{values['model']} on {values['device_name']}, {values['dtype']}", ""]
    shown = {name.replace("_", " "): size for name, size in values["ledger"].items() if size}
    shown |= {
        "planned": values["planned_bytes"],
        "usable": values["usable_bytes"],
        "device": values["total_bytes"],
    }
    lines += [f"  {name:14}{size:>18,} bytes{size / (1 << 30):>9.2f} GiB" for name, size in shown.items()]
    return "\n".join(lines)


def as_text(card: Card | None, values: Mapping[str, Any]) -> str:
    """The plan for a person."""
    lines = [
        ledger_text(values),
        "",
        f"KV cache: {values['kv_tokens']:,} tokens in {values['num_blocks']:,} blocks of {values['block_size']}; "
        f"context {values['max_model_len']:,}",
        f"It holds (max_num_seqs {values['max_num_seqs']}): "
        + ", ".join(
            f"{count:,} of {int(length):,} tokens" for length, count in values["concurrency"].items()
        ),
        f"Steps of up to {values['max_num_batched_tokens']:,} tokens, "
        f"{values['mixed_step_tokens']:,} while streams are running",
    ]
    predicted = values.get("predicted")
    if card is None or predicted is None:
        return "\n".join(lines)
    lines += [
        "",
        f"What the card's limits allow ({card.bytes_per_s / 1e9:,.0f} GB/s, {card.flops / 1e12:,.0f} TFLOP/s), "
        f"context {predicted['context']:,}, batches that the cache holds:",
    ]
    lines += [
        f"  decode, batch {int(batch):>4}{seconds * 1e3:>12,.2f} ms{int(batch) / seconds:>14,.0f} tokens/s"
        for batch, seconds in predicted["decode_s"].items()
    ]
    lines.append(f"  prefill{predicted['prefill_tokens_per_s']:>40,.0f} tokens/s")
    return "\n".join(lines)
