"""Tokenizers with the chat templates of real families, and a scripted engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from areal_x.protocols.engine import Completion

TEMPLATES = Path(__file__).with_name("templates")
END = {"qwen25": "<|im_end|>", "qwen3": "<|im_end|>", "llama31": "<|eot_id|>"}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # tokens, and text too, as in Qwen
SENTENCES = """the weather in the city of Paris is rather fine today, and in the city of Rome it is raining.
what is the sum of 12 and 30? the sum of twelve and thirty is 42. try again: the answer is not right, think about it once more.
{"name": "add", "arguments": {"first": 12, "second": 30}} {"name": "weather", "parameters": {"city": "Paris"}}
system user assistant tool You are a helpful assistant. <tool_response> </tool_response>"""
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
        },
    }
    for name, key in (("weather", "city"), ("add", "first"))
)


@cache
def trained(size=420):
    """Returns the text of a byte-level BPE: any bytes can be tokenised, and most texts in several ways."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [SENTENCES] * 4, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return bpe.to_str()


def byte_level(special, words, *, bos, eos):
    """Returns a tokenizer of a few hundred tokens, with these special tokens, and words that are tokens and text too."""
    bpe = Tokenizer.from_str(trained())
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in words])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token=eos)


@cache
def tokenizer_of(family):
    made = byte_level(SPECIAL, WORDS, bos="<|begin_of_text|>", eos=END[family])
    made.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return made


class Says:
    """Completes each prompt with the next of the given tokens; the log-probability of the n-th token of all is -n - 1."""

    def __init__(self, *replies, context=10_000, finish_reason="stop"):
        self.replies, self.context, self.version = list(replies), context, 0
        self.finish_reason, self.prompts, self.drawn = finish_reason, [], 0

    async def generate(self, request):
        self.prompts.append(request.tokens)
        tokens = np.asarray(self.replies.pop(0), np.int32)
        logprobs = -np.arange(self.drawn, self.drawn + len(tokens), dtype=np.float32) - 1
        self.drawn += len(tokens)
        return Completion(tokens, logprobs, np.full(len(tokens), self.version, np.int32), self.finish_reason)
