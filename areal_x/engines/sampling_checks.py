"""Whether training samples from the distribution that the trainer computes: softmax(logits /
temperature), all of it.

An engine's log-probabilities are of what was sampled from, after top-p and top-k; the trainer's are
of the whole vocabulary. The mean of their ratio on what was just sampled must be 1, and is the
probability mass that was kept: every loss with a ratio takes what is missing for a change of the
policy. Until engines hand over what they kept, nothing in training may change the distribution but
the temperature, which the trainer is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_x.errors import ConfigError
from areal_x.protocols.engine import SamplingParams

LEAST_OF_VLLM = 0.01  # vLLM samples at this temperature where a lower one, but not 0, is asked for
# Of a server's command line, with what each changes.
FLAGS = {
    "--logprobs-mode": (
        "log-probabilities of another distribution than the one that is sampled from"
    ),
    "--logits-processors": "a distribution that the trainer does not compute",
}


def check_distribution(workflow: Any, engine: str, temperature: float) -> None:
    """temperature: of the trainer's own settings. Raises: ConfigError for a workflow whose episodes
    would be sampled from another distribution than the trainer's."""
    if engine == "none":
        return
    sampling, binding, used = (
        getattr(workflow, "sampling", None),
        "trainer.temperature",
        temperature,
    )
    if isinstance(sampling, SamplingParams):
        whole = (
            "in training: the trainer's log-probabilities are of the whole distribution, the"
            " engine's of what this leaves"
        )
        if sampling.top_p < 1:
            raise ConfigError(
                "sampling.top_p", sampling.top_p, f"1.0 {whole}; sampling.temperature sharpens both"
            )
        if sampling.top_k:
            raise ConfigError(
                "sampling.top_k", sampling.top_k, f"0 {whole}; sampling.temperature sharpens both"
            )
        binding, used = "sampling.temperature", sampling.temperature
        if temperature not in (1.0, used):
            wanted = (
                f"left out: the trainer takes {binding} = {used}, at which the policy is sampled"
            )
            raise ConfigError("trainer.temperature", temperature, wanted)
    if used == 0:
        raise ConfigError(
            binding,
            used,
            "above 0 in training, which needs answers that differ (evaluation is greedy by itself)",
        )
    if engine == "vllm" and used < LEAST_OF_VLLM:
        wanted = (
            f"at least {LEAST_OF_VLLM} with train.engine = 'vllm', which samples at {LEAST_OF_VLLM}"
            " instead of below it"
        )
        raise ConfigError(binding, used, wanted)
    # a learned reward is around another workflow
    gateway = getattr(getattr(workflow, "workflow", workflow), "gateway", None)
    chosen = getattr(gateway, "sampling", "run")
    if chosen != "run":
        wanted = (
            "'run' in training: the trainer knows one distribution, and each agent would choose"
            " another"
        )
        raise ConfigError("gateway.sampling", chosen, wanted)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises: ConfigError for words of a server's command line under which it would sample or
    report something else."""
    for word in arguments:
        name = word.partition("=")[0].replace("_", "-")
        if name in FLAGS:
            raise ConfigError(
                "vllm.arguments", tuple(arguments), f"without {name}, which makes {FLAGS[name]}"
            )
