"""Which mark in a text is the token that ends the thinking, whatever pieces tokens and text come in."""

from __future__ import annotations

import random
from typing import Any

from oneloop.api.thinking_tokens import EndToken
from oneloop.parsers.engine import make_parser
from oneloop.parsers.events import Content, Reasoning
from oneloop.parsers.reasoning.think import QWEN3

MARK = "</think>"


def test_the_token_among_its_likes(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(marks=[MARK])
    token = tokenizer.token_id(MARK)
    source = random.Random(5)
    pieces = [MARK, "</thi", "nk>", "<", "x", "é"]
    num_likes = 0
    for _ in range(500):
        before = "".join(source.choices(pieces, k=source.randrange(12))) + "."
        behind = "." + "".join(source.choices(pieces, k=source.randrange(6))) + "."
        ids = [*before.encode(), token, *behind.encode()]
        text = before + MARK + behind
        end = EndToken(tokenizer, token)
        parser = make_parser(QWEN3, None, {}, prompt_end="<think>", is_end=end.is_end)
        events, told = [], 0
        while ids:
            size = source.randrange(1, 9)
            end.add(ids[:size])
            ids = ids[size:]
            # Text comes with its tokens, or later.
            num_left = len(tokenizer.decode(ids, skip_special_tokens=False))
            upto = source.randint(told, max(told, len(text) - num_left - 1))
            events += parser.push(text[told:upto])
            told = upto
        events += parser.push(text[told:]) + parser.finish()
        assert "".join(event.text for event in events if type(event) is Reasoning) == before
        assert "".join(event.text for event in events if type(event) is Content) == behind
        num_likes += before.count(MARK)
    assert num_likes > 100


def test_text_without_the_token_is_all_thinking(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(marks=[MARK])
    end = EndToken(tokenizer, tokenizer.token_id(MARK))
    parser = make_parser(QWEN3, None, {}, prompt_end="<think>", is_end=end.is_end)
    end.add(list(b"a</think>b"))
    assert parser.push("a</think>b") + parser.finish() == [Reasoning("a</think>b")]
