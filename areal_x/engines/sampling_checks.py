"""Checks that training samples from the distribution that the trainer computes: softmax(logits /
temperature), without truncation.

An engine's log-probabilities are those of the distribution sampled from, after top-p and top-k; the
trainer's are of the whole vocabulary. The mean of their ratio over fresh samples must be 1; with
truncation it is the probability mass that was kept, and every loss with a ratio would take the
missing mass for a change of the policy. As long as engines do not return the kept mass, nothing in
training may change the distribution except the temperature, which the trainer knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_x.errors import ConfigError
from areal_x.protocols.workflow import Workflow

LEAST_OF_VLLM = 0.01  # vLLM replaces a lower temperature, except 0, by this one
# Arguments of a server that are refused, and what each would change.
FLAGS = {
    "--logprobs-mode": "the log-probabilities those of another distribution than is sampled from",
    "--logits-processors": "the distribution one that the trainer does not compute",
}


def check_distribution(workflow: Workflow, engine: str, temperature: float) -> None:
    """Raises: ConfigError for a workflow whose episodes would be sampled from another distribution
    than the trainer's. temperature: the trainer's own setting."""
    if engine == "none":
        return
    sampling = workflow.sampling_params()
    binding = "trainer.temperature"
    used = temperature
    if sampling is not None:
        whole = (
            "in training: the trainer's log-probabilities are of the whole distribution, the"
            " engine's of the truncated one"
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
                f"left out: the trainer uses {binding} = {used}, at which the policy is sampled"
            )
            raise ConfigError("trainer.temperature", temperature, wanted)
    if used == 0:
        raise ConfigError(
            binding,
            used,
            "above 0 in training, which needs differing answers (evaluation is always greedy)",
        )
    if engine == "vllm" and used < LEAST_OF_VLLM:
        wanted = (
            f"at least {LEAST_OF_VLLM} with train.engine = 'vllm', which samples at {LEAST_OF_VLLM}"
            " instead of below it"
        )
        raise ConfigError(binding, used, wanted)
    if workflow.agents_choose_sampling():
        wanted = (
            "'run' in training: the trainer computes one distribution, and each agent could choose"
            " another"
        )
        raise ConfigError("gateway.sampling", "client", wanted)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises: ConfigError for server arguments that would change what is sampled or reported."""
    for word in arguments:
        name = word.partition("=")[0].replace("_", "-")
        if name in FLAGS:
            raise ConfigError(
                "vllm.arguments", tuple(arguments), f"without {name}, which makes {FLAGS[name]}"
            )
