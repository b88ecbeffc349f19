"""A pool over Ray, as a Python program uses it."""

import shutil
from collections.abc import Iterator

import pytest
import ray
from expert_pool.cluster import ConfigError, ExpertPool, Limits, PoolConfig, RankError, SamplingParams
from transformers import AutoTokenizer

TEXTS = ["def add(", "The for statement is used to", "A class definition", "x", "import"]


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    """A Ray session of this module's own; pools that are launched use it."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pool(session, tiny_moe, tmp_path_factory) -> Iterator[ExpertPool]:
    """Two ranks with a batch each, on the model that has a tokenizer; few graphs, which take seconds to record.

    The model has a default of its own.
    """
    model = tmp_path_factory.mktemp("defaults") / "model"
    shutil.copytree(tiny_moe, model)
    (model / "generation_config.json").write_text('{"eos_token_id": 0, "max_new_tokens": 7}')
    limits = Limits(cuda_graph_bs=(1, 4), piecewise_cuda_graph_max_tokens=16)
    config = PoolConfig(model=str(model), ranks=2, limits=limits, generation_config="model")
    with ExpertPool.launch(config) as launched:
        yield launched


@pytest.fixture(scope="module")
def tokenizer(tiny_moe):
    return AutoTokenizer.from_pretrained(tiny_moe, local_files_only=True)


def test_texts_are_completed_as_transformers_completes_them(pool, tokenizer, references):
    completions = {one.index: one for one in pool.generate(TEXTS, SamplingParams(max_new_tokens=24))}
    assert completions.keys() == set(range(len(TEXTS)))
    for index, text in enumerate(TEXTS):
        prompt = tokenizer(text)["input_ids"]
        expected = references["tiny_moe"].greedy(prompt, 24)
        completion = completions[index]
        assert completion.prompt_token_ids == tuple(prompt)
        assert completion.token_ids == expected
        assert completion.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert completion.finish_reason == ("length" if len(expected) == 24 else "stop")
        assert (completion.num_prompt_tokens, completion.num_completion_tokens) == (len(prompt), len(expected))


def test_prompts_that_come_without_settings_get_the_models(pool, references):
    [completion] = pool.generate([[5, 6]])
    assert completion.token_ids == references["tiny_moe"].greedy([5, 6], 7)
    assert (completion.num_completion_tokens, completion.finish_reason) == (7, "length")


def test_completions_come_as_they_finish(pool):
    lengths = [150, 2]
    settings = [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in lengths]
    finished = [one.index for one in pool.generate([[5, 6], [7, 8]], settings)]
    assert finished == [1, 0]


def test_a_request_that_fails_fails_alone(pool, references):
    good = [5, 17, 42]
    prompts = [good, [5, 2048], good, [5] * 1024, [-1], good, []]
    completions = {one.index: one for one in pool.generate(prompts, SamplingParams(max_new_tokens=8))}
    expected = references["tiny_moe"].greedy(good, 8)
    assert [completions[index].token_ids for index in (0, 2, 5)] == [expected] * 3
    errors = {index: one.error for index, one in completions.items() if one.finish_reason == "error"}
    assert errors == {
        1: "token id 2048 is outside the vocabulary of 2048",
        3: "the prompt has 1024 tokens; the model's context of 1024 holds a prompt of at most 1023",
        4: "token id -1 is outside the vocabulary of 2048",
        6: "the prompt is empty",
    }


def test_a_stop_text_ends_a_completion_before_it(pool):
    [free] = pool.generate(["The for statement is"], SamplingParams(max_new_tokens=24))
    middle = free.text[len(free.text) // 2 :][:3]
    [stopped] = pool.generate(["The for statement is"], SamplingParams(max_new_tokens=24, stop=(middle, "\0")))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(middle)]
    assert stopped.num_completion_tokens < free.num_completion_tokens


def test_two_callers_are_served_side_by_side(pool, references):
    first = pool.generate([[5, 6]] * 3, SamplingParams(max_new_tokens=20))
    second = pool.generate([[7, 8]] * 3, SamplingParams(max_new_tokens=10))
    assert {one.token_ids for one in second} == {references["tiny_moe"].greedy([7, 8], 10)}
    assert {one.token_ids for one in first} == {references["tiny_moe"].greedy([5, 6], 20)}


def test_a_caller_that_leaves_early_frees_the_pool(pool):
    long = SamplingParams(max_new_tokens=1000, ignore_eos=True)
    stream = pool.generate([[5, 6]] + [[7, 8]] * 20, [SamplingParams(max_new_tokens=2, ignore_eos=True)] + [long] * 20)
    assert next(stream).index == 0
    stream.close()
    before = sum(stats.generated_tokens for stats in pool.status().stats)
    seen = []
    list(pool.generate([[9]] * 2, SamplingParams(max_new_tokens=200, ignore_eos=True), on_stats=seen.append))
    assert max(stats.running + stats.waiting for stats in seen[-2:]) <= 1, "requests of the caller that left still run"
    assert before < sum(stats.generated_tokens for stats in pool.status().stats)


def test_seeded_sampling_repeats_and_unseeded_sampling_does_not(pool):
    def tokens(seed: int | None) -> tuple[int, ...]:
        sampling = SamplingParams(max_new_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
        [completion] = pool.generate([[5, 6]], sampling)
        return completion.token_ids

    assert tokens(3) == tokens(3)
    assert len({tokens(None) for _ in range(3)}) == 3


def test_no_prompts_give_no_completions(pool):
    assert list(pool.generate([])) == []


def test_what_cannot_be_a_request_is_refused_when_it_is_given(pool):
    with pytest.raises(ConfigError, match="1 sampling settings for 2 prompts: give one, or one a prompt"):
        pool.generate([[5], [6]], [SamplingParams()])
    with pytest.raises(
        ConfigError, match="a prompt is a text, a sequence of integer token ids or a list of chat messages"
    ):
        pool.generate([[5.5]])


def test_status_shows_where_the_ranks_are_and_what_they_hold(pool):
    status = pool.status()
    assert (status.state, status.failure) == ("ready", None)
    assert [place.rank for place in status.places] == [0, 1]
    assert len({place.pid for place in status.places}) == 2
    spec = pool.rank_config.spec
    assert [load.expert_bytes for load in status.loads] == [spec.expert_bytes // 2] * 2


@pytest.mark.long
def test_ranks_that_share_a_batch_generate_the_same(session, random_models, references):
    config = PoolConfig(
        model=random_models["qwen3_moe"], ranks=2, attn_tp_size=2, limits=Limits(chunked_prefill_size=16)
    )
    prompts = [[(7 * length + 3 * position) % 126 + 2 for position in range(length)] for length in (1, 40, 100)]
    with ExpertPool.launch(config) as pool:
        completions = {one.index: one for one in pool.generate(prompts, SamplingParams(max_new_tokens=12))}
        with pytest.raises(ConfigError, match="is text, and the model folder carries no tokenizer"):
            pool.generate(["text"])
    for index, prompt in enumerate(prompts):
        assert completions[index].token_ids == references["qwen3_moe"].greedy(prompt, 12)
        assert completions[index].text is None
    pool.shutdown()
    with pytest.raises(RankError, match="the pool was shut down"):
        list(pool.generate([[5]]))
