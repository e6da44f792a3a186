"""Tools in requests of OpenAI's two APIs that are not functions.

A custom tool takes any text instead of arguments. It is shown to the model as a function of one
text, and its calls are delivered as that text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from areal_x.agents.gateway.exchange import Lenient, ToolName
from areal_x.agents.json_checks import json_bounds

INPUT = "input"
# Tags of what a request defines or calls. Their spaces keep them out of the parameters that errors
# name.
FUNCTION, CUSTOM, HOSTED = "a function", "a custom tool", "a hosted tool"


def type_of(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else getattr(part, "type", None)


def kind_of_tool(tool: Any) -> str:
    """Returns the tag of a tool that a request defines; a hosted one is of the API's own servers,
    such as web_search."""
    return {"function": FUNCTION, "custom": CUSTOM}.get(str(type_of(tool)), HOSTED)


def kind_of_call(call: Any) -> str:
    """Returns the tag of a call that a request sends back."""
    return CUSTOM if type_of(call) == "custom" else FUNCTION


class HostedTool(Lenient):
    type: str


class Grammar(Lenient):
    syntax: str
    definition: str


class TextFormat(Lenient):
    """Of a custom tool's text. The two APIs place the grammar differently."""

    type: str
    syntax: str | None = None
    definition: str | None = None
    grammar: Grammar | None = None


class CustomCall(Lenient):
    """A custom tool's call in chat completions."""

    name: str
    input: str


class CustomDefinition(Lenient):
    name: ToolName
    description: str | None = None
    format: TextFormat | None = None

    def shown_description(self) -> str | None:
        """Returns the description with the grammar of the text: described, not enforced."""
        form = self.format
        if form is None:
            return self.description
        grammar = form.grammar or form
        if not grammar.definition:
            return self.description
        about = f"The text follows this {grammar.syntax} grammar:\n{grammar.definition}"
        return "\n\n".join(part for part in (self.description, about) if part)


PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
}


def arguments_of_input(text: str) -> str:
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of_arguments(arguments: str) -> str:
    """Returns the text of a custom tool's call, or all that the model wrote if it is no such
    call."""
    given = json_bounds.loads_object(arguments)
    match given:
        case {"input": str(text), **others} if not others:
            return text
        case _:
            return arguments
