"""What follows where places or ranks do not come: each start, recovery and move is a value, and one ladder is for all.

No rank runs here: places and ranks come, or fail, as a test says.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from expert_pool.cluster import (
    CheckpointError,
    ExpertPoolError,
    GeometryError,
    PlacementError,
    PoolConfig,
    RankError,
    RecoveryConfig,
)
from expert_pool.cluster.driver.lifecycle import Lifecycle
from expert_pool.cluster.driver.rebuild import Rebuild
from expert_pool.cluster.driver.states import DriverState, Failed, Recovering, Resizing, State, name_of
from expert_pool.cluster.planning.validation import validate
from expert_pool.workers.rank_config import RankConfig

FINE = None
DIED, RAISED = RankError("rank 1 died"), RankError("rank 1 failed while loading: ValueError: odd")
NOWHERE = PlacementError("no place for all ranks")
DISAGREE = GeometryError("ranks disagree")
BUG = ValueError("odd")


class ScriptedLife(Lifecycle):
    """Whose searches for places, and sets of ranks, end as told, one after another; `FINE` where nothing more is."""

    def __init__(self, pool: PoolConfig, places: list[Exception | None], ranks: list[Exception | None]):
        super().__init__(validate(pool), pool, {})
        self.states: list[State] = []
        self.said: list[str] = []
        self.before = self.pool_ranks.config
        self._places, self._ranks = places, ranks
        self.pool_ranks.acquire = self.pool_ranks.regain = self.pool_ranks.begin_anew = self.look
        self.pool_ranks.return_to = self.look_for_the_size_before

    def enter(self, state: State) -> None:
        super().enter(state)
        self.states.append(state)

    def note(self, line: str) -> None:
        super().note(line)
        self.said.append(line)

    async def look(self) -> AsyncIterator[str]:
        yield "looking"
        come_to(self._places)

    async def look_for_another_size(self) -> AsyncIterator[str]:
        async for line in self.look():
            yield line
        self.pool_ranks.config = msgspec.structs.replace(self.before)

    async def look_for_the_size_before(self, before: RankConfig) -> AsyncIterator[str]:
        self.pool_ranks.config = before
        async for line in self.look():
            yield line

    async def build(self) -> AsyncIterator[str]:
        self._begin_stage(DriverState.STARTING)
        come_to(self._ranks)
        self._begin_stage(DriverState.LOADING)
        self._begin_stage(DriverState.CAPTURING)
        self.enter(DriverState.READY)
        yield "ready"

    def names(self) -> list[str]:
        return [name_of(state).value for state in self.states]


def come_to(outcomes: list[Exception | None]) -> None:
    if outcomes and (outcome := outcomes.pop(0)) is not None:
        raise outcome


@pytest.fixture
def scripted(random_models, caplog) -> Callable[..., ScriptedLife]:
    caplog.set_level(logging.CRITICAL)

    def make(
        places: tuple[Exception | None, ...] = (), ranks: tuple[Exception | None, ...] = (), is_ready: bool = True
    ) -> ScriptedLife:
        recovery = RecoveryConfig(max_restarts=2, backoff_s=0)
        life = ScriptedLife(
            PoolConfig(model=random_models["qwen3_moe"], ranks=2, recovery=recovery), list(places), list(ranks)
        )
        if is_ready:
            for state in list(DriverState)[1 : list(DriverState).index(DriverState.READY) + 1]:
                if state is not DriverState.PREPARING:
                    life.enter(state)
            life.states.clear()
        return life

    return make


def first_start(life: ScriptedLife) -> ExpertPoolError | None:
    async def start() -> None:
        async for line in life.first_start():
            life.said.append(line)

    return raised_by(start)


def carried_out(life: ScriptedLife, rebuild: Rebuild) -> ExpertPoolError | None:
    """What it returns or raises."""

    async def carry_out() -> ExpertPoolError | None:
        return await life.carry_out(rebuild)

    return raised_by(carry_out)


def raised_by(work: Callable[[], object]) -> ExpertPoolError | None:
    try:
        return asyncio.run(work())
    except ExpertPoolError as error:
        return error


def resize(life: ScriptedLife) -> Rebuild:
    return Rebuild(
        Resizing(4, "more"), "moving the ranks", life.look_for_another_size, says="more", size_before=life.before
    )


def leave_node(life: ScriptedLife) -> Rebuild:
    return Rebuild(Resizing(2, "a node goes"), "moving the ranks", life.look)


def recovery(life: ScriptedLife) -> Rebuild:
    return Rebuild(Recovering(DIED), "the recovery", life.look)


def test_a_size_that_did_not_start_is_tried_again_where_others_have_the_places_of_the_size_before(scripted):
    life = scripted(places=(FINE, NOWHERE, FINE), ranks=(DIED, FINE))
    assert carried_out(life, resize(life)) is DIED
    assert life.names() == ["resizing", "resizing", "recovering", "ready"]
    assert life.pool_ranks.config is not life.before, "it has the other size now"
    assert any("restarting" in line for line in life.said)


def test_a_size_that_would_fail_again_is_not_tried_again(scripted):
    life = scripted(places=(FINE, NOWHERE), ranks=(DISAGREE,))
    assert carried_out(life, resize(life)) is DISAGREE
    assert life.names() == ["resizing", "resizing", "failed"]


def test_a_first_start_goes_through_its_stages(scripted):
    life = scripted(is_ready=False)
    assert first_start(life) is None
    assert life.names() == ["placing", "starting", "loading", "capturing", "ready"]
    assert life.said == ["placing 2 ranks", "looking", "ready"]


@pytest.mark.parametrize("failure", [RAISED, DISAGREE, BUG], ids=lambda failure: type(failure).__name__)
def test_a_first_start_whose_ranks_raise_is_over(failure, scripted):
    life = scripted(ranks=(failure,), is_ready=False)
    error = first_start(life)
    assert str(error) == ("start-up failed: odd" if failure is BUG else str(failure))
    assert life.states[-1] == Failed(error)
    assert life.failure is error
    assert life.restarts.total == 0


def test_a_first_start_that_loses_a_process_is_recovered_from(scripted):
    life = scripted(ranks=(DIED,), is_ready=False)
    life.rank_set.has_lost_a_process = True
    assert first_start(life) is None
    assert life.names() == ["placing", "starting", "recovering", "ready"]
    assert life.states[2] == Recovering(DIED)
    assert life.said[2] == "rank 1 died; restarting (1 of 2)"


def test_a_first_start_that_the_pools_end_disturbs_says_so(scripted):
    life = scripted(is_ready=False)

    async def end_meanwhile() -> AsyncIterator[str]:
        await life.stop()
        raise RankError("the ranks were ended")
        yield ""

    life.pool_ranks.acquire = end_meanwhile
    assert str(first_start(life)) == "the pool was shut down while it started"
    assert life.names() == ["placing", "stopping", "stopped"]


def test_a_first_start_that_nobody_waits_for_any_more_is_over(scripted):
    life = scripted(is_ready=False)

    async def leave_off() -> None:
        lines = life.first_start()
        await anext(lines)
        await lines.aclose()

    asyncio.run(leave_off())
    assert life.names() == ["placing", "failed"]


def test_a_recovery_begins_again_until_its_bound_and_says_what_happened_each_time(scripted):
    life = scripted(ranks=(DIED, DIED, DIED))
    error = carried_out(life, recovery(life))
    assert str(error).startswith("rank 1 died. The pool was restarted 2 times within ")
    assert life.names() == ["recovering", "recovering", "recovering", "failed"]


def test_a_recovery_without_places_says_what_it_followed(scripted):
    life = scripted(places=(NOWHERE,))
    asyncio.run(life.recover(DIED))
    assert type(life.failure) is PlacementError
    assert str(life.failure).startswith("no place for all ranks. The pool was restarted 1 times within ")


@pytest.mark.parametrize(
    ("rebuild", "said"),
    [
        (recovery, "the recovery failed: ValueError: odd; it followed: rank 1 died"),
        (leave_node, "moving the ranks failed: ValueError: odd"),
    ],
)
def test_a_bug_ends_the_pool_and_says_where_it_was(rebuild, said, scripted):
    for outcomes in ({"places": (BUG,)}, {"ranks": (BUG,)}):
        life = scripted(**outcomes)
        error = carried_out(life, rebuild(life))
        assert str(error) == said
        assert life.states[-1] == Failed(error)


@pytest.mark.parametrize(
    "failure", [DIED, DISAGREE, CheckpointError("odd"), BUG], ids=lambda failure: type(failure).__name__
)
def test_a_size_that_does_not_come_up_is_given_up_for_the_one_before(failure, scripted):
    life = scripted(ranks=(failure,))
    refusal = carried_out(life, resize(life))
    assert str(refusal) == ("moving the ranks failed: ValueError: odd" if failure is BUG else str(failure))
    assert life.states == [Resizing(4, "more"), Resizing(2, str(refusal)), DriverState.READY]
    back = f"the other size did not start, going back to 2 ranks: {refusal}"
    assert life.said == ["more", "looking", back, "looking", "ready"]
    assert (life.pool_ranks.config, life.restarts.total) == (life.before, 0)


def test_a_size_without_places_is_given_up_for_the_one_before(scripted):
    life = scripted(places=(NOWHERE,))
    assert carried_out(life, resize(life)) is NOWHERE
    assert life.names() == ["resizing", "resizing", "ready"]
    assert life.said == ["more", "looking", "looking", "ready"]


def test_a_bug_in_the_search_for_another_size_ends_the_pool(scripted):
    life = scripted(places=(BUG,))
    assert str(carried_out(life, resize(life))) == "moving the ranks failed: ValueError: odd"
    assert life.names() == ["resizing", "failed"]


def test_ranks_that_fail_at_the_size_before_are_recovered_from(scripted):
    life = scripted(ranks=(RAISED, DIED))
    assert carried_out(life, resize(life)) is RAISED
    assert life.names() == ["resizing", "resizing", "recovering", "ready"]
    assert (life.restarts.total, life.restarts.last.cause) == (1, str(DIED))


def test_the_size_before_has_no_places_either_and_the_pool_is_over(scripted):
    life = scripted(places=(FINE, NOWHERE, NOWHERE), ranks=(RAISED,))
    error = carried_out(life, resize(life))
    assert type(error) is PlacementError
    assert str(error).startswith(f"{NOWHERE}. The pool was restarted 1 times")
    assert life.names() == ["resizing", "resizing", "recovering", "failed"]


def test_ranks_that_fail_off_their_node_are_recovered_from_and_other_errors_are_not(scripted):
    life = scripted(ranks=(DIED,))
    assert carried_out(life, leave_node(life)) is DIED
    assert life.names() == ["resizing", "recovering", "ready"]
    for outcomes in ({"places": (NOWHERE,)}, {"ranks": (DISAGREE,)}):
        life = scripted(**outcomes)
        assert carried_out(life, leave_node(life)) in (NOWHERE, DISAGREE)
        assert life.names() == ["resizing", "failed"]


def test_what_has_ended_takes_no_other_state(scripted):
    life = scripted()
    asyncio.run(life.fail(DIED))
    with pytest.raises(RankError, match=r"^rank 1 died$"):
        life.enter(DriverState.READY)
    asyncio.run(life.fail(RAISED))
    assert (life.state, life.failure) == (DriverState.FAILED, DIED)
