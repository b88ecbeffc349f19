"""Experts in their checkpoint's bytes by humming's grouped GEMMs: rows in bfloat16, weights expanded in registers.

Six launches: sort, rows in the order of their pairs, gate and up, what is between, down, weighted sum per row. Extents
come from offsets on the device, so slots without a pair cost next to nothing and nothing is read back. Which tiles a
step takes follows from its rows alone, the same on every rank.

Triton and humming are imported with this module: only a rank that uses it imports it.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from humming.config import LayerConfig

from ...budgets.moe_shape import Gating, MoeShape
from ...dispatchers.contract import Dispatched
from ...errors import ConfigError, GeometryError
from ...moe_layer import MoeLayer
from ...probe import HostGroup, require_equal
from ..expert_weights import DOWN, GATE_UP
from ..pairs.routing_kernels import sort_pairs, weighted_sum
from .kernels import Gemm, intervals, layer_config
from .routing import gate_rows, gather_rows
from .sizes import NUM_LOCKS, HummingBudget, expected_pairs, gemm_sizes
from .way import shape_problem
from .weights import prepared, whole_factors

# The most rows are run in `prepare`, and few: Triton compiles for both.
_RUN_FIRST = (1, 64)


@dataclass(frozen=True)
class Held:
    """What is kept for a layer.

    Attributes:
        shape: of it, with `gating`, which its shape has.
        num_local: experts of this rank.
        key: of its shape, by which kernels are kept.
        weights: of both projections, by name; see `weights.prepared`.
        factors_E3: see `weights.whole_factors`; `None` where the coding has none.
    """

    shape: MoeShape
    gating: Gating
    num_local: int
    key: str
    weights: dict[str, dict[str, torch.Tensor]]
    factors_E3: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        tensors = [one for part in self.weights.values() for one in part.values()]
        return sum(one.nbytes for one in [*tensors, *([] if self.factors_E3 is None else [self.factors_E3])])


class HummingExperts:
    """Keeps the contract of `dispatch.experts.backend` in bfloat16.

    Args:
        budget: sizes of the buffers, equal on every rank.
        device: this rank's GPU.
    """

    name = "humming grouped GEMMs, weights as stored"

    def __init__(self, budget: HummingBudget, device: torch.device):
        self.budget = budget
        self.tuning = ""
        self._device = device
        self._layers: dict[int, Held] = {}
        self._configs: dict[str, dict[str, LayerConfig]] = {}
        self._gemms: dict[str, dict[str, Gemm]] = {}
        self._seen: set[tuple[object, ...]] = set()
        pairs = budget.pairs
        # Graphs write these in inference mode; a tensor made inside it could not be written outside.
        with torch.inference_mode(False):
            self._offsets = torch.zeros(pairs.num_local + 1, dtype=torch.int32, device=device)
            self._source_row = torch.zeros(pairs.num_pairs, dtype=torch.int32, device=device)
            self._position = torch.zeros(pairs.num_slots, dtype=torch.int32, device=device)
            self._locks = torch.zeros(NUM_LOCKS, dtype=torch.int32, device=device)
            self._rows = torch.zeros(pairs.output_elements, dtype=torch.bfloat16, device=device)
            self._gate_up = torch.zeros(budget.gate_up_elements, dtype=torch.bfloat16, device=device)
            self._hidden = torch.zeros(pairs.hidden_elements, dtype=torch.bfloat16, device=device)

    @property
    def _most_rows(self) -> int:
        return self.budget.pairs.num_rows

    @property
    def num_bytes(self) -> int:
        routing = (self._offsets, self._source_row, self._position, self._locks)
        return sum(buffer.nbytes for buffer in (*routing, self._rows, self._gate_up, self._hidden))

    def adopt(self, layer: MoeLayer) -> None:
        """Bring a layer's weights into the order of the kernels, once; kept ones are read and left."""
        if layer.index in self._layers:
            return
        coding, gating = layer.weights.coding, layer.shape.gating
        if coding is None:
            raise ConfigError(f"experts='humming' reads weights as they are stored, {layer.name} has expanded ones")
        problem = shape_problem(layer.shape, coding)
        if problem is not None or gating is None:
            raise ConfigError(f"experts='humming' cannot run {layer.name}: {problem}; set stored_weights to 'expand'")
        sizes = gemm_sizes(layer.shape, coding)
        key = f"{layer.shape.text}, {layer.num_local} here, {coding.format}"
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(self._device):
            configs = {
                name: layer_config(size, coding, layer.num_local, gating.has_bias, self._device)
                for name, size in sizes.items()
            }
            self._configs.setdefault(key, configs)
            weights = {name: prepared(layer.weights, name, sizes[name], coding, configs[name]) for name in sizes}
            factors = whole_factors(layer.weights) if coding.has_whole else None
        self._layers[layer.index] = Held(layer.shape, gating, layer.num_local, key, weights, factors)

    def _compiled(self, held: Held) -> dict[str, Gemm]:
        configs, max_pairs = self._configs[held.key], expected_pairs(held.shape, held.num_local, self._most_rows)

        def compiled(name: str) -> Gemm:
            with torch.cuda.device(self._device):
                return Gemm(configs[name], intervals(configs[name], max_pairs, self._device), self._device)

        with ThreadPoolExecutor(len(configs)) as threads:
            return dict(zip(configs, threads.map(compiled, configs), strict=True))

    def prepare(self, group: HostGroup | None) -> None:
        """Compile for all adopted layers, see that ranks have the same tiles, and run each shape once."""
        by_key = {held.key: held for held in self._layers.values()}
        for key, held in by_key.items():
            if key not in self._gemms:
                self._gemms[key] = self._compiled(held)
        tuning = "; ".join(
            f"{key}: {', '.join(f'{name} {gemm}' for name, gemm in self._gemms[key].items())}" for key in sorted(by_key)
        )
        if tuning == self.tuning:  # paths over several dispatchers share one backend, and each prepares it
            return
        if group is not None:
            require_equal(group, "tiles of experts='humming'", tuning)
        for held in by_key.values():
            for num_rows in sorted({min(rows, self._most_rows) for rows in (*_RUN_FIRST, self._most_rows)}):
                self._run_on_zeros(held, num_rows)
        torch.cuda.synchronize(self._device)
        self.tuning = tuning  # read in every step

    def _run_on_zeros(self, held: Held, num_rows: int) -> None:
        shape = held.shape
        x_RH = torch.zeros(num_rows, shape.hidden_size, dtype=torch.bfloat16, device=self._device)
        slots = torch.arange(num_rows * shape.top_k, dtype=torch.int32, device=self._device)
        ids_RK = (slots % shape.num_experts).view(num_rows, shape.top_k)
        weights_RK = torch.ones(num_rows, shape.top_k, dtype=getattr(torch, shape.weights_dtype), device=self._device)
        self._compute(held, x_RH, ids_RK, weights_RK, 0, torch.empty_like(x_RH))

    def run(self, layer: MoeLayer, dispatched: Dispatched) -> torch.Tensor:
        """See `ExpertBackend.run`.

        Raises:
            GeometryError: more rows than the buffers hold, or a recording that no run with as many rows preceded.
        """
        held = self._layers[layer.index]
        x_RH, y_RH = dispatched.x_RH, dispatched.combine_input_RH
        y_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format) if y_RH is None else y_RH
        if x_RH.shape[0] == 0:
            return y_RH
        self._check(held, dispatched)
        ids_RK, weights_RK = dispatched.expert_ids_RK, dispatched.expert_weights_RK
        self._compute(held, x_RH, ids_RK, weights_RK, dispatched.first_expert, y_RH)
        return y_RH

    def _compute(
        self,
        held: Held,
        x_RH: torch.Tensor,
        ids_RK: torch.Tensor,
        weights_RK: torch.Tensor,
        first_expert: int,
        y_RH: torch.Tensor,
    ) -> None:
        shape, num_rows, gemms = held.shape, x_RH.shape[0], self._gemms[held.key]
        num_pairs = shape.max_pairs(num_rows, self.budget.pairs.ep_size)
        num_expected = expected_pairs(shape, held.num_local, num_rows)
        hidden_size, width = shape.hidden_size, shape.intermediate_size
        offsets, source_row_P = self._offsets[: held.num_local + 1], self._source_row[:num_pairs]
        position_RK = self._position[: num_rows * shape.top_k]
        rows_PH = self._rows[: num_pairs * hidden_size].view(num_pairs, hidden_size)
        gate_up_PN = self._gate_up[: num_pairs * 2 * width].view(num_pairs, 2 * width)
        hidden_PI = self._hidden[: num_pairs * width].view(num_pairs, width)
        sort_pairs(ids_RK, first_expert, held.num_local, offsets, source_row_P, position_RK)
        gather_rows(x_RH, source_row_P, offsets, rows_PH)
        gemms[GATE_UP].run(rows_PH, held.weights[GATE_UP], offsets, self._locks, num_expected, gate_up_PN)
        gate_rows(held.gating, gate_up_PN, offsets, held.factors_E3, hidden_PI)
        gemms[DOWN].run(hidden_PI, held.weights[DOWN], offsets, self._locks, num_expected, rows_PH)
        weighted_sum(rows_PH, ids_RK, weights_RK, position_RK, first_expert, held.num_local, y_RH)

    def _check(self, held: Held, dispatched: Dispatched) -> None:
        num_rows, most = dispatched.x_RH.shape[0], self._most_rows
        if num_rows > most:
            raise GeometryError(
                f"{num_rows} rows reached the experts, whose buffers were made for {most}: raise "
                "limits.max_dispatch_tokens_per_rank"
            )
        seen = (held.key, num_rows, dispatched.x_RH.stride(0), dispatched.expert_ids_RK.dtype)
        if seen in self._seen:
            return
        if torch.cuda.is_current_stream_capturing():
            raise GeometryError(
                f"a step with {num_rows} rows at the experts is recorded before it was run once: its kernels would be "
                "compiled inside the recording"
            )
        self._seen.add(seen)

    def resident_bytes(self) -> int:
        """Of the weights of all adopted layers."""
        return sum(held.num_bytes for held in self._layers.values())
