"""fp8 of compressed-tensors, format `float-quantized`: e4m3 with a scale a row, or one for the whole weight."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from ....dispatch.budgets.stored_coding import StoredCoding
from .contract import Header, Part, StoredTensor
from .registry import register
from .shared.arithmetic import check_e4m3, check_scales, matrix_of, times_blocks, values_of_e4m3
from .shared.compressed_tensors import CompressedFormat
from .shared.declarations import either, unset_or_empty


@register
class CompressedFp8Format(CompressedFormat):
    """`weight` e4m3 `[N, K]`, `weight_scale` `[N, 1]`, or `[1]` or `[]`, by the strategy."""

    name = "compressed_fp8"
    kind = "float-quantized"
    weights: ClassVar = {
        "type": either("float"),
        "num_bits": either(8),
        "strategy": either("channel", "tensor"),
        "group_size": unset_or_empty(),
    }
    codes_dtype = "F8_E4M3"
    beside = (".weight_scale",)

    def stored(self, stem: str, codes: Header, headers: Mapping[str, Header]) -> StoredTensor:
        rows, columns = matrix_of(codes.shape)
        scale = headers.get(f"{stem}.weight_scale")
        is_of_rows = self.scheme["strategy"] == "channel"
        of_all: tuple[int, ...] = () if scale is not None and not scale.shape else (1,)
        parts = {
            "codes": Part(f"{stem}.weight", (self.codes_dtype,), (rows, columns)),
            "scales": Part(f"{stem}.weight_scale", ("F32", "BF16", "F16"), (rows, 1) if is_of_rows else of_all),
        }

        def expand(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
            scales_RC = values["scales"].float().reshape(-1, 1)
            return times_blocks(values_of_e4m3(values["codes"]), scales_RC, (1 if is_of_rows else rows, columns))

        return StoredTensor((rows, columns), parts, expand, check=_check)

    def kept(self) -> StoredCoding | str:
        scales = self.folder.scales_of_experts(self.beside[0]) or "bfloat16"
        return StoredCoding(self.name, "e4m3", (1 if self.scheme["strategy"] == "channel" else 0, 0), scales)


def _check(values: Mapping[str, torch.Tensor]) -> None:
    check_e4m3(values, "codes")
    check_scales(values, "scales")
