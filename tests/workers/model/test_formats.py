"""Whoever has another checkpoint format writes one class and registers it: no file of the house names it."""

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_pool.cluster import PoolConfig
from expert_pool.cluster.cli.plan_report import plan_pool
from expert_pool.cluster.driver.same_weights import held_by_files
from expert_pool.dispatch.errors import CheckpointError, ConfigError
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.model.checkpoint import check_weights
from expert_pool.workers.model.formats import registry
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.model.spec import digest_of_config
from handle import keep_registries, target_of
from plain_ranks import run_on_ranks
from safetensors.torch import load_file, save_file
from test_same_weights import loads_of_pool
from transformers import AutoModelForCausalLM

PLUGIN = "int8_format"
EXPERT = "model.layers.1.mlp.experts.5"


@pytest.fixture(autouse=True)
def int8(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module with the format, registered for this test alone."""
    keep_registries(monkeypatch.setattr)
    sys.modules.pop(PLUGIN, None)
    yield importlib.import_module(PLUGIN)
    sys.modules.pop(PLUGIN, None)


def pool_of(folder: Path | str, ranks: int = 2) -> PoolConfig:
    return PoolConfig(model=str(folder), ranks=ranks, plugins=(PLUGIN,))


def hashes_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest() for name, one in parameters.items()}


def held(engine: RankEngine) -> dict[str, str]:
    return hashes_of(target_of(engine).model.state_dict())


def whole(folder: Path | str) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"], ids=["expert by expert", "stacked"])
def test_ranks_hold_their_share_of_the_expanded_weights(family, int8, random_models, tmp_path):
    stored, expanded = int8.write_pair(random_models[family], tmp_path)
    check_weights(inspect_model(str(stored)))
    plain, original = whole(expanded), whole(random_models[family])
    num_changed = sum(not torch.equal(one, original[name]) for name, one in plain.items())
    assert num_changed > 8, "rounding changes the weights, so that reading the original ones would be noticed"
    shares = run_on_ranks(pool_of(stored), held, graphs=False)
    for rank, share in enumerate(shares):
        own = {name: one.chunk(len(shares))[rank] if ".experts." in name else one for name, one in plain.items()}
        assert share == hashes_of(own)


def test_a_plan_counts_the_bytes_of_the_expanded_weights(int8, random_models, tmp_path):
    stored, expanded = int8.write_pair(random_models["qwen3_moe"], tmp_path)
    plans = [plan_pool(pool_of(folder)) for folder in (stored, expanded)]
    assert [plan.problems + plan.refusals for plan in plans] == [(), ()]
    assert plans[0].total_bytes == plans[1].total_bytes


def rewritten(folder: Path, name: str, change: Callable[[dict[str, Any], str], None]) -> None:
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        if name in weights:
            change(weights, name)
            save_file(weights, file, {"format": "pt"})
            return
    raise AssertionError(f"no {name} in {folder}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights, name: weights.pop(name), "1 weight(s) missing: NAME"),
        (
            lambda weights, name: weights.update({name: weights[name].double()}),
            "1 weight(s) of a dtype that is not F32: NAME is F64",
        ),
        (
            lambda weights, name: weights.update({name: weights[name][1:].clone()}),
            "1 weight(s) of the wrong shape: NAME is [63], its format has [64]",
        ),
    ],
    ids=["missing", "dtype", "shape"],
)
def test_a_part_that_is_not_what_the_format_has_is_named(change, said, int8, random_models, tmp_path):
    stored, _ = int8.write_pair(random_models["qwen3_moe"], tmp_path)
    name = f"{EXPERT}.down_proj.weight_scale"
    rewritten(stored, name, change)
    with pytest.raises(CheckpointError) as refused:
        check_weights(inspect_model(str(stored)))
    assert str(refused.value) == f"model={str(stored)!r}: {said.replace('NAME', name)}"


def test_a_weight_of_an_expert_that_is_missing_is_named_as_in_plain_files(int8, random_models, tmp_path):
    stored, _ = int8.write_pair(random_models["qwen3_moe"], tmp_path)
    rewritten(stored, f"{EXPERT}.down_proj.weight", lambda weights, name: weights.pop(name))
    with pytest.raises(CheckpointError, match=rf"1 weight\(s\) missing: {EXPERT}.down_proj.weight"):
        check_weights(inspect_model(str(stored)))


def test_what_a_format_refuses_is_refused_with_its_reason(int8, random_models, tmp_path):
    stored, _ = int8.write_pair(random_models["qwen3_moe"], tmp_path)
    int8.declare(stored, quant_method="rows_in_int8", modules_to_not_convert=[f"{EXPERT}.down_proj"])
    with pytest.raises(CheckpointError, match=rf"modules_to_not_convert names {EXPERT}.down_proj.weight"):
        check_weights(inspect_model(str(stored)))
    int8.declare(stored, quant_method="rows_in_int8", bits=4)
    with pytest.raises(CheckpointError, match=r"is stored as rows_in_int8: bits=4 of quantization_config is not 8"):
        inspect_model(str(stored))
    int8.declare(stored, quant_method="rows_in_int5")
    with pytest.raises(
        CheckpointError, match=r"is quantised \(quant_method='rows_in_int5'\), in a format that is not read"
    ):
        inspect_model(str(stored))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", f"{EXPERT}.down_proj.weight_scale"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_scale"),
    ],
    ids=["expert by expert", "stacked"],
)
def test_what_was_read_is_told_apart_by_scales_too_whatever_the_number_of_ranks(
    family, name, int8, random_models, tmp_path
):
    stored, _ = int8.write_pair(random_models[family], tmp_path)
    before = held_by_files(str(stored), loads_of_pool(pool_of(stored, ranks=1)))
    assert held_by_files(str(stored), loads_of_pool(pool_of(stored))) == before
    rewritten(stored, name, lambda weights, name: weights[name].mul_(2))
    now = held_by_files(str(stored), loads_of_pool(pool_of(stored, ranks=1)))
    assert sum(now[file] != before[file] for file in before) == 1


def test_two_formats_of_one_name_are_refused(int8):
    class Other(registry.CheckpointFormat):
        name = "plain"

    with pytest.raises(ConfigError, match=r"test_formats registers 'plain', which .*formats.plain has"):
        registry.register(Other)


def test_a_format_that_recognises_nothing_is_refused_by_what_it_lacks(int8):
    class Unfinished(registry.CheckpointFormat):
        name = "unfinished"

    with pytest.raises(ConfigError, match=r"Unfinished lacks recognises, which a checkpoint format has to give"):
        registry.register(Unfinished)


def test_ranks_compare_what_lies_beside_the_configuration(int8, random_models, tmp_path):
    _, expanded = int8.write_pair(random_models["qwen3_moe"], tmp_path)
    before = digest_of_config(str(expanded))
    (expanded / "hf_quant_config.json").write_text("{}")
    assert digest_of_config(str(expanded)) != before
