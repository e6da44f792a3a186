"""The model of a run as far as it can be known without its weights: where it is, its config, its
tensors' shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from areal_x.errors import UserError
from areal_x.experiment import Experiment
from areal_x.hf import model_dir
from areal_x.hf.tokenizer import check_vocabulary
from areal_x.workflows.learned_reward import LearnedReward

SMALL = ("*.json", "*.jinja", "*.model", "*.txt")  # config and tokenizer


@dataclass(frozen=True)
class Model:
    """directory: holds at least the config and the tokenizer. shapes: of each tensor."""

    directory: Path
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def parameters(self) -> int:
        return sum(map(prod, self.shapes.values()))

    @property
    def config(self) -> Mapping[str, Any]:
        """Of the language model."""
        return model_dir.text_config(model_dir.read_config(self.directory))


def find(path: str | Callable[[], str]) -> Model:
    """The model of a directory, of a hub name (of which config and tokenizer alone are fetched), or
    of a function, which makes it. Raises: UserError for one that is not there."""
    name = path if isinstance(path, str) else path()
    if Path(name).expanduser().is_dir() or not is_hub_name(name):
        directory = model_dir.resolve(name)
        return Model(directory, model_dir.shapes(directory))
    from huggingface_hub import snapshot_download

    try:  # what an earlier run has fetched
        directory = model_dir.resolve(snapshot_download(name, local_files_only=True))
        return Model(directory, model_dir.shapes(directory))
    except Exception:
        return of_hub(name)


def others(experiment: Experiment) -> dict[str, Path]:
    """The models that read the policy's tokens, by the setting that names them: a reference or a
    teacher, a critic, a reward model. Those that functions make, or a hub has, are left for the
    run."""
    needs, workflow = experiment.algorithm.needs, experiment.workflow
    given: dict[str, Any] = {
        "train.teacher": experiment.teacher if needs & {"teacher", "teacher_logits"} else None,
        "train.reference": experiment.reference if "reference" in needs else None,
        "critic.path": experiment.critic.path if "values" in needs else None,
        "learned_reward.path": workflow.path if isinstance(workflow, LearnedReward) else None,
    }
    return {
        binding: Path(path)
        for binding, path in given.items()
        if isinstance(path, str) and Path(path).is_dir()
    }


def beside(experiment: Experiment, model: Model, tokenizer: Any) -> str:
    """Raises: ConfigError for one of `others` with other tokens than the policy's."""
    for binding, directory in others(experiment).items():
        if isinstance(experiment.workflow, LearnedReward) and binding == "learned_reward.path":
            experiment.workflow.find(tokenizer)
        else:
            check_vocabulary(binding, directory, model.directory)
    return f"the policy's tokens: {', '.join(others(experiment))}"


def is_hub_name(name: str) -> bool:
    return not name.startswith((".", "/", "~")) and name.count("/") == 1


def of_hub(name: str) -> Model:
    from huggingface_hub import get_safetensors_metadata, snapshot_download

    try:
        directory = Path(snapshot_download(name, allow_patterns=list(SMALL)))
        files = get_safetensors_metadata(name).files_metadata.values()
    except (
        Exception
    ) as error:  # of the network, of the hub, of the name: each library below has its own
        wanted = "check the name and the network, or give a directory"
        raise UserError(
            f"model.path = {name!r} could not be looked up on the hub ({type(error).__name__}):"
            f" {wanted}"
        ) from error
    return Model(
        directory,
        {tensor: tuple(info.shape) for file in files for tensor, info in file.tensors.items()},
    )
