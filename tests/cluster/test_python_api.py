"""`ExpertPool` in wrong hands: arguments of other types, other processes, a session that has ended."""

import multiprocessing
import pickle
from collections.abc import Iterator

import numpy
import pytest
import ray
from expert_pool.cluster import (
    ConfigError,
    ExpertPool,
    Limits,
    PoolCompletion,
    PoolConfig,
    RankError,
    SamplingParams,
)
from expert_pool.cluster.arguments import number_of_ranks
from expert_pool.cluster.driver.handle import get_answer
from expert_pool.workers.request import Completion, Generated
from handle import driver_of

ONE = SamplingParams(max_new_tokens=1)
LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)
ONE_IS_SHORT = [ONE, LONG, LONG]  # so that it comes alone


@pytest.fixture(scope="module")
def pool(random_models: dict[str, str]) -> Iterator[ExpertPool]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    limits = Limits(disable_cuda_graph=True)
    with ExpertPool.launch(PoolConfig(model=random_models["qwen3_moe"], ranks=2, limits=limits), name="held") as pool:
        yield pool
    ray.shutdown()


@pytest.mark.parametrize("ranks", [True, False, 2.0, 1.5, "4", None, [2], b"1"])
def test_a_size_that_is_no_integer_is_refused_and_changes_nothing(ranks, pool):
    before = pool.status()
    for resize in (pool.resize, lambda size: get_answer(driver_of(pool).resize.remote(size))):
        with pytest.raises(ConfigError, match=r"^ranks=.*: set ranks to an integer$"):
            resize(ranks)
    after = pool.status()
    assert (after.state, after.places) == ("ready", before.places)


def test_a_size_may_be_an_integer_of_numpy(pool):
    pool.resize(numpy.int64(2))
    assert type(number_of_ranks(numpy.int64(2))) is int


@pytest.mark.parametrize("prompts", [None, 5, True, 1.5, {"prompt": [5]}, "text", b"text", object()])
def test_prompts_that_are_no_list_are_refused(prompts, pool):
    with pytest.raises(ConfigError, match=r"^prompts(=| is one text ).*list of prompts$"):
        pool.generate(prompts)


@pytest.mark.parametrize("prompt", [None, 5, b"text", [1.5], [True], ["a"], [[1]], [2**63], object()])
def test_a_prompt_that_is_none_is_refused(prompt, pool):
    with pytest.raises(ConfigError, match=r"a prompt is a text, |does not fit into 64 bits"):
        pool.generate([[5], prompt])


@pytest.mark.parametrize("sampling", [5, False, 0, "", "greedy", [5], [None], {"max_new_tokens": 3}, [ONE, ONE]])
def test_sampling_settings_of_another_type_or_number_are_refused(sampling, pool):
    with pytest.raises(ConfigError, match=r"sampling settings (are SamplingParams, not|for 1 prompts)"):
        pool.generate([[5]], sampling)


@pytest.mark.parametrize("on_stats", [5, "print", False])
def test_what_counters_are_given_to_can_be_called(on_stats, pool):
    with pytest.raises(ConfigError, match=r"^on_stats=.*: set on_stats to a function of one argument"):
        pool.generate([[5]], ONE, on_stats)


@pytest.mark.parametrize(
    "wrong", [{"name": 5}, {"report": 5}, {"detached": "yes"}, {"rank_config": 5}, {"name": ""}, {"detached": True}]
)
def test_launch_refuses_arguments_of_other_types(wrong, pool):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ExpertPool.launch(PoolConfig(model="folder"), **wrong)


@pytest.mark.parametrize("config", [None, 5, "folder", [], object()])
def test_launch_refuses_what_is_no_configuration(config):
    with pytest.raises(ConfigError, match=r"^config=.*: set config to a PoolConfig$"):
        ExpertPool.launch(config)


@pytest.mark.parametrize(
    "wrong", [{"name": 5}, {"name": None}, {"name": ""}, {"name": "a", "address": 5}, {"name": "a", "report": "print"}]
)
def test_connect_refuses_arguments_of_other_types(wrong, pool):
    with pytest.raises(ConfigError, match=rf"^{list(wrong)[-1]}=.*: set {list(wrong)[-1]} to "):
        ExpertPool.connect(**wrong)


@pytest.mark.parametrize("send", [pickle.dumps, ray.put, ray.cloudpickle.dumps])
def test_a_pool_is_not_sent_and_says_how_to_have_it_elsewhere(send, pool):
    with pytest.raises(ConfigError, match=r"cannot be pickled .* ExpertPool\.connect\('held'\)"):
        send(pool)


def test_a_forked_child_is_told_to_connect_and_the_pool_goes_on(pool):
    stream = pool.generate([[5, 17]] * 3, ONE_IS_SHORT)
    next(stream)
    ways = {
        "status": pool.status,
        "trace": pool.trace,
        "resize": lambda: pool.resize(1),
        "generate": lambda: pool.generate([[5]]),
        "a stream": lambda: list(stream),
        "shutdown": pool.shutdown,
        "leaving the block": lambda: pool.__exit__(None, None, None),
    }
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        for name, way in ways.items():
            try:
                sender.send((name, repr(way())))
            except Exception as error:
                sender.send((name, f"{type(error).__name__}: {error}"))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    said = dict(receiver.recv() for _ in ways if receiver.poll(30))
    process.join(30)
    assert process.exitcode == 0
    assert said.pop("leaving the block") == "None"
    assert said.keys() == ways.keys() - {"leaving the block"}
    for answer in said.values():
        assert answer.startswith("ConfigError: this pool is held by process ")
        assert "take it with ExpertPool.connect(" in answer
    assert [one.num_completion_tokens for one in stream] == [400, 400]


def test_what_is_asked_after_the_session_ended_says_so(pool, capfd):
    """The last of this module: it ends the session of the others."""
    streams = [pool.generate([[5, 17]] * 3, ONE_IS_SHORT)]
    next(streams[0])
    pool.rank_config  # noqa: B018 (known before the session ends)
    ray.shutdown()
    for ask in (lambda: list(streams[0]), pool.status, lambda: pool.resize(1), lambda: pool.generate([[5]])):
        with pytest.raises(RankError, match=r"the Ray session in which this pool was .* has ended"):
            ask()
    streams.clear()
    assert not ray.is_initialized(), "no other session was started in silence"
    assert "No owner found" not in "".join(capfd.readouterr())


def test_a_completion_is_shown_pickled_and_compared_by_what_its_caller_sees():
    first, again, other = (
        PoolCompletion(3, (1, 2), Completion(key, Generated((7, token)), "a", "length", 2))
        for key, token in ((0, 8), (1, 8), (0, 9))
    )
    shown = "PoolCompletion(index=3, prompt_token_ids=(1, 2), token_ids=(7, 8), text='a', finish_reason='length', "
    assert repr(first) == shown + "error=None)"
    assert pickle.loads(pickle.dumps(first)) == first == again != other
    assert len({first, again, other}) == 2
    assert (first.num_prompt_tokens, first.num_completion_tokens) == (2, 2)
    with pytest.raises(AttributeError):
        first.index = 4
