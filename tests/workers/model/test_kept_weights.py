"""Experts that stay in the bytes of their checkpoint: what is held, what is computed, and what is refused."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from conftest import Reference
from expert_pool.cluster import ConfigError, Limits, PoolConfig, WorkerConfig
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.cli.plan_report import plan_pool
from expert_pool.cluster.config import resolve, resolve_unchecked
from expert_pool.dispatch.budgets.moe_shape import Gating
from expert_pool.dispatch.errors import ExpertPoolError
from expert_pool.dispatch.paths.table import candidate_paths
from expert_pool.dispatch.paths.tuning import Tuning
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.model.inspection import inspect_model
from handle import exchange_of, keep_registries, path_of, target_of
from models import VOCAB_SIZE, save_random_model
from plain_ranks import ForkedRanks, run_on_ranks
from rank_insides import run_script
from stored_checkpoints import FORMATS, PAIRS, load_all_of, rewrite, write_stored, writer
from test_loading import load_all

PROMPTS = [[(7 * length + 3 * at) % (VOCAB_SIZE - 2) + 2 for at in range(length)] for length in (1, 17, 40)]
NEW_TOKENS = 8
LIMITS = Limits(chunked_prefill_size=64, max_running_requests=4)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[str, str], tuple[Path, Path]]:
    """A stored checkpoint and its expanded twin, by format and family."""
    return writer(tmp_path_factory.mktemp)


def keeping(folder: Path, **settings: Any) -> PoolConfig:
    return PoolConfig(model=str(folder), stored_weights="keep", **{"limits": LIMITS, "dtype": "float32"} | settings)


# All five formats, on one rank and on two.
SAMPLE = (
    ("block_fp8", "qwen3_moe", 2, 1, "allgather"),
    ("compressed_fp8", "qwen3_moe", 1, 1, "allgather"),
    ("compressed_int", "deepseek_v3", 2, 1, "allgather"),
    ("mxfp4", "gpt_oss", 2, 2, "allgather"),
    ("nvfp4", "qwen3_moe", 2, 1, "alltoall"),
)


def cases() -> list[tuple[str, str, int, int, str]]:
    every = [
        (*pair, ranks, attn_tp_size, dispatch)
        for pair in sorted(PAIRS)
        for ranks, attn_tp_size in ((1, 1), (2, 1), (2, 2))
        for dispatch in ("allgather", "alltoall")
        if ranks > 1 or dispatch == "allgather"
    ]
    return every if os.environ.get("EXPERT_POOL_FULL_MATRIX") == "1" else list(SAMPLE)


@pytest.mark.parametrize(("stored", "family", "ranks", "attn_tp_size", "dispatch"), cases())
def test_greedy_tokens_equal_those_of_the_expanded_weights(stored, family, ranks, attn_tp_size, dispatch, written):
    folder, expanded = written(stored, family)
    config = keeping(folder, ranks=ranks, attn_tp_size=attn_tp_size, dispatch=dispatch)
    dp_size = config.layout.dp_size
    split = [PROMPTS[dp_rank::dp_size] for dp_rank in range(dp_size)]
    with ForkedRanks(config, graphs=False) as rank_set:
        generated = rank_set.call(run_script, [{0: mine} for mine in split], NEW_TOKENS, False)
    reference = Reference(str(expanded))
    expected = [reference.greedy(prompt, NEW_TOKENS) for mine in split for prompt in mine]
    tokens = {key: token_ids for one in generated for key, token_ids in one.token_ids.items()}
    assert tokens == dict(enumerate(expected))


def held_of(engine: RankEngine) -> tuple[int, int, list[tuple[str, int]]]:
    """Bytes of expert parameters of the model's own, of what is kept beside, and formats of layers with theirs."""
    exchange, model = exchange_of(engine), target_of(engine).model
    own = sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if ".experts." in name and not name.endswith("_bias")
    )
    kept = sum(bound.kept.num_bytes for bound in exchange.bound)
    layers = [
        (layer.weights.format, sum(one.nbytes for one in layer.weights.stored.values())) for layer in exchange.layers
    ]
    return own, kept, layers


@pytest.mark.parametrize("stored", ["block_fp8", "nvfp4", "compressed_int", "mxfp4"])
def test_ranks_hold_the_bytes_of_the_files_and_plans_count_them(stored, written):
    family = dict(sorted(PAIRS))[stored]
    folder, _ = written(stored, family)
    config = keeping(folder, ranks=2)
    spec = inspect_model(str(folder), "float32")
    in_files = sum(
        one.nbytes
        for name, one in load_all_of(folder).items()
        if ".experts." in name and not name.endswith(("_shape", ".input_scale", "_bias", "shared_experts"))
    )
    biases = spec.expert_bytes - sum(
        3 * one.num_experts * one.hidden_size * one.intermediate_size * 4 for one in spec.moe
    )
    planned = plan_pool(config).num_bytes("experts") - plan_pool(config).num_bytes("experts:")
    assert planned == (in_files + biases) // 2
    assert planned < spec.expert_bytes // 2 * 0.4
    for own, kept, layers in run_on_ranks(config, held_of, graphs=False):
        assert own == 0
        assert kept == in_files // 2
        assert [name for name, _ in layers] == [stored.partition(" ")[0]] * len(spec.moe)
        assert sum(size for _, size in layers) == kept + biases // 2


def test_a_rank_reports_what_it_holds_and_status_and_plan_say_so(written):
    folder, _ = written("block_fp8", "qwen3_moe")
    config = keeping(folder, ranks=2)
    rank_config = resolve(config, inspect_model(str(folder), "float32"))
    assert rank_config.held_as == ("experts kept as block_fp8 stores them, other block_fp8 expanded to float32")
    for report in load_all(rank_config):
        assert report.held_as == rank_config.held_as
        assert report.expert_bytes == rank_config.expert_bytes // 2
    said = CliRunner().invoke(main, ["plan", "--model", str(folder), "--stored-weights", "keep"]).output
    assert "kept as block_fp8 stores" in said
    said = CliRunner().invoke(main, ["plan", "--model", str(folder)]).output
    assert "block_fp8 expanded to float32" in said


@pytest.mark.long
def test_memory_of_loading_is_that_of_the_bytes_and_not_of_what_they_stand_for(tmp_path):
    """Experts of 600 MB expanded take 150 as they are stored."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 3}
    save_random_model("qwen3_moe", tmp_path / "plain", **sizes)
    folder, _ = write_stored(tmp_path / "plain", tmp_path, FORMATS["block_fp8"])
    config = keeping(folder, ranks=1)
    spec = inspect_model(str(folder), "float32")
    [report] = load_all(resolve(config, spec))
    grown = report.peak_memory - report.peak_memory_before
    assert report.expert_bytes < 0.26 * spec.expert_bytes
    # Transformers itself takes some on its first load.
    assert grown < 1.3 * (report.expert_bytes + report.dense_bytes) + 120 * 2**20 < spec.expert_bytes


def spoiled(weights: dict[str, torch.Tensor]) -> None:
    name = next(name for name in sorted(weights) if "experts.3.up_proj.weight_scale" in name)
    weights[name] = weights[name].clone()
    weights[name][0, 0] = 0.0


def test_scales_that_no_weights_can_have_are_named_on_every_rank(written, tmp_path):
    folder = Path(shutil.copytree(written("block_fp8", "qwen3_moe")[0], tmp_path / "model"))
    rewrite(folder, spoiled)
    with pytest.raises(AssertionError, match=r"has scales that no weights can have, of \d+: 1 zero") as raised:
        run_on_ranks(keeping(folder, ranks=2), held_of, graphs=False)
    assert str(raised.value).count("experts.3.up_proj.weight_scale_inv") >= 2


def test_experts_that_are_not_stored_alike_are_expanded_and_not_kept(written, tmp_path):
    """A stack has one dtype: scales of others would be rounded to the first expert's."""
    folder = Path(shutil.copytree(written("block_fp8", "qwen3_moe")[0], tmp_path / "model"))
    scale = "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv"
    rewrite(folder, lambda weights: weights.update({scale: weights[scale].bfloat16()}))
    said = f"experts of a layer are not stored alike: {scale} is BF16"
    assert said in refusal_of(keeping(folder))
    resolve(PoolConfig(model=str(folder), stored_weights="expand"), inspect_model(str(folder)))


def refusal_of(config: PoolConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve(config, inspect_model(config.model, config.dtype))
    return str(refused.value)


def test_what_cannot_be_kept_is_refused_before_anything_starts(written, random_models):
    plain = random_models["qwen3_moe"]
    said = "stored_weights='keep' cannot be: its checkpoint holds weights in floats, not quantised; set stored_weights"
    assert said in refusal_of(keeping(Path(plain)))
    folder, _ = written("block_fp8", "qwen3_moe")
    assert "weights='random' reads no checkpoint" in refusal_of(keeping(folder, weights="random"))
    assert "is computed from weights in the model's dtype" in refusal_of(
        keeping(folder, ranks=2, dispatch="alltoall", quantisation="fp8")
    )
    on_gpu = {"worker": WorkerConfig(device="cuda"), "dtype": "bfloat16", "ranks": 2}
    assert "experts='triton' reads expanded weights, and experts are kept as block_fp8 stores them" in refusal_of(
        keeping(folder, experts="triton", dispatch="allgather", **on_gpu)
    )
    assert "dispatch='mega' reads expanded weights" in refusal_of(keeping(folder, dispatch="mega", **on_gpu))
    for dispatch in ("measured", "allgather"):
        assert "experts='humming' takes bfloat16, the pool's dtype is float32" in refusal_of(
            keeping(folder, dispatch=dispatch, **on_gpu | {"dtype": "float32"})
        )
    assert "reads expert weights as a quantised checkpoint stores them, and they are plain here" in refusal_of(
        PoolConfig(model=plain, experts="humming", dispatch="allgather", **on_gpu)
    )


OPEN = {"dtype": "bfloat16", "stored_weights": "auto"}


def resolved(folder: Path | str, device: str = "cuda", **settings: Any) -> tuple[str | None, str, str]:
    config = PoolConfig(model=str(folder), worker=WorkerConfig(device=device), **OPEN | settings)
    found = resolve_unchecked(config, inspect_model(str(folder), config.dtype))
    return (None if found.stored is None else found.stored.format), found.experts, found.dispatch


def test_auto_keeps_on_gpus_what_kernels_read_and_nothing_elsewhere(written, random_models):
    folder, _ = written("nvfp4", "qwen3_moe")
    assert resolved(folder, ranks=2) == ("nvfp4", "torch", "measured")
    assert resolved(folder, ranks=2, dispatch="allgather") == ("nvfp4", "humming", "allgather")
    assert resolved(folder, ranks=1, dispatch="allgather") == ("nvfp4", "humming", "local")
    assert resolved(folder, ranks=1) == ("nvfp4", "torch", "measured")
    assert resolved(folder, ranks=2, stored_weights="expand", dispatch="allgather") == (None, "torch", "allgather")
    assert resolved(folder, ranks=2, dispatch="mega")[0] is None
    assert resolved(folder, ranks=2, experts="triton", dispatch="allgather")[:2] == (None, "triton")
    assert resolved(folder, ranks=2, dtype="float16")[0] is None
    assert resolved(folder, ranks=2, quantisation="fp8", dispatch="mega")[0] is None
    assert resolved(folder, ranks=2, weights="random")[0] is None
    assert resolved(folder, "cpu", ranks=2) == (None, "torch", "allgather")
    assert resolved(random_models["qwen3_moe"], ranks=2)[0] is None
    gpt_oss, _ = written("mxfp4", "gpt_oss")
    assert resolved(gpt_oss, ranks=2)[0] == "mxfp4"


def test_only_what_reads_kept_weights_is_measured_on_gpus():
    def names(world_size: int, weights: str, experts: str = "torch") -> list[str]:
        found = candidate_paths(Tuning(), "cuda", experts, "none", 512, world_size, weights)
        return list(map(str, found))

    assert names(2, "e2m1") == ["flashinfer+humming", "allgather+humming"]
    assert names(1, "e4m3") == ["local+humming"]
    assert not [name for name in names(2, "plain") if "humming" in name]
    assert list(map(str, candidate_paths(Tuning(), "cpu", "torch", "none", 512, 2, "e4m3"))) == [
        "allgather+torch",
        "alltoall+torch",
    ]


def test_experts_that_are_left_plain_are_not_kept(written, tmp_path):
    folder = Path(shutil.copytree(written("block_fp8", "qwen3_moe")[0], tmp_path / "model"))
    expanded = load_all_of(written("block_fp8", "qwen3_moe")[1])

    def plain_first_layer(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "layers.0.mlp.experts." in name]:
            del weights[name]
        weights |= {name: one for name, one in expanded.items() if "layers.0.mlp.experts." in name}

    rewrite(folder, plain_first_layer)
    spec = inspect_model(str(folder))
    assert (spec.kept, spec.not_kept) == (None, "not all of its experts are quantised")


def test_what_is_between_the_projections_is_tried_on_numbers(random_models):
    def gating_of(family: str) -> Gating | None:
        return inspect_model(random_models[family]).moe[0].gating

    assert gating_of("qwen3_moe") == gating_of("deepseek_v3") == gating_of("mixtral") == Gating()
    assert gating_of("gpt_oss") == Gating(1.702, 1.0, 7.0, is_interleaved=True, has_bias=True)


def step_once(engine: RankEngine) -> str:
    try:
        run_script(engine, [{0: [[5, 6, 7]]}, {}], 2, False)
    except ExpertPoolError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_that_keep_and_ranks_that_expand_get_the_error_on_every_rank(written):
    folder, _ = written("block_fp8", "qwen3_moe")
    config = keeping(folder, ranks=2)
    expanding = msgspec.structs.replace(resolve(config, inspect_model(str(folder), "float32")), stored=None)
    with ForkedRanks(config, graphs=False, otherwise={1: expanding}) as rank_set:
        said = rank_set.call(step_once)
    assert said[0] == said[1]
    assert said[0].startswith("GeometryError: ranks disagree")


@pytest.fixture
def kept_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Experts that read kept weights on CPUs, registered for one test; the name of their module."""
    keep_registries(monkeypatch.setattr)
    sys.modules.pop("kept_reader", None)
    yield "kept_reader"
    sys.modules.pop("kept_reader", None)


def generated_and_left(engine: RankEngine) -> tuple[dict[int, tuple[int, ...]], str, int]:
    """Tokens, what computed them, and bytes that are left of what was kept."""
    tokens = run_script(engine, [{0: PROMPTS}, {}], NEW_TOKENS, False).token_ids
    return tokens, path_of(engine).held.expert_backend, held_of(engine)[1]


def test_experts_from_elsewhere_read_what_is_kept_and_then_it_is_given_up(kept_reader, written):
    """`auto` takes them wherever they run, and keeps what they read."""
    folder, expanded = written("block_fp8", "qwen3_moe")
    settings = {"plugins": (kept_reader,), "stored_weights": "auto", "dtype": "float32"}
    config = PoolConfig(model=str(folder), ranks=2, limits=LIMITS, **settings)
    found = run_on_ranks(config, generated_and_left, graphs=False)
    reference = Reference(str(expanded))
    assert found[0][0] == {key: reference.greedy(prompt, NEW_TOKENS) for key, prompt in enumerate(PROMPTS)}
    assert [rest for _, *rest in found] == [["kept_reader", 0]] * 2


def test_a_rank_that_lacks_what_kept_experts_need_has_all_ranks_refuse(kept_reader, written, tmp_path):
    folder = Path(shutil.copytree(written("block_fp8", "qwen3_moe")[0], tmp_path / "model"))
    (folder / "lacks_1").touch()
    with pytest.raises(AssertionError) as raised:
        run_on_ranks(keeping(folder, ranks=2, plugins=(kept_reader,)), held_of, graphs=False)
    said = "rank 1: its library is not installed; set stored_weights to 'expand'"
    assert str(raised.value).count(said) >= 2
