"""<think> … </think>: DeepSeek R1, Qwen 3, GLM 4.5, Kimi K2, and models that were taught by them."""

from __future__ import annotations

from oneloop.parsers.formats import ReasoningFormat
from oneloop.parsers.thinking import thinking_reader

_START, _END = "<think>", "</think>"


def _has_marks(template: str) -> bool:
    return _END in template


QWEN3 = ReasoningFormat(
    name="qwen3",
    aliases=("glm45", "glm4_moe", "nemotron_v3", "think"),
    recognises=_has_marks,
    markers=(_START, _END),
    read=thinking_reader([_START], [_END]),
    start=_START,
    end=_END,
)
DEEPSEEK_R1 = ReasoningFormat(
    name="deepseek_r1",
    recognises=lambda template: (
        # Templates that write the mark themselves say in each prompt whether it is open.
        _has_marks(template) and "<｜Assistant｜>" in template and _START not in template
    ),
    markers=(_START, _END),
    read=thinking_reader([_START], [_END]),
    start=_START,
    end=_END,
    starts_open=True,
)
DEEPSEEK_V3 = ReasoningFormat(
    name="deepseek_v3",
    aliases=("deepseek_v31",),
    recognises=lambda template: _has_marks(template) and "<｜Assistant｜>" in template,
    markers=(_START, _END),
    read=thinking_reader([_START], [_END]),
    start=_START,
    end=_END,
)
KIMI_K2 = ReasoningFormat(
    name="kimi_k2",
    recognises=lambda template: _has_marks(template) and "<|im_middle|>" in template,
    markers=(_START, _END),
    read=thinking_reader([_START], [_END], until="<|tool_calls_section_begin|>"),
    start=_START,
    end=_END,
    also_ends=True,
)
