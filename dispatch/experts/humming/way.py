"""Experts by humming-kernels as a way: what they refuse, plan and need, and how they are made.

`experts` computes, and is apart because it needs PyTorch, Triton and the library as it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...budgets.moe_shape import MoeShape
from ...budgets.path_settings import PathSettings
from ...budgets.planned_buffer import PlannedBuffer
from ...budgets.stored_coding import StoredCoding
from ...gpu_problems import capability_problem, import_problem
from ...way import ExpertsWay, RankParts, places
from .sizes import SIZE_ALIGNMENT, budget_for, planned_buffers

if TYPE_CHECKING:
    import torch

    from ...moe_layer import MoeLayer
    from .experts import HummingExperts

# What was tried is Hopper; the library itself goes from 7.5 on.
_LEAST_CAPABILITY = (9, 0)
_LEAST_GROUP = 16


class HummingWay(ExpertsWay):
    """Grouped GEMMs that expand weights in registers; rows and results are in bfloat16."""

    kind = "humming"
    devices = places(cuda=0)
    reads = ("e4m3", "e2m1", "int4", "int8")
    weights_layout = "humming"

    @classmethod
    def problems(cls, settings: PathSettings) -> list[str]:
        spec, coding, problems = settings.spec, settings.stored, []
        if spec.dtype != "bfloat16":
            problems.append(f"experts={cls.kind!r} takes bfloat16, the pool's dtype is {spec.dtype}: set dtype to it")
        if coding is None:  # what reads plain weights is said where all ways are asked
            return problems
        for layer in spec.moe:
            if (reason := shape_problem(layer, coding)) is not None:
                instead = "set stored_weights to 'expand'"
                return [*problems, f"experts={cls.kind!r} cannot run {layer.name}: {reason}; {instead}"]
        return problems

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        return planned_buffers(settings)

    @classmethod
    def refusal(cls, parts: RankParts, layers: Sequence[MoeLayer]) -> str | None:
        reason = _missing(parts.device)
        if reason is None:
            return None
        return f"{reason}; set stored_weights to 'expand', or install '.[gpu]' on all nodes"

    @classmethod
    def copy_bytes(cls, layers: Sequence[MoeLayer], quantisation: str) -> int:
        """Of weights in the library's own order, which take what stored ones take."""
        return sum(tensor.nbytes for layer in layers for tensor in layer.weights.stored.values())

    @classmethod
    def kernel_modules(cls, settings: PathSettings) -> list[tuple[str, Any]]:
        import torch

        device = torch.device("cuda", torch.cuda.current_device())
        if settings.stored is None or _missing(device) is not None:  # said by `refusal`
            return []
        from .modules import modules_for

        return modules_for(settings, settings.stored)

    @classmethod
    def make(cls, parts: RankParts) -> HummingExperts:
        from .experts import HummingExperts

        return HummingExperts(budget_for(parts.settings), parts.device)


def _missing(device: torch.device) -> str | None:
    """What of a GPU or of libraries is not there, if anything."""
    return capability_problem(device, _LEAST_CAPABILITY) or import_problem("triton") or import_problem("humming")


def shape_problem(layer: MoeShape, coding: StoredCoding) -> str | None:
    """Why the kernels do not compute a layer whose weights are kept so; `None` where they do."""
    gating, (_, columns) = layer.gating, coding.block
    if gating is None:
        return "what its experts do between their projections is not known to be gated SiLU, clamped or not"
    if gating.has_bias and coding.has_whole:
        return f"its experts have biases, and weights stored as {coding.format} a factor that is applied after those"
    uneven = [size for size in (layer.hidden_size, layer.intermediate_size) if size % SIZE_ALIGNMENT]
    if uneven:
        return f"sizes {uneven} are no multiples of {SIZE_ALIGNMENT}"
    if columns and (columns < _LEAST_GROUP or columns & (columns - 1)):
        return f"{columns} columns share a scale, which is no power of two from {_LEAST_GROUP} on"
    return None
