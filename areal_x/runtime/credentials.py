"""Credentials in the environment of a run that its child processes do not get if they run code of
others: with them a reward that a model's output leads astray could reach the cluster or the servers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

RAY_TOKEN = "RAY_AUTH_TOKEN"
"""Runs code on every node of the Ray cluster. A run that starts a cluster for itself sets it."""

VLLM_KEY = "VLLM_API_KEY"
"""Replaces the weights of the vLLM servers of vllm.urls."""

SGLANG_KEY = "SGLANG_API_KEY"
"""Opens the SGLang servers of sglang.urls."""

SGLANG_ADMIN_KEY = "SGLANG_ADMIN_API_KEY"
"""Replaces the weights of the SGLang servers of sglang.urls."""

GATEWAY_KEY = "AREAL_X_GATEWAY_KEY"
"""Opens sessions of a run's gateway, and takes its episodes and their tasks."""

SECRETS = frozenset({RAY_TOKEN, VLLM_KEY, SGLANG_KEY, SGLANG_ADMIN_KEY, GATEWAY_KEY})


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of an environment that code of others may see."""
    return {name: x for name, x in environment.items() if name not in SECRETS}


def write_address(file: Path, url: str, key: str) -> None:
    """Writes the address and key of a server to a file that is readable by this user alone from its
    first byte."""
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump({"url": url, "key": key}, out)
    new.replace(file)
