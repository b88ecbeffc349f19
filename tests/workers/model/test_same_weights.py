"""Whether what ranks read of weight files is what other ranks, or the first ones of the pool, have read of them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expert_pool.cluster import PoolConfig
from expert_pool.cluster.config import resolve
from expert_pool.cluster.driver.same_weights import held_by_files, require_same_files
from expert_pool.dispatch.errors import CheckpointError, GeometryError
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.rank_config import LoadReport
from safetensors.torch import load_file, save_file
from test_loading import load_all

EXPERT = "model.layers.1.mlp.experts"
Weights = dict[str, torch.Tensor]


@pytest.fixture
def copied(random_models, tmp_path) -> Callable[[str], Path]:
    def copy(family: str) -> Path:
        return Path(shutil.copytree(random_models[family], tmp_path / "model"))

    return copy


def loads_of(folder: Path | str, ranks: int) -> list[LoadReport]:
    return loads_of_pool(PoolConfig(model=str(folder), ranks=ranks))


def loads_of_pool(pool: PoolConfig) -> list[LoadReport]:
    return load_all(resolve(pool, inspect_model(pool.model)))


def held_in(folder: Path | str, ranks: int) -> dict[str, str]:
    return held_by_files(str(folder), loads_of(folder, ranks))


def change(folder: Path, tensor: str, into: Callable[[Weights], torch.Tensor]) -> str:
    """Put other values into one tensor; the name of its file, whose size and header stay."""
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        if tensor in weights:
            before = file.stat()
            weights[tensor] = into(weights).to(weights[tensor].dtype)
            save_file(weights, file, {"format": "pt"})
            assert file.stat().st_size == before.st_size
            return file.name
    raise AssertionError(f"no {tensor} in {folder}")


def with_its_last_bit_changed(tensor: str) -> Callable[[Weights], torch.Tensor]:
    def into(weights: Weights) -> torch.Tensor:
        bits = weights[tensor].clone().view(torch.int32)
        bits.view(-1)[-1] ^= 1
        return bits.view(torch.float32)

    return into


def in_another_order(tensor: str) -> Callable[[Weights], torch.Tensor]:
    return lambda weights: weights[tensor].flip(0)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (
            "qwen3_moe",
            {
                "model.embed_tokens.weight": in_another_order,
                "model.layers.0.mlp.gate.weight": with_its_last_bit_changed,
                f"{EXPERT}.7.down_proj.weight": with_its_last_bit_changed,
            },
        ),
        (
            "gpt_oss",
            {
                "lm_head.weight": with_its_last_bit_changed,
                f"{EXPERT}.gate_up_proj": in_another_order,
                "model.layers.2.mlp.experts.down_proj_bias": with_its_last_bit_changed,
            },
        ),
    ],
)
def test_files_that_hold_other_values_are_named_whatever_the_number_of_ranks(family, changes, copied):
    """Experts apart, and stacked ones, of which each rank reads a part."""
    folder = copied(family)
    before = held_in(folder, 1)
    assert set(before) == {file.name for file in folder.glob("*.safetensors")}
    assert held_in(folder, 4) == before
    changed = {change(folder, tensor, kind(tensor)) for tensor, kind in changes.items()}
    now = held_in(folder, 2)
    assert {name for name in before if now[name] != before[name]} == changed
    with pytest.raises(CheckpointError, match="weights were replaced since the pool began: ") as refused:
        require_same_files(str(folder), before, now)
    for name in changed:
        assert f"{name} ({before[name]}, now {now[name]})" in str(refused.value)


def test_two_experts_that_change_places_are_other_weights(copied):
    folder = copied("qwen3_moe")
    before = held_in(folder, 1)
    names = [f"{EXPERT}.{expert}.up_proj.weight" for expert in (2, 3)]
    held = {
        name: load_file(file)[name]
        for file in folder.glob("*.safetensors")
        for name in names
        if name in load_file(file)
    }
    changed = {
        change(folder, name, lambda _, other=other: held[other])
        for name, other in zip(names, reversed(names), strict=True)
    }
    now = held_in(folder, 1)
    assert {name for name in before if now[name] != before[name]} == changed


def test_ranks_that_read_other_values_under_one_name_are_named(copied):
    """Where neither headers nor the bytes that are compared before they load would show it."""
    folder = copied("qwen3_moe")
    first, _ = loads_of(folder, 2)
    name = change(folder, "model.norm.weight", with_its_last_bit_changed("model.norm.weight"))
    _, last = loads_of(folder, 2)
    said = rf"what {name} of model='here' holds differs \(\w+: ranks \[0\]; \w+: ranks \[1\]\): have one model folder"
    with pytest.raises(GeometryError, match=said):
        held_by_files("here", [first, last])


def test_files_that_come_and_go_are_other_weights():
    require_same_files("here", {"a": "1"}, {"a": "1"})
    with pytest.raises(CheckpointError, match=r"a \(1, now not read\), b \(not read, now 2\)"):
        require_same_files("here", {"a": "1"}, {"b": "2"})
