"""A model folder is data: no code that lies in it is run, and no pickle is read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from expert_pool.cluster.requests.tokens import load_tokenizer
from expert_pool.dispatch.errors import CheckpointError
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.model.weight_files import weight_files

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import Qwen3MoeConfig as Config, Qwen3MoeForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer
"""


@pytest.fixture
def folder(tiny_moe, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_moe, tmp_path / "model"))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "of_the_folder"])
def test_code_in_a_model_folder_is_not_run(model_type, folder, tmp_path):
    """Not even where its configuration asks for it, which Transformers would heed under `trust_remote_code`."""
    mark = tmp_path / "was_run"
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if model_type == "qwen3_moe":
        assert load_tokenizer(inspect_model(str(folder))) is not None
    else:
        with pytest.raises(CheckpointError):
            inspect_model(str(folder))
    assert not mark.exists()


def test_pickled_weights_are_refused_unread(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(1)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="weights have to be in safetensors format"):
        weight_files(str(folder))
