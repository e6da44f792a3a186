"""Tiny random models of every causal architecture of transformers, compared between the torch backend and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal_x.errors import UserError
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.sampler import SlotRequest
from areal_x_torch import loading
from areal_x_torch.attention import sdpa
from areal_x_torch.model import PackedRow, head, hidden_states
from areal_x_torch.sampler import Sampler
from areal_x_torch.segments import Segments

CPU = torch.device("cpu")
LENGTHS = (31, 7, 44, 2, 23)  # most are longer than the window
WINDOW, CLOSE = 5, 1e-4
LAYERS = 4
LARGEST = 5_000_000  # parameters of a tiny model
# Sizes by the names that configs give them; each is set if a config has it.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), 64),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "moe_latent_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "global_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "swa_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "n_shared_experts"), 1),
    **dict.fromkeys(
        ("sliding_window", "window_size", "keep_window_size", "sliding_window_size", "attention_window_size"), WINDOW
    ),
    **dict.fromkeys(("local_attention", "attention_chunk_size", "index_topk"), WINDOW),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "hidden_size_per_layer_input", "mamba_d_ssm"), 16),
    **dict.fromkeys(("index_n_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("vocab_size_per_layer_input",), 64),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 1),
    "pad_token_id": None,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "is_decoder": True,
}


def tiny(model_type: str) -> PreTrainedConfig:
    """A config of a few small layers, with windows where the architecture has any."""
    kind = CONFIG_MAPPING[model_type]
    known = vars(kind())
    kind = type(kind().get_text_config()) if "text_config" in known else kind
    known = vars(kind())
    given = {name: size for name, size in SIZES.items() if name in known and not isinstance(known[name], list | dict)}
    for name, x in known.items():
        if isinstance(x, list | tuple) and len(x) == known.get("num_hidden_layers") and x:
            kinds = list(dict.fromkeys(x))
            given[name] = type(x)((kinds * LAYERS)[:LAYERS])
    if given.get("layer_types") and set(given["layer_types"]) == {"full_attention"} and "sliding_window" in given:
        given["layer_types"] = ["full_attention", "sliding_attention"] * (LAYERS // 2)
    return kind(**given | OWN.get(kind.model_type, {}))


# Settings of single architectures that the sizes above would make inconsistent.
LATENT = {"num_key_value_heads": 4}  # keys and values of all heads come from one vector
PADDED = {"pad_token_id": 0}
SCALED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.4, "logits_scaling": 4.0}
SHARED_KV = {
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "laurel_rank": 8,
}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"), LATENT),
    "granite": SCALED,
    "gemma3n_text": {**SHARED_KV, "intermediate_size": [48] * LAYERS, "activation_sparsity_pattern": [0.0] * LAYERS},
    "lfm2": {"layer_types": ["full_attention"] * LAYERS},
    "lfm2_moe": {"layer_types": ["full_attention"] * LAYERS},
    "phi4_multimodal": {"vision_config": {"hidden_size": 32}, "audio_config": {"hidden_size": 32}},
    **dict.fromkeys(("emu3_text_model", "modernbert-decoder"), PADDED),
    "roc_bert": {"concat_input": False, "enable_pronunciation": False, "enable_shape": False},
    "zaya": {"layer_types": ["hybrid"] * LAYERS, "num_experts_per_tok": 1},
}


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, x in model.named_parameters():
        torch.nn.init.normal_(x, 1.0 if x.ndim == 1 and ("norm" in name or "sink" in name) else 0.0, 0.2)
    return model


def chosen(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


@torch.inference_mode()
def compared(model_type: str, directory: Path) -> str:
    """Returns a sentence that begins with "agrees", "refused" (and the reason), "differs" or "not built". Uses one thread, as
    `reference_model` does."""
    torch.set_num_threads(1)
    try:
        made = random_model(tiny(model_type))
        made.save_pretrained(directory)
    except Exception as error:
        named = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        refused = "" if named._supports_attention_backend else "refused: its attention cannot be replaced; "
        return f"{refused}not built: {first_line(error)}"
    try:
        ours = loading.build(directory, "policy")
        loading.materialize(ours, CPU)
        loading.fill(ours, directory)
    except UserError as error:
        return f"refused: {str(error).removeprefix(str(directory)).strip()}"
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    theirs.get_input_embeddings().padding_idx = None
    rng = np.random.default_rng(0)
    sequences = [torch.from_numpy(rng.integers(2, 64, n)) for n in LENGTHS]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    states = hidden_states(ours, PackedRow(torch.cat(sequences), positions, Segments.of(LENGTHS, sdpa, CPU)))
    packed = [chosen(x, s) for x, s in zip(head(ours).logits(states).split(LENGTHS), sequences, strict=True)]
    alone = [chosen(theirs(s[None], use_cache=False).logits[0], s) for s in sequences]
    far = max(float((x - y).abs().max()) for x, y in zip(packed, alone, strict=True))
    if far > CLOSE:
        return f"differs: {far:.2g} nats in packed rows"
    try:
        sampler = Sampler(ours, 4, 96, torch.float32, lanes=1)
    except (UserError, NotImplementedError) as error:
        return f"agrees ({far:.0e}); the embedded sampler refuses: {error}"
    sampler.load({name: x.clone() for name, x in loading.named_tensors(ours).items()})
    sampling = SamplingParams(max_tokens=20)
    prompts = [s[: min(len(s), 30)] for s in sequences[:4]]
    sampler.fill([SlotRequest(i, p.numpy().astype(np.int32), 0, sampling, i) for i, p in enumerate(prompts)])
    drawn = sampler.decode(20, 5)
    worst = 0.0
    for i, prompt in enumerate(prompts):
        whole = torch.cat([prompt, torch.from_numpy(drawn.tokens[i, : drawn.counts[i]].astype(np.int64))])
        expected = chosen(theirs(whole[None], use_cache=False).logits[0], whole)[len(prompt) - 1 :]
        worst = max(worst, float((torch.from_numpy(drawn.logprobs[i, : drawn.counts[i]]) - expected).abs().max()))
    return f"{'agrees' if worst < CLOSE else 'differs'} ({far:.0e}; sampled {worst:.0e})"


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"
