"""The tokenizer of a model directory, as transformers loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_x.errors import UserError


def load_tokenizer(directory: Path) -> Any:
    """Raises: UserError where the directory holds no tokenizer that transformers can load."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(
            f"{directory} has no tokenizer that loads ({reason}): copy tokenizer.json and its config there"
        ) from error
