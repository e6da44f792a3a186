"""Every causal language model of transformers, tiny and random, in the torch backend: its results equal transformers', or it is
refused by name.

    python -m benchmarks.families [MODEL_TYPE …]

Packed rows with neighbours, sequences longer than every window; log-probabilities in fp32 against transformers' eager attention
on each sequence alone, and those of the embedded sampler against the same. Prints one line per model type: "agrees", "refused"
with the reason, or "differs", which must not occur.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families import compared, first_line


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for model_type in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with tempfile.TemporaryDirectory() as place:
            begun = time.perf_counter()
            try:
                found = compared(model_type, Path(place))
            except Exception as error:
                found = f"BROKEN: {first_line(error)}"
            print(f"{model_type:24} {time.perf_counter() - begun:5.1f} s  {found.replace(place, '')}", flush=True)


if __name__ == "__main__":
    main()
