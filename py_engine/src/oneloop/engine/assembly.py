"""Start-up: executor, tokenizer, defaults and core put together into what AsyncEngine serves with."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from oneloop.config import mixed_step_tokens
from oneloop.engine.grammars import Grammars
from oneloop.engine.intake import Intake
from oneloop.engine.loop import MAX_STEPS_IN_FLIGHT, NUM_SLABS
from oneloop.engine.params import SamplingDefaults
from oneloop.engine.texts import Texts
from oneloop.engine.threads import in_daemon_thread
from oneloop.engine.trace import TraceRecording
from oneloop.errors import ConfigError
from oneloop.formats.generation import FILE_NAME, GenerationDefaults, hf_generation_defaults
from oneloop.tokenize.load import load_tokenizer
from oneloop.tokenize.renderer import choose_renderer
from oneloop_core import ConfigError as CoreConfigError
from oneloop_core import Core, CoreConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.config import EngineConfig, ModelConfig
    from oneloop.engine.intake import Accepted
    from oneloop.executor.base import Executor, LoadProgress, ModelFiles, ModelInfo
    from oneloop.start_times import StartTimes
    from oneloop.tokenize.renderer import Renderer
    from oneloop.tokenize.tokenizer import Tokenizer
    from oneloop_core import Vocabulary


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded model, ready to serve."""

    info: ModelInfo
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    defaults: SamplingDefaults
    eos_token_ids: tuple[int, ...]
    core: Core
    slabs: Sequence[memoryview]
    texts: Texts
    intake: Intake
    trace: TraceRecording | None

    def submit(self, accepted: Accepted, *, final_only: bool = False) -> int:
        """Queue a request in the core; returns its handle. Raises the core's RequestError.

        final_only: its sequences give one delta each, at their end.
        """
        params, constraints = accepted.params, accepted.constraints
        handle = self.core.submit(
            accepted.prompt_token_ids,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            n=params.n,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=params.seed,
            logprobs=params.logprobs,
            logprob_token_ids=params.logprob_token_ids,
            prompt_logprobs=params.prompt_logprobs,
            pooling=params.pooling,
            beam_search=params.beam_search,
            logit_bias=params.logit_bias,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            eos_token_ids=self.eos_token_ids,
            ignore_eos=params.ignore_eos,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_ids=params.shown_special_ids,
            detokenize=params.detokenize,
            final_only=final_only,
            grammar=constraints.grammar,
            grammar_after=constraints.grammar_after,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=accepted.bad_words,
            thinking_budget=constraints.thinking_budget,
            thinking_end=constraints.thinking_end,
            priority=accepted.priority,
            cache_salt=accepted.cache_salt,
            deterministic=accepted.fixed_order,
        )
        # So that the core's gauges, which bound the queue, count it from now on.
        self.core.drain()
        return handle

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special ones included. A model's rows beyond the vocabulary (padding) have none."""
        if token_id >= len(self.vocabulary):
            return ""
        return self.vocabulary.decode([token_id], skip_special_tokens=False)


async def assemble(
    config: EngineConfig,
    executor: Executor,
    tokenizer: Tokenizer | None,
    progress: LoadProgress | None,
    times: StartTimes,
) -> Assembly:
    """Fetch, load and connect everything; heavy work runs in threads. Raises ModelError or ConfigError.

    tokenizer: None means the model's own.
    """
    with times.part("locate"):
        files = await in_daemon_thread(partial(executor.locate, progress), "oneloop-locate")
    info, text = await asyncio.gather(
        in_daemon_thread(partial(executor.start, progress), "oneloop-load"),
        in_daemon_thread(
            partial(_read_text_side, config.model, files, tokenizer, times), "oneloop-tokenizer"
        ),
    )
    _check_vocabulary(config.model, len(text.vocabulary), info.vocab_size)
    core = await in_daemon_thread(partial(_make_core, config, info, text.vocabulary), "oneloop-core")
    trace = None
    if config.scheduler.record_trace is not None:
        record = partial(TraceRecording, core, config.scheduler.record_trace)
        trace = await in_daemon_thread(record, "oneloop-trace-open")
    attach = partial(executor.attach, core.layout, NUM_SLABS, max_num_seqs=config.resolved.max_num_seqs)
    with times.part("attach"):
        slabs = await in_daemon_thread(attach, "oneloop-attach")
    # A tokenizer may know ids that the model has no row for.
    end_ids = tuple(token_id for token_id in text.end_ids if token_id < info.vocab_size)
    texts = Texts(text.tokenizer, text.renderer)
    intake = Intake(
        texts,
        info,
        text.defaults,
        Grammars(text.vocabulary, end_ids),
        max_sequences=config.resolved.max_num_seqs,
        takes_priority=config.scheduler.scheduling_policy == "priority",
        orders=config.worker.orders,
    )
    return Assembly(
        info, text.tokenizer, text.vocabulary, text.defaults, end_ids, core, slabs, texts, intake, trace
    )


@dataclass(frozen=True, slots=True)
class _TextSide:
    tokenizer: Tokenizer
    renderer: Renderer
    vocabulary: Vocabulary
    defaults: SamplingDefaults
    end_ids: tuple[int, ...]


def _read_text_side(
    config: ModelConfig, files: ModelFiles, tokenizer: Tokenizer | None, times: StartTimes
) -> _TextSide:
    with times.part("tokenizer"):
        tokenizer = tokenizer or _load_tokenizer(config, files)
        renderer = choose_renderer(tokenizer, config.renderer, own_template=config.chat_template is None)
    given = generation_defaults(config, files.generation)
    end_ids = tuple(dict.fromkeys((*tokenizer.eos_token_ids, *given.eos_token_ids)))
    return _TextSide(tokenizer, renderer, tokenizer.vocabulary, SamplingDefaults.over(given), end_ids)


def generation_defaults(config: ModelConfig, own: GenerationDefaults) -> GenerationDefaults:
    """What --generation-config means. own: the model's. ConfigError for a folder without the file."""
    match config.generation_config:
        case "auto":
            return own
        case "none":
            # The end tokens are no matter of taste: without them nothing ends.
            return GenerationDefaults(eos_token_ids=own.eos_token_ids)
        case named:
            folder = Path(named).expanduser()
            if not (folder / FILE_NAME).is_file():
                raise ConfigError(
                    "generation_config", f"{named} is no folder with a {FILE_NAME}; give one, or auto or none"
                )
            return hf_generation_defaults(folder)


def _load_tokenizer(config: ModelConfig, files: ModelFiles) -> Tokenizer:
    template = None if config.chat_template is None else Path(config.chat_template)
    if config.tokenizer is None:
        return load_tokenizer(files.path, gguf=files.gguf, chat_template_file=template)
    return load_tokenizer(Path(config.tokenizer).expanduser(), chat_template_file=template)


def _check_vocabulary(config: ModelConfig, known: int, rows: int) -> None:
    """A tokenizer that was given may be another model's: ConfigError where the model lacks some of its ids.

    known, rows: tokens of the tokenizer, and of the model. A model's own tokenizer is taken as it is: models are
    padded, and some lack rows for ids that were added later.
    """
    if known > rows and config.tokenizer is not None:
        raise ConfigError(
            "tokenizer",
            f"{config.tokenizer} has {known} tokens, and the model knows {rows}: it is another model's; leave "
            "--tokenizer away, or give the model's own",
        )
    if known > rows or (known < rows and config.tokenizer is not None):
        log.warning(
            "the tokenizer has %d tokens and the model %d: requests and answers may hold ids that the other side lacks",
            known, rows,
        )  # fmt: skip


def _make_core(config: EngineConfig, info: ModelInfo, vocabulary: Vocabulary) -> Core:
    try:
        core_config = CoreConfig(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=config.resolved.max_num_seqs,
            max_num_batched_tokens=config.resolved.step_tokens,
            mixed_step_tokens=mixed_step_tokens(config, info.quick_step_tokens),
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            hidden_size=info.hidden_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            policy=config.scheduler.scheduling_policy,
            max_steps_in_flight=MAX_STEPS_IN_FLIGHT,
            seed=config.model.seed,
        )
    except CoreConfigError as error:
        raise ConfigError("core", str(error)) from None
    log.info(
        "%d sequences at once, steps of up to %d tokens, %d while streams are running",
        core_config.max_num_seqs, core_config.max_num_batched_tokens, core_config.mixed_step_tokens,
    )  # fmt: skip
    return Core(core_config, vocabulary)
