"""Two guards over every test: oneloop makes no blocking call on an event loop, and no loop callback hogs the CPU.

Both record what they see and fail the test at its end, so an `except Exception` in between hides nothing. Their own
tests are in tests/engine/test_guards.py.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import blockbuster.blockbuster as blockbuster_module
import pytest
from blockbuster import BlockBuster

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CALLBACK_CPU_S = 0.05

HAS_GPU = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
if not HAS_GPU:
    # Without a GPU, Triton kernels run in Triton's interpreter. It must be asked for before anything imports triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["pytester"]


@contextmanager
def recorded_blocking_calls() -> Iterator[list[str]]:
    """Blocking calls under oneloop's code on a thread that runs an event loop. They raise, and are recorded."""
    seen: list[str] = []
    original = blockbuster_module.BlockingError

    class RecordedBlockingError(original):
        def __init__(self, func: str) -> None:
            super().__init__(func)
            seen.append(func)

    guard = BlockBuster("oneloop")
    # Where log records go is the application's choice; `oneloop serve` hands them to a thread (tests/cli/test_logs.py).
    for write in ("io.TextIOWrapper.write", "io.BufferedWriter.write"):
        guard.functions[write].can_block_in("logging/__init__.py", {"emit", "flush"})
    # Which device to run on is read from /dev when an engine's settings are made: microseconds, and nobody is served.
    for function in guard.functions.values():
        function.can_block_in("oneloop/device/detect.py", {"resolve_device"})
    blockbuster_module.BlockingError = RecordedBlockingError
    guard.activate()
    try:
        yield seen
    finally:
        guard.deactivate()
        blockbuster_module.BlockingError = original


class _CollectorTime(threading.local):
    """CPU seconds that the garbage collector took in this thread."""

    since = 0.0
    total = 0.0

    def measure(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self.since = time.thread_time()
        else:
            self.total += time.thread_time() - self.since


@contextmanager
def recorded_slow_callbacks(limit_s: float = MAX_CALLBACK_CPU_S) -> Iterator[list[str]]:
    """Loop callbacks (task steps included) that took more than `limit_s` of their thread's CPU time.

    CPU time, so that a busy machine is no false alarm; without the garbage collector's, whose full collections depend
    on everything the test process ever imported.
    """
    seen: list[str] = []
    original = asyncio.Handle._run
    collector = _CollectorTime()

    def timed(handle: asyncio.Handle) -> None:
        collected = collector.total
        begin = time.thread_time()
        try:
            original(handle)
        finally:
            cpu_s = time.thread_time() - begin - (collector.total - collected)
            if cpu_s > limit_s:
                seen.append(f"{cpu_s * 1e3:.0f} ms of CPU in {handle!r}")

    gc.callbacks.append(collector.measure)
    asyncio.Handle._run = timed
    try:
        yield seen
    finally:
        asyncio.Handle._run = original
        gc.callbacks.remove(collector.measure)


@pytest.fixture(autouse=True)
def loop_guards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test when the loop was blocked or held; for how long it may be, the mark held_at_most(seconds) says.

    With `--shared-card` it may be held for as long as it likes: the driver spins while the card is another process's.
    """
    mark = request.node.get_closest_marker("held_at_most")
    limit_s = mark.args[0] if mark else MAX_CALLBACK_CPU_S
    if request.config.getoption("--shared-card"):
        limit_s = math.inf
    with recorded_blocking_calls() as blocking, recorded_slow_callbacks(limit_s) as slow:
        yield
    if blocking:
        pytest.fail(f"blocking calls on the event loop: {', '.join(blocking)}", pytrace=False)
    if slow:
        pytest.fail(f"the event loop was held: {'; '.join(slow)}", pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def _definite_keys_of_kernels() -> Iterator[None]:
    """On a GPU: a kernel has one key in Triton's cache whatever its process compiled before, so that processes which
    run side by side (tools/gpu_tests.py), and those of earlier runs, find each other's."""
    if not HAS_GPU:
        yield
        return
    from oneloop_kernels.compiling.keys import definite_keys

    with definite_keys():
        yield


TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def recycled_memory() -> Iterator[None]:
    """What nobody has written is no number, and no index, as in an engine that follows another one in its process.

    The memory of a fresh process is zero, so that a kernel which reads what it should have written passes.
    """
    import torch

    if torch.cuda.is_available():  # large blocks and small ones come from pools of their own
        sizes = [64 << 20] + [512 << 10] * 32
        used = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in sizes]
        del used
        yield
        return
    torch.use_deterministic_algorithms(True)  # then torch.empty is filled
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights (for --load-format dummy): tiny Llama, tokens are bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": TINY_CHAT_TEMPLATE})
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "torch_dtype": "float32", "hidden_act": "silu", "eos_token_id": 257,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiny_sparse_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts in the second of its two layers: tiny Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("tiny-sparse-model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    config = json.loads((tiny_model / "config.json").read_text()) | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", default="1/1", help="i/n: of the selected tests only the i-th of n equal parts"
    )
    parser.addoption(
        "--shared-card",
        action="store_true",
        help="other processes use the GPU at the same time: see loop_guards",
    )


@pytest.hookimpl(trylast=True)  # after tests were deselected by their marks and names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, count = map(int, config.getoption("--share").split("/"))
    first, last = len(items) * (number - 1) // count, len(items) * number // count
    if others := items[:first] + items[last:]:
        config.hook.pytest_deselected(items=others)
        items[:] = items[first:last]


def pytest_configure(config: pytest.Config) -> None:
    """Servers and terminals that tests start must hear Ctrl-C, also where a shell began this run with it ignored.

    Rows of padding hold whatever was in memory. A GPU computes with it in silence; numpy, in the interpreter, warns.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for what in ("overflow", "underflow", "invalid value", "divide by zero"):
        line = f"ignore:{what} encountered:RuntimeWarning:triton.runtime.interpreter"
        config.addinivalue_line("filterwarnings", line)
