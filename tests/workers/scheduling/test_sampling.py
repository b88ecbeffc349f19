"""From logits to tokens: limits, ties, and seeds that mean the same wherever and with whomever a request runs."""

import weakref
from typing import Any

import numpy
import pytest
import torch
from expert_pool.cluster import CacheConfig, ConfigError, Limits, PoolConfig, SamplingParams
from expert_pool.workers.request import Generated, Request
from expert_pool.workers.scheduling import sampler
from expert_pool.workers.scheduling.rows import Row, RowFailure
from expert_pool.workers.scheduling.sampler import sample, uniform
from expert_pool.workers.scheduling.sequence import TokenSequence
from hypothesis import given
from hypothesis import strategies as st
from plain_ranks import PlainRanks
from torch.utils._python_dispatch import TorchDispatchMode

DRAWS = 200


def sequence(sampling: SamplingParams, num_generated: int = 0) -> TokenSequence:
    started = TokenSequence(Request(0, (1, 2), sampling), max_length=10_000, decode=None)
    started.token_ids += [3] * num_generated
    return started


def drawn(logits: list[float], **settings: float) -> set[int]:
    """Every token that many draws at different positions give."""
    sampling = SamplingParams(seed=11, **{"temperature": 1.0, **settings})
    sequences = [sequence(sampling, position) for position in range(DRAWS)]
    return set(sample(torch.tensor([logits] * DRAWS, dtype=torch.float32), sequences).token_ids_N.tolist())


def test_greedy_takes_the_first_of_equal_logits():
    assert sample(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), [sequence(SamplingParams())]).token_ids_N.tolist() == [1]


def test_without_limits_every_likely_token_is_drawn():
    assert drawn([1.0, 1.0, 1.0, 1.0]) == {0, 1, 2, 3}


def test_top_k_draws_among_the_k_most_likely():
    assert drawn([0.1, 0.4, 0.3, 0.2], top_k=2) == {1, 2}
    assert drawn([0.1, 0.4, 0.3, 0.2], top_k=1) == {1}
    assert drawn([0.1, 0.4, 0.3, 0.2], top_k=100) == {0, 1, 2, 3}


def test_top_k_keeps_no_more_of_equal_logits():
    """Of those at its last place, the ones of the lowest ids."""
    assert drawn([1.0, 2.0, 1.0, 2.0, 1.0], top_k=2) == {1, 3}
    assert drawn([1.0, 2.0, 1.0, 2.0, 1.0], top_k=3) == {0, 1, 3}
    assert drawn([1.0, 1.0, 1.0, 1.0], top_k=2, top_p=0.9) == {0, 1}


@given(logits=st.lists(st.integers(0, 3), min_size=1, max_size=300), top_p=st.sampled_from([1.0, 0.5]))
def test_top_k_of_one_is_greedy(logits, top_p):
    greedy = sample(torch.tensor([logits], dtype=torch.float32), [sequence(SamplingParams())]).token_ids_N.item()
    assert drawn(logits, top_k=1, top_p=top_p) == {greedy}


def test_top_p_draws_among_the_fewest_tokens_that_reach_the_share():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert drawn(logits, top_p=0.7) == {0, 1}
    assert drawn(logits, top_p=0.9) == {0, 1, 2}
    assert drawn(logits, top_p=1e-9) == {0}, "the most likely token is always left"


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors made under it that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and made._base is None:
                size = made.untyped_storage().nbytes()
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(made, self._released, size)
        return result

    def _released(self, size: int) -> None:
        self.live -= size


def test_many_draws_take_the_memory_of_a_few(monkeypatch):
    """Rows are drawn from a few at a time, each as it would be alone."""
    num_rows, vocab_size = 96, 512
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(5)).bfloat16()
    sequences = [sequence(SamplingParams(seed=1, temperature=0.9, top_p=0.9, top_k=300), n) for n in range(num_rows)]
    with PeakBytes() as at_once:
        tokens = sample(logits, sequences).token_ids_N
    monkeypatch.setattr(sampler, "_LOGITS_AT_ONCE", 4 * vocab_size)
    with PeakBytes() as by_four:
        assert torch.equal(sample(logits, sequences).token_ids_N, tokens)
    assert at_once.peak > 40 * logits.numel()
    assert by_four.peak < 8 * logits.numel()


def test_draws_follow_the_distribution():
    sampling = SamplingParams(seed=3, temperature=1.0)
    logits = torch.tensor([[0.7, 0.2, 0.1]] * 4000).log()
    tokens = sample(logits, [sequence(sampling, position) for position in range(4000)]).token_ids_N
    shares = tokens.bincount(minlength=3) / 4000
    assert shares.tolist() == pytest.approx([0.7, 0.2, 0.1], abs=0.03)


@given(
    logits=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40),
    temperature=st.floats(5e-324, 1e300),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 50),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 5),
)
def test_any_setting_in_bounds_draws_a_token_that_top_k_allows(logits, temperature, top_p, top_k, seed, position):
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    row = torch.tensor(logits)
    [token] = sample(row.unsqueeze(0), [sequence(sampling, position)]).token_ids_N
    assert 0 <= token < len(logits)
    allowed = min(top_k or len(logits), len(logits))
    assert token in row.sort(descending=True, stable=True).indices[:allowed]


def test_the_number_behind_a_draw_depends_on_seed_and_position():
    numbers = {uniform(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(50)}
    assert len(numbers) == 150
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(5, 7) == uniform(5, 7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_with_logits_that_are_not_finite_fails_alone(bad, temperature):
    logits = torch.tensor([[0.0, 3.0], [bad, 1.0], [2.0, 0.0]])
    sampling = SamplingParams(temperature=temperature, seed=1, top_k=1)
    rows = sample(logits, [sequence(sampling, num_generated=4)] * 3)
    assert rows.rows() == [Row(Generated((1,))), Row(Generated(), RowFailure.NOT_FINITE), Row(Generated((0,)))]
    assert all(0 <= token < 2 for token in rows.token_ids_N), "a step under way may take any of them in"


def test_no_sequences_give_no_rows():
    assert sample(torch.zeros(0, 5), []).rows() == []


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: set max_new_tokens to between 1 and 2**31 - 1"),
        ({"temperature": -0.5}, "temperature=-0.5: set temperature to 0 (greedy) or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0: set top_p to above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1: set top_k to 0 (all tokens) or more"),
        ({"seed": -1}, "seed=-1: set seed to between 0 and 2**64 - 1"),
        ({"seed": 2**64}, "set seed to between"),
        ({"stop": ("",)}, "at least one character"),
        ({"stop": ""}, "at least one character"),
        ({"stop": (1,)}, "stop=(1,): set stop to a text or several"),
        ({"stop": 5}, "stop=5: set stop to a text or several"),
        ({"stop": None}, "stop=None: set stop to a text or several"),
        ({"stop": "\ud800"}, "set stop to texts that have a UTF-8 form"),
        ({"top_k": 2**31}, "top_k=2147483648: set top_k to 0 (all tokens) or more, below 2**31"),
        ({"temperature": 10**400}, "set temperature to a number"),
        ({"ignore_eos": "no"}, "ignore_eos='no': set ignore_eos to true or false"),
        ({"skip_special_tokens": 2}, "skip_special_tokens=2: set skip_special_tokens to true or false"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5: set max_new_tokens to an integer"),
        ({"top_k": 2.5}, "top_k=2.5: set top_k to an integer"),
        ({"temperature": "hot"}, "temperature='hot': set temperature to a number"),
        ({"temperature": "0"}, "temperature='0': set temperature to a number"),
        ({"max_new_tokens": True}, "max_new_tokens=True: set max_new_tokens to an integer"),
        ({"top_k": True}, "top_k=True: set top_k to an integer"),
        ({"ignore_eos": 1}, "ignore_eos=1: set ignore_eos to true or false"),
    ],
)
def test_a_setting_out_of_bounds_is_refused_with_its_bound(settings, complaint):
    with pytest.raises(ConfigError) as refusal:
        SamplingParams(**settings)
    assert complaint in str(refusal.value)


PROMPTS = [[5, 17, 42], [9], [100, 3] * 12, [64], list(range(2, 50)), [7, 7, 7]]
NEW_TOKENS = 24


def seeded() -> list[SamplingParams]:
    """Each request samples its own way; the last two are alike but for the seed."""
    ways = [{}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.5, "top_k": 20, "top_p": 0.9}, {}, {}]
    return [
        SamplingParams(
            **{"temperature": 0.9, "seed": 1000 + i, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, **way}
        )
        for i, way in enumerate(ways)
    ]


@pytest.fixture(scope="module")
def alone(random_models) -> list[tuple[int, ...]]:
    """The tokens of each request on a single rank without company."""
    with PlainRanks(PoolConfig(model=random_models["qwen3_moe"])) as ranks:
        return [
            ranks.generate([prompt], [sampling])[0].token_ids
            for prompt, sampling in zip(PROMPTS, seeded(), strict=True)
        ]


@pytest.mark.parametrize(("ranks", "attn_tp_size"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_seeded_tokens_are_the_same_on_any_number_of_ranks_and_in_any_company(
    ranks, attn_tp_size, alone, random_models
):
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=ranks, attn_tp_size=attn_tp_size)
    with PlainRanks(config) as rank_set:
        together = rank_set.generate(PROMPTS, seeded())
        backwards = rank_set.generate(PROMPTS[::-1], seeded()[::-1])
    assert [completion.token_ids for completion in together] == alone
    assert [completion.token_ids for completion in backwards[::-1]] == alone


def test_seeded_tokens_are_the_same_after_preemption(alone, random_models):
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        limits=Limits(chunked_prefill_size=16),
        cache=CacheConfig(block_size=4, num_tokens=96),
    )
    with PlainRanks(config) as rank_set:
        completions = rank_set.generate(PROMPTS, seeded())
        assert rank_set.stats[0].preemptions > 0
    assert [completion.token_ids for completion in completions] == alone


def test_another_seed_gives_other_tokens(random_models):
    settings = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=NEW_TOKENS) for seed in range(4)]
    with PlainRanks(PoolConfig(model=random_models["qwen3_moe"])) as rank_set:
        completions = rank_set.generate([[5, 17, 42]] * 4, settings)
    assert len({completion.token_ids for completion in completions}) == 4


def test_one_stop_text_is_one_and_numbers_may_come_from_arrays():
    sampling = SamplingParams(
        stop="makes", ignore_eos=numpy.bool_(True), top_k=numpy.int64(3), temperature=numpy.float32(0.5)
    )
    assert sampling == SamplingParams(stop=("makes",), ignore_eos=True, top_k=3, temperature=0.5)
