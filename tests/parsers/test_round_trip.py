"""What the models' own templates write of a turn with calls is what the parser that they ask for reads."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from oneloop.parsers.registry import reasoning_format, tool_format
from oneloop.tokenize.templates import ChatTemplate

FETCH = Path(__file__).parents[1] / "tokenize/fetch_templates.py"

WEATHER = {"city": 'Zürich "x" {a}\n b', "days": 3, "opts": {"a": [1, None, True]}}
STRING = {"type": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": STRING, "days": {"type": "integer"}, "opts": {"type": "object"}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
SCHEMAS: dict[str, Any] = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}  # type: ignore[index]
CALLS = [("get_weather", WEATHER), ("get_time", {})]
MODELS = {
    # the formats that are found, how many calls the template takes, and whether it shows the thinking
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None, 2),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3", 2),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None, 2),
    "ibm-granite-granite-4.0": ("hermes", None, 2),
    "Qwen3-Coder": ("qwen3_coder", None, 2),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3", 2),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3", 2),
    "GLM-4.6": ("glm45", "qwen3", 2),
    "moonshotai-Kimi-K2": ("kimi_k2", None, 2),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v3", "deepseek_v3", 2),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None, 2),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None, 2),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral", 2),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None, 1),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss", 1),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    """Templates of real models."""
    spec = importlib.util.spec_from_file_location("fetch_templates", FETCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.fetch())


@pytest.mark.parametrize("model", MODELS)
def test_round_trip(run: Any, folder: Path, model: str) -> None:
    source = (folder / f"{model}.jinja").read_text()
    calls, reasoning, num_calls = MODELS[model]
    found, thinking = tool_format("auto", source), reasoning_format("auto", source)
    assert (found and found.name, thinking and thinking.name) == (calls, reasoning)
    template = ChatTemplate(source, file=model, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    made = [
        {"id": f"abcdefgh{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(CALLS[:num_calls])
    ]
    user = {"role": "user", "content": "hello"}
    turn = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": made}
    whole = template.render([user, turn], tools=TOOLS, add_generation_prompt=False)
    asked = template.render([user], tools=TOOLS)
    end = next((at for at, (a, b) in enumerate(zip(whole, asked, strict=False)) if a != b), len(asked))
    prompt = whole[:end]  # without what a prompt may open, and this turn does not have
    options = {"calls": calls, "reasoning": reasoning or "none", "tools": SCHEMAS, "prompt_end": prompt[-64:]}
    text = whole[len(prompt) :]
    parsed = run([text], **options)
    assert parsed.arguments == CALLS[:num_calls]
    assert parsed.reasoning in ("", "Hm.")
    assert "get_" not in parsed.content
    assert json.dumps(run(list(text), **options).arguments) == json.dumps(parsed.arguments)
