"""Bugs in the server of Tinker clients."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

SERVER = ("tests/tinker/test_server.py",)
STEPS = ("tests/tinker/test_steps_by_hand.py",)

MUTANTS: list[Mutant] = [
    *planted(
        "areal_x/tinker/data.py",
        STEPS,
        (
            "Tinker: a target that is not the next token is taken for it",
            "leaf = ~on_chain",
            "leaf = ~on_chain & (np.arange(count)[:, None] == count - 1)",
        ),
        (
            "Tinker: a leaf continues the token before its own",
            "depths[at[leaf]] = targets[leaf], own[rows], rows + 1",
            "depths[at[leaf]] = targets[leaf], own[rows] - (rows == count - 1), rows + 1",
        ),
    ),
    *planted(
        "areal_x/tinker/losses.py",
        STEPS,
        (
            "Tinker: an upper threshold is taken for a distance from 1",
            "clip_high=thresholds[HIGH] - 1",
            "clip_high=thresholds[HIGH]",
        ),
        (
            "Tinker: a gradient ascends",
            "layout.gather(-np.asarray(gradient.logp))",
            "layout.gather(np.asarray(gradient.logp))",
        ),
    ),
    *planted(
        "areal_x/tinker/host.py",
        STEPS,
        (
            "Tinker: the model that leaves the trainer is not written",
            "write_whole(model.state, self._trainer.save)  # it stays if that fails",
            "pass",
        ),
        (
            "Tinker: gradients of a step are used again in the next",
            "pending, model.pending = model.pending, []",
            "pending = model.pending",
        ),
        (
            "Tinker: weights are sampled as they are now, not as they were saved",
            "and model.steps == source.steps:",
            "and model.steps >= source.steps:",
        ),
    ),
    *planted(
        "areal_x/tinker/futures.py",
        SERVER,
        (
            "Tinker: a request that is sent again runs again",
            "request, new = self.futures.add(id, kind)\n        if not new:\n            return",
            "request, new = self.futures.add(id, kind)",
        ),
        (
            "Tinker: a model's requests run in the order of arrival",
            "while self.next in self.arrived:",
            "while self.arrived and setattr(self, 'next', min(self.arrived)) is None:",
        ),
    ),
    *planted(
        "areal_x/tinker/app.py",
        SERVER,
        (
            "Tinker: every key has the same account",
            "accounts = {key: Account(server, key) for key in keys}",
            "accounts = dict.fromkeys(keys, Account(server, keys[0]))",
        ),
        (
            "Tinker: a part of a key is enough",
            "hmac.compare_digest(given, key.encode())",
            "key.encode().startswith(given)",
        ),
    ),
    *planted(
        "areal_x/tinker/sampling.py",
        SERVER,
        (
            "Tinker: a swap does not wait for running requests, nor is there one",
            "elif source.name == self._loaded:",
            "elif self._loaded is not None:",
        ),
    ),
    *planted(
        "backends/torch/areal_x_torch/optimizers.py",
        STEPS,
        (
            "torch: set_optimizer keeps the first betas",
            'group["betas"] = config.beta1, config.beta2',
            'group.setdefault("betas", (config.beta1, config.beta2))',
        ),
    ),
]
