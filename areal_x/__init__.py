"""AReaL-X: asynchronous reinforcement learning of language models, written once for JAX and PyTorch.

The whole system is the ring in `areal_x.experiment`. Importing this package loads neither torch, jax nor vllm.
"""

import os

# Read once, when torch brings up OpenMP, so it has to be set before whatever imports torch first (transformers does).
# Threads that wait for each other would otherwise spin; every process or thread that computes beside the trainer (a server,
# the embedded sampler) has a team of its own, and on few cores they take each other's time slices and slow down manyfold.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
