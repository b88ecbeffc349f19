"""Models and references shared by the tests."""

import os

# A rank is a process of its own; several of them share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Heads that tests start ask for Ray's token, and a process that joins one shows it in this mode alone.
os.environ.setdefault("RAY_AUTH_MODE", "token")
# A pool without an address would join whatever Ray it finds on the machine, as of a module that runs beside it.
os.environ.setdefault("RAY_ADDRESS", "local")

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from click.testing import CliRunner
from expert_pool.cluster.cli.commands import main
from models import ALL_FAMILIES, save_random_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with Ray come first and those of the fewest tests last, so that workers end at about the same time.

    `--dist loadfile` leaves modules whole: no session or pool of a module is started twice. (`loadgroup` would take
    groups of modules, and with pytest 9.2 takes no notice of them: pytest-xdist issue 1386.)
    """
    modules = [item.getparent(pytest.Module) for item in items]
    num_tests = Counter(modules)

    def place(index: int) -> tuple[bool, int]:
        module = modules[index]
        assert module is not None
        return not {"ray", "ExpertPool"} & vars(module.obj).keys(), -num_tests[module]

    items[:] = [items[index] for index in sorted(range(len(items)), key=place)]


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


CHAT_TEMPLATE = """<|endoftext|>{% for message in messages %}
{% if message.role not in ("system", "user", "assistant") %}
{{ raise_exception("Unexpected role " + message.role) }}
{% endif %}
{{ message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{%- endif %}"""


@pytest.fixture(scope="session")
def chat_model(tiny_moe: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The example model with a chat template, whose tokenizer puts a token of its own before every text."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_moe, folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_moe, local_files_only=True)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    return str(folder)


class Reference:
    """Greedy tokens as Transformers generates them, one prompt at a time, in float32; each asked for once."""

    def __init__(self, path: str):
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def greedy(self, prompt_token_ids: list[int], max_new_tokens: int) -> tuple[int, ...]:
        asked = tuple(prompt_token_ids), max_new_tokens
        if asked not in self._known:
            self._known[asked] = self._generate(prompt_token_ids, max_new_tokens)
        return self._known[asked]

    @torch.inference_mode()
    def _generate(self, prompt_token_ids: list[int], max_new_tokens: int) -> tuple[int, ...]:
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
