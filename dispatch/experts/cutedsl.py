"""CuTe DSL experts for Hopper as a way: what they refuse, plan and need, and how they are made.

`quack_experts` computes, and is apart because it needs PyTorch and Triton as it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..budgets.budget import (
    Bound,
    largest_forward,
    needed_rows,
    own_capacity,
    prefill_setting,
    shared_term,
)
from ..budgets.capacity import raise_to, settings_to_lower
from ..budgets.layout import Layout
from ..budgets.limits import Limits
from ..budgets.path_settings import PathSettings
from ..budgets.planned_buffer import PlannedBuffer
from ..gpu_problems import hopper_problem, import_problem
from ..way import DispatcherWay, ExpertsWay, RankParts, places
from .checks import gated_silu_problems, refuse_unsupported, unsupported_layer
from .pairs.pair_budget import CUTEDSL_SIZE_ALIGNMENT, pair_budget_for, planned_pairs

if TYPE_CHECKING:
    from ..moe_layer import MoeLayer
    from .quack_experts import QuackExperts


class CuteDslWay(ExpertsWay):
    """QuACK's grouped GEMM pair, over buffers for every row that can reach a rank."""

    kind = "cutedsl"
    devices = places(cuda=0)
    runs_on = "Hopper GPUs"

    @classmethod
    def is_candidate_behind(cls, dispatcher: type[DispatcherWay]) -> bool:
        return dispatcher.has_own_capacity or not dispatcher.exchanges

    @classmethod
    def least_capacity(cls, limits: Limits, layout: Layout) -> Bound | None:
        """In a pool that prefills, `capacity * ep_size` has to cover the largest forward."""
        if limits.resolved_max_prefill_tokens == 0 or limits.disaggregation_mode == "decode":
            return None
        forward = largest_forward(limits)
        rows = -(-forward.value // layout.world_size)
        return Bound(rows, shared_term(forward.term, "ep_size", layout.world_size))

    @classmethod
    def budget_problems(cls, limits: Limits, layout: Layout) -> list[str]:
        at_least = cls.least_capacity(limits, layout)
        capacity, forward = own_capacity(limits, layout, at_least).value, largest_forward(limits)
        rows = capacity * layout.world_size
        if at_least is None or rows >= forward.value:
            return []
        follows = limits.max_prefill_tokens is None
        setting = prefill_setting(limits) if follows else "limits.max_prefill_tokens"
        lower = settings_to_lower(limits, rows, limits.resolved_max_prefill_tokens, setting)
        return [
            f"limits.max_dispatch_tokens_per_rank={capacity} x ep_size {layout.world_size} = {rows} rows of CuTe DSL "
            f"experts are below the {forward.value} tokens of the largest forward ({forward.term}): "
            f"{raise_to(needed_rows(limits, layout, at_least))}, or lower {lower}"
        ]

    @classmethod
    def problems(cls, settings: PathSettings) -> list[str]:
        return list(cutedsl_problems(settings))

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        return planned_pairs(settings)

    @classmethod
    def refusal(cls, parts: RankParts, layers: Sequence[MoeLayer]) -> str | None:
        return (
            hopper_problem(parts.device)
            or unsupported_layer(layers, refuse_experts)
            or import_problem("triton")
            or import_problem("quack")
        )

    @classmethod
    def make(cls, parts: RankParts) -> QuackExperts:
        from .quack_experts import QuackExperts

        return QuackExperts(pair_budget_for(parts.settings), parts.device, kept=parts.kept)


def cutedsl_problems(settings: PathSettings) -> tuple[str, ...]:
    """What of a model these experts cannot compute; the GPU itself is looked at by its rank."""
    spec, problems = settings.spec, gated_silu_problems(settings, CuteDslWay.kind, ("bfloat16",))
    sizes = dict.fromkeys(size for layer in spec.moe for size in (layer.hidden_size, layer.intermediate_size))
    uneven = [size for size in sizes if size % CUTEDSL_SIZE_ALIGNMENT]
    if uneven and not problems:
        problems.append(
            f"experts='cutedsl' needs hidden and intermediate sizes that are multiples of {CUTEDSL_SIZE_ALIGNMENT}, "
            f"{spec.model_type} has {', '.join(map(str, uneven))}: set experts to 'torch'"
        )
    return tuple(problems)


def refuse_experts(layer: MoeLayer) -> None:
    """Refuse a layer that the pair does not compute, with the reason; see `refuse_unsupported`."""
    refuse_unsupported(layer, "experts='cutedsl'", "experts='torch'")
