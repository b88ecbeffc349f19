"""Checkpoints as they are published: what is read of them is what their formats say, to the bit."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import Reference
from expert_pool.cluster import Limits, PoolConfig
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.cli.plan_report import plan_pool
from expert_pool.workers.model.checkpoint import check_weights
from expert_pool.workers.model.formats.expanded import ExpandedTensor
from expert_pool.workers.model.formats.registry import format_of
from expert_pool.workers.model.formats.shared.arithmetic import E2M1 as arithmetic_e2m1
from expert_pool.workers.model.formats.shared.arithmetic import times_blocks, unpacked, values_of_e4m3
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.model.weight_files import headers_of, open_slices
from models import VOCAB_SIZE
from plain_ranks import ForkedRanks
from rank_insides import run_script
from safetensors.torch import load_file
from stored_checkpoints import E2M1, E4M3, PAIRS, as_e4m3, change_json, writer

LAYOUTS = ((1, 1), (2, 1), (4, 1), (4, 2))
PROMPTS = [[(7 * length + 3 * at) % (VOCAB_SIZE - 2) + 2 for at in range(length)] for length in (1, 17, 40, 150)]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[str, str], tuple[Path, Path]]:
    """A stored checkpoint and its expanded twin, by format and family."""
    return writer(tmp_path_factory.mktemp)


def read_of(path: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A checkpoint as the loader is shown it, whole, what is quantised expanded to a dtype."""
    slices = open_slices(path)
    stored = format_of(inspect_model(path)).tensors(headers_of(slices))
    return {
        name: slices[one.as_it_is][...] if one.as_it_is is not None else ExpandedTensor(one, slices, dtype)[...]
        for name, one in stored.items()
    }


@pytest.mark.parametrize(("stored", "family"), sorted(PAIRS))
def test_what_is_read_is_what_the_format_says(stored, family, written):
    folder, expanded = written(stored, family)
    spec = inspect_model(str(folder))
    assert spec.checkpoint_format == stored.partition(" ")[0]
    check_weights(spec)
    read, expected = read_of(spec.path), load_file(expanded / "model.safetensors")
    assert read.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(read[name], expected[name])] == []
    rounded = read_of(spec.path, torch.bfloat16)
    assert [name for name in expected if not torch.equal(rounded[name].bfloat16(), expected[name].bfloat16())] == []
    is_quantised = [
        one.expand is not None for one in format_of(spec).tensors(headers_of(open_slices(spec.path))).values()
    ]
    assert sum(is_quantised) >= {"gpt_oss": 4, "deepseek_v3": 12, "qwen3_moe": 24}[family]


def test_every_code_has_the_value_that_its_definition_gives_it():
    codes = np.array([code for code in range(256) if not np.isnan(E4M3[code])], dtype=np.uint8)
    assert len(codes) == 254
    assert values_of_e4m3(as_e4m3(codes)).numpy().tobytes() == E4M3[codes].tobytes()
    every = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    both = np.stack([E2M1[np.arange(256) % 16], E2M1[np.arange(256) // 16]], -1)
    assert unpacked(every, arithmetic_e2m1).numpy().tobytes() == both.tobytes()


@pytest.mark.parametrize("block", [(1, 16), (16, 1), (128, 128), (64, 48), (1, 500)], ids=str)
def test_the_last_blocks_of_rows_and_columns_may_be_smaller(block):
    values = torch.randn(192, 320, generator=torch.Generator().manual_seed(1))
    scales = torch.rand(-(-192 // block[0]), -(-320 // block[1]), generator=torch.Generator().manual_seed(2))
    expected = torch.empty(192, 320)
    for row in range(192):
        for column in range(0, 320, block[1]):
            here = slice(column, column + block[1])
            expected[row, here] = values[row, here] * scales[row // block[0], column // block[1]]
    assert torch.equal(times_blocks(values.clone(), scales, block), expected)


def test_a_plan_says_how_weights_are_stored_and_what_ranks_hold_of_them(written):
    folder, expanded = written("compressed_int", "deepseek_v3")
    stored, plain = (plan_pool(PoolConfig(model=str(one), ranks=2)) for one in (folder, expanded))
    assert stored.refusals + stored.problems == ()
    assert stored.total_bytes == plain.total_bytes
    assert plain.stored is None
    in_files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    held = stored.config.spec.dense_bytes + stored.config.spec.expert_bytes
    assert (stored.stored.format, stored.stored.file_bytes, stored.stored.held_bytes) == (
        "compressed_int",
        in_files,
        held,
    )
    said = CliRunner().invoke(main, ["plan", "--model", str(folder), "--ranks", "2"]).output
    assert f"weights: stored as compressed_int, {in_files:,} bytes in all files; compressed_int expanded to" in said


def test_kimi_k2_is_served_as_the_family_that_it_is_and_its_own_code_is_never_run(written, tiny_moe, tmp_path):
    """With a tokenizer that needs none of that code either, of which Transformers would ask on the terminal."""
    folder = Path(shutil.copytree(written("compressed_int", "deepseek_v3")[0], tmp_path / "model"))
    as_deepseek = inspect_model(str(folder))
    auto_map = {"AutoConfig": "theirs.DeepseekV3Config", "AutoModelForCausalLM": "theirs.DeepseekV3ForCausalLM"}
    change_json(folder / "config.json", lambda config: config | {"model_type": "kimi_k2", "auto_map": auto_map})
    (folder / "theirs.py").write_text("raise SystemExit(7)")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_moe) / file, folder)
    spec = inspect_model(str(folder))
    check_weights(spec)
    assert spec.model_type == "deepseek_v3"
    assert (spec.moe, spec.attention, spec.dense_bytes) == (
        as_deepseek.moe,
        as_deepseek.attention,
        as_deepseek.dense_bytes,
    )
    config = PoolConfig(model=str(folder), ranks=1)
    with ForkedRanks(config, graphs=False) as rank_set:
        [generated] = rank_set.call(run_script, [{0: PROMPTS}], NEW_TOKENS, False)
    reference = Reference(str(written("compressed_int", "deepseek_v3")[1]))
    expected = [reference.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert generated.token_ids == dict(enumerate(expected))


def cases() -> list[tuple[str, str, int, int, str]]:
    every = [
        (*pair, ranks, attn_tp_size, dispatch)
        for pair in sorted(PAIRS)
        for ranks, attn_tp_size in LAYOUTS
        for dispatch in ("allgather", "alltoall")
        if ranks > 1 or dispatch == "allgather"
    ]
    whole = os.environ.get("EXPERT_POOL_FULL_MATRIX") == "1"
    return every if whole else sorted(random.Random(85).sample(every, 2))


@pytest.mark.parametrize(("stored", "family", "ranks", "attn_tp_size", "dispatch"), cases())
def test_greedy_tokens_equal_those_of_the_expanded_weights(stored, family, ranks, attn_tp_size, dispatch, written):
    folder, expanded = written(stored, family)
    limits = Limits(chunked_prefill_size=64, max_running_requests=len(PROMPTS))
    config = PoolConfig(
        model=str(folder), ranks=ranks, attn_tp_size=attn_tp_size, dispatch=dispatch, limits=limits, dtype="float32"
    )
    dp_size = config.layout.dp_size
    split = [PROMPTS[dp_rank::dp_size] for dp_rank in range(dp_size)]
    with ForkedRanks(config, graphs=False) as rank_set:
        generated = rank_set.call(run_script, [{0: mine} for mine in split], NEW_TOKENS, False)
    reference = Reference(str(expanded))
    expected = [reference.greedy(prompt, NEW_TOKENS) for mine in split for prompt in mine]
    tokens = {key: token_ids for one in generated for key, token_ids in one.token_ids.items()}
    assert tokens == dict(enumerate(expected))
