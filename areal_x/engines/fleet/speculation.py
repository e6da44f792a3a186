"""Speculative decoding by servers: which settings they take, and what each program refuses.

Both programs keep the distribution, by rejection of guesses (arXiv 2211.17192) or by their like; the
tokens of one seed are others than without.
"""

from __future__ import annotations

from pathlib import Path

from areal_x.engines.fleet.config import FleetConfig
from areal_x.errors import ConfigError
from areal_x.hf.tokenizer import check_vocabulary
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.speculation import Speculation

# Why a server that speculates does not report what truncated sampling kept.
UNREPORTED = {
    "vllm": "vLLM refuses min_p beside guesses, and its check of guesses reports no kept tokens",
    "sglang": "SGLang refuses to report kept tokens beside guesses (return_sampling_mask)",
}


def check_run(
    speculation: Speculation,
    config: FleetConfig,
    sampling: SamplingParams | None,
    experts: bool = False,
    adapters: bool = False,
) -> None:
    """Raises: ConfigError for guesses that the servers of a run cannot check exactly. sampling: of its
    episodes, where it is known. experts: completions need the experts of each token. adapters: the
    servers load adapters."""
    if not speculation.active:
        return
    name, method = config.binding, speculation.method
    wanted = None
    if config.urls:
        wanted = (
            f"'none' with {name}.urls: servers that the run does not start guess as their own"
            " command lines tell them"
        )
    elif experts:
        wanted = "'none' with trainer.replay_experts, whose records are of tokens without guesses"
    elif adapters and name == "vllm":
        wanted = (
            "'none' with lora.rank and train.engine = 'vllm': the engine of vLLM dies of the requests"
            " by which servers with adapters are compared (logprob_token_ids) beside guesses; set"
            " lora.rank = 0"
        )
    elif sampling is not None and sampling.truncates:
        wanted = (
            "'none' with sampling.top_p, top_k or min_p and"
            f" train.engine = {name!r}: {UNREPORTED[name]}; the embedded engine does both"
        )
    elif name == "sglang" and method == "draft":
        wanted = (
            "'ngram' or 'none' with train.engine = 'sglang': SGLang loads published weights into the"
            " smaller model, too"
        )
    elif name == "sglang" and config.widths.data > 1:
        wanted = "'none' with sglang.data, whose attention SGLang does not divide beside guesses"
    if wanted is not None:
        raise ConfigError("speculation.method", method, wanted)


def check_draft(speculation: Speculation, model: Path) -> None:
    """Raises: ConfigError for a smaller model that is no directory, or has other tokens."""
    if speculation.method != "draft":
        return
    draft = Path(speculation.draft)
    if not (draft / "config.json").is_file():
        wanted = "the directory of a model, with its config.json"
        raise ConfigError("speculation.draft", speculation.draft, wanted)
    check_vocabulary("speculation.draft", draft, model)
