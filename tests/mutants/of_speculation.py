"""Bugs by which guesses would change what is sampled, or save nothing."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

JAX, TORCH = "backends/jax/areal_x_jax/", "backends/torch/areal_x_torch/"
FILE = "tests/engines/test_speculation.py"
RULES = tuple(
    f"{FILE}::test_{name}"
    for name in (
        "the_newest_place_of_the_longest_match_is_looked_up",
        "positions_count_as_long_as_the_guess_before_them_was_right",
    )
)


def of(name: str, case: str) -> tuple[str, ...]:
    return (f"{FILE}::test_{name}[{case}]",)


SAME, COUNTED = "the_same_seeds_sample_the_same_tokens_as_without", "guesses_save_passes_and_are_counted"
KINDS = "every_kind_of_attention_samples_the_same_tokens"
OF_SERVERS = ("tests/engines/fleet/test_fleet_speculation.py",)

MUTANTS: list[Mutant] = [
    *planted(
        "areal_x/engines/speculation.py",
        RULES,
        ("a wrong guess is taken", "(sampled[:, :-1] == guessed) & ~ends", "(guessed >= 0) & ~ends"),
        ("a guess goes on past a stop token", " == guessed) & ~ends[:, :-1]", " == guessed)"),
        (
            "a guess yields one token more than was asked for",
            "(xp.arange(sampled.shape[1]) < left[:, None])",
            "(xp.arange(sampled.shape[1]) <= left[:, None])",
        ),
        ("what follows the end of a sequence is looked up", "alike = columns < newest ", "alike = columns <= newest "),
    ),
    *planted(
        TORCH + "sampler.py",
        of(SAME, "torch-ngram-truncated"),
        (
            "torch: all positions of a pass are sampled with the first one's number",
            "torch.from_numpy(uniforms.reshape(-1, 1))",
            "torch.from_numpy(uniforms[:, :1].repeat(width, 1).reshape(-1, 1))",
        ),
        (
            "torch: what is kept is reported for guesses that were not taken, too",
            "            mask &= torch.from_numpy(counts.reshape(-1, 1)).to(device)\n",
            "",
        ),
    ),
    *planted(
        TORCH + "kv_cache.py",
        of(SAME, "torch-ngram-truncated"),
        (
            "torch: the queries of a pass see each other's columns",
            "mask = mask.repeat(1, 1, group, 1)",
            "mask = mask.repeat_interleave(group, 2)",
        ),
    ),
    *planted(
        TORCH + "speculation.py",
        of(COUNTED, "torch-draft"),
        (
            "torch: the last guess is missing from the draft's cache",
            "for ahead in range(tokens + 1):",
            "for ahead in range(tokens):",
        ),
    ),
    *planted(
        JAX + "kv_cache.py",
        of(SAME, "jax-ngram-truncated"),
        (
            "JAX: the queries of a pass see each other's columns",
            "bias = jnp.repeat(jnp.where(near, 0.0, HIDDEN), group, axis=1)[:, None]",
            "bias = jnp.tile(jnp.where(near, 0.0, HIDDEN), (1, group, 1))[:, None]",
        ),
    ),
    *planted(
        JAX + "speculation.py",
        of(SAME, "jax-ngram-truncated"),
        (
            "JAX: all positions of a pass are sampled with the first one's number",
            "(rows.generated[:, None] + ahead).reshape(-1))",
            "(rows.generated[:, None] + 0 * ahead).reshape(-1))",
        ),
        (
            "JAX: a pass is written one column further than it is read",
            "kv_cache.write_columns(layer, key, value, columns),",
            "kv_cache.write_columns(layer, key, value, columns + 1),",
        ),
    ),
    *planted(
        TORCH + "kv_cache.py",
        of(KINDS, "torch-qwen3_5_text-0"),
        ("torch: a rejected token advances a state", "torch.where((token < counts)", "torch.where((token <= counts)"),
    ),
    *planted(
        JAX + "recurrent_cache.py",
        of(KINDS, "jax-qwen3_5_text-0"),
        ("JAX: a rejected token advances a state", "jnp.where((at < counts)", "jnp.where((at <= counts)"),
    ),
    *planted(
        "areal_x/engines/fleet/speculation.py",
        OF_SERVERS,
        (
            "servers that guess truncate without a report",
            "    elif sampling is not None and sampling.truncates:",
            "    elif sampling is not None and sampling.truncates and config.urls:",
        ),
    ),
    *planted(
        "areal_x/engines/sglang/server.py",
        OF_SERVERS,
        ("SGLang guesses on a CPU, where it samples greedily", "    check_exact(speculation, cpu)\n", ""),
    ),
]
