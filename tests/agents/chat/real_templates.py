"""The chat templates of fourteen families as their models have them, each with a tiny tokenizer and a writer of its notation.

The templates are not in this repository: they are data of two packages of the index (TRL 1.16 and Axolotl 0.19, both
Apache-2.0), which `make test` unpacks into the environment without installing them (requirements/chat-templates.txt).
OLMo 2's, which no package has, is written here from the format's description.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.agents.chat.speaking import byte_level

PACKAGES = Path(os.environ.get("CHAT_TEMPLATES", Path(sys.prefix) / "chat-templates"))
TRL, AXOLOTL = "trl/chat_templates/", "axolotl/utils/chat_templates/templates/"
OLMO2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role in ('system', 'user') %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + eos_token + ('' if loop.last else '\n') }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
Called = tuple[str, dict[str, Any], str]  # name, arguments, id
Writer = Callable[[str | None, str, list[Called]], str]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: list[Called]) -> list[str]:
    return [f"<tool_call>\n{dumped({'name': name, 'arguments': given})}\n</tool_call>" for name, given, _ in calls]


def plain(thought: str | None, content: str, calls: list[Called]) -> str:
    return content


def qwen25(thought: str | None, content: str, calls: list[Called]) -> str:
    return "\n".join([*([content] if content else []), *hermes(calls)])


def qwen3(thought: str | None, content: str, calls: list[Called]) -> str:
    return ("" if thought is None else f"<think>\n{thought}\n</think>\n\n") + qwen25(None, content, calls)


def qwen35(thought: str | None, content: str, calls: list[Called]) -> str:
    made = [
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
        + "</function>\n</tool_call>"
        for name, given, _ in calls
    ]
    said = content + ("\n\n" if content and made else "") + "\n".join(made)
    return said if thought is None else f"{thought}\n</think>\n\n{said}"


def llama3(thought: str | None, content: str, calls: list[Called]) -> str:
    return "".join(dumped({"name": name, "parameters": given}) for name, given, _ in calls) or content


def llama4(thought: str | None, content: str, calls: list[Called]) -> str:
    return ("<|python_start|><|python_end|>" if calls else "") + llama3(thought, content, calls)


def mistral3(thought: str | None, content: str, calls: list[Called]) -> str:
    made = [{"name": name, "arguments": given, "id": id} for name, given, id in calls]
    return "[TOOL_CALLS] " + dumped(made) if calls else f" {content}"


def deepseek(thought: str | None, content: str, calls: list[Called]) -> str:
    return content if thought is None else f"{thought}\n</think>\n\n{content}"


def glm(thought: str | None, content: str, calls: list[Called]) -> str:
    said = [*([""] if thought is None else ["", f"<think>{thought}</think>"]), *([content] if content else [])]
    for name, given, _ in calls:
        pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in given.items())
        said.append(f"<tool_call>{name}\n{pairs}</tool_call>")
    return "\n".join(said)


def harmony(thought: str | None, content: str, calls: list[Called]) -> str:
    said = [] if thought is None else [f"<|channel|>analysis<|message|>{thought}<|end|>"]
    for name, given, _ in calls:
        said.append(f" to=functions.{name}<|channel|>commentary json<|message|>{dumped(given)}")
    return "<|start|>assistant".join(said if calls else [*said, f"<|channel|>final<|message|>{content}"])


def phi4(thought: str | None, content: str, calls: list[Called]) -> str:
    return content if thought is None else f"<think>\n{thought}\n</think>\n\n{content}"


@dataclass(frozen=True)
class Family:
    """source: the template's file, or its text. end, call_end: with which the model ends a turn, and one with calls. ends: of
    generation_config.json. write: a reply as the template would show it, without its end. off: variables with which it does
    not think, or None if it does not think at all. calls: most calls in a reply; 0 if the template has no tools. opens: the
    prompt already begins the thought, so that a reply without one is rare."""

    source: str
    special: tuple[str, ...]
    end: str
    write: Writer
    words: tuple[str, ...] = ()
    bos: str | None = None
    call_end: str = ""
    ends: tuple[str, ...] = ()
    thinks: bool = False
    off: dict[str, Any] | None = None
    calls: int = 0
    beside: bool = True  # content may stand beside calls
    opens: bool = False
    key: str = "content"  # where a message has its reasoning
    later_end: str = ""  # with which the template ends a turn that is not the last, if not with `end`
    empty: bool = False  # a turn without reasoning has an empty one

    def template(self) -> str:
        return self.source if "{" in self.source else (PACKAGES / self.source).read_text()


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINKING = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>")
DEEPSEEK += ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
DEEPSEEK += ("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
LLAMA4 = ("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
MISTRAL += ("[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
OFF = {"enable_thinking": False}
REAL = {
    "qwen2.5": Family(f"{TRL}qwen2_5.jinja", CHATML, "<|im_end|>", qwen25, words=THINKING[2:4], calls=2),
    "qwen3": Family(
        f"{TRL}qwen3.jinja", CHATML, "<|im_end|>", qwen3, words=THINKING, thinks=True, key="reasoning_content", off=OFF, calls=2
    ),
    "qwen3.5": Family(
        f"{TRL}qwen3_5_think.jinja",
        CHATML,
        "<|im_end|>",
        qwen35,
        words=THINKING,
        thinks=True,
        key="reasoning_content",
        off=OFF,
        calls=2,
        opens=True,
    ),
    "llama3.1": Family(
        f"{TRL}llama3_1.jinja",
        (*LLAMA3, "<|python_tag|>"),
        "<|eot_id|>",
        llama3,
        bos="<|begin_of_text|>",
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        calls=1,
        beside=False,
    ),
    "llama4": Family(
        f"{AXOLOTL}llama4.jinja",
        (*LLAMA4, "<|python_start|>", "<|python_end|>"),
        "<|eot|>",
        llama4,
        bos="<|begin_of_text|>",
        ends=("<|end_of_text|>", "<|eom|>", "<|eot|>"),
        calls=2,
        beside=False,
    ),
    "gemma3": Family(
        f"{TRL}gemma3.jinja",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        plain,
        bos="<bos>",
        ends=("<eos>", "<end_of_turn>"),
    ),
    "mistral-v3": Family(f"{AXOLOTL}mistral_v2v3.jinja", MISTRAL, "</s>", mistral3, bos="<s>", calls=2, beside=False),
    "mistral-v7": Family(f"{AXOLOTL}mistral_v7_tekken.jinja", MISTRAL, "</s>", plain, bos="<s>"),
    "deepseek-v3": Family(
        f"{TRL}deepseekv3.jinja", DEEPSEEK, DEEPSEEK[1], deepseek, words=THINKING[:2], bos=DEEPSEEK[0], thinks=True, opens=True
    ),
    "deepseek-r1": Family(
        f"{TRL}deepseek_r1_distill.jinja",
        DEEPSEEK,
        DEEPSEEK[1],
        deepseek,
        words=THINKING[:2],
        bos=DEEPSEEK[0],
        thinks=True,
        opens=True,
    ),
    "glm4.5": Family(
        f"{TRL}glm4moe.jinja",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink"),
        "<|user|>",
        glm,
        words=(*THINKING, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        call_end="<|observation|>",
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        empty=True,
        thinks=True,
        key="reasoning_content",
        off=OFF,
        calls=2,
    ),
    "gpt-oss": Family(
        f"{TRL}gptoss.jinja",
        ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
        "<|return|>",
        harmony,
        bos="<|startoftext|>",
        call_end="<|call|>",
        ends=("<|return|>", "<|call|>"),
        thinks=True,
        key="thinking",
        later_end="<|end|>",
        calls=1,
        beside=False,
    ),
    "phi4": Family(
        f"{AXOLOTL}phi_4.jinja",
        (*CHATML, "<|im_sep|>"),
        "<|im_end|>",
        phi4,
        words=THINKING[:2],
        bos="<|endoftext|>",
        thinks=True,
    ),
    "olmo2": Family(OLMO2, ("<|endoftext|>",), "<|endoftext|>", plain, bos="<|endoftext|>"),
}
missing = None if PACKAGES.is_dir() else f"no chat templates in {PACKAGES}: `make test` unpacks them there"


@cache
def real_tokenizer(name: str) -> Any:
    """Returns a byte-level BPE of a few hundred tokens with a family's special tokens and template."""
    family = REAL[name]
    tokenizer = byte_level(family.special, family.words, bos=family.bos, eos=family.end)
    tokenizer.chat_template = family.template()
    directory = Path(mkdtemp(prefix="ends"))  # what the model's generation_config.json names
    ids = [tokenizer.convert_tokens_to_ids(end) for end in family.ends]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer.name_or_path = str(directory)
    return tokenizer
