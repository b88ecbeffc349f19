"""What pools for real models need of a GPU: those that are ready-made fit in 141 GB, what cannot is refused."""

import functools
import re
from pathlib import Path

import msgspec
import pytest
import ray
from click.testing import CliRunner
from expert_pool.cluster import CacheConfig, ConfigError, ExpertPool, PlacementConfig, PoolConfig, WorkerConfig
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.cli.plan_report import PlanReport, plan_pool
from expert_pool.cluster.config import load_config
from expert_pool.cluster.planning.gpu_memory import smallest_fit
from expert_pool.workers.model import inspection

RAY_CONFIGS = Path(__file__).resolve().parents[3] / "ray_configs"
H200_BYTES = 141 * 10**9
# What CUDA, NCCL and libraries take, with room to spare: no plan knows it, so the ready-made pools leave it free.
MARGIN_BYTES = 8 * 10**9
MODEL_OF_POOL = {
    "qwen3_30b_a3b_2_gpus": "qwen3_30b_a3b",
    "qwen3_30b_a3b_8_gpus": "qwen3_30b_a3b",
    "qwen3_235b_a22b_8_gpus": "qwen3_235b_a22b",
    "gpt_oss_120b_4_gpus": "gpt_oss_120b",
    "deepseek_v3_16_gpus": "deepseek_v3",
}
# As their model cards give them: billions of parameters, layers, and MoE layers.
PUBLISHED = {
    "qwen3_30b_a3b": (30.5, 48, 48),
    "qwen3_235b_a22b": (235, 94, 94),
    "gpt_oss_120b": (117, 36, 36),
    "deepseek_v3": (671, 61, 58),
}


# A geometry is run through once, by meta tensors: dozens of layers take a second each time.
inspect_model = functools.cache(inspection.inspect_model)


@pytest.fixture(autouse=True)
def inspect_each_model_once(monkeypatch):
    monkeypatch.setattr(inspection, "inspect_model", inspect_model)


def geometry(model: str) -> str:
    return str(RAY_CONFIGS / "geometry" / model)


def pool_file(pool: str) -> str:
    return str(RAY_CONFIGS / "pools" / f"{pool}.yaml")


def plan(pool: str, *options: str, exit_code: int = 0) -> str:
    command = ["plan", "--config", pool_file(pool), "--model", geometry(MODEL_OF_POOL[pool]), *options]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == exit_code, result.output
    assert not ray.is_initialized()
    return result.output


def on_gpus(model: str, gpu_memory: int | None, **settings) -> PlanReport:
    placement = PlacementConfig(gpu_memory_bytes=gpu_memory)
    return plan_pool(PoolConfig(model=model, worker=WorkerConfig(device="cuda"), placement=placement, **settings))


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_geometry_has_the_published_number_of_parameters(model):
    spec = inspect_model(geometry(model))
    billions, layers, moe_layers = PUBLISHED[model]
    assert (spec.dense_bytes + spec.expert_bytes) / spec.dtype_bytes / 1e9 == pytest.approx(billions, rel=0.003)
    assert (len(spec.attention), len(spec.moe)) == (layers, moe_layers)
    assert spec.dtype == "bfloat16"


def test_every_ready_made_pool_is_tested():
    assert {path.stem for path in (RAY_CONFIGS / "pools").iterdir()} == set(MODEL_OF_POOL)
    assert {path.name for path in (RAY_CONFIGS / "geometry").iterdir()} == set(MODEL_OF_POOL.values())


@pytest.mark.parametrize("pool", MODEL_OF_POOL)
def test_a_ready_made_pool_fits_in_141_gb_with_room_for_what_no_plan_knows(pool):
    config = load_config(pool_file(pool), {})
    assert config.placement.gpu_memory_bytes == H200_BYTES
    assert config.worker.device == "cuda"
    assert config.ranks == int(pool.split("_")[-2])
    output = plan(pool)
    [(left, available)] = re.findall(r"fits: ([\d,]+) of ([\d,]+) bytes are left", output)
    assert int(left.replace(",", "")) + H200_BYTES - int(available.replace(",", "")) > MARGIN_BYTES
    [refused] = [line for line in output.splitlines() if "would" in line]
    assert "weight files missing" in refused, "geometry/ has none, and nothing else is wrong"


def test_the_table_in_the_readme_of_the_pools_is_what_is_planned():
    text = (RAY_CONFIGS / "README.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+_gpus)` \| (.+) \|$", text, re.MULTILINE))
    assert set(rows) == set(MODEL_OF_POOL)
    for pool, row in rows.items():
        config = load_config(pool_file(pool), {"model": geometry(MODEL_OF_POOL[pool])})
        need = plan_pool(config).gpu_memory
        rest = need.buffers + need.largest_step + need.graphs
        planned = [f"{part / 1e9:.1f}" for part in (need.weights, need.kv_cache, rest, need.needed, need.available)]
        assert re.findall(r"\d+\.\d", row) == planned, pool


def test_deepseek_v3_in_bf16_on_8_gpus_is_refused_with_bytes_and_the_ranks_that_would_fit():
    output = plan("deepseek_v3_16_gpus", "--ranks", "8", "--stored-weights", "expand", exit_code=2)
    [said] = [line for line in output.splitlines() if line.startswith("would fail: ranks=8 does not fit")]
    needed, weights = (int(n.replace(",", "")) for n in re.findall(r"(?:needs|weights) ([\d,]+)", said))
    assert weights == 34_448_128_000 + 1_307_817_541_632 // 8
    assert needed > weights > H200_BYTES
    assert f"available are {H200_BYTES:,} (placement.gpu_memory_bytes={H200_BYTES:,})" in said
    assert "Weights, block_fp8, are held expanded to bfloat16." in said
    assert "The smallest number of ranks that would fit is 16: set ranks to it" in said
    held = 34_448_128_000 + 1_307_817_541_632
    assert f"weights: stored as block_fp8; block_fp8 expanded to bfloat16, {held:,} bytes" in output


def test_deepseek_v3_as_it_is_stored_fits_on_8_gpus_and_not_on_4():
    output = plan("deepseek_v3_16_gpus", "--ranks", "8")
    # 58 layers of 256 experts: codes, and a factor for each block of 128 x 128.
    experts = 58 * 256 * 3 * (2048 * 7168 + 16 * 56 * 4)
    assert f"{experts:,} bytes / 8" in output
    assert "fits: " in output
    said = plan("deepseek_v3_16_gpus", "--ranks", "4", exit_code=2)
    assert "Experts are kept as block_fp8 stores them, other weights expanded." in said
    assert "The smallest number of ranks that would fit is 8: set ranks to it" in said


def test_launch_refuses_what_cannot_fit_before_ray_is_touched():
    config = load_config(pool_file("deepseek_v3_16_gpus"), {"ranks": 4, "model": geometry("deepseek_v3")})
    with pytest.raises(ConfigError, match=r"ranks=4 does not fit: .* would fit is 8"):
        ExpertPool.launch(config)
    assert not ray.is_initialized()


def test_missing_weights_are_said_beside_a_plan_that_holds():
    output = plan("qwen3_30b_a3b_2_gpus")
    assert "generate would refuse: model=" in output
    assert "weight files missing" in output
    assert "fits: " in output


def test_the_option_overrides_the_file_and_takes_units():
    output = plan("qwen3_30b_a3b_2_gpus", "--gpu-memory", "40GiB", exit_code=2)
    assert f"placement.gpu_memory_bytes={40 * 2**30:,} x cache.gpu_memory_utilization=0.9" in output
    assert "The smallest number of ranks that would fit is 4" in output


@pytest.mark.parametrize("size", ["141 gigabytes", "-1GB", "GB", "1e9"])
def test_a_size_without_sense_is_refused(size):
    result = CliRunner().invoke(main, ["plan", "--model", "x", "--gpu-memory", size])
    assert result.exit_code == 2
    assert "is not a size like 141GB" in result.output


def test_memory_that_is_no_memory_is_refused():
    with pytest.raises(ConfigError, match=r"placement.gpu_memory_bytes=0 is below 1"):
        PlacementConfig(gpu_memory_bytes=0)


def test_what_is_needed_is_what_is_planned_and_the_largest_step_and_graphs(tiny_moe):
    report = on_gpus(tiny_moe, None, ranks=2)
    need = report.gpu_memory
    assert need.weights == report.num_bytes("dense weights") + report.num_bytes("experts")
    assert need.kv_cache == report.num_bytes("KV cache")
    assert need.weights + need.kv_cache + need.buffers == report.total_bytes
    assert need.needed == report.total_bytes + need.largest_step + need.graphs
    assert need.largest_step > 2048 * report.config.spec.hidden_size * report.config.spec.dtype_bytes
    assert need.fits
    assert need.available is None


def test_no_room_is_set_aside_for_prefill_graphs_where_attention_runs_in_pytorch(tiny_moe):
    """FlashInfer has no kernels for float32, so the start records none, whatever `worker.attention` asks for."""
    chosen, left_over = (
        plan_pool(
            PoolConfig(model=tiny_moe, ranks=2, dtype="float32", worker=WorkerConfig(device="cuda", attention=one))
        )
        for one in ("torch", "auto")
    )
    assert left_over.gpu_memory.graphs == chosen.gpu_memory.graphs > 0


@pytest.mark.parametrize("num_tokens", [None, 1024])
def test_a_pool_fits_to_the_byte_within_the_share_that_its_cache_may_fill(num_tokens, tiny_moe):
    """A cache that is measured keeps to `gpu_memory_utilization`, like the start; one that is set may use it all."""
    settings = {"ranks": 2, "cache": CacheConfig(num_tokens=num_tokens, gpu_memory_utilization=0.5)}
    needed = on_gpus(tiny_moe, None, **settings).gpu_memory.needed
    exact = 2 * needed if num_tokens is None else needed
    assert on_gpus(tiny_moe, exact, **settings).problems == ()
    [problem] = on_gpus(tiny_moe, exact - 2, **settings).problems
    assert problem.startswith("ranks=2 does not fit")


def test_the_smallest_number_of_ranks_fits_and_the_one_below_does_not():
    config = load_config(pool_file("deepseek_v3_16_gpus"), {"model": geometry("deepseek_v3")})
    spec = inspect_model(config.model, config.dtype)
    for shared in (1, 2):
        for stored_weights, fewest in (("expand", 16), ("auto", 8)):
            resized = msgspec.structs.replace(config, attn_tp_size=shared, stored_weights=stored_weights)
            assert smallest_fit(resized, spec) == fewest


def test_a_model_whose_dense_weights_do_not_fit_has_no_number_of_ranks(tiny_moe):
    [problem] = on_gpus(tiny_moe, 10**6, ranks=2).problems
    assert "No number of ranks would fit, since only experts are divided over them" in problem


def test_the_memory_of_a_gpu_rests_on_cpus(tiny_moe):
    config = PoolConfig(model=tiny_moe, ranks=2, placement=PlacementConfig(gpu_memory_bytes=1))
    report = plan_pool(config)
    assert report.problems == ()
    assert report.gpu_memory is None
    options = ["plan", "--model", tiny_moe, "--ranks", "2", "--gpu-memory", "1"]
    assert "placement.gpu_memory_bytes has no effect: worker.device is cpu" in CliRunner().invoke(main, options).output


def test_plan_says_how_to_learn_whether_a_pool_fits(tiny_moe):
    output = CliRunner().invoke(main, ["plan", "--model", tiny_moe, "--ranks", "2", "--device", "cuda"]).output
    assert "whether it fits is not known: say what a GPU has, placement.gpu_memory_bytes or --gpu-memory" in output
