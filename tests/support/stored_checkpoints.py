"""Checkpoints in the formats that models are published in, and the same weights expanded, in float32.

Written from the definitions of the formats, block by block, with NumPy: nothing of the product is used, so that a
mistake of its own cannot be on both sides.
"""

import fnmatch
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import save_random_model
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
Written = tuple[Weights, np.ndarray]
"""Tensors by what follows the stem of their names, and the weights that they stand for."""
INDEX = "model.safetensors.index.json"


def e4m3_value(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1_value(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


E4M3 = np.array([e4m3_value(code) for code in range(256)], dtype=np.float32)
E2M1 = np.array([e2m1_value(code) for code in range(16)], dtype=np.float32)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of the nearest values of a table."""
    order = np.argsort(table)[: int(np.isfinite(table).sum())]  # NaN is sorted last
    ascending = table[order]
    return order[np.searchsorted((ascending[1:] + ascending[:-1]) / 2, values)].astype(np.uint8)


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    return nearest(values, E4M3)


def as_e4m3(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn)


def packed_nibbles(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the first in its low half."""
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // 2), dtype=np.uint8)
    for column in range(codes.shape[-1]):
        out[..., column // 2] |= codes[..., column] << (4 * (column % 2))
    return out


def block_fp8(weights: np.ndarray, block: int = 128) -> Written:
    num_rows, num_columns = weights.shape
    scales = np.zeros((math.ceil(num_rows / block), math.ceil(num_columns / block)), dtype=np.float32)
    codes, expanded = np.zeros(weights.shape, dtype=np.uint8), np.zeros(weights.shape, dtype=np.float32)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            here = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
            scale = scales[row, column] = np.abs(weights[here]).max() / np.float32(448)
            codes[here] = e4m3_codes(weights[here] / scale)
            expanded[here] = E4M3[codes[here]] * scale
    return {".weight": as_e4m3(codes), ".weight_scale_inv": torch.from_numpy(scales)}, expanded


def fp8_of_rows(weights: np.ndarray) -> Written:
    codes, expanded = np.zeros(weights.shape, dtype=np.uint8), np.zeros(weights.shape, dtype=np.float32)
    scales = torch.zeros(weights.shape[0], 1, dtype=torch.bfloat16)
    for row in range(weights.shape[0]):
        scales[row, 0] = float(np.abs(weights[row]).max()) / 448
        scale = np.float32(scales[row, 0].item())
        codes[row] = e4m3_codes(weights[row] / scale)
        expanded[row] = E4M3[codes[row]] * scale
    return {".weight": as_e4m3(codes), ".weight_scale": scales}, expanded


def fp8_of_tensors(weights: np.ndarray) -> Written:
    scale = np.abs(weights).max() / np.float32(448)
    codes = e4m3_codes(weights / scale)
    return {".weight": as_e4m3(codes), ".weight_scale": torch.tensor([float(scale)])}, E4M3[codes] * scale


def nvfp4(weights: np.ndarray) -> Written:
    num_rows, num_columns = weights.shape
    of_all = np.abs(weights).max() / np.float32(6 * 448)
    codes, expanded = np.zeros(weights.shape, dtype=np.uint8), np.zeros(weights.shape, dtype=np.float32)
    scale_codes = np.zeros((num_rows, num_columns // 16), dtype=np.uint8)
    for block in range(num_columns // 16):
        here = slice(None), slice(16 * block, 16 * (block + 1))
        scale_codes[:, block] = e4m3_codes(np.abs(weights[here]).max(1) / 6 / of_all)
        scales = (E4M3[scale_codes[:, block]] * of_all)[:, None]
        codes[here] = nearest(weights[here] / scales, E2M1)
        expanded[here] = E2M1[codes[here]] * scales
    stored = {
        ".weight": torch.from_numpy(packed_nibbles(codes)),
        ".weight_scale": as_e4m3(scale_codes),
        ".weight_scale_2": torch.tensor(float(of_all)),
        ".input_scale": torch.tensor(0.5),
    }
    return stored, expanded


def packed_integers(weights: np.ndarray, num_bits: int = 4, group: int = 32) -> Written:
    num_rows, num_columns = weights.shape
    in_a_word, lowest = 32 // num_bits, -(2 ** (num_bits - 1))
    words = np.zeros((num_rows, num_columns // in_a_word), dtype=np.uint32)
    scales, expanded = torch.zeros(num_rows, num_columns // group, dtype=torch.bfloat16), np.zeros_like(weights)
    for block in range(num_columns // group):
        here = slice(None), slice(group * block, group * (block + 1))
        scales[:, block] = torch.from_numpy(np.abs(weights[here]).max(1)) / (-lowest - 0.5)
        scales_of_rows = scales[:, block, None].float().numpy()
        integers = np.clip(np.round(weights[here] / scales_of_rows), lowest, -lowest - 1)
        expanded[here] = integers * scales_of_rows
        for at in range(group):
            column = group * block + at
            shifted = (integers[:, at] - lowest).astype(np.uint32) << np.uint32(num_bits * (column % in_a_word))
            words[:, column // in_a_word] |= shifted
    stored = {
        ".weight_packed": torch.from_numpy(words.view(np.int32)),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([num_rows, num_columns]),
    }
    return stored, expanded


def mxfp4(weights_EKN: np.ndarray) -> Written:
    num_experts, num_columns, num_rows = weights_EKN.shape
    blocks = np.zeros((num_experts, num_rows, num_columns // 32, 16), dtype=np.uint8)
    scales, expanded = np.zeros(blocks.shape[:3], dtype=np.uint8), np.zeros_like(weights_EKN)
    for expert in range(num_experts):
        for block in range(num_columns // 32):
            here = expert, slice(32 * block, 32 * (block + 1))
            exponents = np.floor(np.log2(np.abs(weights_EKN[here]).max(0))) - 2
            powers = np.float32(2.0) ** exponents.astype(np.float32)
            codes = nearest(weights_EKN[here] / powers, E2M1)
            scales[expert, :, block] = exponents + 127
            blocks[expert, :, block] = packed_nibbles(codes.T)
            expanded[here] = E2M1[codes] * powers
    return {"_blocks": torch.from_numpy(blocks), "_scales": torch.from_numpy(scales)}, expanded


@dataclass(frozen=True)
class Stored:
    """A format, as a checkpoint has it.

    Attributes:
        quantise: from plain weights.
        config: `quantization_config`.
        alone: patterns of names of modules that stay plain; the configuration says so in its own manner.
        plain: ending of weights.
        others: JSON files beside `config.json`, by name.
    """

    quantise: Callable[[np.ndarray], Written]
    config: Mapping[str, Any] | None
    alone: tuple[str, ...]
    plain: str = ".weight"
    others: Mapping[str, Any] = field(default_factory=dict)

    def is_meant(self, name: str, weights: torch.Tensor) -> bool:
        """Whether a tensor of a plain checkpoint is quantised: a projection that is not left alone."""
        stem = name.removesuffix(self.plain)
        is_projection = weights.dim() == (2 if self.plain else 3) and stem.endswith(("_proj", "_proj_with_mqa"))
        return name.endswith(self.plain) and is_projection and not any(fnmatch.fnmatch(stem, one) for one in self.alone)


def compressed(kind: str, ignore: list[str], **weights: Any) -> dict[str, Any]:
    """`quantization_config` as compressed-tensors writes it."""
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {"dynamic": False, "observer": "minmax", "symmetric": True, "actorder": None, **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
ALONE = "model.layers.1.self_attn.o_proj"
KIMI_IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
KIMI_ALONE = ("*self_attn*", "*shared_experts*", "*.mlp.gate_proj", "*.mlp.up_proj", "*.mlp.down_proj")
MODELOPT = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
FORMATS = {
    "block_fp8": Stored(
        block_fp8, {**BLOCK_FP8, "modules_to_not_convert": ["lm_head", ALONE, "model.layers.0.mlp.gate"]}, (ALONE,)
    ),
    "block_fp8 without a list": Stored(block_fp8, BLOCK_FP8, ()),
    "mxfp4": Stored(
        mxfp4,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
        (),
        plain="",
    ),
    "nvfp4": Stored(
        nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.self_attn*"]},
        ("*self_attn*",),
    ),
    "nvfp4 beside the configuration": Stored(
        nvfp4,
        None,
        (ALONE,),
        others={
            "hf_quant_config.json": {
                "producer": {"name": "modelopt"},
                "quantization": {**MODELOPT, "exclude_modules": ["lm_head", ALONE]},
            }
        },
    ),
    "compressed_fp8": Stored(
        fp8_of_rows,
        compressed("float-quantized", ["lm_head", ALONE], num_bits=8, type="float", strategy="channel"),
        (ALONE,),
    ),
    "compressed_fp8 of whole weights": Stored(
        fp8_of_tensors, compressed("float-quantized", ["lm_head"], num_bits=8, type="float", strategy="tensor"), ()
    ),
    "compressed_int": Stored(
        packed_integers,
        compressed("pack-quantized", KIMI_IGNORE, num_bits=4, type="int", strategy="group", group_size=32),
        KIMI_ALONE,
    ),
    "compressed_int of 8 bits": Stored(
        lambda weights: packed_integers(weights, 8, 64),
        compressed("pack-quantized", KIMI_IGNORE, num_bits=8, type="int", strategy="group", group_size=64),
        KIMI_ALONE,
    ),
}
# Widths that are no multiples of 128: 320, 192, and 576 of what DeepSeek's attention makes keys and values of.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 320,
        "moe_intermediate_size": 192,
        "num_experts": 4,
        "num_hidden_layers": 2,
        "initializer_range": 0.05,
    },
    "deepseek_v3": {
        "hidden_size": 192,
        "moe_intermediate_size": 64,
        "intermediate_size": 192,
        "q_lora_rank": 320,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "num_hidden_layers": 2,
        "initializer_range": 0.06,
    },
    "gpt_oss": {"num_hidden_layers": 2, "intermediate_size": 96, "num_local_experts": 4},
}
# Each format with the families that are tested in it.
PAIRS = {
    ("block_fp8", "qwen3_moe"),
    ("block_fp8 without a list", "deepseek_v3"),
    ("mxfp4", "gpt_oss"),
    ("nvfp4", "qwen3_moe"),
    ("nvfp4 beside the configuration", "deepseek_v3"),
    ("compressed_fp8", "qwen3_moe"),
    ("compressed_fp8 of whole weights", "deepseek_v3"),
    ("compressed_int", "deepseek_v3"),
    ("compressed_int of 8 bits", "deepseek_v3"),
}


def uneven(weights: torch.Tensor, seed: int) -> np.ndarray:
    """Weights whose blocks have scales that differ by much more than chance, along rows and columns."""
    chosen = np.random.default_rng(seed)
    values = weights.float().numpy().copy()
    for axis in range(weights.dim()):
        factors = np.repeat(chosen.uniform(0.5, 1.5, math.ceil(values.shape[axis] / 16)), 16)[: values.shape[axis]]
        values *= factors.astype(np.float32).reshape(-1, *[1] * (weights.dim() - 1 - axis))
    return values


def write_stored(plain: Path, folder: Path, stored: Stored) -> tuple[Path, Path]:
    """A checkpoint in a format, in two files with every scale in another one than its codes, and its expanded twin.

    Args:
        plain: checkpoint whose weights are rounded.
        folder: where both go.
        stored: the format.
    """
    quantised, expanded = folder / "stored", folder / "expanded"
    for copy in (quantised, expanded):
        shutil.copytree(plain, copy, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    weights: Weights = {}
    for file in Path(plain).glob("*.safetensors"):
        weights |= load_file(file)
    parts: Weights = {}
    same: Weights = {}
    for seed, (name, tensor) in enumerate(sorted(weights.items())):
        if stored.is_meant(name, tensor):
            tensors, values = stored.quantise(uneven(tensor, seed))
            parts |= {name.removesuffix(stored.plain) + ending: one for ending, one in tensors.items()}
            same[name] = torch.from_numpy(values)
        else:
            parts[name] = same[name] = tensor
    save_file(same, expanded / "model.safetensors", {"format": "pt"})
    save_in_two(parts, quantised)
    change_json(quantised / "config.json", lambda config: config | {"quantization_config": stored.config})
    if stored.config is None:
        change_json(quantised / "config.json", lambda config: {k: v for k, v in config.items() if v is not None})
    for file_name, content in stored.others.items():
        (quantised / file_name).write_text(json.dumps(content))
    return quantised, expanded


def writer(make_folder: Callable[[str], Path]) -> Callable[[str, str], tuple[Path, Path]]:
    """What writes a checkpoint of a format and a family, and its expanded twin, each once, into folders of its own."""

    @cache
    def plain(family: str) -> Path:
        folder = make_folder(family)
        save_random_model(family, folder, **SIZES[family])
        return folder

    @cache
    def write(stored: str, family: str) -> tuple[Path, Path]:
        return write_stored(plain(family), make_folder(stored.replace(" ", "_")), FORMATS[stored])

    return write


def save_in_two(weights: Weights, folder: Path) -> None:
    files = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    weight_map = {name: files[bool(re.search(r"_scale|_shape", name))] for name in weights}
    for file in files:
        save_file(
            {name: one for name, one in weights.items() if weight_map[name] == file}, folder / file, {"format": "pt"}
        )
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load_all_of(folder: Path) -> Weights:
    weights: Weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def rewrite(folder: Path, change: Callable[[Weights], Any]) -> None:
    """Change tensors of a checkpoint in two files, add some, or take some away."""
    weights = load_all_of(folder)
    change(weights)
    save_in_two(weights, folder)


def change_json(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
