"""The command line is derived from the settings, and bad settings are named."""

import pytest

from oneloop.cli.arguments import engine_values, sampling_values, server_values
from oneloop.cli.main import main, make_parser
from oneloop.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    WorkerConfig,
    resolve,
    resolve_dtype,
    size_as_text,
    size_in_bytes,
)
from oneloop.errors import ConfigError


def parse(*arguments):
    return make_parser().parse_args(arguments)


def test_nothing_given_means_every_default():
    options = parse("serve")
    assert engine_values(options) == {}
    assert server_values(options) == {}
    assert EngineConfig.from_flat({}) == EngineConfig()


def test_the_names_that_users_know():
    options = parse(
        "serve", "folder/model", "--host", "::1", "--port", "9000", "--dtype", "bfloat16", "--max-model-len", "1024",
        "--served-model-name", "a", "b", "--load-format", "dummy", "--max-num-seqs", "16", "--max-num-batched-tokens",
        "512", "--block-size", "32", "--kv-cache-memory", "512M", "--seed", "7", "--no-enable-prefix-caching",
        "--scheduling-policy", "priority", "--api-key", "k", "--shutdown-timeout", "1.5",
    )  # fmt: skip
    config = EngineConfig.from_flat(engine_values(options))
    assert config == EngineConfig(
        model=ModelConfig(
            model="folder/model", dtype="bfloat16", max_model_len=1024, served_model_name=("a", "b"),
            load_format="dummy", seed=7,
        ),
        cache=CacheConfig(block_size=32, kv_cache_memory_bytes=512 << 20, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, scheduling_policy="priority"),
    )  # fmt: skip
    assert ServerConfig(**server_values(options)) == ServerConfig(
        host="::1", port=9000, api_key="k", shutdown_timeout=1.5
    )


def test_the_model_in_both_places():
    assert engine_values(parse("serve", "--model", "m")) == {"model": "m"}
    assert engine_values(parse("chat", "m", "--model", "m")) == {"model": "m"}
    assert engine_values(parse("serve", "--kv-cache-memory-bytes", "1024")) == {"kv_cache_memory_bytes": 1024}
    with pytest.raises(ConfigError, match="model: given twice: a and b"):
        engine_values(parse("serve", "a", "--model", "b"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512M", 512 << 20),
        ("2G", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("64k", 65536),
        ("1000", 1000),
        ("1 TB", 1 << 40),
    ],
)
def test_sizes(text, size):
    assert size_in_bytes(text) == size
    assert CacheConfig(kv_cache_memory_bytes=text).kv_cache_memory_bytes == size  # in the Python API too
    assert ServerConfig(max_body_bytes=text).max_body_bytes == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (16 << 30, "16G"),
        (16 << 20, "16M"),
        (65536, "64K"),
        (3 << 29, "1.5G"),
        (1000, "1000"),
        (0, "0"),
        (5 << 40, "5T"),
    ],
)
def test_sizes_are_written_as_they_are_read(size, text):
    assert size_as_text(size) == size_as_text(size, round_up=True) == text
    assert size_in_bytes(text) == size


def test_rounded_sizes_are_on_the_side_that_was_asked_for():
    for size in (1025, 12_345_678, 17_301_504_000, (1 << 40) - 1):
        low, high = size_as_text(size), size_as_text(size, round_up=True)
        assert size_in_bytes(low) < size < size_in_bytes(high)
        assert size_in_bytes(high) - size_in_bytes(low) <= 0.011 * size


def test_a_size_that_is_none_is_named():
    with pytest.raises(
        ConfigError, match="kv_cache_memory_bytes: 'lots' is no size; write it like 512M or 2G"
    ):
        CacheConfig(kv_cache_memory_bytes="lots")
    with pytest.raises(ConfigError, match=r'must be an integer or a size like "2G", got 1\.5'):
        CacheConfig(kv_cache_memory_bytes=1.5)


def test_the_help_shows_sizes_as_they_are_given(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "largest request body (default: 16M)" in " ".join(capsys.readouterr().out.split())


def test_the_environment_counts_where_the_command_line_says_nothing(monkeypatch):
    monkeypatch.setenv("ONELOOP_API_KEY", "k")
    monkeypatch.setenv("ONELOOP_LOG_LEVEL", "warning")
    assert server_values(parse("serve")) == {"api_key": "k", "log_level": "warning"}
    assert server_values(parse("serve", "--log-level", "debug"))["log_level"] == "debug"
    with pytest.raises(ConfigError, match="log_level: must be one of debug"):
        ServerConfig(log_level="loud")


@pytest.mark.parametrize("size", ["", "lots", "-1G", "1X", "1e9", "nan"])
def test_bad_sizes_are_usage_errors(size, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("serve", f"--kv-cache-memory={size}")
    assert caught.value.code == 2
    assert "--kv-cache-memory" in capsys.readouterr().err


def test_sampling_options():
    options = parse(
        "generate",
        "p",
        "--max-tokens",
        "5",
        "--temperature",
        "0",
        "--stop",
        "a",
        "--stop",
        "b",
        "--seed",
        "3",
    )
    assert sampling_values(options) == {"max_tokens": 5, "temperature": 0.0, "stop": ["a", "b"], "seed": 3}
    assert sampling_values(parse("chat")) == {"max_tokens": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs: must be at least 1, got 0"),
        (["--block-size", "-4"], "block_size: must be at least 1"),
        (["--max-model-len", "1"], "max_model_len: must be at least 2"),
        (["--kv-cache-memory", "0"], "kv_cache_memory_bytes: must be at least 1"),
        (["--max-num-batched-tokens", "8"], "raise it or lower max_num_seqs"),
        (["--gpu-memory-utilization", "1.1"], "gpu_memory_utilization: must be at most 1.0"),
        (["--port", "-1"], "port: must be at least 0"),
        (["--port", "70000"], "port: must be at most 65535"),
        (["--host", "no.such.host.invalid"], "host: no.such.host.invalid is no address"),
        (["--step-timeout-s", "nan"], "step_timeout_s: must be a number"),
        (["a", "--model", "b"], "model: given twice"),
    ],
)
def test_bad_settings_are_one_line_and_exit_1(arguments, message, capsys):
    assert main(["serve", *arguments]) == 1
    written = capsys.readouterr()
    assert message in written.err
    assert written.err.startswith("oneloop: error: ")
    assert written.err.count("\n") == 1
    assert written.out == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float8"}, "dtype: must be one of auto, float32, bfloat16, float16, got 'float8'"),
        ({"max_num_seqs": "many"}, "max_num_seqs: must be an integer, got 'many'"),
        ({"max_num_seqs": True}, "max_num_seqs: must be an integer"),
        ({"served_model_name": "name"}, "served_model_name: must be a tuple of strings"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching: must be true or false"),
        ({"max_model_len": "longest"}, "max_model_len: must be an integer or auto, got 'longest'"),
        ({"device": "tpu"}, "device: must be one of auto, cuda, cpu, got 'tpu'"),
        ({"no_such": 1}, "no_such: no such setting"),
    ],
)
def test_settings_from_python_are_checked_too(settings, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        EngineConfig.from_flat(settings)


def test_every_setting_has_help():
    for kind in (ModelConfig, CacheConfig, SchedulerConfig, WorkerConfig, ServerConfig):
        for name, item in kind.__dataclass_fields__.items():
            assert item.metadata["help"], name


@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(256, 512), (1024, 1024)])
def test_a_step_has_room_for_every_running_sequence(max_num_seqs, tokens):
    assert resolve(EngineConfig.from_flat({"max_num_seqs": max_num_seqs}), "cpu").step_tokens == tokens


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_no_key(key):
    with pytest.raises(ConfigError, match="api_key: is empty"):
        ServerConfig(api_key=key)


def test_defaults_follow_the_device():
    """What was given counts on every device."""
    for device, expected in {"cuda": (512, 2048, 16), "cpu": (256, 512, 16)}.items():
        resolved = EngineConfig.from_flat({"device": device}).resolved
        assert (resolved.device, resolved.max_num_seqs, resolved.step_tokens, resolved.block_size) == (
            device,
            *expected,
        )
        given = {"max_num_seqs": 3, "max_num_batched_tokens": 40, "block_size": 32}
        resolved = EngineConfig.from_flat({"device": device, **given}).resolved
        assert (resolved.max_num_seqs, resolved.step_tokens, resolved.block_size) == (3, 40, 32)


def test_a_context_length_or_auto(capsys):
    for text, value in (("auto", "auto"), ("4096", 4096)):
        assert engine_values(parse("serve", "--max-model-len", text)) == {"max_model_len": value}
    with pytest.raises(SystemExit):
        parse("serve", "--max-model-len", "long")
    assert "'long' is neither a number nor auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "device", "checkpoint", "gguf", "expected"),
    [
        ("auto", "cpu", "bfloat16", False, "float32"),
        ("auto", "cuda", "bfloat16", False, "bfloat16"),
        ("auto", "cuda", "float16", False, "float16"),
        ("auto", "cuda", "float32", False, "bfloat16"),
        ("auto", "cuda", "float16", True, "bfloat16"),
        ("float32", "cuda", "bfloat16", False, "float32"),
        ("float16", "cpu", "float32", True, "float16"),
    ],
)
def test_the_type_that_auto_means(setting, device, checkpoint, gguf, expected):
    assert resolve_dtype(setting, device, checkpoint, gguf=gguf) == expected
