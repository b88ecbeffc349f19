"""What a model's generation_config.json asks of `generate`, sorted into what a pool can do and what it cannot.

Every setting that the installed Transformers knows is in one of the lists below; a test notices one that is in none.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ...dispatch.errors import ConfigError
from ..request import SamplingParams
from .reading import reading
from .spec import GenerationSettings

FILE, _MODEL_FILE = "generation_config.json", "config.json"


def _other_than(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: value not in neutral


UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), _other_than(1.0)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), _other_than(0)),
    **dict.fromkeys(("min_length", "min_new_tokens"), _other_than(0)),
    **dict.fromkeys(("num_beams", "num_beam_groups"), _other_than(1)),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha"), _other_than(0.0)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), _other_than([])),
    **dict.fromkeys(("constraints", "force_words_ids", "sequence_bias"), _other_than([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), _other_than()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "max_time"), _other_than()),
    **dict.fromkeys(("remove_invalid_values", "token_healing", "low_memory", "is_assistant"), _other_than(False)),
    "dola_layers": _other_than(),
    "cache_implementation": lambda value: value == "quantized",
}
"""Which values of a setting change what `generate(do_sample=False)` gives, apart from null."""

# The settings of a prompt that Transformers knows by the same names.
_ALIKE = sorted({*SamplingParams.__struct_fields__} & vars(GenerationConfig()).keys() - {"max_new_tokens"})
SAMPLING = ("do_sample", *_ALIKE)
OFFERED = (*SAMPLING, "max_new_tokens", "stop_strings")
"""What can be the default of a prompt; those of `SAMPLING` count where a model asks for sampling."""

_WITHOUT_SETTING: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), _other_than(0.0)),
    **dict.fromkeys(("typical_p", "num_return_sequences"), _other_than(1.0)),
    "top_h": _other_than(),
}
UNSUPPORTED_SAMPLING = {name: changes for name, changes in _WITHOUT_SETTING.items() if name not in OFFERED}
"""Likewise for `generate(do_sample=True)` alone."""

APPLIED = {"eos_token_id"}

# Of beams alone, of what else `generate` returns, of other models, of the speed. `max_length` yields to max_new_tokens,
# which every request has; drafts of assistants and prompts are verified.
WITHOUT_EFFECT = {
    *("max_length", "early_stopping", "length_penalty", "renormalize_logits", "decoder_start_token_id"),
    *("pad_token_id", "bos_token_id", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "use_cache", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "speculation_type", "transformers_version", "_from_model_config"),
}


def read_generation_config(path: str) -> GenerationConfig:
    """What `generate` goes by: the folder's generation_config.json, or, without one, what its config.json says.

    Raises:
        CheckpointError: it cannot be read.
    """
    return _read(path, source_of(path))


def generation_settings(path: str) -> GenerationSettings:
    """What a model folder asks of `generate`.

    Raises:
        CheckpointError: the file cannot be read.
    """
    source = source_of(path)
    asked = {name: value for name, value in _read(path, source).to_dict().items() if value is not None}
    samples = asked.get("do_sample") is True
    changing = UNSUPPORTED | UNSUPPORTED_SAMPLING if samples else UNSUPPORTED
    unsupported = [name for name, changes in changing.items() if name in asked and changes(asked[name])]
    offered = [name for name in OFFERED if name in asked and (samples or name not in SAMPLING)]
    sampling, unusable = SamplingParams(), None
    try:
        sampling = _defaults({name: asked[name] for name in offered})
    except ConfigError as error:
        unusable = str(error)
    unused_eos = None
    if source == FILE and "eos_token_id" not in asked:
        unused_eos = _read(path, _MODEL_FILE).eos_token_id
    return GenerationSettings(
        source=source,
        unsupported=tuple(_shown(name, asked[name]) for name in unsupported),
        offered=tuple(_shown(name, asked[name]) for name in offered),
        sampling=sampling,
        unusable=unusable,
        unused_eos="" if unused_eos is None else json.dumps(unused_eos, default=str)[:60],
    )


def _defaults(offered: dict[str, Any]) -> SamplingParams:
    """What `generate` would take, where a model samples and does not say how, included.

    Raises:
        ConfigError: a value that no prompt may have.
    """
    given = {name: value for name, value in offered.items() if name not in ("do_sample", "stop_strings")}
    if "do_sample" in offered:
        general = GenerationConfig._get_default_generation_params()
        given = {name: general[name] for name in _ALIKE if name in general} | given
    return SamplingParams(**given, stop=offered.get("stop_strings", ()))


def _read(path: str, source: str) -> GenerationConfig:
    with reading(path, f"its {source} cannot be read"):
        return GenerationConfig.from_pretrained(
            path, config_file_name=source, _from_model_config=source == _MODEL_FILE, local_files_only=True
        )


def source_of(path: str) -> str:
    """The file of a model folder that `generate` goes by."""
    return FILE if (Path(path) / FILE).is_file() else _MODEL_FILE


def _shown(name: str, value: Any) -> str:
    return f"{name}={json.dumps(value, default=str):.60}"
