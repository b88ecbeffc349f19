"""The command line, from a file of prompts to a file of completions, also when it is interrupted on the way."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from click.testing import CliRunner
from expert_pool.cluster.cli import commands as cli
from expert_pool.cluster.cli.commands import main

START_S, EXIT_S = 90.0, 45.0


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Run:
    """`expert-pool generate` in a session of its own, so that a signal reaches it as a terminal would send it."""

    def __init__(self, *arguments: str):
        # A suite that was started in the background has interrupts ignored, and so would its children.
        program = (
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from expert_pool.cluster.cli.commands import main; main()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "generate", *arguments],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.descendants: set[psutil.Process] = set()

    def await_lines(self, output: Path, count: int) -> None:
        """Wait until the output file holds more than `count` lines; remembers the processes that are there then."""
        deadline = time.monotonic() + START_S
        while len(lines_of(output)) <= count:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "no completion in time"
            time.sleep(0.05)
        self.descendants = set(psutil.Process(self.process.pid).children(recursive=True))

    def interrupt(self, number: int) -> tuple[int, str]:
        """Ctrl-C goes to the whole foreground group, a termination to the process alone; returns its end."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=EXIT_S)
        return self.process.returncode, said

    def left_over(self) -> list[str]:
        """Processes of the run that outlive it by more than a moment."""
        alive = psutil.wait_procs(self.descendants, timeout=10)[1]
        return [process.name() for process in alive]


@pytest.fixture
def long_job(tmp_path, tiny_moe) -> tuple[Path, tuple[str, ...]]:
    """Twelve prompts that take a while one after the other; the output file and the arguments."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    requests = [{"id": f"p{index}", "prompt": f"The statement {index}"} for index in range(12)]
    prompts.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return output, (
        *("--model", tiny_moe, "--ranks", "2", "--prompts", str(prompts), "--output", str(output)),
        *("--max-new-tokens", "100", "--ignore-eos", "--address", "local", "--disable-cuda-graph"),
    )


@pytest.mark.timeout(300)  # two starts of a local cluster, slow where other work shares the cores
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_an_interrupted_run_keeps_what_is_finished_and_the_next_one_completes_it(number, long_job):
    output, arguments = long_job
    run = Run(*arguments, "--max-running-requests", "1")
    run.await_lines(output, 0)
    assert {process.name() for process in run.descendants} >= {"raylet", "gcs_server"}

    exit_code, said = run.interrupt(number)

    assert exit_code == 130, said
    assert "interrupted; finished requests are in the output file" in said
    assert "Traceback" not in said
    assert "Unhandled error" not in said
    assert run.left_over() == []
    after = lines_of(output)
    assert 0 < len(after) < 12

    # On one rank: what is in the file already does not depend on how many wrote it.
    result = CliRunner().invoke(main, ["generate", *arguments, "--ranks", "1"])
    assert result.exit_code == 0, result.output
    assert not ray.is_initialized(), "the local cluster ends with the run"
    done = lines_of(output)
    assert done[: len(after)] == after
    assert sorted(line["id"] for line in done) == sorted(f"p{index}" for index in range(12))
    assert f"{len(after)} of 12 requests are in {output} already" in result.output
    assert f"{12 - len(after)} of {12 - len(after)} requests, {100 * (12 - len(after))} tokens in " in result.output

    result = CliRunner().invoke(main, ["generate", *arguments])
    assert (result.exit_code, result.output) == (0, f"12 of 12 requests are in {output} already\n")
    assert lines_of(output) == done


def moved(output: Path) -> tuple[Path, str]:
    return output.rename(output.with_name("moved.jsonl")), "was removed or replaced while this run wrote it"


def cut(output: Path) -> tuple[Path, str]:
    """As a log is rotated."""
    copy = Path(shutil.copy(output, output.with_name("copy.jsonl")))
    os.truncate(output, 0)
    return copy, "somebody changed it while this run wrote it"


@pytest.mark.long
@pytest.mark.parametrize("taken_away", [moved, cut])
def test_an_output_that_goes_away_ends_the_run_with_the_count_of_what_it_held_and_nothing_of_rays(taken_away, long_job):
    output, arguments = long_job
    run = Run(*arguments, "--max-running-requests", "1")
    run.await_lines(output, 0)
    elsewhere, problem = taken_away(output)

    said, _ = run.process.communicate(timeout=EXIT_S)
    assert run.process.returncode == 1, said
    assert f"failed: --output {output}: {problem}" in said
    [counted] = re.findall(r"^(\d+) of 12 requests, \d+ tokens in ", said, re.MULTILINE)
    assert int(counted) == len(lines_of(elsewhere)), "the line that found its file gone is neither written nor counted"
    assert lines_of(output) == []
    # The stream of completions is closed before the pool is shut down: nobody reads what it says of that.
    assert "Unhandled error" not in said


@pytest.fixture
def session() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_a_failing_request_is_said_and_left_out_and_the_others_are_written(
    session, random_models, references, prompts_file, tmp_path
):
    output = tmp_path / "new" / "out.jsonl"
    prompts = prompts_file(
        {"prompt_token_ids": [5, 17, 42], "max_new_tokens": 6},
        {"id": "bad", "prompt_token_ids": [5] * 100},
        {"id": "sampled", "prompt_token_ids": [9], "temperature": 1.0, "seed": 3, "ignore_eos": True},
    )
    model = tmp_path / "model"
    shutil.copytree(random_models["qwen3_moe"], model)
    (model / "generation_config.json").write_text('{"eos_token_id": 1, "max_new_tokens": 4}')
    arguments = ["--model", str(model), "--prompts", prompts, "--output", str(output)]
    result = CliRunner().invoke(
        main, ["generate", *arguments, "--generation-config", "model", "--kv-cache-tokens", "64"]
    )
    assert result.exit_code == 1
    said = "the model's generation_config.json: defaults of prompts that do not say, max_new_tokens=4\n"
    assert result.output.count(said) == 1
    assert "request 'bad' failed: the request may grow to 103 cached tokens, the KV cache holds 64: " in result.output
    assert "3 of 3 requests, 1 failed, " in result.output
    written = {line["id"]: line for line in lines_of(output)}
    expected = references["qwen3_moe"].greedy([5, 17, 42], 6)
    assert written.keys() == {"1", "sampled"}
    assert written["1"] == {
        "id": "1",
        "token_ids": list(expected),
        "text": None,
        "finish_reason": "length" if len(expected) == 6 else "stop",
        "num_prompt_tokens": 3,
        "num_completion_tokens": len(expected),
    }
    assert written["sampled"]["num_completion_tokens"] == 4


def test_help_names_the_commands_and_a_missing_option_is_a_usage_error():
    assert "generate" in CliRunner().invoke(main, ["--help"]).output
    result = CliRunner().invoke(main, ["generate", "--model", "x"])
    assert result.exit_code == 2
    assert "Missing option '--prompts'" in result.output


def test_the_version_is_that_of_the_package():
    declared = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["version"]
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"expert-pool {declared}\n")


def test_plan_starts_nothing_and_shows_what_a_rank_holds(random_models):
    result = CliRunner().invoke(main, ["plan", "--model", random_models["qwen3_moe"], "--ranks", "4"])
    assert result.exit_code == 0, result.output
    assert not ray.is_initialized()
    assert "generate would refuse" not in result.output
    assert "4 ranks" in result.output
    assert "8 experts" in result.output


@pytest.mark.parametrize("command", ["generate", "launch", "plan", "status", "shutdown"])
def test_an_interrupt_speaks_of_an_output_file_only_where_there_is_one(command, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "pool_config", interrupted)
    monkeypatch.setattr(cli.ExpertPool, "connect", interrupted)
    options = {
        "generate": ["--model", "folder", "--prompts", "in.jsonl", "--output", "out.jsonl"],
        "launch": ["--model", "folder", "--name", "one"],
        "plan": ["--model", "folder"],
        "status": ["--pool", "one"],
        "shutdown": ["--pool", "one"],
    }
    result = CliRunner().invoke(main, [command, *options[command]])
    assert result.exit_code == 130
    more = "; finished requests are in the output file" if command == "generate" else ""
    assert result.output == f"interrupted{more}\n"
