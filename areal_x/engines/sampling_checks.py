"""Checks that training samples from the distribution that the trainer computes: softmax(logits /
temperature), over all tokens or over those that truncated sampling kept.

An engine's log-probabilities are those of the distribution sampled from, after top-p, top-k and
min-p. The trainer's are of the same one if it is told which tokens were kept (Completion.kept): it
renormalises over them. Deriving the set again from the trainer's own logits would not do. They
differ from the engine's in their last bits, and a token at the boundary would be kept on one side
and not on the other. Over the whole vocabulary instead, the mean of the ratio over fresh samples
would be the probability mass that was kept, which every loss with a ratio would take for a change
of the policy.

Nothing else may change the distribution in training but the temperature, which the trainer knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_x.errors import ConfigError
from areal_x.protocols.workflow import Workflow

REPORTING = ("embedded", "vllm", "sglang")  # engines that report which tokens were kept
TRUNCATIONS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # and the values that keep everything
LEAST_OF_VLLM = 0.01  # vLLM replaces a lower temperature, except 0, by this one
# Arguments of a server that are refused, and what each would change.
FLAGS = {
    "--logprobs-mode": "the log-probabilities those of another distribution than is sampled from",
    "--logits-processors": "the distribution one that the trainer does not compute",
    "--enable-custom-logit-processor": "the distribution one that the trainer does not compute",
    "--enable-watermark": "the distribution one that the trainer does not compute",
    "--rl-on-policy-target": "the log-probabilities those of numbers in bfloat16",
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
        if sampling.truncates and engine not in REPORTING:
            name, plain = next(
                (name, plain)
                for name, plain in TRUNCATIONS.items()
                if getattr(sampling, name) != plain
            )
            wanted = (
                f"{plain} in training with train.engine = {engine!r}, which does not report the"
                f" tokens that were kept: {', '.join(map(repr, REPORTING))} do"
            )
            raise ConfigError(f"sampling.{name}", getattr(sampling, name), wanted)
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


def may_truncate(workflow: Workflow) -> bool:
    """True if its engine must report which tokens were kept; also for a workflow that does not
    declare what it samples with."""
    sampling = workflow.sampling_params()
    return sampling is None or sampling.truncates


def check_arguments(arguments: Sequence[str], binding: str) -> None:
    """Raises: ConfigError for server arguments, given as `binding`, that would change what is sampled
    or reported."""
    for word in arguments:
        name = word.partition("=")[0].replace("_", "-")
        if name in FLAGS:
            raise ConfigError(
                binding, tuple(arguments), f"without {name}, which makes {FLAGS[name]}"
            )
