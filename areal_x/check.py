"""Looks in seconds at everything that a run depends on, before anything expensive.

    python -m areal_x.check examples/arithmetic/grpo.gin
    python -m areal_x.check examples/arithmetic/grpo.gin -b "train.backend = 'torch'" -b "train.engine = 'vllm'"

The file and -b are read as areal_x.train reads them. Each line is one finding: what was looked at
and how it is, or what is wrong, why, and what to set. No weights are read and no server is started.
A model that a function makes is made, as the run would, once all that does not depend on it is
well. The exit status is 0 without a problem, else 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gin

from areal_x.algorithms.validation import learns_from_reward_alone
from areal_x.config.reader import Config
from areal_x.experiment import Experiment
from areal_x.hf.model_dir import check_head
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.preflight import algorithm, data, memory, places, servers, tokens, versions
from areal_x.preflight import model as models
from areal_x.preflight.finding import Finding, finding
from areal_x.protocols.backends import Devices, load_backend
from areal_x.protocols.trainer_config import ModelConfig
from areal_x.train import FAILED, parser_of, with_config
from areal_x.types import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = parser_of("check", __doc__)
    parser.add_argument("file", metavar="FILE.gin", type=Path)
    options = parser.parse_args(arguments)
    return with_config(options.file, options.bindings, show)


def show(config: Config) -> int:
    """Prints what is found. The exit status."""
    problems = 0
    for found in findings(config):
        print(found, flush=True)
        problems += not found.ok
    print(f"{problems} problem{'s' if problems > 1 else ''}" if problems else "no problem")
    return FAILED if problems else 0


def findings(config: Config) -> Iterator[Finding]:
    """One after the other, cheap ones first; what depends on something that is not well is left
    out."""
    problems: list[str] = []
    made: dict[str, Any] = {}

    def look(about: str, function: Callable[[], Any], words: Callable[[Any], str] = str) -> Finding:
        def kept() -> str:
            made[about] = function()
            return words(made[about])

        found = finding(config, about, kept)
        problems.extend([] if found.ok else [about])
        return found

    engine = config.value("train.engine")
    starts_servers = engine == "vllm" and not config.value("vllm.urls")
    yield look("versions", lambda: versions.fit(config.value("train.backend"), starts_servers))
    tasks: dict[str, Sequence[Task]] = {}
    for name in ("dataset", "held_out"):
        tasks[name] = ()
        if name == "dataset" or config.is_bound("train.held_out"):

            def read(name: str = name) -> str:
                tasks[name] = data.load(config, f"train.{name}")
                return data.readable(f"train.{name}", tasks[name])

            yield look(name, read)
    found = look(
        "settings",
        lambda: build(config, tasks),
        lambda e: f"{e.algorithm.name}, {e.backend}, {e.engine}",
    )
    yield found
    if not found.ok:
        return
    experiment: Experiment = made["settings"]
    yield look("algorithm", lambda: trained(experiment, tasks["dataset"]))
    workflow = data.rewarded(experiment.workflow)
    if workflow is not None and tasks["dataset"]:
        must_vary = workflow is experiment.workflow and learns_from_reward_alone(
            experiment.algorithm
        )
        yield look("reward", lambda: data.reward_works(workflow, tasks["dataset"], must_vary))
    yield look("run directory", lambda: places.run_directory(experiment))
    if engine == "vllm":
        yield look("servers", lambda: servers.generate(experiment.vllm))
    path = experiment.trainer.model.path
    if callable(path) and problems:
        yield Finding(
            False,
            "model",
            f"not made by {path.__qualname__} while there are problems: mend those and look again",
        )
        return
    yield look(
        "model",
        lambda: models.find(path),
        lambda m: f"{m.directory}, {m.parameters / 1e6:.4g} million parameters",
    )
    if "model" in made:
        yield from of_model(experiment, made["model"], tasks["dataset"], look)


def of_model(
    experiment: Experiment, model: models.Model, tasks: Sequence[Task], look: Callable[..., Finding]
) -> Iterator[Finding]:
    """What the model decides."""
    devices: list[Devices] = []
    tokenizers: list[Any] = []

    def mesh() -> str:
        devices.append(of_backend(experiment, model))
        (found,) = devices
        return f"{found.count} × {found.kind}" + (
            f" of {places.gb(found.memory)}" if found.memory else ""
        )

    def tokenizer() -> str:
        tokenizers.append(load_tokenizer(model.directory))
        return tokens.end(tokenizers[0], model)

    yield look("devices and mesh", mesh)
    if devices:
        yield look("memory", lambda: memory.enough(experiment, model, devices[0]))
    yield look("disk", lambda: places.room(experiment, model))
    if experiment.engine == "vllm" and experiment.vllm.transport == "files":
        yield look(
            "staging",
            lambda: places.staging(
                experiment, model, on_cpu=bool(devices) and devices[0].kind == "cpu"
            ),
        )
    yield look("tokenizer", tokenizer)
    if tokenizers and models.others(experiment):
        yield look("other models", lambda: models.beside(experiment, model, tokenizers[0]))
    if tokenizers and tasks:
        yield look("lengths", lambda: tokens.lengths(experiment, tasks, tokenizers[0], model))
    if urls := experiment.scoring_urls():
        yield look("scoring servers", partial(servers.score, experiment, urls, model.directory))


def trained(experiment: Experiment, tasks: Sequence[Task]) -> str:
    return algorithm.trains(
        experiment.algorithm, experiment.backend, experiment.group_size, tasks[:3]
    )


def build(config: Config, tasks: dict[str, Sequence[Task]]) -> Experiment:
    """The experiment with tasks that were read already, or none where they cannot be."""
    for name in tasks:
        gin.bind_parameter(f"train.{name}", ())  # so that they are not made once more
    experiment: Experiment = gin.get_configurable("train")()
    return replace(experiment, dataset=tasks["dataset"], held_out=tasks["held_out"])


def of_backend(experiment: Experiment, model: models.Model) -> Devices:
    """Raises: UserError for what the backend would refuse in this config, this model and these
    devices."""
    check_head(model.directory, experiment.algorithm.head)
    path, head = replace_path(experiment.trainer.model, model), experiment.algorithm.head
    settings = replace(
        experiment.trainer, model=path, head=head, share_prompts=experiment.share_prompts
    )
    settings = replace(settings, row_length=experiment.row_length)
    return load_backend(experiment.backend).check(settings)


def replace_path(config: ModelConfig, model: models.Model) -> ModelConfig:
    return replace(config, path=str(model.directory))


if __name__ == "__main__":
    sys.exit(main())
