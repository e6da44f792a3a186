"""From settings to the models of a run: the trainer, and whatever else its algorithm needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from areal_x.algorithms import losses, mismatch
from areal_x.batching.batch import Models
from areal_x.batching.teachers import Reader
from areal_x.cluster import trainers
from areal_x.engines.fleet.addresses import server_urls
from areal_x.hf.model_dir import resolve
from areal_x.hf.tokenizer import check_vocabulary, load_tokenizer
from areal_x.protocols.trainer import Scorer, Trainer
from areal_x.protocols.trainer_config import LoRAConfig, TrainerConfig
from areal_x.protocols.workflow import Workflow
from areal_x.settings import Settings, teacher_binding
from areal_x.types import Loss
from areal_x.workflows.single_turn import encode


class ModelFactory(Settings):
    """Builds the models of a run and their losses from its settings."""

    def losses(self) -> dict[str, Loss]:
        """Returns the loss of each trainer, by its name in Models."""
        watched: tuple[Loss, ...] = ()
        # Demonstrations were not sampled from a policy, so there is no engine–trainer gap.
        if self.engine != "none":
            watched = (losses.policy_gap, mismatch.LagMetrics(self.lags()))
        found = {"policy": losses.combine(self.algorithm.step_loss(self.own_pass), *watched)}
        if self.algorithm.value_loss is not None:
            found["critic"] = self.algorithm.value_loss
        return found

    @property
    def own_pass(self) -> bool:
        """True if a step's own forward pass gives the proximal policy's log-probabilities."""
        return self.algorithm.uses_own_pass(self.minibatches)

    def lags(self) -> int:
        """Returns how many ages, in versions, the mismatch metrics distinguish."""
        most = (self.max_staleness + 1) * self.groups_per_step + self.window - 2  # queue's bound
        return min(most // self.groups_per_step + 1, mismatch.MAX_LAGS)

    @contextmanager
    def models(
        self, directory: Path, workflow: Workflow, losses: Mapping[str, Loss], logs: Path
    ) -> Iterator[Models]:
        """Builds the trainer and whatever else the algorithm needs, in this process or in those of
        a cluster, which end with the body."""
        if self.cluster == trainers.HERE:
            yield self.create_models(directory, workflow)
            return
        configs = self.trainer_configs(directory, workflow)
        with trainers.trainers_on_ray(
            self.backend, configs, losses, self.placement, logs, self.other_cpus()
        ) as created:
            yield self.models_of(created, directory, workflow)

    def other_cpus(self) -> float:
        """Returns the CPUs of what the run places in the cluster beside the processes that train."""
        shards = self.shards * self.placement.shard_cpus
        if not self.places_servers or self.fleet is None:
            return shards
        _, most = self.fleet.bounds
        return shards + most * self.fleet.hosts * self.placement.server_cpus

    def create_models(self, directory: Path, workflow: Workflow) -> Models:
        """Returns the trainer and whatever else the algorithm needs, in this process."""
        configs = self.trainer_configs(directory, workflow)
        return self.models_of(trainers.trainers_here(self.backend, configs), directory, workflow)

    def models_of(
        self, created: Mapping[str, Trainer], directory: Path, workflow: Workflow
    ) -> Models:
        """Returns the models, of which the backend computes those that were created and servers
        the others."""
        served: dict[str, Scorer] = {}
        for binding, given in self.scorers().items():
            if urls := server_urls(binding, given):
                from areal_x.engines.scoring import server_scorer

                tokenizer, temperature = load_tokenizer(directory), self.temperature(workflow)
                served[binding] = server_scorer(
                    urls, self.vllm, self.sglang, tokenizer, temperature
                )
        several = {teacher_binding(name): name for name in self.teachers}
        reader = None
        if self.algorithm.teacher_context is not None:
            tokenizer = load_tokenizer(directory)
            reader = Reader(tokenizer, partial(encode, tokenizer))
        return Models(
            **{name: trainer for name, trainer in created.items() if name not in several},
            reference_servers=next((x for name, x in served.items() if name not in several), None),
            teachers={several[name]: x for name, x in created.items() if name in several},
            teacher_servers={several[name]: x for name, x in served.items() if name in several},
            reader=reader,
        )

    def trainer_configs(self, directory: Path, workflow: Workflow) -> dict[str, TrainerConfig]:
        """Returns the configs of the trainers that the algorithm needs, by their names in Models; those
        of several teachers by their bindings.

        The policy is the model at its sampling temperature, so that engine and trainer compute
        log-probabilities of one distribution.
        """
        config = replace(
            self.trainer,
            temperature=self.temperature(workflow),
            share_prompts=self.share_prompts,
            deterministic=self.deterministic,
            rests=self.colocate,
            row_length=self.row_length,
        )
        needs = self.algorithm.needs

        def config_of(path: Path, **changes: Any) -> TrainerConfig:
            model = replace(config.model, path=str(path.absolute()))
            return replace(config, model=model, **changes)

        # Recorded experts are the policy's: another model would have routed differently.
        others: dict[str, Any] = {"replay_experts": False}
        head = self.algorithm.head
        wanted = "entropy" in needs or (self.journal.entropy and head == "policy")
        policy: dict[str, Any] = {"head": head, "entropy": wanted}
        if "teacher_logits" in needs:
            assert isinstance(self.teacher, str) or callable(self.teacher)  # checked by Settings
            policy["teacher"] = str(resolve(self.teacher).absolute())
            policy["divergence"] = self.algorithm.divergence
        found = {"policy": config_of(directory, **policy)}
        for binding, given in self.scorers().items():
            if server_urls(binding, given):
                continue
            assert given is None or isinstance(given, str) or callable(given)  # no servers
            other = directory if given is None else resolve(given)
            check_vocabulary(binding, other, directory)
            name = binding if "teachers" in needs else "reference"
            no_lora = LoRAConfig(rank=0)
            found[name] = config_of(other, frozen=True, lora=no_lora, **others)
        if "values" in needs:
            first = directory if self.critic.path is None else resolve(self.critic.path)
            check_vocabulary("critic.path", first, directory)
            optimizer = replace(config.optimizer, learning_rate=self.critic.learning_rate)
            found["critic"] = config_of(first, head="value", optimizer=optimizer, **others)
        return found
