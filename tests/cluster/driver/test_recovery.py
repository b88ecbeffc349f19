"""Ranks die, raise and stall, and pools change their size: every request is answered, once, with the same tokens."""

import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from expert_pool.cluster import (
    CheckpointError,
    ConfigError,
    ExpertPool,
    GeometryError,
    PlacementConfig,
    PlacementError,
    RankError,
    RecoveryConfig,
    SamplingParams,
)
from expert_pool.cluster.driver.driver import Driver
from expert_pool.cluster.driver.recovery import Restarts
from expert_pool.cluster.driver.states import DriverState
from expert_pool.dispatch.paths.tuning import Tuning
from handle import in_driver, in_rank, pool_ranks_of
from kill_scene import Left, Scene, config_of, rank_processes, ray_session
from models import replace_weights
from rank_faults import ends_at_step, inject, other_expert_backend
from waiting import holds_in_time


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(sys.modules[__name__]):
        yield


@pytest.fixture
def left(session: None) -> Iterator[Left]:
    """Checks that a test leaves nothing behind."""
    left = Left()
    yield left
    assert left.is_nothing()


@pytest.mark.long
def test_a_process_that_dies_in_the_first_start_is_replaced(left, random_models):
    lines: list[str] = []
    there = {process.pid for process in rank_processes()}

    def kill_one(line: str) -> None:
        lines.append(line)
        if line.startswith("loading") and len([one for one in lines if one.startswith("loading")]) == 1:
            next(process for process in rank_processes() if process.pid not in there).kill()

    with ExpertPool.launch(config_of(random_models["qwen3_moe"], 2), report=kill_one) as pool:
        status = pool.status()
        assert (status.state, status.restarts) == ("ready", 1)
        assert any("; restarting (1 of 1000)" in line for line in lines)
        assert len(list(pool.generate([[5], [6]], SamplingParams(max_new_tokens=2)))) == 2


@pytest.mark.parametrize("victim", ["rank", "driver"])
def test_a_start_that_dies_says_what_it_was_doing_and_what_was_said_last(victim, left, random_models):
    def kill_it(line: str) -> None:
        if line.startswith("loading"):
            title = "ray::Rank" if victim == "rank" else "ray::Driver"
            next(one for one in left.processes() if one.cmdline()[0].startswith(title)).kill()

    doing = {
        "rank": r"rank 0 \(process \d+ on \S+\) died during [a-z_]+.*: The actor is dead because ",
        "driver": r"driver actor ended while the pool started \(after 'loading .*'\): its process \d+ .* ended: ",
    }
    config = config_of(random_models["qwen3_moe"], 1, recovery=RecoveryConfig(max_restarts=0))
    with pytest.raises(RankError, match=doing[victim] + r".*; it said last \(in .*worker-.*\.err\): .*level=info"):
        ExpertPool.launch(config, report=kill_it)


@pytest.mark.long
def test_a_pool_grows_and_shrinks_under_load(left, random_models, tmp_path):
    config = config_of(random_models["qwen3_moe"], 2, max_ranks=4)
    with ExpertPool.launch(config) as pool:
        scene = Scene(pool, tmp_path, seed=3)
        with pytest.raises(ConfigError, match=r"has 8 experts.*ranks=3: .*sizes that work: \[1, 2, 4\]"):
            pool.resize(3)
        with pytest.raises(ConfigError, match=r"ranks=8 is not between .* max_ranks=4: resize to one of \[1, 2, 4\]"):
            pool.resize(8)
        for ranks in (4, 2):
            assert scene.answers(then=lambda ranks=ranks: pool.resize(ranks)) == scene.expected
            status = pool.status()
            assert (status.state, len(status.places), status.restarts) == ("ready", ranks, 0)
            assert pool.rank_config.layout.world_size == ranks
            assert len(left.processes() & set(rank_processes())) == ranks
            assert len(left.groups()) == 1


@pytest.mark.long
def test_a_size_that_only_the_ranks_can_refuse_leaves_the_pool_as_it_was(left, random_models, tmp_path):
    """Tables that cannot be read are found when ranks load; they are gone once the pool is on its way back."""
    tables, lines = tmp_path / "tables.json", []

    def on_line(line: str) -> None:
        lines.append(line)
        if "going back to 2 ranks" in line:
            tables.unlink()

    config = config_of(random_models["qwen3_moe"], 2, dispatch="measured", tuning=Tuning(cache=str(tables)))
    prompts, sampling = [[5, 17, index] for index in range(6)], SamplingParams(max_new_tokens=300, ignore_eos=True)
    with ExpertPool.launch(config, report=on_line) as pool, ThreadPoolExecutor(1) as threads:
        expected = {one.index: one.token_ids for one in pool.generate(prompts, sampling)}
        tables.write_text("{")
        completions = pool.generate(prompts, sampling)
        resizing = threads.submit(pool.resize, 4)
        assert {one.index: one.token_ids for one in completions} == expected
        with pytest.raises(ConfigError, match=r"^not resized, the pool has 2 ranks: .*tables.json' cannot be read"):
            resizing.result()
        status = pool.status()
        assert (status.state, len(status.places), status.restarts) == ("ready", 2, 0), lines
        assert len(left.groups()) == 1


@pytest.mark.long
@pytest.mark.parametrize("fault", ["killed", "raising"])
def test_a_size_whose_ranks_end_while_they_start_is_given_up_for_the_one_that_worked(fault, left, random_models):
    """As where there is not the memory: the operating system ends a rank, or what it asks for raises."""
    config = config_of(random_models["qwen3_moe"], 1, recovery=RecoveryConfig(max_restarts=0))
    with ExpertPool.launch(config) as pool, ThreadPoolExecutor(1) as threads:
        before = set(rank_processes())
        if fault == "raising":
            in_driver(pool, let_two_ranks_miss_memory)
        resizing = threads.submit(pool.resize, 2)
        if fault == "killed":
            assert holds_in_time(lambda: set(rank_processes()) - before and "loading" in status_of(pool), within_s=60)
            (left.processes() & (set(rank_processes()) - before)).pop().kill()
        with pytest.raises(RankError, match=r"^not resized, the pool has 1 ranks: (rank \d .*died|.*MemoryError: )"):
            resizing.result()
        status = pool.status()
        assert (status.state, len(status.places), status.restarts) == ("ready", 1, 0)
        assert len(list(pool.generate([[5]], SamplingParams(max_new_tokens=2)))) == 1
        assert len(left.groups()) == 1


@pytest.mark.long
def test_a_pool_of_another_size_does_not_go_on_with_other_weights(left, random_models, tmp_path):
    """Experts are divided otherwise by then. What is found beforehand gives nothing up; files that are replaced while
    the pool is on its way end it, for it cannot go back either, where ranks would read the same files."""
    folder = Path(shutil.copytree(random_models["qwen3_moe"], tmp_path / "model"))
    prompts, sampling = [[5, 17, index] for index in range(6)], SamplingParams(max_new_tokens=300, ignore_eos=True)
    first = SamplingParams(max_new_tokens=1)

    def on_line(line: str) -> None:
        if line == "resizing from 4 to 2 ranks":
            replace_weights(folder)

    with ExpertPool.launch(config_of(str(folder), 2), report=on_line) as pool, ThreadPoolExecutor(1) as threads:
        pool.resize(4)
        before = pool.status().places
        name = replace_weights(folder)
        with pytest.raises(CheckpointError, match=r"weights were replaced since the pool began, as rank 0 on .* finds"):
            pool.resize(2)
        status = pool.status()
        assert (status.state, status.places) == ("ready", before)
        shutil.copy(Path(random_models["qwen3_moe"]) / name, folder / name)

        completions = pool.generate(prompts, [first, *[sampling] * 5])
        assert next(completions).index == 0
        resizing = threads.submit(pool.resize, 2)
        said = rf"weights were replaced since the pool began: {name} "
        with pytest.raises(CheckpointError, match=said):
            list(completions)
        with pytest.raises(CheckpointError, match=said):
            resizing.result()
        status = pool.status()
        assert (status.state, status.restarts) == ("failed", 0)
        assert left.groups() == set()


@pytest.mark.long
def test_more_ranks_than_there_are_places_leave_the_pool_as_it_is(left, random_models):
    placement = PlacementConfig(cpus_per_rank=2, timeout_s=1.0)
    with ExpertPool.launch(config_of(random_models["qwen3_moe"], 1, placement=placement)) as pool:
        process = pool.status().places[0].pid
        with pytest.raises(PlacementError, match=r"no place .* within placement.timeout_s=1: 0 of 7 bundles placed"):
            pool.resize(8)
        assert [place.pid for place in pool.status().places] == [process]
        assert len(left.groups()) == 1
        assert len(list(pool.generate([[5]], SamplingParams(max_new_tokens=2)))) == 1


@pytest.mark.long
def test_a_rank_that_fails_again_and_again_ends_the_pool_with_what_happened_each_time(left, random_models, tmp_path):
    def on_line(line: str) -> None:
        if line.startswith("ready"):
            ready.append(line)
        if line.startswith("ready") and len(ready) > 1:
            end_it()

    def end_it() -> None:
        in_rank(pool, 0, inject, ends_at_step, "DECODE", 1, "raising", str(tmp_path / "stamp"))

    ready: list[str] = []
    config = config_of(random_models["qwen3_moe"], 2, recovery=RecoveryConfig(max_restarts=1, backoff_s=0))
    with ExpertPool.launch(config, report=on_line) as pool:
        end_it()
        with pytest.raises(RankError) as raised:
            list(pool.generate([[5, 17]] * 2, SamplingParams(max_new_tokens=400, ignore_eos=True)))
        message, cause = str(raised.value), "rank 0 failed while running: RuntimeError: injected failure"
        assert message.startswith(f"{cause}. The pool was restarted 1 times within recovery.window_s=3600 ")
        assert message.endswith(f"s ago, after: {cause}")
        status = pool.status()
        assert (status.state, status.restarts, status.last_failure) == ("failed", 1, cause)
        with pytest.raises(RankError, match="injected failure"):
            list(pool.generate([[5]]))


@pytest.mark.long
def test_ranks_that_disagree_are_not_started_again(left, random_models):
    with ExpertPool.launch(config_of(random_models["qwen3_moe"], 2)) as pool:
        completions = pool.generate([[5, 17]] * 8, SamplingParams(max_new_tokens=400, ignore_eos=True))
        in_rank(pool, 1, inject, other_expert_backend)
        with pytest.raises(GeometryError, match="expert_backend differs"):
            list(completions)
        status = pool.status()
        assert (status.state, status.restarts) == ("failed", 0)


def status_of(pool: ExpertPool) -> str:
    return pool.status().notice or ""


def let_two_ranks_miss_memory(driver: Driver) -> None:
    """The driver itself finds no memory as soon as there are two ranks to start."""
    pool_ranks = pool_ranks_of(driver)
    start_ranks = pool_ranks.start_ranks

    async def start(begin_stage: Callable[[DriverState], None]) -> AsyncIterator[str]:
        if pool_ranks.config.layout.world_size == 2:
            raise MemoryError("no room")
        async for line in start_ranks(begin_stage):
            yield line

    pool_ranks.start_ranks = start


def test_pauses_double_up_to_their_bound_and_old_restarts_no_longer_count():
    restarts = Restarts(RecoveryConfig(max_restarts=3, window_s=100, backoff_s=1.5, max_backoff_s=5))
    error = RankError("rank 1 died")
    assert [restarts.decide(error, now_s).delay_s for now_s in (0.0, 50.0, 90.0)] == [1.5, 3.0, 5.0]
    with pytest.raises(RankError, match=r"rank 1 died. The pool was restarted 3 times .* 99 s ago, after: rank 1 died"):
        restarts.decide(error, 99.0)
    again = restarts.decide(error, 101.0)
    assert (again.number, again.delay_s, restarts.total) == (3, 5.0, 4)
    assert restarts.announce(again) == "rank 1 died; restarting in 5 s (3 of 3)"


@pytest.mark.parametrize("error", [GeometryError("ranks disagree"), ConfigError("no"), PlacementError("nowhere")])
def test_what_would_fail_the_same_way_again_is_not_tried_again(error):
    with pytest.raises(type(error), match=str(error)):
        Restarts(RecoveryConfig()).decide(error, 0.0)


def test_without_restarts_the_first_failure_is_the_last():
    with pytest.raises(RankError, match=r"^rank 1 died$"):
        Restarts(RecoveryConfig(max_restarts=0)).decide(RankError("rank 1 died"), 0.0)
