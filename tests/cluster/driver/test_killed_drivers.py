"""The driver actor of a named pool, or a caller, is killed: what was answered stays, and the rest is answered later.

A part of `make test-kill-matrix`.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from expert_pool.cluster import ExpertPool, ExpertPoolError, SamplingParams
from handle import in_driver
from kill_report import Row, case
from kill_scene import NOTHING, Left, beyond, config_of, load_of, rank_processes, ray_session

NAME = "killed"
RANKS = 4
PATIENCE_S = 150.0
SEEDS = range(5)

pytestmark = [
    pytest.mark.skipif(os.environ.get("EXPERT_POOL_FULL_MATRIX") != "1", reason="a part of make test-kill-matrix"),
    pytest.mark.timeout(400),
]


class Job:
    """A file of requests for the command line, and what becomes of it."""

    def __init__(self, folder: Path, model: str, address: str):
        self.prompts, self.sampling = load_of(random.Random(7), 12)
        self._folder, self._address = folder, address
        (folder / "pool.json").write_text(json.dumps(settings(model)))
        lines = [
            {"prompt_token_ids": prompt, **sampling_line(sampling)}
            for prompt, sampling in zip(self.prompts, self.sampling, strict=True)
        ]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.own_pool = ("--config", str(folder / "pool.json"))
        self.named_pool = ("--pool", NAME)

    def start(self, output: Path, *pool: str) -> subprocess.Popen:
        files = ("--prompts", str(self._folder / "prompts.jsonl"), "--output", str(output))
        return subprocess.Popen(
            [sys.executable, "-m", "expert_pool.cluster", "generate", *pool, *files],
            env={**os.environ, "RAY_ADDRESS": self._address},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


def settings(model: str) -> dict[str, Any]:
    """What `config_of` says, as the command line reads it."""
    config = config_of(model, RANKS)
    return {
        "model": model,
        "ranks": RANKS,
        "limits": {
            "chunked_prefill_size": config.limits.chunked_prefill_size,
            "max_running_requests": config.limits.max_running_requests,
            "cuda_graph_bs": list(config.limits.cuda_graph_bs or ()),
        },
        "cache": {"num_tokens": config.cache.num_tokens},
        "worker": {"step_timeout_s": config.worker.step_timeout_s},
    }


def sampling_line(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
    }


def answers_in(output: Path) -> dict[str, list[int]]:
    """Tokens by id of the whole lines of a file; no id is in it twice."""
    text = output.read_text() if output.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    answers = {line["id"]: line["token_ids"] for line in lines}
    assert len(answers) == len(lines)
    return answers


def until(holds: Callable[[], Any], process: subprocess.Popen | None = None) -> float:
    """The time when it holds; fails when it does not in time, or when the process ended before."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        if process is not None and process.poll() is not None and not holds():
            raise AssertionError(f"ended with {process.returncode}: {process.stderr.read()}")
        time.sleep(0.02)
    return time.time()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_session(sys.modules[__name__]):
        left = Left()
        yield ray.get_runtime_context().gcs_address
        assert left.is_nothing()


@pytest.fixture(scope="module")
def job(address: str, random_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"), random_models["qwen3_moe"], address)


@pytest.fixture(scope="module")
def expected(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Of a run that nothing disturbs."""
    output = tmp_path_factory.mktemp("undisturbed") / "out.jsonl"
    run = job.start(output, *job.own_pool)
    said = run.communicate(timeout=PATIENCE_S)[1]
    assert run.returncode == 0, said
    answers = answers_in(output)
    assert len(answers) == len(job.prompts)
    return answers


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_caller_leaves_what_was_written_and_a_second_run_completes_the_file(
    seed, job, expected, address, tmp_path
):
    """The pool is the caller's own, and ends with it."""
    with case("SIGKILL of the caller", seed) as row:
        number, output, left = random.Random(f"caller {seed}").randint(1, 7), tmp_path / "out.jsonl", Left()
        row.step = f"after line {number} of 12"
        caller = job.start(output, *job.own_pool)
        until(lambda: len(answers_in(output)) >= number, caller)
        there = left.processes() & set(rank_processes())
        assert (len(there), len(left.groups())) == (RANKS, 1)

        caller.kill()
        happened = time.time()
        kept = output.read_bytes()
        row.detected_s = until(lambda: not all(map(psutil.Process.is_running, there))) - happened
        until(lambda: not left.processes() and not left.groups())

        second = job.start(output, *job.own_pool)
        before = len(answers_in(output))
        row.recovered_s = until(lambda: len(answers_in(output)) > before, second) - happened
        said = second.communicate(timeout=PATIENCE_S)[1]
        assert second.returncode == 0, said
        assert output.read_bytes().startswith(kept)
        row.tokens_equal = answers_in(output) == expected
        assert row.tokens_equal
        until(lambda: not left.processes() and not left.groups())
        row.left_over = NOTHING


@pytest.fixture(scope="module")
def named_pool(address: str, random_models: dict[str, str]) -> Iterator[None]:
    ExpertPool.launch(config_of(random_models["qwen3_moe"], RANKS), name=NAME, detached=True)
    yield
    ExpertPool.connect(NAME).shutdown()


def kill_the_driver() -> float:
    """Ends the process of the pool's driver actor; returns when."""
    pid = in_driver(ExpertPool.connect(NAME), lambda driver: os.getpid())
    happened = time.time()
    os.kill(pid, signal.SIGKILL)
    return happened


@pytest.mark.parametrize("seed", SEEDS)
def test_a_named_pool_survives_its_driver_and_answers_what_is_asked_again(
    seed, job, expected, named_pool, address, tmp_path
):
    with case("SIGKILL of the driver actor", seed) as row:
        number = random.Random(f"driver {seed}").randint(1, 7)
        before = {place.pid for place in ExpertPool.connect(NAME).status().places}
        ask = with_the_command if seed % 2 else from_python
        answers = ask(number, job, row, tmp_path / "out.jsonl")
        row.tokens_equal = answers == expected
        assert row.tokens_equal
        pool = ExpertPool.connect(NAME)
        until(lambda: pool.status().state == "ready")
        assert not [pid for pid in before if psutil.pid_exists(pid)]
        row.left_over = beyond(pool)
        assert row.left_over == NOTHING


def from_python(number: int, job: Job, row: Row, output: Path) -> dict[str, list[int]]:
    """A caller that asks again for what it lacks, whenever it gets an error."""
    row.step = f"after answer {number} of 12, from Python"
    answers: dict[str, list[int]] = {}
    happened, deadline = 0.0, time.monotonic() + PATIENCE_S
    while len(answers) < len(job.prompts):
        assert time.monotonic() < deadline
        left = [index for index in range(len(job.prompts)) if str(index + 1) not in answers]
        try:
            completions = ExpertPool.connect(NAME).generate(
                [job.prompts[index] for index in left], [job.sampling[index] for index in left]
            )
            for completion in completions:
                key = str(left[completion.index] + 1)
                assert key not in answers
                answers[key] = list(completion.token_ids)
                if happened and row.recovered_s is None:
                    row.recovered_s = time.time() - happened
                if len(answers) == number and not happened:
                    happened = kill_the_driver()
        except ExpertPoolError:
            assert happened, "nothing had happened"
            row.detected_s = row.detected_s or time.time() - happened
            time.sleep(0.1)
    return answers


def with_the_command(number: int, job: Job, row: Row, output: Path) -> dict[str, list[int]]:
    """One run of `generate --pool`, which asks again by itself."""
    row.step = f"after line {number} of 12, `generate --pool`"
    run = job.start(output, *job.named_pool)
    said: list[tuple[float, str]] = []
    reader = threading.Thread(target=lambda: said.extend((time.time(), line) for line in run.stderr), daemon=True)
    reader.start()
    until(lambda: len(answers_in(output)) >= number)
    happened, before = kill_the_driver(), len(answers_in(output))
    row.recovered_s = until(lambda: len(answers_in(output)) > before) - happened
    assert run.wait(timeout=PATIENCE_S) == 0, said
    reader.join()
    row.detected_s = next((when - happened for when, line in said if when > happened and "driver" in line), None)
    return answers_in(output)
