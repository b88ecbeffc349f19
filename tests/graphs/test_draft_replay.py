"""Draft kinds: real MoE layers with real collectives, recorded beside the target's graphs and apart from them."""

import itertools
import os
from collections.abc import Iterator, Sequence

import pytest
import torch
from expert_pool.cluster import CacheConfig, Limits, PoolConfig
from expert_pool.dispatch.budgets.geometry import StepGeometry
from expert_pool.graphs.plan import CaptureEntry, plan_captures
from expert_pool.workers.attention.kv_cache import PADDING_BLOCK, PADDING_SLOT, KvCache
from expert_pool.workers.engine import RankEngine
from handle import cached_tensors, recorded_of, run_padded, target_of, tensors_of
from models import VOCAB_SIZE
from plain_ranks import ForkedRanks
from test_replay import CLOSE, compare_replays, poison_buffers

FULL_MATRIX = os.environ.get("EXPERT_POOL_FULL_MATRIX") == "1"
MAX_REQUESTS, DRAFT_TOKENS, DRAFT_STEPS, TOP_K = 4, 3, 2, 2
KINDS_OF = {
    "EAGLE": ("eagle_draft", "eagle_draft_extend"),
    "FROZEN_KV_MTP": ("frozen_kv_mtp",),
    "MULTI_LAYER_EAGLE": ("multi_layer_eagle_draft_extend",),
}
LAYOUTS = [(1, 1, "allgather"), *itertools.product((2, 4), (1, 2), ("allgather", "alltoall"))]
SAMPLE = [
    ("EAGLE", "qwen3_moe", (1, 1, "allgather")),
    ("EAGLE", "gpt_oss", (4, 1, "alltoall")),
    ("EAGLE", "test_latent_moe", (2, 1, "alltoall")),  # its last layer's experts work on a narrower row
    ("FROZEN_KV_MTP", "deepseek_v3", (2, 1, "allgather")),
    ("MULTI_LAYER_EAGLE", "qwen3_moe", (4, 2, "allgather")),
]
EVERY = [(algorithm, "qwen3_moe", layout) for algorithm in KINDS_OF for layout in LAYOUTS]
CASES = [*EVERY, *(case for case in SAMPLE if case not in EVERY)] if FULL_MATRIX else SAMPLE


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2][0]}ranks-tp{case[2][1]}")
def rank_set(request: pytest.FixtureRequest, random_models: dict[str, str]) -> Iterator[ForkedRanks]:
    algorithm, family, (ranks, attn_tp_size, dispatch) = request.param
    limits = Limits(
        max_running_requests=MAX_REQUESTS,
        cuda_graph_bs=(1, 2, MAX_REQUESTS),
        chunked_prefill_size=64,
        disable_piecewise_cuda_graph=True,
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=DRAFT_TOKENS,
        speculative_num_steps=DRAFT_STEPS,
        speculative_eagle_topk=TOP_K,
    )
    config = PoolConfig(
        model=random_models[family],
        ranks=ranks,
        attn_tp_size=attn_tp_size,
        dispatch=dispatch,
        limits=limits,
        cache=CacheConfig(num_tokens=1024),
    )
    with ForkedRanks(config) as ranks_of_case:
        yield ranks_of_case


def draft_inputs(engine: RankEngine, entry: CaptureEntry, count: int) -> dict[str, torch.Tensor]:
    """Inputs of `count` requests, each with tokens cached already, in blocks of its own; branches share a context."""
    generator = torch.Generator().manual_seed(7 + engine.config.layout.dp_rank(engine.rank))
    size, width = engine.config.block_size, entry.tokens_per_request
    by_branch = entry.kind in ("eagle_draft", "frozen_kv_mtp")
    tables, contexts, starts, lens, positions, slots = [], [], [], [], [], []
    next_block = PADDING_BLOCK + 1
    for request in range(count):
        context, start = 5 + 9 * request, request * width
        owners = range(width) if by_branch else (None,)
        for branch in owners:
            blocks = list(range(next_block, next_block + 4))
            next_block += 4
            tables.append(blocks)
            contexts.append(context)
            starts.append(start + (branch or 0))
            lens.append(1 if by_branch else width)
            places = range(context, context + (1 if by_branch else width))
            positions += places
            for place in places:
                steps = [place + step for step in range(DRAFT_STEPS)]
                slots.append([blocks[p // size] * size + p % size for p in steps])
    num_tokens, hidden = count * width, engine.config.spec.hidden_size
    return {
        "input_ids": torch.randint(2, VOCAB_SIZE, (num_tokens,), generator=generator),
        "hidden_states": torch.randn(num_tokens, hidden, generator=generator),
        "positions": torch.tensor(positions, dtype=torch.int64),
        "slots": torch.tensor(slots, dtype=torch.int64).view(num_tokens, DRAFT_STEPS),
        "query_starts": torch.tensor(starts, dtype=torch.int64),
        "query_lens": torch.tensor(lens, dtype=torch.int64),
        "context_lens": torch.tensor(contexts, dtype=torch.int64),
        "block_tables": torch.tensor(tables, dtype=torch.int64).view(len(tables), 4),
        "num_valid_tokens": torch.tensor([num_tokens], dtype=torch.int32),
    }


class DraftCaches:
    """Random contents for the target's and the draft's cache, to be put back before every run."""

    def __init__(self, engine: RankEngine):
        caches: list[KvCache] = [target_of(engine).cache]
        assert engine.loaded.draft is not None
        self.draft_writes = engine.loaded.draft.cache is not None
        if engine.loaded.draft.cache is not None:
            caches.append(engine.loaded.draft.cache)
        generator = torch.Generator().manual_seed(3)
        by_cache = [[*keys, *values] for keys, values in map(cached_tensors, caches)]
        self._tensors = [tensor for tensors in by_cache for tensor in tensors]
        self._num_target = len(by_cache[0])
        self._contents = [torch.randn(tensor.shape, generator=generator) for tensor in self._tensors]

    def restore(self, padding: float) -> None:
        for tensor, content in zip(self._tensors, self._contents, strict=True):
            tensor.copy_(content)
            tensor[PADDING_BLOCK] = padding

    def draft(self) -> list[torch.Tensor]:
        return [tensor[PADDING_BLOCK + 1 :].clone() for tensor in self._tensors[self._num_target :]]

    def target_is_untouched(self) -> bool:
        pairs = zip(self._tensors[: self._num_target], self._contents, strict=False)
        return all(torch.equal(tensor[PADDING_BLOCK + 1 :], content[PADDING_BLOCK + 1 :]) for tensor, content in pairs)


def exact_views(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same inputs without padding; an idle rank runs one token that no expert computes."""
    if values["input_ids"].numel():
        return values
    return {
        **values,
        "input_ids": torch.zeros(1, dtype=torch.int64),
        "hidden_states": values["hidden_states"].new_zeros(1, values["hidden_states"].shape[1]),
        "positions": torch.zeros(1, dtype=torch.int64),
        "slots": torch.full((1, DRAFT_STEPS), PADDING_SLOT, dtype=torch.int64),
    }


@torch.inference_mode()
def compare_draft_replays(engine: RankEngine, kind: str, steps: Sequence[tuple[int, ...]]) -> list[str]:
    """Each step replayed after poisoning, directly with the same padding, and without padding; what differed here."""
    layout, runner, draft = engine.config.layout, engine.graphs.runners[kind], engine.loaded.draft
    assert draft is not None
    caches, found = DraftCaches(engine), []
    for counts in steps:
        count = counts[layout.dp_rank(engine.rank)]
        fitting = [e for e in engine.graphs.committed.entries if e.kind == kind and e.bucket >= max(counts)]
        bucket = min(entry.bucket for entry in fitting)
        for entry in (entry for entry in fitting if entry.bucket == bucket):
            values = draft_inputs(engine, entry, count)
            num_due = count * entry.tokens_per_request
            poison_buffers(engine, kind)
            caches.restore(padding=float("nan"))
            replayed, replayed_cache = runner.replay(entry, values, num_due)[0].clone(), caches.draft()
            untouched = caches.target_is_untouched()
            caches.restore(padding=0.0)
            padded, padded_cache = run_padded(runner, entry, values, num_due).clone(), caches.draft()
            caches.restore(padding=0.0)
            tokens = tuple(max(1, other * entry.tokens_per_request) for other in counts)
            geometry = StepGeometry.eager(layout, tokens, capacity=engine.config.capacity)
            eager = draft.graph_step(exact_views(values), geometry, entry)[:num_due]

            where = f"{entry} with counts {counts}"
            if not untouched:
                found.append(f"{where}: wrote to the target's cache")
            if not torch.equal(replayed, padded):
                found.append(f"{where}: replay differs from the padded step by {(replayed - padded).abs().max()}")
            if not all(map(torch.equal, replayed_cache, padded_cache)):
                found.append(f"{where}: replay wrote other keys or values than the padded step")
            if not torch.allclose(replayed, eager, rtol=0, atol=CLOSE):
                off, largest = (replayed - eager).abs().max(), eager.abs().max()
                found.append(f"{where}: differs from the step without padding by {off} of {largest}")
            if num_due and not torch.equal(draft.tokens(replayed), draft.tokens(eager)):
                found.append(f"{where}: drafted other tokens")
    return found


def uneven_counts(dp_size: int) -> list[tuple[int, ...]]:
    """Every largest count, alike on all, falling from rank to rank, and alone on the last."""
    steps = []
    for largest in (1, *range(MAX_REQUESTS, 0, -1)):
        steps.append((largest,) * dp_size)
        steps.append(tuple(max(0, largest - dp_rank) for dp_rank in range(dp_size)))
        steps.append((0,) * (dp_size - 1) + (largest,))
    return steps


def kinds_of(rank_set: ForkedRanks) -> tuple[str, ...]:
    algorithm = rank_set.rank_config.limits.speculative_algorithm
    assert algorithm is not None
    return KINDS_OF[algorithm]


def test_every_draft_batch_replays_as_it_runs_eagerly(rank_set):
    for kind in kinds_of(rank_set):
        found = rank_set.call(compare_draft_replays, kind, uneven_counts(rank_set.rank_config.layout.dp_size))
        assert found == [[]] * rank_set.rank_config.layout.world_size


def test_draft_kinds_are_recorded_with_a_moe_layer_a_draft_step(rank_set):
    plan = plan_captures(rank_set.rank_config.limits)
    recorded = {entry.kind for entry in plan.entries}
    assert set(kinds_of(rank_set)) <= recorded
    layers = {entry.layer for entry in plan.entries if entry.kind == "multi_layer_eagle_draft_extend"}
    assert layers in (set(), set(range(DRAFT_STEPS)))


def collectives_per_kind(engine: RankEngine) -> dict[str, int]:
    """Exchanges with the experts that each recorded draft graph of the largest bucket froze."""
    return {
        str(entry): sum(call.group == "ep" for call in record.collectives)
        for entry, record in recorded_of(engine.graphs).items()
        if entry.bucket == MAX_REQUESTS and engine.graphs.runners[entry.kind].kind.model == "draft"
    }


def test_a_draft_graph_exchanges_twice_for_every_moe_layer_it_runs(rank_set):
    """Two collectives a layer; as many layers as draft steps where one graph drafts several, else one."""
    if rank_set.rank_config.layout.world_size == 1:
        assert all(set(counts.values()) == {0} for counts in rank_set.call(collectives_per_kind))
        return
    for counts in rank_set.call(collectives_per_kind):
        for entry, number in counts.items():
            several = entry.startswith(("eagle_draft[", "frozen_kv_mtp["))
            assert number == 2 * (DRAFT_STEPS if several else 1), entry


def buffer_addresses(engine: RankEngine) -> dict[str, set[int]]:
    """Where the static buffers of target and draft graphs lie."""
    addresses: dict[str, set[int]] = {}
    for runner in engine.graphs.runners.values():
        tensors = tensors_of(runner.buffers).values()
        addresses.setdefault(runner.kind.model, set()).update(tensor.data_ptr() for tensor in tensors)
    return addresses


def test_h13_target_graphs_replay_as_before_once_draft_graphs_are_recorded(rank_set):
    """Draft graphs are recorded last, into buffers of their own; the target's still equal the eager step."""
    for addresses in rank_set.call(buffer_addresses):
        assert addresses["target"]
        assert not addresses["target"] & addresses["draft"]
    dp_size = rank_set.rank_config.layout.dp_size
    found = rank_set.call(compare_replays, "decode", [(MAX_REQUESTS,) * dp_size, (1,) * dp_size])
    assert found == [[]] * rank_set.rank_config.layout.world_size
