"""The chat template and the parsers of a vLLM server, for models that transformers renders
differently or cannot parse.

They are the server's own: `--chat-template`, `--reasoning-parser`, `--enable-auto-tool-choice
--tool-call-parser`, passed to servers by vllm.arguments. If it has no parser, replies are parsed as
by `TemplateRenderer`.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int32

from areal_x.agents.chat.parsing import Reply, ToolCall
from areal_x.agents.chat.rendering import TemplateRenderer, Tools, Unrenderable
from areal_x.engines.fleet.failures import ServerLost, ServerRefused
from areal_x.protocols.engine import ChatServer
from areal_x.types import Message

T = TypeVar("T")
BEFORE = 16  # tokens at the prompt's end that parsing a reply depends on


class ServerRenderer(TemplateRenderer):
    """clients: returns the servers that are running, any of which can render. tokenizer: the
    model's, the same as theirs."""

    def __init__(self, tokenizer: Any, clients: Callable[[], Sequence[ChatServer]]) -> None:
        super().__init__(tokenizer)
        self._clients = clients

    async def rendered(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> str:
        return str(
            self.tokenizer.decode(await self._rendered(messages, tools, template, continue_final))
        )

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> Int32[np.ndarray, " P"]:
        return np.asarray(await self._rendered(messages, tools, template, continue_final), np.int32)

    async def read(
        self,
        tokens: Int32[np.ndarray, " N"],
        tools: Tools,
        prompt: Int32[np.ndarray, " P"] | None = None,
    ) -> Reply:
        if not len(tokens):
            return Reply("")
        before = [] if prompt is None else prompt[-BEFORE:].tolist()
        body = request_body([{"role": "user", "content": ""}], tools, {}, continue_final=False)
        message = await self._any(lambda client: client.derender(tokens.tolist(), body, before))
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        calls = message.get("tool_calls") or ()
        if not reasoning and not calls:
            return await super().read(tokens, tools, prompt)
        return Reply(message.get("content") or None, reasoning, tuple(map(tool_call, calls)))

    async def _rendered(
        self,
        messages: Sequence[Message],
        tools: Tools,
        template: Mapping[str, Any],
        continue_final: bool,
    ) -> list[int]:
        return await self._any(
            lambda client: client.render(request_body(messages, tools, template, continue_final))
        )

    async def _any(self, ask: Callable[[ChatServer], Awaitable[T]]) -> T:
        """Returns the result from the first server that answers. Raises: Unrenderable for a request
        that a server refuses, ServerLost if none answers."""
        lost = ServerLost("no vLLM server is running that could render a prompt")
        for client in self._clients():
            try:
                return await ask(client)
            except ServerRefused as error:
                raise Unrenderable(
                    f"the server cannot render the messages: {error.words}"
                ) from error
            except ServerLost as error:
                lost = error
        raise lost


def request_body(
    messages: Sequence[Message], tools: Tools, template: Mapping[str, Any], continue_final: bool
) -> dict[str, Any]:
    """Returns the body of a chat completion request."""
    body: dict[str, Any] = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": not continue_final,
        "continue_final_message": continue_final,
        "chat_template_kwargs": dict(template),
    }
    return body | ({"tools": [dict(tool) for tool in tools]} if tools else {})


def tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    return ToolCall(
        str(call.get("id") or f"call_{secrets.token_hex(12)}"),
        function["name"],
        function["arguments"],
    )
