"""Token budgets: what the limits allow, what buffers are made for, and that the two can never part."""

import itertools
import random
import re

import msgspec
import pytest
import torch
from expert_pool.cluster.config import PoolConfig, load_config, refuse_unbuilt, resolve
from expert_pool.dispatch.budgets.buckets import decode_buckets, piecewise_buckets
from expert_pool.dispatch.budgets.budget import (
    Bound,
    RowFormat,
    exchange_budget,
    exchange_rows,
    largest_forward,
    largest_step,
    required_dispatch_tokens,
)
from expert_pool.dispatch.budgets.capacity import CAPACITY_VARIABLE
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.dispatch.budgets.limits import Limits
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.budgets.step_kinds import kinds_of, tokens_per_request
from expert_pool.dispatch.dispatchers.exchange import ExchangeBuffers, PackedRows
from expert_pool.dispatch.dispatchers.flashinfer_alltoall import links_for
from expert_pool.dispatch.dispatchers.flashinfer_workspace import flashinfer_workspace_bytes
from expert_pool.dispatch.errors import ConfigError
from expert_pool.dispatch.paths.capacity import budget_problems, capacity_bound, dispatch_capacity, needed_capacity
from expert_pool.workers.model.spec import AttentionShape, ModelSpec
from hypothesis import given
from hypothesis import strategies as st

ROW = RowFormat(hidden_size=64, top_k=2, dtype="float32", weights_dtype="float32")
SPEC = ModelSpec(
    path="nowhere",
    model_type="qwen3_moe",
    dtype="float32",
    dtype_bytes=4,
    vocab_size=128,
    hidden_size=64,
    context_length=512,
    eos_token_ids=(1,),
    attention=(AttentionShape(2, 16, 16, num_heads=4, scaling=0.25),),
    moe=(MoeShape("experts", 8, 64, 2, "float32"),),
    dense_bytes=1000,
    expert_bytes=8000,
    has_tokenizer=False,
)


def optional(strategy):
    return st.none() | strategy


UNSET = st.none()


@st.composite
def any_limits(draw, max_dispatch=UNSET):
    """Limits of every shape that are accepted one by one, the decode-only role with nothing to prefill included."""
    mode = draw(st.sampled_from(["none", "prefill", "decode"]))
    chunk = draw(st.sampled_from([0, 1, 64, 2048]) | st.integers(0, 10_000))
    max_prefill = draw(optional(st.integers(0, 20_000)))
    if chunk == 0 and max_prefill == 0 and mode != "decode":
        max_prefill = 1
    graph_sizes = draw(optional(st.lists(st.integers(1, 600), min_size=1, max_size=5)))
    graph_max = draw(optional(st.integers(max(graph_sizes or [1]), 700)))
    return Limits(
        chunked_prefill_size=chunk,
        max_prefill_tokens=max_prefill,
        max_running_requests=draw(st.integers(1, 600)),
        cuda_graph_max_bs=graph_max,
        cuda_graph_bs=None if graph_sizes is None else tuple(graph_sizes),
        disable_cuda_graph=draw(st.booleans()),
        piecewise_cuda_graph_max_tokens=draw(optional(st.integers(1, 10_000))),
        disable_piecewise_cuda_graph=draw(st.booleans()),
        max_dispatch_tokens_per_rank=draw(max_dispatch),
        speculative_algorithm=draw(st.sampled_from([None, "EAGLE", "FROZEN_KV_MTP", "MULTI_LAYER_EAGLE"])),
        speculative_num_draft_tokens=draw(optional(st.integers(1, 16))),
        speculative_num_steps=draw(optional(st.integers(1, 8))),
        speculative_eagle_topk=draw(optional(st.integers(1, 16))),
        speculative_num_front_tokens=draw(st.integers(0, 4)),
        disaggregation_mode=mode,
    )


any_layout = st.builds(lambda dp, tp: Layout(dp * tp, tp), st.integers(1, 8), st.integers(1, 5))
any_dispatch = st.sampled_from(["alltoall", "allgather", "local"])
any_experts = st.sampled_from(["torch", "cutedsl"])
set_capacity = st.integers(1, 30_000)


def padded(num: int, buckets: tuple[int, ...]) -> int:
    """What a step of this size runs at the most: its bucket where it has one."""
    return min((bucket for bucket in buckets if bucket >= num), default=num)


def step_sizes(limits: Limits) -> list[int]:
    """Tokens of steps a DP rank can come to run: prefill and decode, smallest, largest and around each bucket."""
    prefill_buckets, batch_buckets = piecewise_buckets(limits), decode_buckets(limits)
    prefills = {1, limits.prefill_tokens_per_step, *prefill_buckets}
    batches = {1, limits.max_running_requests, *batch_buckets}
    sizes = [padded(num, prefill_buckets) for num in prefills if 1 <= num <= limits.prefill_tokens_per_step]
    widths = [kind.width(limits) for kind in kinds_of(limits) if kind.unit == "requests"]
    # Another DP rank's batch makes this one pad to any bucket there is, so all of them count.
    sizes += [*prefill_buckets, *(num * width for num in [*batches, *batch_buckets] for width in widths)]
    return sizes


# Examples of the rule.


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (
            Limits(
                max_prefill_tokens=16384,
                piecewise_cuda_graph_max_tokens=2048,
                cuda_graph_max_bs=512,
                max_running_requests=512,
            ),
            16384,
        ),
        (
            Limits(
                max_prefill_tokens=512,
                piecewise_cuda_graph_max_tokens=512,
                cuda_graph_max_bs=512,
                speculative_algorithm="EAGLE",
                speculative_num_draft_tokens=8,
            ),
            4096,
        ),
        (
            Limits(
                max_prefill_tokens=512,
                disable_piecewise_cuda_graph=True,
                cuda_graph_max_bs=64,
                max_running_requests=64,
            ),
            512,
        ),
        (
            Limits(
                max_prefill_tokens=512,
                piecewise_cuda_graph_max_tokens=512,
                cuda_graph_max_bs=512,
                speculative_algorithm="EAGLE",
            ),
            512,
        ),
        (
            Limits(
                max_prefill_tokens=512,
                piecewise_cuda_graph_max_tokens=512,
                cuda_graph_max_bs=64,
                max_running_requests=1024,
            ),
            1024,
        ),
        (Limits(), 2048),
    ],
)
def test_largest_forward_of_the_examples(limits, expected):
    assert largest_forward(limits).value == expected


@pytest.mark.parametrize(
    ("limits", "term"),
    [
        (Limits(max_prefill_tokens=4096), "limits.max_prefill_tokens"),
        (Limits(), "limits.max_prefill_tokens, by default limits.chunked_prefill_size"),
        (
            Limits(max_prefill_tokens=512, piecewise_cuda_graph_max_tokens=1024),
            "limits.piecewise_cuda_graph_max_tokens",
        ),
        (
            Limits(max_prefill_tokens=512),
            "limits.piecewise_cuda_graph_max_tokens, by default limits.chunked_prefill_size",
        ),
        (Limits(chunked_prefill_size=64, max_running_requests=300), "limits.max_running_requests"),
        (Limits(chunked_prefill_size=64, cuda_graph_max_bs=300), "limits.cuda_graph_max_bs"),
        (
            Limits(
                chunked_prefill_size=64,
                cuda_graph_bs=(1, 200),
                speculative_algorithm="EAGLE",
                speculative_num_draft_tokens=4,
            ),
            "limits.cuda_graph_bs x 4 tokens a request",
        ),
    ],
)
def test_a_bound_names_the_setting_that_decided_it(limits, term):
    assert largest_forward(limits).term == term


@pytest.mark.parametrize(
    ("algorithm", "widths"),
    [
        (None, {"decode": 1}),
        ("EAGLE", {"decode": 1, "target_verify": 3, "eagle_draft": 5, "eagle_draft_extend": 3}),
        ("FROZEN_KV_MTP", {"decode": 1, "target_verify": 3, "frozen_kv_mtp": 5}),
        ("MULTI_LAYER_EAGLE", {"decode": 1, "target_verify": 3, "multi_layer_eagle_draft_extend": 5}),
    ],
)
def test_each_kind_of_step_has_its_width(algorithm, widths):
    limits = Limits(
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=3,
        speculative_eagle_topk=5,
        speculative_num_front_tokens=2,
    )
    by_request = [kind for kind in kinds_of(limits) if kind.unit == "requests"]
    assert {kind.name: kind.width(limits) for kind in by_request} == widths
    assert tokens_per_request(limits) == max(widths.values())


@pytest.mark.parametrize("algorithm", [None, "EAGLE", "FROZEN_KV_MTP", "MULTI_LAYER_EAGLE"])
def test_what_speculation_leaves_open_counts_as_one(algorithm):
    limits = Limits(speculative_algorithm=algorithm, speculative_num_steps=7)
    front = limits.speculative_num_front_tokens if algorithm == "MULTI_LAYER_EAGLE" else 0
    assert tokens_per_request(limits) == 1 + front


def test_without_chunking_max_prefill_tokens_bounds_the_step():
    assert largest_step(Limits(chunked_prefill_size=0, max_prefill_tokens=5000)) == Bound(
        5000, "limits.max_prefill_tokens"
    )
    assert largest_step(Limits(chunked_prefill_size=0)).value == 2048
    assert required_dispatch_tokens(Limits(chunked_prefill_size=0, max_prefill_tokens=5000), Layout(4, 4)) == 1250


def test_a_chunk_bounds_the_step_whatever_max_prefill_tokens_says():
    assert largest_step(Limits(chunked_prefill_size=256, max_prefill_tokens=9000)).value == 256
    assert largest_step(Limits(chunked_prefill_size=4096, max_prefill_tokens=9000)).value == 4096


def test_disabled_graphs_pad_nothing():
    limits = Limits(chunked_prefill_size=8, max_running_requests=4, cuda_graph_max_bs=512)
    disabled = msgspec.structs.replace(limits, disable_cuda_graph=True)
    assert largest_step(limits).value == 512
    assert largest_step(disabled).value == 8
    assert decode_buckets(disabled) == piecewise_buckets(disabled) == ()


# Buckets.


def test_derived_buckets_are_dense_while_small():
    assert decode_buckets(Limits(cuda_graph_max_bs=100)) == (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)
    assert piecewise_buckets(Limits(chunked_prefill_size=100)) == (16, 32, 64, 100)
    assert piecewise_buckets(Limits(chunked_prefill_size=5)) == (5,)


@given(st.integers(1, 5000))
def test_derived_buckets_end_at_the_bound_and_pad_little(largest):
    buckets = decode_buckets(Limits(cuda_graph_max_bs=largest))
    assert buckets[-1] == largest
    assert list(buckets) == sorted(set(buckets))
    for below, bucket in itertools.pairwise(buckets):
        batch = below + 1
        if batch >= 16:
            assert bucket - batch < batch / (4 if batch > 64 else 2)


@given(st.integers(1, 100_000))
def test_piecewise_buckets_end_at_the_bound_and_are_few(largest):
    buckets = piecewise_buckets(Limits(piecewise_cuda_graph_max_tokens=largest))
    assert buckets[-1] == largest
    assert list(buckets) == sorted(set(buckets))
    assert all(bucket.bit_count() == 1 and bucket >= 16 for bucket in buckets[:-1])


def test_the_largest_graph_follows_from_the_requests_up_to_a_default():
    assert Limits(max_running_requests=48).graph_batch_size == 48
    assert Limits(max_running_requests=1000).graph_batch_size == 160
    assert Limits(max_running_requests=48, cuda_graph_bs=(2, 96)).graph_batch_size == 96
    assert Limits(max_running_requests=48, cuda_graph_max_bs=20).graph_batch_size == 20
    assert Limits(max_running_requests=1, cuda_graph_max_bs=20, cuda_graph_bs=(1, 4)).graph_batch_size == 4


def test_given_buckets_mean_the_same_in_any_order():
    one, other = Limits(cuda_graph_bs=(8, 1, 8, 4)), Limits(cuda_graph_bs=(1, 4, 8))
    assert one == other
    assert decode_buckets(one) == (1, 4, 8)


# Single settings that make no sense.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_running_requests": 0}, "limits.max_running_requests=0 is below 1"),
        ({"chunked_prefill_size": -1}, "limits.chunked_prefill_size=-1 is below 0"),
        ({"max_dispatch_tokens_per_rank": 0}, "limits.max_dispatch_tokens_per_rank=0 is below 1"),
        ({"cuda_graph_bs": ()}, "limits.disable_cuda_graph"),
        ({"cuda_graph_bs": (0, 1)}, "batch sizes of 1 to 2147483647"),
        ({"cuda_graph_bs": (1, 2**31)}, "batch sizes of 1 to 2147483647"),
        ({"chunked_prefill_size": 2**70}, "is above 2147483647: set limits.chunked_prefill_size to 2147483647 or less"),
        ({"cuda_graph_bs": (1, 64), "cuda_graph_max_bs": 32}, "lists 64, above limits.cuda_graph_max_bs=32"),
        ({"speculative_algorithm": "MEDUSA"}, "EAGLE, FROZEN_KV_MTP, MULTI_LAYER_EAGLE"),
        ({"disaggregation_mode": "both"}, "none, prefill, decode"),
        ({"chunked_prefill_size": 0, "max_prefill_tokens": 0}, "leave no room to prefill"),
    ],
)
def test_a_setting_out_of_bounds_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Limits(**settings)


def test_only_a_decode_role_may_prefill_nothing():
    limits = Limits(chunked_prefill_size=0, max_prefill_tokens=0, disaggregation_mode="decode")
    assert limits.prefill_tokens_per_step == 0
    assert piecewise_buckets(limits) == ()
    assert largest_step(limits).term == "limits.max_running_requests"


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_roles_that_are_not_built_are_not_launched(mode):
    with pytest.raises(ConfigError, match=f"disaggregation_mode='{mode}'"):
        refuse_unbuilt(Limits(disaggregation_mode=mode))
    with pytest.raises(ConfigError, match="experts='cutedsl' does not run"):
        refuse_unbuilt(Limits(), "cutedsl", "cpu")
    refuse_unbuilt(Limits(), "cutedsl", "cuda")
    refuse_unbuilt(Limits(), "auto", "cpu")


# Capacity.


@given(any_limits(), any_layout, any_experts)
def test_an_unset_capacity_always_starts(limits, layout, experts):
    assert budget_problems(limits, layout, "alltoall", experts) == ()
    assert dispatch_capacity(limits, layout, "alltoall", experts) >= 4096


@given(any_limits(max_dispatch=optional(set_capacity)), any_layout, any_dispatch, any_experts)
def test_h9_whatever_passes_the_checks_covers_every_step(limits, layout, dispatch, experts):
    """No step that the limits allow needs a row that the buffers lack, the largest no more than the first."""
    if budget_problems(limits, layout, dispatch, experts):
        return
    capacity = dispatch_capacity(limits, layout, dispatch, experts)
    for num_tokens in step_sizes(limits):
        assert -(-num_tokens // layout.attn_tp_size) <= capacity, num_tokens


@given(any_limits(max_dispatch=set_capacity), any_layout)
def test_a_set_capacity_is_refused_exactly_where_a_step_exceeds_it(limits, layout):
    exceeded = any(
        -(-num_tokens // layout.attn_tp_size) > limits.max_dispatch_tokens_per_rank for num_tokens in step_sizes(limits)
    )
    assert bool(budget_problems(limits, layout, "alltoall", "torch")) == exceeded


@given(any_limits(max_dispatch=set_capacity), any_layout, any_experts)
def test_the_refusal_gives_the_smallest_capacity_that_works(limits, layout, experts):
    problems = budget_problems(limits, layout, "alltoall", experts)
    smallest = needed_capacity(limits, layout, experts).value
    assert bool(problems) == (limits.max_dispatch_tokens_per_rank < smallest)
    with_capacity = {
        value: msgspec.structs.replace(limits, max_dispatch_tokens_per_rank=value)
        for value in (smallest, max(1, smallest - 1))
    }
    assert budget_problems(with_capacity[smallest], layout, "alltoall", experts) == ()
    if smallest > 1:
        assert budget_problems(with_capacity[smallest - 1], layout, "alltoall", experts)
    for problem in problems:
        assert f"limits.max_dispatch_tokens_per_rank={limits.max_dispatch_tokens_per_rank}" in problem
        assert f"set limits.max_dispatch_tokens_per_rank (or {CAPACITY_VARIABLE}) to {smallest} or more" in problem


@given(any_limits(max_dispatch=set_capacity), any_layout, any_experts)
def test_the_other_way_out_of_the_refusal_works(limits, layout, experts):
    problems = budget_problems(limits, layout, "alltoall", experts)
    lowered: dict[str, int] = {}
    for problem in problems:
        advice = problem.rpartition("or lower ")[2]
        assert re.search(r"limits\.\w+ to ", advice), problem
        for name, value in re.findall(r"limits\.(\w+) to (?:sizes of at most )?(\d+)", advice):
            lowered[name] = min(int(value), lowered.get(name, int(value)))
    width = lowered.pop("speculative_algorithm", None)
    changes: dict[str, object] = dict(lowered)
    if width is not None:
        changes |= {
            "speculative_num_draft_tokens": 1,
            "speculative_eagle_topk": 1,
            "speculative_num_front_tokens": 0,
        }
        assert width < tokens_per_request(limits)
    if "cuda_graph_bs" in lowered:
        changes["cuda_graph_bs"] = tuple(size for size in limits.cuda_graph_bs if size <= lowered["cuda_graph_bs"]) or (
            1,
        )
    assert budget_problems(msgspec.structs.replace(limits, **changes), layout, "alltoall", experts) == ()


def test_the_capacity_refusal_names_what_is_required_and_what_there_is():
    limits = Limits(max_dispatch_tokens_per_rank=512)
    assert budget_problems(limits, Layout(4, 2), "alltoall") == (
        "limits.max_dispatch_tokens_per_rank=512 is below the 1024 rows that a rank dispatches in the largest step, "
        "2048 tokens (limits.chunked_prefill_size) over attn_tp_size=2 ranks: set limits.max_dispatch_tokens_per_rank "
        "(or EXPERT_POOL_MAX_DISPATCH_TOKENS_PER_RANK) to 1024 or more, or lower limits.chunked_prefill_size to 1024",
    )


def test_cutedsl_experts_must_cover_the_largest_forward():
    limits = Limits(max_prefill_tokens=16384, max_dispatch_tokens_per_rank=2048)
    assert budget_problems(limits, Layout(8), "alltoall", "cutedsl") == ()
    [problem] = budget_problems(limits, Layout(4), "alltoall", "cutedsl")
    assert problem == (
        "limits.max_dispatch_tokens_per_rank=2048 x ep_size 4 = 8192 rows of CuTe DSL experts are below the 16384 "
        "tokens of the largest forward (limits.max_prefill_tokens): set limits.max_dispatch_tokens_per_rank (or "
        "EXPERT_POOL_MAX_DISPATCH_TOKENS_PER_RANK) to 4096 or more, or lower limits.max_prefill_tokens to 8192"
    )


@pytest.mark.parametrize(
    ("changes", "dispatch", "experts"),
    [
        ({}, "alltoall", "torch"),
        ({}, "allgather", "cutedsl"),
        ({"disaggregation_mode": "decode"}, "alltoall", "cutedsl"),
    ],
)
def test_the_cutedsl_check_rests_elsewhere(changes, dispatch, experts):
    """Each of these would be refused by the CuTe DSL check if it were made."""
    limits = Limits(max_prefill_tokens=16384, max_dispatch_tokens_per_rank=4096)
    assert budget_problems(limits, Layout(2), "alltoall", "cutedsl")
    assert budget_problems(msgspec.structs.replace(limits, **changes), Layout(2), dispatch, experts) == ()


@pytest.mark.parametrize(("max_prefill_tokens", "num_problems"), [(1, 2), (0, 1)])
def test_the_cutedsl_check_rests_where_max_prefill_tokens_is_0(max_prefill_tokens, num_problems):
    limits = Limits(max_prefill_tokens=max_prefill_tokens, max_dispatch_tokens_per_rank=10, max_running_requests=100)
    assert len(budget_problems(limits, Layout(2), "alltoall", "cutedsl")) == num_problems


def test_the_capacity_check_holds_for_a_decode_role_and_any_experts():
    limits = Limits(max_dispatch_tokens_per_rank=100, max_running_requests=101, disaggregation_mode="decode")
    for experts in ("torch", "cutedsl"):
        assert len(budget_problems(limits, Layout(2), "alltoall", experts)) == 1


def test_speculation_counts_before_the_checks():
    limits = Limits(chunked_prefill_size=512, max_running_requests=128, max_dispatch_tokens_per_rank=512)
    assert budget_problems(limits, Layout(2), "alltoall") == ()
    speculating = msgspec.structs.replace(limits, speculative_algorithm="EAGLE", speculative_num_draft_tokens=8)
    [problem] = budget_problems(speculating, Layout(2), "alltoall")
    assert "1024 tokens (limits.max_running_requests x 8 tokens a request)" in problem
    assert "lower limits.max_running_requests to 64" in problem


@given(any_limits(max_dispatch=optional(set_capacity)), st.randoms(use_true_random=False))
def test_the_order_of_settings_is_of_no_effect(limits, shuffler: random.Random):
    settings = [(name, value) for name, value in msgspec.to_builtins(limits).items() if value is not None]
    shuffler.shuffle(settings)
    config = load_config(None, {"limits": dict(settings), "model": "nowhere"})
    assert config.limits == limits
    assert budget_problems(config.limits, Layout(4), "alltoall", "cutedsl") == budget_problems(
        limits, Layout(4), "alltoall", "cutedsl"
    )


# Buffers.


@given(any_limits(max_dispatch=optional(set_capacity)), any_layout)
def test_h10_capacity_is_per_rank_and_multiplied_by_ep_size_once(limits, layout):
    capacity = dispatch_capacity(limits, layout, "alltoall")
    same_batch = Layout(layout.attn_tp_size, layout.attn_tp_size)
    assert capacity == dispatch_capacity(limits, same_batch, "alltoall"), "more batches, same capacity"
    budget = exchange_budget(limits, layout, [ROW], capacity=capacity)
    assert budget.capacity == capacity
    assert budget.send_bytes == budget.receive_bytes == layout.world_size * capacity * ROW.row_bytes
    assert budget.combine_bytes == layout.world_size * capacity * ROW.hidden_bytes


def test_h10_a_set_capacity_is_the_capacity():
    limits = Limits(max_dispatch_tokens_per_rank=5000)
    for world_size in (1, 2, 64):
        assert capacity_bound(limits, Layout(world_size), "alltoall").value == 5000
        assert exchange_rows(Layout(world_size), 5000) == world_size * 5000


@pytest.mark.parametrize(
    ("ep_size", "capacity", "hidden_size", "top_k", "dtype", "num_bytes"),
    [
        (1, 1, 7, 1, "bfloat16", 2304),
        (2, 64, 2048, 8, "bfloat16", 1062400),
        (3, 5, 100, 3, "bfloat16", 8448),
        (4, 4096, 2048, 8, "bfloat16", 135529984),
        (8, 4096, 7168, 8, "bfloat16", 941884928),
        (16, 1, 2880, 4, "float32", 371200),
        (64, 1024, 7168, 8, "float16", 1883310592),
    ],
)
def test_h10_workspace_bytes_are_those_of_flashinfer(ep_size, capacity, hidden_size, top_k, dtype, num_bytes):
    """The numbers were printed by FlashInfer 0.7.4's own layout function, compiled for the CPU."""
    formats = [RowFormat(hidden_size, top_k, dtype, "float32")]
    assert flashinfer_workspace_bytes(ep_size, capacity, formats) == num_bytes


@given(any_limits(), any_layout)
def test_h11_allgather_buffers_hold_every_batch_at_its_largest(limits, layout):
    capacity = dispatch_capacity(limits, layout, "allgather")
    rows = exchange_rows(layout, capacity)
    assert rows >= layout.dp_size * largest_forward(limits).value
    assert rows - layout.dp_size * largest_forward(limits).value < layout.world_size, "whole rows, and no more"


@given(any_limits(), any_layout)
def test_h11_a_step_above_the_allgather_buffers_is_refused(limits, layout):
    exceeded = max(step_sizes(limits)) > largest_forward(limits).value
    assert bool(budget_problems(limits, layout, "allgather")) == exceeded


def test_h11_the_allgather_refusal_gives_both_ways_out():
    limits = Limits(max_prefill_tokens=512, disable_piecewise_cuda_graph=True, cuda_graph_max_bs=64)
    [problem] = budget_problems(limits, Layout(4, 2), "allgather")
    assert problem == (
        "a step may hold 2048 tokens of a batch (limits.chunked_prefill_size), above the largest forward of 512 "
        "(limits.max_prefill_tokens) that the all-gather buffers hold for each of 2 batches: set "
        "limits.max_prefill_tokens to 2048 or more, or limits.chunked_prefill_size to 512 or less"
    )
    for change in ({"max_prefill_tokens": 2048}, {"chunked_prefill_size": 512}):
        assert budget_problems(msgspec.structs.replace(limits, **change), Layout(4, 2), "allgather") == ()


FORMATS_OF_LAYERS_THAT_DIFFER = [
    RowFormat(hidden_size=64, top_k=8, dtype="float32", weights_dtype="float32"),
    RowFormat(hidden_size=256, top_k=1, dtype="float32", weights_dtype="float32"),
    RowFormat(hidden_size=256, top_k=2, dtype="bfloat16", weights_dtype="float32"),
]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_h15_one_set_of_buffers_fits_the_rows_of_each_layer(order):
    layout, capacity = Layout(4), 16
    formats = [FORMATS_OF_LAYERS_THAT_DIFFER[index] for index in order]
    buffers = ExchangeBuffers(exchange_budget(Limits(), layout, formats, capacity=capacity), torch.device("cpu"))
    rows = exchange_rows(layout, capacity)
    for row_format in formats:
        for buffer in (buffers.send, buffers.receive):
            assert PackedRows(buffer, rows, row_format).hidden.shape == (rows, row_format.hidden_size)
        assert buffers.returned.nbytes >= rows * row_format.hidden_bytes
    alone = [exchange_budget(Limits(), layout, [row_format], capacity=capacity) for row_format in formats]
    assert buffers.num_bytes <= sum(budget.total_bytes for budget in alone), "shared, not one set a layer"


def test_h15_layers_that_differ_have_flashinfer_workspaces_that_add_up():
    alone = [flashinfer_workspace_bytes(4, 64, [row_format]) for row_format in FORMATS_OF_LAYERS_THAT_DIFFER]
    assert flashinfer_workspace_bytes(4, 64, FORMATS_OF_LAYERS_THAT_DIFFER * 3) == sum(alone)


def test_h15_layers_that_differ_in_their_experts_alone_have_flashinfer_links_of_their_own():
    narrow, wide, _ = FORMATS_OF_LAYERS_THAT_DIFFER
    links = links_for([(16, narrow), (8, narrow), (16, wide), (16, narrow)])
    assert list(links) == [(16, 64, 8), (8, 64, 8), (16, 256, 1)]
    assert list(links.values()) == [narrow, narrow, wide]


# What the ranks get.


def config_of(**limits) -> PoolConfig:
    return PoolConfig(model="nowhere", ranks=2, dispatch="alltoall", limits=Limits(**limits))


def test_the_environment_sets_an_open_capacity_and_nothing_else(monkeypatch):
    assert resolve(config_of(), SPEC).capacity == 4096
    monkeypatch.setenv(CAPACITY_VARIABLE, "3000")
    assert resolve(config_of(), SPEC).capacity == 3000
    assert resolve(config_of(max_dispatch_tokens_per_rank=2500), SPEC).capacity == 2500
    monkeypatch.setenv(CAPACITY_VARIABLE, "100")
    with pytest.raises(ConfigError, match="max_dispatch_tokens_per_rank=100 is below the 2048 rows"):
        resolve(config_of(), SPEC)


def test_what_a_rank_gets_does_not_follow_its_own_environment(monkeypatch):
    monkeypatch.setenv(CAPACITY_VARIABLE, "3000")
    config = resolve(config_of(), SPEC)
    monkeypatch.setenv(CAPACITY_VARIABLE, "9000")
    on_a_rank = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=type(config))
    budget = exchange_budget(on_a_rank.limits, on_a_rank.layout, [ROW], capacity=on_a_rank.capacity)
    assert budget.capacity == 3000
    assert dispatch_capacity(on_a_rank.limits, on_a_rank.layout) == 3000
    assert on_a_rank.digest == config.digest


@pytest.mark.parametrize("value", ["many", "", "1.5"])
def test_an_environment_that_is_no_integer_is_refused(monkeypatch, value):
    monkeypatch.setenv(CAPACITY_VARIABLE, value)
    with pytest.raises(ConfigError, match=f"{CAPACITY_VARIABLE}={value!r} is not an integer"):
        resolve(config_of(), SPEC)


def test_an_environment_below_one_is_refused(monkeypatch):
    monkeypatch.setenv(CAPACITY_VARIABLE, "0")
    with pytest.raises(ConfigError, match=f"{CAPACITY_VARIABLE}=0 is below 1"):
        resolve(config_of(), SPEC)


def test_every_problem_is_named_at_once():
    config = PoolConfig(
        model="nowhere", ranks=3, dispatch="alltoall", experts="cutedsl", limits=Limits(max_dispatch_tokens_per_rank=5)
    )
    with pytest.raises(ConfigError) as error:
        resolve(config, SPEC)
    for said in ("cannot be divided over ranks=3", "is below the 2048 rows", "rows of CuTe DSL experts"):
        assert said in str(error.value)
