"""The driver's parts that need no cluster: configuration files, routing, states, and what is said of failures."""

import asyncio
import json
import time

import msgspec
import pytest
from expert_pool.cluster import (
    CacheConfig,
    CheckpointError,
    GeometryError,
    Limits,
    PlacementConfig,
    PoolConfig,
    RankError,
    SamplingParams,
    WorkerConfig,
    load_config,
)
from expert_pool.cluster.driver.handle import own_error
from expert_pool.cluster.driver.states import DriverState, may_follow
from expert_pool.cluster.ranks.capture import CaptureOutcome, DroppedEntry
from expert_pool.cluster.ranks.failure import LOST, answer_of, describe_failure
from expert_pool.cluster.ranks.rank_set import RankSet, _readable
from expert_pool.cluster.requests.router import Router
from expert_pool.cluster.requests.tokens import tokenize
from expert_pool.dispatch.errors import ConfigError, DriverRestartError
from expert_pool.graphs.plan import CaptureEntry, CapturePlan
from expert_pool.workers.rank_config import Rendezvous
from expert_pool.workers.request import Request
from handle import note_losses
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    ObjectFetchTimedOutError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayError,
    RayTaskError,
)

FULL = PoolConfig(
    model="folder",
    ranks=4,
    attn_tp_size=2,
    dtype="bfloat16",
    dispatch="alltoall",
    address="local",
    limits=Limits(chunked_prefill_size=100, max_running_requests=9),
    cache=CacheConfig(block_size=8, num_tokens=640, max_bytes=1000),
    worker=WorkerConfig(threads=3, step_timeout_s=10.0),
    placement=PlacementConfig(cpus_per_rank=0.5, gpus_per_rank=1.0, timeout_s=5.0, start_timeout_s=6.0),
)


@pytest.mark.parametrize(("name", "encode"), [("pool.yaml", msgspec.yaml.encode), ("pool.json", msgspec.json.encode)])
def test_a_configuration_survives_a_file(name, encode, tmp_path):
    (tmp_path / name).write_bytes(encode(FULL))
    assert load_config(str(tmp_path / name), {}) == FULL


def test_options_lie_over_the_file_and_leave_the_rest(tmp_path):
    (tmp_path / "pool.json").write_text(json.dumps({"model": "a", "ranks": 2, "limits": {"max_running_requests": 7}}))
    config = load_config(
        str(tmp_path / "pool.json"),
        {
            "model": "b",
            "ranks": None,
            "limits": {"chunked_prefill_size": 50, "max_running_requests": None},
            "cache": {"num_tokens": None},
        },
    )
    assert config == PoolConfig(model="b", ranks=2, limits=Limits(chunked_prefill_size=50, max_running_requests=7))


def test_options_alone_make_a_configuration():
    assert load_config(None, {"model": "a", "worker": {"threads": 2}}) == PoolConfig(
        model="a", worker=WorkerConfig(threads=2)
    )


def request(key: int, prompt_length: int = 10, new_tokens: int = 10) -> Request:
    return Request(key, (1,) * prompt_length, SamplingParams(max_new_tokens=new_tokens))


def keys(assigned: dict[int, list[Request]]) -> dict[int, list[int]]:
    return {dp_rank: [one.key for one in requests] for dp_rank, requests in assigned.items()}


def test_a_request_goes_to_the_rank_with_the_fewest_tokens():
    router = Router(dp_size=3, window=10)
    for key, length in enumerate([100, 1, 1, 1, 1]):
        router.add(request(key, length))
    assert keys(router.assign()) == {0: [0], 1: [1, 3], 2: [2, 4]}


def test_requests_beyond_the_window_wait_for_the_rank_that_is_done_first():
    router = Router(dp_size=2, window=2)
    for key in range(6):
        router.add(request(key))
    assert keys(router.assign()) == {0: [0, 2], 1: [1, 3]}
    assert router.assign() == {}
    assert router.forget({1, 3}) == {1: [1, 3]}
    assert keys(router.assign()) == {1: [4, 5]}


def test_forgotten_requests_are_not_assigned():
    router = Router(dp_size=1, window=1)
    for key in range(4):
        router.add(request(key))
    assert keys(router.assign()) == {0: [0]}
    assert router.forget({0, 2, 99}) == {0: [0]}
    assert keys(router.assign()) == {0: [1]}
    assert router.forget({1}) == {0: [1]}
    assert keys(router.assign()) == {0: [3]}


@given(lengths=st.lists(st.integers(1, 100), max_size=40), dp_size=st.integers(1, 5), window=st.integers(1, 4))
def test_every_request_reaches_one_rank_and_no_rank_holds_more_than_its_window(lengths, dp_size, window):
    router = Router(dp_size, window)
    for key, length in enumerate(lengths):
        router.add(request(key, length))
    held: dict[int, set[int]] = {dp_rank: set() for dp_rank in range(dp_size)}
    seen: list[int] = []
    while assigned := keys(router.assign()):
        for dp_rank, new in assigned.items():
            held[dp_rank] |= set(new)
            seen += new
            assert len(held[dp_rank]) <= window
        busiest = max(held, key=lambda dp_rank: len(held[dp_rank]))
        assert router.forget({min(held[busiest])}) == {busiest: [min(held[busiest])]}
        held[busiest].remove(min(held[busiest]))
    assert sorted(seen) == list(range(len(lengths)))


def test_start_up_goes_through_every_state_in_order():
    order = list(DriverState)[: list(DriverState).index(DriverState.READY) + 1]
    assert order[:2] == [DriverState.CREATED, DriverState.PLACING]
    for position, state in enumerate(order):
        ahead = [following for following in order[position + 1 :] if may_follow(state, following)]
        # Pools on CPUs have no kernels to prepare.
        may_skip = 1 if state is DriverState.STARTING else 0
        assert ahead == order[position + 1 : position + 2 + may_skip]
        assert not may_follow(state, DriverState.CREATED)


def test_anything_under_way_may_fail_or_stop_and_what_has_ended_stays_so():
    for state in list(DriverState)[: list(DriverState).index(DriverState.READY) + 1]:
        assert may_follow(state, DriverState.STOPPING)
        assert may_follow(state, DriverState.FAILED)
    assert [state for state in DriverState if may_follow(DriverState.STOPPING, state)] == [DriverState.STOPPED]
    for ended in (DriverState.STOPPED, DriverState.FAILED):
        assert not any(may_follow(ended, state) for state in DriverState)


def test_of_several_failures_the_likely_cause_is_named():
    lost_peer = RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:5")
    error = describe_failure({0: lost_peer, 1: ValueError("the matrix is odd"), 2: lost_peer}, "while running")
    assert isinstance(error, RankError)
    assert str(error) == "rank 1 failed while running: ValueError: the matrix is odd"


def test_an_error_that_all_ranks_raise_keeps_its_type_and_names_them():
    failures = {rank: GeometryError("ranks disagree") for rank in range(3)}
    error = describe_failure(failures, "while running")
    assert type(error) is GeometryError
    assert str(error) == "ranks disagree (raised on ranks [0, 1, 2])"
    assert type(describe_failure({1: CheckpointError("bad")}, "during load")) is CheckpointError


def test_ranks_that_stop_unasked_are_a_failure():
    assert "all ranks stopped while running without being told to" in str(describe_failure({}, "while running"))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("join", Rendezvous("192.0.2.2", 5, b"secret"), "cdcc8f632c13ff23"), "join"),
        (("load",), "load"),
        (("capture", "warm_up", CaptureEntry("decode", 2)), "warm_up decode[2 x 1]"),
        (("capture", "commit", CapturePlan((CaptureEntry("decode", 2),))), "commit"),
        (("capture", "fail", "rank 1 cannot record decode[2 x 1]"), "fail"),
    ],
)
def test_a_call_on_all_ranks_is_named_by_its_method_and_of_capture_by_its_entry(call, said):
    method, *args = call
    assert _readable(method, tuple(args)) == said


MEMORY = "Task was killed due to the node running low on memory."
LOSSES = [ActorDiedError(), OutOfMemoryError(MEMORY), NodeDiedError("the node is gone")]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_however_ray_names_the_end_of_a_process_the_rank_died_and_may_be_started_again(loss):
    assert isinstance(loss, LOST)
    lost_peer = RuntimeError("Connection closed by peer")
    said = str(describe_failure({0: lost_peer, 1: loss}, "during load"))
    assert said == f"rank 1 died during load: {loss}"
    rank_set = RankSet(None, {}, 1.0, {})
    note_losses(rank_set, {0: lost_peer, 1: loss})
    assert rank_set.has_lost_a_process
    assert isinstance(own_error(loss), RankError)
    assert not isinstance(own_error(loss), DriverRestartError)
    assert str(own_error(loss)) == f"the pool's driver actor died for good: {loss}"


def test_a_rank_that_raises_while_it_is_made_is_no_loss():
    rank_set = RankSet(None, {}, 1.0, {})
    note_losses(rank_set, {0: ActorDiedError(RayTaskError("Rank.__init__", "traceback", ValueError("odd")))})
    assert not rank_set.has_lost_a_process


LOST_ANSWERS = [kind("ab" * 14, None, "") for kind in (ObjectLostError, OwnerDiedError, ObjectFetchTimedOutError)]


@pytest.mark.parametrize(
    "lost", [ActorUnavailableError("gone", None), *LOST_ANSWERS], ids=lambda lost: type(lost).__name__
)
def test_what_is_lost_with_the_driver_or_its_node_may_be_asked_for_again(lost):
    assert isinstance(own_error(lost), DriverRestartError)


def test_an_error_of_our_own_comes_as_itself_and_rays_others_as_rays():
    cause = GeometryError("ranks disagree")
    assert own_error(RayTaskError("start", "traceback", cause)) is cause
    assert own_error(RayTaskError("start", "traceback", ValueError("a bug"))) is None
    assert own_error(RayError("something else")) is None


async def never() -> None:
    await asyncio.Event().wait()


async def raising(error: BaseException) -> None:
    raise error


def test_a_rank_that_does_not_answer_is_named_in_time():
    started = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 3 did not answer within 0.05 s while handing out its trace$"):
        asyncio.run(answer_of(3, never(), "while handing out its trace", 0.05))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_a_rank_that_is_lost_instead_of_answering_is_named(loss):
    with pytest.raises(RankError, match=r"^rank 2 died while handing out its trace: "):
        asyncio.run(answer_of(2, raising(loss), "while handing out its trace", 30.0))
    failed = RayTaskError("trace", "traceback", ValueError("odd"))
    with pytest.raises(RankError, match=r"^rank 2 failed while handing out its trace: ValueError: odd$"):
        asyncio.run(answer_of(2, raising(failed), "while handing out its trace", 30.0))


def test_token_ids_may_come_from_arrays_and_tensors():
    import numpy
    import torch

    prompts = [[1, 2], (3,), numpy.array([4, 5]), torch.tensor([6]), range(2)]
    token_ids = tokenize(prompts, None)
    assert token_ids == [(1, 2), (3,), (4, 5), (6,), (0, 1)]
    assert {type(token_id) for prompt in token_ids for token_id in prompt} == {int}


@pytest.mark.parametrize("prompt", [[1.5], ["a"], [[1]], 5, None, [2**63]])
def test_a_prompt_that_is_neither_text_nor_integers_is_refused(prompt):
    with pytest.raises(ConfigError, match=r"a prompt is a text, |does not fit into 64 bits"):
        tokenize([prompt], None)


def test_what_no_rank_records_is_said_once_a_reason():
    reason = "records no piecewise graphs on GPUs"
    dropped = [DroppedEntry(CaptureEntry("piecewise", bucket), 0, reason) for bucket in (64, 32, 16)]
    dropped.append(DroppedEntry(CaptureEntry("decode", 8), 1, "has 4 KV blocks"))
    assert CaptureOutcome(CapturePlan(()), tuple(dropped)).what_was_dropped() == [
        f"piecewise[64 x 1] to piecewise[16 x 1], 3 graphs, dropped on all ranks: rank 0 {reason}",
        "decode[8 x 1] dropped on all ranks: rank 1 has 4 KV blocks",
    ]
