"""How long a request may be, and that what lies beyond `max_position_embeddings` is computed as Transformers does."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Reference
from expert_pool.cluster import CacheConfig, Limits, PoolConfig
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.request import SamplingParams
from models import FAMILIES, VOCAB_SIZE, save_random_model
from plain_ranks import PlainRanks

WITHOUT_YARN = 384
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": WITHOUT_YARN}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def changed(rope: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {name: value for name, value in {**rope, **settings}.items() if value != "absent"}


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (YARN, 4 * WITHOUT_YARN),
        (changed(YARN, factor=1.0), 512),
        (changed(YARN, factor=1.5), 576),
        (changed(YARN, original_max_position_embeddings=128), 512),
        (changed(YARN, original_max_position_embeddings="absent"), 2048),
        (changed(YARN, factor=None), 512),
        (LLAMA3, 512),
        (changed(YARN, rope_type="linear"), 512),
        ({"rope_type": "default", "rope_theta": 10000.0}, 512),
    ],
)
def test_yarn_stretches_the_length_of_pretraining_and_nothing_shortens_what_the_config_says(rope, context, tmp_path):
    """Of a configuration whose `max_position_embeddings` is 512."""
    FAMILIES["qwen3_moe"](rope_parameters=rope).save_pretrained(tmp_path)
    assert inspect_model(str(tmp_path)).context_length == context


@pytest.mark.parametrize(("window", "found"), [(64, 64), (512, 512), (1024, 1024), (4 * WITHOUT_YARN, None)])
def test_a_window_within_the_stretched_length_is_a_window(window, found, tmp_path):
    config = FAMILIES["qwen3_moe"](rope_parameters=YARN)
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, window, 0
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    config.save_pretrained(tmp_path)
    assert {layer.sliding_window for layer in inspect_model(str(tmp_path)).attention} == {found}


def test_tokens_beyond_max_position_embeddings_equal_transformers(tmp_path: Path):
    rope = changed(YARN, original_max_position_embeddings=96)
    save_random_model("qwen3_moe", tmp_path, max_position_embeddings=128, rope_parameters=rope)
    prompts = [[(5 * index + length) % (VOCAB_SIZE - 2) + 2 for index in range(length)] for length in (200, 370)]
    config = PoolConfig(
        model=str(tmp_path),
        ranks=2,
        limits=Limits(chunked_prefill_size=64, max_running_requests=2),
        cache=CacheConfig(num_tokens=1024),
    )
    reference, sampling = Reference(str(tmp_path)), SamplingParams(max_new_tokens=20, ignore_eos=True)
    with PlainRanks(config) as ranks:
        long, full, refused = ranks.generate([*prompts, [5] * 384], sampling)
    assert long.token_ids == reference.greedy(prompts[0], 20)
    assert full.token_ids == reference.greedy(prompts[1], 14)
    assert (long.finish_reason, full.finish_reason) == ("length", "length")
    assert "the model's context of 384 holds a prompt of at most 383" in refused.error
