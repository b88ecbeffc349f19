"""Geometry: alike on every rank, covering every rank, and where it does not fit, refused on every rank alike."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expert_pool.cluster import CacheConfig, GeometryError, Limits, PoolConfig, SamplingParams
from expert_pool.dispatch.budgets.budget import (
    ExchangeBudget,
    RowFormat,
    exchange_budget,
    largest_forward,
)
from expert_pool.dispatch.budgets.geometry import (
    PaddingMode,
    StepGeometry,
    choose_padding_mode,
    global_num_tokens_cpu,
    pad_to_ranks,
    runtime_max_tokens_per_rank,
    scatter_sizes,
    set_dp_buffer_lengths,
)
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.experts.torch_experts import routed_pairs
from expert_pool.dispatch.paths.capacity import dispatch_capacity
from expert_pool.dispatch.registry import dispatcher_of as registered
from expert_pool.workers.engine import RankEngine
from handle import collectives_of, dispatcher_of, target_of
from hypothesis import given
from hypothesis import strategies as st
from layers import layer_of
from plain_ranks import ForkedRanks, PlainRanks
from rank_insides import run_script

CPU = torch.device("cpu")
ROW = RowFormat(hidden_size=64, top_k=2, dtype="float32", weights_dtype="float32")

layouts = st.builds(
    lambda dp_size, attn_tp_size: Layout(dp_size * attn_tp_size, attn_tp_size), st.integers(1, 6), st.integers(1, 4)
)


@st.composite
def steps(draw: st.DrawFn, lowest: int = 1) -> tuple[Layout, tuple[int, ...]]:
    """A layout, and token counts of its DP ranks."""
    layout = draw(layouts)
    counts = st.lists(st.integers(lowest, 300), min_size=layout.dp_size, max_size=layout.dp_size)
    return layout, tuple(draw(counts))


def found_by_each(geometry: StepGeometry) -> set[int]:
    """`runtime_max_tokens_per_rank` as each rank finds it from its own rows."""
    return {
        runtime_max_tokens_per_rank(
            num_rows=num_rows,
            layout=geometry.layout,
            global_num_tokens_cpu=geometry.global_num_tokens_cpu,
            capacity=geometry.capacity,
            in_capture=geometry.in_capture,
        )
        for num_rows in geometry.num_rows_per_rank
    }


@given(steps(), st.integers(1, 300), st.sampled_from([None, *PaddingMode]))
def test_an_eager_step_covers_every_rank_within_capacity_or_is_refused_for_all(step, capacity, mode):
    layout, counts = step
    fits = -(-max(counts) // layout.attn_tp_size) <= capacity
    if not fits:
        with pytest.raises(GeometryError, match=f"above the capacity of {capacity}"):
            StepGeometry.eager(layout, counts, capacity=capacity, padding_mode=mode)
        return
    geometry = StepGeometry.eager(layout, counts, capacity=capacity, padding_mode=mode)
    [bound] = found_by_each(geometry)
    assert geometry.runtime_max_tokens_per_rank == bound
    assert max(1, *geometry.num_rows_per_rank) <= bound <= capacity
    if layout.dp_size > 1:
        assert bound == max(geometry.num_rows_per_rank)


@given(layouts, st.integers(1, 300), st.integers(1, 300))
def test_a_captured_step_is_max_len_and_alike_on_every_rank(layout, num_tokens, capacity):
    padded = pad_to_ranks(num_tokens, layout.attn_tp_size)
    if padded // layout.attn_tp_size > capacity:
        with pytest.raises(GeometryError, match=f"above the capacity of {capacity}"):
            StepGeometry.captured(layout, num_tokens, capacity=capacity)
        return
    geometry = StepGeometry.captured(layout, num_tokens, capacity=capacity)
    assert geometry.padding_mode is PaddingMode.MAX_LEN
    assert geometry.num_tokens_per_dp_rank == (padded,) * layout.dp_size
    assert num_tokens <= padded < num_tokens + layout.attn_tp_size
    rows = padded // layout.attn_tp_size
    assert set(geometry.num_rows_per_rank) == set(geometry.slot_sizes) == {rows}
    # Never the static capacity: a graph that froze it would be wrong and slow.
    assert found_by_each(geometry) == {geometry.runtime_max_tokens_per_rank} == {rows}


@given(steps())
def test_a_shared_batch_is_scattered_whole_in_order_and_evenly(step):
    layout, counts = step
    geometry = StepGeometry.eager(layout, counts, capacity=300)
    for dp_rank, count in enumerate(counts):
        pieces = [list(range(count))[geometry.row_range(rank)] for rank in layout.ranks_of(dp_rank)]
        assert [row for piece in pieces for row in piece] == list(range(count))
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
        assert [len(piece) for piece in pieces] == scatter_sizes(count, layout.attn_tp_size)


@given(steps())
def test_the_padding_mode_pads_only_where_that_moves_at_most_twice_the_rows(step):
    _, counts = step
    pads = max(counts) * len(counts) <= 2 * sum(counts)
    assert choose_padding_mode(counts) is (PaddingMode.MAX_LEN if pads else PaddingMode.SUM_LEN)
    assert choose_padding_mode(tuple(reversed(counts))) is choose_padding_mode(counts)


@given(steps(), st.sampled_from([*PaddingMode, "captured"]))
def test_h7_the_padded_extent_is_there_in_every_mode(step, mode):
    layout, counts = step
    if mode == "captured":
        geometry = StepGeometry.captured(layout, max(counts), capacity=400)
    else:
        geometry = StepGeometry.eager(layout, counts, capacity=400, padding_mode=mode)
    assert len(geometry.slot_sizes) == layout.world_size
    for rank, (rows, slot) in enumerate(zip(geometry.num_rows_per_rank, geometry.slot_sizes, strict=True)):
        assert rows <= slot <= geometry.capacity
        assert slot == (rows if geometry.padding_mode is PaddingMode.SUM_LEN else max(geometry.num_rows_per_rank))
        lengths = geometry.buffer_lengths(rank)
        assert lengths.local_length == geometry.num_tokens(rank)
        if layout.world_size == 1:
            assert (lengths.global_length, lengths.num_tokens) == (None, None)
        else:
            assert lengths.num_tokens == list(geometry.num_tokens_per_dp_rank)
            assert lengths.global_length == sum(geometry.num_tokens_per_dp_rank)
        assert lengths.is_max_len == (
            geometry.padding_mode is PaddingMode.MAX_LEN and len(set(lengths.num_tokens or [0])) == 1
        )


@given(steps())
def test_token_counts_have_the_form_that_says_which_gather_there_is(step):
    layout, counts = step
    told = global_num_tokens_cpu(layout, counts)
    if layout.dp_size > 1:
        assert told == list(counts)
    else:
        assert told == ([counts[0]] if layout.attn_tp_size > 1 else None)


@pytest.mark.parametrize("counts", [(), (3,), (3, 4, 5)])
def test_a_step_needs_a_count_of_each_dp_rank(counts):
    with pytest.raises(GeometryError, match=f"{len(counts)} token counts for dp_size=2"):
        StepGeometry.eager(Layout(2), counts, capacity=10, padding_mode=PaddingMode.MAX_LEN)


def test_no_rank_runs_less_than_a_dummy_token():
    with pytest.raises(GeometryError, match=r"\(3, 0\).*none is below 1"):
        StepGeometry.eager(Layout(2), (3, 0), capacity=10)


RULES = {
    "1: the largest known count": (Layout(4), 3, [3, 9, 1, 5], False, 9),
    "1: divided by those who share, rounded up": (Layout(4, 2), 4, [7, 9], False, 5),
    "1: also in capture mode": (Layout(2), 6, [6, 6], True, 6),
    "1: at least the dummy token": (Layout(2), 0, [0, 0], False, 1),
    "2: one DP rank over several ranks takes the capacity": (Layout(4, 4), 2, [7], False, 64),
    "2: whether or not its count is told": (Layout(2, 2), 2, None, False, 64),
    "3: in capture mode its own rows, not the capacity": (Layout(4, 4), 2, [8], True, 2),
    "3: a single rank takes its own rows": (Layout(1), 7, None, False, 7),
    "3: a single rank in capture mode": (Layout(1), 7, None, True, 7),
    "3: at least the dummy token": (Layout(1), 0, None, False, 1),
}


@pytest.mark.parametrize("rule", RULES)
def test_tokens_per_rank_follow_the_three_rules(rule):
    layout, num_rows, counts, in_capture, expected = RULES[rule]
    found = runtime_max_tokens_per_rank(
        num_rows=num_rows, layout=layout, global_num_tokens_cpu=counts, capacity=64, in_capture=in_capture
    )
    assert found == expected


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 50), st.booleans(), st.integers(0, 7))
def test_h1_rows_of_one_rank_say_nothing_where_ranks_hold_different_batches(dp, tp, num_rows, in_capture, known):
    """Without the counts of all DP ranks, `x.shape[0]` would differ between ranks: refused, whatever the mode."""
    layout, counts = Layout(dp * tp, tp), None if known == 0 else [5] * known
    if known == dp:
        return
    with pytest.raises(GeometryError, match=f"dp_size={dp} ranks hold different batches and {known} of their"):
        runtime_max_tokens_per_rank(
            num_rows=num_rows, layout=layout, global_num_tokens_cpu=counts, capacity=64, in_capture=in_capture
        )


@pytest.mark.parametrize(
    ("layout", "num_rows", "counts"),
    [(Layout(2), 3, [3, 65]), (Layout(2), 9, [3, 8]), (Layout(2, 2), 65, None), (Layout(1), 65, None)],
    ids=["above capacity", "below own rows", "more rows than the capacity of rule 2", "a single rank"],
)
def test_tokens_per_rank_outside_their_bounds_are_refused_with_numbers(layout, num_rows, counts):
    with pytest.raises(GeometryError, match=rf"must cover the {num_rows} rows.*capacity of 64.*max_dispatch_tokens"):
        runtime_max_tokens_per_rank(
            num_rows=num_rows, layout=layout, global_num_tokens_cpu=counts, capacity=64, in_capture=False
        )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((7, 3, False, None), "both or neither"),
        ((None, 3, False, [3]), "both or neither"),
        ((8, 3, False, [3, 4]), "sum to 7, not to 8"),
        ((7, 5, False, [3, 4]), "5 tokens are none of the counts"),
        ((7, 3, True, [3, 4]), "MAX_LEN with different token counts"),
    ],
)
def test_buffer_lengths_that_contradict_each_other_are_refused(arguments, problem):
    with pytest.raises(GeometryError, match=problem):
        set_dp_buffer_lengths(*arguments)


@given(
    st.builds(
        Limits,
        chunked_prefill_size=st.integers(1, 300),
        max_running_requests=st.integers(1, 200),
        max_prefill_tokens=st.none() | st.integers(1, 300),
        piecewise_cuda_graph_max_tokens=st.none() | st.integers(1, 300),
    ),
    layouts,
    st.data(),
)
def test_h11_all_gather_buffers_hold_what_all_dp_ranks_together_may_bring(limits, layout, data):
    largest, capacity = largest_forward(limits).value, dispatch_capacity(limits, layout, "allgather")
    counts = data.draw(st.lists(st.integers(1, largest), min_size=layout.dp_size, max_size=layout.dp_size))
    budget = exchange_budget(limits, layout, [ROW], capacity=capacity)
    for mode in PaddingMode:
        geometry = StepGeometry.eager(layout, tuple(counts), capacity=capacity, padding_mode=mode)
        assert sum(geometry.slot_sizes) * ROW.row_bytes <= budget.receive_bytes
        for rank in range(layout.world_size):
            # Gloo gathers unequal parts as copies, one a rank.
            assert layout.world_size * geometry.slot_sizes[rank] * ROW.row_bytes <= budget.send_bytes
            assert layout.world_size * geometry.slot_sizes[rank] * ROW.hidden_bytes <= budget.combine_bytes
    assert budget.receive_bytes >= layout.dp_size * largest * ROW.row_bytes


@pytest.fixture(scope="module", params=[(2, 1), (4, 2)], ids=["2ranks", "4ranks-tp2"])
def rank_set(request: pytest.FixtureRequest, random_models: dict[str, str]) -> Iterator[ForkedRanks]:
    ranks, attn_tp_size = request.param
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=ranks,
        attn_tp_size=attn_tp_size,
        limits=Limits(chunked_prefill_size=32, max_running_requests=4),
        cache=CacheConfig(num_tokens=1024),
    )
    with ForkedRanks(config, graphs=False) as ranks_:
        yield ranks_


NUM_LOCAL_EXPERTS = 4
KINDS_OF_LAYER = (RowFormat(64, 2, "float32", "float32"), RowFormat(96, 4, "float32", "float32"))


def budget_of(formats: tuple[RowFormat, ...], capacity: int, world_size: int) -> ExchangeBudget:
    rows = capacity * world_size
    return ExchangeBudget(
        capacity,
        rows * max(one.row_bytes for one in formats),
        rows * max(one.row_bytes for one in formats),
        rows * max(one.hidden_bytes for one in formats),
    )


def one_layer(
    dispatcher: Any, rank: int, row_format: RowFormat, geometry: StepGeometry, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a layer in which expert `e` multiplies by `e + 1`; what it returned, and what it should have."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    num_rows, num_experts = geometry.num_rows_per_rank[rank], NUM_LOCAL_EXPERTS * geometry.layout.world_size
    x_TH = torch.randn(num_rows, row_format.hidden_size, generator=generator)
    weights_TK = torch.rand(num_rows, row_format.top_k, generator=generator)
    ids_TK = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=1)[:, : row_format.top_k]

    def experts(x_PH: torch.Tensor, ids_P1: torch.Tensor, weights_P1: torch.Tensor) -> torch.Tensor:
        return x_PH * weights_P1 * (ids_P1 + 1 + rank * NUM_LOCAL_EXPERTS)

    dispatched = dispatcher.dispatch(x_TH, ids_TK, weights_TK, geometry, NUM_LOCAL_EXPERTS)
    shape = MoeShape("experts", num_experts, row_format.hidden_size, row_format.top_k, row_format.weights_dtype)
    layer = layer_of(shape, geometry.layout.world_size, rank, forward=experts)
    partial = routed_pairs(layer, dispatched.x_RH, dispatched.local_ids_RK, dispatched.expert_weights_RK)
    expected = x_TH * (weights_TK * (ids_TK + 1)).sum(dim=1, keepdim=True)
    return dispatcher.combine(partial, dispatched), expected


def run_layers_of_two_kinds(engine: RankEngine, kind: str, every_count: list[list[int]]) -> list[float]:
    """Relative errors of layers of two kinds, in turn, over one exchange whose buffers held poison before."""
    layout = engine.config.layout
    budget = budget_of(KINDS_OF_LAYER, max(map(max, every_count)), layout.world_size)
    dispatcher = registered(kind)(collectives_of(engine), engine.rank, budget, CPU)
    addresses = [buffer.data_ptr() for buffer in vars(dispatcher.buffers).values() if isinstance(buffer, torch.Tensor)]
    errors = []
    for seed, counts in enumerate(every_count):
        for mode in PaddingMode:
            geometry = StepGeometry.eager(
                layout, tuple(counts[: layout.dp_size]), capacity=budget.capacity, padding_mode=mode
            )
            for row_format in (*KINDS_OF_LAYER, KINDS_OF_LAYER[0]):
                for buffer in (dispatcher.buffers.send, dispatcher.buffers.receive, dispatcher.buffers.returned):
                    buffer.view(torch.int32).fill_(0x7FC00001)
                found, expected = one_layer(dispatcher, engine.rank, row_format, geometry, seed)
                errors.append(((found - expected).abs().max() / expected.abs().max()).item() if len(found) else 0.0)
    assert addresses == [
        buffer.data_ptr() for buffer in vars(dispatcher.buffers).values() if isinstance(buffer, torch.Tensor)
    ]
    return errors


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_h15_layers_of_two_kinds_share_one_exchange(kind, rank_set):
    first, both = budget_of(KINDS_OF_LAYER[:1], 24, 2), budget_of(KINDS_OF_LAYER, 24, 2)
    assert both.send_bytes > first.send_bytes
    for errors in rank_set.call(run_layers_of_two_kinds, kind, [[5, 9], [24, 1], [1, 1], [24, 24]]):
        assert len(errors) == 24
        assert all(error < 1e-6 for error in errors)


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_h9_the_largest_step_after_the_smallest_finds_buffers_large_enough(kind, rank_set):
    for errors in rank_set.call(run_layers_of_two_kinds, kind, [[1, 1], [64, 64]]):
        assert all(error < 1e-6 for error in errors)


def small_then_largest(engine: RankEngine, prompts: list[list[int]]) -> dict[int, tuple[int, ...]]:
    layout, chunk = engine.config.layout, engine.config.limits.chunked_prefill_size
    before = dispatcher_of(engine).buffers
    arrivals = [{0: [[7]], 3: prompts} for _ in range(layout.dp_size)]
    generated = run_script(engine, arrivals, 3)
    sizes = [max(step.num_tokens) for step in generated.steps]
    assert sizes[0] == 1
    assert max(sizes) == chunk == engine.config.capacity * layout.attn_tp_size
    assert dispatcher_of(engine).buffers is before
    return generated.token_ids


def test_h9_a_pool_runs_one_token_first_and_then_the_largest_step_it_allows(rank_set, references):
    prompts = [[3 + index + position % 50 for position in range(40)] for index in range(3)]
    expected = [references["qwen3_moe"].greedy(prompt, 3) for prompt in ([7], *prompts)]
    tokens: dict[int, tuple[int, ...]] = {}
    for generated in rank_set.call(small_then_largest, prompts):
        tokens |= generated
    assert len(tokens) == 4 * rank_set.rank_config.layout.dp_size
    for key, token_ids in tokens.items():
        assert token_ids[: len(expected[key % 4])] == expected[key % 4]


def test_h4_the_dummy_token_of_an_idle_dp_rank_leaves_some_of_its_ranks_no_row(rank_set, references):
    """Beside a prefill the step packs its counts, and a rank that brings nothing still takes part."""
    prompt = [3 + position % 50 for position in range(30)]
    by_rank = rank_set.call(run_script, [{0: [prompt]}, {}], 3)
    assert by_rank[0].steps[0].padded == (30, 1)
    assert by_rank[0].token_ids == {0: references["qwen3_moe"].greedy(prompt, 3)}


def dispatch_beyond_the_buffers(engine: RankEngine, kind: str) -> tuple[str, int]:
    """What a step says that the plan allows and the buffers do not hold, and how many collectives it issued."""
    layout, collectives = engine.config.layout, collectives_of(engine)
    dispatcher = registered(kind)(collectives, engine.rank, budget_of((ROW,), 4, layout.world_size), CPU)
    geometry = StepGeometry.eager(layout, (5 * layout.attn_tp_size,) + (1,) * (layout.dp_size - 1), capacity=8)
    with collectives.listing() as calls:
        try:
            one_layer(dispatcher, engine.rank, ROW, geometry, 0)
        except GeometryError as error:
            return str(error), len(calls)
    return "", len(calls)


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_h14_a_step_beyond_the_workspace_is_refused_on_every_rank_before_anything_is_sent(kind, rank_set):
    for message, num_collectives in rank_set.call(dispatch_beyond_the_buffers, kind):
        assert message.startswith("runtime_max_tokens_per_rank=5 is above the 4 rows a rank that the exchange buffers")
        assert num_collectives == 0


def bring_another_row(engine: RankEngine) -> None:
    """Rank 1 brings a row more to the layers than it announced."""
    if engine.rank != 1:
        return
    model = target_of(engine)
    forward = model.forward

    def forward_with_another_row(inputs: Any, geometry: StepGeometry, on_host: Any = None) -> torch.Tensor:
        longer = {
            name: torch.cat([getattr(inputs, name), getattr(inputs, name)[-1:]])
            for name in ("input_ids", "positions", "slots")
        }
        return forward(dataclasses.replace(inputs, **longer), geometry)

    model.forward = forward_with_another_row


@pytest.mark.parametrize("ranks", [2, 4])
def test_h1_a_rank_with_other_rows_than_it_announced_is_refused_and_nobody_waits_for_it(ranks, random_models):
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=ranks, cache=CacheConfig(num_tokens=1024))
    # Requests arrive one by one, so the first step may find rank 1 idle, with a dummy token and a row more than that.
    refusal = r"GeometryError: rank 1 holds (4|2) tokens in a MoE layer; the step plan announced (3|1) \(tokens per DP"
    with PlainRanks(config, prepare=bring_another_row) as pool:
        with pytest.raises(AssertionError, match=refusal):
            pool.generate([[3, 4, 5]] * ranks, SamplingParams(max_new_tokens=4))
        started = time.monotonic()
        for process in pool.processes:
            process.join(timeout=10)
        assert time.monotonic() - started < 10
        assert all(process.exitcode for process in pool.processes), "some rank went on, or ended as if nothing happened"
