"""AReaL-X: asynchronous reinforcement learning of language models, written once for JAX and PyTorch.

The whole system is the ring in `areal_x.experiment`. Importing this package loads neither torch, jax nor vllm.
"""

import os

# Read once, when torch brings up OpenMP, so it has to be set before whatever imports torch first (transformers does).
# Threads wait for each other's share of an operation spinning: by default so long that teams side by side (the trainer, the
# embedded sampler, a server) take each other's time slices on few cores. Not at all is no better: small operations then spend
# their time waking threads, at half the tokens a second. 10,000 turns bridge the gap from one operation to the next.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"
