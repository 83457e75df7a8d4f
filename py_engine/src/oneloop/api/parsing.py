"""From a sequence's text to what a reply says: which parser takes it apart, and what is counted and left out."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oneloop.api.errors import bad_request
from oneloop.api.thinking_tokens import EndState, EndToken, ThinkingTokens
from oneloop.engine.constraints import MAX_MARKER_TOKENS, NO_CONSTRAINTS, UNLIMITED_THINKING, TokenConstraints
from oneloop.engine.structured import GrammarSpec, json_text
from oneloop.errors import RequestError
from oneloop.parsers.engine import PROMPT_END_CHARS, make_parser
from oneloop.parsers.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from oneloop.parsers.forced import MAX_TAGS, NoObjectError, forced_format, forced_schema, forced_tags
from oneloop.parsers.registry import reasoning_format, tool_format
from oneloop.parsers.strict import strict_tags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop.api.protocol.tools import ToolUse
    from oneloop.api.replies import Usage
    from oneloop.config import ServerConfig
    from oneloop.engine.outputs import FinishReason
    from oneloop.engine.params import ResolvedParams
    from oneloop.parsers.engine import StreamParser
    from oneloop.parsers.formats import CallForm, ReasoningFormat, ToolFormat
    from oneloop.tokenize.tokenizer import Tokenizer

_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Template arguments by which clients switch the thinking on and off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormats:
    """How the served model writes."""

    tools: ToolFormat | None
    form: CallForm | None
    """How calls are to be written that must come; None: as no model does, but any can."""
    reasoning: ReasoningFormat | None
    tokenizer: Tokenizer
    shown_special_ids: tuple[int, ...]
    """Special tokens that are marks of these formats."""
    thinking_start: tuple[int, ...]
    """Tokens that open the thinking; empty where there is no such mark."""
    thinking_end: tuple[int, ...]
    """Tokens that end it; empty where there are none, or the end is more than a mark (gpt-oss)."""
    ends_surely: bool
    """Whether thinking_end is the only way in which thinking can end: one token, and no other markup does it."""

    @classmethod
    def choose(cls, config: ServerConfig, tokenizer: Tokenizer) -> OutputFormats:
        """As the settings name them, or as the chat template shows. ConfigError for a name that there is not."""
        template = _says_of_itself(tokenizer)
        tools = tool_format(config.tool_call_parser, template) if config.enable_auto_tool_choice else None
        reasoning = reasoning_format(config.reasoning_parser, template)
        markers = [marker for each in (tools, reasoning) if each is not None for marker in each.markers]
        found = {tokenizer.token_id(marker) for marker in markers}
        shown = tuple(
            sorted(token for token in found if token is not None and token in tokenizer.special_ids)
        )
        start: tuple[int, ...] = ()
        end: tuple[int, ...] = ()
        if reasoning is not None and reasoning.read_all is None:
            start, end = (_marker(tokenizer, mark) for mark in (reasoning.start, reasoning.end))
        return cls(
            tools=tools,
            form=None if tools is None or tools.form is None else tools.form(template),
            reasoning=reasoning,
            tokenizer=tokenizer,
            shown_special_ids=shown,
            thinking_start=start,
            thinking_end=end,
            ends_surely=len(end) == 1 and reasoning is not None and not reasoning.also_ends,
        )


def _marker(tokenizer: Tokenizer, mark: str) -> tuple[int, ...]:
    """Its tokens; empty where they are too many."""
    token = tokenizer.token_id(mark)
    if token is not None:
        return (token,)
    ids = tuple(tokenizer.encode(mark, add_special_tokens=False)) if mark else ()
    return ids if len(ids) <= MAX_MARKER_TOKENS else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsing:
    """How one request's replies are held to their form, and taken apart."""

    formats: OutputFormats
    tools: ToolUse
    include_reasoning: bool
    is_thinking_on: bool | None
    prompt_end: str
    skip_special_tokens: bool
    grammar: GrammarSpec | None
    """What the text must be, behind the thinking."""
    budget: int | None
    """Tokens that the thinking may have."""
    may_open: bool
    """Whether the prompt may get a mark."""
    reader: ToolFormat | None
    """Reads the calls that a grammar holds; None where it holds none."""
    is_strict: bool
    """Whether the grammar is about the calls that the model may make."""

    @property
    def without_effect(self) -> list[str]:
        """The name of the field, where calls that the model may make cannot be held to the schemas of strict functions.

        Where all of the answer is held to another form there are no calls; a client's structural tag leaves room.
        """
        is_held = self.is_strict or self._holds_all
        return ["tools.strict"] if self.tools.strict and self.tools.choice == "auto" and not is_held else []

    def prompt(self, token_ids: list[int]) -> list[int]:
        """The prompt; where the model is to think and its template leaves that to it, with the thinking opened."""
        return [*token_ids, *self.formats.thinking_start] if self.opens_thinking else token_ids

    def shown(self, params: ResolvedParams) -> ResolvedParams:
        """The same, held to the form, and with the marks left in the text that the parser must see."""
        return replace(params, shown_special_ids=self.formats.shown_special_ids, grammar=self.grammar)

    @property
    def constraints(self) -> TokenConstraints:
        """How long the model may think, and from where on the grammar holds: behind the thinking that is open, else
        from the first token. Where the thinking could end unseen, it ends before it begins.
        """
        end = self.formats.thinking_end
        if not self._is_open or not end:
            return NO_CONSTRAINTS
        budget = UNLIMITED_THINKING if self.budget is None else self.budget
        if self.grammar is not None and not self.formats.ends_surely:
            budget = 0
        after = end if self.grammar is not None else ()
        return TokenConstraints(grammar_after=after, thinking_budget=budget, thinking_end=end)

    def parser(self, usage: Usage, end_state: EndState | None = None) -> ReplyParser:
        """For one sequence. usage: is told of its tokens of thinking.

        end_state: `ReplyParser.end_state` behind tokens that are not added again, though all of the text is.
        """
        calls = self._calls()
        formats = self.formats
        reasoning = formats.reasoning if self._may_think else None
        end: EndToken | None = None
        if self.constraints.grammar_after and formats.ends_surely:
            end = EndToken(formats.tokenizer, formats.thinking_end[0], end_state)
        parser = make_parser(
            reasoning,
            calls,
            self.tools.schemas if calls is not None else {},
            prompt_end=reasoning.start if reasoning is not None and self.opens_thinking else self.prompt_end,
            is_thinking_on=self.is_thinking_on,
            is_end=None if end is None else end.is_end,
        )
        return ReplyParser(self, parser, usage, end)

    @property
    def opens_thinking(self) -> bool:
        """Whether the prompt gets the mark that opens the thinking: it is wanted, and must be bounded on both sides."""
        reasoning, is_on = self.formats.reasoning, self.is_thinking_on
        if reasoning is None or not self.formats.thinking_start or is_on is False or not self.may_open:
            return False
        if reasoning.is_over(self.prompt_end) or reasoning.is_open(self.prompt_end, is_on):
            return False
        return self.budget is not None or (is_on is True and self.grammar is not None and not self.is_strict)

    @property
    def _is_open(self) -> bool:
        reasoning = self.formats.reasoning
        return self.opens_thinking or (
            reasoning is not None and reasoning.is_open(self.prompt_end, self.is_thinking_on)
        )

    @property
    def _may_think(self) -> bool:
        """What is held to a form from its first token on is no thinking, whatever it looks like."""
        return bool(self.constraints.thinking_end) or not self._holds_all

    def _calls(self) -> ToolFormat | None:
        match self.tools.choice:
            case "none":
                return None
            case "auto":
                return None if self._holds_all else self.reader or self.formats.tools
            case "required" | "named":
                return self.reader

    @property
    def _holds_all(self) -> bool:
        """Whether all of the answer is held to the grammar; a client's structural tag leaves free text."""
        is_forced = self.tools.choice in ("required", "named")
        return self.grammar is not None and (is_forced or self.grammar.kind != "structural_tag")


def parsing_of(
    formats: OutputFormats,
    tools: ToolUse,
    *,
    prompt: str,
    continued: str | None = None,
    template_arguments: Mapping[str, Any],
    include_reasoning: bool = True,
    skip_special_tokens: bool = True,
    grammar: GrammarSpec | None = None,
    budget: int | None = None,
    may_open: bool = True,
) -> Parsing | None:
    """None where a reply is plain text: the model has no known way of thinking, and no tools are offered.

    prompt: as rendered, its end says whether the thinking is open. continued: the turn that is to go on instead.
    grammar: the form of the answer. budget: tokens that the thinking may have. may_open: whether `prompt()` is asked.
    ApiError (400) where the model cannot call, or cannot be made to.
    """
    if tools.choice != "none":
        _check_tools(formats, tools)
    elif formats.reasoning is None:
        return None
    switches = [template_arguments[name] for name in _THINKING_SWITCHES if name in template_arguments]
    is_on = bool(switches[0]) if switches else None
    prompt_end = prompt[-PROMPT_END_CHARS:] if continued is None else _last_mark(formats, continued)
    is_strict = grammar is None and bool(tools.strict) and tools.choice == "auto"
    held = _forced(formats, tools)
    if is_strict:
        held = _strict(formats, tools, _may_begin_to_think(formats.reasoning, prompt_end, is_on))
    return Parsing(
        formats=formats,
        tools=tools,
        include_reasoning=include_reasoning,
        is_thinking_on=is_on,
        prompt_end=prompt_end,
        skip_special_tokens=skip_special_tokens,
        grammar=grammar if held is None else held[0],
        budget=budget,
        may_open=may_open,
        reader=None if held is None else held[1],
        is_strict=is_strict and held is not None,
    )


def _may_begin_to_think(
    reasoning: ReasoningFormat | None, prompt_end: str, is_on: bool | None
) -> ReasoningFormat | None:
    """The reasoning format, where the prompt leaves it to the model whether to think."""
    if reasoning is None or reasoning.is_over(prompt_end) or reasoning.is_open(prompt_end, is_on):
        return None
    return reasoning


def _strict(
    formats: OutputFormats, tools: ToolUse, thinking: ReasoningFormat | None
) -> tuple[GrammarSpec, ToolFormat] | None:
    """What the text is held to so that calls fit the functions that are strict, and what reads it; None where it cannot
    be. thinking: what the text may begin with.
    """
    form = formats.form
    reasoning = formats.reasoning
    if form is None or (reasoning is not None and not (formats.ends_surely and form.marks)):
        return None
    try:
        tags = strict_tags(form, tools.schemas, tools.strict, thinking)
    except NoObjectError as error:
        raise bad_request("tools", f"tools: the parameters of {error.name} are no object.") from None
    return _spec_and_reader(formats, tags)


def _forced(formats: OutputFormats, tools: ToolUse) -> tuple[GrammarSpec, ToolFormat] | None:
    """What the text must be held to, so that the calls which are asked for come, and what reads them."""
    if tools.choice not in ("required", "named"):
        return None
    try:
        form, native = formats.form, None
        if form is not None and len(tools.schemas) <= MAX_TAGS:
            tags = forced_tags(form, tools.schemas, tools.name, parallel=tools.parallel)
            native = _spec_and_reader(formats, tags)
        if native is not None:
            return native
        schema = forced_schema(tools.schemas, tools.name, parallel=tools.parallel)
        spec = GrammarSpec(kind="json_schema", source=json_text("tools", schema), field="tools")
        return spec, forced_format(tools.name)
    except NoObjectError as error:
        raise bad_request("tools", f"tools: the parameters of {error.name} are no object.") from None
    except RequestError as error:
        raise bad_request("tools", error.message) from None


def _spec_and_reader(
    formats: OutputFormats, tags: Mapping[str, Any] | None
) -> tuple[GrammarSpec, ToolFormat] | None:
    """Of calls in the model's own form; None where it cannot say them, or not in so many bytes."""
    form = formats.form
    if form is None or formats.tools is None or tags is None:
        return None
    try:
        source = json_text("tools", tags)
    except RequestError:  # too long: definitions stand with each argument that refers to them
        return None
    reader = formats.tools if form.read is None else replace(formats.tools, read=form.read)
    return GrammarSpec(kind="structural_tag", source=source, field="tools"), reader


def _last_mark(formats: OutputFormats, turn: str) -> str:
    """What a turn that goes on has left in force: thinking that was begun there, or else the answer."""
    reasoning = formats.reasoning
    if reasoning is None:
        return ""
    is_open = turn.rfind(reasoning.start) > turn.rfind(reasoning.end)
    return reasoning.start if is_open else reasoning.end


def _check_tools(formats: OutputFormats, tools: ToolUse) -> None:
    if formats.tools is None and tools.choice == "auto":
        raise bad_request(
            "tools",
            "tools: this server knows no format of this model's tool calls; start it with --tool-call-parser (and "
            'without --no-enable-auto-tool-choice), or send tool_choice "none".',
        )
    reasoning = formats.reasoning
    if tools.choice in ("required", "named") and reasoning is not None and reasoning.read_all is not None:
        raise bad_request(
            "tool_choice",
            f'tool_choice can be "auto" or "none" with this model: calls of {reasoning.name} cannot be forced.',
        )


class ReplyParser:
    """One sequence: its events as the request wants them, its finish reason, its tokens of thinking."""

    __slots__ = (
        "_counter", "_end", "_has_call", "_include_reasoning", "_is_named", "_parser", "_single", "_usage", "call_id",
    )  # fmt: skip

    def __init__(
        self, parsing: Parsing, parser: StreamParser, usage: Usage, end: EndToken | None = None
    ) -> None:
        """end: what the parser asks, where the thinking ends with a token and not with whatever looks like it."""
        self._parser = parser
        self._end = end
        self._usage = usage
        self._include_reasoning = parsing.include_reasoning
        self._single = not parsing.tools.parallel
        self._is_named = parsing.tools.choice == "named"
        self._has_call = False
        formats = parsing.formats
        self.call_id = _CallIds(formats.tools)
        self._counter: ThinkingTokens | None = None
        if formats.reasoning is not None:
            hidden = formats.tokenizer.special_ids if parsing.skip_special_tokens else frozenset()
            self._counter = ThinkingTokens(formats.tokenizer, hidden - set(formats.shown_special_ids))
            usage.reasoning_tokens = usage.reasoning_tokens or 0

    @property
    def is_plain(self) -> bool:
        """Whether all that follows is content as it stands."""
        return self._parser.is_plain

    @property
    def end_state(self) -> EndState | None:
        """What is known of the token that ends the thinking; None where any mark does."""
        return None if self._end is None else self._end.state

    def add(self, text: str, token_ids: Sequence[int], finish_reason: FinishReason | None) -> list[Event]:
        """What is certain with this text of these tokens; with a finish reason, all."""
        if self._end is not None:
            self._end.add(token_ids)
        events = self._parser.push(text) if text else []
        if finish_reason is not None:
            events += self._parser.finish()
        counter = self._counter
        if counter is not None:
            decided = None if finish_reason is not None else self._parser.offset
            assert self._usage.reasoning_tokens is not None
            self._usage.reasoning_tokens += counter.add(token_ids, self._parser.reasoning_spans, decided)
        return [event for event in events if self._is_wanted(event)]

    def finish_reason(self, given: FinishReason) -> str:
        """As the reply tells it: calls end a turn in their own way, unless one was asked for by name."""
        return "tool_calls" if given == "stop" and self._has_call and not self._is_named else given

    def _is_wanted(self, event: Event) -> bool:
        match event:
            case Content():
                return True
            case Reasoning():
                return self._include_reasoning
            case ToolCallStart(index=index) | ToolCallArguments(index=index):
                return index == 0 or not self._single
            case ToolCallEnd():
                self._has_call = True
                return event.index == 0 or not self._single


class _CallIds:
    """Makes the id of a call that brings none, or one that another call of the reply has."""

    __slots__ = ("_format", "_seen")

    def __init__(self, tools: ToolFormat | None) -> None:
        self._format = tools
        self._seen: set[str] = set()

    def __call__(self, start: ToolCallStart) -> str:
        if start.id is not None and start.id not in self._seen:
            self._seen.add(start.id)
            return start.id
        number = f"{random.getrandbits(128):032x}"
        return f"call_{number}" if self._format is None else self._format.call_id(number)


def _says_of_itself(tokenizer: Tokenizer) -> str:
    """The chat templates; where there are none, the special tokens."""
    template = tokenizer.chat_template
    if template is None:
        return "\n".join(tokenizer.token_str(token) for token in sorted(tokenizer.special_ids))
    return template.source + (template.tool_source or "")
