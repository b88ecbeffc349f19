"""The raylet of a pool's only node dies: the run ends, and no process of the pool keeps what it held."""

import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
from waiting import holds_in_time

pytestmark = pytest.mark.long

COMMAND = "from expert_pool.cluster.cli.commands import main; main()"


def named(family: Callable[[], list[psutil.Process]], *starts: str) -> list[psutil.Process]:
    """Processes whose command line begins so, or whose program does."""
    found = []
    for process in family():
        try:
            first = (process.cmdline() or [""])[0]
        except psutil.Error:
            continue
        if first.startswith(starts) or first.rpartition("/")[2] in starts:
            found.append(process)
    return found


def test_a_run_whose_only_node_dies_ends_with_an_error_and_leaves_no_process(random_models, prompts_file, tmp_path):
    prompts = prompts_file(
        *({"prompt_token_ids": [5, n], "ignore_eos": True} for n in range(2, 120) for _ in range(20))
    )
    output = tmp_path / "out.jsonl"
    arguments = ["--model", random_models["qwen3_moe"], "--ranks", "2", "--address", "local", "--max-new-tokens", "450"]
    arguments += ["--max-running-requests", "8"]  # the first answers come soon, on busy cores too
    with open(tmp_path / "said", "w+") as said:
        run = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "generate", *arguments, "--prompts", prompts, "--output", str(output)],
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            family = lambda: psutil.Process(run.pid).children(recursive=True)  # noqa: E731
            assert holds_in_time(lambda: output.exists() and output.stat().st_size > 0, within_s=120), said.read()
            ours = named(family, "ray::Driver", "ray::Rank")
            [raylet] = named(family, "raylet")
            assert len(ours) == 3
            raylet.kill()
            assert holds_in_time(lambda: not any(process.is_running() for process in ours), within_s=15)
            started = time.monotonic()
            # Ray ends a process that talks to a raylet which is gone, or the pool says that no node is left.
            assert run.wait(timeout=150) == 1
            assert time.monotonic() - started < 120
            assert output.stat().st_size > 0, "what had finished stays"
        finally:
            for process in [*family(), psutil.Process(run.pid)] if run.poll() is None else []:
                process.kill()
            run.wait()
