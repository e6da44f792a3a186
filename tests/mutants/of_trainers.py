"""Bugs in what a backend computes: heads, steps, optimizers, adapters, samplers; and in how rows are packed for them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

JAX, TORCH = "backends/jax/areal_x_jax/", "backends/torch/areal_x_torch/"
PACKING = ("tests/batching/test_packing.py", "tests/batching/test_sharing.py", "tests/agents/chat/test_merging.py")
CONFORMANCE = "tests/test_backends_conform.py"
SAMPLERS = ("tests/engines/test_samplers.py", CONFORMANCE)

MUTANTS: list[Mutant] = [
    *planted(
        JAX + "ragged_products.py",
        ("tests/jax/test_ragged_products.py",),
        (
            "blocks of a mixture's rows are counted without those that are not full",
            "count = min(rows, rows // size + groups)",
            "count = min(rows, rows // size + groups // 2)",
        ),
        (
            "places of a block that are not filled are rows of the next group",
            "return jnp.where(self.filled[..., None], x[self.source], 0)",
            "return x[self.source]",
        ),
        (
            "an expert's gradient is that of its last block",
            "return of_kernels.at[group].add(rows.T @ of_output), of_output @ kernels[group].T",
            "return of_kernels.at[group].set(rows.T @ of_output), of_output @ kernels[group].T",
        ),
    ),
    *planted(
        "areal_x/types.py",
        PACKING,
        ("prompts are trained on", "        mask[:context] = False", "        mask[:0] = False"),
        (
            "an engine's log-probabilities are shifted by one",
            "        logp[context:] = logprobs",
            "        logp[context:] = np.roll(logprobs, 1)",
        ),
        (
            "a prompt's tokens have the version of the policy",
            "np.full(length, NOT_THE_POLICY, np.int32)\n        version[context:]",
            "np.full(length, 0, np.int32)\n        version[context:]",
        ),
    ),
    *planted(
        "areal_x/batching/packing.py",
        PACKING,
        (
            "positions go on from one sequence of a row to the next",
            "        positions=filled([within], np.int32),",
            "        positions=filled([at % row_length], np.int32),",
        ),
        (
            "the sequences of a row attend to each other",
            "        segment_ids=filled([np.repeat(places.segments, lengths)], np.int32),",
            "        segment_ids=filled([np.repeat(np.minimum(places.segments, 1), lengths)], np.int32),",
        ),
        (
            "padding counts as drawn by the first policy",
            "        versions=filled([t.versions for t in trajectories], np.int32, padding=NOT_THE_POLICY),",
            "        versions=filled([t.versions for t in trajectories], np.int32, padding=0),",
        ),
    ),
    *planted(
        "areal_x/batching/sharing.py",
        ("tests/batching/test_sharing.py",),
        (
            "a token is trained for one of the trajectories that train it",
            " | (\n        node.trained[:most] & trajectory.mask[own]\n    )",
            "",
        ),
        (
            "a shared token is its first trajectory's, whoever trains it",
            "    owner[at[trained]] = each[trained]\n",
            "",
        ),
        (
            "what is below a node that is split stays with its beginning",
            "node.trained[count:], below, node.children)]",
            "node.trained[count:], below, []), *node.children]",
        ),
        (
            "trajectories of all groups share tokens",
            "        members[group, -1 if",
            "        members[0, -1 if",
        ),
    ),
    *planted(
        "areal_x/protocols/tries.py",
        ("tests/protocols/test_tries.py",),
        (
            "a token is seen by what continues the token before it",
            'np.searchsorted(-least, -own, side="right")',
            'np.searchsorted(-least, -own, side="left")',
        ),
        (
            "a node does not end where another continues it",
            "| (children[before + 1] > 1) ",
            "",
        ),
    ),
    *planted(
        JAX + "head.py",
        ("tests/test_share_prompts.py",),
        (
            "JAX: a node's first token is predicted from the token before it in the row",
            "        hidden = _before_next(hidden, parents)\n        if teacher is not None:",
            "        if teacher is not None:",
        ),
    ),
    *planted(
        TORCH + "flat_rows.py",
        ("tests/test_share_prompts.py",),
        (
            "torch: a node's first token is not predicted",
            "np.where(self.prefixes < 0, -1, ends[self.prefixes] - 1)",
            "-1",
        ),
    ),
    *planted(
        JAX + "head.py",
        ("tests/jax/test_head.py",),
        (
            "JAX: log-probabilities stand one token early",
            "    return jnp.pad(jnp.where(follows, outputs, 0.0), ((0, 0), (1, 0)))",
            "    return jnp.pad(jnp.where(follows, outputs, 0.0), ((0, 0), (0, 1)))",
        ),
        (
            "JAX: the temperature is left out",
            '        return partitioner.constrain(softcapped(logits, softcap) / temperature, "rows", None, "vocab")',
            '        return partitioner.constrain(softcapped(logits, softcap), "rows", None, "vocab")',
        ),
        (
            "JAX: the temperature is left out where logits are computed by blocks",
            "        return softcapped(products, self.softcap) / self.temperature",
            "        return softcapped(products, self.softcap)",
        ),
        (
            "JAX: a sequence's first token is predicted from the sequence before it",
            "        follows &= segment_ids[:, 1:] == segment_ids[:, :-1]\n",
            "        pass\n",
        ),
    ),
    *planted(
        TORCH + "head.py",
        ("tests/torch/test_head.py", "tests/torch/test_trainer.py"),
        (
            "torch: the temperature is left out",
            "    return logits if temperature == 1 else logits / temperature",
            "    return logits",
        ),
        (
            "torch: the gradient lacks the temperature",
            "            grad / how.temperature,\n",
            "            grad,\n",
        ),
        (
            "torch: the entropy has the wrong sign",
            "    return picked, total, -logp.exp().mul_(logp).sum(-1)",
            "    return picked, total, logp.exp().mul_(logp).sum(-1)",
        ),
    ),
    *planted(
        JAX + "update.py",
        ("tests/jax/test_trainer.py", "tests/test_losses_in_trainers.py", CONFORMANCE),
        (
            "JAX: metrics are normalised per micro-batch",
            "else jnp.sum(x) / trained for name, x in masked.items()}",
            "else jnp.sum(x) / jnp.maximum(jnp.sum(micro.mask), 1) for name, x in masked.items()}",
        ),
        (
            "JAX: the loss is averaged over micro-batches",
            "            return jnp.sum(micro.weights * terms), (means, None, kept)",
            "            return jnp.sum(micro.weights * terms) / count, (means, None, kept)",
        ),
        (
            "JAX: a step whose gradient is not finite is taken",
            "jnp.issubdtype(new.dtype, jnp.integer) else jnp.where(finite, new, old)",
            "jnp.issubdtype(new.dtype, jnp.integer) else new",
        ),
        (
            "JAX: only the last micro-batch's gradient counts",
            "        return (values + value, both, loads), jax.tree.map(jnp.add, gradients, gradient)",
            "        return (values + value, both, loads), gradient",
        ),
    ),
    *planted(
        TORCH + "update.py",
        ("tests/torch/test_trainer.py", "tests/test_losses_in_trainers.py", CONFORMANCE),
        (
            "torch: the loss is averaged over a micro-batch's tokens",
            "        total = (rows.weights * terms).sum()",
            "        total = (rows.weights * terms).mean()",
        ),
        (
            "torch: metrics are normalised per micro-batch",
            "                self.sums[name] += x.sum() / tokens",
            "                self.sums[name] += x.sum() / max(int(rows.mask.sum()), 1)",
        ),
    ),
    *planted(
        TORCH + "trainer.py",
        ("tests/torch/test_trainer.py", "tests/test_losses_in_trainers.py", CONFORMANCE),
        (
            "torch: a step whose gradient is not finite is taken",
            "        if finite:\n            self.optimizer.step()",
            "        if True:\n            self.optimizer.step()",
        ),
        (
            "torch: the learning rate has no schedule",
            '            group["lr"] = rate',
            '            group["lr"] = self.config.optimizer.learning_rate',
        ),
    ),
    *planted(
        TORCH + "forward.py",
        ("tests/torch/test_trainer.py", "tests/test_losses_in_trainers.py", CONFORMANCE),
        (
            "torch: log-probabilities are of the token that was read, not of the next",
            'before=self.config.head != "reward", own=own)',
            "before=False, own=own)",
        ),
    ),
    *planted(
        TORCH + "optimizers.py",
        ("tests/torch/test_optimizers.py", "tests/test_moving.py"),
        (
            "torch: norms and biases decay",
            'config.weight_decay if group["params"][0].ndim >= 2 else 0.0',
            "config.weight_decay",
        ),
        (
            "torch: Muon's direction is not orthogonal",
            "            direction = orthogonal(ahead)\n",
            "            direction = ahead\n",
        ),
        (
            "torch: Adafactor's average never settles",
            'fresh = _in_columns(p.grad), state["step"] ** -0.8',
            'fresh = _in_columns(p.grad), state["step"] ** 0',
        ),
        (
            "torch: Muon lacks Nesterov's step ahead",
            '        ahead = p.grad + MOMENTUM * state["trace"]',
            '        ahead = state["trace"]',
        ),
    ),
    *planted(
        "areal_x/protocols/trainer_config.py",
        ("tests/jax/test_lora.py", "tests/torch/test_lora.py", "tests/test_export.py"),
        (
            "an adapter's scale does not depend on its rank",
            "        return self.alpha / self.rank",
            "        return self.alpha",
        ),
    ),
    *planted(
        "areal_x/hf/adapters.py",
        ("tests/test_export.py", "tests/test_expert_adapters.py", "tests/jax/test_lora.py", "tests/torch/test_lora.py"),
        (
            "an exported adapter is scaled twice",
            "            return product * self.scale",
            "            return product * self.scale**2",
        ),
        (
            "the files of experts' adapters have the two kernels' matrices in each other's place",
            "len(own) - 1 - own.index(kernel)",
            "own.index(kernel)",
        ),
    ),
    *planted(
        TORCH + "lora.py",
        ("tests/torch/test_lora.py",),
        (
            "torch: a merged adapter is not scaled",
            "        return (weight + self.scale * (b @ a)).to(weight.dtype)",
            "        return (weight + (b @ a)).to(weight.dtype)",
        ),
        (
            "torch: adapters change the model before they have learned",
            "                layer.lora_B.weight.zero_()",
            "                layer.lora_B.weight.fill_(0.01)",
        ),
    ),
    *planted(
        TORCH + "fp8.py",
        ("tests/test_fp8.py",),
        (
            "torch: fp8: experts are not rounded",
            "            module.multiply = grouped_product\n",
            "            pass\n",
        ),
    ),
    *planted(
        TORCH + "fp8_products.py",
        ("tests/test_fp8.py",),
        (
            "torch: fp8: the gradient is not rounded",
            "        return round_tiles(gradient) @ rounded",
            "        return gradient @ rounded",
        ),
    ),
    *planted(
        TORCH + "fp8_products.py",
        ("tests/torch/test_fp8_products.py",),
        (
            "torch: fp8: units of Blackwell get scales in the order of rows",
            "apart.permute(0, 3, 2, 1, 4)",
            "apart.permute(0, 3, 1, 2, 4)",
        ),
        (
            "torch: fp8: a device whose units compute otherwise is trusted",
            "> 0.01:",
            "> 100.0:",
        ),
    ),
    *planted(
        "areal_x/hf/fp8_weights.py",
        ("tests/hf/test_fp8_weights.py",),
        (
            "routers are published in fp8",
            '    *(".gate", ".router", ".router.proj", ".shared_expert_gate"),\n',
            "",
        ),
        (
            "a scale of published fp8 weights is rounded to the nearest power of two",
            "+ 0x7FFFFF) >> 23",
            "+ 0x3FFFFF) >> 23",
        ),
    ),
    *planted(
        JAX + "fp8.py",
        ("tests/test_fp8.py",),
        (
            "JAX: fp8: a scale is rounded to the nearest power of two",
            "exponent = (bits + 0x7FFFFF) >> 23",
            "exponent = (bits + 0x3FFFFF) >> 23",
        ),
    ),
    *planted(
        JAX + "lora.py",
        ("tests/jax/test_lora.py",),
        (
            "JAX: a merged adapter is scaled twice",
            '    return (kernel + scale * jnp.matmul(a, b, precision="highest")).astype(kernel.dtype)',
            '    return (kernel + scale**2 * jnp.matmul(a, b, precision="highest")).astype(kernel.dtype)',
        ),
    ),
    *planted(
        TORCH + "sampling.py",
        SAMPLERS,
        (
            "torch: sampling ignores the temperature",
            "        scaled = scaled / row_sampling.temperature",
            "        scaled = scaled * 1",
        ),
        (
            "torch: log-probabilities leave out the mass that top-p and top-k cut off",
            "    return tokens[:, 0], (scaled.gather(1, tokens) - total.log())[:, 0]",
            "    return tokens[:, 0], (scaled.gather(1, tokens) - scaled.exp().sum(-1, keepdim=True).log())[:, 0]",
        ),
        (
            "torch: top-k keeps one token more",
            "    allowed = ((top_k == 0) | (rank < top_k))",
            "    allowed = ((top_k == 0) | (rank <= top_k))",
        ),
        (
            "torch: top-p leaves out the token that reaches it",
            "(before < top_p * mass.sum(-1, keepdim=True))",
            "(before + mass < top_p * mass.sum(-1, keepdim=True))",
        ),
        (
            "torch: every token of a sequence is drawn with the same number",
            "    state = _mix(state + count.astype(np.uint32) * np.uint32(0x9E3779B9))",
            "    state = _mix(state + 0 * count.astype(np.uint32))",
        ),
    ),
    *planted(
        JAX + "sampling.py",
        SAMPLERS,
        (
            "JAX: log-probabilities leave out the mass that top-p and top-k cut off",
            "    logprobs = jnp.take_along_axis(scaled, tokens[:, None], 1)[:, 0] - jnp.log(total)",
            "    logprobs = jnp.take_along_axis(scaled, tokens[:, None], 1)[:, 0] - jnp.log(jnp.exp(scaled).sum(-1))",
        ),
        (
            "JAX: sampling ignores the temperature",
            "jnp.where(greedy, 1.0, temperature)[:, None]",
            "jnp.where(greedy, 1.0, 1.0 + 0 * temperature)[:, None]",
        ),
        (
            "JAX: the draw does not depend on the request's seed",
            "    state = _mix(seed[:, 0] ^ jnp.uint32(0x9E3779B9))",
            "    state = _mix(0 * seed[:, 0] ^ jnp.uint32(0x9E3779B9))",
        ),
    ),
    *planted(
        JAX + "decode_step.py",
        SAMPLERS,
        (
            "JAX: the newest token is read at the wrong position",
            "        rows.length - 1 + rows.shift,",
            "        rows.length + rows.shift,",
        ),
    ),
    *planted(
        JAX + "lane.py",
        (*SAMPLERS, "tests/jax/test_sampler.py"),
        (
            "JAX: copied prompts are one column off",
            "(self._column - len(r.tokens) + 1) % capacity",
            "(self._column - len(r.tokens)) % capacity",
        ),
    ),
]
