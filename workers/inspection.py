"""What a model folder holds, found out without reading weights: shapes, sizes, dtype, and whether we can serve it.

The model is built on the meta device and run with two tokens, with recorders in the place of attention, masks and
experts (`ModelProbe`). So shapes come from the model code itself, for every family alike, and a layer that does not go
through the plug-in points, or attends by more than keys and values of its own request, is noticed before any actor
starts.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from ..dispatch.errors import CheckpointError
from .attention import ATTENTION_NAME, register_attention
from .generation_settings import generation_settings, read_generation_config
from .model_probe import ModelProbe, refuse_other_state
from .model_spec import ModelSpec, digest_of_config, digest_of_tokenizer

_PACKABLE_ROPE = ("default", "linear", "yarn", "llama3", "proportional")
_EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def quiet_transformers() -> None:
    """No progress bars and warnings of the library: what matters is checked here, and raised."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def read_config(path: str) -> PreTrainedConfig:
    """The folder's `config.json` as Transformers reads it, without touching any network.

    Raises:
        CheckpointError: the folder or its config is missing, or Transformers does not know the family.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"model={path!r} is not a folder; names of a hub are not downloaded: fetch the model first, with "
            "`hf download NAME --local-dir FOLDER`, onto every node"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"model={path!r} has no config.json: it is not a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"model={path!r}: its config.json cannot be read: {error}") from error


def resolve_dtype(config: PreTrainedConfig, requested: str | None) -> torch.dtype:
    """The requested dtype, or the one the checkpoint was saved in (float32 where it does not say)."""
    if requested is not None:
        return getattr(torch, requested)
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return dtype or torch.float32


def build_meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device with our attention in place; costs no memory."""
    register_attention()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)


def expert_parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """Module and parameter names of all experts with their expert-parallel style, one entry a layer."""
    return model._expand_parallel_plan(model.ep_plan)


def inspect_model(path: str, dtype: str | None = None) -> ModelSpec:
    """Find out what the folder holds, and refuse what cannot be served with the reason.

    Args:
        path: a folder in Hugging Face format; only `config.json` is needed.
        dtype: of weights and computation; `None` takes the checkpoint's.

    Raises:
        CheckpointError: missing folder, not a MoE model, or a family, RoPE type or quantisation that cannot be served.
    """
    quiet_transformers()
    config = read_config(path)
    _refuse_unsupported_config(path, config)
    torch_dtype = resolve_dtype(config, dtype)
    try:
        model = build_meta_model(config, torch_dtype)
    except Exception as error:
        raise CheckpointError(
            f"model={path!r}: no model of the family {config.model_type!r} can be made from its config.json: "
            f"{type(error).__name__}: {error}"
        ) from error
    plan = expert_parallel_plan(model)
    expert_modules = [name for name, style in plan.items() if style == "ep_dispatch_experts"]
    if not expert_modules:
        raise CheckpointError(
            f"model={path!r}: Transformers has no expert-parallel plan for the family {config.model_type!r}"
        )
    try:
        refuse_other_state(config)
        probe = ModelProbe(model, expert_modules)
        probe.run()
    except CheckpointError as error:
        raise CheckpointError(
            f"model={path!r}: the family {config.model_type!r} with this config.json cannot be served: {error}"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"model={path!r}: the family {config.model_type!r} does not run over packed batches: "
            f"{type(error).__name__}: {error}"
        ) from error
    text_config = config.get_text_config()
    num_layers = text_config.num_hidden_layers
    if sorted(probe.attention) != list(range(num_layers)):
        missing = sorted(set(range(num_layers)) - set(probe.attention))
        raise CheckpointError(
            f"model={path!r}: layers {missing} of the family {config.model_type!r} do not go through Transformers' "
            "attention interface (linear attention or state space layers), which the paged KV cache needs"
        )
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    expert_bytes = sum(size for name, size in sizes.items() if name in plan)
    return ModelSpec(
        path=path,
        model_type=config.model_type,
        dtype=str(torch_dtype).removeprefix("torch."),
        dtype_bytes=torch_dtype.itemsize,
        vocab_size=text_config.vocab_size,
        hidden_size=model.get_input_embeddings().embedding_dim,
        context_length=_context_length(text_config),
        eos_token_ids=_eos_token_ids(path),
        attention=tuple(probe.attention[layer] for layer in range(num_layers)),
        moe=tuple(probe.moe),
        dense_bytes=sum(sizes.values()) - expert_bytes,
        expert_bytes=expert_bytes,
        has_tokenizer=(Path(path) / "tokenizer_config.json").is_file() or (Path(path) / "tokenizer.json").is_file(),
        config_digest=digest_of_config(path),
        tokenizer_digest=digest_of_tokenizer(path),
        generation=generation_settings(path),
    )


def _refuse_unsupported_config(path: str, config: PreTrainedConfig) -> None:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"model={path!r}: the family {config.model_type!r} is not a causal language model")
    text_config = config.get_text_config()
    if not any(getattr(text_config, name, None) for name in _EXPERT_COUNT_NAMES):
        raise CheckpointError(
            f"model={path!r}: the family {config.model_type!r} is not a Mixture-of-Experts model that can be served "
            f"(its config.json sets none of {', '.join(_EXPERT_COUNT_NAMES)})"
        )
    if getattr(config, "quantization_config", None) is not None:
        method = config.quantization_config
        name = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", method)
        raise CheckpointError(
            f"model={path!r} is quantised ({name}): quantised checkpoints are not supported, use a bfloat16 one"
        )
    for rope_type in sorted(_rope_types(text_config)):
        if rope_type not in _PACKABLE_ROPE:
            raise CheckpointError(
                f"model={path!r} uses RoPE of type {rope_type!r}, whose frequencies depend on the longest sequence of "
                f"a batch: packed batches would corrupt the others. Supported: {', '.join(_PACKABLE_ROPE)}"
            )


def _context_length(text_config: PreTrainedConfig) -> int:
    """The most positions that a configuration speaks of: `max_position_embeddings`, or what YaRN stretches it to.

    YaRN alone states the length of pretraining and the factor apart: in Qwen's way of switching it on,
    `max_position_embeddings` stays the length without it. Of `llama3` the product says nothing (Llama 3.2 has twice as
    much as its context), and `linear` has only `max_position_embeddings`, which may hold the factor or not.
    """
    stretched = [
        int(original * factor)
        for mapping in _rope_mappings(text_config)
        if mapping.get("rope_type") == "yarn"
        for original, factor in [(mapping.get("original_max_position_embeddings"), mapping.get("factor"))]
        if isinstance(original, int) and isinstance(factor, (int, float)) and math.isfinite(original * factor)
    ]
    return max(text_config.max_position_embeddings, *stretched, 0)


def _rope_mappings(text_config: PreTrainedConfig) -> list[dict[str, Any]]:
    """RoPE parameters in use: `rope_parameters` is one mapping, or one a kind of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _rope_types(text_config: PreTrainedConfig) -> set[str]:
    return {mapping.get("rope_type", "default") for mapping in _rope_mappings(text_config)}


def _eos_token_ids(path: str) -> tuple[int, ...]:
    """As `generate` takes them: a generation_config.json that names none means none, whatever config.json names."""
    eos: Any = None
    if (Path(path) / "generation_config.json").is_file():
        try:
            eos = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"model={path!r}: its generation_config.json cannot be read: {error}") from error
    else:
        eos = read_generation_config(path).eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
