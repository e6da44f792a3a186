"""Tunix's GRPOLearner on the work of benchmarks/step.py, which runs this file with the python of an environment that has Tunix.

    python tunix_grpo.py MODEL_DIRECTORY PROMPTS.json

Settings: fp32, Tunix's own ("vanilla") sampler on the trainer's weights (one mesh, so nothing is copied), a cache exactly as
long as prompt and completion, top-p off, no reference model (beta 0), no rematerialisation, one micro-batch per step, ratios
from the step's own forward pass, prompts padded to one length so that nothing compiles twice, no logging, no checkpoints.
"""

from wire import Channel, Steps

channel = Channel()

import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import transformers  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.rl import rl_cluster  # noqa: E402
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # noqa: E402
from tunix.rl.rollout.base_rollout import RolloutConfig  # noqa: E402
from tunix_model import VERSIONS, load  # noqa: E402

GROUPS, GROUP_SIZE, NEW_TOKENS = 8, 8, 64


def digits(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """The benchmark's reward: the share of digits."""
    return [sum(c.isdigit() for c in text) / NEW_TOKENS for text in completions]


def batches(prompts: list[str], steps: Steps) -> Iterator[dict[str, np.ndarray]]:
    """Yields a batch of prompts per step, while the benchmark requests steps."""
    count = 0
    while steps.begin():
        yield {"prompts": np.array([prompts[(count + i) % len(prompts)] for i in range(GROUPS)])}
        count += GROUPS


def main(directory: str, prompts_file: str) -> None:
    prompts = json.loads(Path(prompts_file).read_text())
    longest = max(map(len, prompts))
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        actor = load(directory, mesh)
    cluster = rl_cluster.RLCluster(
        actor=actor,
        tokenizer=transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, weight_decay=0.0)),
                eval_every_n_steps=1_000_000_000,
                max_steps=1_000_000_000,
                mini_batch_size=GROUPS,
                train_micro_batch_size=GROUPS,
                rollout_micro_batch_size=GROUPS,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=NEW_TOKENS,
                max_prompt_length=longest,
                kv_cache_size=longest + NEW_TOKENS,
                temperature=1.0,
                top_p=1.0,
            ),
        ),
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=GROUP_SIZE, num_iterations=1, beta=0.0),
        reward_fns=digits,
    )
    steps = Steps(
        channel,
        settle=lambda: jax.block_until_ready(nnx.state(cluster.actor_trainer.model)),
        details=lambda: {"versions": VERSIONS},
    )
    learner.train(batches(prompts, steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
