"""What a rank holds after loading, and what it needed on the way, on a checkpoint large enough to tell."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_pool.cluster import CacheConfig, Limits, PlacementConfig, PoolConfig, WorkerConfig
from expert_pool.cluster.config import resolve
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.rank_config import LoadReport, RankConfig
from expert_pool.workers.start import loading
from models import COMMON
from plain_ranks import CONTEXT, DEADLINE_S
from safetensors.torch import load_file, save_file
from stored_checkpoints import BLOCK_FP8, INDEX, change_json
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.initialization import no_init_weights

RANKS = 4
LARGE_FP8 = {**BLOCK_FP8, "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}
SLACK = 300 << 20


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Iterator[Path]:
    """About 800 MB in float32, nearly all of it experts, in shards."""
    folder = tmp_path_factory.mktemp("large")
    config = Qwen3MoeConfig(
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=2,
        moe_intermediate_size=1024,
        **COMMON | {"hidden_size": 512},
    )
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    model.save_pretrained(folder, max_shard_size="100MB")
    del model
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def block_fp8(plain, tmp_path_factory) -> Iterator[Path]:
    """The same model in block fp8."""
    stored = tmp_path_factory.mktemp("stored")
    shutil.copy(plain / "config.json", stored)
    change_json(stored / "config.json", lambda config: config | {"quantization_config": LARGE_FP8})
    weight_map = {}
    for file in plain.glob("*.safetensors"):
        weights = load_file(file)
        for name in [name for name in weights if ".experts." in name]:
            rows, columns = weights[name].shape
            weights[name] = weights[name].to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = torch.ones(rows // 128, columns // 128)
        save_file(weights, stored / file.name, {"format": "pt"})
        weight_map |= dict.fromkeys(weights, file.name)
    (stored / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    yield stored
    shutil.rmtree(stored)


def load_all(config: RankConfig, last_reads_after_s: float = 0) -> list[LoadReport | str]:
    """Load every rank in a process of its own, all at once, and nothing else; what each reports, or raises.

    Args:
        config: of the ranks.
        last_reads_after_s: the last rank begins to read its weights so much later.
    """
    rendezvouses, reports = CONTEXT.Queue(), CONTEXT.Queue()
    ranks = range(config.layout.world_size)
    delays = [last_reads_after_s if rank == ranks[-1] else 0 for rank in ranks]
    processes = [
        CONTEXT.Process(target=_load, args=(config, rank, rendezvouses, reports, delays[rank])) for rank in ranks
    ]
    for process in processes:
        process.start()
    received = dict(reports.get(timeout=DEADLINE_S) for _ in ranks)
    for process in processes:
        process.join(timeout=DEADLINE_S)
    return [received[rank] for rank in ranks]


def _load(config: RankConfig, rank: int, rendezvouses: Any, reports: Any, reads_after_s: float) -> None:
    engine = RankEngine(config, rank)
    read = loading.read_weights

    def read_late(*arguments: Any) -> Any:
        time.sleep(reads_after_s)
        return read(*arguments)

    loading.read_weights = read_late
    if rank == 0:
        rendezvous = engine.open_rendezvous("127.0.0.1")
        for _ in range(config.layout.world_size - 1):
            rendezvouses.put(rendezvous)
    else:
        rendezvous = rendezvouses.get(timeout=DEADLINE_S)
    engine.join(rendezvous)
    try:
        reports.put((rank, engine.load()))
    except Exception as error:
        reports.put((rank, str(error)))
        time.sleep(2)  # the store of rank 0 is there until all have said so


@pytest.mark.parametrize("stored", ["plain", pytest.param("block_fp8", marks=pytest.mark.long)])
def test_a_rank_reads_its_own_experts_and_needs_little_more_memory_than_they_take(stored, request):
    large_model = str(request.getfixturevalue(stored))
    config = PoolConfig(model=large_model, ranks=RANKS, cache=CacheConfig(num_tokens=512), limits=Limits(64, 8))
    spec = inspect_model(large_model)
    on_disk = sum(file.stat().st_size for file in Path(large_model).glob("*.safetensors"))
    assert spec.checkpoint_format == stored
    assert spec.expert_bytes > 0.98 * on_disk * (4 if stored == "block_fp8" else 1)

    for report in load_all(resolve(config, spec)):
        assert report.expert_bytes == spec.expert_bytes // RANKS
        assert report.dense_bytes == spec.dense_bytes
        own = report.expert_bytes + report.dense_bytes
        grown = report.peak_memory - report.peak_memory_before
        assert own * 0.9 < grown, "the weights are in memory, so the peak must show them"
        assert grown < 1.3 * own + SLACK
        assert 1.3 * own + SLACK < spec.expert_bytes, "the bound would not tell a rank that held all experts"


@pytest.mark.parametrize(
    ("family", "ranks", "attn_tp_size"), [("deepseek_v3", 2, 1), ("gpt_oss", 4, 2), ("mixtral", 1, 1)]
)
def test_expert_bytes_of_a_rank_are_its_share_in_every_family(family, ranks, attn_tp_size, random_models):
    spec = inspect_model(random_models[family])
    config = PoolConfig(model=random_models[family], ranks=ranks, attn_tp_size=attn_tp_size)
    reports = load_all(resolve(config, spec))
    assert [report.rank for report in reports] == list(range(ranks))
    assert {report.expert_bytes for report in reports} == {spec.expert_bytes // ranks}
    assert {report.dense_bytes for report in reports} == {spec.dense_bytes}


def test_a_node_that_reads_more_slowly_than_a_step_may_take_is_waited_for(random_models):
    model = random_models["qwen3_moe"]
    config = PoolConfig(model=model, ranks=2, worker=WorkerConfig(step_timeout_s=2))
    first, last = load_all(resolve(config, inspect_model(model)), last_reads_after_s=4)
    assert first.expert_bytes == last.expert_bytes > 0


def test_a_node_that_reads_longer_than_a_start_may_take_is_named(random_models):
    model = random_models["qwen3_moe"]
    config = PoolConfig(model=model, ranks=2, placement=PlacementConfig(start_timeout_s=2))
    said, _ = load_all(resolve(config, inspect_model(model)), last_reads_after_s=4)
    assert said == "ranks [1] did not read their weights within placement.start_timeout_s=2"
