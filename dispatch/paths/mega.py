"""FlashInfer's SM90 CuTe DSL mega kernel: one kernel exchanges the tokens, runs the experts and combines.

It takes the place of a dispatcher and of the experts behind it. What all ranks must agree on is the same as for any
dispatcher: every rank calls every layer in every step, with at most `capacity` rows. In per-tensor fp8 a rank decodes
what its peers sent with its own copy of the scales, so those belong to what ranks compare before a step. The kernel
waits for its peers without bound; the driver's deadline is what ends a stalled set of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..budgets.geometry import StepGeometry
from ..budgets.limits import QuantisationKind
from ..budgets.path_settings import PathSettings, row_formats
from ..budgets.planned_buffer import PlannedBuffer
from ..dispatchers.contract import INVALID_EXPERT_ID, check_rows
from ..errors import ConfigError
from ..expert_path import HeldAlike
from ..experts.checks import refuse_unsupported, shape_problems, unsupported_layer, width_problem
from ..experts.expert_weights import GATE_UP
from ..gpu_problems import hopper_problem, import_problem, nvlink_domain_problem, peer_problem
from ..registry import PLAIN_EXPERTS
from ..way import FusedWay, RankParts, places
from .tuning import Tuning

if TYPE_CHECKING:
    import torch

    from ..collectives import Collectives
    from ..moe_layer import MoeLayer
    from ..probe import HostGroup
    from .mega_kernels import MegaKernels

FP8_MAX = 448.0
_CAPACITIES = (8, 64, 256, 1024)
# Of hidden and intermediate sizes: the second GEMM's tile, TMA rows, and blocks of scales with their layout. FlashInfer
# takes multiples of 64 in `fp8` and says that it never tried those that are none of 128: at an intermediate size of 64
# it computed garbage for some numbers of rows, another at every run.
_MULTIPLES = {"none": (256, 64), "fp8": (128, 128), "fp8_blockwise": (128, 128)}
_COMPUTES = {"none": "bf16", "fp8": "fp8, one scale a tensor", "fp8_blockwise": "fp8, scales of 128-blocks"}


class MegaPath(FusedWay):
    """Mega kernels of one capacity, for all MoE layers of a rank; keeps `dispatch.expert_path.MemberPath`.

    Args:
        collectives: lists what is exchanged; in a rehearsal nothing is.
        kernels: prepared weights, shared with the paths of other capacities.
        rank: this rank.
        capacity: rows a rank, equal on every rank; sizes the workspace, and the kernel's default settings follow it.

    Attributes:
        held: what ranks compare; in per-tensor fp8 the scales of all layers, two each, in the order of adoption.
    """

    kind = name = "mega"
    devices = places(cuda=2)
    computes = ("none", "fp8", "fp8_blockwise")
    calibrated = ("fp8",)
    weights_layout = "mega"

    @classmethod
    def candidates(cls, tuning: Tuning, capacity: int) -> tuple[int, ...]:
        below = tuning.mega_capacities or _CAPACITIES
        return tuple(sorted({rows for rows in below if rows < capacity} | {capacity}))

    @classmethod
    def problems(cls, settings: PathSettings, setting: str) -> list[str]:
        problems: list[str] = []
        if settings.dispatch == cls.kind and settings.experts != PLAIN_EXPERTS:
            problems.append(f"experts={settings.experts!r} and {setting} both compute experts: set experts to 'auto'")
            if settings.quantisation == "none":
                return problems
        if settings.quantisation in cls.computes:
            problems += shape_problems(settings, _MULTIPLES[settings.quantisation])
        return problems

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        """What is known before the kernel is compiled: rows in and out, expert ids (int64) and weights (float32)."""
        row_bytes = max(
            2 * row_format.hidden_bytes + 12 * row_format.top_k for row_format in row_formats(settings.spec)
        )
        made_of = "rows in and out; the compiled kernel adds its own workspace"
        capacity = settings.capacity
        return [PlannedBuffer("dispatch: mega kernel", capacity, capacity * row_bytes, made_of)]

    @classmethod
    def refusal(cls, parts: RankParts, layers: Sequence[MoeLayer], host_of_first: str) -> str | None:
        def refuse(layer: MoeLayer) -> None:
            refuse_experts(layer, parts.settings.quantisation)

        return (
            nvlink_domain_problem(parts.device, host_of_first)
            or import_problem("flashinfer.moe_ep")
            or peer_problem(parts.device)
            or hopper_problem(parts.device)
            or unsupported_layer(layers, refuse)
            or import_problem("nvshmem.core")
            or import_problem("cutlass")
        )

    @classmethod
    def copy_bytes(cls, layers: Sequence[MoeLayer], quantisation: QuantisationKind) -> int:
        return copy_bytes(layers, quantisation)

    @classmethod
    def share(cls, parts: RankParts) -> MegaKernels:
        from .mega_kernels import MegaKernels

        settings = parts.settings
        return MegaKernels(parts.group, settings.layout, parts.rank, parts.device, settings.quantisation)

    @classmethod
    def make(cls, parts: RankParts, shared: MegaKernels, capacity: int) -> MegaPath:
        return cls(parts.collectives, shared, parts.rank, capacity)

    def __init__(self, collectives: Collectives, kernels: MegaKernels, rank: int, capacity: int):
        computes = f"FlashInfer SM90 CuTe DSL mega kernel, {_COMPUTES[kernels.quantisation]}"
        self.held = HeldAlike("mega", computes, capacity, workspace_bytes=0)
        self._capacity = capacity
        self._collectives = collectives
        self._kernels = kernels
        self._rank = rank
        self._adopted: list[int] = []
        self._bounds: dict[int, float] = {}

    def adopt(self, layer: MoeLayer) -> None:
        """Prepare the weights of one layer; collective over all ranks.

        The model's own weights stay: paths of other kinds may read them.

        Raises:
            ConfigError: on every rank alike, where the kernel cannot compute these experts.
        """
        refuse_experts(layer, self._kernels.quantisation)
        self._kernels.adopt(layer, self._capacity)
        self._adopted.append(layer.index)
        if self._kernels.quantisation == "fp8" and layer.index not in self._bounds:
            scales = self._kernels.scales[layer.index]
            so_far = self.held.quantisation_scales
            self.held = msgspec.structs.replace(self.held, quantisation_scales=so_far + scales)
            self._bounds[layer.index] = FP8_MAX * scales[0]

    def prepare(self, group: HostGroup | None) -> None:
        """Build and compile the kernels of the layers that have none; see `MegaKernels.prepare`."""
        self._kernels.prepare(self._adopted, self._capacity, group)
        self.held = msgspec.structs.replace(
            self.held,
            workspace_bytes=self._kernels.workspace_bytes(self._capacity),
            tuning=self._kernels.settings(self._capacity),
        )

    def run(
        self,
        layer: MoeLayer,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
    ) -> torch.Tensor:
        """`[T, H]` rows of this rank, `[T, K]` global expert ids and weights -> `[T, H]`; collective over all ranks.

        Raises:
            GeometryError: before the kernel, when the step does not fit the capacity or announces other rows.
        """
        check_rows(x_TH, expert_ids_TK, geometry, self._rank, self._capacity)
        if not self._collectives.issue("mega_moe", "ep", x_TH):
            return x_TH.new_zeros(x_TH.shape)
        import torch
        from flashinfer.moe_ep import MoEEpTensors

        bound = self._bounds.get(layer.index)
        if bound is not None:
            # The cast to fp8 does not saturate in every PyTorch: beyond the largest code it may give NaN.
            x_TH = x_TH.clamp(-bound, bound)
        tensors = MoEEpTensors(
            hidden_states=x_TH.contiguous(),
            topk_ids=expert_ids_TK.to(torch.int64).clamp(min=INVALID_EXPERT_ID).contiguous(),
            topk_weights=expert_weights_TK.float().contiguous(),
        )
        return self._kernels.run(layer.index, self._capacity, tensors)


def refuse_experts(layer: MoeLayer, quantisation: QuantisationKind) -> None:
    """Refuse experts that the SM90 mega kernel does not compute, with the reason.

    Raises:
        ConfigError: what `refuse_unsupported` finds, or widths that are no multiples of what the kernel takes.
    """
    refuse_unsupported(layer, "dispatch='mega'", "dispatch='flashinfer' or 'allgather'")
    shape = layer.shape
    problem = width_problem(shape.hidden_size, shape.intermediate_size, _MULTIPLES[quantisation], quantisation)
    if problem is not None:
        other = "dispatch='flashinfer' or 'allgather'" if quantisation == "none" else "quantisation='none'"
        raise ConfigError(f"dispatch='mega' cannot run {layer.name}: {problem}; use {other}")


def copy_bytes(layers: Sequence[MoeLayer], quantisation: QuantisationKind) -> int:
    """Bytes of the weights of these layers in the mega kernel's layout, as far as they are a copy.

    In bfloat16 the second projection is the model's own tensor seen the other way round; in fp8 both are new, a byte
    a number.
    """
    if quantisation == "none":
        return sum(layer.weights.stored[GATE_UP].nbytes for layer in layers)
    return sum(weights.numel() for layer in layers for weights in layer.weights.stored.values())
