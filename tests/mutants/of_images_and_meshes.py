"""Bugs in images that see themselves whole, in layers split over tensor groups, and in what servers are given."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

JAX, TORCH = "backends/jax/areal_x_jax/", "backends/torch/areal_x_torch/"
SQUARES = ("tests/hf/test_square_images.py",)
MESHES = "tests/torch/test_family_meshes.py::test_two_processes_train_each_family_as_one_does"

MUTANTS: list[Mutant] = [
    *planted(
        JAX + "prompt_images.py",
        ("tests/jax/test_prompt_images.py",),
        (
            "JAX: the features of images that older weights gave are sampled with",
            '            self._params = params["vision"]\n            self._found.clear()',
            '            self._params = params["vision"]',
        ),
        (
            "JAX: each attempt of a group has its images encoded anew",
            "            if id(images) not in self._found:",
            "            if True:",
        ),
        (
            "JAX: what the tower adds to the outputs of the first layers is left out",
            "layer >= len(images.deepstack)",
            "layer >= 0",
        ),
    ),
    *planted(
        JAX + "decode_step.py",
        ("tests/jax/test_prompt_images.py",),
        (
            "JAX: what is sampled after images is counted as if they were text",
            "rows.length - 1 + rows.shift",
            "rows.length - 1",
        ),
    ),
    *planted(
        JAX + "prefill_chunks.py",
        ("tests/jax/test_prompt_images.py",),
        (
            "JAX: a chunk ends within an image whose tokens see each other",
            "stop = shown.before_image(stop)",
            "stop = max(shown.before_image(stop), stop)",
        ),
    ),
    *planted(
        "areal_x/runtime/distinct_images.py",
        ("tests/runtime/test_distinct_images.py",),
        (
            "images that agree in the patches that are compared first are one",
            "if _are_equal(self.images[number].patches, patches):",
            "if True:",
        ),
        (
            "a tall image is a wide one of the same patches",
            "image.grids.tobytes(), patches.dtype",
            'b"", patches.dtype',
        ),
    ),
    *planted(
        "areal_x/hf/image_cache.py",
        ("tests/hf/test_image_cache.py",),
        ("episodes that begin together each read their images", "        with turn:", "        if True:"),
    ),
    *planted(
        "areal_x/cluster/sent_batch.py",
        ("tests/cluster/test_dealing.py",),
        (
            "a node is sent the images of rows that others have",
            "{number: self.patches[number] for of_row in numbers for number in of_row}",
            "dict(self.patches)",
        ),
    ),
    *planted(
        "areal_x/lab/search.py",
        ("tests/lab/test_index.py",),
        (
            "a search reads the tokens of sequences with images where their patches are",
            '(*head.get("images", ()), *(images for *_, images in described))',
            "(images for *_, images in described)",
        ),
    ),
    *planted(
        JAX + "row_attention.py",
        ("tests/jax/test_sharding.py",),
        (
            "JAX: key heads that a tensor group shares come one after the other, not each beside its own",
            "jnp.repeat(x, lcm(heads, devices) // heads, axis=2)",
            "jnp.concatenate([x] * (lcm(heads, devices) // heads), axis=2)",
        ),
    ),
    *planted(
        "areal_x/hf/adapters.py",
        ("tests/test_export.py",),
        (
            "a family's square kernels of experts are taken for those of another",
            'dict.fromkeys(("gpt_oss", "llama4", "llama4_text"), True)',
            'dict.fromkeys(("gpt_oss", "llama4", "llama4_text"), False)',
        ),
    ),
    *planted(
        "areal_x/engines/vllm/features.py",
        ("tests/hf/test_row_images.py", "tests/hf/test_tiled_images.py", "tests/hf/test_placed_images.py"),
        (
            "servers are given the first row of an image's tokens as all of them",
            "first, stop = spans[row][0], spans[row + rows - 1][1]",
            "first, stop = spans[row]",
        ),
        (
            "a tile is sent as one of an image of four",
            '"aspect_ratios": np.array([1, 1])',
            '"aspect_ratios": np.array([2, 2])',
        ),
        (
            "servers on a CPU get images whose tokens see each other",
            "if form.whole and not config.urls and is_cpu_build():",
            "if form.whole and not form.near and not config.urls and is_cpu_build():",
        ),
        (
            "servers that may lack the plugin get images with text between rows",
            "if form.rows and config.urls and",
            "if form.rows and not config.urls and",
        ),
    ),
    *planted(
        "areal_x/hf/image_format.py",
        ("tests/hf/test_placed_images.py",),
        (
            "servers are given a patch's row as its column",
            "squares.transpose(1, 3, 2, 4, 0).reshape(-1, 2)[:, ::-1]",
            "squares.transpose(1, 3, 2, 4, 0).reshape(-1, 2)",
        ),
    ),
    *planted(
        "areal_x/engines/vllm/image_rows.py",
        ("tests/hf/test_row_images.py",),
        (
            "tokens of text between an image's rows are taken for the image's",
            "torch.tensor(own) == config.image_token_id",
            "torch.tensor(own) >= 0",
        ),
        (
            "what vLLM's own processor marked is marked anew",
            "if place.is_embed is not None:",
            "if place.is_embed is None and not place.length:",
        ),
    ),
    *planted(
        "areal_x/engines/vllm/server.py",
        ("tests/engines/vllm/test_vllm_images.py::test_servers_scale_the_queries_of_llama_4_as_its_config_says",),
        ("servers scale the queries of every Llama 4", "return bool(config.get(TUNED, True))", "return True"),
        (
            "vLLM decides whether to scale Llama 4's queries",
            "if (tuned := tunes_temperature(launch.model)) is not None:",
            "if False:",
        ),
    ),
    *planted(
        "areal_x/engines/fleet/proof/worker.py",
        ("tests/engines/fleet/test_regions.py",),
        ("a single number is not proved", "width = len(own[-1]) if own else 1", "width = len(own[-1]) if own else 0"),
    ),
    *planted(
        "areal_x/hf/image_format.py",
        SQUARES,
        (
            "the patches of a token are those of a row, not of a square",
            "cut.transpose(0, 2, 5, 3, 6, 1, 4, 7)",
            "cut.transpose(0, 2, 3, 5, 6, 1, 4, 7)",
        ),
    ),
    *planted(
        "areal_x/hf/image_reader.py",
        SQUARES,
        (
            "an image's tokens stand in the text without the line breaks around them",
            'f"\\n\\n{begin}{image * n}{end}\\n\\n{x}"',
            'f"{begin}{image * n}{end}{x}"',
        ),
    ),
    *planted(
        TORCH + "segments.py",
        ("tests/torch/test_attention.py",),
        (
            "torch: the last token of an image is hidden from those before it",
            "last[(query_at >= first) & (query_at < end)] = end - 1",
            "last[(query_at >= first) & (query_at < end)] = end - 2",
        ),
    ),
    *planted(
        TORCH + "attention.py",
        ("tests/torch/test_attention.py",),
        (
            "torch: a block of queries does not see the rest of its image",
            "        until = max([stop, *(b for _, b in near)])",
            "        until = stop",
        ),
    ),
    *planted(
        TORCH + "kv_cache.py",
        ("tests/torch/test_prompt_images.py",),
        (
            "torch: an image is causal in a prefill",
            "row[0, first - self.start : end - self.start] = end - 1",
            "pass",
        ),
    ),
    *planted(
        TORCH + "prefill.py",
        ("tests/torch/test_prompt_images.py",),
        (
            "torch: a prefill's chunk ends within an image",
            "            if first < stop < end:",
            "            if first < stop < first:",
        ),
    ),
    *planted(
        JAX + "dense_attention.py",
        ("tests/jax/test_attention.py",),
        (
            "JAX: text of one row sees all text after it as a block",
            "((of_queries == of_keys) & (of_queries > 0))",
            "(of_queries == of_keys)",
        ),
    ),
    *planted(
        JAX + "blocked_attention.py",
        ("tests/jax/test_attention.py",),
        (
            "JAX: blocks of keys after a query are passed over though its image reaches them",
            "        meet |= _ids_meet(*ids.blocks)",
            "        pass",
        ),
    ),
    *planted(
        TORCH + "tensor_split.py",
        ("tests/torch/test_tensor_split.py",),
        (
            "torch: GLM-4.5's norms are trained on one process's heads",
            "                styles[name] = SUMMED",
            "                pass",
        ),
        (
            "torch: a parameter of an attention itself is taken for a norm of single heads",
            '            elif name != whole and ( below == "act_fn"',
            '            elif True and ( below == "act_fn"',
        ),
        (
            "torch: a key head that processes share is trained on the queries of one",
            "    return CopyToGroup.apply(outputs, group).narrow(-1, own * width, width)",
            "    return outputs.narrow(-1, own * width, width)",
        ),
    ),
    *planted(
        TORCH + "split_linear.py",
        (f"{MESHES}[phi3]",),
        (
            "torch: a process computes with the part of a fused layer that it holds",
            "        return exchanged_rows(part, self.fused, self.others)",
            "        return part",
        ),
    ),
    *planted(
        TORCH + "sequence_parallel.py",
        (f"{MESHES}[phi3]",),
        (
            "torch: norms are trained on the gradient of one process's tokens",
            "                summed += child.parameters()",
            "                pass",
        ),
    ),
    *planted(
        "areal_x/engines/vllm/loading.py",
        ("tests/engines/vllm/test_loading.py",),
        (
            "a version without the factors of Gemma 4's layers is taken for whole",
            'FILLED_BUFFERS = (".e_score_correction_bias", ".layer_scalar")',
            'FILLED_BUFFERS = (".e_score_correction_bias",)',
        ),
    ),
    *planted(
        "areal_x/engines/sglang/engine.py",
        ("tests/engines/sglang/test_sglang_heads.py",),
        (
            "SGLang serves a tied Mixtral",
            '    "MixtralForCausalLM",\n',
            "",
        ),
    ),
    *planted(
        "areal_x/engines/sglang/weights.py",
        ("tests/engines/sglang/test_sglang_heads.py",),
        (
            "a Gemma whose config does not say so has a head of its own",
            "return HEAD not in served_shapes(model) if tied is None else bool(tied)",
            "return bool(tied)",
        ),
    ),
    *planted(
        "areal_x/lab/app.py",
        ("tests/lab/test_app.py",),
        (
            "the page answers whoever has the beginning of its key",
            "elif not hmac.compare_digest(given.encode(), key.encode()):",
            "elif not key.startswith(given):",
        ),
        ("the page answers under any name of this machine", "        if host not in hosts():", "        if not host:"),
        (
            "other pages may write notes",
            'elif origin and origin.removeprefix("http://") != host:',
            'elif origin and "://" not in origin:',
        ),
    ),
    *planted(
        "areal_x/lab/index.py",
        ("tests/lab/test_index.py",),
        (
            "a group that was in flight is never looked at again",
            "                self._read_open(connection)\n",
            "",
        ),
        (
            "pruned groups stay in the list",
            "            status[gone] = PRUNED",
            "            pass",
        ),
    ),
]
