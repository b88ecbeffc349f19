"""A pool without a checkpoint: dense weights alike on all ranks, experts each rank's own, and it generates."""

import shutil
from pathlib import Path

import pytest
import torch
from expert_pool.cluster import CheckpointError, PoolConfig, SamplingParams
from expert_pool.cluster.config import resolve
from expert_pool.cluster.planning.validation import validate
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.model.inspection import inspect_model
from handle import target_of
from plain_ranks import PlainRanks, run_on_ranks


@pytest.fixture
def bare_folder(random_models, tmp_path) -> str:
    """The family's configuration and nothing else."""
    shutil.copy(Path(random_models["qwen3_moe"]) / "config.json", tmp_path)
    return str(tmp_path)


def weights_of(engine: RankEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in target_of(engine).model.named_parameters()}


def test_weights_are_made_without_a_file(bare_folder, random_models):
    first, second = run_on_ranks(PoolConfig(model=bare_folder, ranks=2, weights="random"), weights_of, graphs=False)
    real = run_on_ranks(PoolConfig(model=random_models["qwen3_moe"], ranks=2), weights_of, graphs=False)[0]
    assert {name: weight.shape for name, weight in first.items()} == {name: w.shape for name, w in real.items()}
    for name, weight in first.items():
        assert torch.isfinite(weight).all()
        assert torch.equal(weight, second[name]) == ("experts" not in name), name


def test_such_a_pool_generates(bare_folder):
    with PlainRanks(PoolConfig(model=bare_folder, ranks=2, weights="random")) as ranks:
        once = ranks.generate([[5, 17], [9]], SamplingParams(max_new_tokens=6, ignore_eos=True))
        again = ranks.generate([[5, 17], [9]], SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert [len(completion.token_ids) for completion in once] == [6, 6]
    assert [one.token_ids for one in once] == [one.token_ids for one in again]


def test_weights_are_asked_for_where_they_are_to_be_read(bare_folder):
    assert validate(PoolConfig(model=bare_folder, weights="random")) == resolve(
        PoolConfig(model=bare_folder, weights="random"), inspect_model(bare_folder)
    )
    with pytest.raises(CheckpointError, match="weight files missing"):
        validate(PoolConfig(model=bare_folder))
