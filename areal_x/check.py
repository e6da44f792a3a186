"""Checks everything that a run depends on, in seconds, before anything expensive.

    python -m areal_x.check examples/arithmetic/grpo.gin
    python -m areal_x.check examples/arithmetic/grpo.gin -b "train.backend = 'torch'" -b "train.engine = 'vllm'"

The file and -b are read as by areal_x.train. Each line is one finding: what was checked and its
state, or what is wrong, why, and what to set. No weights are read and no server is started. With
train.cluster = 'ray' one line says what the run needs of its nodes, and whether those of RAY_ADDRESS
have it. If a function makes the model, it is called, as in the run, once everything that does not
depend on the model passes. The exit status is 0 if there is no problem, else 1.
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
from areal_x.cluster.trainers import HERE, RAY
from areal_x.config.reader import Config
from areal_x.hf.model_dir import check_head
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.hf.without_torch import import_transformers_without_torch
from areal_x.preflight import algorithm, data, deltas, memory, servers, storage, tokens, versions
from areal_x.preflight import cluster as nodes
from areal_x.preflight import model as models
from areal_x.preflight.finding import Finding, run_check
from areal_x.protocols.backends import Devices, load_backend
from areal_x.runtime.command import is_own_process
from areal_x.settings import Settings
from areal_x.train import FAILED, parser_of, with_config
from areal_x.types import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = parser_of("check", __doc__)
    parser.add_argument("file", metavar="FILE.gin", type=Path)
    options = parser.parse_args(arguments)
    return with_config(options.file, options.bindings, show)


def show(config: Config) -> int:
    """Prints the findings and returns the exit status."""
    problems = 0
    for found in findings(config):
        print(found, flush=True)
        problems += not found.ok
    print(f"{problems} problem{'s' if problems > 1 else ''}" if problems else "no problem")
    return FAILED if problems else 0


def findings(config: Config) -> Iterator[Finding]:
    """Yields the findings, cheap checks first. Checks that depend on one that failed are
    skipped."""
    problems: list[str] = []
    made: dict[str, Any] = {}

    def look(
        subject: str, function: Callable[[], Any], describe: Callable[[Any], str] = str
    ) -> Finding:
        def check() -> str:
            made[subject] = function()
            return describe(made[subject])

        found = run_check(config, subject, check)
        problems.extend([] if found.ok else [subject])
        return found

    engine = config.value("train.engine")
    starts_vllm = engine == "vllm" and not config.value("vllm.urls")
    yield look(
        "versions", lambda: versions.check_versions(config.value("train.backend"), starts_vllm)
    )
    tasks: dict[str, Sequence[Task]] = {}
    for name in ("dataset", "held_out"):
        tasks[name] = ()
        if name == "dataset" or config.is_bound("train.held_out"):

            def read(name: str = name) -> str:
                tasks[name] = data.load_tasks(config, f"train.{name}")
                return data.check_tasks(f"train.{name}", tasks[name])

            yield look(name, read)
    found = look(
        "settings",
        lambda: build(config, tasks),
        lambda e: f"{e.algorithm.name}, {e.backend}, {e.engine}",
    )
    yield found
    if not found.ok:
        return
    settings: Settings = made["settings"]
    yield look(
        "algorithm",
        lambda: algorithm.check_algorithm(
            settings.algorithm,
            settings.backend,
            settings.group_size,
            tasks["dataset"][:3],
            settings.minibatches,
            settings.teachers,
        ),
    )
    if settings.algorithm.teacher_weights is not None:
        of = settings.algorithm, settings.teachers, tasks["dataset"]
        yield look("teachers", lambda: algorithm.check_teachers(*of))
    workflow = data.find_rewarded(settings.workflow)
    if workflow is not None and tasks["dataset"]:
        must_vary = workflow is settings.workflow and learns_from_reward_alone(settings.algorithm)
        yield look("reward", lambda: data.check_reward(workflow, tasks["dataset"], must_vary))
    yield look("run directory", lambda: storage.check_run_directory(settings))
    if settings.cluster == RAY:
        yield look("nodes", lambda: nodes.check_cluster_nodes(settings))
    path = settings.trainer.model.path
    if engine == "vllm":
        yield look(
            "servers",
            lambda: servers.check_engine_servers(
                settings.vllm, settings.places_servers, settings.cluster == HERE
            ),
        )
    if engine == "sglang":
        yield look(
            "servers",
            lambda: servers.check_sglang_servers(
                settings.sglang, settings.places_servers, settings.speculation
            ),
        )
    if callable(path) and problems:
        yield Finding(
            False,
            "model",
            f"not made by {path.__qualname__} while there are problems: fix those and check again",
        )
        return
    yield look(
        "model",
        lambda: models.find_model(path),
        lambda m: f"{m.directory}, {m.parameters / 1e6:.4g} million parameters",
    )
    if "model" in made:
        yield from model_findings(settings, made["model"], tasks["dataset"], look)


def model_findings(
    settings: Settings, model: models.Model, tasks: Sequence[Task], look: Callable[..., Finding]
) -> Iterator[Finding]:
    """Yields the findings that depend on the model."""
    devices: list[Devices] = []
    tokenizers: list[Any] = []
    if settings.backend == "jax" and is_own_process():
        import_transformers_without_torch()

    def mesh() -> str:
        devices.append(check_backend(settings, model))
        (found,) = devices
        return f"{found.count} × {found.kind}" + (
            f" of {storage.format_bytes(found.memory)}" if found.memory else ""
        )

    def tokenizer() -> str:
        tokenizers.append(load_tokenizer(model.directory))
        return tokens.check_end_tokens(tokenizers[0], model)

    if (fleet := settings.fleet) is not None:
        yield look(
            "served model",
            partial(servers.check_served, fleet, model, bool(settings.trainer.lora.rank)),
        )
    if fleet is not None and fleet.divides:
        yield look("parallel sizes", partial(servers.check_widths, fleet, model))
    yield look("devices and mesh", mesh)
    if devices:
        yield look("memory", lambda: memory.check_memory(settings, model, devices[0]))
    yield look("disk", lambda: storage.check_disk(settings, model))
    if fleet is not None and not fleet.direct:
        on_cpu = bool(devices) and devices[0].kind == "cpu"
        yield look("staging", partial(storage.check_staging, settings, fleet, model, on_cpu=on_cpu))
        if (room := deltas.delta_room(settings, model, on_cpu)) is not None:
            yield look("deltas", partial(deltas.check_deltas, settings, model, room, on_cpu))
    yield look("tokenizer", tokenizer)
    if tokenizers and models.other_models(settings):
        yield look(
            "other models", lambda: models.check_other_models(settings, model, tokenizers[0])
        )
    if tokenizers and tasks:
        of = settings, tasks, tokenizers[0], model
        sees = not devices or devices[0].images
        yield look("lengths", lambda: tokens.check_lengths(*of, sees=sees))
    if settings.scoring_urls():
        yield look(
            "scoring servers",
            partial(servers.check_scoring_servers, settings, model.directory),
        )


def build(config: Config, tasks: dict[str, Sequence[Task]]) -> Settings:
    """Builds the run's settings with the tasks that were already loaded, or none if that failed."""
    for name in tasks:
        gin.bind_parameter(f"train.{name}", ())  # so that they are not loaded again
    settings: Settings = gin.get_configurable("train")()
    return replace(settings, dataset=tasks["dataset"], held_out=tasks["held_out"])


def check_backend(settings: Settings, model: models.Model) -> Devices:
    """Returns the devices. Raises: UserError if the backend would reject this config, this model or
    these devices."""
    check_head(model.directory, settings.algorithm.head)
    config = replace(
        settings.trainer,
        model=replace(settings.trainer.model, path=str(model.directory)),
        head=settings.algorithm.head,
        share_prompts=settings.share_prompts,
        rests=settings.colocate,
        row_length=settings.row_length,
    )
    return load_backend(settings.backend).check(config)


if __name__ == "__main__":
    sys.exit(main())
