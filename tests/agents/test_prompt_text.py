"""Prompts as text."""

from __future__ import annotations

from areal_x.agents.external_program import last_message_text
from areal_x.agents.prompt_text import prompt_text
from areal_x.types import Message, Task

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MESSAGES: list[Message] = [
    {"role": "system", "content": "Be short."},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "user", "content": [PICTURE, {"type": "text", "text": "How many?"}]},
]


def test_messages_are_paragraphs_and_pictures_are_named() -> None:
    assert prompt_text("2+2=") == prompt_text("2+2=", roles=True) == "2+2="
    assert prompt_text(MESSAGES) == "Be short.\n\n\n\n[image_url]\nHow many?"
    assert prompt_text(MESSAGES, roles=True) == "system: Be short.\n\nassistant: \n\nuser: [image_url]\nHow many?"


def test_the_prompt_of_a_command_is_the_last_message_s_text() -> None:
    assert last_message_text(Task("t", "2+2=")) == "2+2="
    assert last_message_text(Task("t", MESSAGES)) == "[image_url]\nHow many?"
