"""TextEngine: a model's text side without the model. For servers that render and tokenise for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.engine.async_engine import Health, State
from oneloop.engine.metrics import EngineMetrics
from oneloop.engine.texts import Texts
from oneloop.errors import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oneloop.engine.params import SamplingDefaults
    from oneloop.tokenize.conversation import ChatForm, Conversation
    from oneloop.tokenize.renderer import Renderer
    from oneloop.tokenize.tokenizer import Tokenizer
    from oneloop_core import Vocabulary


class TextEngine:
    """What AsyncEngine offers for texts. All methods belong to the event loop that it was made on."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: Renderer,
        *,
        served_model_names: tuple[str, ...],
        default_sampling: SamplingDefaults,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        """vocab_size, max_model_len: of the model that will read the prompts."""
        self.served_model_names = served_model_names
        self.default_sampling = default_sampling
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.metrics = EngineMetrics()
        """Only the loop's seconds by part are counted."""
        self._texts = Texts(tokenizer, renderer)
        self._state: State = "ready"

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._texts.tokenizer

    @property
    def renderer_name(self) -> str:
        """Which renderer writes the prompts."""
        return self._texts.renderer.name

    def health(self) -> Health:
        """Ready until shutdown()."""
        return Health(self._state)

    def check_accepting(self) -> None:
        """EngineDeadError (503) once it is shut down."""
        if self._state != "ready":
            raise EngineDeadError("the server is shutting down")

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As Texts.encode."""
        return await self._texts.encode(text, add_special_tokens=add_special_tokens)

    async def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """As Texts.encode_with_offsets."""
        return await self._texts.encode_with_offsets(text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """As Texts.decode."""
        return await self._texts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def render_chat(
        self, conversation: Conversation | Callable[[], Conversation], form: ChatForm
    ) -> str:
        """As Texts.render."""
        return await self._texts.render(conversation, form)

    async def id_vocabulary(self) -> Vocabulary:
        """As Texts.id_vocabulary."""
        return await self._texts.id_vocabulary()

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Refuse new texts. Nothing runs on: drain_timeout is not waited for."""
        self._state = "stopped"
        self._texts.close()
