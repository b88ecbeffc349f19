"""Integers of compressed-tensors, format `pack-quantized`: 4 or 8 bits in int32 words, and a scale a group of columns.

Kimi-K2 is published so, in 4 bits and groups of 32.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from ....dispatch.budgets.stored_coding import StoredCoding
from .contract import BadPart, Header, Part, StoredTensor
from .registry import register
from .shared.arithmetic import check_scales, matrix_of, num_blocks, times_blocks, unpacked
from .shared.compressed_tensors import CompressedFormat
from .shared.declarations import Served, either

_WORD_BITS = 32
# Codes are counted from the lowest integer.
_INTEGERS = tuple(float(integer) for integer in range(-8, 8))


@register
class CompressedIntFormat(CompressedFormat):
    """`weight_packed` i32 `[N, K / codes in a word]`, the lowest bits first; `weight_scale` `[N, K / group]`;
    `weight_shape` i64 `[2]`: `N` and `K`."""

    name = "compressed_int"
    kind = "pack-quantized"
    weights: ClassVar = {
        "type": either("int"),
        "num_bits": either(4, 8),
        "strategy": either("group"),
        "group_size": Served(lambda given: type(given) is int and given > 0, "a number above 0"),
    }
    codes = ".weight_packed"
    codes_dtype = "I32"
    beside = (".weight_scale", ".weight_shape")

    def stored(self, stem: str, codes: Header, headers: Mapping[str, Header]) -> StoredTensor:
        num_bits, group = self.scheme["num_bits"], self.scheme["group_size"]
        rows, words = matrix_of(codes.shape)
        columns = words * _WORD_BITS // num_bits
        parts = {
            "codes": Part(f"{stem}.weight_packed", (self.codes_dtype,), (rows, words)),
            "scales": Part(f"{stem}.weight_scale", ("F32", "BF16", "F16"), (rows, num_blocks(columns, group))),
            "shape": Part(f"{stem}.weight_shape", ("I64",), (2,), is_kept=False),
        }

        def check(values: Mapping[str, torch.Tensor]) -> None:
            if values["shape"].tolist() != [rows, columns]:
                raise BadPart("shape", f"is {values['shape'].tolist()}, its words hold {[rows, columns]}")
            check_scales(values, "scales")

        def expand(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
            bytes_NB = values["codes"].view(torch.uint8)
            values_NK = unpacked(bytes_NB, _INTEGERS) if num_bits == 4 else bytes_NB.float().sub_(128)
            return times_blocks(values_NK, values["scales"].float(), (1, group))

        return StoredTensor((rows, columns), parts, expand, check=check)

    def kept(self) -> StoredCoding | str:
        scales = self.folder.scales_of_experts(self.beside[0]) or "bfloat16"
        return StoredCoding(
            self.name, "int4" if self.scheme["num_bits"] == 4 else "int8", (1, self.scheme["group_size"]), scales
        )
