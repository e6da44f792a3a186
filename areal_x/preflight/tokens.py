"""Whether prompts become tokens, fit into the context beside their answers, and answers can end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from areal_x.errors import ConfigError, UserError
from areal_x.experiment import Experiment
from areal_x.hf.endings import FILES, named_ends, stop_tokens, turn_end
from areal_x.hf.image_reader import read_prompt_images
from areal_x.preflight.model import Model
from areal_x.tasks.screening import create_screen
from areal_x.types import Task
from areal_x.workflows.single_turn import encode

LOOKED_AT = 100  # prompts whose images are read, and of which the longest is told
SCAN_SECONDS = 5.0  # at all prompts, for those that are too long


def end(tokenizer: Any, model: Model) -> str:
    """Raises: UserError for a tokenizer without an end token, or with one that the model does not
    have."""
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


def lengths(experiment: Experiment, tasks: Sequence[Task], tokenizer: Any, model: Model) -> str:
    """Raises: UserError for prompts that cannot be read, ConfigError for a setting under which
    sequences or all prompts do not fit, or images are not seen."""
    trainer, row = experiment.trainer, experiment.row_length
    if row % trainer.mesh.context:
        raise ConfigError(
            "train.row_length", row, f"a multiple of mesh.context = {trainer.mesh.context}"
        )
    name = {"embedded": "embedded.context", "vllm": "vllm.context"}.get(experiment.engine)
    own = {"embedded": experiment.embedded.context, "vllm": experiment.vllm.context}.get(
        experiment.engine
    )
    binding, context = (name, own) if name and own else ("train.row_length", row)
    screen = create_screen(
        experiment.workflow, tokenizer, experiment.longest_prompt, context, binding
    )
    left_out = screen and screen.scan(tasks, SCAN_SECONDS)
    fitting = (task for i, task in enumerate(tasks) if screen is None or screen.fits(i, task))
    looked = list(islice(fitting, LOOKED_AT))
    seen = [read_prompt_images(tokenizer, task.prompt) for task in looked]
    if any(seen) and experiment.engine == "embedded" and experiment.backend != "torch":
        raise ConfigError(
            "train.backend",
            experiment.backend,
            "'torch', whose embedded engine sees: the prompts have images",
        )
    longest = max(
        len(encode(tokenizer, task.prompt, images))
        for task, images in zip(looked, seen, strict=True)
    )
    made_for = model.config.get("max_position_embeddings")
    if made_for and context > made_for:
        raise ConfigError(
            binding, context, f"at most {made_for}, for which {model.directory} was made"
        )
    prompts = (
        f"the longest of the first {len(looked)}{' other' if left_out else ''} prompts has"
        f" {longest} tokens"
    )
    if longest >= context:
        raise ConfigError(binding, context, f"more than {longest}: {prompts}")
    sampling = experiment.workflow.sampling_params()
    answers = 0 if sampling is None else sampling.max_tokens
    if experiment.engine != "none" and longest + answers > context:
        wanted = (
            f"at most {context - longest}, or {binding} = {context} raised: {prompts}, and longer"
            " answers would be cut"
        )
        raise ConfigError("sampling.max_tokens", answers, wanted)
    beside = f", answers up to {answers}" if answers else ""
    return (
        f"{f'{left_out}; ' if left_out else ''}{prompts}{beside}, of {context} of the context"
        f" ({binding})"
    )
