"""Scales of the activations for per-tensor fp8, from what the model itself computes.

A rank decodes what its peers sent with its own copy of these scales, so they are one set of numbers for all: every rank
runs the model on random tokens in the model's own dtype, and the largest magnitudes over all ranks decide. e4m3 is a
floating-point format, so room above the largest value seen costs no precision to speak of.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ...dispatch.budgets.geometry import StepGeometry
from ...dispatch.errors import ConfigError
from ...dispatch.expert_path import ExpertPath
from ...dispatch.experts.expert_weights import GATE_UP
from ...dispatch.moe import MoeExchange
from ...dispatch.moe_layer import MoeLayer, one_of_each_shape
from ...dispatch.paths.mega import FP8_MAX
from ...dispatch.probe import HostGroup
from ..attention.kv_cache import KvCache
from ..attention.paged import SdpaAttention
from ..model.spec import ModelSpec
from ..model.target import TargetModel
from ..scheduling.inputs import StepInputs
from .sample_rows import SampleRows

CALIBRATION_TOKENS = 256
_BLOCK_SIZE = 16
_HEADROOM = 4.0
_SMALLEST_SCALE = 1e-6


class Calibration(NamedTuple):
    """What the model computes on random tokens.

    Attributes:
        scales: of the inputs of both projections of each layer, equal on every rank.
        rows: this rank's part of the batch as it reached the first layer of each shape, by its index.
    """

    scales: list[tuple[float, float]]
    rows: dict[int, SampleRows]


class InputRecorder:
    """A path that notes what reaches each layer's experts, and the largest magnitudes at both projections.

    Args:
        path: that computes.
        kept: indices of the layers whose rows are kept.
    """

    def __init__(self, path: ExpertPath, kept: Collection[int]):
        self.held = path.held
        self.largest: dict[int, torch.Tensor] = {}
        self.rows: dict[int, SampleRows] = {}
        self._path = path
        self._kept = kept

    def run(
        self,
        layer: MoeLayer,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
    ) -> torch.Tensor:
        local_TK = expert_ids_TK - layer.first_expert
        both = torch.stack([x_TH.abs().amax(), _largest_inner(layer, x_TH, local_TK, expert_weights_TK)])
        seen = self.largest.setdefault(layer.index, torch.zeros_like(both))
        torch.maximum(seen, both, out=seen)
        if layer.index in self._kept:
            self.rows[layer.index] = SampleRows(x_TH.clone(), expert_ids_TK.clone(), expert_weights_TK.clone())
        return self._path.run(layer, x_TH, expert_ids_TK, expert_weights_TK, geometry)


def _largest_inner(
    layer: MoeLayer, x_TH: torch.Tensor, local_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """The largest input of the second projection, over the rows of this rank that one of its own experts computes.

    The kernel applies the routing weight before that projection, so it counts where it is above 1.
    """
    largest, gate_up_EFH = x_TH.new_zeros(()), layer.weights.tensor(GATE_UP)
    for expert in range(layer.num_local):
        row, slot = (local_TK == expert).nonzero(as_tuple=True)
        if row.numel():
            gate, up = (x_TH[row] @ gate_up_EFH[expert].T).chunk(2, dim=-1)
            weight = weights_TK[row, slot].clamp(min=1).unsqueeze(1).to(gate.dtype)
            largest = torch.maximum(largest, (torch.nn.functional.silu(gate) * up * weight).abs().amax())
    return largest


def num_calibrating(spec: ModelSpec) -> int:
    """Tokens of the batch that each DP rank runs."""
    return min(CALIBRATION_TOKENS, spec.context_length)


@torch.inference_mode()
def calibrate(
    spec: ModelSpec,
    model: PreTrainedModel,
    exchange: MoeExchange,
    group: HostGroup,
    device: torch.device,
) -> Calibration:
    """Run the model once on random tokens; collective over all ranks.

    Args:
        spec: the model.
        model: loaded, with its experts bound to the exchange.
        exchange: with the layers, and a path that computes in the model's dtype and takes `CALIBRATION_TOKENS` rows.
        group: all ranks.
        device: of the model.

    Raises:
        ConfigError: on every rank alike, where a layer's experts get or make numbers that are not finite.
    """
    num_tokens = num_calibrating(spec)
    cache = KvCache(spec.attention, 2 + num_tokens // _BLOCK_SIZE, _BLOCK_SIZE, getattr(torch, spec.dtype), device)
    target = TargetModel(model, exchange, cache, SdpaAttention(cache, device), device)
    path, layers = exchange.path, exchange.layers
    kept = [layer.index for layer in one_of_each_shape(layers).values()]
    recorder = InputRecorder(path, kept)
    exchange.path = recorder
    try:
        counts = (num_tokens,) * exchange.layout.dp_size
        geometry = StepGeometry.eager(exchange.layout, counts, capacity=path.held.capacity)
        target.forward(_random_prompt(spec, num_tokens, exchange.layout.dp_rank(exchange.rank)), geometry)
    finally:
        exchange.path = path
    seen = torch.stack([recorder.largest[layer.index].float().cpu() for layer in layers])
    largest = group.largest(seen.nan_to_num(nan=float("inf")))  # which of a number and NaN is larger is anybody's guess
    for layer, is_finite in zip(layers, largest.isfinite().all(dim=1).tolist(), strict=True):
        if not is_finite:
            raise ConfigError(
                f"quantisation='fp8' has no scale for {layer.name}: on random tokens its experts get or make numbers "
                f"that are not finite in {spec.dtype}; set quantisation to 'none', or look at the weights"
            )
    scales = (largest * _HEADROOM / FP8_MAX).clamp(min=_SMALLEST_SCALE)
    pairs = [(float(first), float(second)) for first, second in scales.to(torch.float32).tolist()]
    return Calibration(pairs, recorder.rows)


def _random_prompt(spec: ModelSpec, num_tokens: int, dp_rank: int) -> StepInputs:
    """One request of random tokens; the same on ranks that share a batch."""
    generator = torch.Generator().manual_seed(dp_rank)
    position_T = torch.arange(num_tokens)
    blocks = torch.arange(1, 2 + (num_tokens - 1) // _BLOCK_SIZE)
    return StepInputs(
        input_ids=torch.randint(0, spec.vocab_size, (num_tokens,), generator=generator),
        positions=position_T,
        slots=blocks[position_T // _BLOCK_SIZE] * _BLOCK_SIZE + position_T % _BLOCK_SIZE,
        due_rows=torch.tensor([num_tokens - 1]),
        query_starts=torch.tensor([0]),
        query_lens=torch.tensor([num_tokens]),
        context_lens=torch.tensor([0]),
        block_tables=blocks.unsqueeze(0),
        num_valid_tokens=torch.tensor([num_tokens], dtype=torch.int32),
    )
