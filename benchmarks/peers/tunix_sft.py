"""Tunix's PeftTrainer on the work of benchmarks/update.py, run with the python of an environment that has Tunix.

    python tunix_sft.py MODEL_DIRECTORY ROWS.npz

Settings: all parameters, its own loss, packed rows in one batch with positions and a mask within segments, no
rematerialisation, no logging, no checkpoints.
"""

from wire import Channel, Steps

channel = Channel()

import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig  # noqa: E402
from tunix_model import VERSIONS, load  # noqa: E402


def model_input(rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    ids = rows["segment_ids"]
    same = ids[:, :, None] == ids[:, None, :]
    causal = jnp.tril(jnp.ones(same.shape[1:], bool))
    kept = {"input_tokens": rows["tokens"], "input_mask": rows["mask"], "positions": rows["positions"]}
    return {**kept, "attention_mask": same & causal}


def main(directory: str, rows_file: str) -> None:
    rows = dict(np.load(rows_file))
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        model = load(directory, mesh)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, b2=0.98, weight_decay=0.0))
        config = TrainingConfig(eval_every_n_steps=1_000_000_000, max_steps=None)
        trainer = PeftTrainer(model, optimizer, config).with_gen_model_input_fn(model_input)

        def loss() -> float:
            """The loss of the last step; the trainer keeps it until the next is over."""
            metrics = trainer._prev_buffered_train_metrics
            return 0.0 if metrics is None else float(np.mean(metrics.loss))

        steps = Steps(
            channel,
            settle=lambda: jax.block_until_ready(nnx.state(trainer.model)),
            details=lambda: {"loss": loss(), "versions": VERSIONS},
        )

        def batches() -> Iterator[dict[str, np.ndarray]]:
            while steps.begin():
                yield rows

        trainer.train(batches())


if __name__ == "__main__":
    main(*sys.argv[1:])
