"""Bugs by which a trainer's distribution is over other tokens than those that were sampled from."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

JAX, TORCH = "backends/jax/areal_x_jax/", "backends/torch/areal_x_torch/"
JAX_HEAD, TORCH_HEAD = ("tests/jax/test_head.py",), ("tests/torch/test_head.py",)
PACKING = ("tests/batching/test_packing.py",)
CHECKS = ("tests/engines/test_sampling_checks.py",)
SGLANG = ("tests/engines/sglang/test_sglang_client.py",)
RESPONSES = ("tests/engines/vllm/test_vllm_client.py",)
SAMPLERS = (
    "tests/test_backends_conform.py::test_truncated_distributions_are_renormalised_over_the_tokens_that_are_reported",
    "tests/test_backends_conform.py::test_logprobs_of_truncated_distributions_are_the_trainers",
)
AGREE = ("tests/engines/test_engines_agree.py::test_the_embedded_engine_and_the_trainer_truncate_alike",)

MUTANTS: list[Mutant] = [
    *planted(
        JAX + "head.py",
        JAX_HEAD,
        ("JAX: kept tokens are of the position after theirs", "at, ids = kept[..., 0] - 1,", "at, ids = kept[..., 0],"),
        (
            "JAX: a position that keeps all keeps none",
            "    return (unpacked > 0) | ~self.truncated[..., None]",
            "    return unpacked > 0",
        ),
        (
            "JAX: the gradient is of the whole softmax",
            "        logp = jnp.where(new, logits - total[:, None], HIDDEN)",
            "        logp = logits - total[:, None]",
        ),
    ),
    *planted(
        TORCH + "head.py",
        TORCH_HEAD,
        ("torch: a position that keeps all keeps none", "        found[self.positions] = True", "        found[:] = True"),
        (
            "torch: kept tokens are summed from the first position's largest logit",
            "        shifted = (logits - highest[self.positions]).exp_()",
            "        shifted = (logits - highest[0]).exp_()",
        ),
        (
            "torch: the gradient of kept tokens lacks the sampled one's",
            "        grad_logits += torch.where(ids == self.targets, self.grad, 0)\n",
            "",
        ),
        (
            "torch: the gradient of kept tokens lacks the cap's",
            "        grad_logits += torch.where(ids == self.targets, self.grad, 0)\n"
            "        return grad_logits if of_cap is None else grad_logits.mul_(of_cap)",
            "        grad_logits += torch.where(ids == self.targets, self.grad, 0)\n        return grad_logits",
        ),
        (
            "torch: chunks beside a teacher read the first one's kept tokens",
            "        mask[self.positions[here] - part.start, self.ids[here]] = False",
            "        mask[self.positions[here] % len(mask), self.ids[here] * 0] = False",
        ),
    ),
    *planted(
        TORCH + "forward.py",
        AGREE,
        (
            "torch: the kept tokens of another row",
            "index[np.arange(rows)[:, None] * length + column]",
            "index[np.arange(rows)[:, None] * 0 + column]",
        ),
    ),
    *planted(
        TORCH + "trainer.py",
        AGREE,
        (
            "torch: log-probabilities are of everything",
            'for name in ("kept", "parents", *IMAGES)',
            'for name in ("parents", *IMAGES)',
        ),
    ),
    *planted(
        JAX + "trainer.py",
        AGREE,
        (
            "JAX: log-probabilities are of everything",
            '("experts", "kept", "parents", *IMAGES)',
            '("experts", "parents", *IMAGES)',
        ),
    ),
    *planted(
        JAX + "sampling.py",
        AGREE,
        (
            "JAX: what is reported and what is sampled from are rounded apart",
            "mask = kept(logits, divisor, truncation) | greedy[:, None]",
            "mask = kept(scaled, jnp.ones_like(divisor), truncation) | greedy[:, None]",
        ),
    ),
    *planted(JAX + "sampling.py", SAMPLERS, ("JAX: min-p keeps all", "& (scaled >= jnp.log(min_p))", "")),
    *planted(
        TORCH + "sampling.py",
        SAMPLERS,
        ("torch: min-p keeps all", "& (ordered >= min_p.log())", ""),
        (
            "torch: rows that leave nothing out report all",
            "        mask &= row_sampling.truncation.rows",
            "        mask &= True",
        ),
    ),
    *planted(
        "areal_x/engines/kept_bits.py",
        SAMPLERS,
        ("bits are read from the other end", "(byte * 8 + bit)", "(byte * 8 + 7 - bit)"),
    ),
    *planted(
        "areal_x/batching/packing.py",
        PACKING,
        (
            "kept tokens are paired with their place among all",
            "np.repeat(at, kept.counts)",
            "np.repeat(np.arange(len(at)), kept.counts)",
        ),
    ),
    *planted(
        "areal_x/run/group_bytes.py",
        ("tests/run/test_journal.py",),
        (
            "the journal forgets kept tokens",
            "        if not kept:\n            return [has, None]",
            "        if True:\n            return [[False] * len(has), None]",
        ),
        ("a journal without kept tokens is not read", 'head.get("kept", [*missing, None])', 'head["kept"]'),
    ),
    *planted(
        "areal_x/engines/fleet/slices.py",
        ("tests/engines/fleet/test_slices.py",),
        (
            "a slice without a report shifts those after it",
            "part.kept or Kept.everything(len(part.tokens)) for part in parts",
            "part.kept for part in parts if part.kept",
        ),
    ),
    *planted(
        "areal_x/agents/chat/merging.py",
        ("tests/agents/chat/test_merging.py",),
        (
            "a tool's output is forgotten among the kept tokens",
            "            Kept.everything(len(call.prompt) - len(old)),\n",
            "            Kept.everything(0),\n",
        ),
    ),
    *planted(
        "areal_x/types.py",
        PACKING,
        (
            "a sampled token need not be among the kept ones",
            "if self.kept is not None and not self.kept.contain(self.tokens):",
            "if False:",
        ),
    ),
    *planted(
        "areal_x/engines/vllm/responses.py",
        RESPONSES,
        (
            "a server that reports nothing kept everything",
            "    if reported is None:\n",
            "    if reported is None:\n        return Kept.everything(len(tokens))\n    if False:\n",
        ),
    ),
    *planted(
        "areal_x/engines/fleet/kept_tokens.py",
        RESPONSES,
        ("a server's sets need not have the sampled tokens", " or not kept.contain(sampled):", ":"),
    ),
    *planted(
        "areal_x/engines/sglang/truncation.py",
        SGLANG,
        (
            "SGLang: what min-p leaves out counts for top-p",
            "probs.masked_fill(~(within & among), 0.0)",
            "probs.masked_fill(~among, 0.0)",
        ),
        ("SGLang: a request without a top-p is narrowed too", "torch.where(top_ps[:, None] < 1, left, probs)", "left"),
        (
            "SGLang: top-p beside min-p is as elsewhere",
            "return sampling.top_k > 0 or sampling.min_p > 0",
            "return sampling.top_k > 0",
        ),
    ),
    *planted(
        "areal_x/engines/sampling_checks.py",
        CHECKS,
        ("any engine is taken to report", "if sampling.truncates and engine not in REPORTING:", "if False:"),
    ),
    *planted(
        "areal_x/settings.py",
        CHECKS,
        (
            "a server may score truncated samples",
            '            if server_urls(binding, given):\n                wanted = (\n                    "a model',
            '            if False:\n                wanted = (\n                    "a model',
        ),
    ),
    *planted(
        "areal_x/rollout/episode.py",
        ("tests/rollout/test_runner.py",),
        ("a workflow may lose the kept tokens", "        if trajectory.kept is None and sampled.any():", "        if False:"),
    ),
]
