"""What an SGLang server refuses because of how it was started, and how to start it."""

from __future__ import annotations

from pathlib import Path

from areal_x.errors import UserError
from areal_x.hf.config_defaults import vocabulary_of


def explained(model: Path, server: str, endpoint: str, status: int, words: str) -> UserError | None:
    """Returns what the user must change (areal_x.engines.fleet.calls.Explanation). model: directory
    of the served model."""
    if status in (401, 403):
        return UserError(
            f"{server} refused the key for {endpoint}: set the environment variables that"
            " sglang.key_variable and sglang.admin_key_variable name to the server's keys"
        )
    if status == 404:
        return UserError(
            f"{server} does not offer {endpoint} ({status} {words}): give the address of an SGLang"
            " server without a path, like http://127.0.0.1:30000"
        )
    if "--sampling-mask-max-tokens" in words:
        return UserError(
            f"{server} reports fewer kept tokens than sampling.top_p, top_k or min_p may keep:"
            f" start it with --sampling-mask-max-tokens {vocabulary_of(model)}, or with at least"
            " sampling.top_k"
        )
    if "--enable-lora" in words:
        return UserError(
            f"{server} has no adapters enabled: start it with --enable-lora --max-lora-rank RANK"
            " --lora-target-modules all, with at least lora.rank"
        )
    return None
