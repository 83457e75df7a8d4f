"""The functions that a request offers to the model, whichever API it came by, and which of them it is to call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from oneloop.api.limits import MAX_NAME_LEN

if TYPE_CHECKING:
    from oneloop.api.protocol.fields import Fields

Choice: TypeAlias = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolset:
    """As checked; no tools is an empty one."""

    tools: list[dict[str, Any]]
    """As templates read them: {"type": "function", "function": {"name", "description", "parameters"}}."""
    choice: Choice = "auto"
    """"required": any of them, or `name`."""
    name: str | None = None
    """The one to call."""
    parallel: bool = True
    """Whether it may call several at once."""

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """What the template is given: nothing that must not be called."""
        return self.tools if self.tools and self.choice != "none" else None

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(tool["function"]["name"] for tool in self.tools)


def function(fields: Fields, schema_key: str) -> dict[str, Any]:
    """A function as templates read it. ApiError (400).

    schema_key: where this API has the JSON schema of the arguments.
    """
    name = fields.text("name")
    if not name or len(name) > MAX_NAME_LEN:
        raise fields.refuse("name", f"must be a string of 1 to {MAX_NAME_LEN} characters")
    made: dict[str, Any] = {"name": name}
    description = fields.text("description")
    if description is not None:
        made["description"] = description
    made["parameters"] = fields.shallow_object(schema_key) or {"type": "object", "properties": {}}
    return {"type": "function", "function": made}


def check_names(fields: Fields, toolset: Toolset) -> Toolset:
    """The same, if every name is there once and the chosen function is one of them. ApiError (400)."""
    if len(toolset.names) < len(toolset.tools):
        raise fields.refuse("tools", "must have different names")
    if toolset.choice == "required" and not toolset.tools:
        raise fields.refuse("tool_choice", "needs tools")
    if toolset.name is not None and toolset.name not in toolset.names:
        raise fields.refuse("tool_choice", "names a function that is not among the tools")
    return toolset
