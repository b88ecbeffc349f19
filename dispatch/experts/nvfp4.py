"""NVFP4 experts for Blackwell as a way: what they refuse, and how they are made; `nvfp4_experts` computes.

The two are apart because that one needs PyTorch wherever one looks, and this one is read where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..budgets.path_settings import PathSettings
from ..way import DispatcherWay, ExpertsWay, RankParts, places
from .checks import shape_problems

if TYPE_CHECKING:
    from ..moe_layer import MoeLayer
    from .nvfp4_experts import Nvfp4Experts

_ARCHITECTURES = ((10, 0), (10, 3))
# Of hidden and intermediate sizes: blocks of scales with their layout.
_MULTIPLES = (128, 128)


class Nvfp4Way(ExpertsWay):
    """FlashInfer's `CuteDslMoEWrapper`, which sizes its buffers by the rows of each call."""

    kind = "nvfp4"
    devices = places(cuda=2)
    runs_on = "Blackwell GPUs"
    computes = ("nvfp4",)
    weights_layout = "nvfp4"

    @classmethod
    def is_candidate_behind(cls, dispatcher: type[DispatcherWay]) -> bool:
        return dispatcher.has_own_capacity

    @classmethod
    def problems(cls, settings: PathSettings) -> list[str]:
        return shape_problems(settings, _MULTIPLES)

    @classmethod
    def refusal(cls, parts: RankParts, layers: Sequence[MoeLayer]) -> str | None:
        import torch

        return architecture_problem(torch.cuda.get_device_capability(parts.device))

    @classmethod
    def make(cls, parts: RankParts) -> Nvfp4Experts:
        from .nvfp4_experts import Nvfp4Experts

        return Nvfp4Experts(not parts.settings.limits.disable_cuda_graph, parts.device)


def architecture_problem(capability: tuple[int, int]) -> str | None:
    """Why a GPU of this compute capability does not run NVFP4 experts, if it does not."""
    if capability in _ARCHITECTURES:
        return None
    major, minor = capability
    return f"its GPU is SM{major}{minor}, NVFP4 experts need SM100 or SM103 (Blackwell)"
