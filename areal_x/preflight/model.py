"""The model of a run without its weights: its directory, its config and the shapes of its
tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.hf.config_defaults import with_defaults
from areal_x.hf.tokenizer import check_vocabulary
from areal_x.settings import Settings
from areal_x.workflows.learned_reward import LearnedReward

SMALL = ("*.json", "*.jinja", "*.model", "*.txt")  # config and tokenizer


@dataclass(frozen=True)
class Model:
    directory: Path
    """A directory with at least the config and the tokenizer."""

    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each tensor, by name."""

    @property
    def parameters(self) -> int:
        return sum(map(prod, self.shapes.values()))

    @property
    def config(self) -> Mapping[str, Any]:
        """The language model's config, with transformers' defaults and under the names that most
        families use ("hidden_size" where a file has "n_embd")."""
        return with_defaults(model_dir.read_config(self.directory))


def find_model(path: str | Callable[[], str]) -> Model:
    """The model of a directory, of a hub name (only its config and tokenizer are downloaded), or of
    a function, which is called to make it. Raises: UserError if there is none."""
    name = path if isinstance(path, str) else path()
    if Path(name).expanduser().is_dir() or not is_hub_name(name):
        directory = model_dir.resolve(name)
        return Model(directory, model_dir.shapes(directory))
    from huggingface_hub import snapshot_download

    try:  # a copy that an earlier run has downloaded
        directory = model_dir.resolve(snapshot_download(name, local_files_only=True))
        return Model(directory, model_dir.shapes(directory))
    except Exception:
        return look_up_on_hub(name)


def other_models(settings: Settings) -> dict[str, Path]:
    """The directories of the other models that read the policy's tokens (reference or teacher,
    critic, reward model), by the setting that names them. Models that functions make or that are on
    the hub are not included."""
    needs, workflow = settings.algorithm.needs, settings.workflow
    paths: dict[str, Any] = {
        "train.teacher": settings.teacher if "teacher_logits" in needs else None,
        **settings.scorers(),
        "speculation.draft": settings.speculation.draft or None,
        "critic.path": settings.critic.path if "values" in needs else None,
        "learned_reward.path": workflow.path if isinstance(workflow, LearnedReward) else None,
    }
    return {
        binding: Path(path)
        for binding, path in paths.items()
        if isinstance(path, str) and Path(path).is_dir()
    }


def check_other_models(settings: Settings, model: Model, tokenizer: Any) -> str:
    """Checks that the other models have the policy's tokens. Raises: ConfigError for one that does
    not."""
    for binding, directory in other_models(settings).items():
        if isinstance(settings.workflow, LearnedReward) and binding == "learned_reward.path":
            settings.workflow.find(tokenizer)
        else:
            check_vocabulary(binding, directory, model.directory)
    return f"the policy's tokens: {', '.join(other_models(settings))}"


def is_hub_name(name: str) -> bool:
    return not name.startswith((".", "/", "~")) and name.count("/") == 1


def look_up_on_hub(name: str) -> Model:
    """Downloads config and tokenizer, and reads the shapes from the headers of the weights. Raises:
    UserError."""
    from huggingface_hub import get_safetensors_metadata, snapshot_download

    try:
        directory = Path(snapshot_download(name, allow_patterns=list(SMALL)))
        files = get_safetensors_metadata(name).files_metadata.values()
    except Exception as error:  # network, hub or name: every library below has errors of its own
        wanted = "check the name and the network, or give a directory"
        raise UserError(
            f"model.path = {name!r} could not be looked up on the hub ({type(error).__name__}):"
            f" {wanted}"
        ) from error
    return Model(
        directory,
        {tensor: tuple(info.shape) for file in files for tensor, info in file.tensors.items()},
    )
