"""Models and references shared by the tests."""

import os

# A rank is a process of its own; several of them share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

from pathlib import Path

import pytest
import torch
from models import FAMILIES, save_random_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_moe() -> str:
    """The trained example model with its tokenizer."""
    return str(REPOSITORY / "examples" / "tiny_moe")


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A small random checkpoint of each family, in Hugging Face format."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_random_model(family, folder / family)
    return {family: str(folder / family) for family in FAMILIES}


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
