"""Which keys a token sees is found from the masks that a family builds, and its tokens are those of Transformers."""

import pytest
import torch
from expert_pool.cluster import CacheConfig, Limits, PoolConfig
from expert_pool.dispatch.errors import CheckpointError
from expert_pool.workers.attention.gathered import GatheredAttention
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.model.probe import window_of
from handle import target_of
from models import FAMILIES, VOCAB_SIZE, WINDOW_IN_MASK
from plain_ranks import ForkedRanks
from rank_insides import Generated, run_script
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

LENGTHS = (1, 7, 8, 9, 40, 100)
NEW_TOKENS = 12


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("qwen2_moe", [8, 8, None]),
        ("phimoe", [8, 8]),
        ("mixtral", [24, 24]),
        ("gpt_oss", [16, None, 16, None]),
        ("deepseek_v3", [None] * 3),
    ],
)
def test_each_layer_has_the_window_of_its_mask(family, windows, random_models):
    assert [shape.sliding_window for shape in inspect_model(random_models[family]).attention] == windows


@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 1000])
def test_a_window_is_read_off_the_mask(window):
    expected = window if window < 64 else None
    assert window_of(sliding_window_causal_mask_function(window), 64) == expected


def test_a_causal_mask_has_none():
    assert window_of(causal_mask_function, 64) is None


@pytest.mark.parametrize(
    "mask",
    [
        bidirectional_mask_function,
        chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64)),
        chunked_causal_mask_function(24, torch.zeros(1, dtype=torch.int64)),
        or_masks(causal_mask_function, lambda batch, head, query, key: key < 60),
    ],
    ids=["bidirectional", "chunks", "chunks that do not divide", "a prefix that all see"],
)
def test_a_mask_of_another_form_is_refused(mask):
    with pytest.raises(CheckpointError, match="neither causal nor a sliding window"):
        window_of(mask, 64)


def test_masks_and_attention_that_disagree_are_refused(tmp_path):
    """OLMoE hands on a window that only some of Transformers' attentions apply."""
    FAMILIES["olmoe"](sliding_window=8).save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match="the mask of layer 0 has a window of None keys and its attention one of 8"
    ):
        inspect_model(str(tmp_path))


def gathered(engine: RankEngine, *arguments: object) -> Generated:
    """With decode graphs that attend as those on a GPU without FlashInfer's kernels do."""
    target, spec = target_of(engine), engine.config.spec
    target.attention = GatheredAttention(target.cache, spec.attention, spec.context_length, engine.device)
    return run_script(engine, *arguments)


@pytest.mark.parametrize("family", WINDOW_IN_MASK)
def test_tokens_are_those_of_transformers_beyond_the_window(family, random_models, references):
    """Eager prefill and replayed decodes, by both attentions in PyTorch; prompts below, at and beyond the window."""
    config = PoolConfig(
        model=random_models[family],
        ranks=2,
        limits=Limits(
            chunked_prefill_size=32,
            max_running_requests=4,
            cuda_graph_bs=(1, 2, 4),
            disable_piecewise_cuda_graph=True,
        ),
        cache=CacheConfig(num_tokens=1024),
    )
    prompts = [[(7 * size + 3 * place) % (VOCAB_SIZE - 2) + 2 for place in range(size)] for size in LENGTHS]
    split = [prompts[dp_rank::2] for dp_rank in range(2)]
    with ForkedRanks(config) as rank_set:
        runs = [rank_set.call(run, [{0: mine} for mine in split], NEW_TOKENS, False) for run in (run_script, gathered)]
    expected = [references[family].greedy(prompt, NEW_TOKENS) for mine in split for prompt in mine]
    for by_rank in runs:
        tokens = {key: token_ids for generated in by_rank for key, token_ids in generated.token_ids.items()}
        assert tokens == dict(enumerate(expected))
        assert all(generated.report.replays > 0 for generated in by_rank)
