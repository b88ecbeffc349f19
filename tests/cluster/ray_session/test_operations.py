"""The commands of docs/operations.md, run as they are written there, but for the model, ranks and paths."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from expert_pool.cluster import CacheConfig, ExpertPool, PoolConfig
from ray.util.state import list_actors
from ray_head import Head, ray_head

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
REPOSITORY = Path(__file__).resolve().parents[3]
BLOCKS = re.findall(r"^```\n(.*?)^```$", (REPOSITORY / "docs/operations.md").read_text("utf-8"), re.M | re.S)
SUBMIT, WHEEL = (
    next(block for block in BLOCKS if block.startswith(begin)) for begin in ("ray job submit", "pip wheel")
)
OF_THE_PACKAGE = ("cluster", "workers", "dispatch", "graphs", "pyproject.toml", "README.md", "LICENSE")
PROMPTS = [{"id": f"p{index}", "prompt": f"The statement {index}"} for index in range(6)]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A cluster on which the scripts of this environment are on the path, as on one where the package is installed."""
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with ray_head("--num-cpus=2", environment={**path, "RAY_JOB_STOP_WAIT_TIME_S": "30"}) as started:
        yield started


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return tmp_path


def run(command: str, head: Head, folder: Path, tiny_moe: str, **more: str) -> str:
    """What a command of the document says; it must succeed."""
    here = {"/shared/model": tiny_moe, "--ranks 8": "--ranks 2", "/shared/out.jsonl": str(folder / "out.jsonl"), **more}
    for written, meant in here.items():
        command = command.replace(written, meant)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        # Commands about jobs ask the job server, others the cluster itself.
        env={**os.environ, "PATH": path, "RAY_ADDRESS": head.job_server if "ray job" in command else head.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def answered(folder: Path) -> list[str]:
    return sorted(json.loads(line)["id"] for line in (folder / "out.jsonl").read_text().splitlines())


def test_a_job_is_submitted_where_the_package_is_installed(head, folder, tiny_moe):
    said = run(SUBMIT, head, folder, tiny_moe)
    assert "6 of 6 requests, " in said
    assert "succeeded" in said
    assert answered(folder) == [prompt["id"] for prompt in PROMPTS]


def test_a_job_brings_the_package_as_a_wheel_where_it_is_not(head, folder, tiny_moe):
    for name in OF_THE_PACKAGE:
        source = REPOSITORY / name
        shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy(source, folder)
    said = run(WHEEL, head, folder, tiny_moe)
    assert "6 of 6 requests, " in said
    assert answered(folder) == [prompt["id"] for prompt in PROMPTS]


def test_a_job_is_stopped(head, folder, tiny_moe):
    # A cache for one request at a time, so that it lasts.
    detached = SUBMIT.replace("ray job submit", "ray job submit --no-wait --submission-id long")
    run(detached, head, folder, tiny_moe, **{"--ranks 2": "--ranks 2 --max-running-requests 1 --ignore-eos"})
    deadline = time.monotonic() + 90
    while not (folder / "out.jsonl").exists() or not (folder / "out.jsonl").read_text():
        assert time.monotonic() < deadline, run("ray job logs long", head, folder, tiny_moe)
        time.sleep(0.1)
    assert "was stopped" in run("ray job stop long", head, folder, tiny_moe)
    assert "interrupted; finished requests are in the output file" in run("ray job logs long", head, folder, tiny_moe)


def test_a_ranks_log_is_shown(head, folder, tiny_moe):
    ray.init(address=head.address, log_to_driver=False, logging_level="ERROR")
    try:
        with ExpertPool.launch(PoolConfig(model=tiny_moe, ranks=1, cache=CacheConfig(num_tokens=4096))):
            [rank] = list_actors(
                address=head.job_server, filters=[("class_name", "=", "Rank"), ("state", "=", "ALIVE")]
            )
            said = run("ray logs actor --id ID --err", head, folder, tiny_moe, ID=rank.actor_id)
            assert "level=info" in said
            assert "rank=0" in said
            assert 'message="the loop begins"' in said
    finally:
        ray.shutdown()
