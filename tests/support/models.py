"""Small random checkpoints of the families that are tested, each with what makes its family special."""

from pathlib import Path
from typing import Any

import torch
from latent_moe import LatentMoeConfig
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    HunYuanMoEV1Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 128
# Hidden states stay within 4, and float32 logits within 2e-6 of those in float64, so that steps whose sums run in
# another order can be compared within 1e-5. At twice the range they reach 20, and float32 alone errs by up to 1.6e-5.
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def _qwen3_moe(**sizes: Any) -> PreTrainedConfig:
    settings = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        **COMMON,
    } | sizes
    return Qwen3MoeConfig(**settings)


def _mixtral(**sizes: Any) -> PreTrainedConfig:
    settings = {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 24,
        **COMMON,
    } | sizes
    return MixtralConfig(**settings)


def _olmoe(**sizes: Any) -> PreTrainedConfig:
    settings = {
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "intermediate_size": 32,
        **COMMON,
    } | sizes
    return OlmoeConfig(**settings)


def _deepseek_v3(**sizes: Any) -> PreTrainedConfig:
    """Latent attention (K and V differ in width), group-limited sigmoid routing, a shared expert, a dense layer."""
    settings = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        **COMMON,
    } | sizes
    return DeepseekV3Config(**settings)


def _gpt_oss(**sizes: Any) -> PreTrainedConfig:
    """Biased experts, attention sinks, every other layer with a sliding window, YaRN."""
    settings = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        **COMMON,
    } | sizes
    return GptOssConfig(**settings)


def _hunyuan_v1_moe(**sizes: Any) -> PreTrainedConfig:
    """A list of experts a token, one number a layer; a router in float32, a shared expert."""
    settings = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "moe_topk": [1, 8, 2],
        "intermediate_size": 32,
        **COMMON,
    } | sizes
    return HunYuanMoEV1Config(**settings)


def _latent_moe(**sizes: Any) -> PreTrainedConfig:
    settings = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        **COMMON,
    } | sizes
    return LatentMoeConfig(**settings)


def _qwen2_moe(**sizes: Any) -> PreTrainedConfig:
    """Two layers with a sliding window, then one without."""
    settings = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
        "shared_expert_intermediate_size": 32,
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        **COMMON,
    } | sizes
    return Qwen2MoeConfig(**settings)


def _phimoe(**sizes: Any) -> PreTrainedConfig:
    settings = {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 8,
        **COMMON,
    } | sizes
    return PhimoeConfig(**settings)


FAMILIES = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
# Families whose MoE layers are not all of one shape.
LAYERS_DIFFER = {"hunyuan_v1_moe": _hunyuan_v1_moe, "test_latent_moe": _latent_moe}
# Families that do not tell their attention of its window: only the masks that they build have it.
WINDOW_IN_MASK = {"qwen2_moe": _qwen2_moe, "phimoe": _phimoe}
ALL_FAMILIES = {**FAMILIES, **LAYERS_DIFFER, **WINDOW_IN_MASK}


def replace_weights(folder: Path) -> str:
    """Put other values into the first weight file, whose header and size stay; returns its name."""
    file = min(folder.glob("*.safetensors"))
    other = file.with_suffix(".new")
    save_file({name: -tensor for name, tensor in load_file(file).items()}, other, {"format": "pt"})
    other.replace(file)
    return file.name


def save_random_model(
    family: str,
    folder: Path,
    max_shard_size: str = "400KB",
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> None:
    """Write a random checkpoint, in several shards; biases and sinks are random too, so that they count.

    Args:
        family: one of `ALL_FAMILIES`.
        folder: where to.
        max_shard_size: as Transformers takes it.
        dtype: of the weights.
        sizes: settings of the family's configuration that differ from those above.
    """
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(ALL_FAMILIES[family](**sizes), dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "bias" in name or "sinks" in name:
            torch.nn.init.normal_(tensor, std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
