"""NVFP4 as ModelOpt writes it: four bits a weight, an e4m3 scale for 16 of them, and one scale a weight."""

from collections.abc import Mapping
from typing import Any

import torch

from ....dispatch.budgets.stored_coding import StoredCoding
from ..spec import MODELOPT_FILE
from .contract import Header, Part, StoredTensor
from .folder import ModelFolder
from .registry import register
from .shared.arithmetic import E2M1, check_scales, matrix_of, num_blocks, times_blocks, unpacked
from .shared.declarations import ANYTHING, either, setting_problems, unset_or_empty
from .shared.module_names import as_modelopt, list_problems
from .shared.quantised import QuantisedFormat

_BLOCK = 16
_IN_CONFIG = {
    "quant_method": either("modelopt"),
    "quant_algo": either("NVFP4"),
    "ignore": ANYTHING,
    "kv_cache_scheme": unset_or_empty(),
    "group_size": either(None, _BLOCK),
    # Both say again what the algorithm says, and who wrote it.
    "config_groups": ANYTHING,
    "producer": ANYTHING,
}
_IN_FILE = {
    "quant_algo": either("NVFP4"),
    "exclude_modules": ANYTHING,
    "kv_cache_quant_algo": unset_or_empty(),
    "group_size": either(None, _BLOCK),
}


@register
class Nvfp4Format(QuantisedFormat):
    """`weight` u8 `[N, K / 2]`, the low four bits first; `weight_scale` e4m3 `[N, K / 16]`; `weight_scale_2` `[]`."""

    name = "nvfp4"
    codes_dtype = "U8"
    beside = (".weight_scale", ".weight_scale_2")

    @classmethod
    def recognises(cls, folder: ModelFolder) -> bool:
        return folder.method == "modelopt" or (folder.quantization is None and folder.modelopt is not None)

    @property
    def declared_in(self) -> str:
        return MODELOPT_FILE if self.folder.quantization is None else super().declared_in

    def problems(self) -> list[str]:
        in_config, in_file = self._declared
        problems, found = [], []
        if in_config is not None:
            problems += setting_problems(self.declared_in, in_config, _IN_CONFIG)
            found.append(in_config.get("ignore"))
            problems += list_problems("ignore", found[-1], is_regular=lambda _: False)
        if in_file is not None:
            problems += setting_problems(f"quantization of {MODELOPT_FILE}", in_file, _IN_FILE)
            found.append(in_file.get("exclude_modules") if isinstance(in_file, dict) else None)
            problems += list_problems("exclude_modules", found[-1], is_regular=lambda _: False)
        if not problems and len({frozenset(names or ()) for names in found}) > 1:
            problems.append(f"exclude_modules of {MODELOPT_FILE} and ignore of {self.declared_in} are not the same")
        return problems

    @property
    def _declared(self) -> tuple[Any, Any]:
        """Settings of both files; `None` where there are none."""
        beside = self.folder.modelopt
        return self.folder.quantization, None if beside is None else beside.get("quantization") or {}

    def leaves_alone(self, stem: str) -> bool:
        in_config, in_file = self._declared
        names = in_file.get("exclude_modules") if in_config is None else in_config.get("ignore")
        return as_modelopt(names or (), stem)

    def stored(self, stem: str, codes: Header, headers: Mapping[str, Header]) -> StoredTensor:
        rows, num_bytes = matrix_of(codes.shape)
        columns = 2 * num_bytes
        parts = {
            "codes": Part(f"{stem}.weight", (self.codes_dtype,), (rows, num_bytes)),
            "scales": Part(f"{stem}.weight_scale", ("F8_E4M3",), (rows, num_blocks(columns, _BLOCK))),
            "scale": Part(f"{stem}.weight_scale_2", ("F32",), ()),
        }
        return StoredTensor((rows, columns), parts, _expanded, check=_check)

    def kept(self) -> StoredCoding | str:
        return StoredCoding(self.name, "e2m1", (1, _BLOCK), "e4m3", has_whole=True)


def _check(values: Mapping[str, torch.Tensor]) -> None:
    check_scales(values, "scales")
    check_scales(values, "scale")


def _expanded(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    scales_NC = values["scales"].float() * values["scale"].float()
    return times_blocks(unpacked(values["codes"], E2M1), scales_NC, (1, _BLOCK))
