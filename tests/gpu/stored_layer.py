"""One MoE layer with random weights as checkpoints store them, written on the device, and what it computes in float32.

What weights stand for is written down here from the formats' definitions; nothing of the product expands them.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from expert_pool.dispatch.budgets.moe_shape import Gating, MoeShape
from expert_pool.dispatch.budgets.stored_coding import StoredCoding
from expert_pool.dispatch.dispatchers.contract import Dispatched
from expert_pool.dispatch.experts.expert_weights import ExpertWeights
from expert_pool.dispatch.moe_layer import MoeLayer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from layers import no_forward

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Parts = dict[str, torch.Tensor]
Expanded = Callable[[int, int], torch.Tensor]
"""Of an expert and a piece: `[N, K]` float32."""


SILU = Gating()


@dataclass(frozen=True)
class Geometry:
    """Of a layer; this rank has the first `local` of its experts."""

    hidden: int
    intermediate: int
    experts: int
    local: int
    top_k: int
    gating: Gating = SILU


GEOMETRIES = {
    "Q": Geometry(2048, 768, 128, 64, 8),
    "D": Geometry(7168, 2048, 64, 32, 8),
    "gpt-oss": Geometry(2880, 2880, 32, 32, 4, Gating(1.702, 1.0, 7.0, is_interleaved=True, has_bias=True)),
    # No multiples of 128, as columns that are added and rows that are added meet them.
    "odd": Geometry(576, 192, 16, 8, 4),
    "tiny": Geometry(128, 96, 8, 4, 2),
    "tiny gpt-oss": Geometry(96, 64, 4, 4, 2, Gating(1.702, 1.0, 7.0, is_interleaved=True, has_bias=True)),
}
CODINGS = {
    "block_fp8": StoredCoding("block_fp8", "e4m3", (128, 128), "float32"),
    "mxfp4": StoredCoding("mxfp4", "e2m1", (1, 32), "e8m0"),
    "nvfp4": StoredCoding("nvfp4", "e2m1", (1, 16), "e4m3", has_whole=True),
    "compressed_fp8": StoredCoding("compressed_fp8", "e4m3", (1, 0), "bfloat16"),
    "compressed_int": StoredCoding("compressed_int", "int4", (1, 32), "bfloat16"),
}


class Writer:
    """Random weights of one projection: `[E, P]` pieces of `[N, K]`."""

    def __init__(self, coding: StoredCoding, generator: torch.Generator):
        self.coding = coding
        self.generator = generator
        self.device = generator.device

    def write(self, num_experts: int, pieces: int, rows: int, columns: int) -> tuple[Parts, Expanded]:
        shape = num_experts, pieces, rows, columns
        kinds = {"e4m3": self._e4m3, "e2m1": self._e2m1, "int4": self._int4}
        return kinds[self.coding.codes](shape)

    def _randint(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def _uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) * (high - low) + low

    def _e4m3(self, shape: tuple[int, int, int, int]) -> tuple[Parts, Expanded]:
        num_experts, pieces, rows, columns = shape
        block_rows, block_columns = self.coding.block[0] or rows, self.coding.block[1] or columns
        blocks = -(-rows // block_rows), -(-columns // block_columns)
        # Codes of unit variance times 64, so that the largest fit.
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        for expert in range(num_experts):
            normal = torch.randn(shape[1:], generator=self.generator, device=self.device)
            codes[expert] = (normal * 64).to(torch.float8_e4m3fn)
        scales = self._uniform(0.5, 1.5, num_experts, pieces, *blocks) * columns**-0.5 / 64
        scales = scales.to(getattr(torch, self.coding.scales))

        def expanded(expert: int, piece: int) -> torch.Tensor:
            factors = scales[expert, piece].float()
            factors = factors.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_columns, 1)[:, :columns]
            return codes[expert, piece].float() * factors

        return {"codes": codes, "scales": scales}, expanded

    def _e2m1(self, shape: tuple[int, int, int, int]) -> tuple[Parts, Expanded]:
        num_experts, pieces, rows, columns = shape
        packed = self._randint(0, 256, num_experts, pieces, rows, columns // 2)
        table = torch.tensor(E2M1, device=self.device)
        group = self.coding.block[1]
        groups = num_experts, pieces, rows, columns // group
        size = columns**-0.5 / 3
        parts = {"codes": packed}
        if self.coding.scales == "e8m0":
            middle = round(127 + torch.tensor(size).log2().item())
            parts["scales"] = self._randint(middle - 1, middle + 2, *groups)
            factors = torch.exp2(parts["scales"].float() - 127)
        else:
            parts["scales"] = self._uniform(0.5, 1.5, *groups).to(torch.float8_e4m3fn)
            parts["scale"] = self._uniform(0.5, 1.5, num_experts, pieces) * size
            factors = parts["scales"].float() * parts["scale"][..., None, None]

        def expanded(expert: int, piece: int) -> torch.Tensor:
            both = torch.stack((packed[expert, piece] & 15, packed[expert, piece] >> 4), -1).flatten(-2)
            return table[both.long()] * factors[expert, piece].repeat_interleave(group, 1)

        return parts, expanded

    def _int4(self, shape: tuple[int, int, int, int]) -> tuple[Parts, Expanded]:
        num_experts, pieces, rows, columns = shape
        group = self.coding.block[1]
        words = self._randint(-(2**31), 2**31, num_experts, pieces, rows, columns // 8, dtype=torch.int32)
        scales = self._uniform(0.5, 1.5, num_experts, pieces, rows, columns // group) * columns**-0.5 / 5
        scales = scales.to(torch.bfloat16)
        shifts = torch.arange(0, 32, 4, device=self.device, dtype=torch.int32)

        def expanded(expert: int, piece: int) -> torch.Tensor:
            integers = (words[expert, piece].unsqueeze(-1) >> shifts & 15).flatten(-2) - 8
            return integers.float() * scales[expert, piece].float().repeat_interleave(group, 1)

        return {"codes": words, "scales": scales}, expanded


@dataclass
class Rows:
    """Rows that reached this rank, and their experts over all ranks."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def first(self, num_rows: int) -> "Rows":
        return Rows(self.x[:num_rows], self.ids[:num_rows].contiguous(), self.weights[:num_rows].contiguous())

    def dispatched(self) -> Dispatched:
        return Dispatched(self.x, self.ids, self.weights, None, None)  # type: ignore[arg-type]


@dataclass
class StoredLayer:
    """A layer in a format, with what its experts stand for."""

    geometry: Geometry
    coding: StoredCoding
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    stored: Parts = field(init=False)
    layer: MoeLayer = field(init=False)

    def __post_init__(self) -> None:
        size, generator = self.geometry, torch.Generator(self.device).manual_seed(7)
        writer = Writer(self.coding, generator)
        # Where gate and up take turns, files have them as one.
        self._pieces = 1 if size.gating.is_interleaved else 2
        rows = 2 * size.intermediate // self._pieces
        gate_up, self._gate_up = writer.write(size.local, self._pieces, rows, size.hidden)
        down, self._down = writer.write(size.local, 1, size.hidden, size.intermediate)
        self.stored = {f"gate_up.{name}": part for name, part in gate_up.items()}
        self.stored |= {f"down.{name}": part for name, part in down.items()}
        self.stored_bytes = sum(part.nbytes for part in self.stored.values())
        if size.gating.has_bias:
            for name, width in (("gate_up", 2 * size.intermediate), ("down", size.hidden)):
                bias = torch.randn(size.local, width, generator=generator, device=self.device)
                self.stored[f"{name}.bias"] = (bias * 0.5).to(torch.bfloat16)
        shape = MoeShape(
            "the layer", size.experts, size.hidden, size.top_k, "float32", size.intermediate, (), size.gating
        )
        weights = ExpertWeights("the layer", self.coding.format, self.stored, self.coding)
        self.layer = MoeLayer(0, shape, self.dtype, size.local, 0, weights, no_forward)

    def rows(self, num_rows: int, seed: int) -> Rows:
        size = self.geometry
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(num_rows, size.hidden, generator=generator, device=self.device).to(self.dtype)
        scores = torch.rand(num_rows, size.experts, generator=generator, device=self.device)
        weights, ids = scores.topk(size.top_k, dim=1)
        return Rows(x, ids.to(torch.int32), weights / weights.sum(dim=1, keepdim=True))

    def in_float32(self, rows: Rows) -> torch.Tensor:
        """`[R, H]`: the weighted sum over this rank's experts, in float32 on the stored weights."""
        size, gating = self.geometry, self.geometry.gating
        y = torch.zeros(rows.x.shape, dtype=torch.float32, device=self.device)
        for expert in range(size.local):
            row, slot = (rows.ids == expert).nonzero(as_tuple=True)
            if not len(row):
                continue
            gate_up = torch.cat(
                [rows.x[row].float() @ self._gate_up(expert, piece).T for piece in range(self._pieces)], -1
            )
            if gating.has_bias:
                gate_up += self.stored["gate_up.bias"][expert].float()
            gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if gating.is_interleaved else gate_up.chunk(2, -1)
            if gating.limit is not None:
                gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
            hidden = (up + gating.plus) * gate * torch.sigmoid(gating.alpha * gate)
            out = hidden @ self._down(expert, 0).T
            if gating.has_bias:
                out += self.stored["down.bias"][expert].float()
            y.index_add_(0, row, out * rows.weights[row, slot].unsqueeze(1))
        return y

    def hit_bytes(self, rows: Rows) -> float:
        """Stored bytes of this rank's experts that rows go to."""
        hit = rows.ids[rows.ids < self.geometry.local].unique().numel()
        return hit * self.stored_bytes / self.geometry.local
