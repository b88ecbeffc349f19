"""`generate` as a job of Ray's job server: no terminal, exit codes, logs, and an end on demand.

Jobs run on the head, which has no place for a rank (H18): their pools are on another node.
"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.placement_group import placement_group_table
from ray_head import ray_head, ray_worker
from waiting import holds_in_time

WAIT_S = 90.0
eventually = partial(holds_in_time, within_s=WAIT_S)


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def client() -> Iterator[JobSubmissionClient]:
    """A cluster with a job server, whose only worker node holds two ranks and nothing else."""
    # Where other work shares the cores, three seconds are too few for an orderly end.
    with (
        ray_head("--num-cpus=0", environment={"RAY_JOB_STOP_WAIT_TIME_S": "30"}) as head,
        ray_worker(head, "--num-cpus=2"),
    ):
        ray.init(address=head.address, log_to_driver=False, logging_level="ERROR")
        assert eventually(lambda: ray.cluster_resources().get("CPU") == 2)
        yield JobSubmissionClient(head.job_server)
        ray.shutdown()


@pytest.fixture
def working_dir(tmp_path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    prompts = [{"id": f"p{index}", "prompt_token_ids": [5, 17, index]} for index in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def submit(client: JobSubmissionClient, working_dir: Path, *options: str) -> str:
    """As `ray job submit --working-dir . -- expert-pool generate ...` does."""
    command = [sys.executable, "-m", "expert_pool.cluster", "generate", "--ranks", "2", "--prompts", "prompts.jsonl"]
    return client.submit_job(entrypoint=" ".join([*command, *options]), runtime_env={"working_dir": str(working_dir)})


def ended(client: JobSubmissionClient, job: str) -> JobStatus:
    assert eventually(lambda: client.get_job_status(job).is_terminal()), client.get_job_logs(job)
    return client.get_job_status(job)


def places() -> list[str]:
    return [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def lines_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


@pytest.mark.timeout(300)
def test_a_job_that_is_stopped_gives_its_place_back_and_the_next_one_completes_the_file(
    client, working_dir, random_models, tmp_path
):
    output = tmp_path / "out.jsonl"
    options = ("--model", random_models["qwen3_moe"], "--output", str(output), "--max-new-tokens", "400")
    job = submit(client, working_dir, *options, "--ignore-eos", "--max-running-requests", "1")
    assert eventually(lambda: lines_of(output)), client.get_job_logs(job)
    ranks = [process.pid for process in psutil.Process().children(recursive=True) if "ray::Rank" in process.name()]
    assert places() == ["CREATED"]

    client.stop_job(job)

    assert ended(client, job) == JobStatus.STOPPED
    assert eventually(lambda: places() == [])
    assert eventually(lambda: ray.available_resources().get("CPU") == 2)
    before = lines_of(output)
    assert 0 < len(before) < 20
    said = client.get_job_logs(job)
    assert "\ninterrupted; finished requests are in the output file\n" in said
    assert "Traceback" not in said
    assert "\x1b" not in said, "no terminal, no escape sequences"

    job = submit(client, working_dir, *options, "--ignore-eos")
    assert ended(client, job) == JobStatus.SUCCEEDED, client.get_job_logs(job)
    assert client.get_job_info(job).driver_exit_code == 0
    said = client.get_job_logs(job).splitlines()
    done = lines_of(output)
    assert done[: len(before)] == before
    assert sorted(line["id"] for line in done) == sorted(f"p{index}" for index in range(20))
    stages = ["connected to the Ray cluster at", "placing 2 ranks", "starting ranks", "loading ", "ready: loaded in "]
    shown = [line for line in said if any(line.startswith(stage) for stage in stages)]
    assert [line[:8] for line in shown] == [stage[:8] for stage in stages]
    left = 20 - len(before)
    assert any(line.startswith(f"{left} of {left} requests, {400 * left} tokens in ") for line in said)
    assert not any(map(psutil.pid_exists, ranks))


def test_a_job_that_is_refused_or_fails_says_so_with_its_exit_code(client, working_dir, random_models, tmp_path):
    refused = submit(client, working_dir, "--model", "nowhere", "--output", str(tmp_path / "out.jsonl"))
    (working_dir / "prompts.jsonl").write_text(json.dumps({"prompt_token_ids": [5] * 100, "id": "bad"}) + "\n")
    options = ("--model", random_models["qwen3_moe"], "--output", "memory://bucket/out", "--kv-cache-tokens", "64")
    failing = submit(client, working_dir, *options)
    for job, exit_code, saying in (
        (refused, 2, "refused: model="),
        (failing, 1, "request 'bad' failed: the request may grow to "),
    ):
        assert ended(client, job) == JobStatus.FAILED
        assert client.get_job_info(job).driver_exit_code == exit_code, client.get_job_logs(job)
        assert saying in client.get_job_logs(job)
    assert eventually(lambda: places() == [])
