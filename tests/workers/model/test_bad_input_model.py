"""Model folders that cannot be served, each refused before anything starts, with what is wrong with it."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_pool.workers.model import inspection
from expert_pool.workers.model.checkpoint import check_weights
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.model.weight_files import weight_files
from models import COMMON, FAMILIES
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    BertConfig,
    DbrxConfig,
    DeepseekV4Config,
    InklingTextConfig,
    JambaConfig,
    LlamaConfig,
    MiniMaxM3VLTextConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
    SwitchTransformersConfig,
    ZayaConfig,
)
from transformers.modeling_utils import _get_resolved_checkpoint_files

INDEX = "model.safetensors.index.json"
Weights = dict[str, torch.Tensor]
EXPERT = "model.layers.1.mlp.experts.5"
STATEFUL: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 2, **COMMON}


@pytest.fixture
def said_of(refused, prompts_file, tmp_path) -> Callable[..., str]:
    """What the command line says of a model folder."""

    def run(folder: Path | str, *options: str) -> str:
        prompts = prompts_file({"prompt_token_ids": [5]})
        output = tmp_path / "out.jsonl"
        said = refused("generate", "--model", folder, "--prompts", prompts, "--output", output, *options)
        assert not output.exists()
        return said

    return run


@pytest.fixture
def copied(random_models, tmp_path) -> Callable[[str], Path]:
    """A copy of a family's checkpoint, to be damaged."""

    def copy(family: str = "qwen3_moe") -> Path:
        return Path(shutil.copytree(random_models[family], tmp_path / "model"))

    return copy


@pytest.fixture
def config_folder(tmp_path) -> Callable[..., Path]:
    """A folder with a `config.json` and nothing else."""

    def write(config: PreTrainedConfig, **settings: Any) -> Path:
        folder = tmp_path / "model"
        config.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | settings))
        return folder

    return write


def change_weights(folder: Path, change: Callable[[Weights], None]) -> None:
    """Rewrite a checkpoint as a single file after `change`."""
    weights: Weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
        file.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_folder(said_of, tmp_path):
    assert "model='' names no folder" in said_of("")
    assert f"model='{tmp_path / 'nowhere'}' is not a folder" in said_of(tmp_path / "nowhere")


def test_a_folder_without_a_config(said_of, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no config.json: it is not a Hugging Face model folder" in said_of(tmp_path / "empty")


@pytest.mark.parametrize("content", ["", "{not json", "[]", '{"hidden_size": 5}', '{"model_type": "no_such_family"}'])
def test_a_config_that_cannot_be_read(content, said_of, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(content)
    assert "its config.json cannot be read" in said_of(tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "2048"),
        ("vocab_size", None),
        ("eos_token_id", "abc"),
        ("eos_token_id", 1.5),
        ("eos_token_id", True),
        ("eos_token_id", [10**30]),
        ("num_experts", "8"),
        ("num_experts_per_tok", 0),
        ("num_experts_per_tok", 9),
        ("num_hidden_layers", 10**6),
        ("max_position_embeddings", float("nan")),
        ("max_position_embeddings", 10**9),
        ("hidden_size", 10**30),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1.0),
        ("sliding_window", "wide"),
        ("tie_word_embeddings", "yes"),
        ("head_dim", 63),
        ("dtype", "nonsense"),
        ("dtype", "int64"),
        ("dtype", "float8_e4m3fn"),
        ("rope_parameters", {"rope_type": ["default"], "rope_theta": 10000.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": float("nan")}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0.0}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 10000.0, "factor": -4.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0, "factor": float("inf")}),
        ("quantization_config", 5),
    ],
    ids=lambda part: repr(part)[:30],
)
def test_a_value_that_config_json_cannot_have_is_refused_by_its_key(key, value, said_of, config_folder):
    said = said_of(config_folder(FAMILIES["qwen3_moe"](), **{key: value}))
    assert key in said
    assert "its config.json" in said or "with this config.json" in said
    assert len(said.splitlines()) == 1


def test_more_experts_than_a_model_can_have(said_of, config_folder):
    said = said_of(config_folder(FAMILIES["qwen3_moe"](), num_local_experts=10**9))
    assert "its config.json has num_experts=1000000000: set num_experts to an integer between 1 and 1,048,576" in said
    said = said_of(config_folder(FAMILIES["qwen3_moe"](), num_local_experts=2**20))
    assert "experts, more than 1,048,576; correct one of the two" in said


def test_a_config_nested_deeper_than_can_be_read(said_of, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"a": ' + "[" * 200_000)
    assert "its config.json cannot be read: RecursionError" in said_of(tmp_path / "model")


def test_a_config_that_asks_to_run_code_of_the_folders_own(said_of, tmp_path):
    """Transformers would ask on the terminal whether it may, and wait."""
    (tmp_path / "model").mkdir()
    config = {"model_type": "their_own", "auto_map": {"AutoConfig": "theirs.Config"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "theirs.py").write_text("raise SystemExit(7)")
    assert "its config.json cannot be read: ValueError: " in said_of(tmp_path / "model")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"], ids=["long", "zero"])
def test_a_name_that_no_folder_can_have(name, said_of):
    assert "is not a folder" in said_of(name)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (Qwen3Config(num_hidden_layers=1, num_key_value_heads=2, **COMMON), "'qwen3' is not a Mixture-of-Experts"),
        (LlamaConfig(num_hidden_layers=1, **COMMON), "'llama' is not a Mixture-of-Experts"),
        (BertConfig(num_hidden_layers=1), "'bert' is not a Mixture-of-Experts"),
        (DbrxConfig(), "'dbrx' is not a Mixture-of-Experts model that can be served"),
        (SwitchTransformersConfig(), "'switch_transformers' is not a causal language model"),
        (
            Qwen3NextConfig(num_hidden_layers=4, **COMMON),
            "'qwen3_next' with this config.json cannot be served: layers [0, 1, 2] keep a state of requests",
        ),
        (JambaConfig(num_hidden_layers=4, **COMMON), "the paged KV cache has no place for (LinearAttentionLayer in"),
        (InklingTextConfig(**STATEFUL), "[0, 1, 2, 3] keep a state of requests that the paged KV cache has no place"),
        (ZayaConfig(**STATEFUL), "[0, 1, 2, 3] keep a state of requests that the paged KV cache has no place for"),
        (DeepseekV4Config(**STATEFUL), "(DeepseekV4CSACache, DeepseekV4HCACache in Transformers)"),
        (
            MiniMaxM3VLTextConfig(layer_types=["full_attention", *["minimax_m3_sparse"] * 3], **STATEFUL),
            "[1, 2, 3] keep a state of requests that the paged KV cache has no place for",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_a_family_that_cannot_be_served(config, complaint, said_of, config_folder):
    assert complaint in said_of(config_folder(config))


def test_a_family_that_cannot_be_served_is_not_planned_either(refused, config_folder):
    folder = config_folder(Qwen3NextConfig(num_hidden_layers=4, **COMMON))
    assert "layers [0, 1, 2] keep a state of requests" in refused("plan", "--model", folder, "--ranks", "2")


def test_what_an_attention_takes_and_ours_does_not_know(said_of, config_folder, monkeypatch):
    """Were its convolutions no matter, Inkling's bias by position would be."""
    monkeypatch.setattr(inspection, "refuse_other_state", lambda config: None)
    said = said_of(config_folder(InklingTextConfig(**STATEFUL)))
    assert "its attention takes position_bias=, which attention over a paged cache has not" in said


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"pad_token_id": 151643}, "AssertionError: Padding_idx must be within num_embeddings"),
        ({"head_dim": None, "num_attention_heads": 0}, "ZeroDivisionError"),
    ],
)
def test_a_config_that_no_model_can_be_made_from(settings, complaint, said_of, config_folder):
    said = said_of(config_folder(FAMILIES["qwen3_moe"](), **settings))
    assert "no model of the family 'qwen3_moe' can be made from its config.json" in said
    assert complaint in said


def test_a_family_without_an_expert_parallel_plan(said_of, config_folder, monkeypatch):
    """Every family of this release that gets so far has a plan; the next may bring one that has not."""
    from transformers import Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

    monkeypatch.setattr(Qwen3MoeConfig, "base_model_ep_plan", None)
    monkeypatch.setattr(Qwen3MoeForCausalLM, "_ep_plan", None, raising=False)
    said = said_of(config_folder(FAMILIES["qwen3_moe"]()))
    assert "Transformers has no expert-parallel plan for the family 'qwen3_moe'" in said


@pytest.mark.parametrize(
    ("rope_type", "settings"),
    [
        ("dynamic", {"factor": 2.0}),
        (
            "longrope",
            {
                "factor": 2.0,
                "long_factor": [1.0] * 8,
                "short_factor": [1.0] * 8,
                "original_max_position_embeddings": 128,
            },
        ),
    ],
)
def test_a_rope_type_that_packing_would_corrupt(rope_type, settings, said_of, config_folder):
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, **settings}
    said = said_of(config_folder(FAMILIES["qwen3_moe"](), rope_parameters=rope))
    assert f"uses RoPE of type '{rope_type}'" in said
    assert "Supported: default, linear, yarn, llama3" in said


def test_a_quantised_model(said_of, config_folder):
    said = said_of(config_folder(FAMILIES["gpt_oss"](), quantization_config={"quant_method": "awq", "bits": 4}))
    assert (
        "is quantised (quant_method='awq'), in a format that is not read: use a checkpoint in one of block_fp8, "
        in said
    )


def test_a_folder_without_safetensors(said_of, config_folder):
    folder = config_folder(FAMILIES["qwen3_moe"]())
    (folder / "pytorch_model.bin").write_bytes(b"x")
    said = said_of(folder)
    assert "weight files missing: model.safetensors (weights have to be in safetensors format)" in said


def test_a_shard_that_is_missing(said_of, copied):
    folder = copied()
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    assert f"weight files missing: {shards[1].name}" in said_of(folder)


@pytest.mark.parametrize("size", [0, 5, 300, -1])
def test_a_shard_that_is_truncated(size, said_of, copied):
    folder = copied()
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:size])
    assert f"{shard.name} is truncated or not in safetensors format" in said_of(folder)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 5}}'])
def test_an_index_that_cannot_be_read(content, said_of, copied):
    folder = copied()
    (folder / INDEX).write_text(content)
    assert f"{INDEX} cannot be read" in said_of(folder)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("x" * 5000, f"weight files missing: {'x' * 100}..."),
        ("two\nlines.safetensors", "weight files missing: two\\nlines.safetensors"),
    ],
    ids=["longer than names are", "of two lines"],
)
def test_an_index_that_names_no_file_which_there_could_be(file, said, said_of, copied):
    folder = copied()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    assert said in said_of(folder)


def single_file(folder: Path) -> None:
    """The weights in one file as well; shards and index stay."""
    weights: Weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def as_transformers_takes_them(folder: Path) -> list[str]:
    """Names of the weight files that Transformers would load."""
    config = AutoConfig.from_pretrained(folder)
    files, _ = _get_resolved_checkpoint_files(
        str(folder), None, None, None, None, False, getattr(config, "transformers_weights", None)
    )
    return [Path(file).name for file in files]


def without_shards(folder: Path) -> None:
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()


def with_an_index_that_cannot_be_read(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def named_in_the_config(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))


@pytest.mark.parametrize(
    ("change", "num_files"),
    [
        (lambda folder: None, 1),
        (without_shards, 1),
        (with_an_index_that_cannot_be_read, 1),
        (lambda folder: (folder / INDEX).unlink(), 1),
        (lambda folder: (folder / "model.safetensors").unlink(), None),
        (partial(named_in_the_config, name=INDEX), None),
        (partial(named_in_the_config, name="model.safetensors"), 1),
    ],
    ids=["both", "stale index", "broken index", "single file", "shards", "index by name", "file by name"],
)
def test_weight_files_are_those_that_transformers_takes(change, num_files, copied):
    folder = copied()
    num_shards = len(list(folder.glob("model-*.safetensors")))
    single_file(folder)
    change(folder)
    found = [file.name for file in weight_files(str(folder))]
    assert found == as_transformers_takes_them(folder)
    assert len(found) == (num_files or num_shards)
    check_weights(inspect_model(str(folder)))


@pytest.mark.parametrize("name", ["../model.safetensors", "model.bin", "nowhere.safetensors", 5])
def test_a_weight_file_that_the_config_names_and_that_is_none(name, said_of, copied):
    folder = copied()
    named_in_the_config(folder, name)
    said = said_of(folder)
    assert "transformers_weights" in said or "weight files missing: nowhere.safetensors" in said


@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [
        ("qwen3_moe", "lm_head.weight", torch.int64),
        ("qwen3_moe", f"{EXPERT}.down_proj.weight", torch.bool),
        ("qwen3_moe", "model.layers.0.self_attn.q_proj.weight", torch.complex64),
        ("qwen3_moe", "model.embed_tokens.weight", torch.float8_e4m3fn),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", torch.int8),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias", torch.int32),
    ],
)
def test_a_weight_that_is_no_float_is_named_never_cast(family, name, dtype, said_of, copied):
    folder = copied(family)
    change_weights(folder, lambda weights: weights.update({name: weights[name].to(dtype)}))
    assert f"1 weight(s) of a dtype that is not F64, F32, F16 or BF16: {name} is " in said_of(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_in_other_floats_and_tensors_that_the_model_does_not_take_are_served(dtype, copied):
    folder = copied()

    def change(weights: Weights) -> None:
        weights.update({name: tensor.to(dtype) for name, tensor in weights.items()})
        weights["model.position_ids"] = torch.arange(4)

    change_weights(folder, change)
    check_weights(inspect_model(str(folder)))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "model.layers.1.self_attn.k_norm.weight"),
        ("qwen3_moe", "lm_head.weight"),
        ("qwen3_moe", "model.embed_tokens.weight"),
        ("qwen3_moe", "model.layers.2.mlp.gate.weight"),
        ("qwen3_moe", f"{EXPERT}.gate_proj.weight"),
        ("qwen3_moe", f"{EXPERT}.down_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.7.w2.weight"),
        ("olmoe", "model.layers.0.mlp.experts.0.up_proj.weight"),
        ("deepseek_v3", "model.layers.1.mlp.experts.3.gate_proj.weight"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
    ],
)
def test_a_weight_that_is_missing_is_named_never_made_up(family, name, said_of, copied):
    folder = copied(family)
    change_weights(folder, lambda weights: weights.pop(name))
    assert f"1 weight(s) missing: {name}" in said_of(folder)


def test_an_expert_that_is_missing_altogether(said_of, copied):
    folder = copied()

    def drop_expert(weights: Weights) -> None:
        for name in [name for name in weights if name.startswith("model.layers.1.mlp.experts.7.")]:
            del weights[name]

    change_weights(folder, drop_expert)
    names = ", ".join(f"model.layers.1.mlp.experts.7.{part}_proj.weight" for part in ("down", "gate", "up"))
    assert f"3 weight(s) missing: {names}" in said_of(folder)


def test_a_layer_that_is_missing_altogether(said_of, copied):
    folder = copied()

    def drop_layer(weights: Weights) -> None:
        for name in [name for name in weights if name.startswith("model.layers.2.")]:
            del weights[name]

    change_weights(folder, drop_layer)
    said = said_of(folder)
    assert "weight(s) missing: model.layers.2." in said
    assert " more" in said


@pytest.mark.parametrize(
    ("family", "name", "complaint"),
    [
        (
            "qwen3_moe",
            "model.layers.1.self_attn.q_proj.weight",
            "1 weight(s) of the wrong shape: model.layers.1.self_attn.q_proj.weight is [3, 5], the model has [64, 64]",
        ),
        (
            "qwen3_moe",
            f"{EXPERT}.down_proj.weight",
            "1 weight(s) whose parts do not fit together: model.layers.1.mlp.experts.down_proj",
        ),
        (
            "gpt_oss",
            "model.layers.0.mlp.experts.down_proj",
            "model.layers.0.mlp.experts.down_proj is [3, 5], the model has [8, 32, 64]",
        ),
    ],
)
def test_a_weight_of_the_wrong_shape(family, name, complaint, said_of, copied):
    folder = copied(family)
    change_weights(folder, lambda weights: weights.update({name: torch.zeros(3, 5)}))
    assert complaint in said_of(folder)


def test_a_config_that_has_fewer_experts_than_the_files(said_of, copied):
    folder = copied()
    config = json.loads((folder / "config.json").read_text())
    assert config["num_local_experts"] == 8
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))
    said = said_of(folder)
    assert "weight(s) of the wrong shape: " in said
    assert "model.layers.0.mlp.gate.weight is [8, 64], the model has [4, 64]" in said


def test_plan_says_what_generate_would_refuse(copied):
    from click.testing import CliRunner
    from expert_pool.cluster.cli.commands import main

    folder = copied()
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    result = CliRunner().invoke(main, ["plan", "--model", str(folder), "--ranks", "2"])
    assert result.exit_code == 0
    assert "generate would refuse:" in result.output
    assert "lm_head.weight" in result.output


def test_a_generation_config_that_cannot_be_read(said_of, copied):
    folder = copied()
    (folder / "generation_config.json").write_text("{")
    assert "its generation_config.json cannot be read" in said_of(folder)


@pytest.mark.parametrize("eos", ["abc", "8", {}, [[0]], 10**30, ["a"], True, 1.5, float("nan")], ids=repr)
def test_an_end_of_sequence_token_that_is_no_token_id(eos, said_of, copied):
    folder = copied()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert "its generation_config.json has eos_token_id=" in said_of(folder)


def test_a_tokenizer_setting_of_the_wrong_type_is_named(refused, tiny_moe, prompts_file, tmp_path):
    folder = Path(shutil.copytree(tiny_moe, tmp_path / "model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": "x"}))
    prompts = prompts_file({"prompt": "x"})
    said = refused("generate", "--model", folder, "--prompts", prompts, "--output", tmp_path / "out.jsonl")
    assert "its tokenizer cannot be read: TypeError: " in said
    assert "without model_max_length='x'" in said


def test_a_tokenizer_that_cannot_be_read(said_of, copied):
    folder = copied()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert "its tokenizer cannot be read" in said_of(folder)


@pytest.mark.parametrize("ranks", ["3", "16"])
def test_experts_that_cannot_be_divided_over_the_ranks(ranks, said_of, random_models):
    said = said_of(random_models["qwen3_moe"], "--ranks", ranks)
    assert f"has 8 experts, which cannot be divided over ranks={ranks}: set ranks to one of [1, 2, 4, 8]" in said
