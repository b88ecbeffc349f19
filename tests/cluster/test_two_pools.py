"""Two driver programs and two pools at once on one cluster, and two driver programs on one pool: each gets its own."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray
from expert_pool.cluster import ExpertPool, PoolConfig
from ray.util.placement_group import placement_group_table

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
NEW_TOKENS = 40
COMMON = f"""
import json, sys
import ray
from expert_pool.cluster import ExpertPool, PoolConfig, SamplingParams
address, what, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
ray.init(address=address, log_to_driver=False, logging_level="ERROR")

def answer(pool):
    pids = [place.pid for place in pool.status().places]
    print("ready", flush=True)
    sys.stdin.readline()
    answers = [None] * len(prompts)
    for completion in pool.generate(prompts, SamplingParams(max_new_tokens={NEW_TOKENS})):
        assert answers[completion.index] is None
        answers[completion.index] = completion.token_ids
    print(json.dumps([pids, answers]), flush=True)
"""
OWN_POOL = "with ExpertPool.launch(PoolConfig(model=what, ranks=2)) as pool:\n    answer(pool)\n"
NAMED_POOL = "answer(ExpertPool.connect(what))\n"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


class DriverProgram:
    """A process that is ready to ask a pool, and does when it is told to."""

    def __init__(self, program: str, address: str, what: str, prompts: list[list[int]]):
        self.prompts = prompts
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMON + program, address, what, json.dumps(prompts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def result(self) -> tuple[set[int], list[tuple[int, ...]]]:
        """Processes of its pool's ranks, and its answers."""
        said = self._process.communicate(timeout=200)[0]
        assert self._process.returncode == 0, said
        pids, answers = json.loads(said.splitlines()[-1])
        return set(pids), [tuple(answer) for answer in answers]


def run_at_once(programs: list[DriverProgram]) -> list[tuple[set[int], list[tuple[int, ...]]]]:
    for program in programs:
        program.wait_until_ready()
    for program in programs:
        program.go()
    return [program.result() for program in programs]


def test_two_driver_programs_with_a_pool_each_get_the_answers_of_their_own_models(address, random_models, references):
    families = ("qwen3_moe", "mixtral")
    programs = [
        DriverProgram(OWN_POOL, address, random_models[family], [[5, 17, index] for index in range(3, 9)])
        for family in families
    ]
    results = run_at_once(programs)
    for family, program, (_, answers) in zip(families, programs, results, strict=True):
        assert answers == [references[family].greedy(prompt, NEW_TOKENS) for prompt in program.prompts]
    (first, _), (second, _) = results
    assert (len(first), len(second), first & second) == (2, 2, set())
    assert [one for one in placement_group_table().values() if one["state"] != "REMOVED"] == []


def test_two_driver_programs_on_one_pool_get_their_own_answers(address, random_models, references):
    pool = ExpertPool.launch(PoolConfig(model=random_models["qwen3_moe"], ranks=2), name="both", detached=True)
    try:
        programs = [
            DriverProgram(NAMED_POOL, address, "both", [[first, 17, index] for index in range(3, 9)])
            for first in (5, 42)
        ]
        results = run_at_once(programs)
    finally:
        pool.shutdown()
    for program, (pids, answers) in zip(programs, results, strict=True):
        assert answers == [references["qwen3_moe"].greedy(prompt, NEW_TOKENS) for prompt in program.prompts]
        assert pids == results[0][0]
