"""Checks that prompts can be tokenised, that they fit into the context with their answers, and that
answers can end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from areal_x.engines.vllm.features import check_sent_images
from areal_x.errors import ConfigError, UserError
from areal_x.hf.endings import FILES, named_ends, stop_tokens, turn_end
from areal_x.hf.image_reader import read_prompt_images
from areal_x.preflight.model import Model
from areal_x.settings import Settings
from areal_x.tasks.screening import create_screen
from areal_x.types import Task
from areal_x.workflows.single_turn import encode

READ_PROMPTS = 100  # prompts whose images are read, and whose greatest length is reported
SCAN_SECONDS = 5.0  # for counting all prompts


def check_end_tokens(tokenizer: Any, model: Model) -> str:
    """Checks that answers can end. Raises: UserError for a tokenizer without an end token, or with
    one that is outside the model's vocabulary."""
    stops, vocabulary = stop_tokens(tokenizer), model.config["vocab_size"]
    if (token := max(stops)) >= vocabulary:
        raise UserError(
            f"the end token {token} is outside the vocabulary of {vocabulary} of {model.directory}:"
            " its tokenizer must be the one that the model was made for"
        )
    names = dict(zip(stops, tokenizer.convert_ids_to_tokens(list(stops)), strict=True))
    found = "answers end with " + ", ".join(f"{name!r} ({token})" for token, name in names.items())
    turn = turn_end(tokenizer)
    if turn is None or turn.token in named_ends(tokenizer):
        return found
    unnamed = f"neither the tokenizer's eos_token nor {' nor '.join(FILES)} names"
    return f"{found}; with {names[turn.token]!r} the chat template ends a turn, which {unnamed}"


def check_lengths(
    settings: Settings, tasks: Sequence[Task], tokenizer: Any, model: Model, *, sees: bool = True
) -> str:
    """Checks that prompts and answers fit into the context. sees: `Devices.images`.

    Raises: UserError for prompts that cannot be read; ConfigError for a setting with which
    sequences, or all prompts, do not fit, or images are not supported.
    """
    trainer, row = settings.trainer, settings.row_length
    if row % trainer.mesh.context:
        raise ConfigError(
            "train.row_length", row, f"a multiple of mesh.context = {trainer.mesh.context}"
        )
    own = {
        "embedded": settings.embedded.context,
        "vllm": settings.vllm.context,
        "sglang": settings.sglang.context,
    }.get(settings.engine)
    name = f"{settings.engine}.context"
    binding, context = (name, own) if own else ("train.row_length", row)
    screen = create_screen(settings.workflow, tokenizer, settings.longest_prompt, context, binding)
    left_out = screen and screen.scan(tasks, SCAN_SECONDS)
    fitting = (task for i, task in enumerate(tasks) if screen is None or screen.fits(i, task))
    first = list(islice(fitting, READ_PROMPTS))
    images = [read_prompt_images(tokenizer, task.prompt) for task in first]
    if any(images) and not sees:
        raise ConfigError(
            "train.backend",
            settings.backend,
            f"one that trains {model.directory} with images, which the prompts have: it trains the"
            " language model alone, on text",
        )
    if any(images) and settings.engine == "sglang":
        raise ConfigError(
            "train.engine",
            settings.engine,
            "'vllm' or 'embedded': the prompts have images, which the engine does not send to SGLang"
            " servers",
        )
    if any(images) and settings.engine == "vllm":
        check_sent_images(model.directory, settings.vllm)
    longest = max(
        len(encode(tokenizer, task.prompt, of_task))
        for task, of_task in zip(first, images, strict=True)
    )
    limit = model.config.get("max_position_embeddings")
    if limit and context > limit:
        raise ConfigError(
            binding, context, f"at most {limit}, the longest context of {model.directory}"
        )
    prompts = (
        f"the longest of the first {len(first)}{' other' if left_out else ''} prompts has"
        f" {longest} tokens"
    )
    if longest >= context:
        raise ConfigError(binding, context, f"more than {longest}: {prompts}")
    sampling = settings.workflow.sampling_params()
    answers = 0 if sampling is None else sampling.max_tokens
    if settings.engine != "none" and longest + answers > context:
        wanted = (
            f"at most {context - longest}, or {binding} = {context} raised: {prompts}, and longer"
            " answers would be cut"
        )
        raise ConfigError("sampling.max_tokens", answers, wanted)
    up_to = f", answers up to {answers}" if answers else ""
    return (
        f"{f'{left_out}; ' if left_out else ''}{prompts}{up_to}, of {context} of the context"
        f" ({binding})"
    )
