"""Our trainers' update on the work of benchmarks/update.py.

python areal_x_sft.py MODEL_DIRECTORY SEQUENCES.json BACKEND MICRO_BATCH_ROWS DEVICES
"""

from wire import Channel, Steps

channel = Channel()

import importlib.metadata  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

sys.path.append(str(Path(__file__).parents[1]))

from areal_x.algorithms import losses  # noqa: E402
from areal_x.trainer import ModelConfig, OptimizerConfig, TrainerConfig, create_trainer  # noqa: E402


def main(directory: str, sequences: str, backend: str, rows: str, devices: str) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    from update import packed

    batch = packed([np.asarray(tokens) for tokens in json.loads(Path(sequences).read_text())])
    config = TrainerConfig(
        model=ModelConfig(directory),
        optimizer=OptimizerConfig(learning_rate=1e-5, weight_decay=0.0),
        precision="fp32",
        micro_batch_rows=int(rows),
    )
    trainer = create_trainer(backend, config)
    versions = {name: importlib.metadata.version(name) for name in ("areal-x", backend)}
    last: dict[str, float] = {"loss": 0.0}

    def settle() -> None:
        if backend == "jax":
            import jax

            jax.block_until_ready(trainer.params)  # type: ignore[attr-defined]

    steps = Steps(channel, settle=settle, details=lambda: {"loss": last["loss"], "versions": versions})
    while steps.begin():
        last.update(trainer.update(batch, losses.sft))


if __name__ == "__main__":
    main(*sys.argv[1:])
