"""DeepSeek's block fp8: e4m3 with a scale a block of rows and columns, as in DeepSeek-V3 and Qwen3-*-FP8."""

from collections.abc import Mapping
from typing import Any

import torch

from ....dispatch.budgets.stored_coding import StoredCoding
from .contract import Header, Part, StoredTensor
from .folder import ModelFolder
from .registry import register
from .shared.arithmetic import check_e4m3, check_scales, matrix_of, num_blocks, times_blocks, values_of_e4m3
from .shared.declarations import ANYTHING, Served, either, setting_problems, unset_or_empty
from .shared.module_names import as_transformers, list_problems
from .shared.quantised import QuantisedFormat

_LISTS = ("modules_to_not_convert", "ignored_layers")
# What Transformers leaves alone where no list says: the projection to logits, which DeepSeek's files have in bf16.
_ALONE_WITHOUT_A_LIST = ["lm_head"]


def _is_block(given: Any) -> bool:
    return isinstance(given, list) and len(given) == 2 and all(type(size) is int and size > 0 for size in given)


_SERVED = {
    "quant_method": either("fp8"),
    "weight_block_size": Served(_is_block, "two numbers above 0"),
    "fmt": either(None, "e4m3", "float8_e4m3fn"),
    # How kernels round activations; expanded weights take them as they are.
    "activation_scheme": either(None, "dynamic", "static"),
    "scale_fmt": either(None, "float", "ue8m0"),
    "expert_dtype": either(None, "fp8"),
    "modules_to_convert": unset_or_empty(),
    "dequantize": ANYTHING,
    **dict.fromkeys(_LISTS, ANYTHING),
}


@register
class BlockFp8Format(QuantisedFormat):
    """`weight` e4m3 `[N, K]`, and `weight_scale_inv` `[ceil(N / rows), ceil(K / columns)]`, a factor for each block."""

    name = "block_fp8"
    codes_dtype = "F8_E4M3"
    beside = (".weight_scale_inv",)
    unused = (".input_scale", ".activation_scale")

    def __init__(self, folder: ModelFolder):
        super().__init__(folder)
        self._lists = {name: folder.quantization.get(name) for name in _LISTS}

    @classmethod
    def recognises(cls, folder: ModelFolder) -> bool:
        return folder.method == "fp8"

    def problems(self) -> list[str]:
        problems = setting_problems(self.declared_in, self.folder.quantization, _SERVED)
        for name, given in self._lists.items():
            problems += list_problems(name, given, is_regular=lambda _: True)
        return problems + self.beside_problems()

    def leaves_alone(self, stem: str) -> bool:
        given = [names for names in self._lists.values() if names is not None]
        return as_transformers([name for names in given for name in names] if given else _ALONE_WITHOUT_A_LIST, stem)

    def stored(self, stem: str, codes: Header, headers: Mapping[str, Header]) -> StoredTensor:
        rows, columns = self.folder.quantization["weight_block_size"]
        shape = matrix_of(codes.shape)
        scales_shape = num_blocks(shape[0], rows), num_blocks(shape[1], columns)
        parts = {
            "codes": Part(f"{stem}.weight", (self.codes_dtype,), shape),
            "scales": Part(f"{stem}.weight_scale_inv", ("F32", "BF16"), scales_shape),
        }

        def expand(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return times_blocks(values_of_e4m3(values["codes"]), values["scales"].float(), (rows, columns))

        return StoredTensor(shape, parts, expand, check=_check)

    def kept(self) -> StoredCoding | str:
        rows, columns = self.folder.quantization["weight_block_size"]
        scales = self.folder.scales_of_experts(self.beside[0]) or "float32"
        return StoredCoding(self.name, "e4m3", (rows, columns), scales)


def _check(values: Mapping[str, torch.Tensor]) -> None:
    check_e4m3(values, "codes")
    check_scales(values, "scales")
