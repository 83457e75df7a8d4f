"""What streams of Responses and Anthropic events must obey, as state machines, and a format with all kinds of blocks.

Each machine takes the events one by one, fails on one that may not come now, and gives back the reply they add up to.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, ClassVar

from oneloop.parsers.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

SCRIPT = '<t>let me see 日本</t>\n\nI call: [get|{"city": "Köln"}]\n[now|{}]'
"""A reply with thinking, text and two calls in the format of `MarkedParser`."""


class MarkedParser:
    """`<t>…</t>` is thinking, `[name|arguments]` a call. Holds back what may be a mark; events as pieces come."""

    def __init__(self) -> None:
        self._kind = "text"
        self._held = ""
        self._calls = 0

    is_plain = False

    def add(self, text: str, token_ids: list[int], finish_reason: str | None) -> list[Event]:
        out: list[Event] = []
        for char in text:
            self._char(char, out)
        if finish_reason is not None and self._held and self._kind != "name":
            out.append(Reasoning(self._held) if self._kind == "thinking" else Content(self._held))
        return out

    def call_id(self, start: ToolCallStart) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _char(self, char: str, out: list[Event]) -> None:
        index = self._calls - 1
        if self._kind == "arguments":
            if char == "]":
                self._kind = "text"
                out.append(ToolCallEnd(index))
            else:
                out.append(ToolCallArguments(index, char))
            return
        self._held += char
        if self._kind == "name":
            if char == "|":
                out.append(ToolCallStart(self._calls, self._held[:-1]))
                self._calls, self._kind, self._held = self._calls + 1, "arguments", ""
            return
        mark = {"text": ("<t>", "thinking"), "thinking": ("</t>", "text")}[self._kind]
        if self._held == mark[0]:
            self._kind, self._held = mark[1], ""
        elif self._kind == "text" and self._held == "[":
            self._kind, self._held = "name", ""
        elif not mark[0].startswith(self._held):
            out.append((Content if self._kind == "text" else Reasoning)(self._held))
            self._held = ""


def named_events(body: bytes) -> list[dict[str, Any]]:
    """The data of each event; its name must be its type."""
    text = body.decode()
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        match = re.fullmatch(r"event: ([a-z_.]+)\ndata: (.+)", block)
        assert match, block
        data = json.loads(match[2])
        assert data["type"] == match[1]
        events.append(data)
    return events


class AnthropicRules:
    """message_start, blocks one after the other, message_delta, message_stop; pings anywhere."""

    DELTAS: ClassVar = {
        "text": {"text_delta": "text"},
        "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
        "tool_use": {"input_json_delta": "partial_json"},
    }

    def __init__(self) -> None:
        self.message: dict[str, Any] | None = None
        self.open: int | None = None
        self.json = ""
        self.is_told = self.is_over = False

    def take(self, event: dict[str, Any]) -> None:
        assert not self.is_over, event
        kind = event["type"]
        if kind == "ping":
            assert self.message is not None
        elif kind == "message_start":
            assert self.message is None
            self.message = event["message"]
            assert self.message["content"] == []
            assert self.message["stop_reason"] is None
        else:
            assert self.message is not None
            getattr(self, kind)(event, self.message)

    def content_block_start(self, event: dict[str, Any], message: dict[str, Any]) -> None:
        assert self.open is None
        assert not self.is_told
        assert event["index"] == len(message["content"])
        block = event["content_block"]
        assert not any(block.get(member) for member in ("text", "thinking", "input"))
        self.open, self.json = event["index"], ""
        message["content"].append(block)

    def content_block_delta(self, event: dict[str, Any], message: dict[str, Any]) -> None:
        assert event["index"] == self.open
        block, delta = message["content"][-1], event["delta"]
        member = self.DELTAS[block["type"]][delta["type"]]
        if member == "partial_json":
            self.json += delta[member]
        else:
            assert delta[member] or member == "signature"
            block[member] += delta[member]

    def content_block_stop(self, event: dict[str, Any], message: dict[str, Any]) -> None:
        assert event["index"] == self.open
        self.open = None
        if message["content"][-1]["type"] == "tool_use":
            message["content"][-1]["input"] = json.loads(self.json or "{}")

    def message_delta(self, event: dict[str, Any], message: dict[str, Any]) -> None:
        assert self.open is None
        assert not self.is_told
        self.is_told = True
        assert event["delta"]["stop_reason"]
        message.update(event["delta"], usage=event["usage"])

    def message_stop(self, event: dict[str, Any], message: dict[str, Any]) -> None:
        assert self.is_told
        self.is_over = True

    @classmethod
    def check(cls, events: list[dict[str, Any]]) -> dict[str, Any]:
        """The message that a whole stream adds up to."""
        rules = cls()
        for event in events:
            rules.take(event)
        assert rules.is_over
        assert rules.message is not None
        return rules.message


class ResponsesRules:
    """Numbers without a gap; created, in_progress, items one after the other, each told to its end; the end."""

    FINAL: ClassVar = {"response.completed", "response.incomplete", "response.failed"}

    def __init__(self) -> None:
        self.number = 0
        self.items: list[dict[str, Any]] = []
        self.item: dict[str, Any] | None = None
        self.has_part = self.is_text_done = False
        self.text = ""
        self.logprobs: list[Any] = []
        self.final: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> None:
        assert event["sequence_number"] == self.number
        assert self.final is None
        kind = event["type"]
        if self.number < 2:
            assert kind == ("response.created", "response.in_progress")[self.number]
            assert event["response"]["status"] == "in_progress"
            assert event["response"]["output"] == []
        elif kind in self.FINAL:
            assert self.item is None or kind == "response.failed"
            self.final = event["response"]
            assert kind == f"response.{self.final['status']}".replace("cancelled", "incomplete")
        else:
            getattr(self, kind.removeprefix("response.").replace(".", "_"))(event)
        self.number += 1

    def output_item_added(self, event: dict[str, Any]) -> None:
        assert self.item is None
        assert event["output_index"] == len(self.items)
        self.item, self.text, self.logprobs = event["item"], "", []
        self.has_part = self.is_text_done = False
        assert self.item["status"] == "in_progress"
        assert not any(self.item.get(member) for member in ("content", "arguments"))

    def content_part_added(self, event: dict[str, Any]) -> None:
        self._place(event)
        assert not self.has_part
        assert event["part"]["type"] == self._part_type()
        assert event["part"]["text"] == ""
        self.has_part = True

    def _delta(self, event: dict[str, Any]) -> None:
        self._place(event)
        assert not self.is_text_done
        assert event["delta"]
        self.text += event["delta"]

    def _done(self, event: dict[str, Any], member: str) -> None:
        self._place(event)
        assert event[member] == self.text
        self.is_text_done = True

    def output_text_delta(self, event: dict[str, Any]) -> None:
        assert self.has_part
        self._delta(event)
        self.logprobs += event["logprobs"]

    def output_text_done(self, event: dict[str, Any]) -> None:
        self._done(event, "text")
        assert event["logprobs"][: len(self.logprobs)] == self.logprobs
        self.logprobs = event["logprobs"]

    def reasoning_text_delta(self, event: dict[str, Any]) -> None:
        assert self.has_part
        self._delta(event)

    def reasoning_text_done(self, event: dict[str, Any]) -> None:
        self._done(event, "text")

    def function_call_arguments_delta(self, event: dict[str, Any]) -> None:
        self._delta(event)

    def function_call_arguments_done(self, event: dict[str, Any]) -> None:
        self._done(event, "arguments")
        assert self.item is not None
        assert event["name"] == self.item["name"]

    def content_part_done(self, event: dict[str, Any]) -> None:
        self._place(event)
        assert self.is_text_done
        part = event["part"]
        assert part["text"] == self.text
        assert part.get("logprobs", []) == self.logprobs
        self.has_part = False

    def output_item_done(self, event: dict[str, Any]) -> None:
        assert self.item is not None
        assert self.is_text_done
        assert not self.has_part
        item = event["item"]
        assert item["id"] == self.item["id"]
        assert item["status"] in ("completed", "incomplete")
        self.items.append(item)
        self.item = None

    def _place(self, event: dict[str, Any]) -> None:
        assert self.item is not None
        assert event["item_id"] == self.item["id"]
        assert event["output_index"] == len(self.items)
        assert event.get("content_index", 0) == 0
        assert ("content_index" in event) == (self.item["type"] != "function_call")

    def _part_type(self) -> str:
        assert self.item is not None
        return {"message": "output_text", "reasoning": "reasoning_text"}[self.item["type"]]

    @classmethod
    def check(cls, events: list[dict[str, Any]]) -> dict[str, Any]:
        """The response that a whole stream ends with."""
        rules = cls()
        for event in events:
            rules.take(event)
        assert rules.final is not None
        statuses = ("completed", "incomplete")
        assert rules.final["status"] not in statuses or rules.items == rules.final["output"]
        return rules.final
