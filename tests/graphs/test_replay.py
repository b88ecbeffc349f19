"""Replaying a graph changes nothing: not a bit beside the same step run directly, not a token beside no graphs."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import pytest
import torch
import torch.distributed as dist
from expert_pool.cluster import CacheConfig, Limits, PoolConfig
from expert_pool.dispatch.budgets.geometry import StepGeometry
from expert_pool.dispatch.budgets.step_kinds import KINDS
from expert_pool.graphs.plan import CaptureEntry, plan_captures
from expert_pool.workers.attention.kv_cache import PADDING_BLOCK
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.request import Request, SamplingParams
from expert_pool.workers.scheduling.inputs import StepInputs, dummy, pack
from expert_pool.workers.scheduling.rows import StepRows
from expert_pool.workers.scheduling.scheduler import BatchKind, ScheduledBatch, Slice
from expert_pool.workers.scheduling.sequence import TokenSequence
from expert_pool.workers.step_plan import EAGER_TOO_LARGE
from handle import allocator_of, cached_tensors, collectives_of, dispatcher_of, run_padded, target_of, tensors_of
from models import FAMILIES, VOCAB_SIZE
from plain_ranks import ForkedRanks
from rank_insides import Generated, RanStep, run_script

FULL_MATRIX = os.environ.get("EXPERT_POOL_FULL_MATRIX") == "1"
MAX_REQUESTS = 5
VERIFY_TOKENS = 3
PIECEWISE_TOKENS = 32
LIMITS = Limits(
    max_running_requests=MAX_REQUESTS,
    cuda_graph_bs=(1, 2, 4, 5),
    chunked_prefill_size=64,
    piecewise_cuda_graph_max_tokens=PIECEWISE_TOKENS,
)
SPECULATIVE = msgspec.structs.replace(LIMITS, speculative_algorithm="EAGLE", speculative_num_draft_tokens=VERIFY_TOKENS)
KIND_NAMES = ("decode", "target_verify", "piecewise")
CLOSE = 1e-5
# As float32 a NaN, as int32 an expert id far beyond every table.
POISON_WORD = 0x7FC00001
POISON_INTEGER = -(2**30)

LAYOUTS = [
    (1, 1, "allgather"),
    *itertools.product((2, 4), (1, 2), ("allgather", "alltoall")),
]
SAMPLE = [
    ("qwen3_moe", (1, 1, "allgather")),
    ("gpt_oss", (2, 1, "alltoall")),
    ("qwen3_moe", (2, 2, "allgather")),
    ("deepseek_v3", (4, 1, "allgather")),
    ("qwen3_moe", (4, 2, "alltoall")),
]
CASES = list(itertools.product(FAMILIES, LAYOUTS)) if FULL_MATRIX else SAMPLE


def config_of(model: str, ranks: int, attn_tp_size: int, dispatch: str, limits: Limits) -> PoolConfig:
    return PoolConfig(
        model=model,
        ranks=ranks,
        attn_tp_size=attn_tp_size,
        dispatch=dispatch,
        limits=limits,
        cache=CacheConfig(num_tokens=1024),
    )


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=lambda case: f"{case[0]}-{case[1][0]}ranks-tp{case[1][1]}-{case[1][2]}",
)
def rank_set(request: pytest.FixtureRequest, random_models: dict[str, str]) -> Iterator[ForkedRanks]:
    family, layout = request.param
    with ForkedRanks(config_of(random_models[family], *layout, SPECULATIVE)) as ranks:
        yield ranks


def largest_count(kind: str) -> int:
    return PIECEWISE_TOKENS if kind == "piecewise" else MAX_REQUESTS


def uneven_counts(kind: str, largest: int, dp_size: int) -> list[tuple[int, ...]]:
    """Counts per DP rank of which the largest is `largest`: all alike, falling from rank to rank, and all but one 0."""
    if kind == "piecewise" and not FULL_MATRIX:
        mixed = (largest, 0, largest // 2, 1)[:dp_size]
        turn = largest % dp_size
        return [mixed[turn:] + mixed[:turn]]
    alike = (largest,) * dp_size
    falling = tuple(max(0, largest - 2 * dp_rank) for dp_rank in range(dp_size))
    lone = tuple(largest if dp_rank == dp_size - 1 else 0 for dp_rank in range(dp_size))
    return sorted({alike, falling, lone}, reverse=True)


def make_batch(engine: RankEngine, kind: str, count: int) -> ScheduledBatch:
    """A batch of `count` requests (`piecewise`: tokens, over several requests), each with tokens cached already."""
    if kind == "piecewise":
        num_requests = min(MAX_REQUESTS, -(-count // 7))
        lengths = [count // num_requests + (index < count % num_requests) for index in range(num_requests)]
        if count % 2:  # a mixed step: all but the last decode
            lengths = [1] * (num_requests - 1) + [count - num_requests + 1]
    else:
        num_requests = count
        lengths = [VERIFY_TOKENS if kind == "target_verify" else 1] * count
    allocator = allocator_of(engine)
    slices = []
    for index, length in enumerate(lengths):
        # Contexts end within a block and at its edge; the last prompt starts at nothing.
        starts = kind == "piecewise" and index == num_requests - 1
        cached = (0 if starts else 3 + 13 * index) + engine.config.layout.dp_rank(engine.rank)
        tokens = tuple((11 * index + 5 * position + count) % VOCAB_SIZE for position in range(cached + length))
        sequence = TokenSequence(Request(index, tokens, SamplingParams()), 512, None)
        sequence.num_computed = cached
        assert allocator.grow(sequence.blocks, len(tokens))
        slices.append(Slice.of(sequence, length))
    return ScheduledBatch(BatchKind.PREFILL if kind == "piecewise" else BatchKind.DECODE, tuple(slices))


def inputs_of(engine: RankEngine, kind: str, batch: ScheduledBatch) -> StepInputs:
    """As the executor packs it; a verification is due logits of every token."""
    inputs = pack(batch, engine.config.block_size).inputs
    if kind == "target_verify":
        inputs = replace(inputs, due_rows=torch.arange(batch.num_tokens))
    return inputs


class CacheState:
    """Random keys and values in every block of a rank's cache, to be put back before every run of a step."""

    def __init__(self, engine: RankEngine):
        keys, values = cached_tensors(target_of(engine).cache)
        generator = torch.Generator().manual_seed(1)
        self._tensors = [*keys, *values]
        self._contents = [torch.randn(tensor.shape, generator=generator) for tensor in self._tensors]

    def restore(self, padding: float) -> None:
        """With `padding` in the block that nobody may read."""
        for tensor, content in zip(self._tensors, self._contents, strict=True):
            tensor.copy_(content)
            tensor[PADDING_BLOCK] = padding

    def written(self) -> list[torch.Tensor]:
        return [tensor[PADDING_BLOCK + 1 :].clone() for tensor in self._tensors]


def poison_buffers(engine: RankEngine, kind: str) -> None:
    """Overwrite everything with values that would be noticed: NaN, and ids far out of range."""
    for tensor in tensors_of(engine.graphs.runners[kind].buffers).values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else POISON_INTEGER)
    buffers = getattr(dispatcher_of(engine), "buffers", None)
    if buffers is not None:
        for buffer in (buffers.send, buffers.receive, buffers.returned):
            buffer.view(torch.int32).fill_(POISON_WORD)


@torch.inference_mode()
def compare_replays(engine: RankEngine, kind: str, steps: Sequence[tuple[int, ...]]) -> list[str]:
    """Run each step three times: replayed after poisoning, directly with the same padding, and without padding.

    Args:
        engine: of this rank.
        kind: of the steps.
        steps: counts per DP rank.

    Returns:
        What differed on this rank, a sentence each.
    """
    layout, runner, target = engine.config.layout, engine.graphs.runners[kind], target_of(engine)
    dp_rank, cache, found = layout.dp_rank(engine.rank), CacheState(engine), []
    entries = [entry for entry in engine.graphs.committed.entries if entry.kind == kind]
    for counts in steps:
        entry = min((e for e in entries if e.bucket >= max(counts)), key=lambda e: e.bucket)
        batch = make_batch(engine, kind, counts[dp_rank])
        inputs = inputs_of(engine, kind, batch)
        num_due = inputs.due_rows.shape[0]

        poison_buffers(engine, kind)
        cache.restore(padding=float("nan"))
        logits, greedy = runner.replay(entry, inputs.values(), num_due)
        replayed, replayed_cache = logits.clone(), cache.written()
        tokens = StepRows.unpacked(greedy.clone()).token_ids_N
        cache.restore(padding=0.0)
        padded, padded_cache = run_padded(runner, entry, inputs.values(), num_due).clone(), cache.written()
        cache.restore(padding=0.0)
        width = VERIFY_TOKENS if kind == "target_verify" else 1
        geometry = StepGeometry.eager(
            layout, tuple(max(1, count * width) for count in counts), capacity=dispatcher_of(engine).capacity
        )
        exact = inputs if batch.slices else dummy()
        eager = target.forward(exact, geometry)[:num_due]

        for piece in batch.slices:
            allocator_of(engine).release(piece.sequence.blocks)
        where = f"{entry} with counts {counts}"
        if replayed.shape != (num_due, target.model.config.vocab_size):
            found.append(f"{where}: {tuple(replayed.shape)} logits for {num_due} due rows")
        if not torch.equal(replayed, padded):
            found.append(f"{where}: replay differs from the padded step by {(replayed - padded).abs().max()}")
        if not torch.equal(tokens, replayed.argmax(-1)):
            found.append(f"{where}: the graph's own greedy tokens are {tokens.tolist()}")
        if not all(map(torch.equal, replayed_cache, padded_cache)):
            found.append(f"{where}: replay wrote other keys or values than the padded step")
        if not torch.allclose(replayed, eager, rtol=0, atol=CLOSE):
            found.append(f"{where}: replay differs from the step without padding by {(replayed - eager).abs().max()}")
        if not torch.equal(replayed.argmax(-1), eager.argmax(-1)):
            found.append(f"{where}: greedy tokens differ")
    return found


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_h12_every_batch_up_to_the_largest_bucket_replays_as_it_runs_eagerly(kind, rank_set):
    """Also H3 (an idle rank pads to the bucket of the others) and H9 (small steps between large ones)."""
    dp_size = rank_set.rank_config.layout.dp_size
    # From the largest down, and the smallest first and last: rows of larger steps lie in every buffer.
    largest = largest_count(kind)
    steps = [counts for batch in (1, *range(largest, 0, -1)) for counts in uneven_counts(kind, batch, dp_size)]
    found = rank_set.call(compare_replays, kind, steps)
    assert found == [[]] * rank_set.rank_config.layout.world_size


def test_every_kind_that_is_compared_was_recorded(rank_set):
    recorded = {entry.kind for entry in plan_captures(rank_set.rank_config.limits).entries}
    assert set(KIND_NAMES) <= recorded
    assert all(KINDS[kind].model == "target" for kind in KIND_NAMES)


STATES = ("idle", "short", "long", "decode")
PROMPT_LENGTHS = {"idle": 0, "short": 9, "long": 50, "decode": 6}
NEW_TOKENS = 4


def prompt_of(length: int, salt: int) -> list[int]:
    return [(7 * length + 3 * position + 31 * salt) % (VOCAB_SIZE - 2) + 2 for position in range(length)]


def mixes(dp_size: int) -> list[tuple[str, ...]]:
    """Every assignment of states to two DP ranks; to more, every combination, each once."""
    every = itertools.product if dp_size <= 2 or FULL_MATRIX else None
    combined = every(STATES, repeat=dp_size) if every else itertools.combinations_with_replacement(STATES, dp_size)
    return [mix for mix in combined if set(mix) != {"idle"}]


def arrivals_of(mix: tuple[str, ...]) -> list[dict[int, list[list[int]]]]:
    """Those that decode arrive an iteration earlier, so that they decode when the others prefill."""
    later = 1 if "decode" in mix else 0
    return [
        {(0 if state == "decode" else later): [prompt_of(PROMPT_LENGTHS[state], dp_rank)]} if state != "idle" else {}
        for dp_rank, state in enumerate(mix)
    ]


def run_mixes(engine: RankEngine, every_mix: Sequence[tuple[str, ...]]) -> list[Generated]:
    return [run_script(engine, arrivals_of(mix), NEW_TOKENS) for mix in every_mix]


@pytest.fixture(scope="module")
def rank_sets(random_models: dict[str, str]) -> Iterator[dict[int, ForkedRanks]]:
    """RankSets of two and four ranks with a batch each, without speculation."""
    configs = {n: config_of(random_models["qwen3_moe"], n, 1, "allgather", LIMITS) for n in (2, 4)}
    with ForkedRanks(configs[2]) as two, ForkedRanks(configs[4]) as four:
        yield {2: two, 4: four}


def expected_graph(counts: tuple[int, ...], kinds: tuple[str, ...]) -> tuple[CaptureEntry | None, str | None]:
    kind = "piecewise" if "PREFILL" in kinds else "decode"
    buckets = (1, 2, 4, 5) if kind == "decode" else (16, 32)
    fitting = [bucket for bucket in buckets if bucket >= max(counts)]
    return (CaptureEntry(kind, fitting[0]), None) if fitting else (None, EAGER_TOO_LARGE)


def without_shapes(step: RanStep) -> RanStep:
    """Where counts are packed as they are, ranks send as many rows as they have; the collectives are still alike."""
    return replace(step, collectives=tuple(msgspec.structs.replace(call, shape=()) for call in step.collectives))


@pytest.mark.parametrize("ranks", [2, 4])
def test_h6_any_mix_of_idle_prefill_and_decode_replays_one_bucket_on_all_ranks_or_none(ranks, rank_sets, references):
    every_mix = mixes(ranks)
    by_rank = rank_sets[ranks].call(run_mixes, every_mix)
    for index, mix in enumerate(every_mix):
        generated = [outputs[index] for outputs in by_rank]
        for steps in zip(*(one.steps for one in generated), strict=True):
            [step] = {step if step.graph is not None else without_shapes(step) for step in steps}
            assert (step.graph, step.eager_reason) == expected_graph(step.num_tokens, step.kinds), mix
            assert step.graph is None or step.padded == (step.graph.bucket,) * ranks, mix
        wanted = tuple({"short": "PREFILL", "long": "PREFILL"}.get(state, state.upper()) for state in mix)
        second = generated[0].steps[1] if "decode" in mix else generated[0].steps[0]
        assert second.kinds == wanted
        tokens = [token_ids for one in generated for _, token_ids in sorted(one.token_ids.items())]
        busy = [(dp_rank, state) for dp_rank, state in enumerate(mix) if state != "idle"]
        assert len(tokens) == len(busy)
        for (dp_rank, state), token_ids in zip(busy, tokens, strict=True):
            prompt = prompt_of(PROMPT_LENGTHS[state], dp_rank)
            # The reference stops at an end of sequence, the pool was told to go on.
            expected = references["qwen3_moe"].greedy(prompt, NEW_TOKENS)
            assert token_ids[: len(expected)] == expected, (mix, state)


@pytest.mark.parametrize("requests", [(1, 1, 1, 1), (5, 1, 0, 3), (2, 0, 0, 0), (5, 5, 5, 5)])
def test_h2_every_decode_step_of_four_ranks_with_small_batches_replays(requests, rank_sets):
    """The sum of tokens over ranks is above every bucket in some of these; the largest count of any rank is not."""
    arrivals = [{0: [prompt_of(5 + index, dp_rank) for index in range(n)]} for dp_rank, n in enumerate(requests)]
    by_rank = rank_sets[4].call(run_script, arrivals, 20)
    decodes = [step for step in by_rank[0].steps if "DECODE" in step.kinds]
    assert len(decodes) == 19
    for step in decodes:
        assert step.graph is not None
        assert step.graph.kind == "decode"
        assert step.padded == (step.graph.bucket,) * 4
        assert step.graph.bucket >= max(requests)


def test_h3_idle_ranks_pad_to_the_bucket_of_the_busy_one(rank_sets):
    arrivals = [{0: [prompt_of(5, index) for index in range(3)]}, {}, {}, {}]
    by_rank = rank_sets[4].call(run_script, arrivals, 5)
    for generated in by_rank:
        decodes = [step for step in generated.steps if "DECODE" in step.kinds]
        assert [(step.num_tokens, step.padded) for step in decodes] == [((3, 0, 0, 0), (4, 4, 4, 4))] * 4
    assert len({tuple(generated.steps) for generated in by_rank}) == 1


def ragged_arrivals(dp_size: int) -> list[dict[int, list[list[int]]]]:
    """Requests of many lengths, arriving while others decode, more of them than run at once."""
    return [
        {
            0: [prompt_of(length, dp_rank) for length in (1, 17, 40)],
            2 + dp_rank: [prompt_of(100, dp_rank)],
            9: [prompt_of(length, dp_rank + 9) for length in (3, 4, 5, 6)][: dp_rank + 1],
        }
        for dp_rank in range(dp_size)
    ]


@pytest.mark.parametrize(
    ("ranks", "attn_tp_size", "dispatch"), [(1, 1, "allgather"), (2, 1, "alltoall"), (4, 2, "allgather")]
)
def test_tokens_are_the_same_with_graphs_and_without(ranks, attn_tp_size, dispatch, random_models, references):
    """And of the steps in which every busy rank decodes within the largest bucket, all replay; the report says so."""
    arrivals = ragged_arrivals(ranks // attn_tp_size)
    tokens: dict[bool, dict[int, tuple[int, ...]]] = {}
    for disabled in (True, False):
        limits = msgspec.structs.replace(LIMITS, disable_cuda_graph=disabled)
        with ForkedRanks(config_of(random_models["qwen3_moe"], ranks, attn_tp_size, dispatch, limits)) as rank_set:
            by_rank = rank_set.call(run_script, arrivals, 12)
        tokens[disabled] = {key: ids for generated in by_rank for key, ids in generated.token_ids.items()}
        for generated in by_rank:
            small = [
                step
                for step in generated.steps
                if set(step.kinds) <= {"IDLE", "DECODE"} and max(step.num_tokens) <= MAX_REQUESTS
            ]
            replays = {use.entry: use.replays for use in generated.report.graphs}
            eager = dict(generated.report.eager_steps)
            assert len(small) > 10
            assert sum(replays.values()) + sum(eager.values()) == len(generated.steps)
            if disabled:
                assert replays == {}
            else:
                assert all(step.graph is not None for step in small)
                assert sum(count for entry, count in replays.items() if entry.kind == "decode") == len(small)
                assert set(eager) <= {EAGER_TOO_LARGE}
    assert tokens[False] == tokens[True]
    prompts = [p for by_iteration in arrivals for _, batch in sorted(by_iteration.items()) for p in batch]
    assert sorted(tokens[False]) == list(range(len(prompts)))
    for key, prompt in enumerate(prompts):
        expected = references["qwen3_moe"].greedy(prompt, 12)
        assert tokens[False][key][: len(expected)] == expected


def capture_and_count_collectives(engine: RankEngine) -> list[tuple[str, int, int]]:
    """Go through the capture protocol; `(stage, collectives that the recorded group advanced by, those listed)`."""
    group, graphs = dist.group.WORLD, engine.graphs
    plan = plan_captures(engine.config.limits)
    stages: list[tuple[str, int, int]] = []

    def stage(name: str, run: object, *args: object) -> None:
        before = group._get_sequence_number_for_group()
        with collectives_of(engine).listing() as calls:
            run(*args)
        sent = [call for call in calls if call.group == "ep"]
        stages.append((name, group._get_sequence_number_for_group() - before, len(sent)))

    stage("agree", graphs.agree, plan)
    stage("begin", graphs.begin)
    for entry in plan.entries:
        stage("warm_up", graphs.warm_up, entry)
        before = group._get_sequence_number_for_group()
        frozen = graphs.record(entry)
        sent = [call for call in frozen.collectives if call.group == "ep"]
        stages.append(("record", group._get_sequence_number_for_group() - before, len(sent)))
    stage("end", graphs.end)
    stage("commit", graphs.commit, plan)
    return stages


def test_h16_capture_advances_a_recorded_group_by_the_recorded_collectives_and_nothing_else(rank_sets):
    by_rank = rank_sets[2].call(capture_and_count_collectives)
    assert by_rank[0] == by_rank[1]
    assert {name for name, _, _ in by_rank[0]} == {"agree", "begin", "warm_up", "record", "end", "commit"}
    for name, advanced, listed in by_rank[0]:
        assert advanced == listed, name
        assert (listed > 0) == (name in ("warm_up", "record")), name


def rehearse_and_count_collectives(engine: RankEngine) -> tuple[int, int]:
    before = dist.group.WORLD._get_sequence_number_for_group()
    rehearsed = engine.graphs.rehearse(plan_captures(engine.config.limits))
    return dist.group.WORLD._get_sequence_number_for_group() - before, sum(len(one.collectives) for one in rehearsed)


def test_h16_a_rehearsal_lists_collectives_and_sends_none(rank_sets):
    for advanced, listed in rank_sets[2].call(rehearse_and_count_collectives):
        assert advanced == 0
        assert listed > 0
