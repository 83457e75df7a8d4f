"""`oneloop serve MODEL --plan`: what it prints is what the engine then allocates, and nothing heavy is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from oneloop.cli.main import main
from oneloop.config import EngineConfig
from oneloop.device.cards import card_named
from oneloop.executor.cpu import CpuExecutor
from oneloop.formats.model_spec import ModelSpec, MoeSpec
from oneloop.formats.quantization.config import WHILE_LOADING
from oneloop.formats.quantization.int4 import Int4Scheme
from oneloop.formats.quantization.spec import QuantizationSpec
from oneloop.worker.memory.ledger import DeviceMemory
from oneloop.worker.memory.plan import plan_memory
from oneloop.worker.roofline import Roofline, known_roofline

LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM", hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, vocab_size=128_256, max_position=131_072, rms_norm_eps=1e-5, rope_theta=5e5,
    rope_scaling=None, tie_word_embeddings=False, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
    dtype="bfloat16",
)  # fmt: skip
QWEN_06B = replace(
    LLAMA_8B, architecture="Qwen3ForCausalLM", hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
    vocab_size=151_936, max_position=40_960, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip
QWEN_30B_A3B = replace(
    QWEN_06B, architecture="Qwen3MoeForCausalLM", hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32,
    num_kv_heads=4, tie_word_embeddings=False,
    moe=MoeSpec(num_experts=128, top_k=8, intermediate_size=768, renormalised=True, layout="qwen"),
)  # fmt: skip


GPTQ = Int4Scheme(layout="gptq", group_size=128, zero_points=False)


@pytest.fixture
def llama8b(tmp_path):
    """A folder with the config of Llama-3.1-8B and nothing else: a plan needs no more."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def plan_of(capsys, *arguments):
    assert main(["serve", *arguments, "--plan", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_on_a_card_that_is_not_there(llama8b, capsys):
    values = plan_of(capsys, llama8b, "--plan-device", "h200")
    assert (values["device"], values["dtype"]) == ("cuda", "bfloat16")
    assert values["total_bytes"] == 150_754_820_096
    assert values["planned_bytes"] == sum(values["ledger"].values()) <= values["usable_bytes"]
    memory = DeviceMemory(total=values["total_bytes"], free=values["free_bytes"])
    engines = plan_memory(LLAMA_8B, "bfloat16", EngineConfig.from_flat({"device": "cuda"}), memory)
    assert values["num_blocks"] == engines.num_blocks
    assert values["ledger"] == {**engines.ledger.reserved.items(), "kv_cache": engines.kv_cache_bytes}
    assert values["concurrency"]["131072"] == engines.num_blocks // 8192
    assert set(values["concurrency"]) == {"1024", "4096", "16384", "131072"}


def test_naming_a_card_is_asking_for_the_plan(llama8b, capsys):
    assert main(["serve", llama8b, "--plan-device", "h200"]) == 0
    assert "kv cache" in capsys.readouterr().out.lower()


def test_settings_count(llama8b, capsys):
    values = plan_of(
        capsys, llama8b, "--plan-device", "l40s", "--max-model-len", "auto", "--gpu-memory-utilization", "0.5",
        "--max-num-seqs", "64", "--block-size", "32",
    )  # fmt: skip
    assert (values["max_num_seqs"], values["block_size"], values["max_num_batched_tokens"]) == (64, 32, 2048)
    assert values["mixed_step_tokens"] == 1024
    assert values["usable_bytes"] == values["total_bytes"] // 2
    assert values["max_model_len"] == values["kv_tokens"] < 131_072


def test_the_cpus_plan_is_what_the_executor_allocates(tiny_model, capsys):
    options = {"load_format": "dummy", "max_num_seqs": 8, "kv_cache_memory_bytes": 8 << 20}
    arguments = [
        "--load-format",
        "dummy",
        "--max-num-seqs",
        "8",
        "--kv-cache-memory",
        "8M",
        "--device",
        "cpu",
    ]
    values = plan_of(capsys, str(tiny_model), *arguments)
    executor = CpuExecutor(EngineConfig.from_flat({"model": str(tiny_model), "device": "cpu", **options}))
    executor.locate()
    info = executor.start()
    assert (info.num_blocks, info.block_size) == (values["num_blocks"], values["block_size"])
    assert info.max_model_len == values["max_model_len"]
    executor.shutdown()
    assert "predicted" not in values


def test_a_person_reads_it_too(llama8b, capsys):
    values = plan_of(capsys, llama8b, "--plan-device", "h200")
    assert main(["serve", llama8b, "--plan", "--plan-device", "h200"]) == 0
    written = capsys.readouterr().out
    for part in (
        "on h200, bfloat16", "weights           16,060,522,496 bytes    14.96 GiB",
        f"KV cache: {values['kv_tokens']:,} tokens", "Steps of up to 2,048 tokens, 2,048 while streams are running",
        "decode, batch    1        3.52 ms", "prefill",
    ):  # fmt: skip
        assert part in written
    assert max(map(len, written.splitlines())) < 160


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--plan-device", "h200"], "plan_device: is h200, but device is cpu"),
        (["--plan-device", "rtx4090"], "max_model_len: the context of 131072 tokens"),
        (["--load-format", "gguf"], "load_format: is gguf, but"),
        (["--expert-statistics"], "expert_statistics: "),
        (
            ["--plan-device", "l40s", "--quantization", "fp8", "--deterministic"],
            "deterministic: has kernels for 8-bit weights from compute capability 9 on, and this card's is 8",
        ),
    ],
)
def test_what_cannot_be_planned(llama8b, capsys, arguments, message):
    assert main(["serve", llama8b, "--plan", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_the_null_executor_without_a_model_has_no_plan(capsys):
    assert main(["serve", "--executor", "null", "--plan"]) == 1
    assert "plan: the null executor without a model" in capsys.readouterr().err


def test_what_does_not_fit_is_shown_as_far_as_it_is_known(llama8b, capsys):
    assert main(["serve", llama8b, "--plan", "--plan-device", "RTX4090"]) == 1
    written = capsys.readouterr()
    assert "weights           16,060,522,496 bytes" in written.out
    assert "KV cache:" not in written.out
    assert "what helps: --max-model-len auto (or " in written.err
    assert main(["serve", llama8b, "--plan", "--plan-device", "rtx4090", "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["planned_bytes"] == sum(values["ledger"].values()) <= values["usable_bytes"]
    assert values["error"] in written.err


@pytest.mark.parametrize(
    ("options", "context", "batches"),
    [
        (["--max-model-len", "auto"], 1024, ["1", "8", "32", "33"]),
        (["--max-model-len", "512"], 512, ["1", "8", "32", "68"]),
        (["--max-model-len", "512", "--max-num-seqs", "8"], 512, ["1", "8"]),
    ],
)
def test_step_times_are_of_batches_that_the_cache_holds(llama8b, capsys, options, context, batches):
    values = plan_of(capsys, llama8b, "--plan-device", "rtx4090", *options)
    assert values["predicted"]["context"] == context
    assert list(values["predicted"]["decode_s"]) == batches


def test_columns_of_large_numbers_stay_apart(capsys, tiny_model):
    arguments = ["--plan-device", "h200", "--load-format", "dummy", "--dtype", "bfloat16"]
    assert main(["serve", str(tiny_model), *arguments]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    assert len(rows) > 1
    assert all(re.search(r" ms {2,}[\d,]+ tokens/s$|prefill {2,}[\d,]+ tokens/s$", row) for row in rows)


def test_the_plans_form_is_no_option_by_itself(llama8b, capsys):
    assert main(["serve", llama8b, "--json"]) == 1
    assert "json: is the plan's form; add --plan" in capsys.readouterr().err


def test_without_a_gpu_the_card_must_be_named(llama8b, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["serve", llama8b, "--plan", "--device", "cuda"]) == 1
    assert "name the card with --plan-device" in capsys.readouterr().err


def test_nothing_heavy_is_imported(llama8b):
    code = (
        "import sys; from oneloop.cli.main import main\n"
        f"assert main(['serve', {llama8b!r}, '--plan', '--plan-device', 'h200']) == 0\n"
        "print({'torch', 'triton', 'transformers', 'aiohttp', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("spec", "context", "limits_ms"),
    [
        (LLAMA_8B, 1088, {1: 3.5, 8: 3.7, 32: 4.5, 128: 7.7, 256: 13.3}),
        (QWEN_06B, 576, {1: 0.30, 8: 0.40, 64: 1.26, 256: 4.3, 512: 8.6}),
        (QWEN_30B_A3B, 576, {1: 1.43, 32: 12.8, 128: 15.7}),
    ],
)
def test_decode_times_are_the_arithmetic_limits(spec, context, limits_ms):
    """Limits that were worked out by hand for one H200, at 790 TFLOP/s."""
    card = card_named("h200")
    assert card is not None
    roofline = Roofline(spec=spec, card=replace(card, flops=790e12))
    for batch, milliseconds in limits_ms.items():
        assert roofline.decode_s(batch, context) * 1e3 == pytest.approx(milliseconds, rel=0.06)


def test_limits_count_weights_and_keys_as_they_are_kept():
    """Llama 3.1 8B on one H200: in 8 bits 8.0 GB and 71 MB of keys and values; in 4 bits 4.7 GB and 143 MB."""
    card = card_named("h200")
    assert card is not None
    fp8 = replace(LLAMA_8B, quantization=QuantizationSpec(method="fp8", scheme=WHILE_LOADING["fp8"]))
    narrow = Roofline(spec=fp8, card=card, kv_item_bytes=1)
    assert narrow.decode_s(1, 1088) * 1e3 == pytest.approx(1.8, rel=0.06)
    plain = Roofline(spec=LLAMA_8B, card=card)
    assert narrow.decode_s(256, 1088) < plain.decode_s(256, 1088) / 1.8
    assert narrow.prefill_tokens_per_s(1024) == pytest.approx(2 * plain.prefill_tokens_per_s(1024), rel=0.05)
    # of 4 bits products have the rate of 16
    four = replace(LLAMA_8B, quantization=QuantizationSpec(method="gptq", scheme=GPTQ))
    packed = Roofline(spec=four, card=card)
    assert packed.decode_s(1, 1088) * 1e3 == pytest.approx(1.1, rel=0.06)
    assert packed.prefill_tokens_per_s(1024) == plain.prefill_tokens_per_s(1024)


def test_experts_that_are_read_count_as_they_are_kept():
    card = card_named("h200")
    assert card is not None
    fp8 = replace(QWEN_30B_A3B, quantization=QuantizationSpec(method="fp8", scheme=WHILE_LOADING["fp8"]))
    plain, narrow = (Roofline(spec=spec, card=card) for spec in (QWEN_30B_A3B, fp8))
    head = 2 * QWEN_30B_A3B.vocab_size * QWEN_30B_A3B.hidden_size / card.bytes_per_s
    for batch in (1, 32):
        halved = (plain.decode_s(batch, 1) - head) / (narrow.decode_s(batch, 1) - head)
        assert halved == pytest.approx(2, rel=0.02)


LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64)


@pytest.mark.parametrize(
    ("card", "spec", "tokens"),
    [
        # 50 ms of 750 TFLOP/s are 2,687 tokens of 14.0 GFLOP, 274 of 137 GFLOP; arithmetic binds from 174 on.
        ("h200", LLAMA_8B, 2048),
        ("h200", LLAMA_70B, 256),
        ("h200", QWEN_06B, 32_768),
        # 50 ms are 6,200 tokens of 6.04 GFLOP; experts' weights are met by one token in 16.
        ("h200", QWEN_30B_A3B, 8192),
        ("a100-80gb", LLAMA_8B, 1024),
        ("rtx4090", LLAMA_8B, 512),
    ],
)
def test_quick_steps_take_50_ms_or_are_bound_by_memory(card, spec, tokens):
    known = card_named(card)
    assert known is not None
    assert Roofline(spec=spec, card=known).quick_step_tokens() == tokens


def test_no_roofline_without_rates():
    card = card_named("h200")
    assert known_roofline(LLAMA_8B, card, 2) == Roofline(spec=LLAMA_8B, card=card)
    assert known_roofline(LLAMA_8B, card, 4) is None
    assert known_roofline(LLAMA_8B, None, 2) is None


def test_prefill_is_bound_by_arithmetic():
    card = card_named("h200")
    assert card is not None
    roofline = Roofline(spec=LLAMA_8B, card=card)
    by_hand = 2 * 6.98e9 + 4 * 4096 * 32 * 512 + 2 * 128_256 * 4096 / 1024
    assert roofline.prefill_tokens_per_s(1024) == pytest.approx(750e12 / by_hand, rel=0.01)
    assert roofline.prefill_tokens_per_s(32_768) < roofline.prefill_tokens_per_s(1024)
