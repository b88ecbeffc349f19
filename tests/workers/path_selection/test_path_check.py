"""A path that is built is held to the plain experts, and no rank that fails on the way keeps the others waiting."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

import expert_pool.workers.path_selection.check as path_check
import expert_pool.workers.path_selection.layer_timer as layer_timer
import pytest
import torch
import torch.distributed as dist
from expert_pool.cluster import CacheConfig, Limits, PoolConfig
from expert_pool.dispatch.budgets.budget import RowFormat
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.dispatch.collectives import Collectives
from expert_pool.dispatch.dispatchers.alltoall import AllToAllDispatcher
from expert_pool.dispatch.dispatchers.contract import Dispatched, Dispatcher
from expert_pool.dispatch.dispatchers.flashinfer_alltoall import FlashInferDispatcher
from expert_pool.dispatch.errors import ConfigError
from expert_pool.dispatch.expert_path import ExpertPath
from expert_pool.dispatch.experts.torch_experts import TorchExperts
from expert_pool.dispatch.moe_layer import MoeLayer
from expert_pool.dispatch.paths.maker import PathMaker
from expert_pool.dispatch.paths.table import PathName
from expert_pool.dispatch.paths.tuning import TableRow, Tuning
from expert_pool.dispatch.probe import HostGroup, attempt
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.path_selection.check import LARGEST_ERROR, relative_errors
from expert_pool.workers.path_selection.layer_timer import LayerTimer
from handle import bound_of_one_row, choice_built, exchange_of, group_of, replaced, with_dispatchers
from plain_ranks import ForkedRanks
from running_disagreement import WITHIN_S
from test_measured_paths import choice_of, choose_again

LARGEST = 64


@pytest.fixture(scope="module")
def rank_set(random_models: dict[str, str]) -> Iterator[ForkedRanks]:
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=2,
        dispatch="measured",
        limits=Limits(max_running_requests=4, cuda_graph_bs=(1, 4), chunked_prefill_size=LARGEST),
        cache=CacheConfig(num_tokens=1024),
        tuning=Tuning(table=(TableRow(LARGEST, "allgather+torch"),)),
    )
    with ForkedRanks(config, graphs=False) as ranks:
        yield ranks


def rows_of(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("replacement", [0.0, -1.0])
def test_one_wrong_row_of_many_is_beyond_what_any_format_rounds(replacement):
    expected = rows_of(224)
    found = expected.clone()
    found[100] *= replacement
    whole, of_one = relative_errors(found, expected)
    assert whole < LARGEST_ERROR["fp8"]
    assert all(of_one > bound_of_one_row() * bound for bound in LARGEST_ERROR.values())


def test_a_row_that_all_but_cancels_is_held_to_the_average():
    expected = rows_of(64)
    expected[3] *= 1e-4
    noise = 0.01 * torch.randn(expected.shape, generator=torch.Generator().manual_seed(8))
    assert max(relative_errors(expected + noise, expected)) < LARGEST_ERROR["none"]


@pytest.mark.parametrize("not_finite", ["found", "expected"])
def test_what_is_no_number_is_infinitely_far(not_finite):
    found, expected = rows_of(8), rows_of(8)
    (found if not_finite == "found" else expected)[2, 5] = float("nan")
    assert relative_errors(found, expected) == (float("inf"),) * 2


def test_no_rows_and_rows_that_are_zero_are_right():
    assert relative_errors(rows_of(0), rows_of(0)) == (0.0, 0.0)
    zeros = torch.zeros(3, 256)
    assert relative_errors(zeros, zeros) == (0.0, 0.0)
    assert relative_errors(zeros + 1, zeros) == (float("inf"),) * 2


def with_a_row_wrong_on_one(engine: RankEngine, by: float) -> tuple[str, ...]:
    combine = AllToAllDispatcher.combine

    def one_row_off(dispatcher: AllToAllDispatcher, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        y_TH = combine(dispatcher, y_RH, dispatched).clone()
        y_TH[0] *= 1 + by
        return y_TH

    with ExitStack() as faults:
        if engine.rank == 0:
            faults.enter_context(replaced(AllToAllDispatcher, "combine", one_row_off))
        return choose_again(engine).lines


def test_a_path_with_one_wrong_row_is_dropped_on_all(rank_set):
    for lines in rank_set.call(with_a_row_wrong_on_one, 0.15):
        assert any(
            line.startswith("alltoall+torch dropped on all ranks: rank 0: ConfigError: on rank 0 it computes ")
            and " with a relative error in one row of 0.1" in line
            for line in lines
        )


def wrong_for_one_row(engine: RankEngine) -> tuple[str, ...]:
    """A path that is right for many rows, as a kernel is that has another launch for few."""
    combine = AllToAllDispatcher.combine

    def doubled(dispatcher: AllToAllDispatcher, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        y_TH = combine(dispatcher, y_RH, dispatched)
        return 2 * y_TH if max(dispatched.geometry.num_rows_per_rank) == 1 else y_TH

    with replaced(AllToAllDispatcher, "combine", doubled):
        return choose_again(engine).lines


def test_a_path_that_is_wrong_for_one_row_alone_is_dropped_on_all(rank_set):
    for lines in rank_set.call(wrong_for_one_row):
        assert any(
            line.startswith("alltoall+torch dropped on all ranks: ") and " with a relative error of 1 to the" in line
            for line in lines
        ), lines


def without_memory_for_rows(engine: RankEngine, user: ModuleType, faulty_rank: int) -> tuple[str, ...]:
    """One rank fails where it makes its rows; what follows is an exchange."""

    def no_memory(layer: MoeLayer, *_: Any) -> None:
        raise RuntimeError("out of memory")

    with ExitStack() as faults:
        if engine.rank == faulty_rank:
            faults.enter_context(replaced(user, "random_rows", no_memory))
        try:
            return choose_again(engine).lines
        except Exception as error:
            return (str(error),)


def without_memory_to_check(engine: RankEngine, faulty_rank: int) -> tuple[str, ...]:
    return without_memory_for_rows(engine, path_check, faulty_rank)


def without_memory_to_measure(engine: RankEngine, faulty_rank: int) -> tuple[str, ...]:
    return without_memory_for_rows(engine, layer_timer, faulty_rank)


@pytest.mark.parametrize("what", [without_memory_to_check, without_memory_to_measure])
@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_rank_without_memory_for_its_rows_keeps_nobody_waiting(what, faulty_rank, rank_set):
    for lines in rank_set.call(what, faulty_rank, deadline_s=WITHIN_S):
        told = f"alltoall+torch dropped on all ranks: rank {faulty_rank}: RuntimeError: out of memory"
        assert any(told in line for line in lines), lines


def made_by_all_but_one(engine: RankEngine, faulty_rank: int) -> tuple[int, str | None]:
    """Two paths over one dispatcher, which all ranks make together, and which one of them fails to make at first."""
    tries = 0

    def make_together(make: Callable[..., Dispatcher], maker: PathMaker, kind: str) -> Dispatcher:
        nonlocal tries
        dist.barrier(maker.parts.group)
        tries += 1
        if engine.rank == faulty_rank and tries == 1:
            raise RuntimeError("out of memory")
        return make(maker, kind)

    name, choice = PathName("alltoall", "torch"), choice_of(engine)
    with with_dispatchers(make_together):
        built, dropped = choice_built(choice, (name, name), exchange_of(engine).layers[:1])
    return len(built), str(dropped[str(name)])


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_what_one_rank_could_not_make_is_made_by_all_for_the_next_path(faulty_rank, rank_set):
    reason = f"alltoall+torch dropped on all ranks: rank {faulty_rank}: RuntimeError: out of memory"
    assert rank_set.call(made_by_all_but_one, faulty_rank, deadline_s=WITHIN_S) == [(1, reason)] * 2


def prepared_by_one(engine: RankEngine, file: str) -> tuple[str, ...]:
    """Experts that all ranks prepare together are prepared on one alone; then the cached table is given up."""
    prepared: set[int] = set()

    def prepare(experts: TorchExperts, group: HostGroup) -> None:
        if id(experts) not in prepared:
            group.meet()
            dist.barrier(group_of(engine, "ep"))
            if engine.rank == 1:
                raise RuntimeError("out of memory")
            prepared.add(id(experts))

    assert choice_and_table(engine, file) == ("alltoall+torch",)
    with replaced(TorchExperts, "prepare", prepare):
        try:
            return choose_again(engine, cache=file).lines
        except ConfigError as error:
            return (str(error),)


def choice_and_table(engine: RankEngine, file: str) -> tuple[str, ...]:
    by_path = {"allgather": 2.0, "alltoall": 1.0}

    def microseconds(timer: LayerTimer, path: ExpertPath, layer: MoeLayer, num_rows: int) -> float:
        return by_path[path.held.dispatcher]

    with replaced(LayerTimer, "microseconds", microseconds):
        return choose_again(engine, cache=file).path.table.names


def test_a_path_of_a_cached_table_that_one_rank_failed_to_prepare_is_not_tried_again(rank_set, tmp_path):
    for lines in rank_set.call(prepared_by_one, str(tmp_path / "mine.json"), deadline_s=WITHIN_S):
        assert "no path is left" in lines[-1]
        assert "alltoall+torch dropped on all ranks: rank 1: RuntimeError: out of memory" in lines[-1]
        assert "allgather+torch dropped on all ranks: rank 1: RuntimeError: out of memory" in lines[-1]


def met_by_one_alone(engine: RankEngine) -> str:
    """One rank waits for the others in what they have finished without it, which none of them calls a failure."""
    group = HostGroup(engine.joined.host_group, engine.rank)

    def build() -> int:
        if engine.rank == 1:
            group.meet()
        return 1

    return str(attempt(group, "it", build))


def test_a_rank_that_waits_alone_in_what_the_others_have_finished_is_a_failure_on_all(rank_set):
    told = "it dropped on all ranks: rank 1: PeerGaveUp: ranks [0] gave up"
    assert rank_set.call(met_by_one_alone, deadline_s=WITHIN_S) == [told] * 2


def test_links_that_were_made_before_one_fails_are_given_back(monkeypatch):
    """FlashInfer finds workspaces by their layout: one that stayed would keep this rank out of making it again."""
    given_back: list[int] = []

    def create_communication(bootstrap: Any, params: SimpleNamespace, options: Any) -> SimpleNamespace:
        if params.hidden_size == 512:
            raise RuntimeError("out of memory")
        return SimpleNamespace(destroy=lambda: given_back.append(params.hidden_size))

    library = ModuleType("flashinfer.moe_ep")
    library.create_communication = create_communication
    library.BootstrapConfig = library.MoEEpCommParams = library.NVLinkOneSidedConfig = SimpleNamespace
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.moe_ep", library)
    layers = [(8, RowFormat(hidden, 2, "bfloat16", "float32")) for hidden in (256, 512)]
    with pytest.raises(RuntimeError, match="out of memory"):
        FlashInferDispatcher(Collectives({}), None, Layout(2), 0, 64, layers, 60.0, torch.device("cpu"))
    assert given_back == [256]
