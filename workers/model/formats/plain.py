"""Checkpoints whose files hold the model's tensors themselves, in floats."""

from collections.abc import Mapping

from ....dispatch.budgets.stored_coding import StoredCoding
from .contract import CheckpointFormat, Header, StoredTensor, stored_as_it_is
from .folder import ModelFolder
from .registry import register

_SCALES = ("_scale", "_scale_inv", "_scale_2", "_zero_point")


@register
class PlainFormat(CheckpointFormat):
    """Every tensor is stored as it is, and cast to the model's dtype where that is another float."""

    name = "plain"
    is_plain = True

    @classmethod
    def recognises(cls, folder: ModelFolder) -> bool:
        return folder.quantization is None

    def tensors(self, headers: Mapping[str, Header]) -> dict[str, StoredTensor]:
        return {name: stored_as_it_is(name, header) for name, header in headers.items()}

    def kept(self) -> StoredCoding | str:
        return "its checkpoint holds weights in floats, not quantised"

    def header_problems(self, headers: Mapping[str, Header], taken: Mapping[str, bool]) -> list[str]:
        scales = sorted(name + ending for name in taken for ending in _SCALES if name + ending in headers)
        if not scales:
            return []
        return [
            f"{len(scales)} scale(s) of quantised weights, {scales[0]} the first, and config.json names no quantisation"
        ]
