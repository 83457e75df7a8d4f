"""The engine of `oneloop serve --executor null` with a hold on its steps and a look at what it was asked.

Scheduler, core, streams and relay are the product's. What is "sampled" is TEXT and an end, over and over: each sequence
begins where its seed says. Tokens are bytes (ids 0-255), so every character beyond ASCII is cut; 256 and 257 are
special, 258-263 are padding rows of the "model".
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from oneloop.config import EngineConfig
from oneloop.engine.async_engine import AsyncEngine
from oneloop.executor.base import ModelInfo
from oneloop.executor.null import NullExecutor, tokens_of_text
from oneloop.tokenize.pieces import byte_letters
from oneloop.tokenize.templates import ChatTemplate
from oneloop.tokenize.tokenizer import Tokenizer, TokenizerInfo
from oneloop_core import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oneloop.engine.params import SamplingParams
    from oneloop.engine.stream import RequestStream

BEGIN, END = 256, 257
VOCAB_SIZE = 264
MAX_MODEL_LEN = 256
TEXT = 'one two three, naïve 日本語 🙂 and 👩‍🚀 (x)\n"q" Ωmega; four, five, six. '
_TEMPLATE = (
    "{% for tool in tools or [] %}[tool:{{ tool.function.name }}]{% endfor %}"
    "{% for document in documents or [] %}[document:{{ document.text }}]{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined %}enable_thinking: {{ enable_thinking }}{% endif %}"
    "{% if reasoning_effort is defined %}effort: {{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(template: str = _TEMPLATE, marks: Sequence[str] = ()) -> Tokenizer:
    """Bytes as tokens. A plain prompt gets a begin token, a chat's does not. marks: at most six more tokens."""
    names = ["<|begin|>", "<|end|>", *marks]
    backend = Backend(models.BPE(byte_letters(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(names)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", BEGIN)]
    )
    pieces = [*(bytes([value]) for value in range(256)), *(name.encode() for name in names)]
    info = TokenizerInfo(
        vocabulary=Vocabulary(pieces, [BEGIN, END]),
        special_ids=frozenset({BEGIN, END}),
        bos_token_id=BEGIN,
        eos_token_ids=(END,),
        chat_template=ChatTemplate(template, file="test", special_tokens={}),
    )
    return Tokenizer(backend, info)


TOKENIZER = byte_tokenizer()
"""Made here, as it takes a while that no event loop of a test has."""


class Gate:
    """Lets steps pass, or keeps them until it is set."""

    def __init__(self) -> None:
        self._is_open = True
        self._kept: list[Callable[[], None]] = []

    def clear(self) -> None:
        self._is_open = False

    def set(self) -> None:
        self._is_open = True
        while self._kept:
            self._kept.pop(0)()

    def passes(self, step: Callable[[], None]) -> None:
        if self._is_open:
            step()
        else:
            self._kept.append(step)


class StepTime:
    """As null.Pace, but it may be changed while the engine runs."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def seconds(self, _: Any) -> float:
        return self.step_s


class HeldExecutor(NullExecutor):
    """The null executor behind a gate."""

    def __init__(self, gate: Gate, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gate = gate

    def submit(self, slab_index: int) -> None:
        self._gate.passes(partial(super().submit, slab_index))


class NullEngine(AsyncEngine):
    """The real engine. `paused` holds all steps while it is cleared; `submitted`: what it was asked.

    tokens: what is "sampled", over and over, as far as masks allow it.
    """

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        tokens: Sequence[int] = (*TEXT.encode(), END),
        max_model_len: int = MAX_MODEL_LEN,
        num_blocks: int = 4096,
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ) -> None:
        settings = {"executor": "null", "served_model_name": ("fake", "alias"), **settings}
        config = EngineConfig.from_flat(settings)
        self.paused = Gate()
        self.pace = StepTime(step_s)
        executor = HeldExecutor(
            self.paused,
            config,
            info=ModelInfo(VOCAB_SIZE, max_model_len, num_blocks, config.resolved.block_size),
            draw=tokens_of_text(tokens),
            pace=self.pace,
        )
        super().__init__(config, executor=executor, tokenizer=tokenizer or TOKENIZER)
        self.submitted: list[tuple[list[int], SamplingParams, int, str]] = []

    @property
    def step_s(self) -> float:
        """What a step takes."""
        return self.pace.step_s

    @step_s.setter
    def step_s(self, value: float) -> None:
        self.pace.step_s = value

    @property
    def live(self) -> dict[int, RequestStream]:
        """The streams that have not ended, by handle."""
        return self._streams

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of what it was asked."""
        return [prompt for prompt, *_ in self.submitted]

    async def submit(self, prompt: Any, params: Any = None, **options: Any) -> RequestStream:
        stream = await super().submit(prompt, params, **options)
        given = options.get("priority", 0), options.get("cache_salt", "")
        self.submitted.append((list(stream.prompt_token_ids), params, *given))
        return stream
