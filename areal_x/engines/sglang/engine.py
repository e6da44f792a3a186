"""The engine over SGLang servers."""

from __future__ import annotations

from typing import ClassVar

from areal_x.engines.fleet.engine import FleetEngine
from areal_x.engines.sglang.client import SGLangClient
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.installed import installed
from areal_x.engines.sglang.server import Launch
from areal_x.engines.sglang.weights import is_tied
from areal_x.errors import ConfigError
from areal_x.hf.model_dir import read_config

# Models that SGLang 0.5.23 serves with an uninitialised head if it is tied to the embedding.
UNTIED = ("Qwen3MoeForCausalLM",)


class SGLangEngine(FleetEngine[SGLangConfig]):
    """The engine over SGLang servers."""

    context_flag: ClassVar[str] = SGLangClient.context_flag

    def check(self, trainer_here: bool) -> None:
        if self.experts:
            wanted = "False with train.engine = 'sglang', which does not return them yet"
            raise ConfigError("trainer.replay_experts", True, wanted)
        architectures = read_config(self.model).get("architectures") or []
        if is_tied(self.model) and set(UNTIED) & set(architectures):
            wanted = (
                f"a model with a head of its own: SGLang serves a {architectures[0]} whose head is"
                " the embedding (tie_word_embeddings) with an uninitialised head"
            )
            raise ConfigError("model.path", str(self.model), wanted)
        if not self.config.urls and trainer_here:  # else the nodes that serve need it
            installed(self.config.python)

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


def unprotected_warning(url: str) -> str:
    """Returns a warning about a user's server that accepts control requests without a key."""
    return (
        f"anyone who can reach the SGLang server at {url} can replace its weights, without a key:"
        " start it with --api-key and --admin-api-key; see docs/security.md"
    )
