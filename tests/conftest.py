"""Models and references shared by the tests."""

import os

# A rank is a process of its own; several of them share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Heads that tests start ask for Ray's token, and a process that joins one shows it in this mode alone.
os.environ.setdefault("RAY_AUTH_MODE", "token")

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from click.testing import CliRunner
from expert_pool.cluster.cli import main
from models import ALL_FAMILIES, save_random_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: modules stay whole, and those that start Ray are one group.

    A pool without an address joins whatever Ray it finds on the machine, so two sessions at once would meet.
    """
    only_check_that_none_is_started = {"test_plan.py", "test_bad_input_config.py", "test_gpu_memory.py"}
    for item in items:
        module = item.getparent(pytest.Module)
        assert module is not None
        uses_ray = {"ray", "ExpertPool"} & vars(module.obj).keys()
        starts_ray = uses_ray and module.path.name not in only_check_that_none_is_started
        item.add_marker(pytest.mark.xdist_group("ray" if starts_ray else module.name))


@pytest.fixture(scope="session")
def tiny_moe() -> str:
    """The trained example model with its tokenizer."""
    return str(REPOSITORY / "examples" / "tiny_moe")


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A small random checkpoint of each family, in Hugging Face format."""
    folder = tmp_path_factory.mktemp("models")
    for family in ALL_FAMILIES:
        save_random_model(family, folder / family)
    return {family: str(folder / family) for family in ALL_FAMILIES}


class Reference:
    """Greedy tokens as Transformers generates them, one prompt at a time, in float32."""

    def __init__(self, path: str):
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, prompt_token_ids: list[int], max_new_tokens: int) -> tuple[int, ...]:
        ids = torch.tensor([prompt_token_ids])
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
        return tuple(output[0, len(prompt_token_ids) :].tolist())


@pytest.fixture(scope="session")
def references(random_models: dict[str, str], tiny_moe: str) -> dict[str, Reference]:
    return {name: Reference(path) for name, path in {**random_models, "tiny_moe": tiny_moe}.items()}


@pytest.fixture
def refused() -> Callable[..., str]:
    """Runs the command line and returns what it says; it must refuse before any Ray process or actor starts."""

    def run(*arguments: str) -> str:
        assert not ray.is_initialized()
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        started = ray.is_initialized()
        ray.shutdown()
        assert result.exit_code == 2, result.output
        assert not started
        assert result.output.startswith("refused: ")
        assert "Traceback" not in result.output
        return result.output

    return run


@pytest.fixture
def prompts_file(tmp_path: Path) -> Callable[..., str]:
    """Writes lines into a file of prompts and returns its path."""

    def write(*lines: dict[str, Any] | str) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8"
        )
        return str(path)

    return write
