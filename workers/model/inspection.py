"""What a model folder holds, found out without reading weights: shapes, sizes, dtype, and whether we can serve it.

The model is built on the meta device and run with two tokens, with recorders in the place of attention, masks and
experts (`ModelProbe`). So shapes come from the model code itself, for every family alike, and a layer that does not go
through the plug-in points, or attends by more than keys and values of its own request, is noticed before any actor
starts.
"""

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from ...dispatch.errors import CheckpointError
from ..attention.paged import ATTENTION_NAME, register_attention
from .config_bounds import EXPERT_COUNT_NAMES, MAX_POSITIONS, refuse_heads, refuse_numbers, refuse_routing, refuse_sizes
from .formats.folder import ModelFolder
from .formats.registry import recognised
from .generation_settings import generation_settings, read_generation_config, source_of
from .kept_weights import kept_or_reason
from .probe import ModelProbe, refuse_other_state
from .reading import Settings, reading
from .spec import ModelSpec, digest_of_config, digest_of_tokenizer

_SERVED_AS = {"kimi_k2": "deepseek_v3"}
"""Families that Transformers does not know, by their names in `config.json`, and those that they are: their folders
bring code of another family under their own name."""
_PACKABLE_ROPE = ("default", "linear", "yarn", "llama3", "proportional")


def quiet_transformers() -> None:
    """No progress bars and warnings of the library: what matters is checked here, and raised."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def read_config(path: str) -> PreTrainedConfig:
    """The folder's `config.json` as Transformers reads it, without touching any network.

    What it says of quantisation is left out: weights are expanded as they are read, and Transformers' own modules for
    quantised ones would fetch kernels from elsewhere.

    Raises:
        CheckpointError: the folder or its config is missing, or Transformers does not know the family.
    """
    # `os.path` answers where `Path` raises: a name may be too long for the file system, or hold a zero byte.
    if not os.path.isdir(path):
        raise CheckpointError(
            f"model={path!r} is not a folder; names of a hub are not downloaded: fetch the model first, with "
            "`hf download NAME --local-dir FOLDER`, onto every node"
        )
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise CheckpointError(f"model={path!r} has no config.json: it is not a Hugging Face model folder")
    with reading(path, "its config.json cannot be read", _config_of):
        settings = json.loads((Path(path) / "config.json").read_bytes())
        if isinstance(settings, dict) and settings.get("model_type") in _SERVED_AS:
            return _config_of(settings)
        # Code of the folder's own is never run, and nobody is asked whether it may.
        return _unquantised(AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False))


def _config_of(settings: Settings) -> PreTrainedConfig:
    family = _SERVED_AS.get(settings["model_type"], settings["model_type"])
    return _unquantised(CONFIG_MAPPING[family].from_dict(copy.deepcopy({**settings, "model_type": family})))


_COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _unquantised(config: PreTrainedConfig) -> PreTrainedConfig:
    vars(config).pop("quantization_config", None)
    return config


def resolve_dtype(config: PreTrainedConfig, requested: str | None) -> torch.dtype:
    """The requested dtype, or the one the checkpoint was saved in (float32 where it does not say)."""
    if requested is not None:
        return getattr(torch, requested)
    given = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or dtype not in _COMPUTED_IN:
        raise CheckpointError(
            f"its config.json has dtype={given!r:.60}, which is no floating point type of PyTorch that models compute "
            "in: set it, or the pool's dtype, to float32, bfloat16 or float16"
        )
    return dtype


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
    family = f"the family {config.model_type!r}"
    with reading(path, f"no model of {family} can be made from its config.json", _built):
        _refuse_unsupported_family(path, config)
        checkpoint_format = recognised(ModelFolder(path))
        _refuse_unsupported_rope(path, config.get_text_config())
    try:
        with reading(path, f"no model of {family} can be made from its config.json", _built):
            refuse_sizes(config)
            refuse_numbers(config)
            context_length = _context_length(config.get_text_config())
            torch_dtype = resolve_dtype(config, dtype)
            model = build_meta_model(config, torch_dtype)
            plan = expert_parallel_plan(model)
        expert_modules = [name for name, style in plan.items() if style == "ep_dispatch_experts"]
        if not expert_modules:
            raise CheckpointError(f"Transformers has no expert-parallel plan for {family}")
        with reading(path, f"{family} does not run over packed batches", _probed):
            probe = _probe(config, model, expert_modules)
    except CheckpointError as error:
        if str(error).startswith(f"model={path!r}"):
            raise
        raise CheckpointError(f"model={path!r}: {family} with this config.json cannot be served: {error}") from error
    text_config = config.get_text_config()
    num_layers = text_config.num_hidden_layers
    if sorted(probe.attention) != list(range(num_layers)):
        missing = sorted(set(range(num_layers)) - set(probe.attention))
        raise CheckpointError(
            f"model={path!r}: layers {missing} of the family {config.model_type!r} do not go through Transformers' "
            "attention interface (linear attention or state space layers), which the paged KV cache needs"
        )
    sizes = {name: checkpoint_format.held_bytes(name, parameter) for name, parameter in model.named_parameters()}
    expert_bytes = sum(size for name, size in sizes.items() if name in plan)
    kept = kept_or_reason(checkpoint_format, model, probe.moe)
    return ModelSpec(
        path=path,
        model_type=config.model_type,
        dtype=str(torch_dtype).removeprefix("torch."),
        dtype_bytes=torch_dtype.itemsize,
        vocab_size=text_config.vocab_size,
        hidden_size=model.get_input_embeddings().embedding_dim,
        context_length=context_length,
        eos_token_ids=_eos_token_ids(path),
        attention=tuple(probe.attention[layer] for layer in range(num_layers)),
        moe=tuple(probe.moe),
        dense_bytes=sum(sizes.values()) - expert_bytes,
        expert_bytes=expert_bytes,
        has_tokenizer=(Path(path) / "tokenizer_config.json").is_file() or (Path(path) / "tokenizer.json").is_file(),
        config_digest=digest_of_config(path),
        tokenizer_digest=digest_of_tokenizer(path),
        generation=generation_settings(path),
        checkpoint_format=checkpoint_format.name,
        kept=None if isinstance(kept, str) else kept,
        not_kept=kept if isinstance(kept, str) else "",
    )


def _probe(config: PreTrainedConfig, model: PreTrainedModel, expert_modules: list[str]) -> ModelProbe:
    """What attention and experts of the model are handed; it is of no use afterwards."""
    refuse_other_state(config)
    probe = ModelProbe(model, expert_modules, _context_length(config.get_text_config()))
    probe.run()
    refuse_routing(probe.moe)
    refuse_heads(probe.attention.values())
    return probe


def _built(settings: Settings) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """The model that a `config.json` of these settings would make."""
    config = _config_of(settings)
    refuse_sizes(config)
    return config, build_meta_model(config, torch.float32)


def _probed(settings: Settings) -> None:
    config, model = _built(settings)
    experts = [name for name, style in expert_parallel_plan(model).items() if style == "ep_dispatch_experts"]
    _probe(config, model, experts)


def _refuse_unsupported_family(path: str, config: PreTrainedConfig) -> None:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"model={path!r}: the family {config.model_type!r} is not a causal language model")
    text_config = config.get_text_config()
    if not any(getattr(text_config, name, None) for name in EXPERT_COUNT_NAMES):
        raise CheckpointError(
            f"model={path!r}: the family {config.model_type!r} is not a Mixture-of-Experts model that can be served "
            f"(its config.json sets none of {', '.join(EXPERT_COUNT_NAMES)})"
        )


def _refuse_unsupported_rope(path: str, text_config: PreTrainedConfig) -> None:
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

    Raises:
        CheckpointError: YaRN stretches it beyond all bounds.
    """
    stretched = [
        int(original * factor)
        for mapping in _rope_mappings(text_config)
        if mapping.get("rope_type") == "yarn"
        for original, factor in [(mapping.get("original_max_position_embeddings"), mapping.get("factor"))]
        if isinstance(original, int) and isinstance(factor, (int, float)) and math.isfinite(original * factor)
    ]
    longest = max(text_config.max_position_embeddings, *stretched, 0)
    if longest > MAX_POSITIONS:
        raise CheckpointError(
            f"YaRN stretches its context to {longest:,} positions (original_max_position_embeddings x factor): correct "
            f"them to {MAX_POSITIONS:,} or fewer"
        )
    return longest


def _rope_mappings(text_config: PreTrainedConfig) -> list[dict[str, Any]]:
    """RoPE parameters in use: `rope_parameters` is one mapping, or one a kind of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _rope_types(text_config: PreTrainedConfig) -> set[str]:
    return {mapping.get("rope_type", "default") for mapping in _rope_mappings(text_config)}


def _eos_token_ids(path: str) -> tuple[int, ...]:
    """As `generate` takes them: a generation_config.json that names none means none, whatever config.json names."""
    eos, file = read_generation_config(path).eos_token_id, source_of(path)
    if eos is None:
        return ()
    token_ids = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    if any(isinstance(one, bool) or not isinstance(one, int) or not -1 <= one < 2**31 for one in token_ids):
        raise CheckpointError(
            f"model={path!r}: its {file} has eos_token_id={eos!r:.60}: set it to a token id, or to a list of them"
        )
    return token_ids
