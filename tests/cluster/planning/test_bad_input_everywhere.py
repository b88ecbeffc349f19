"""Every key of a model folder's files and of a pool's settings, with values of wrong types and without measure.

Whatever a user's file holds, a command works or refuses it in a line, in seconds. The suite runs a sample; `make
test-bad-input` runs all.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import ray
from click.testing import CliRunner
from expert_pool.cluster import PoolConfig
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.cli.output import open_output
from expert_pool.cluster.cli.output_line import OutputLine

DEADLINE_S, MOST_LINES = 20, 3
WRONG: tuple[Any, ...] = (
    *(None, True, False, "x", "8", "", "\x1b[31m\u202e", "\ud800", "\0"),
    *(-1, 0, 1, 63, 1.5, 10**6, 10**9, 10**30, -(10**30), float("nan"), float("inf")),
    *([], ["a"], [[0]], [10**30], {}, {"a": 1}, {"\x1b[31m": None}),
)
MORE_KEYS = {
    "config.json": (
        *("quantization_config", "torch_dtype", "layer_types", "rope_scaling", "rope_theta", "auto_map"),
        *("num_local_experts", "text_config", "head_dim", "_name_or_path"),
    ),
    "generation_config.json": (
        *("repetition_penalty", "stop_strings", "bos_token_id", "temperature", "max_length", "suppress_tokens"),
        *("cache_implementation", "watermarking_config", "top_k", "num_beams"),
    ),
    "tokenizer_config.json": (
        *("chat_template", "added_tokens_decoder", "bos_token", "extra_special_tokens", "add_prefix_space", "auto_map"),
    ),
}
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny_moe"
ALL = os.environ.get("EXPERT_POOL_FULL_MATRIX") == "1"
SAMPLE = 10  # of each file


def keys_of(file: str) -> list[str]:
    return sorted({*json.loads((EXAMPLE / file).read_text()), *MORE_KEYS[file]})


def settings_of(kind: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every setting of a pool, and every section, by its path."""
    for field in msgspec.structs.fields(kind):
        yield (*prefix, field.name)
        if isinstance(field.default, msgspec.Struct):
            yield from settings_of(type(field.default), (*prefix, field.name))


CASES: list[tuple[str, tuple[str, ...], Any]] = [
    *((file, (key,), value) for file in MORE_KEYS for key in keys_of(file) for value in WRONG),
    *(("pool.json", path, value) for path in settings_of(PoolConfig) for value in WRONG),
]
SAMPLED = [
    case
    for file in (*MORE_KEYS, "pool.json")
    for case in random.Random(8).sample([one for one in CASES if one[0] == file], SAMPLE)
]
CHOSEN = CASES if ALL else SAMPLED


class Case:
    """One command over files of which one is wrong."""

    def __init__(self, folder: Path, file: str, path: tuple[str, ...], value: Any):
        model = folder / "model"
        shutil.copytree(EXAMPLE, model, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "*.md"))
        (model / "model.safetensors").symlink_to(EXAMPLE / "model.safetensors")
        self.output, prompts, pool = folder / "out.jsonl", folder / "prompts.jsonl", folder / "pool.json"
        settings: dict[str, Any] = {"model": str(model)}
        if file == "pool.json":
            section = settings
            for name in path[:-1]:
                section = section.setdefault(name, {})
            section[path[-1]] = value
        else:
            written = json.loads((model / file).read_text())
            (model / file).write_text(json.dumps({**written, path[0]: value}))
        pool.write_text(json.dumps(settings))
        prompts.write_text('{"prompt": "x"}\n{"messages": [{"role": "user", "content": "x"}]}\n')
        with open_output(str(self.output)) as writer:  # all is done: whatever is not refused starts nothing
            for own_id in ("1", "2"):
                writer.write(OutputLine(own_id, (7,), None, "length", num_prompt_tokens=1, num_completion_tokens=1))
        self.arguments = ["plan", "--config", str(pool)]
        if file == "tokenizer_config.json":
            self.arguments = ["generate", *self.arguments[1:], "--prompts", str(prompts), "--output", str(self.output)]


@pytest.fixture
def in_time() -> Iterator[None]:
    """Raises in the test where a command does not end."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"no answer within {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def is_orderly(code: int, said: str) -> bool:
    """What a command may say: a report with exit code 0, or a few lines with 2; nothing that commands a terminal."""
    shown = not any(char < " " and char not in "\n\t" for char in said) and "\u202e" not in said
    if code == 2 and "one rank holds" in said:  # a plan, with the problems below it
        return shown and "would fail: " in said
    return shown and (
        code == 0 or (code == 2 and len(said.splitlines()) <= MOST_LINES and said.startswith("refused: "))
    )


@pytest.mark.parametrize(
    ("file", "path", "value"), CHOSEN, ids=lambda part: f"{part!r:.30}".encode("ascii", "replace").decode()
)
def test_a_file_with_one_wrong_value_is_used_or_refused_in_a_line(file, path, value, tmp_path, in_time):
    case = Case(tmp_path, file, path, value)
    result = CliRunner().invoke(main, case.arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert is_orderly(result.exit_code, result.output), result.output
    assert not ray.is_initialized()


def processes_marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("EXPERT_POOL_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("config.json", ("num_hidden_layers",), 10**6),
        ("tokenizer_config.json", ("chat_template",), "{{ raise_exception('\x1b[31m' + messages[0].role) }}"),
    ],
    ids=["config", "template"],
)
def test_a_refused_command_leaves_no_process(file, path, value, tmp_path):
    case, mark = Case(tmp_path, file, path, value), uuid.uuid4().hex
    ended = subprocess.run(
        [sys.executable, "-c", "from expert_pool.cluster.cli.commands import main; main()", *case.arguments],
        env={**os.environ, "EXPERT_POOL_TEST_MARK": mark},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert is_orderly(ended.returncode, ended.stdout + ended.stderr), ended.stdout + ended.stderr
    assert ended.returncode == 2
    until = time.monotonic() + 10
    while left := processes_marked(mark):
        assert time.monotonic() < until, left
        time.sleep(0.05)
