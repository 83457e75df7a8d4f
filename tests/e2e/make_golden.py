"""Make data/greedy.json: what transformers' generate answers, greedily, to 64 prompts with SmolLM2's weights.

    python tests/e2e/make_golden.py

Each entry holds the prompt's token ids, the answer's token ids and, per answer token, the gap between the two best
logits: where it is within float noise, another summation order may rightly choose the other token.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from oneloop.loader.embedded import fetch_embedded
from oneloop.tokenize.load import load_tokenizer
from oneloop_bench.reference import transformers_llama

MAX_NEW_TOKENS = 24
MAX_PROMPT_TOKENS = 2000
END_OF_TURN = "<|im_end|>"

CHAT = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "Give me three names for a black cat.",
    "What is 17 + 25?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "List the planets of the solar system.",
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "What does HTTP stand for?",
    "Tell me a joke about computers.",
    "How do I boil an egg?",
    "Name a famous painting by Van Gogh.",
    "What's the difference between a list and a tuple?",
    "Summarise the story of Cinderella in one sentence.",
    "日本の首都はどこですか？",
    "请用一句话介绍北京。",
    "안녕하세요, 오늘 날씨가 어때요?",
    "你好！你会说中文吗？",
    "富士山の高さは何メートルですか。",
    "What does 🎉 mean?",
    "Reply with emojis only: 🐶🐱🐭",
    "Explain this: 👩‍👩‍👧‍👦 and 🏳️‍🌈",
    "Привет, как дела?",
    "مرحبا كيف حالك",
]
PLAIN = [
    "The quick brown fox",
    "Once upon a time, in a small village,",
    "1, 2, 3, 5, 8, 13,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    "SELECT name, age FROM users WHERE",
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\n",
    "Q: What is the boiling point of water?\nA:",
    "The recipe needs two eggs, a cup of flour and",
    "a  1  b  22   c   333",
    "   leading spaces and\ttabs\n\n\nnewlines",
    "昔々あるところに、",
    "春眠不觉晓，",
    "한국의 전통 음식은",
    "🙂🙃🙂🙃🙂",
    "🚀 Launch day! 🚀 We are",
    "é à ü ñ ç — “quotes” … ½ ²",
    "3.14159265358979",
    '{"name": "Ada", "age": 36, "langs": [',
    "To be, or not to be, that is",
    "Water is made of hydrogen and",
    "The first president of the United States was",
    "In the year 2050,",
]
PARAGRAPH = (
    "The lighthouse keeper climbed the stairs at dusk, as he had done for thirty years, and lit the lamp. "
    "Below him the harbour town of {name} settled into the evening: nets were drying, children were called in, "
    "and the last ferry number {number} came round the point with its lights on. "
)
NAMES = ["Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Ginkgo", "Hazel"]


def long_prompts() -> list[str]:
    """Prompts of about 100 to 2,000 tokens; the longest ones share long prefixes pairwise."""
    texts = []
    for repeats in (2, 4, 7, 14, 22, 34):
        body = "".join(PARAGRAPH.format(name=NAMES[i % 8], number=i) for i in range(repeats))
        texts += [body, body + "Then the storm began, and"]
    return [*texts, "All day long the rain fell. " * 120 + "In the evening", "ha " * 400]


def main() -> None:
    path = fetch_embedded()
    tokenizer = load_tokenizer(path)
    model = transformers_llama(path)
    entries = []
    prompts = [
        (
            "chat",
            tokenizer.chat_template.render([{"role": "user", "content": text}], add_generation_prompt=True),
        )
        for text in CHAT
    ]
    prompts += [("plain", text) for text in PLAIN] + [("long", text) for text in long_prompts()]
    for kind, text in prompts:
        prompt = tokenizer.encode(text, add_special_tokens=False)[:MAX_PROMPT_TOKENS]
        output, gaps = greedy(model, prompt)
        entries.append({"kind": kind, "prompt": prompt, "output": output, "gaps": gaps})
        print(
            kind, len(prompt), repr(tokenizer.decode(output))[:70], f"least gap {min(gaps):.4f}", flush=True
        )
    target = Path(__file__).parent / "data" / "greedy.json"
    target.write_text(
        json.dumps({"max_new_tokens": MAX_NEW_TOKENS, "entries": entries}, separators=(",", ":"))
    )


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    """transformers' own generate, without an end token, so that every answer has MAX_NEW_TOKENS tokens."""
    with torch.inference_mode():
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    best = [logits[0].topk(2).values for logits in result.logits]
    return result.sequences[0, len(prompt) :].tolist(), [round(float(a - b), 5) for a, b in best]


if __name__ == "__main__":
    main()
