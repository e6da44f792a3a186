"""AReaL-X: asynchronous reinforcement learning of language models, written once for JAX and
PyTorch.

The whole system is the ring in `areal_x.experiment`. Importing this package loads neither torch,
jax nor vllm.
"""

from areal_x.runtime import cores

cores.spin()

__version__ = "0.1.0"
