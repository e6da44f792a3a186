"""The forward pass of the models of areal_x.testing.models in numpy, formula by formula and in
float64: what backends are compared with, independent of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int

from areal_x.hf import model_dir

Tensors = Mapping[str, np.ndarray]


class Reference:
    """A Qwen3 of the tensors and config of a directory, or of other tensors of the same names."""

    def __init__(self, directory: Path, tensors: Tensors | None = None) -> None:
        self.config: dict[str, Any] = model_dir.read_config(directory)
        read = dict(model_dir.read_tensors(directory)) if tensors is None else tensors
        self.tensors = {name: x.astype(np.float64) for name, x in read.items()}

    def logprobs(
        self, tokens: Int[np.ndarray, " length"], temperature: float = 1.0
    ) -> Float64[np.ndarray, " length"]:
        """Returns each token's log-probability given those before it; 0 for the first."""
        if len(tokens) == 1:
            return np.zeros(1)
        table = self.distributions(tokens, temperature)
        return np.concatenate([[0.0], table[np.arange(len(tokens) - 1), tokens[1:]]])

    def distributions(
        self, tokens: Int[np.ndarray, " length"], temperature: float = 1.0
    ) -> Float64[np.ndarray, "length vocabulary"]:
        """Returns the log-probabilities of what follows each token."""
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        logits = self.hidden(tokens) @ head.T / temperature
        logits -= logits.max(-1, keepdims=True)
        normalised: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return normalised

    def scores(self, tokens: Int[np.ndarray, " length"]) -> Float64[np.ndarray, " length"]:
        """Returns the output of the `score` head after each token."""
        scores: np.ndarray = self.hidden(tokens) @ self.tensors["score.weight"][0]
        return scores

    def hidden(self, tokens: Int[np.ndarray, " length"]) -> Float64[np.ndarray, "length hidden"]:
        """Returns the last hidden states of one sequence."""
        c, t = self.config, self.tensors
        length, head_dim = len(tokens), c["head_dim"]
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        cos, sin = self._rotation(length)
        hidden_keys = np.triu(np.full((length, length), -np.inf), 1)
        x = t["model.embed_tokens.weight"][tokens]
        for layer in range(c["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            y = self._norm(x, t[p + "input_layernorm.weight"])
            q, k, v = (y @ t[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv")
            q, k, v = (z.reshape(length, -1, head_dim).swapaxes(0, 1) for z in (q, k, v))
            q = _rotate(self._norm(q, t[p + "self_attn.q_norm.weight"]), cos, sin)
            k = _rotate(self._norm(k, t[p + "self_attn.k_norm.weight"]), cos, sin)
            k, v = (np.repeat(z, heads // kv_heads, axis=0) for z in (k, v))
            scores = q @ k.swapaxes(1, 2) / np.sqrt(head_dim) + hidden_keys
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended = (weights / weights.sum(-1, keepdims=True)) @ v
            joined = attended.swapaxes(0, 1).reshape(length, -1)
            x = x + joined @ t[p + "self_attn.o_proj.weight"].T
            y = self._norm(x, t[p + "post_attention_layernorm.weight"])
            gate, up = (y @ t[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ t[p + "mlp.down_proj.weight"].T
        return self._norm(x, t["model.norm.weight"])

    def _norm(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        mean = np.mean(x**2, axis=-1, keepdims=True)
        normed: np.ndarray = x / np.sqrt(mean + self.config["rms_norm_eps"]) * scale
        return normed

    def _rotation(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns cosine and sine [length, head_dim / 2] of the rotary angles."""
        head_dim = self.config["head_dim"]
        exponents = np.arange(0, head_dim, 2) / head_dim
        angles = np.arange(length)[:, None] * self.config["rope_theta"] ** -exponents
        return np.cos(angles), np.sin(angles)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
