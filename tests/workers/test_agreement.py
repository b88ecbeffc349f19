"""The plan of a step: a function of what all ranks proposed, so that all ranks have the same; and what it refuses."""

import dataclasses
import itertools
import re
from functools import partial
from typing import Any

import msgspec
import pytest
from expert_pool.cluster import GeometryError, Limits, PoolConfig
from expert_pool.cluster.config import resolve
from expert_pool.dispatch.budgets.geometry import PaddingMode
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.dispatch.budgets.step_kinds import KINDS
from expert_pool.dispatch.expert_path import HeldAlike
from expert_pool.graphs.lockstep import LockstepRank
from expert_pool.graphs.plan import CaptureEntry, CapturePlan, plan_captures
from expert_pool.graphs.record import differences
from expert_pool.workers.agreement import StateReader
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.scheduling.scheduler import BatchKind
from expert_pool.workers.step_plan import EAGER_NO_GRAPHS, EAGER_TOO_LARGE, Proposal, choose_graph, derive_plan
from handle import agreement_of, scheduler_of
from hypothesis import given
from hypothesis import strategies as st
from plain_ranks import run_on_ranks
from rank_insides import run_script

GRAPHS = plan_captures(Limits(max_running_requests=8, cuda_graph_bs=(1, 2, 4, 8), chunked_prefill_size=64))
CAPACITY = 64
IDLE, PREFILL, DECODE = BatchKind.IDLE, BatchKind.PREFILL, BatchKind.DECODE


def proposal(kind: BatchKind = IDLE, num_tokens: int = 0, **others: int) -> Proposal:
    fields = {"step": 5, "num_due": num_tokens, "intake_bytes": 0, "wake_epoch": 3, "leave": 0}
    fields |= {"batch_digest": 4, "in_flight": 0}
    return Proposal(kind=kind, num_tokens=num_tokens, **{**fields, **others})


@st.composite
def wishes(draw: st.DrawFn) -> tuple[Layout, list[Proposal]]:
    """A layout, and what its ranks propose; those that share a batch propose the same."""
    layout = Layout((tp := draw(st.integers(1, 3))) * draw(st.integers(1, 5)), tp)
    proposals = []
    for _ in range(layout.dp_size):
        kind = draw(st.sampled_from(BatchKind))
        num_tokens = 0 if kind is IDLE else draw(st.integers(1, 8 if kind is DECODE else 64))
        due = draw(st.integers(0, num_tokens))
        proposals += [proposal(kind, num_tokens, num_due=due)] * layout.attn_tp_size
    return layout, proposals


@given(wishes())
def test_a_plan_covers_every_rank_in_one_graph_or_in_none(wish):
    layout, proposals = wish
    plan = derive_plan(proposals, layout, CAPACITY, GRAPHS)
    leaders = proposals[:: layout.attn_tp_size]
    assert plan.kinds == tuple(BatchKind(leader.kind) for leader in leaders)
    assert plan.num_tokens_per_dp_rank == tuple(leader.num_tokens for leader in leaders)
    if set(plan.kinds) == {IDLE}:
        assert (plan.geometry, plan.graph, plan.eager_reason) == (None, None, None)
        return
    assert plan.geometry is not None
    for wanted, padded in zip(plan.num_tokens_per_dp_rank, plan.geometry.num_tokens_per_dp_rank, strict=True):
        assert padded >= max(1, wanted)
    assert (plan.graph is None) == (plan.eager_reason is not None)
    if plan.graph is None:
        assert plan.geometry.num_tokens_per_dp_rank == tuple(max(1, n) for n in plan.num_tokens_per_dp_rank)
        assert not plan.geometry.in_capture
    else:
        assert plan.geometry.padding_mode is PaddingMode.MAX_LEN
        assert len(set(plan.geometry.num_tokens_per_dp_rank)) == 1
        assert plan.geometry.in_capture


@given(wishes())
def test_all_ranks_derive_the_same_plan_from_what_travelled(wish):
    """Each rank decodes the gathered integers by itself."""
    layout, proposals = wish
    rows = [[int(value) for value in one] for one in proposals]
    plans = [derive_plan([Proposal(*row) for row in rows], layout, CAPACITY, GRAPHS) for _ in range(layout.world_size)]
    assert all(plan == plans[0] for plan in plans)
    assert all(dataclasses.asdict(plan) == dataclasses.asdict(plans[0]) for plan in plans)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=16))
def test_h2_a_graph_is_looked_up_by_the_largest_count_never_by_the_sum(counts):
    if max(counts) == 0:
        return
    graph, reason = choose_graph([DECODE if count else IDLE for count in counts], counts, GRAPHS)
    fitting = [bucket for bucket in (1, 2, 4, 8) if bucket >= max(counts)]
    if fitting:
        assert (graph, reason) == (CaptureEntry("decode", fitting[0]), None)
    else:
        assert (graph, reason) == (None, EAGER_TOO_LARGE)


@pytest.mark.parametrize(
    ("kinds", "counts", "graphs", "expected"),
    [
        ((PREFILL, DECODE), (8, 1), GRAPHS, CaptureEntry("piecewise", 16)),
        ((DECODE, PREFILL, IDLE), (20, 1, 0), GRAPHS, CaptureEntry("piecewise", 32)),
        ((PREFILL, DECODE), (8, 65), GRAPHS, EAGER_TOO_LARGE),
        ((PREFILL, IDLE), (65, 0), GRAPHS, EAGER_TOO_LARGE),
        ((DECODE, IDLE), (1, 0), CapturePlan(()), EAGER_NO_GRAPHS),
        ((PREFILL, PREFILL), (1, 17), GRAPHS, CaptureEntry("piecewise", 32)),
        ((IDLE, PREFILL), (0, 16), GRAPHS, CaptureEntry("piecewise", 16)),
    ],
)
def test_one_graph_for_all_or_the_reason_why_none(kinds, counts, graphs, expected):
    graph, reason = choose_graph(kinds, counts, graphs)
    assert (graph or reason) == expected
    assert (graph is None) != (reason is None)


def test_a_kind_that_serves_no_step_is_recorded_and_never_replayed():
    """So a pool that is asked for drafts runs as one without them."""
    asked = Limits(max_running_requests=8, speculative_algorithm="EAGLE", speculative_num_draft_tokens=3)
    graphs = plan_captures(asked)
    without = graphs.without({entry for entry in graphs.entries if KINDS[entry.kind].serves})
    assert {"target_verify", "eagle_draft", "eagle_draft_extend"} == {entry.kind for entry in without.entries}
    for kinds, expected in (([DECODE, IDLE], "decode"), ([PREFILL, DECODE], "piecewise")):
        replayed, _ = choose_graph(kinds, (3, 1), graphs)
        assert replayed is not None
        assert replayed.kind == expected
        assert choose_graph(kinds, (3, 1), without) == (None, EAGER_NO_GRAPHS)


def test_a_step_above_the_capacity_is_refused():
    with pytest.raises(GeometryError, match="rank 1 would dispatch 65 rows, above the capacity of 64"):
        derive_plan([proposal(DECODE, 1), proposal(PREFILL, 65)], Layout(2), CAPACITY, GRAPHS)


def test_ranks_at_different_steps_are_refused_by_name_and_value():
    with pytest.raises(GeometryError, match=r"step differs \(rank 0: 5, rank 1: 5, rank 2: 6\)"):
        derive_plan([proposal(), proposal(), proposal(step=6)], Layout(3), CAPACITY, GRAPHS)


@pytest.mark.parametrize("name", ["kind", "num_tokens", "num_due", "batch_digest"])
def test_ranks_that_share_a_batch_and_scheduled_another_are_refused(name):
    alike = proposal(DECODE, 2)
    other = alike._replace(**{name: getattr(alike, name) - 1})
    values = rf"{name} differs \(rank 2: {int(getattr(alike, name))}, rank 3: {int(getattr(other, name))}\)"
    with pytest.raises(GeometryError, match=values):
        derive_plan([alike, alike, alike, other], Layout(4, 2), CAPACITY, GRAPHS)


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_all_ranks_leave_as_soon_as_one_was_told_to(told):
    proposals = [proposal(DECODE, 1, leave=int(one)) for one in told]
    assert derive_plan(proposals, Layout(len(told)), CAPACITY, GRAPHS).leave == any(told)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_a_pause_waits_for_a_wake_up_call_later_than_some_rank_has_seen(epochs):
    """A call that reached only some ranks is on its way to the others, so those must not wait for another one."""
    plan = derive_plan([proposal(wake_epoch=epoch) for epoch in epochs], Layout(len(epochs)), CAPACITY, GRAPHS)
    assert plan.is_pause
    assert plan.wake_epoch == min(epochs)


@pytest.mark.parametrize("others", [{"intake_bytes": 7}, {"leave": 1}, {"kind": DECODE, "num_tokens": 1}])
def test_there_is_no_pause_while_any_rank_has_something(others):
    busy = proposal(**{"kind": IDLE, "num_tokens": 0, **others})
    assert not derive_plan([proposal(), busy], Layout(2), CAPACITY, GRAPHS).is_pause


def test_each_dp_rank_shares_what_its_leader_took_in():
    proposals = [proposal(intake_bytes=size) for size in (7, 0, 9, 0)]
    assert derive_plan(proposals, Layout(4, 2), CAPACITY, GRAPHS).intake_bytes == (7, 9)


class Holder:
    """What a rank holds, to be changed field by field."""

    def __init__(self, model: str):
        self.config = resolve(PoolConfig(model=model, ranks=2), inspect_model(model, None))
        self.held = HeldAlike("allgather", "torch", 64, 1000)
        self.graphs = LockstepRank(0, {}, lambda entry: None)
        self.graphs.commit_plan(GRAPHS)

    def reader(self) -> StateReader:
        return StateReader(self.config, self, "uncompiled", self.graphs)

    def change(self, name: str, value: Any) -> None:
        self.held = msgspec.structs.replace(self.held, **{name: value})


def change_config(holder: Holder) -> None:
    limits = msgspec.structs.replace(holder.config.limits, max_running_requests=7)
    holder.config = msgspec.structs.replace(holder.config, limits=limits)


CHANGES = {
    "config": (change_config, "config.limits.max_running_requests differs (rank 0: 128, rank 1: 7)"),
    "dispatcher": (
        partial(Holder.change, name="dispatcher", value="x"),
        "dispatcher differs (rank 0: allgather, rank 1: x)",
    ),
    "expert_backend": (
        partial(Holder.change, name="expert_backend", value="x"),
        "expert_backend differs (rank 0: torch, rank 1: x)",
    ),
    "capacity": (partial(Holder.change, name="capacity", value=63), "capacity differs (rank 0: 64, rank 1: 63)"),
    "capture_mode": (
        lambda holder: setattr(holder.graphs, "capture_depth", 1),
        "capture_depth differs (rank 0: 0, rank 1: 1)",
    ),
    "graphs": (
        lambda holder: holder.graphs.commit_plan(GRAPHS.without({GRAPHS.entries[-1]})),
        f"graphs.entries[{len(GRAPHS.entries) - 1}] differs (rank 0: decode 1 1 0, rank 1: none)",
    ),
}


@pytest.mark.parametrize("field", CHANGES)
def test_the_state_digest_changes_with_each_field_and_the_difference_is_named(field, tiny_moe):
    alike, other = Holder(tiny_moe), Holder(tiny_moe)
    assert alike.reader().read() == other.reader().read()
    change, sentence = CHANGES[field]
    change(other)
    (state, digest), (other_state, other_digest) = alike.reader().read(), other.reader().read()
    assert digest != other_digest
    assert differences({"rank 0": state, "rank 1": other_state}) == [sentence]


def test_a_state_is_read_anew_at_every_digest(tiny_moe):
    holder = Holder(tiny_moe)
    reader = holder.reader()
    _, before = reader.read()
    holder.change("capacity", 63)
    _, digest = reader.read()
    assert digest != before


def test_differences_name_every_field_with_each_holder_and_its_value():
    plans = {
        "rank 0": GRAPHS,
        "rank 1": CapturePlan((msgspec.structs.replace(GRAPHS.entries[0], bucket=9, layer=1), *GRAPHS.entries[1:])),
        "driver": GRAPHS,
    }
    first = GRAPHS.entries[0].bucket
    assert differences(plans) == [
        f"entries[0].bucket differs (rank 0: {first}, rank 1: 9, driver: {first})",
        "entries[0].layer differs (rank 0: 0, rank 1: 1, driver: 0)",
    ]
    assert differences({"rank 0": GRAPHS, "rank 1": GRAPHS}) == []


def plans_of_a_generation(engine: Any) -> list[Any]:
    agreement, plans = agreement_of(engine), []
    agree = agreement.agree

    def agree_and_note(*arguments: Any) -> Any:
        plans.append(agree(*arguments))
        return plans[-1]

    agreement.agree = agree_and_note
    run_script(engine, [{0: [[3, 4, 5], [6]], 3: [[7] * 20]}, {1: [[8, 9]]}], 4)
    return plans


def test_ranks_that_run_hold_equal_plans_at_every_step(random_models):
    by_rank = run_on_ranks(PoolConfig(model=random_models["qwen3_moe"], ranks=2), plans_of_a_generation)
    assert len(by_rank[0]) > 6
    assert by_rank[0] == by_rank[1]


def what_a_rank_says_that_dropped_another_request(engine: Any) -> str:
    """Each rank ends one of three requests, as if it had found a stop text in it, and not the same one."""
    scheduler, calls = scheduler_of(engine), itertools.count()
    schedule = scheduler.schedule

    def drop_one_and_schedule() -> Any:
        if next(calls) == 4:
            scheduler.abort(1 + engine.rank)
        return schedule()

    scheduler.schedule = drop_one_and_schedule
    try:
        run_script(engine, [{0: [[3, 4, 5], [6, 7, 8], [9, 10, 11]]}], 16)
    except GeometryError as error:
        return str(error)
    return ""


def test_ranks_that_run_other_requests_of_one_batch_are_refused_where_all_counts_are_equal(random_models):
    """Each would compute experts for rows of its own, and hand them to the other as rows of the other's requests."""
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=2, attn_tp_size=2)
    by_rank = run_on_ranks(config, what_a_rank_says_that_dropped_another_request)
    assert by_rank[0] == by_rank[1]
    assert re.search(r"ranks disagree before a step: batch_digest differs \(rank 0: -?\d+, rank 1: -?\d+\)", by_rank[0])
