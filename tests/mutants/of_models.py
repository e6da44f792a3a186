"""Bugs in the layers of single families, in the kernels and sizes that a device chooses, and in what is checked of a model."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

JAX, TORCH = "backends/jax/areal_x_jax/", "backends/torch/areal_x_torch/"
FAMILIES = "tests/jax/test_families.py::test_"
PACKED = FAMILIES + "packed_rows_are_each_sequence_alone_in_transformers_and_files_go_round_with_the_same_bits"
SAMPLED = FAMILIES + "what_is_sampled_with_the_cache_has_the_log_probabilities_of_the_whole_sequence[qwen3_5_text-0]"
RULE = ("tests/jax/test_delta_rule.py", f"{PACKED}[qwen3_next-0]", SAMPLED)
ROUTERS = ("tests/jax/test_routers.py",)
BALANCED = ("tests/test_balanced_routers.py",)

MUTANTS: list[Mutant] = [
    *planted(
        JAX + "delta_rule.py",
        RULE,
        (
            "JAX: the convolution of a sequence sees the one before it",
            "jnp.where((same == segment_ids)[..., None], earlier, 0)",
            "earlier",
        ),
        (
            "JAX: a state goes on from one sequence of a chunk to the next",
            "    across = masked_exp(whole, last == before)[..., None]",
            "    across = masked_exp(whole, last == last)[..., None]",
        ),
        (
            "JAX: a token corrects what the sequence before it wrote",
            "    past = jnp.tri(ids.shape[-1], dtype=bool) & (ids[..., :, None] == ids[..., None, :])",
            "    past = jnp.tri(ids.shape[-1], dtype=bool) & (ids[..., :, None] == ids[..., :, None])",
        ),
        (
            "JAX: a sampler's state is that after the last token of its chunk",
            "    here = (tokens <= at) & (ids == ids[at])",
            "    here = ids == ids[at]",
        ),
    ),
    *planted(
        JAX + "recurrent_cache.py",
        (SAMPLED,),
        (
            "JAX: a slot begins with the state of the sequence before",
            "    matrices = jnp.where(first[:, None, None, None, None], 0, state.matrices)\n    seen",
            "    matrices = state.matrices\n    seen",
        ),
    ),
    *planted(
        JAX + "latent_attention.py",
        (f"{PACKED}[deepseek_v3-0]",),
        (
            "JAX: latent attention is scaled by the plain features alone",
            "    scale = (latent.plain + latent.rotated) ** -0.5",
            "    scale = latent.plain**-0.5",
        ),
    ),
    *planted(
        JAX + "varied_layers.py",
        (f"{PACKED}[gemma4_text-0]",),
        (
            "JAX: layers share the keys of the first layer of their kind",
            "        return max(i for i in before if (i in self.full) == (layer in self.full))",
            "        return min(i for i in before if (i in self.full) == (layer in self.full))",
        ),
    ),
    *planted(
        JAX + "layer_inputs.py",
        (f"{PACKED}[gemma4_text-0]",),
        (
            "JAX: a layer's input is the sum of two that is not scaled",
            "    return both * jnp.asarray(2**-0.5, x.dtype)",
            "    return both",
        ),
    ),
    *planted(
        JAX + "projections.py",
        (f"{PACKED}[gemma4_text-0]",),
        (
            "JAX: Gemma 4's values are as long as they come",
            "        value = unit_rms(value, arch.eps)",
            "        value = value * 1",
        ),
    ),
    *planted(
        JAX + "rope.py",
        (f"{PACKED}[gemma4_text-0]",),
        (
            "JAX: a proportional rotation turns twice as many pairs",
            "            turned = np.arange(head_dim // 2) < int(self.part * head_dim // 2)",
            "            turned = np.arange(head_dim // 2) < int(self.part * head_dim)",
        ),
    ),
    *planted(
        JAX + "feed_forward.py",
        (f"{PACKED}[gemma4_text-1]",),
        (
            "JAX: a router beside an MLP reads what the MLP does",
            "        scaled = unit_rms(x, arch.eps) *",
            "        scaled = unit_rms(y, arch.eps) *",
        ),
    ),
    *planted(
        JAX + "routers.py",
        ROUTERS,
        (
            "JAX: what corrects a router's choice weighs too",
            "    return jnp.take_along_axis(scores, chosen, axis=-1), chosen",
            "    return jnp.take_along_axis(ranked, chosen, axis=-1), chosen",
        ),
        (
            "JAX: a group is ranked by its best expert alone",
            "        of_groups = jax.lax.top_k(grouped, router.of_group)[0].sum(-1)",
            "        of_groups = grouped.max(-1)",
        ),
        (
            "JAX: weights lack the router's factor",
            "    return scores if router.scale == 1 else scores * router.scale",
            "    return scores",
        ),
    ),
    *planted(
        JAX + "packed_cudnn.py",
        ("tests/jax/test_packed_cudnn.py",),
        (
            "JAX: cuDNN is told that a run begins where it ends",
            "        q_offsets=offsets,",
            "        q_offsets=jnp.roll(offsets, -1, axis=1),",
        ),
        (
            "JAX: padding before a sequence belongs to it",
            "    if ((segment_ids[:, 0] > 0) == sequences).all():",
            "    if (sequences <= 1).all():",
        ),
    ),
    *planted(
        JAX + "device.py",
        ("tests/jax/test_device.py",),
        (
            "JAX: gradients are left out of what a step holds",
            "    taken = sum(2 * _bytes(x) + size * _own(x) for x in jax.tree.leaves(params))",
            "    taken = sum(size * _own(x) for x in jax.tree.leaves(params))",
        ),
    ),
    *planted(
        TORCH + "delta_chunks.py",
        ("tests/torch/test_delta_rule.py",),
        (
            "torch: an answer begins with the state of another prompt",
            "        place_of[chosen] = np.arange(len(chosen))",
            "        place_of[chosen] = np.arange(len(chosen))[::-1]",
        ),
        (
            "torch: a state does not decay over its chunk",
            "    return parts.query @ states + parts.within @ new, states * parts.decay + parts.key.mT @ new",
            "    return parts.query @ states + parts.within @ new, states + parts.key.mT @ new",
        ),
    ),
    *planted(
        TORCH + "delta_rule.py",
        ("tests/torch/test_delta_rule.py", "tests/torch/test_sampler.py"),
        (
            "torch: the convolution of an answer sees zeros before it",
            "        tail, own = tails[prefix] if prefix >= 0 else nothing, np.arange(end - length, end)",
            "        tail, own = nothing, np.arange(end - length, end)",
        ),
        (
            "torch: the convolution of a sequence sees the one before it",
            "    nothing = np.full(before, blank)",
            "    nothing = np.arange(before)",
        ),
    ),
    *planted(
        TORCH + "attention.py",
        ("tests/torch/test_attention.py",),
        (
            "torch: long sequences are given the keys of the first",
            "        found = [_whole(q, k, v, scale) for q, k, v in first]",
            "        found = [_whole(q, first[0][1], first[0][2], scale) for q, _, _ in first]",
        ),
        (
            "torch: the window of the kernel for sequences of different lengths is one longer",
            "        window_size=(-1 if window is None else window - 1, 0),",
            "        window_size=(-1 if window is None else window, 0),",
        ),
    ),
    *planted(
        TORCH + "kept_attention.py",
        ("tests/torch/test_decoder_blocks.py",),
        (
            "torch: attention that is kept is computed again",
            "        yield from scope(lambda _, learns: next(kept).detach().requires_grad_(learns))",
            "        yield from scope(lambda attend, _: attend())",
        ),
        (
            "torch: no gradient goes through attention that is kept",
            "next(kept).detach().requires_grad_(learns)",
            "next(kept).detach()",
        ),
    ),
    *planted(
        "areal_x/protocols/expert_load.py",
        ("tests/protocols/test_expert_load.py",),
        (
            "experts above the mean load gain",
            "xp.sign(xp.mean(load, axis=-1, keepdims=True) - load)",
            "xp.sign(load - xp.mean(load, axis=-1, keepdims=True))",
        ),
        (
            "the mean load is that of all layers",
            "xp.sign(xp.mean(load, axis=-1, keepdims=True) - load)",
            "xp.sign(xp.mean(load) - load)",
        ),
    ),
    *planted(
        JAX + "update.py",
        BALANCED,
        (
            "JAX: only the last micro-batch's load counts",
            "        loads = jax.tree.map(jnp.add, loads, load)",
            "        loads = load",
        ),
        ("JAX: a skipped step moves biases", "jnp.where(finite, moved, bias)", "moved"),
    ),
    *planted(
        JAX + "forward.py",
        BALANCED,
        (
            "JAX: prompts count in the load",
            "            rows.ends,\n            batch.mask,\n",
            "            rows.ends,\n",
        ),
    ),
    *planted(
        JAX + "pipeline.py",
        ("tests/jax/test_pipeline.py",),
        (
            "JAX: turns without rows count in the load",
            "use.load * has_rows[:, None, None]",
            "use.load",
        ),
        (
            "JAX: the last stage sends another row round than the first needs",
            "kept[:, (number + stages - 1) % around]",
            "kept[:, number % around]",
        ),
        (
            "JAX: with fewer rows than stages a round begins too early",
            "around = max(rows, stages)",
            "around = rows",
        ),
    ),
    *planted(
        JAX + "architecture.py",
        ("tests/jax/test_pipeline.py",),
        (
            "JAX: stages have neighbouring groups",
            "key=lambda layer: (layer // each % stages, layer)",
            "key=lambda layer: layer",
        ),
    ),
    *planted(
        JAX + "lora.py",
        ("tests/jax/test_pipeline.py",),
        (
            "JAX: a run's first adapters depend on the mesh",
            'stored( trained, ("layers", name), uniform * x.shape[-2] ** -0.5 )',
            "uniform * x.shape[-2] ** -0.5",
        ),
    ),
    *planted(
        TORCH + "experts.py",
        BALANCED,
        (
            "torch: prompts count in the load",
            "torch.where(trained[:, None], chosen, count)",
            "chosen",
        ),
        (
            "torch: of replayed tokens the router's own experts count",
            "        chosen = torch.where(recorded >= 0, recorded, chosen)\n        weights = weighing.weights(scores, chosen)",
            "        weights = weighing.weights(scores, torch.where(recorded >= 0, recorded, chosen))",
        ),
    ),
    *planted(
        TORCH + "sampler.py",
        BALANCED,
        (
            "torch: the sampler keeps the biases that it began with",
            "in named_tensors(self.model).items():",
            "in {name: x for name, x in named_tensors(self.model).items() if 'correction' not in name}.items():",
        ),
    ),
    *planted(
        TORCH + "trainer.py",
        BALANCED,
        (
            "torch: biases are published in the compute precision",
            "exact = name.endswith(experts.CORRECTION) or not x.is_floating_point()",
            "exact = not x.is_floating_point()",
        ),
        (
            "torch: a skipped step moves biases",
            '        finite = np.isfinite([results["loss"], norm]).all()\n',
            '        finite = np.isfinite([results["loss"], norm]).all()\n'
            "        experts.move_corrections(self.model, load, self.config.balance_rate * (not finite))\n",
        ),
    ),
    *planted(
        TORCH + "update.py",
        ("tests/torch/test_processes.py::test_several_processes_learn_what_one_does[stages-experts]",),
        (
            "torch: each process moves biases by its own load",
            "sum_over_tokens(torch.stack(own), self.mesh)",
            "torch.stack(own)",
        ),
    ),
    *planted(
        "areal_x/engines/fleet/proof/regions.py",
        ("tests/engines/fleet/test_regions.py",),
        (
            "a router's correction that is a buffer is not proved",
            "    yield from model.named_buffers(remove_duplicate=False)",
            "    yield from ()",
        ),
    ),
    *planted(
        TORCH + "loading.py",
        ("tests/test_models_refused.py",),
        (
            "torch: check draws the weights of a model that is still on the hub",
            "            if promised:\n",
            "            if True:\n",
        ),
    ),
    *planted(
        "tests/thorough.py",
        ("tests/test_quick.py",),
        (
            "a case is in no share",
            "        of_share = [crc32(item.nodeid.encode()) % shares == share - 1 for item in items]",
            "        of_share = [crc32(item.nodeid.encode()) % (shares + 1) == share - 1 for item in items]",
        ),
    ),
]
