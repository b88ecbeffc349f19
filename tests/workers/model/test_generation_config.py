"""What a model's generation_config.json asks for is applied, said, or refused: never left out in silence."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from expert_pool.cluster import ConfigError, PoolConfig, SamplingParams
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.config import resolve
from expert_pool.cluster.planning.validation import validate
from expert_pool.workers.model.generation_settings import (
    APPLIED,
    OFFERED,
    SAMPLING,
    UNSUPPORTED,
    UNSUPPORTED_SAMPLING,
    WITHOUT_EFFECT,
)
from expert_pool.workers.model.inspection import inspect_model
from plain_ranks import PlainRanks
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import GenerationMode, StoppingCriteriaList

Asked = dict[str, Any]

# For each setting that is not supported, a value that matters and one that does not.
VALUES: dict[str, tuple[Any, Any]] = {
    "repetition_penalty": (1.3, 1.0),
    "encoder_repetition_penalty": (1.2, 1.0),
    "guidance_scale": (1.5, 1),
    "no_repeat_ngram_size": (3, 0),
    "encoder_no_repeat_ngram_size": (3, 0),
    "min_length": (8, 0),
    "min_new_tokens": (8, 0),
    "num_beams": (4, 1),
    "num_beam_groups": (2, 1),
    "num_return_sequences": (2, 1),
    "diversity_penalty": (0.5, 0.0),
    "penalty_alpha": (0.6, 0.0),
    "bad_words_ids": ([[5]], None),
    "suppress_tokens": ([5], None),
    "begin_suppress_tokens": ([5], None),
    "constraints": ([1], None),
    "force_words_ids": ([[5]], None),
    "sequence_bias": ([[[5], -3.0]], None),
    "forced_bos_token_id": (5, None),
    "forced_eos_token_id": (5, None),
    "exponential_decay_length_penalty": ([5, 1.2], None),
    "watermarking_config": ({"bias": 2.5}, None),
    "max_time": (2.0, None),
    "remove_invalid_values": (True, False),
    "token_healing": (True, False),
    "low_memory": (True, False),
    "is_assistant": (True, False),
    "dola_layers": ("low", None),
    "cache_implementation": ("quantized", "dynamic"),
    "min_p": (0.1, None),
    "epsilon_cutoff": (0.1, 0.0),
    "eta_cutoff": (0.1, 0.0),
    "typical_p": (0.9, 1.0),
    "top_h": (0.5, None),
}
# Those that `generate` looks at elsewhere than among processors, criteria and modes of the installed version.
ELSEWHERE = {
    *(
        "num_return_sequences",
        "token_healing",
        "cache_implementation",
        "low_memory",
        "dola_layers",
        "diversity_penalty",
    ),
    *("is_assistant", "num_beam_groups", "penalty_alpha"),
}


@pytest.fixture
def model_that_asks(random_models, tmp_path) -> Callable[..., str]:
    """A small model with these settings in its generation_config.json, or without one, and these in its config.json."""

    def make(asked: Asked | None, in_config: Asked | None = None) -> str:
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        shutil.copytree(random_models["mixtral"], folder)
        (folder / "generation_config.json").unlink()
        if asked is not None:
            (folder / "generation_config.json").write_text(json.dumps(asked))
        config = json.loads((folder / "config.json").read_text()) | (in_config or {})
        config = {name: value for name, value in config.items() if value != "left out"}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


def test_every_setting_that_transformers_knows_is_in_one_list():
    known = set(vars(GenerationConfig())) | {"transformers_version", "_from_model_config"}
    lists = [set(UNSUPPORTED), set(UNSUPPORTED_SAMPLING), set(OFFERED), APPLIED, WITHOUT_EFFECT]
    assert set().union(*lists) == known
    assert sum(map(len, lists)) == len(known)
    assert VALUES.keys() == UNSUPPORTED.keys() | UNSUPPORTED_SAMPLING.keys()


@pytest.mark.parametrize("name", VALUES)
def test_a_setting_is_listed_where_generate_goes_by_it(name, random_models):
    """By the logits processors, stopping criteria and mode of decoding that `generate` makes of it."""
    model = AutoModelForCausalLM.from_pretrained(random_models["qwen3_moe"])
    listed = {**UNSUPPORTED, **UNSUPPORTED_SAMPLING}[name]

    def has_effect(value: Any) -> bool:
        config = GenerationConfig(**{name: value}, do_sample=name in UNSUPPORTED_SAMPLING)
        config._eos_token_tensor = torch.tensor([1])
        config.max_length = 20
        processors = model._get_logits_processor(config, 3, torch.ones(1, 3, dtype=torch.long), device="cpu")
        criteria = model._get_stopping_criteria(config, StoppingCriteriaList())
        plain = GenerationMode.SAMPLE if config.do_sample else GenerationMode.GREEDY_SEARCH
        return bool(processors) or len(criteria) > 2 or config.get_generation_mode() != plain

    matters, does_not = VALUES[name]
    assert listed(matters)
    assert does_not is None or not listed(does_not)
    assert has_effect(matters) or name in ELSEWHERE
    assert not has_effect(does_not)


@pytest.mark.parametrize("name", VALUES)
def test_what_is_not_supported_is_said_or_refused(name, model_that_asks):
    matters, does_not = VALUES[name]
    sampled = {"do_sample": True} if name in UNSUPPORTED_SAMPLING else {}
    spec = inspect_model(model_that_asks({name: matters, "eos_token_id": 1, **sampled}))
    [note] = spec.generation.notes("ignore")
    assert f"not applied, so that tokens are not those of `generate`, {name}=" in note
    resolve(PoolConfig(model=spec.path), spec)
    with pytest.raises(ConfigError) as refusal:
        resolve(PoolConfig(model=spec.path, generation_config="model"), spec)
    assert f"generation_config='model', and generation_config.json of model={spec.path!r} asks for " in str(
        refusal.value
    )
    assert f"{name}=" in str(refusal.value)
    if does_not is not None:
        assert not inspect_model(model_that_asks({name: does_not, **sampled})).generation.unsupported


def test_plan_says_what_is_not_applied_and_generate_refuses_it(model_that_asks, refused, prompts_file, tmp_path):
    folder = model_that_asks({"repetition_penalty": 1.3, "eos_token_id": 1})
    planned = CliRunner().invoke(main, ["plan", "--model", folder])
    assert planned.exit_code == 0
    assert planned.output.count("repetition_penalty=1.3") == 1
    said = refused(
        *("generate", "--model", folder, "--prompts", prompts_file({"prompt_token_ids": [5]})),
        *("--output", tmp_path / "out.jsonl", "--generation-config", "model"),
    )
    assert "generation_config.json" in said
    assert "asks for repetition_penalty=1.3, which is not supported" in said
    assert CliRunner().invoke(main, ["plan", "--model", folder, "--generation-config", "model"]).exit_code == 2


def test_settings_of_old_models_are_read_from_config_json_where_there_is_no_other_file(model_that_asks):
    in_config = {"repetition_penalty": 1.3}
    generation = inspect_model(model_that_asks(None, in_config)).generation
    assert (generation.source, generation.unsupported) == ("config.json", ("repetition_penalty=1.3",))
    assert not inspect_model(model_that_asks({"eos_token_id": 1}, in_config)).generation.unsupported


@pytest.mark.parametrize(
    ("asked", "defaults"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(temperature=1.0, top_k=50, top_p=1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 0}, SamplingParams(temperature=0.6, top_k=0)),
        ({"max_new_tokens": 7, "stop_strings": "end"}, SamplingParams(max_new_tokens=7, stop="end")),
    ],
)
def test_what_prompts_do_not_say_is_the_models_to_say_on_request(asked, defaults, model_that_asks):
    folder = model_that_asks({"eos_token_id": 1, **asked})
    assert validate(PoolConfig(model=folder)).default_sampling == SamplingParams()
    assert validate(PoolConfig(model=folder, generation_config="model")).default_sampling == defaults
    spec = inspect_model(folder)
    counted = {name for name in asked if asked.get("do_sample") or name not in SAMPLING}
    assert len(spec.generation.notes("ignore")) == len(spec.generation.notes("model")) == bool(counted)
    assert all(f"{name}=" in spec.generation.notes("model")[0] for name in counted)


def test_defaults_that_no_prompt_may_have_are_refused_with_file_and_key(model_that_asks):
    folder = model_that_asks({"do_sample": True, "top_k": -5, "eos_token_id": 1})
    validate(PoolConfig(model=folder))
    with pytest.raises(ConfigError, match=r"generation_config.json of model=.* cannot give defaults: top_k=-5: set"):
        validate(PoolConfig(model=folder, generation_config="model"))


@pytest.mark.parametrize(
    ("asked", "in_config"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}),
        ({}, {"eos_token_id": 5}),
        ({"eos_token_id": None}, {"eos_token_id": 5}),
        (None, {"eos_token_id": 5}),
        (None, {"eos_token_id": [5, 6]}),
        (None, {"eos_token_id": "left out"}),
    ],
)
def test_the_tokens_that_end_a_request_are_those_that_end_generate(asked, in_config, model_that_asks):
    folder = model_that_asks(asked, in_config)
    ends = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    ends = () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    spec = inspect_model(folder)
    assert spec.eos_token_ids == ends
    is_unused = asked is not None and asked.get("eos_token_id") is None
    assert any("no token ends a request" in note for note in spec.generation.notes("ignore")) == is_unused


@torch.inference_mode()
def test_a_model_whose_file_names_no_end_goes_on_as_generate_does(model_that_asks):
    """With every token an end by config.json alone."""
    folder, prompt = model_that_asks({}, {"eos_token_id": list(range(128))}), torch.tensor([[5, 17, 42]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    with PlainRanks(PoolConfig(model=folder)) as ranks:
        [completion] = ranks.generate([[5, 17, 42]], [SamplingParams(max_new_tokens=6)])
    assert completion.token_ids == tuple(expected[0, 3:].tolist())
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")
