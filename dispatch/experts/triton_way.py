"""Triton experts as a way: what they refuse, plan and need, and how they are made.

`triton_experts` computes, and is apart because it needs PyTorch and Triton as it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..budgets.path_settings import PathSettings
from ..budgets.planned_buffer import PlannedBuffer
from ..gpu_problems import capability_problem, import_problem
from ..way import ExpertsWay, RankParts, places
from .checks import gated_silu_problems, refuse_unsupported, unsupported_layer
from .pairs.pair_budget import pair_budget_for, planned_pairs

if TYPE_CHECKING:
    from ..moe_layer import MoeLayer
    from .triton_experts import TritonExperts

_DTYPES = ("bfloat16", "float16")
# The first architecture with bf16 in its tensor cores, and with copies that run beside them.
_LEAST_CAPABILITY = (8, 0)


class TritonWay(ExpertsWay):
    """Our own grouped GEMM pair, over buffers for every row that can reach a rank."""

    kind = "triton"
    devices = places(cuda=0)

    @classmethod
    def problems(cls, settings: PathSettings) -> list[str]:
        return gated_silu_problems(settings, cls.kind, _DTYPES)

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        return planned_pairs(settings)

    @classmethod
    def refusal(cls, parts: RankParts, layers: Sequence[MoeLayer]) -> str | None:
        return (
            capability_problem(parts.device, _LEAST_CAPABILITY)
            or unsupported_layer(layers, refuse_experts)
            or import_problem("triton")
        )

    @classmethod
    def make(cls, parts: RankParts) -> TritonExperts:
        import torch

        from .triton_experts import TritonExperts

        dtype = getattr(torch, parts.settings.spec.dtype)
        return TritonExperts(pair_budget_for(parts.settings), parts.device, dtype, parts.kept)


def refuse_experts(layer: MoeLayer) -> None:
    """Refuse a layer that the pair does not compute, with the reason; see `refuse_unsupported`."""
    refuse_unsupported(layer, "experts='triton'", "experts='torch'", _DTYPES)
