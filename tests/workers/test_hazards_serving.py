"""Hazards of serving: ranks with nothing to do, uneven work, and places in a cluster."""

import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import ray
from expert_pool.cluster import ExpertPool, Limits, PlacementConfig, PoolConfig, RankStats, SamplingParams
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.mailbox import Intake
from plain_ranks import PlainRanks, run_on_ranks
from ray.cluster_utils import Cluster

RANKS = 4
IDLE_S = 1.0
# A busy loop would take 1 s; what a sleeping process takes to be asked for its times is far below.
IDLE_CPU_S = 0.1
LEAVE_S = 10.0


@pytest.fixture(scope="module")
def rank_set(random_models) -> Iterator[PlainRanks]:
    """Four ranks, each with a batch of its own."""
    with PlainRanks(PoolConfig(model=random_models["qwen3_moe"], ranks=RANKS)) as ranks:
        yield ranks


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)


def settled_stats(rank_set: PlainRanks) -> dict[int, RankStats]:
    """Counters of all ranks once they stand still: as many steps on each."""
    while len(rank_set.stats) < RANKS or len({stats.steps for stats in rank_set.stats.values()}) > 1:
        _, stats = rank_set.next_report()
        rank_set.stats[stats.dp_rank] = stats
    return dict(rank_set.stats)


def cpu_seconds(rank_set: PlainRanks) -> list[float]:
    times = [psutil.Process(process.pid).cpu_times() for process in rank_set.processes]
    return [one.user + one.system for one in times]


def test_h4_idle_ranks_run_every_step_of_the_one_that_is_busy(rank_set, references):
    prompt = [5, 17, 42, 99]
    before = settled_stats(rank_set) if rank_set.stats else {rank: RankStats(rank) for rank in range(RANKS)}
    [completion] = rank_set.generate([prompt], greedy(200))
    after = settled_stats(rank_set)

    assert len(completion.token_ids) == 200
    expected = references["qwen3_moe"].greedy(prompt, 30)
    assert completion.token_ids[: len(expected)] == expected
    assert after[0].decode_steps - before[0].decode_steps == 199
    for rank in (1, 2, 3):
        assert after[rank].idle_steps - before[rank].idle_steps == 200
        assert after[rank].generated_tokens == before[rank].generated_tokens


def test_h8_idle_ranks_take_no_cpu_and_wake_together_again_and_again(rank_set, references):
    expected = references["qwen3_moe"].greedy([7, 8, 9], 10)
    for num_prompts in (1, RANKS, 2):
        completions = rank_set.generate([[7, 8, 9]] * num_prompts, SamplingParams(max_new_tokens=10))
        assert [completion.token_ids for completion in completions] == [expected] * num_prompts
        settled_stats(rank_set)

        before = cpu_seconds(rank_set)
        time.sleep(IDLE_S)
        spent = [end - start for start, end in zip(before, cpu_seconds(rank_set), strict=True)]

        assert max(spent) < IDLE_CPU_S, f"CPU seconds of each rank in {IDLE_S} idle seconds: {spent}"


def test_h8_ranks_that_went_idle_stop_when_told_to(random_models):
    with PlainRanks(PoolConfig(model=random_models["qwen3_moe"], ranks=2)) as ranks:
        ranks.generate([[3, 4]], greedy(2))
    assert [process.exitcode for process in ranks.processes] == [0, 0], "a rank that does not stop is killed"


def told_around_the_beginning(engine: RankEngine) -> tuple[bool, bool]:
    """Whether a loop goes on after the order that ended the one before, and ends by one that came before it began."""
    engine.inbox.deliver(Intake(), 1, leave=True)
    loop = threading.Thread(target=engine.run, args=(1,), daemon=True)
    loop.start()
    loop.join(IDLE_S)
    goes_on = loop.is_alive()
    engine.inbox.deliver(Intake(), 2, leave=True)
    loop.join()
    engine.inbox.deliver(Intake(), 3, leave=True)
    loop = threading.Thread(target=engine.run, args=(2,), daemon=True)
    loop.start()
    loop.join(LEAVE_S)
    return goes_on, not loop.is_alive()


def test_an_order_to_leave_is_kept_though_it_overtakes_the_call_that_begins_the_loop(random_models):
    """They come on threads of their own; a pool that is shut down or resized at once would wait for its ranks."""
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=2)
    assert run_on_ranks(config, told_around_the_beginning, graphs=False) == [(True, True)] * 2


@pytest.mark.parametrize("lengths", [(1, 3, 17, 40, 64, 150, 300), (40,)], ids=["7_prompts", "1_prompt"])
def test_h17_any_number_of_prompts_finishes_on_four_ranks(lengths, rank_set, references):
    prompts = [[(7 * length + 3 * position) % 126 + 2 for position in range(length)] for length in lengths]
    completions = rank_set.generate(prompts, SamplingParams(max_new_tokens=16))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == references["qwen3_moe"].greedy(prompt, 16), len(prompt)


@pytest.fixture(scope="module")
def headless_cluster() -> Iterator[str]:
    """A cluster whose head has no place for a rank, and a worker node with places for three; the head's node id."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, "include_dashboard": False})
    worker = cluster.add_node(num_cpus=3, num_gpus=3)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield ray.get_runtime_context().get_node_id()
    ray.shutdown()
    cluster.remove_node(worker)
    cluster.shutdown()


@pytest.fixture(scope="module")
def two_pools(headless_cluster, random_models) -> Iterator[tuple[ExpertPool, ExpertPool]]:
    """Of two ranks and of one, side by side; each rank asks for a logical GPU, and computes on CPU."""
    configs = [
        PoolConfig(
            model=random_models["qwen3_moe"],
            ranks=ranks,
            limits=Limits(max_running_requests=4, chunked_prefill_size=16),
            placement=PlacementConfig(gpus_per_rank=1, timeout_s=60),
        )
        for ranks in (2, 1)
    ]
    with ExpertPool.launch(configs[0]) as first, ExpertPool.launch(configs[1]) as second:
        yield first, second


def test_h18_a_pool_runs_on_a_cluster_whose_head_has_no_place_for_a_rank(headless_cluster, two_pools, references):
    pool = two_pools[0]
    [completion] = pool.generate([[5, 17, 42]], SamplingParams(max_new_tokens=8))
    assert completion.token_ids == references["qwen3_moe"].greedy([5, 17, 42], 8)
    assert headless_cluster not in {place.node_id for place in pool.status().places}


def test_h20_two_pools_side_by_side_hold_disjoint_gpus_and_generate(two_pools, references):
    gpu_ids = [place.gpu_ids for pool in two_pools for place in pool.status().places]
    assert [len(ids) for ids in gpu_ids] == [1, 1, 1]
    assert len({gpu_id for ids in gpu_ids for gpu_id in ids}) == 3

    prompts = [[5, 17, 42], [9, 9], [100]]
    streams = [pool.generate(prompts, SamplingParams(max_new_tokens=8)) for pool in two_pools]
    for stream in streams:
        tokens = {completion.index: completion.token_ids for completion in stream}
        assert [tokens[i] for i in range(3)] == [references["qwen3_moe"].greedy(prompt, 8) for prompt in prompts]
