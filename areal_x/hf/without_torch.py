"""Imports transformers as in an environment without torch: its configs and tokenizers, and no model.

With torch installed, transformers 5 imports it, and the code of a model, to read a config: the
decorator of each config class looks up its model for a docstring. That takes more CPU time than all
of `areal-x check` otherwise.
"""

from __future__ import annotations

import os
import sys

ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def import_transformers_without_torch() -> None:
    """Imports transformers so that it considers torch missing for the rest of this process; torch
    itself can still be imported. Does nothing if either is imported already.

    Only for a process that ends without using a model of transformers: its model classes raise
    ImportError from here on.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    advice = os.environ.get(ADVICE)
    os.environ[ADVICE] = "1"  # it would print that torch was not found
    # None: the import system answers that there is no such module
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from transformers.utils import is_torch_available

        is_torch_available()  # which keeps its first answer
    finally:
        del sys.modules["torch"]
        if advice is None:
            del os.environ[ADVICE]
        else:
            os.environ[ADVICE] = advice
