"""Steps that hold chunks of prompts and rows that decode: the tokens are those of Transformers, whatever gives way.

The suite runs a few cases; `make test-matrix` runs every family, layout and dispatch with every chunk.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from expert_pool.cluster import CacheConfig, Limits, PoolConfig, WorkerConfig
from expert_pool.graphs.plan import CapturePlan
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.request import RankStats
from handle import noting_preemptions, stats_of
from models import ALL_FAMILIES, FAMILIES, VOCAB_SIZE
from plain_ranks import ForkedRanks
from rank_insides import Generated, run_script

LAYOUTS = (
    (1, 1, "allgather"),
    *product((2, 4), (1, 2), ("allgather", "alltoall")),
)
SAMPLE = [
    ("qwen3_moe", (2, 1, "alltoall"), 7, True),
    ("gpt_oss", (1, 1, "allgather"), 64, True),
    ("mixtral", (2, 2, "alltoall"), 1, False),
]
MATRIX = [
    *product(FAMILIES, LAYOUTS, (1, 7, 64), (False, True)),
    *product(ALL_FAMILIES.keys() - FAMILIES.keys(), [(2, 1, "allgather")], (1, 7, 64), (False, True)),
]
CASES = sorted(MATRIX) if os.environ.get("EXPERT_POOL_FULL_MATRIX") == "1" else SAMPLE

NEW_TOKENS = 24
BLOCK_SIZE = 4
MAX_RUNNING = 4
# Tokens of the prompt that takes several steps beside the others, for each chunk.
LONG = {1: 20, 7: 60, 64: 400}


def prompt_of(length: int, salt: int) -> list[int]:
    return [(7 * length + 3 * position + 31 * salt) % (VOCAB_SIZE - 2) + 2 for position in range(length)]


def blocks_of(chunk: int) -> int:
    """Few more than the long prompt and two others have, so that it gives way in the middle of its chunks."""
    return 7 + -(-LONG[chunk] // BLOCK_SIZE) + 1


def arrivals_of(dp_size: int, chunk: int) -> list[dict[int, list[list[int]]]]:
    """Prompts arrive while others decode; of several DP ranks the last has nothing to do for long."""
    busy = [
        {
            0: [prompt_of(5, dp_rank), prompt_of(9, dp_rank)],
            12 if chunk == 1 else 3: [prompt_of(LONG[chunk], dp_rank)],
            14 + dp_rank: [prompt_of(3, dp_rank), prompt_of(12, dp_rank)],
        }
        for dp_rank in range(max(1, dp_size - 1))
    ]
    return busy if dp_size == 1 else [*busy, {25: [prompt_of(12, 99)]}]


@dataclass
class Ran:
    """What one rank did.

    Attributes:
        generated: tokens and steps.
        gave_way: of each request that gave way, whether it was in the middle of its prompt.
        stats: counters, at leaders.
        traced: what each step held, as traces have it.
    """

    generated: Generated
    gave_way: list[bool]
    stats: RankStats
    traced: list[str]


def run_and_note(engine: RankEngine, arrivals: Sequence[dict[int, list[list[int]]]], graphs: bool) -> Ran:
    if not graphs:
        engine.graphs.commit_plan(CapturePlan(()))
    before = len(engine.trace().events)
    with noting_preemptions(engine) as gave_way:
        generated = run_script(engine, arrivals, NEW_TOKENS)
    traced = [event.kind for event in engine.trace().events[before:] if event.stage == "launch"]
    return Ran(generated, gave_way, stats_of(engine), traced)


@pytest.mark.parametrize(("family", "layout", "chunk", "overlap"), CASES)
def test_mixed_steps_give_the_tokens_of_transformers(family, layout, chunk, overlap, random_models, references):
    """With graphs and without, prompts that arrive while others decode, and one that gives way in its middle."""
    ranks, attn_tp_size, dispatch = layout
    config = PoolConfig(
        model=random_models[family],
        ranks=ranks,
        attn_tp_size=attn_tp_size,
        dispatch=dispatch,
        limits=Limits(chunked_prefill_size=chunk, max_running_requests=MAX_RUNNING, cuda_graph_bs=(1, 2, 4)),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_tokens=blocks_of(chunk) * BLOCK_SIZE),
        worker=WorkerConfig(overlap=overlap, trace_steps=10_000),
    )
    arrivals = arrivals_of(config.layout.dp_size, chunk)
    with ForkedRanks(config) as rank_set:
        assert rank_set.rank_config.limits.mixed_steps
        runs = [rank_set.call(run_and_note, arrivals, graphs) for graphs in (True, False)]

    prompts = [p for by_iteration in arrivals for _, batch in sorted(by_iteration.items()) for p in batch]
    for by_rank in runs:
        tokens = {key: ids for ran in by_rank for key, ids in ran.generated.token_ids.items()}
        assert sorted(tokens) == list(range(len(prompts)))
        for key, prompt in enumerate(prompts):
            # The reference stops at an end of sequence, the pool was told to go on.
            expected = references[family].greedy(prompt, NEW_TOKENS)
            assert tokens[key][: len(expected)] == expected, (key, len(prompt))
    with_graphs, without = runs
    assert [ran.gave_way for ran in with_graphs] == [ran.gave_way for ran in without]
    assert any(with_graphs[0].gave_way), "a prompt gives way in the middle of its chunks"
    assert all(step.graph is None for ran in without for step in ran.generated.steps)
    steps = with_graphs[0].generated.steps
    for by_rank in runs:
        for ran in by_rank:
            assert [step.kinds for step in ran.generated.steps] == [step.kinds for step in steps]
    mixed = [step for step in steps if "MIXED" in step.kinds]
    assert (len(mixed) > 4) == (chunk > 1), "rows that decode fill a step of one token"
    assert {step.graph.kind for step in mixed} <= {"piecewise"}
    assert any("IDLE" in step.kinds for step in mixed) == (config.layout.dp_size > 1 and chunk > 1)
    assert max(max(step.num_tokens) for step in steps) <= max(chunk, MAX_RUNNING)
    for rank, ran in enumerate(with_graphs):
        dp_rank = config.layout.dp_rank(rank)
        kinds = [step.kinds[dp_rank] for step in steps]
        assert [kind.upper() for kind in ran.traced] == kinds
        if rank == config.layout.leader(dp_rank):
            counted = (ran.stats.decode_steps, ran.stats.mixed_steps, ran.stats.idle_steps)
            assert counted == tuple(kinds.count(kind) for kind in ("DECODE", "MIXED", "IDLE"))
            prefilled = sum(map(len, arrivals[dp_rank].values())) + ran.gave_way.count(False)
            decoded = ran.stats.generated_tokens - prefilled
            assert ran.stats.prompt_tokens + decoded == sum(step.num_tokens[dp_rank] for step in steps)
