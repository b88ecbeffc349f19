"""A checkpoint format that the house does not know: int8 weights with a float32 scale a row, `NAME` and `NAME_scale`.

A module that the setting `plugins` may name, and functions that write such checkpoints.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from expert_pool.workers.model.formats.contract import CheckpointFormat, Header, Part, StoredTensor, stored_as_it_is
from expert_pool.workers.model.formats.folder import ModelFolder
from expert_pool.workers.model.formats.registry import register
from safetensors.torch import load_file, save_file

SCALE = "_scale"
Weights = dict[str, torch.Tensor]


@register
class Int8Format(CheckpointFormat):
    """Rows are multiplied by their scales; stacks of experts have scales `[E, N]`."""

    name = "rows_in_int8"

    @classmethod
    def recognises(cls, folder: ModelFolder) -> bool:
        return folder.method == cls.name

    def problems(self) -> list[str]:
        bits = self.folder.quantization.get("bits", 8)
        return [f"bits={bits} of quantization_config is not 8"] if bits != 8 else []

    def tensors(self, headers: Mapping[str, Header]) -> dict[str, StoredTensor]:
        return {
            name: self._stored(name, header, headers) for name, header in headers.items() if not name.endswith(SCALE)
        }

    def _stored(self, name: str, header: Header, headers: Mapping[str, Header]) -> StoredTensor:
        if header.dtype != "I8" and name + SCALE not in headers:
            return stored_as_it_is(name, header)
        rows, scales = Part(name, ("I8",), header.shape), Part(name + SCALE, ("F32",), header.shape[:-1])
        return StoredTensor(header.shape, {"rows": rows, "scales": scales}, expanded, is_stacked=len(header.shape) == 3)

    def header_problems(self, headers: Mapping[str, Header], taken: Mapping[str, bool]) -> list[str]:
        alone = self.folder.quantization.get("modules_to_not_convert", [])
        stored = [name for name in taken if name + SCALE in headers and name.rpartition(".")[0] in alone]
        return [f"modules_to_not_convert names {', '.join(stored)}, which is int8 with scales"] if stored else []


def expanded(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return parts["rows"].float() * parts["scales"].unsqueeze(-1)


def write_pair(plain: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint with its projections in int8, and the same weights expanded, in float32, of one plain checkpoint."""
    stored, reference = folder / "int8", folder / "expanded"
    for copy in (stored, reference):
        shutil.copytree(plain, copy)
    for file in Path(plain).glob("*.safetensors"):
        rounded: Weights = {}
        same: Weights = {}
        for name, weights in load_file(file).items():
            if "_proj" not in name or "bias" in name:
                rounded[name] = same[name] = weights
                continue
            scales = weights.abs().amax(-1) / 127
            rounded[name] = (weights / scales.unsqueeze(-1)).round().to(torch.int8)
            rounded[name + SCALE] = scales.float()
            same[name] = rounded[name].float() * scales.float().unsqueeze(-1)
        save_file(rounded, stored / file.name, {"format": "pt"})
        save_file(same, reference / file.name, {"format": "pt"})
    for index in stored.glob("*.index.json"):
        add_scales_to(index)
    declare(stored, quant_method=Int8Format.name)
    return stored, reference


def add_scales_to(index: Path) -> None:
    listed = json.loads(index.read_text())
    for file in set(listed["weight_map"].values()):
        listed["weight_map"] |= dict.fromkeys(load_file(index.parent / file), file)
    index.write_text(json.dumps(listed))


def declare(folder: Path, **quantization: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
