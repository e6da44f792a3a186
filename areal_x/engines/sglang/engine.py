"""The engine over SGLang servers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from areal_x.engines.fleet.engine import FleetEngine
from areal_x.engines.fleet.rotations import check_rotations
from areal_x.engines.sglang.client import SGLangClient
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.installed import installed
from areal_x.engines.sglang.server import Launch, check_exact
from areal_x.engines.sglang.weights import is_tied
from areal_x.errors import ConfigError
from areal_x.hf.model_dir import read_config

# Models for which SGLang 0.5.23 makes a head whatever their config says: a tied one is never filled.
OWN_HEAD = (
    "ArceeForCausalLM",
    "DeepseekForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "PersimmonForCausalLM",
    "PhiForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "StableLmForCausalLM",
)
# Models whose head it never reads, as that of the hub's is their embedding.
NO_HEAD = (
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3nForCausalLM",
)


class SGLangEngine(FleetEngine[SGLangConfig]):
    """The engine over SGLang servers."""

    context_flag: ClassVar[str] = SGLangClient.context_flag

    def check(self, trainer_here: bool) -> None:
        if self.experts:
            wanted = "False with train.engine = 'sglang', which does not return them yet"
            raise ConfigError("trainer.replay_experts", True, wanted)
        check_head(self.model)
        check_rotations(self.config.kind, self.model)
        if not self.config.urls and trainer_here:  # else the nodes that serve need it
            check_exact(self.speculation, installed(self.config.python).is_cpu)

    @property
    def prove_every(self) -> int:
        unprovable = self.lora is not None or self.config.urls
        return 0 if unprovable else self.config.prove_every

    def launch(self, number: int) -> Launch:
        return Launch(**self.launch_settings(number), python=self.config.python)

    def connect(self, url: str) -> SGLangClient:
        return SGLangClient(url, *self.config.keys(), self.model)

    def unprotected_warning(self, url: str) -> str:
        return unprotected_warning(url)


def check_head(model: Path) -> None:
    """Raises: ConfigError for a model that SGLang would serve with a head that nobody gave it."""
    architectures = set(read_config(model).get("architectures") or [])
    tied = is_tied(model)
    for architecture in sorted(architectures & set(OWN_HEAD if tied else NO_HEAD)):
        if tied:
            wanted, why = "a head of its own", f"fills no tied head of a {architecture}"
        else:
            wanted, why = "its embedding as head", f"reads no head of a {architecture}"
        wanted = f"a model with {wanted} (tie_word_embeddings = {not tied}), as SGLang {why}"
        raise ConfigError("model.path", str(model), wanted)


def unprotected_warning(url: str) -> str:
    """Returns a warning about a user's server that accepts control requests without a key."""
    return (
        f"anyone who can reach the SGLang server at {url} can replace its weights, without a key:"
        " start it with --api-key and --admin-api-key; see docs/security.md"
    )
