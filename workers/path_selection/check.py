"""What a path computes, held to the plain experts before any step depends on it.

Kernels are compiled, tuned and configured for shapes that nobody may have tried them on, and one that computes
something else says nothing about it: it is wrong tokens. So a path that has just been built computes some rows of a
layer, and so do the plain experts over plain collectives in the model's own dtype. A path that is further from them
than its number format explains is refused on every rank, with both numbers.
"""

import logging

import torch

from ...dispatch.budgets.geometry import StepGeometry
from ...dispatch.budgets.layout import Layout
from ...dispatch.budgets.limits import QuantisationKind
from ...dispatch.dispatchers.contract import INVALID_EXPERT_ID
from ...dispatch.errors import ConfigError
from ...dispatch.expert_path import ExpertPath
from ...dispatch.moe_layer import MoeLayer
from ...dispatch.probe import HostGroup
from .sample_rows import SampleRows, random_rows

logger = logging.getLogger(__name__)

# Relative errors of a layer's output, far above what each format was seen to cost (0.005; 0.07 in fp8; about 0.2 in
# NVFP4) and far below what a wrong row, weight or scale makes of it.
LARGEST_ERROR: dict[QuantisationKind, float] = {"none": 0.03, "fp8": 0.2, "fp8_blockwise": 0.2, "nvfp4": 0.5}
# One row may be off by more than all together, which one wrong row of many hardly moves.
_OF_ONE_ROW = 1.8
# One row in so many carries no token, and is sent to no expert.
_IDLE_EVERY = 8


class PathCheck:
    """Checks the paths of one rank; all ranks check the same ones in the same order.

    Args:
        layout: the arrangement of ranks, equal on every rank.
        group: all ranks.
        reference: the plain experts over plain collectives.
        num_tokens: of the largest batch, equal on every rank; the reference takes it.
        quantisation: of the paths that are checked, equal on every rank.
        device: of the layers.

    Attributes:
        real_rows: of some layers, by the index of the layer, what the model itself brings to them; other layers are
            checked with random rows. For the same layers on every rank, a batch of `num_tokens` each.
    """

    def __init__(
        self,
        layout: Layout,
        group: HostGroup,
        reference: ExpertPath,
        num_tokens: int,
        quantisation: QuantisationKind,
        device: torch.device,
    ):
        self._layout = layout
        self._group = group
        self._reference = reference
        self._num_tokens = num_tokens
        self._bound = LARGEST_ERROR[quantisation]
        self.real_rows: dict[int, SampleRows] = {}
        self._device = device

    @torch.inference_mode()
    def require_right(self, path: ExpertPath, layer: MoeLayer, label: str) -> None:
        """Compute rows of this layer, which the path has adopted, both ways; collective over all ranks.

        The first DP rank brings the largest batch that the path holds, the others fewer tokens, as in an uneven step.
        Then each brings one token, since kernels take other tiles and other launches for few rows.

        Args:
            path: that is checked.
            layer: of which it computes rows.
            label: of the path, for messages.

        Raises:
            ConfigError: on every rank alike: on some rank the path is too far from the plain experts.
            PeerGaveUp: another rank failed on the way.
        """
        largest = min(path.held.capacity, self._num_tokens)
        uneven = tuple(largest if rank == 0 else 1 + 37 * rank % largest for rank in range(self._layout.dp_size))
        for counts in dict.fromkeys((uneven, (1,) * self._layout.dp_size)):
            self._require_right(path, layer, label, counts)

    def _require_right(self, path: ExpertPath, layer: MoeLayer, label: str, counts: tuple[int, ...]) -> None:
        rows = self._rows_of(layer, counts)
        self._group.meet()  # a rank that has failed so far never comes to what follows
        expected_TH, found_TH = (self._computed(one, layer, rows, counts) for one in (self._reference, path))
        carries_token_T = rows.expert_ids_TK[:, 0] != INVALID_EXPERT_ID
        own = relative_errors(found_TH[carries_token_T], expected_TH[carries_token_T])
        errors = self._group.gather_met(own, tuple[float, float])
        for index, (what, bound) in enumerate((("", self._bound), (" in one row", _OF_ONE_ROW * self._bound))):
            worst = max(range(len(errors)), key=lambda rank: errors[rank][index])
            error = errors[worst][index]
            logger.info("%s, %s: relative error%s %.2g to the plain experts", label, layer.name, what, error)
            if error > bound:
                raise ConfigError(
                    f"on rank {worst} it computes {layer.name} with a relative error{what} of {error:.2g} to the plain "
                    f"experts, {bound:g} at most can be rounding"
                )

    def _computed(self, path: ExpertPath, layer: MoeLayer, rows: SampleRows, counts: tuple[int, ...]) -> torch.Tensor:
        """Of its own, since a path may return a view of what its next step writes."""
        geometry = StepGeometry.eager(self._layout, counts, capacity=path.held.capacity)
        return path.run(layer, *rows, geometry).to(torch.float32, copy=True)

    def _rows_of(self, layer: MoeLayer, counts: tuple[int, ...]) -> SampleRows:
        """This rank's part of batches of these many tokens."""
        geometry = StepGeometry.eager(self._layout, counts, capacity=self._reference.held.capacity)
        num_rows = geometry.num_rows_per_rank[self._group.rank]
        real = self.real_rows.get(layer.index)
        rows = random_rows(layer, num_rows, self._group.rank, self._device) if real is None else real.first(num_rows)
        ids_TK = rows.expert_ids_TK.clone()
        ids_TK[_IDLE_EVERY - 1 :: _IDLE_EVERY] = INVALID_EXPERT_ID
        return rows._replace(expert_ids_TK=ids_TK)


def relative_errors(found_TH: torch.Tensor, expected_TH: torch.Tensor) -> tuple[float, float]:
    """Of all rows together, and of the row that is furthest off; infinite where anything is no number.

    A row smaller than they are on average is measured by the average: what is left of a sum that cancels is rounding.

    Args:
        found_TH, expected_TH: float32.
    """
    if found_TH.shape[0] == 0:
        return 0.0, 0.0
    off_T, size_T = (rows_TH.double().norm(dim=1) for rows_TH in (found_TH - expected_TH, expected_TH))
    average = size_T.square().mean().sqrt()
    errors = torch.stack([off_T.square().mean().sqrt() / average, (off_T / size_T.clamp(min=average)).amax()])
    if not bool(off_T.any()):
        return 0.0, 0.0
    whole, of_one = errors.nan_to_num(nan=float("inf"), posinf=float("inf")).tolist()
    return whole, of_one
