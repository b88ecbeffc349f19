"""MXFP4 as gpt-oss is published in: experts stacked, four bits a weight, and a power of two for 32 of them."""

from collections.abc import Mapping

import torch

from ....dispatch.budgets.stored_coding import StoredCoding
from .contract import Header, Part, StoredTensor
from .folder import ModelFolder
from .registry import register
from .shared.arithmetic import E2M1, check_scales, times_blocks, unpacked
from .shared.declarations import ANYTHING, either, setting_problems
from .shared.module_names import as_transformers, list_problems
from .shared.quantised import QuantisedFormat

_BLOCK = 32
_FAMILY = "gpt_oss"
_LIST = "modules_to_not_convert"
_SERVED = {"quant_method": either("mxfp4"), "dequantize": ANYTHING, _LIST: ANYTHING}


@register
class Mxfp4Format(QuantisedFormat):
    """`NAME_blocks` u8 `[E, N, K / 32, 16]`, `NAME_scales` u8 `[E, N, K / 32]`: exponents of two, 127 for 1.

    A plain checkpoint has `NAME` as `[E, K, N]`. Gate and up are interleaved there as they are here.
    """

    name = "mxfp4"
    plain = ""
    codes = "_blocks"
    codes_dtype = "U8"
    beside = ("_scales",)
    unused = ()
    bias = "_bias"

    @classmethod
    def recognises(cls, folder: ModelFolder) -> bool:
        return folder.method == "mxfp4"

    def problems(self) -> list[str]:
        family = self.folder.model_type
        problems = setting_problems(self.declared_in, self.folder.quantization, _SERVED)
        problems += [f"its family is {family!r:.60}: it is read for {_FAMILY!r} alone"] if family != _FAMILY else []
        problems += list_problems(_LIST, self.folder.quantization.get(_LIST), is_regular=lambda _: True)
        return problems + self.beside_problems()

    def leaves_alone(self, stem: str) -> bool:
        """Experts alone are ever quantised, whatever the list leaves out."""
        return ".experts." not in stem or as_transformers(self.folder.quantization.get(_LIST) or (), stem)

    def stored(self, stem: str, codes: Header, headers: Mapping[str, Header]) -> StoredTensor:
        num_experts, rows, blocks, _ = codes.shape if len(codes.shape) == 4 else (0, 0, 0, 0)
        parts = {
            "codes": Part(f"{stem}_blocks", (self.codes_dtype,), (num_experts, rows, blocks, _BLOCK // 2)),
            "scales": Part(f"{stem}_scales", ("U8",), (num_experts, rows, blocks)),
        }
        return StoredTensor((num_experts, blocks * _BLOCK, rows), parts, _expanded, is_stacked=True, check=_check)

    def kept(self) -> StoredCoding | str:
        return StoredCoding(self.name, "e2m1", (1, _BLOCK), "e8m0")


def _check(values: Mapping[str, torch.Tensor]) -> None:
    check_scales(values, "scales", values["scales"].view(torch.float8_e8m0fnu))


def _expanded(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    scales_NC = values["scales"].view(torch.float8_e8m0fnu).float()
    values_NK = unpacked(values["codes"].flatten(1), E2M1)
    return times_blocks(values_NK, scales_NC, (1, _BLOCK)).T
