"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat request, checked before anything is made of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import orjson

from oneloop.api.errors import bad_request
from oneloop.api.limits import MAX_TOOL_NAME_LEN, MAX_TOOLS, MAX_TOOLS_BYTES
from oneloop.api.protocol.fields import Fields, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from oneloop.engine.structured import GrammarSpec

_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_TOOL_NAME_LEN}}}")
ToolChoice: TypeAlias = Literal["none", "auto", "required", "named"]
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The functions that a request offers, and which of them are to be called."""

    tools: tuple[dict[str, Any], ...] = ()
    """As templates read them: {"type": "function", "function": {"name", "description", "parameters"}}."""
    choice: ToolChoice = "none"
    name: str | None = None
    """Of the function that is to be called, with "named"."""
    parallel: bool = True
    """Whether there may be several calls."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name → JSON schema of the arguments."""
    strict: frozenset[str] = frozenset()
    """Functions whose calls are to fit their schemas."""

    @property
    def offered(self) -> tuple[dict[str, Any], ...]:
        """What the model is told of."""
        return () if self.choice == "none" else self.tools


def read_tools(fields: Fields) -> ToolUse:
    """Check the three fields. ApiError (400) naming the one at fault."""
    raw = fields.array("tools", at_most=MAX_TOOLS)
    kind, name = _choice(fields, fields.given("tool_choice"))
    if raw is None:
        if kind not in (None, "none"):
            raise fields.refuse("tool_choice", "needs tools")
        return ToolUse()
    if not raw:
        raise fields.refuse("tools", "must not be an empty list; leave it out")
    parallel = fields.flag("parallel_tool_calls", True)
    strict: set[str] = set()
    tools = [_tool(fields, f"tools[{index}]", tool, strict) for index, tool in enumerate(raw)]
    return tool_use(fields, tools, kind, name, parallel=parallel, strict=strict)


def tool_use(
    fields: Fields,
    tools: list[dict[str, Any]],
    choice: ToolChoice | None,
    name: str | None,
    *,
    parallel: bool,
    strict: Collection[str] = (),
) -> ToolUse:
    """What the fields of whichever API come to. ApiError (400) naming `tools` or `tool_choice`.

    tools: as templates read them. choice: None where none is made. name: of the function to be called, with "named".
    strict: names of functions that are.
    """
    if not tools:
        if choice in ("required", "named"):
            raise fields.refuse("tool_choice", "needs tools")
        return ToolUse()
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if len(schemas) < len(tools):
        raise fields.refuse("tools", "must have different names")
    _check_size(fields, tools)
    if name is not None and name not in schemas:
        raise fields.refuse("tool_choice", f"names {shown(name)}, which is not among the tools")
    return ToolUse(
        tools=tuple(tools),
        choice=choice or "auto",
        name=name,
        parallel=parallel,
        schemas=schemas,
        strict=frozenset(strict),
    )


def check_one_form(tools: ToolUse, grammar: GrammarSpec | None) -> None:
    """ApiError (400) for a call that must come and a text that must have another form."""
    if grammar is not None and tools.choice in ("required", "named"):
        raise bad_request(
            grammar.field,
            f"{grammar.field} and a tool_choice that asks for a call exclude each other: the reply would be the call",
        )


def read_function(function: Fields, schema_key: str) -> dict[str, Any]:
    """A function as templates read it. ApiError (400). schema_key: where this API has the schema of its arguments."""
    name = function.text("name")
    if name is None or not _NAME.fullmatch(name):
        raise function.refuse(
            "name", f"must be 1 to {MAX_TOOL_NAME_LEN} letters, digits or characters of _ . : / -"
        )
    made: dict[str, Any] = {"name": name}
    description = function.text("description")
    if description is not None:
        made["description"] = description
    made["parameters"] = function.object(schema_key) or _NO_PARAMETERS
    return {"type": "function", "function": made}


def _tool(outer: Fields, place: str, raw: Any, strict: set[str]) -> dict[str, Any]:
    """The function, whose name is added where it is strict."""
    fields = outer.member(place, raw)
    if fields.text("type") != "function":
        raise fields.refuse("type", 'must be "function"')
    function = fields.inner(fields.object("function") or {}, "function")
    is_strict = function.flag("strict", False)
    made = read_function(function, "parameters")
    if is_strict:
        strict.add(made["function"]["name"])
    return made


def _check_size(fields: Fields, tools: list[dict[str, Any]]) -> None:
    try:
        size = len(orjson.dumps(tools))
    except orjson.JSONEncodeError:
        raise fields.refuse("tools", "are nested too deeply") from None
    if size > MAX_TOOLS_BYTES:
        raise fields.refuse("tools", f"may have at most {MAX_TOOLS_BYTES} bytes in all, got {size}")


def _choice(fields: Fields, choice: Any) -> tuple[ToolChoice | None, str | None]:
    match choice:
        case None:
            return None, None
        case "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required":
            return "required", None
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", name
        case _:
            raise fields.refuse(
                "tool_choice",
                'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}',
            )
