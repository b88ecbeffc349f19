"""Quantised checkpoints that cannot be served, each refused with what is wrong with it, and never read otherwise."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_pool.cluster import PoolConfig
from expert_pool.cluster.config import resolve
from expert_pool.dispatch.errors import CheckpointError
from expert_pool.workers.model.checkpoint import check_weights
from expert_pool.workers.model.inspection import inspect_model
from safetensors.torch import load_file, save_file
from stored_checkpoints import (
    BLOCK_FP8,
    FORMATS,
    KIMI_IGNORE,
    MODELOPT,
    Weights,
    change_json,
    compressed,
    rewrite,
    write_stored,
)
from test_loading import load_all
from test_published_formats import read_of

FAMILY = {"mxfp4": "gpt_oss", "compressed_int": "deepseek_v3"}
PLAIN_NAMES = ("block_fp8", "mxfp4", "nvfp4", "compressed_fp8", "compressed_int")
EXPERT = "model.layers.1.mlp.experts.1.down_proj"
STACK = "model.layers.1.mlp.experts.down_proj"
FP8, INT = FORMATS["compressed_fp8"].config, FORMATS["compressed_int"].config


@pytest.fixture(scope="module")
def stored(random_models, tmp_path_factory) -> Callable[[str], Path]:
    @cache
    def write(name: str) -> Path:
        plain = Path(random_models[FAMILY.get(name, "qwen3_moe")])
        return write_stored(plain, tmp_path_factory.mktemp(name), FORMATS[name])[0]

    return write


@pytest.fixture
def damaged(stored, tmp_path) -> Callable[..., Path]:
    """A copy of a stored checkpoint with other tensors or another configuration."""

    def damage(name: str, change: Callable[[Weights], Any] | None = None, config: Any = ...) -> Path:
        folder = Path(shutil.copytree(stored(name), tmp_path / "model"))
        if change is not None:
            rewrite(folder, change)
        if config is not ...:
            change_json(folder / "config.json", lambda settings: settings | {"quantization_config": config})
        return folder

    return damage


def said_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        check_weights(inspect_model(str(folder)))
    said = str(refused.value)
    assert said.startswith(f"model={str(folder)!r}")
    assert len(said.splitlines()) == 1
    return said


def without(name: str) -> Callable[[Weights], Any]:
    return lambda weights: weights.pop(name)


def changed(name: str, into: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], Any]:
    return lambda weights: weights.update({name: into(weights[name]).contiguous()})


def beside(ending: str, name: str) -> Callable[[Weights], Any]:
    """Another tensor beside whatever has one that ends so."""
    return lambda weights: weights.update(
        {one.removesuffix(ending) + name: torch.ones(1) for one in list(weights) if one.endswith(ending)}
    )


def plainly(stem: str, *endings: str) -> Callable[[Weights], Any]:
    """A weight in bfloat16 in the place of a quantised one."""

    def change(weights: Weights) -> None:
        shape = weights[f"{stem}.weight"].shape
        for ending in endings:
            del weights[f"{stem}.{ending}"]
        weights[f"{stem}.weight"] = torch.ones(shape, dtype=torch.bfloat16)

    return change


SCALE = f"{EXPERT}.weight_scale"
MISSING = "1 weight(s) missing: "
OF_DTYPE = "1 weight(s) of a dtype that is not "
OF_SHAPE = "1 weight(s) of the wrong shape: "


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("block_fp8", without(f"{EXPERT}.weight_scale_inv"), f"{MISSING}{EXPERT}.weight_scale_inv"),
        ("nvfp4", without(f"{EXPERT}.weight_scale_2"), f"{MISSING}{EXPERT}.weight_scale_2"),
        ("mxfp4", without(f"{STACK}_scales"), f"{MISSING}{STACK}_scales"),
        ("compressed_int", without(f"{EXPERT}.weight_shape"), f"{MISSING}{EXPERT}.weight_shape"),
        ("compressed_int", without(f"{EXPERT}.weight_packed"), f"{MISSING}{EXPERT}.weight"),
        (
            "block_fp8",
            changed(f"{EXPERT}.weight_scale_inv", lambda scales: scales.repeat(2, 1)),
            f"{OF_SHAPE}{EXPERT}.weight_scale_inv is [2, 1], its format has [1, 1]",
        ),
        ("nvfp4", changed(SCALE, torch.Tensor.t), f"{OF_SHAPE}{SCALE} is [2, 64], its format has [64, 2]"),
        ("compressed_fp8", changed(SCALE, torch.Tensor.t), f"{OF_SHAPE}{SCALE} is [1, 64], its format has [64, 1]"),
        ("mxfp4", changed(f"{STACK}_scales", lambda one: one[1:]), f"{OF_SHAPE}{STACK}_scales is [7, 64, 1]"),
        ("compressed_int", changed(SCALE, torch.Tensor.double), f"{OF_DTYPE}F32, BF16 or F16: {SCALE} is F64"),
        ("nvfp4", changed(SCALE, torch.Tensor.float), f"{OF_DTYPE}F8_E4M3: {SCALE} is F32"),
        (
            "block_fp8",
            changed(f"{EXPERT}.weight", torch.Tensor.bfloat16),
            f"{OF_DTYPE}F8_E4M3: {EXPERT}.weight is BF16",
        ),
        (
            "compressed_fp8",
            plainly(EXPERT, "weight_scale"),
            f"1 are stored plainly, and not left alone: {EXPERT}; by quantization_config, 1 are with experts in two "
            "formats: model.layers.1.mlp.experts",
        ),
        (
            "block_fp8",
            plainly("model.layers.2.self_attn.q_proj", "weight_scale_inv"),
            "1 are stored plainly, and not left alone: model.layers.2.self_attn.q_proj",
        ),
        (
            "compressed_int",
            beside(".weight_packed", ".weight_zero_point"),
            "48 are of no use that compressed_int has for them: model.layers.1.mlp.experts.0.down_proj.weight_zero_",
        ),
        (
            "compressed_fp8",
            beside("2.self_attn.q_proj.weight_scale", "2.self_attn.q_proj.weight_g_idx"),
            "1 are of no use that compressed_fp8 has for them: model.layers.2.self_attn.q_proj.weight_g_idx",
        ),
        (
            "nvfp4",
            beside("1.self_attn.k_proj.weight", "1.self_attn.k_proj.k_scale"),
            "1 are scales of a quantised KV cache, which is not served: model.layers.1.self_attn.k_proj.k_scale",
        ),
        (
            "mxfp4",
            lambda weights: weights.update({STACK: torch.zeros(4, 64, 32)}),
            f"1 are stored plainly beside their codes: {STACK}",
        ),
        (
            "compressed_int",
            lambda weights: weights.update({f"{EXPERT}.weight": torch.zeros(64, 32)}),
            f"1 are stored plainly beside their codes: {EXPERT}",
        ),
    ],
)
def test_tensors_that_are_not_what_the_format_has_are_named(name, change, said, damaged):
    assert said in said_of(damaged(name, change))


ALONE = [*BLOCK_FP8.items(), ("modules_to_not_convert", ["lm_head", "model.layers.1.mlp.experts.1"])]


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("block_fp8", dict(ALONE), "3 are to be left alone, and quantised: model.layers.1.mlp.experts.1.down_proj, "),
        ("block_fp8", BLOCK_FP8, "1 are stored plainly, and not left alone: model.layers.1.self_attn.o_proj"),
        ("compressed_fp8", {**FP8, "ignore": []}, "2 are stored plainly, and not left alone: lm_head, model."),
        ("nvfp4", {**FORMATS["nvfp4"].config, "ignore": ["lm_head"]}, "12 are stored plainly, and not left alone: "),
        (
            "mxfp4",
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.1"]},
            "2 are to be left alone, and ",
        ),
        (
            "block_fp8",
            {**BLOCK_FP8, "quant_method": "fp6"},
            "is quantised (quant_method='fp6'), in a format that is not ",
        ),
        (
            "compressed_fp8",
            {**FP8, "format": "naive-quantized"},
            "'compressed-tensors', format='naive-quantized'), in a ",
        ),
        ("block_fp8", "fp8", "it would work without quantization_config='fp8': look there first"),
        (
            "block_fp8",
            {**BLOCK_FP8, "weight_block_size": None},
            "weight_block_size=None of quantization_config is not ",
        ),
        (
            "block_fp8",
            {**BLOCK_FP8, "weight_block_size": [128, 0]},
            "weight_block_size=[128, 0] of quantization_config",
        ),
        ("block_fp8", {**BLOCK_FP8, "fmt": "e5m2"}, "fmt='e5m2' of quantization_config is not served, 'e4m3' or "),
        ("block_fp8", {**BLOCK_FP8, "rotation": True}, "rotation=True of quantization_config is not known"),
        ("block_fp8", {**BLOCK_FP8, "ignored_layers": "lm_head"}, "ignored_layers='lm_head' is no list of names"),
        (
            "block_fp8",
            {**BLOCK_FP8, "ignored_layers": ["*"]},
            "ignored_layers has '*', which is no pattern (nothing to ",
        ),
        ("mxfp4", {"quant_method": "mxfp4", "bits": 4}, "bits=4 of quantization_config is not known"),
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo='FP8' of quantization_config is not "),
        (
            "nvfp4",
            {**FORMATS["nvfp4"].config, "kv_cache_scheme": {"num_bits": 8}},
            "kv_cache_scheme={'num_bits': 8} of quantization_config is not served, none or an empty one alone",
        ),
        (
            "compressed_int",
            compressed("pack-quantized", KIMI_IGNORE, num_bits=3, type="int"),
            "num_bits=3 of weights of ",
        ),
        *(
            (
                "compressed_int",
                compressed("pack-quantized", KIMI_IGNORE, **INT["config_groups"]["group_0"]["weights"] | {key: value}),
                f"{key}={value!r} of weights of config_groups.group_0 is not served, ",
            )
            for key, value in (
                ("symmetric", False),
                ("actorder", "group"),
                ("strategy", "channel"),
                ("group_size", -1),
                ("type", "float"),
            )
        ),
        ("compressed_fp8", {**FP8, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme={'num_bits': 8} of quantiz"),
        (
            "compressed_fp8",
            {**FP8, "transform_config": {"R1": {}}},
            "transform_config={'R1': {}} of quantization_config",
        ),
        (
            "compressed_fp8",
            {**FP8, "config_groups": {}},
            "config_groups={} of quantization_config is not served, a mapping",
        ),
        (
            "compressed_fp8",
            {**FP8, "ignore": ["re:("]},
            "ignore has 're:(', which is no pattern (missing ), unterminated",
        ),
        ("compressed_fp8", {**FP8, "ignore": ["Embedding"]}, "ignore has Embedding: of classes, Linear alone is known"),
        ("compressed_fp8", {**FP8, "two\nlines": 1}, "two\\nlines=1 of quantization_config is not known"),
    ],
)
def test_declarations_that_are_not_served_or_not_so_are_named(name, config, said, damaged):
    assert said in said_of(damaged(name, config=config))


def test_groups_that_store_weights_in_two_ways(damaged):
    [group] = FP8["config_groups"].values()
    other = {**group, "weights": {**group["weights"], "strategy": "tensor"}}
    config = {**FP8, "config_groups": {"group_0": group, "group_1": other}}
    assert "config_groups store weights in more than one way" in said_of(damaged("compressed_fp8", config=config))


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_a_configuration_that_says_quantised_over_plain_tensors(name, random_models, tmp_path):
    folder = Path(shutil.copytree(random_models[FAMILY.get(name, "qwen3_moe")], tmp_path / "model"))
    config = FORMATS[name].config
    change_json(folder / "config.json", lambda settings: settings | {"quantization_config": config})
    assert f"quantization_config says {name}, and no weight of the files is stored so" in said_of(folder)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_a_configuration_that_says_nothing_over_quantised_tensors(name, damaged):
    said = said_of(damaged(name, config=None))
    by_name = name in ("mxfp4", "compressed_int")
    assert (" weight(s) missing: " if by_name else "of a dtype that is not F64, F32, F16 or BF16: ") in said


def test_a_configuration_that_says_nothing_over_scales_beside_plain_tensors(damaged):
    folder = damaged("block_fp8", plainly(EXPERT), config=None)
    rewrite(
        folder, lambda weights: [weights.update({n: w.bfloat16()}) for n, w in weights.items() if n.endswith(".weight")]
    )
    assert "scale(s) of quantised weights, model.layers.0.mlp.experts.0.down_proj.weight_scale_inv the" in said_of(
        folder
    )


def test_what_modelopt_wrote_beside_another_configuration(damaged):
    folder = damaged("block_fp8")
    beside = folder / "hf_quant_config.json"
    beside.write_text("{")
    assert "its hf_quant_config.json cannot be read: " in said_of(folder)
    beside.write_text("{}")
    assert "there is a hf_quant_config.json, of another quantisation" in said_of(folder)
    change_json(folder / "config.json", lambda config: config | {"quantization_config": None})
    for content in ("{}", '{"quantization": null}', "[]"):
        beside.write_text(content)
        assert "quant_algo=None of quantization of hf_quant_config.json is not served, 'NVFP4' alone" in said_of(folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"kv_cache_quant_algo": "FP8"},
            "kv_cache_quant_algo='FP8' of quantization of hf_quant_config.json is not served",
        ),
        ({"group_size": 32}, "group_size=32 of quantization of hf_quant_config.json is not served, 16 alone"),
        ({"exclude_modules": ["lm_head"]}, "exclude_modules of hf_quant_config.json and ignore of quantization_config"),
    ],
    ids=["cache", "group", "modules"],
)
def test_what_modelopt_wrote_in_two_places_has_to_be_the_same(settings, said, damaged):
    folder = damaged("nvfp4")
    quantization = {**MODELOPT, "exclude_modules": FORMATS["nvfp4"].config["ignore"]}
    (folder / "hf_quant_config.json").write_text("{}")
    change_json(folder / "hf_quant_config.json", lambda _: {"quantization": quantization})
    check_weights(inspect_model(str(folder)))
    change_json(folder / "hf_quant_config.json", lambda _: {"quantization": quantization | settings})
    assert said in said_of(folder)


def test_mxfp4_of_another_family(damaged):
    said = said_of(damaged("block_fp8", config={"quant_method": "mxfp4"}))
    assert "is stored as mxfp4: its family is 'qwen3_moe': it is read for 'gpt_oss' alone" in said


def test_a_tensor_in_two_files_is_not_read_from_the_last_of_them(damaged):
    folder = damaged("mxfp4")
    first, second = sorted(folder.glob("*.safetensors"))
    stale = load_file(second) | {f"{STACK}_blocks": torch.zeros_like(load_file(first)[f"{STACK}_blocks"])}
    save_file(stale, second, {"format": "pt"})
    assert f"1 tensor(s) in two files: {STACK}_blocks is in {first.name} and in {second.name}" in said_of(folder)


def test_the_command_line_says_it_in_one_line_before_anything_starts(damaged, refused, prompts_file, tmp_path):
    folder = damaged("nvfp4", without(f"{EXPERT}.weight_scale_2"))
    prompts = prompts_file({"prompt_token_ids": [5]})
    said = refused("generate", "--model", folder, "--prompts", prompts, "--output", tmp_path / "out.jsonl")
    assert said.splitlines() == [f"refused: model={str(folder)!r}: {MISSING}{EXPERT}.weight_scale_2"]


@pytest.mark.parametrize(
    ("name", "tensor", "put_in", "said"),
    [
        ("block_fp8", f"{EXPERT}.weight_scale_inv", 0.0, "has scales that no weights can have, of 1: 1 zero"),
        ("mxfp4", f"{STACK}_scales", 255, "of expert 1 has scales that no weights can have, of 64: 1 NaN"),
        ("compressed_fp8", SCALE, float("nan"), "has scales that no weights can have, of 64: 1 NaN"),
        ("nvfp4", f"{EXPERT}.weight_scale_2", -1.0, "has scales that no weights can have, of 1: 1 negative"),
        (
            "block_fp8",
            f"{EXPERT}.weight_scale_inv",
            3e38,
            "has scales that no weights can have, of 1: 1 so large that codes times it are infinite",
        ),
        ("block_fp8", f"{EXPERT}.weight", float("nan"), "has 1 weights of 2,048 that are NaN"),
        ("compressed_int", f"{EXPERT}.weight_shape", 3, "is [3, 32], its words hold [64, 32]"),
    ],
)
def test_values_that_no_weights_can_have_are_named(name, tensor, put_in, said, damaged):
    def change(weights: Weights) -> None:
        values = weights[tensor]
        (values[1] if tensor == f"{STACK}_scales" else values).view(-1)[0] = put_in

    folder = damaged(name, change)
    check_weights(inspect_model(str(folder)))
    with pytest.raises(CheckpointError) as refused:
        read_of(str(folder))
    assert str(refused.value) == f"{tensor} {said}"


def test_what_one_rank_has_read_is_said_by_every_rank(damaged):
    """Of an expert that the last rank alone reads."""
    tensor = "model.layers.1.mlp.experts.7.up_proj.weight_scale_inv"
    folder = damaged("block_fp8", changed(tensor, torch.zeros_like))
    reports = load_all(resolve(PoolConfig(model=str(folder), ranks=2), inspect_model(str(folder))))
    said = "has scales that no weights can have, of 1: 1 zero"
    assert reports == [f"model={str(folder)!r}: {tensor} {said}"] * 2
